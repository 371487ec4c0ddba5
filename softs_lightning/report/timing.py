"""Where the time of a training step goes: what was measured, and its bar."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from matplotlib.figure import Figure

from softs_lightning.report.result import Row
from softs_lightning.report.style import INK, figure

__all__ = ["PHASES", "Timing", "draw_timing", "percentages"]

PHASES = {
    "data": "data: next batch and its transfer",
    "teacher": "teacher: forward to its last product",
    "student": "student: its own training step",
    "losses": "projectors and distillation losses",
    "backward": "backward, through student, projectors and losses",
    "optimizer": "optimizer",
    "other": "other: loops, callbacks, logging",
}
"""The phases of a step, in the order in which they begin."""

SHADES = {
    "data": "#E69F00",
    "teacher": "#009E73",
    "student": "#0072B2",
    "losses": "#CC79A7",
    "backward": "#56B4E9",
    "optimizer": "#D55E00",
    "other": "#999999",
}


@dataclass(frozen=True)
class Timing:
    """Mean time of a distilled training step, by phase.

    Attributes:
        arm: whose steps were timed.
        seed: of that student.
        steps: how many were timed.
        seconds: of one step.
        shares: phase → its part of a step; together 1.
    """

    arm: str
    seed: int
    steps: int
    seconds: float
    shares: Mapping[str, float]

    def to_json(self) -> str:
        """For :meth:`from_json`."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Timing:
        """Read what :meth:`to_json` wrote."""
        return cls(**json.loads(text))

    def basis(self) -> str:
        """What was timed."""
        return (
            f"Mean of {self.steps} steps of student {self.arm}, seed {self.seed}: "
            f"{1000 * self.seconds:.3g} ms a step."
        )

    def rows(self) -> list[Row]:
        """Header and one row for each phase; the last column adds up to 100 %."""
        shares = percentages(self.shares)
        return [
            ("phase", "ms a step", "share (%)"),
            *(
                (PHASES.get(name, name), f"{1000 * self.seconds * share:.3g}", f"{shares[name]:.1f}")
                for name, share in self.shares.items()
            ),
        ]


def percentages(shares: Mapping[str, float]) -> dict[str, float]:
    """Shares in per cent with one decimal that add up to 100.0 exactly: the largest remainders are rounded up.

    >>> percentages({"a": 1 / 3, "b": 1 / 3, "c": 1 / 3})
    {'a': 33.4, 'b': 33.3, 'c': 33.3}
    """
    whole = sum(shares.values())
    exact = {name: 1000 * share / whole for name, share in shares.items()}
    tenths = {name: int(value) for name, value in exact.items()}
    short = 1000 - sum(tenths.values())
    for name in sorted(exact, key=lambda name: tenths[name] - exact[name])[:short]:
        tenths[name] += 1
    return {name: count / 10 for name, count in tenths.items()}


def draw_timing(found: Timing) -> Figure:
    """One bar for each phase, in the order of a step."""
    shares = percentages(found.shares)
    drawn = figure(5.6, 0.9 + 0.3 * len(shares))
    axes = drawn.add_subplot()
    names = list(shares)
    values = [shares[name] for name in names]
    bars = axes.barh(names, values, color=[SHADES.get(name, "#999999") for name in names], height=0.7)
    axes.bar_label(bars, [f"{value:.1f} %" for value in values], padding=3, fontsize=8, color=INK)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.18)
    axes.set_xlabel(f"share of a step of {1000 * found.seconds:.3g} ms (%)", fontsize=9, color=INK)
    _bare(axes)
    return drawn


def _bare(axes: Any) -> None:
    axes.tick_params(labelsize=8.5, colors=INK, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
