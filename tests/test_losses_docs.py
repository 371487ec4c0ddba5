"""The page on losses: its code runs, and it names every loss."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from softs_lightning import losses

PAGE = (Path(__file__).parent.parent / ".docs" / "losses.md").read_text(encoding="utf-8")


def test_its_code_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert len(blocks) == 4
    source = tmp_path / "losses_page.py"
    source.write_text("\n".join(blocks), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("losses_page", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "losses_page", module)
    spec.loader.exec_module(module)
    assert "padding is not read" in capsys.readouterr().out


def test_it_places_every_loss() -> None:
    table = PAGE.partition("## Which one")[2].partition("```")[0]
    classes = {
        name
        for name in losses.__all__
        if isinstance(found := getattr(losses, name), type)
        and issubclass(found, losses.DistillationLoss)
        and found is not losses.DistillationLoss
    }
    assert set(re.findall(r"`([A-Z]\w+)`", table)) == classes
