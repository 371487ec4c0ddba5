"""What a run found: scores by seed, what they come to, and whether that is more than luck."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

__all__ = ["Arm", "Measure", "Result", "Row", "Stop", "markdown_table", "operations"]

Row = tuple[str, ...]


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
    """One way to train the student.

    Attributes:
        name: as the recipe calls it.
        scores: for each seed a mapping from measure to value.
        parameters: of the student.
        stops: where each of its teachers stops.
        flops: floating point operations of the student's forward for one sample, where they could be counted.
    """

    name: str
    scores: tuple[Mapping[str, float], ...]
    parameters: int
    stops: tuple[Stop, ...] = ()
    flops: int | None = None

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
    teacher_flops: int | None = None

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

    def markdown(self, *, files: Mapping[str, str], sections: Sequence[str] = ()) -> str:
        """The report as Markdown; `sections` stand below the tables, `files` says what stands beside it."""
        header, *rows = self.rows()
        lines = [
            f"# {self.recipe}",
            "",
            *self.verdicts(),
            "",
            *markdown_table(header, rows),
            "",
            self.basis(),
            *self.stops(),
            "",
        ]
        if len(self.measures) > 1 or len(self.arms) > 2:
            lines += [*self._gains(), ""]
        for measure in self.measures:
            if len(self.measures) > 1:
                lines += [f"## {measure.title}", ""]
            lines += [*markdown_table(*self.by_seed(measure)), ""]
        lines += [line for section in sections for line in (section, "")]
        return "\n".join([*lines, *(f"- `{name}`: {what}" for name, what in files.items()), ""])

    def basis(self) -> str:
        """What stands behind the numbers, and which measures point down."""
        count = len(self.seeds)
        seeds = f"Mean ± standard deviation over {count} seeds." if count > 1 else "One seed."
        lower = [measure.name for measure in self.measures if measure.lower]
        return seeds + (f" Less is better: {', '.join(lower)}." if lower else "")

    def mark(self, arm: Arm, measure: Measure | None = None) -> str:
        """In two words whether a gain is more than luck."""
        return {True: "clear", False: "NOT clear", None: "one seed"}[self.clear(arm, measure)]

    def gain_text(self, arm: Arm, measure: Measure | None = None) -> str:
        """The gain and whether it is clear, as a cell of a table."""
        measure = measure or self.headline
        return f"{self.gain(arm, measure):+.{measure.digits}f} ({self.mark(arm, measure)})"

    def _gains(self) -> Iterator[str]:
        yield "## Gains over the student alone"
        yield ""
        yield from markdown_table(
            ("", *(measure.title for measure in self.measures)),
            [
                (
                    f"student {arm.name}",
                    *(self.gain_text(arm, measure) for measure in self.measures),
                )
                for arm in self.arms[1:]
            ],
        )

    def by_seed(self, measure: Measure) -> tuple[Row, list[Row]]:
        """Header and rows of one measure's scores: a row for each seed, a column for each arm."""
        columns = [arm.of(measure) for arm in self.arms]
        rows = [
            (str(seed), *(f"{score:.{measure.digits}f}" for score in scores))
            for seed, *scores in zip(self.seeds, *columns, strict=True)
        ]
        return ("seed", *(arm.name for arm in self.arms)), rows

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
                    arm.get("flops"),
                )
                for arm in node["arms"]
            ),
            teacher_flops=node.get("teacher_flops"),
        )


def operations(count: int | None) -> str:
    """Floating point operations in words; an en dash where they are not known.

    >>> operations(1_234_567), operations(None)
    ('1.23 MFLOP', '–')
    """
    if count is None:
        return "–"
    for size, unit in ((1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"), (1e3, "kFLOP")):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} FLOP"


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """The lines of a Markdown table; its first column is text, the others are numbers."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"

    yield line(header)
    yield "|" + "---|" + "---:|" * (len(header) - 1)
    yield from map(line, rows)
