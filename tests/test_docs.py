"""What the pages say is so. The examples in code cells run when the pages are built."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

import softs_lightning.conf
from softs_lightning.catalog import recipes, scales
from softs_lightning.config import check
from softs_lightning.report import Result
from tests.test_config import composed

ROOT = Path(__file__).parent.parent
PAGES = ROOT / ".docs"
MADE = {"results_tables.md"}  # by the build
PARTS = {"situations_table.md", *MADE}


def page(name: str) -> str:
    return (PAGES / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pages", PAGES / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def strings_of_the_package() -> str:
    """Every text in the code, with the values in f-strings left out."""
    found = []
    for file in sorted((ROOT / "softs_lightning").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
                found.append("".join(str(part) for part in parts))
    return "\n".join(found)


def test_every_message_in_the_table_of_errors_is_one_of_ours() -> None:
    quoted = re.findall(r"^\| `([^`]+)` \|", page("troubleshooting.md"), re.MULTILINE)
    assert len(quoted) >= 15
    ours = strings_of_the_package()
    assert [text for text in quoted if text not in ours] == []


def test_links_between_pages_lead_somewhere() -> None:
    for file in PAGES.glob("*.md"):
        for target in re.findall(r"\]\(([\w/]+\.md)", file.read_text(encoding="utf-8")):
            assert target not in MADE, f"{file.name} links to {target}, which a checkout does not have"
            assert (PAGES / target).is_file(), f"{file.name} links to {target}"


def test_every_page_is_in_the_contents() -> None:
    listed = set(re.findall(r"^([\w/]+)$", page("index.md"), re.MULTILINE))
    there = {file.stem for file in PAGES.glob("*.md") if file.name not in PARTS}
    assert there - {"index"} == listed - {"api/index"}


def test_what_pages_include_is_there_or_made_by_the_build() -> None:
    text = "".join(file.read_text(encoding="utf-8") for file in PAGES.glob("*.md"))
    included = set(re.findall(r"^```\{include\} (.+)$", text, re.MULTILINE))
    assert included == PARTS
    assert all((PAGES / name).is_file() for name in PARTS - MADE)
    builds = page("conf.py")
    assert all(f'(HERE / "{name}").write_text(' in builds for name in MADE)
    ignored = (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
    assert {line.removeprefix(".docs/") for line in ignored if line.startswith(".docs/")} == MADE


def test_every_module_of_the_api_pages_exists() -> None:
    named = [
        name
        for file in (PAGES / "api").glob("*.md")
        for name in re.findall(r"automodule:: ([\w.]+)", file.read_text(encoding="utf-8"))
    ]
    assert len(named) > 20
    assert all(importlib.util.find_spec(name) is not None for name in named)


def test_the_table_of_product_ids_is_the_readmes() -> None:
    def first_cells(text: str) -> list[str]:
        return re.findall(r"^\| (`(?:inputs|outputs|saved)\[.*?`) \|", text, re.MULTILINE)

    table = first_cells(page("product_id.md"))
    assert len(table) > 8
    assert table == first_cells((ROOT / "README.md").read_text(encoding="utf-8"))


def test_the_results_page_holds_what_the_runs_wrote(pages: ModuleType, tmp_path: Path) -> None:
    scores = [{"accuracy": value} for value in (80.0, 84.0, 95.0, 97.0)]
    node = {
        "recipe": "own",
        "measures": [{"name": "accuracy", "unit": "%", "lower": False}],
        "seeds": [0, 1],
        "teacher": {"accuracy": 99.0},
        "teacher_parameters": 200,
        "arms": [
            {"name": "alone", "scores": scores[:2], "parameters": 20, "stops": []},
            {"name": "distilled", "scores": scores[2:], "parameters": 20, "stops": []},
        ],
        "command": "softs-distill recipe=own",
    }
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "own.json").write_text(json.dumps(node))
    text = pages.results_tables(tmp_path)
    assert "## own\n\n```bash\nsofts-distill recipe=own\n```" in text
    found = Result.from_json(json.dumps(node))
    assert all(f"| {' | '.join(row)} |" in text for row in found.rows())
    assert next(found.verdicts()) in text
    assert "\n# own" not in text


def test_the_readmes_results_are_those_of_the_runs(pages: ModuleType) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    quoted = text.partition("<!-- results -->\n")[2].partition("\n<!-- end of results -->")[0]
    assert quoted == pages.summary(ROOT / "recipes")


def test_every_committed_result_makes_a_section(pages: ModuleType) -> None:
    text = pages.results_tables(ROOT / "recipes")
    for file in (ROOT / "recipes" / "results").glob("*.json"):
        assert f"## {file.stem}" in text.splitlines()


def _commands(name: str) -> list[list[str]]:
    blocks = re.findall(r"```bash\n(.*?)```", page(name), re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [words[1:] for words in lines if words[:1] == ["softs-distill"]]


def test_the_commands_on_recipes_compose() -> None:
    found = [
        [word for word in words if word != "explain"]
        for words in _commands("recipes.md")
        if any(word.startswith("recipe=") for word in words) and "--config-dir" not in words
    ]
    assert len(found) == 5
    for arguments in found:
        check(composed(*arguments))


def test_the_scales_on_recipes_are_those_that_there_are() -> None:
    named = set(re.findall(r"`recipe=([\w-]+) \+scale=([\w-]+)`", page("recipes.md")))
    there = {(recipe, scale) for recipe in recipes() for scale in scales(recipe)}
    assert named == {(recipe, scale) for recipe, scale in there if scale != "paper"}
    assert {recipe for recipe, scale in there if scale == "paper"} == set(recipes())


def test_the_teacher_on_recipes_is_that_of_the_group() -> None:
    file = Path(softs_lightning.conf.__file__).parent / "teacher" / "smollm2.yaml"
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    assert "\n".join(["```yaml", *lines, "```"]) in page("recipes.md")
