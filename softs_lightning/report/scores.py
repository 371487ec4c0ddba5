"""The scores of every seed, one beside the other."""

from __future__ import annotations

import statistics

from matplotlib.figure import Figure

from softs_lightning.report.result import Measure, Result
from softs_lightning.report.style import INK, colours, figure, literal, plain

__all__ = ["draw_scores"]


def draw_scores(result: Result, measure: Measure | None = None) -> Figure:
    """A row for each arm: a ring for each seed, a bar at their mean, and the teacher as a line through all rows."""
    measure = measure or result.headline
    arms = [arm.name for arm in result.arms]
    colour = colours(arms)
    drawn = figure(5.6, 1.0 + 0.34 * len(arms))
    axes = drawn.add_subplot()
    for row, arm in enumerate(result.arms):
        scores = arm.of(measure)
        axes.plot(
            scores,
            [row] * len(scores),
            "o",
            markerfacecolor="none",
            markeredgecolor=colour[arm.name],
            markersize=7,
            markeredgewidth=1.4,
        )
        axes.plot(
            [statistics.fmean(scores)] * 2, [row - 0.3, row + 0.3], color=colour[arm.name], linewidth=2.4
        )
    ceiling = result.teacher[measure.name]
    axes.axvline(ceiling, color=INK, linestyle=(0, (4, 3)), linewidth=1.1)
    axes.set_title(
        f"dashed: teacher {measure.text([ceiling])} {measure.unit}".rstrip(), fontsize=8, color=INK
    )
    plain(axes, x=literal(measure.title), y="", grid="x")
    axes.set_yticks(range(len(arms)), [literal(f"student {arm}") for arm in arms], fontsize=8.5)
    axes.set_ylim(len(arms) - 0.45, -0.55)
    axes.margins(x=0.06)
    return drawn
