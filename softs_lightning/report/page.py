"""One self-contained HTML page: no file beside it, no script, no network; pictures are inside."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from string import Template

from softs_lightning.report.result import Row
from softs_lightning.report.sheet import SHEET

__all__ = ["details", "document", "facts", "figures", "paragraph", "picture", "section", "table"]

DOCUMENT = Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
$sheet
</style>
</head>
<body>
<main>
<h1>$title</h1>
$body
</main>
</body>
</html>
"""
)


def document(title: str, body: Iterable[str]) -> str:
    """The whole page. `title` is text, `body` is HTML.

    >>> "<title>a &amp; b</title>" in document("a & b", [])
    True
    """
    return DOCUMENT.substitute(title=escape(title), sheet=SHEET, body="\n".join(body))


def section(title: str, *parts: str) -> str:
    """A heading and what stands under it; nothing where there is nothing."""
    inside = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inside}\n</section>" if inside else ""


def paragraph(text: str, kind: str = "") -> str:
    """A paragraph of text; `kind` is a class of the style sheet."""
    return f'<p class="{kind}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>"


def table(header: Sequence[str], rows: Sequence[Row], kinds: Sequence[Sequence[str]] = ()) -> str:
    """A table whose first column names the row; on a narrow page every row is a card of its own.

    Lines break between words only: a table that is wider than the page all the same can be moved in its box.

    Args:
        header: one text a column.
        rows: of the same length.
        kinds: for each row and column a class of the style sheet, or nothing.
    """
    left = [mark == "text" for mark in kinds[0]] if kinds else [False] * len(header)
    heads = [
        f'<th class="text">{escape(cell)}</th>' if text else f"<th>{escape(cell)}</th>"
        for cell, text in zip(header, left, strict=True)
    ]
    lines = ['<div class="scroll"><table>', "<thead><tr>", *heads, "</tr></thead>"]
    lines.append("<tbody>")
    for number, row in enumerate(rows):
        marks = kinds[number] if kinds else [""] * len(row)
        cells = [f"<th>{escape(row[0])}</th>"]
        for label, cell, mark in zip(header[1:], row[1:], marks[1:], strict=True):
            attribute = f' class="{mark}"' if mark else ""
            cells.append(f'<td data-label="{escape(label)}"{attribute}><span>{escape(cell)}</span></td>')
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return "\n".join([*lines, "</tbody>", "</table></div>"])


def picture(file: Path, caption: str) -> str:
    """A PNG inside the page, described by its caption."""
    data = base64.b64encode(file.read_bytes()).decode()
    width, height = _size(file)
    image = (
        f'<img src="data:image/png;base64,{data}" width="{width}" height="{height}" alt="{escape(caption)}">'
    )
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"


def _size(file: Path) -> tuple[int, int]:
    head = file.read_bytes()[16:24]  # of the first chunk, which is the header
    return int.from_bytes(head[:4], "big"), int.from_bytes(head[4:], "big")


def figures(pictures: Sequence[str], *, wide: bool = False) -> str:
    """Pictures side by side, as many as there is room for."""
    if not pictures:
        return ""
    return f'<div class="figures{" wide" if wide else ""}">\n' + "\n".join(pictures) + "\n</div>"


def details(title: str, text: str) -> str:
    """Text that is folded away until it is asked for."""
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"


def facts(pairs: Iterable[tuple[str, str]]) -> str:
    """What is what, in two columns."""
    inside = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs)
    return f"<dl>{inside}</dl>" if inside else ""
