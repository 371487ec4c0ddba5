"""What the page on the store shows is what works."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from types import ModuleType

import pytest

from softs_lightning.store.commands import HELP
from softs_lightning.store.encoding import encoding

PAGE = (Path(__file__).parent.parent / ".docs" / "store.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_the_examples_run_one_after_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "\n".join(re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE))
    assert source.count("assert ") >= 8
    monkeypatch.chdir(tmp_path)
    (tmp_path / "store_page.py").write_text(source, encoding="utf-8")
    module = ModuleType("store_page")  # a student's class is looked up in its module
    module.__file__ = str(tmp_path / "store_page.py")
    monkeypatch.setitem(sys.modules, "store_page", module)
    exec(compile(source, module.__file__, "exec"), module.__dict__)


def test_every_encoding_of_the_table_is_one() -> None:
    table = PAGE.partition("## Formats")[2].partition("\n\n`encoding=")[0]
    found = [
        name
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for name in re.findall(r"`([^`]+)`", row)
    ]
    assert len(found) == 7
    assert [encoding(name).name for name in found] == found


def test_every_command_of_the_page_is_one() -> None:
    lines = [
        line
        for block in re.findall(r"^```bash\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
        for line in block.splitlines()
    ]
    commands = [shlex.split(line, comments=True)[1:3] for line in lines if line.startswith("softs-distill")]
    assert len(commands) == 7
    for first, second in commands:
        assert f"softs-distill {first}" in HELP
        assert first == "precompute" or f"softs-distill store {second} " in HELP
