"""What was logged in training: read from the logs, kept as one table, drawn as curves."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from softs_lightning.config import ALONE
from softs_lightning.report.style import colours, figure, legend_above, literal, plain

__all__ = [
    "Curves",
    "arms_of",
    "draw_curve",
    "draw_curves",
    "in_order",
    "read_curves",
    "read_metrics",
    "write_metrics",
]

Curves = dict[str, dict[str, dict[int, list[tuple[int, float]]]]]
"""metric → arm → seed → [(step, value), ...]"""

Series = Mapping[int, Sequence[tuple[int, float]]]

HEADER = ("student", "seed", "step", "metric", "value")
NOT_METRICS = ("step", "epoch", "hp_metric")


def read_curves(folder: Path) -> Curves:
    """Collect what Lightning's loggers wrote under `folder`/ARM/SEED.

    Of the CSV logger the file ``metrics.csv`` is read, of the TensorBoard logger, where it is alone, its event
    files; they hold the same numbers (in single precision).
    """
    curves: Curves = {}
    for place in sorted(folder.glob("*/*")):
        if not place.name.isdigit():
            continue
        file = place / "metrics.csv"
        points = _csv_points(file) if file.exists() else _event_points(place)
        for metric, step, value in points:
            seeds = curves.setdefault(metric, {}).setdefault(place.parent.name, {})
            seeds.setdefault(int(place.name), []).append((step, value))
    return curves


def _csv_points(file: Path) -> Iterator[tuple[str, int, float]]:
    with file.open(encoding="utf-8", newline="") as lines:
        for row in csv.DictReader(lines):
            for metric, value in row.items():
                if value and metric not in NOT_METRICS:
                    yield metric, int(row["step"]), float(value)


def _event_points(folder: Path) -> Iterator[tuple[str, int, float]]:
    if not any(folder.glob("events.out.tfevents.*")):
        return
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped,unused-ignore]
        EventAccumulator,
    )

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    for metric in events.Tags()["scalars"]:
        if metric not in NOT_METRICS:
            yield from ((metric, event.step, event.value) for event in events.Scalars(metric))


def write_metrics(curves: Curves, file: Path) -> None:
    """One long table: student, seed, step, metric, value."""
    with file.open("w", encoding="utf-8", newline="") as lines:
        table = csv.writer(lines)
        table.writerow(HEADER)
        for metric, arms in sorted(curves.items()):
            for arm, seeds in arms.items():
                for seed, points in sorted(seeds.items()):
                    table.writerows((arm, seed, step, metric, value) for step, value in points)


def read_metrics(file: Path) -> Curves:
    """Read what :func:`write_metrics` wrote.

    Raises:
        ValueError: for a file that is no such table, or is cut off.
    """
    curves: Curves = {}
    with file.open(encoding="utf-8", newline="") as lines:
        table = csv.reader(lines)
        if tuple(next(table, ())) != HEADER:
            raise ValueError(f"its first line is not {','.join(HEADER)}")
        for row in table:
            if len(row) != len(HEADER):
                raise ValueError(f"line {table.line_num} is not complete")
            arm, seed, step, metric, value = row
            seeds = curves.setdefault(metric, {}).setdefault(arm, {})
            seeds.setdefault(int(seed), []).append((int(step), float(value)))
    return curves


def arms_of(curves: Curves) -> list[str]:
    """Every arm that logged something, the student alone first."""
    return sorted({arm for seen in curves.values() for arm in seen}, key=lambda arm: (arm != ALONE, arm))


def in_order(curves: Curves) -> list[str]:
    """The metrics as a reader wants them: validation, then the student's own, then terms, then their total.

    >>> in_order({"distill/total": {}, "distill/scores": {}, "train_loss": {}, "val_accuracy": {}})
    ['val_accuracy', 'train_loss', 'distill/scores', 'distill/total']
    """

    def place(metric: str) -> tuple[bool, bool, bool, str]:
        words = metric.split("/")
        validates = words[0].startswith("val") or "val" in words
        return not validates, "/" in metric, words[-1] == "total", metric

    return sorted(curves, key=place)


def draw_curve(curves: Curves, metric: str, *, arms: Sequence[str] | None = None) -> Figure:
    """One metric: for each arm the mean over its seeds, and their range as a band."""
    chosen = [arm for arm in arms or arms_of(curves) if arm in curves[metric]]
    colour = colours(arms or arms_of(curves))
    drawn = figure(4.8, 3.1)
    axes = drawn.add_subplot()
    lines = [_band(axes, curves[metric][arm], arm=arm, colour=colour[arm]) for arm in chosen]
    plain(axes, x="optimizer step", y=_title(metric))
    legend_above(drawn, lines, [str(line.get_label()) for line in lines])
    return drawn


def draw_curves(curves: Curves, *, title: str) -> Figure:
    """One panel for each validation metric (for each metric, if none is one): mean and range over the seeds."""
    chosen = [metric for metric in in_order(curves) if metric.startswith("val")] or in_order(curves)
    colour = colours(arms_of(curves))
    drawn = figure(5.2 * max(1, len(chosen)), 3.6)
    drawn.suptitle(literal(title), fontsize=10)
    shown: dict[str, Any] = {}
    for index, metric in enumerate(chosen, start=1):
        axes = drawn.add_subplot(1, len(chosen), index)
        for arm, seeds in sorted(curves[metric].items(), key=lambda item: item[0] != ALONE):
            shown[arm] = _band(axes, seeds, arm=arm, colour=colour[arm])
        plain(axes, x="optimizer step", y=_title(metric))
    legend_above(drawn, list(shown.values()), [literal(f"student {arm}") for arm in shown])
    return drawn


def _title(metric: str) -> str:
    return literal(metric.replace("_", " "))


def _band(axes: Any, seeds: Series, *, arm: str, colour: str) -> Any:
    by_step: dict[int, list[float]] = {}
    for points in seeds.values():
        for step, value in points:
            by_step.setdefault(step, []).append(value)
    steps = sorted(by_step)
    means = [statistics.fmean(by_step[step]) for step in steps]
    marker = "o" if len(steps) < 3 else None  # a line through one point is invisible
    # Dashed and on top: where an arm does just what the student alone does, both are seen.
    style: Any = {"linestyle": (0, (4, 2)), "zorder": 3} if arm == ALONE else {}
    label = literal(f"student {arm}")
    (line,) = axes.plot(
        steps, means, label=label, color=colour, linewidth=1.6, marker=marker, markersize=4, **style
    )
    low, high = ([pick(by_step[step]) for step in steps] for pick in (min, max))
    axes.fill_between(steps, low, high, color=colour, alpha=0.18, linewidth=0)
    return line
