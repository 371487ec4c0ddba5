"""What the README shows is what works."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

from softs_lightning import ProductSpec

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", README, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS[1:], ids=lambda block: block.split("\n", 1)[0])
def test_the_examples_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "readme_example.py"
    source.write_text(block, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("readme_example", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "readme_example", module)
    spec.loader.exec_module(module)


def test_the_first_example_is_about_ten_lines_and_compiles() -> None:
    assert len(BLOCKS[0].splitlines()) <= 14
    compile(BLOCKS[0], "README.md", "exec")


def test_every_product_id_in_the_table_is_understood() -> None:
    table = README.partition("## Naming activations")[2].partition("## What works")[0]
    found = [cell.replace("\\|", "|") for cell in re.findall(r"`((?:inputs|outputs|saved)\[[^`]*)`", table)]
    assert len(found) > 12
    for product_id in found:
        spec = ProductSpec.parse(product_id)
        assert len(spec) >= 1
        assert ProductSpec.parse(str(spec)) == spec


@pytest.mark.parametrize("name", ["run command", "test command"])
def test_the_commands_set_up_what_they_need(name: str) -> None:
    command = README.partition(f"<!-- {name} -->\n```bash\n")[2].partition("\n```")[0]
    assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -c .ci/constraints.txt")
    assert "\n" not in command
