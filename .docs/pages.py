"""The pages that are made from the project's own files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from softs_lightning.report import Result

__all__ = ["results_page"]

HEAD = """\
# Results

Every table below is made from the file that the recipe's own run wrote (`recipes/results/`), when these pages are
built. Mean ± sample standard deviation over the seeds. *Clear* means that every seed gained and that the mean gain
is larger than both spreads added; what is not clear is no claim. Test data are never used for training or for
choosing settings.
"""


def results_page(recipes: Path) -> str:
    """The results page as Markdown, from `recipes`/results/*.json."""
    files = sorted((recipes / "results").glob("*.json"))
    sections = [_section(file) for file in files]
    return "\n".join([HEAD, *sections])


def _section(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    result, extra = Result.from_json(text), json.loads(text)
    return "\n".join(_lines(file.stem, result, extra.get("command")))


def _lines(name: str, result: Result, command: str | None) -> Iterator[str]:
    yield f"## {name}"
    yield ""
    if command:
        yield from ("```bash", command, "```", "")
    title, *body = result.markdown(files={}).splitlines()
    assert title.startswith("# ")
    yield from (f"#{line}" if line.startswith("##") else line for line in body)
