"""What a run found: the table, the verdict, the files."""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from softs_lightning.config import ALONE

__all__ = [
    "Arm",
    "Curves",
    "Measure",
    "Result",
    "Stop",
    "draw_curves",
    "read_curves",
    "write_metrics",
]

Curves = dict[str, dict[str, dict[int, list[tuple[int, float]]]]]
"""metric → arm → seed → [(step, value), ...]"""

Row = tuple[str, ...]
GREY = "#888888"


@dataclass(frozen=True)
class Measure:
    """What models are scored by. `lower` says that less is better."""

    name: str
    unit: str = ""
    lower: bool = False

    @property
    def title(self) -> str:
        return f"{self.name} ({self.unit})" if self.unit else self.name

    @property
    def digits(self) -> int:
        return 1 if self.unit == "%" else 3

    def better(self, one: float, other: float) -> bool:
        """Whether `one` is the better score of the two."""
        return one < other if self.lower else one > other

    def text(self, scores: Sequence[float]) -> str:
        """Mean ± sample standard deviation, or the only score."""
        mean = f"{statistics.fmean(scores):.{self.digits}f}"
        return f"{mean} ± {self.spread(scores)}" if len(scores) > 1 else mean

    def spread(self, scores: Sequence[float]) -> str:
        return f"{statistics.stdev(scores):.{self.digits}f}"


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
class Arm:
    """One way to train the student: its scores, a mapping from measure to value for each seed, and its size."""

    name: str
    scores: tuple[Mapping[str, float], ...]
    parameters: int
    stops: tuple[Stop, ...] = ()

    def of(self, measure: Measure) -> tuple[float, ...]:
        """The scores by one measure, seed by seed."""
        return tuple(scores[measure.name] for scores in self.scores)


