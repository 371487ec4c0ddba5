"""How every plot looks: figures without pyplot, colours that the colour-blind can tell apart, legends outside.

Figures are drawn on white: a page shows them on a white card, in a dark scheme too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from softs_lightning.config import ALONE

__all__ = ["COLOURS", "GREY", "INK", "colours", "figure", "legend_above", "literal", "plain", "save"]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255")
"""Okabe and Ito's palette (2008) without its yellow, which white swallows, and with a purple."""

GREY, INK, FAINT = "#767676", "#222222", "#d9d9d9"
DPI = 110


def colours(arms: Sequence[str]) -> dict[str, str]:
    """A colour for each arm, the same in every plot of a run: the student alone is grey.

    >>> colours(["alone", "distilled"])
    {'alone': '#767676', 'distilled': '#0072B2'}
    """
    others = [arm for arm in arms if arm != ALONE]
    found = {arm: COLOURS[number % len(COLOURS)] for number, arm in enumerate(others)}
    return {arm: found.get(arm, GREY) for arm in arms}


def figure(width: float, height: float) -> Figure:
    """An empty figure of so many inches. Not through pyplot: no display and no global state is touched."""
    return Figure(figsize=(width, height), layout="constrained", facecolor="white", dpi=DPI)


def plain(axes: Any, *, x: str, y: str, grid: str = "both") -> None:
    """Labels, a faint grid behind the data, and a frame only where the numbers stand."""
    axes.set_xlabel(x, color=INK, fontsize=9)
    axes.set_ylabel(y, color=INK, fontsize=9)
    axes.tick_params(labelsize=8, colors=INK, length=3)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, color=FAINT, linewidth=0.6)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("bottom", "left"):
        axes.spines[side].set_color(GREY)


def legend_above(figure: Figure, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend above the axes, where it covers no data."""
    longest = max(map(len, labels), default=1)
    room = int(figure.get_figwidth() * 13)  # characters of this size in a line
    columns = max(1, min(len(labels), room // (longest + 6)))
    figure.legend(
        handles, labels, loc="outside upper left", ncols=columns, frameon=False, fontsize=8, labelcolor=INK
    )


def literal(text: str) -> str:
    """A name as it is written: matplotlib would read what stands between dollar signs as mathematics."""
    return text.replace("$", r"\$")


def save(figure: Figure, file: Path) -> None:
    """Write a PNG; the same data give the same bytes."""
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=DPI, metadata={"Software": None})
