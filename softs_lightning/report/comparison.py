"""The runs of a sweep, one beside the other: what each changed, what it reached, what its student costs."""

from __future__ import annotations

import csv
import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from softs_lightning.config import Refusal
from softs_lightning.report.page import document, figures, paragraph, picture, section, table
from softs_lightning.report.result import Arm, Result, Row, markdown_table, operations
from softs_lightning.report.run import RESULTS, read_run
from softs_lightning.report.style import INK, colours, figure, legend_above, literal, plain, save

__all__ = [
    "FAILED",
    "Sweep",
    "Unfinished",
    "draw_tradeoff",
    "is_sweep",
    "note_failure",
    "read_sweep",
    "write_comparison",
]

FAILED = "failed.json"
"""What a run of a sweep leaves that ended with an error."""

MARKS = "osD^vP*X"


@dataclass(frozen=True)
class Finished:
    """A run of a sweep that came to its end."""

    name: str
    overrides: str
    result: Result


@dataclass(frozen=True)
class Unfinished:
    """A run of a sweep without a result, and why."""

    name: str
    overrides: str
    reason: str

    def __str__(self) -> str:
        named = f"run {self.name} ({self.overrides})" if self.overrides else f"run {self.name}"
        return f"{named}: {self.reason}"


@dataclass(frozen=True)
class Sweep:
    """What there is of a sweep."""

    folder: Path
    finished: tuple[Finished, ...]
    unfinished: tuple[Unfinished, ...]

    @property
    def total(self) -> int:
        return len(self.finished) + len(self.unfinished)

    def table(self) -> str:
        """The runs in aligned columns, for a terminal: run, overrides, student, score, gain, parameters."""
        header, rows, _ = _table(self)
        cells = [[row[at] for at in (0, 1, 2, 3, 4, 6)] for row in (header, *rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(
            "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        )


def is_sweep(folder: Path) -> bool:
    """Whether a folder is that of a ``--multirun``."""
    return (folder / "multirun.yaml").is_file() and not (folder / RESULTS).exists()


def note_failure(folder: Path, error: BaseException) -> None:
    """Note in the folder of a run why it has no result."""
    said = str(error) or type(error).__name__
    kind = "" if isinstance(error, Refusal) else f"{type(error).__name__}: "
    folder.mkdir(parents=True, exist_ok=True)
    node = json.dumps({"error": f"{kind}{said}"}, indent=2)
    (folder / FAILED).write_text(node + "\n", encoding="utf-8")


def read_sweep(folder: Path) -> Sweep:
    """Read every run of a sweep, also of one that was killed: runs that never began are found in its settings.

    Raises:
        Refusal: for a folder that is no sweep.
    """
    if not is_sweep(folder):
        raise Refusal(f"{folder} is no sweep: it holds no multirun.yaml.")
    finished: list[Finished] = []
    unfinished: list[Unfinished] = []
    places = {
        file.parent.parent.relative_to(folder).as_posix(): file
        for file in folder.glob("**/.hydra/overrides.yaml")
    }
    changing = _planned(folder / "multirun.yaml")
    begun: list[tuple[str, ...]] = []
    for name, file in sorted(places.items(), key=lambda item: (len(item[0]), item[0])):
        every = tuple(_yaml(file))
        begun.append(every)
        overrides = ", ".join(one for one in every if _key(one) in changing)
        try:
            finished.append(Finished(name, overrides, read_run(folder / name).result))
        except Refusal as refusal:
            unfinished.append(Unfinished(name, overrides, _reason(folder / name, refusal)))
    for number, planned in enumerate(itertools.product(*changing.values())):
        if not any(set(planned) <= {one.replace("'", "") for one in every} for every in begun):
            unfinished.append(Unfinished(str(number), ", ".join(planned), "it never began"))
    return Sweep(folder, tuple(finished), tuple(unfinished))


def _reason(folder: Path, refusal: Refusal) -> str:
    file = folder / FAILED
    if not file.exists():
        return "it was stopped before its end" if not (folder / RESULTS).exists() else str(refusal)
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["error"])
    except (ValueError, KeyError, TypeError):
        return "it failed"


def _yaml(file: Path) -> list[Any]:
    import yaml

    node = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [str(one) for one in node] if isinstance(node, list) else []


def _key(override: str) -> str:
    return override.partition("=")[0].lstrip("+")


def _planned(file: Path) -> dict[str, list[str]]:
    """Key → every override of it, for the keys that the sweep changes."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from omegaconf import OmegaConf

    node = OmegaConf.load(file)
    task = OmegaConf.select(node, "hydra.overrides.task") or []
    found: dict[str, list[str]] = {}
    for override in OverridesParser.create().parse_overrides([str(one) for one in task]):
        if override.is_sweep_override():
            key = override.get_key_element().lstrip("+")
            found[key] = [
                f"{override.get_key_element()}={value}".replace("'", "")
                for value in override.sweep_string_iterator()
            ]
    return found


def write_comparison(folder: Path) -> Sweep:
    """Write comparison.md, comparison.html, comparison.csv and the picture of a sweep that is on disk.

    Raises:
        Refusal: for a folder that is no sweep, or one of which no run came to its end.
    """
    sweep = read_sweep(folder)
    if not sweep.finished:
        reasons = "".join(f"\n  {one}" for one in sweep.unfinished)
        raise Refusal(
            f"{folder}: no run of this sweep came to its end, so there is nothing to compare.{reasons}"
        )
    _write_csv(sweep, folder / "comparison.csv")
    drawn: list[tuple[Path, str]] = []
    for cost, what in COSTS.items():
        if (picture_of := draw_tradeoff(sweep, cost)) is not None:
            file = folder / f"comparison-{cost}.png"
            save(picture_of, file)
            drawn.append(
                (file, f"{_headline(sweep)} against {what}; bars: standard deviation over the seeds")
            )
    title = f"Sweep of {len(sweep.finished)} run{'s' if len(sweep.finished) > 1 else ''}"
    header, rows, kinds = _table(sweep)
    left = [str(one) for one in sweep.unfinished]
    body = [
        paragraph(f"{len(sweep.finished)} of {sweep.total} runs came to their end.", "soft"),
        section("Runs", table(header, rows, kinds), paragraph(BASIS, "soft")),
        section("Size and cost against quality", figures([picture(*one) for one in drawn], wide=True)),
        section("Without a result", *(paragraph(one, "verdict unclear") for one in left)),
    ]
    (folder / "comparison.html").write_text(document(title, body), encoding="utf-8")
    lines = [f"# {title}", "", *markdown_table(header, rows), "", BASIS, ""]
    lines += [line for file, caption in drawn for line in (f"![{caption}]({file.name})", "")]
    lines += ["## Without a result", "", *(f"- {one}" for one in left), ""] if left else []
    (folder / "comparison.md").write_text("\n".join(lines), encoding="utf-8")
    return sweep


BASIS = "Mean ± standard deviation over the seeds of each run; a gain is that over the student alone."

COSTS = {"parameters": "the student's parameters", "flops": "the operations of its forward"}


def _rows(sweep: Sweep) -> Iterator[tuple[Finished, Arm]]:
    for run in sweep.finished:
        yield from ((run, arm) for arm in run.result.arms)


def _headline(sweep: Sweep) -> str:
    titles = dict.fromkeys(run.result.headline.title for run in sweep.finished)
    return " / ".join(titles)


def _table(sweep: Sweep) -> tuple[Row, list[Row], list[list[str]]]:
    header = (
        "run",
        "overrides",
        "student",
        _headline(sweep),
        "gain",
        "teacher",
        "parameters",
        "of the teacher's (%)",
        "forward of one sample",
    )
    rows: list[Row] = []
    kinds = []
    for run, arm in _rows(sweep):
        result, alone = run.result, arm is run.result.alone
        measure = result.headline
        rows.append(
            (
                run.name,
                run.overrides or "–",
                arm.name,
                measure.text(arm.of(measure)),
                "–" if alone else result.gain_text(arm),
                measure.text([result.teacher[measure.name]]),
                f"{arm.parameters:,}",
                f"{100 * arm.parameters / max(result.teacher_parameters, 1):.3g}",
                operations(arm.flops),
            )
        )
        clear = None if alone else result.clear(arm)
        gain = {True: "good", False: "unclear", None: ""}[clear]
        kinds.append(["", "text", "text", "", gain, "", "", "", ""])
    return header, rows, kinds


def _write_csv(sweep: Sweep, file: Path) -> None:
    with file.open("w", encoding="utf-8", newline="") as lines:
        out = csv.writer(lines)
        out.writerow(
            (
                *("run", "overrides", "recipe", "student", "measure", "unit", "seeds", "mean", "deviation"),
                *("gain", "clear", "teacher", "parameters", "teacher_parameters", "flops", "teacher_flops"),
            )
        )
        for run, arm in _rows(sweep):
            result = run.result
            for measure in result.measures:
                scores, alone = arm.of(measure), arm is result.alone
                deviation = statistics.stdev(scores) if len(scores) > 1 else ""
                gain, clear = ("", "") if alone else (result.gain(arm, measure), result.clear(arm, measure))
                out.writerow(
                    (
                        *(run.name, run.overrides, result.recipe, arm.name, measure.name, measure.unit),
                        *(len(scores), statistics.fmean(scores), deviation, gain),
                        *("" if clear is None else clear, result.teacher[measure.name], arm.parameters),
                        *(result.teacher_parameters, arm.flops or "", result.teacher_flops or ""),
                    )
                )


def draw_tradeoff(sweep: Sweep, cost: str) -> Figure | None:
    """Quality against `cost` ("parameters" or "flops") of every student; ``None`` where no cost is known.

    One colour a way of training; points of one colour are joined where they differ in cost.
    """
    arms: dict[str, list[tuple[float, float, float, str]]] = {}
    for run, arm in _rows(sweep):
        spent, scores = getattr(arm, cost), arm.of(run.result.headline)
        if spent:
            deviation = statistics.stdev(scores) if len(scores) > 1 else 0.0
            arms.setdefault(arm.name, []).append((spent, statistics.fmean(scores), deviation, run.name))
    if not arms:
        return None
    drawn = figure(5.6, 3.9)
    axes = drawn.add_subplot()
    colour = colours(list(arms))
    handles = []
    for number, (name, points) in enumerate(arms.items()):
        points.sort()
        x, y, error, labels = (list(column) for column in zip(*points, strict=True))
        joined = "-" if len(set(x)) == len(x) > 1 else "none"
        # Arms of one run have one size: a little beside each other, no bar hides another.
        aside = 5 * (number - (len(arms) - 1) / 2)
        beside = axes.transData + ScaledTranslation(aside / 72, 0, drawn.dpi_scale_trans)
        handles.append(
            axes.errorbar(
                x,
                y,
                yerr=error,
                fmt=MARKS[number % len(MARKS)],
                color=colour[name],
                transform=beside,
                linestyle=joined,
                capsize=3,
                markersize=6,
                linewidth=1.2,
            )
        )
        # What is drawn beside its place does not widen the axes by itself.
        axes.update_datalim([(at, m + e) for at, m, d in zip(x, y, error, strict=True) for e in (-d, d)])
        for at, height, label in zip(x, y, labels, strict=True):
            axes.annotate(
                str(label),
                (at, height),
                xytext=(6 + aside, 5),
                textcoords="offset points",
                fontsize=7.5,
                color=INK,
            )
    if max(x for points in arms.values() for x, *_ in points) > 8 * min(
        x for points in arms.values() for x, *_ in points
    ):
        axes.set_xscale("log")
    unit = "student's parameters" if cost == "parameters" else "forward of one sample (FLOP)"
    plain(axes, x=unit, y=literal(_headline(sweep)))
    axes.margins(x=0.12, y=0.12)
    axes.autoscale_view()
    legend_above(drawn, handles, [literal(f"student {name}") for name in arms])
    return drawn
