"""What a run found: the table, the verdict, the files."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

__all__ = ["ALONE", "DISTILLED", "Curves", "Result", "Stop", "draw_curves", "read_curves", "write_metrics"]

ALONE, DISTILLED = "alone", "distilled"
ARMS = (ALONE, DISTILLED)

Curves = dict[str, dict[str, dict[int, list[tuple[int, float]]]]]
"""metric → arm → seed → [(step, value), ...]"""


@dataclass(frozen=True)
class Stop:
    """Where one teacher's forward stops, and the share of its operations that it does not do (0..1)."""

    module: str | None
    saved: float

    def __str__(self) -> str:
        if self.module is None:
            return "runs to its end (0.0 % of its FLOPs saved)"
        return f"stops at {self.module} ({100 * self.saved:.1f} % of its FLOPs saved)"


@dataclass(frozen=True)
class Result:
    """The scores of one recipe, higher being better; `alone[i]` and `distilled[i]` share a seed.

    >>> found = Result("digits", "test accuracy", "%", (0, 1), 99.0, (80.0, 84.0), (95.0, 97.0),
    ...                200_000, 2_000, (Stop("early", 0.675),))
    >>> print(found.table())
                       test accuracy (%)  parameters
    teacher            99.0                  200,000
    student alone      82.0 ± 2.8              2,000
    student distilled  96.0 ± 1.4              2,000
    >>> found.clear
    True
    """

    recipe: str
    judge: str
    unit: str
    seeds: tuple[int, ...]
    teacher: float
    alone: tuple[float, ...]
    distilled: tuple[float, ...]
    teacher_parameters: int
    student_parameters: int
    stops: tuple[Stop, ...]

    @property
    def gain(self) -> float:
        """Mean distilled less mean alone."""
        return statistics.fmean(self.distilled) - statistics.fmean(self.alone)

    @property
    def clear(self) -> bool | None:
        """Whether every seed gained and the mean gain exceeds both spreads added; `None` with one seed."""
        if len(self.seeds) < 2:
            return None
        every = all(after > before for before, after in zip(self.alone, self.distilled, strict=True))
        return every and self.gain > statistics.stdev(self.alone) + statistics.stdev(self.distilled)

    def verdict(self) -> str:
        """One sentence that says whether distillation helped."""
        gained = sum(after > before for before, after in zip(self.alone, self.distilled, strict=True))
        unit = {"%": " percentage points", "": ""}.get(self.unit, f" {self.unit}")
        start = f"Gain: {self.gain:+.{self.digits}f}{unit}"
        if self.clear is None:
            return f"{start}, from a single seed: whether it is more than luck needs several (seeds=[0,1,2])."
        basis = f"{gained} of {len(self.seeds)} seeds gained; spreads {self._spread(self.alone)} and {self._spread(self.distilled)}"
        return f"{start}, {'clear' if self.clear else 'NOT clear'} of the seeds' spread ({basis})."

    @property
    def digits(self) -> int:
        return 1 if self.unit == "%" else 3

    def _spread(self, scores: Sequence[float]) -> str:
        return f"{statistics.stdev(scores):.{self.digits}f}"

    def _score(self, scores: Sequence[float]) -> str:
        mean = f"{statistics.fmean(scores):.{self.digits}f}"
        return f"{mean} ± {self._spread(scores)}" if len(scores) > 1 else mean

    def rows(self) -> list[tuple[str, str, str]]:
        """Header and three rows: who, score, parameters."""
        return [
            ("", f"{self.judge} ({self.unit})" if self.unit else self.judge, "parameters"),
            ("teacher", self._score([self.teacher]), f"{self.teacher_parameters:,}"),
            ("student alone", self._score(self.alone), f"{self.student_parameters:,}"),
            ("student distilled", self._score(self.distilled), f"{self.student_parameters:,}"),
        ]

    def table(self) -> str:
        """The rows in aligned columns, for a terminal."""
        rows = self.rows()
        who, score, size = (max(len(row[column]) for row in rows) for column in range(3))
        return "\n".join(f"{a:{who}}  {b:{score}}  {c:>{size}}".rstrip() for a, b, c in rows)

    def markdown(self, *, files: Mapping[str, str]) -> str:
        """The report as Markdown; `files` says what stands beside it."""
        header, *rows = self.rows()
        lines = [
            f"# {self.recipe}",
            "",
            self.verdict(),
            "",
            f"| {' | '.join(header)} |",
            "|---|---|---:|",
            *(f"| {' | '.join(row)} |" for row in rows),
            "",
            f"Mean ± standard deviation over {len(self.seeds)} seeds."
            if len(self.seeds) > 1
            else "One seed.",
            *(f"The teacher {stop}." for stop in self.stops),
            "",
            "| seed | alone | distilled |",
            "|---:|---:|---:|",
            *(
                f"| {seed} | {before:.{self.digits}f} | {after:.{self.digits}f} |"
                for seed, before, after in zip(self.seeds, self.alone, self.distilled, strict=True)
            ),
            "",
            *(f"- `{name}`: {what}" for name, what in files.items()),
            "",
        ]
        return "\n".join(lines)


def read_curves(folder: Path) -> Curves:
    """Collect what Lightning's CSVLogger wrote under `folder`/ARM/SEED/metrics.csv."""
    curves: Curves = {}
    for file in sorted(folder.glob("*/*/metrics.csv")):
        arm, seed = file.parent.parent.name, int(file.parent.name)
        with file.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                for metric, value in row.items():
                    if value and metric not in ("step", "epoch"):
                        points = curves.setdefault(metric, {}).setdefault(arm, {}).setdefault(seed, [])
                        points.append((int(row["step"]), float(value)))
    return curves


def write_metrics(curves: Curves, file: Path) -> None:
    """One long table: student, seed, step, metric, value."""
    with file.open("w", encoding="utf-8", newline="") as lines:
        table = csv.writer(lines)
        table.writerow(("student", "seed", "step", "metric", "value"))
        for metric, arms in sorted(curves.items()):
            for arm, seeds in arms.items():
                for seed, points in sorted(seeds.items()):
                    table.writerows((arm, seed, step, metric, value) for step, value in points)


def draw_curves(curves: Curves, *, title: str) -> Figure:
    """One panel for each validation metric (for each metric, if no name starts with "val"): mean and range."""
    chosen = [metric for metric in sorted(curves) if metric.startswith("val")] or sorted(curves)
    # Not through pyplot: no display and no global state is touched.
    figure = Figure(figsize=(6.4 * max(1, len(chosen)), 4.2), layout="constrained")
    figure.suptitle(title)
    for index, metric in enumerate(chosen, start=1):
        axes = figure.add_subplot(1, max(1, len(chosen)), index)
        for arm, colour in zip(ARMS, ("#888888", "#1f77b4"), strict=True):
            if arm in curves[metric]:
                _band(axes, curves[metric][arm], label=f"student {arm}", colour=colour)
        axes.set(xlabel="step", ylabel=metric.replace("_", " "))
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def _band(axes: Any, seeds: Mapping[int, Sequence[tuple[int, float]]], *, label: str, colour: str) -> None:
    by_step: dict[int, list[float]] = {}
    for points in seeds.values():
        for step, value in points:
            by_step.setdefault(step, []).append(value)
    steps = sorted(by_step)
    axes.plot(steps, [statistics.fmean(by_step[step]) for step in steps], label=label, color=colour)
    low, high = ([pick(by_step[step]) for step in steps] for pick in (min, max))
    axes.fill_between(steps, low, high, color=colour, alpha=0.2, linewidth=0)