@dataclass(frozen=True)
class Result:
    """The scores of one recipe; `arms[0]` is the student alone, and scores of one position share a seed.

    >>> scores = [{"test accuracy": value} for value in (80.0, 84.0, 95.0, 97.0)]
    >>> found = Result(
    ...     "digits", (Measure("test accuracy", "%"),), (0, 1), {"test accuracy": 99.0}, 200_000,
    ...     (Arm("alone", (scores[0], scores[1]), 2_000),
    ...      Arm("distilled", (scores[2], scores[3]), 2_000, (Stop("early", 0.675),))))
    >>> print(found.table())
                       test accuracy (%)  parameters
    teacher                         99.0     200,000
    student alone             82.0 ± 2.8       2,000
    student distilled         96.0 ± 1.4       2,000
    >>> found.clear(found.arms[1])
    True
    """

    recipe: str
    measures: tuple[Measure, ...]
    seeds: tuple[int, ...]
    teacher: Mapping[str, float]
    teacher_parameters: int
    arms: tuple[Arm, ...]

    @property
    def alone(self) -> Arm:
        return self.arms[0]

    @property
    def headline(self) -> Measure:
        """The measure that the verdict is about."""
        return self.measures[0]

    def gain(self, arm: Arm, measure: Measure | None = None) -> float:
        """Mean of the arm less mean alone; positive is better, whichever way the measure points."""
        measure = measure or self.headline
        difference = statistics.fmean(arm.of(measure)) - statistics.fmean(self.alone.of(measure))
        return -difference if measure.lower else difference

    def clear(self, arm: Arm, measure: Measure | None = None) -> bool | None:
        """Whether every seed gained and the mean gain exceeds both spreads added; `None` with one seed."""
        measure = measure or self.headline
        if len(self.seeds) < 2:
            return None
        spreads = statistics.stdev(self.alone.of(measure)) + statistics.stdev(arm.of(measure))
        return self._gained(arm, measure) == len(self.seeds) and self.gain(arm, measure) > spreads

    def _gained(self, arm: Arm, measure: Measure) -> int:
        pairs = zip(self.alone.of(measure), arm.of(measure), strict=True)
        return sum(measure.better(after, before) for before, after in pairs)

    def verdict(self, arm: Arm, measure: Measure | None = None) -> str:
        """One sentence that says whether this way of training helped."""
        measure = measure or self.headline
        unit = {"%": " percentage points", "": ""}.get(measure.unit, f" {measure.unit}")
        start = f"Gain: {self.gain(arm, measure):+.{measure.digits}f}{unit}"
        clear = self.clear(arm, measure)
        if clear is None:
            return f"{start}, from a single seed: whether it is more than luck needs several (seeds=[0,1,2])."
        basis = (
            f"{self._gained(arm, measure)} of {len(self.seeds)} seeds gained; spreads "
            f"{measure.spread(self.alone.of(measure))} and {measure.spread(arm.of(measure))}"
        )
        return f"{start}, {'clear' if clear else 'NOT clear'} of the seeds' spread ({basis})."

    def verdicts(self) -> Iterator[str]:
        """The headline's verdict for every arm but the student alone, named where there are several."""
        several = len(self.arms) > 2
        for arm in self.arms[1:]:
            yield f"{arm.name}: {self.verdict(arm)}" if several else self.verdict(arm)

    def stops(self) -> Iterator[str]:
        """A sentence for each teacher that is asked, said once for arms that ask alike."""
        said: dict[str, list[str]] = {}
        for arm in self.arms:
            for stop in arm.stops:
                said.setdefault(f"The teacher {stop}.", []).append(arm.name)
        for sentence, names in said.items():
            yield sentence if len(said) == 1 else f"{sentence[:-1]}, for {', '.join(dict.fromkeys(names))}."

    def rows(self) -> list[Row]:
        """Header, teacher, and one row for each arm: who, score by score, parameters."""
        return [
            ("", *(measure.title for measure in self.measures), "parameters"),
            (
                "teacher",
                *(measure.text([self.teacher[measure.name]]) for measure in self.measures),
                f"{self.teacher_parameters:,}",
            ),
            *(
                (
                    f"student {arm.name}",
                    *(measure.text(arm.of(measure)) for measure in self.measures),
                    f"{arm.parameters:,}",
                )
                for arm in self.arms
            ),
        ]

    def table(self) -> str:
        """The rows in aligned columns, for a terminal; on their side where there are many measures."""
        rows = self.rows()
        if len(self.measures) > 2:
            rows = list(zip(*rows, strict=True))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                [f"{row[0]:{widths[0]}}", *(f"{c:>{w}}" for c, w in zip(row[1:], widths[1:], strict=True))]
            )
            for row in rows
        ]
        return "\n".join(line.rstrip() for line in lines)

    def markdown(self, *, files: Mapping[str, str]) -> str:
        """The report as Markdown; `files` says what stands beside it."""
        header, *rows = self.rows()
        seeds = (
            f"Mean ± standard deviation over {len(self.seeds)} seeds." if len(self.seeds) > 1 else "One seed."
        )
        lower = [measure.name for measure in self.measures if measure.lower]
        lines = [
            f"# {self.recipe}",
            "",
            *self.verdicts(),
            "",
            *_markdown_table(header, rows),
            "",
            seeds + (f" Less is better: {', '.join(lower)}." if lower else ""),
            *self.stops(),
            "",
        ]
        if len(self.measures) > 1 or len(self.arms) > 2:
            lines += [*self._gains(), ""]
        for measure in self.measures:
            if len(self.measures) > 1:
                lines += [f"## {measure.title}", ""]
            lines += [*self._by_seed(measure), ""]
        return "\n".join([*lines, *(f"- `{name}`: {what}" for name, what in files.items()), ""])

    def _gains(self) -> Iterator[str]:
        marks = {True: "clear", False: "NOT clear", None: "one seed"}
        yield "## Gains over the student alone"
        yield ""
        yield from _markdown_table(
            ("", *(measure.title for measure in self.measures)),
            [
                (
                    f"student {arm.name}",
                    *(
                        f"{self.gain(arm, measure):+.{measure.digits}f} ({marks[self.clear(arm, measure)]})"
                        for measure in self.measures
                    ),
                )
                for arm in self.arms[1:]
            ],
        )

    def _by_seed(self, measure: Measure) -> Iterator[str]:
        columns = [arm.of(measure) for arm in self.arms]
        rows = [
            (str(seed), *(f"{score:.{measure.digits}f}" for score in scores))
            for seed, *scores in zip(self.seeds, *columns, strict=True)
        ]
        yield from _markdown_table(("seed", *(arm.name for arm in self.arms)), rows)

    def to_json(self) -> str:
        """The result as JSON, for :meth:`from_json` and for whoever compares runs."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Result:
        """Read what :meth:`to_json` wrote; further keys of the file are left alone."""
        node = json.loads(text)
        return cls(
            recipe=node["recipe"],
            measures=tuple(Measure(**measure) for measure in node["measures"]),
            seeds=tuple(node["seeds"]),
            teacher=node["teacher"],
            teacher_parameters=node["teacher_parameters"],
            arms=tuple(
                Arm(
                    arm["name"],
                    tuple(arm["scores"]),
                    arm["parameters"],
                    tuple(Stop(**s) for s in arm["stops"]),
                )
                for arm in node["arms"]
            ),
        )


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(header)} |"
    yield "|" + "---|" + "---:|" * (len(header) - 1)
    yield from (f"| {' | '.join(row)} |" for row in rows)


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
    arms = sorted({arm for seen in curves.values() for arm in seen if arm != ALONE})
    # Not through pyplot: no display and no global state is touched.
    figure = Figure(figsize=(6.4 * max(1, len(chosen)), 4.2), layout="constrained")
    figure.suptitle(title)
    for index, metric in enumerate(chosen, start=1):
        axes = figure.add_subplot(1, max(1, len(chosen)), index)
        for arm, seeds in sorted(curves[metric].items(), key=lambda item: item[0] != ALONE):
            colour = GREY if arm == ALONE else f"C{arms.index(arm) % 10}"
            _band(axes, seeds, label=f"student {arm}", colour=colour)
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
