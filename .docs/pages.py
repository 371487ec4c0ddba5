"""The pages that are made from the project's own files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from softs_lightning.report import Arm, Result

__all__ = ["results_tables", "summary"]


def results_tables(recipes: Path) -> str:
    """What the results page includes, as Markdown: a section for each of `recipes`/results/*.json."""
    return "\n".join(_section(file) for file in sorted((recipes / "results").glob("*.json")))


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


def summary(recipes: Path) -> str:
    """One row a recipe, for the README: the headline measure of every way in which its student was trained."""
    lines = [
        "| recipe | judged on | teacher | student alone | the other ways to train it; **clear** gains | seeds |",
        "|---|---|---:|---:|---|---:|",
    ]
    for file in sorted((recipes / "results").glob("*.json")):
        result = Result.from_json(file.read_text(encoding="utf-8"))
        measure = result.headline
        cells = [
            f"`{file.stem}`",
            measure.title + (", less is better" if measure.lower else ""),
            measure.text([result.teacher[measure.name]]),
            measure.text(result.alone.of(measure)),
            "; ".join(_way(result, arm) for arm in result.arms[1:]),
            str(len(result.seeds)),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _way(result: Result, arm: Arm) -> str:
    score = result.headline.text(arm.of(result.headline))
    return f"{arm.name} **{score}**" if result.clear(arm) else f"{arm.name} {score}"
