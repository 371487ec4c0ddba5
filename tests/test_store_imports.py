"""What importing the store costs and does."""

from __future__ import annotations

import subprocess
import sys

import pytest

import softs_lightning.store


@pytest.mark.parametrize("module", ["softs_lightning.store", "softs_lightning.store.commands"])
def test_help_and_errors_need_no_torch(module: str) -> None:
    script = (
        f"import sys, {module}; sys.exit(any(m in sys.modules for m in ('torch', 'lightning', 'fsspec')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_every_public_name_is_there() -> None:
    for name in softs_lightning.store.__all__:
        assert getattr(softs_lightning.store, name).__name__ == name
    assert dir(softs_lightning.store) == sorted(softs_lightning.store.__all__)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        softs_lightning.store.Nothing  # noqa: B018
