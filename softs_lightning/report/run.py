"""The report of one run, made from the files that the run wrote."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.figure import Figure

from softs_lightning.config import Refusal
from softs_lightning.report.curves import Curves, draw_curve, draw_curves, in_order, read_metrics
from softs_lightning.report.page import details, document, facts, figures, paragraph, picture, section, table
from softs_lightning.report.result import Result, Row, markdown_table, operations
from softs_lightning.report.scores import draw_scores
from softs_lightning.report.similarity import Similarity, draw_similarity
from softs_lightning.report.style import save
from softs_lightning.report.timing import Timing, draw_timing

__all__ = ["RESULTS", "Run", "read_run", "write_report"]

RESULTS = "results.json"
UNTIMED = "Not measured: the training was too short for it, or ran in processes of its own."

MOST_CURVES = 24
MOST_MAPS = 6

FILES = {
    "student.ckpt": "the distilled student (of several, the first) of the first seed; its own class loads it with load_from_checkpoint",
    RESULTS: "the scores of every seed, for programs",
    "report.html": "this report with all its pictures, in one file",
    "metrics.csv": "everything that was logged: student, seed, step, metric, value",
    "curves.png": "the validation curves, mean and range over the seeds",
    "plots/": "every picture of the report",
    "similarity.json": "how alike students and teacher are, layer by layer and at the output",
    "timing.json": "where the time of a step goes",
    "run.json": "the command, the versions and the time it took",
    "config.yaml": "the composed config",
    "logs/": "what Lightning wrote for each student",
}
"""What may stand in a run's folder."""

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """What one run wrote; what an older run did not write is empty."""

    folder: Path
    result: Result
    curves: Curves
    similarity: Similarity | None
    timing: Timing | None
    about: Mapping[str, Any]
    config: str


def read_run(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
        Refusal: for a folder that is no run, is half written, or holds a file that cannot be read.
    """
    _refuse_other_folders(folder)
    result = _read(folder / RESULTS, Result.from_json)
    assert result is not None
    metrics, config = folder / "metrics.csv", folder / "config.yaml"
    try:
        curves = read_metrics(metrics) if metrics.exists() else {}
    except (ValueError, OSError) as error:
        raise Refusal(f"{metrics} cannot be read: {error}. It is made in the run; was it changed?") from None
    return Run(
        folder,
        result,
        curves,
        _read(folder / "similarity.json", Similarity.from_json),
        _read(folder / "timing.json", Timing.from_json),
        _read(folder / "run.json", json.loads) or {},
        config.read_text(encoding="utf-8") if config.exists() else "",
    )


def _refuse_other_folders(folder: Path) -> None:
    if not folder.exists():
        raise Refusal(f"There is no folder {folder}. Runs are in outputs/RECIPE/TIME.")
    if not folder.is_dir():
        raise Refusal(f"{folder} is a file: name the run's folder, {folder.parent}.")
    if (folder / RESULTS).exists():
        return
    begun = [arm.name for arm in sorted((folder / "logs").glob("*")) if arm.is_dir()]
    if begun:
        raise Refusal(
            f"{folder} is a run that did not come to its end: there are logs of {', '.join(begun)}, but no "
            f"{RESULTS}, which is written last. Run it again."
        )
    if (folder / ".hydra").is_dir():
        raise Refusal(
            f"{folder} is a run in which nothing was trained yet: it holds no {RESULTS} and no logs."
        )
    runs = sorted(found.parent for found in folder.glob(f"*/{RESULTS}"))
    inside = f" These in it are: {', '.join(str(run) for run in runs[:3])}." if runs else ""
    raise Refusal(f"{folder} is no run: it holds no {RESULTS}. Runs are in outputs/RECIPE/TIME.{inside}")


def _read(file: Path, parse: Callable[[str], T]) -> T | None:
    if not file.exists():
        return None
    try:
        return parse(file.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        said = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise Refusal(f"{file} cannot be read: {said}. It is cut off, or of another program.") from None


def write_report(folder: Path) -> Run:
    """Write report.md, report.html and the pictures of a run that is on disk.

    Raises:
        Refusal: as :func:`read_run` does.
    """
    run = read_run(folder)
    for old in (folder / "plots").glob("*.png"):
        old.unlink()
    save(draw_curves(run.curves, title=f"{run.result.recipe}: students"), folder / "curves.png")
    plots = _Plots(run)
    (folder / "report.html").write_text(document(run.result.recipe, _page(run, plots)), encoding="utf-8")
    files = {name: what for name, what in FILES.items() if (folder / name).exists()}
    text = run.result.markdown(files=files, sections=list(_sections(run, plots)))
    (folder / "report.md").write_text(text, encoding="utf-8")
    return run


class _Plots:
    """The pictures of a run, drawn to its folder plots/; each is (file, caption)."""

    def __init__(self, run: Run) -> None:
        self.folder = run.folder / "plots"
        names = [arm.name for arm in run.result.arms]
        drawn = in_order(run.curves)[:MOST_CURVES]
        self.left_out = in_order(run.curves)[MOST_CURVES:]
        self.scores = [
            self._save(f"scores-{number}", draw_scores(run.result, measure), f"{measure.title}, seed by seed")
            for number, measure in enumerate(run.result.measures[:MOST_MAPS])
        ]
        self.curves = [
            self._save(f"curve-{number:02d}-{metric}", draw_curve(run.curves, metric, arms=names), metric)
            for number, metric in enumerate(drawn)
        ]
        self.maps: list[tuple[Path, str]] = []
        if run.similarity is not None and run.similarity.teacher:
            for number, arm in enumerate(list(run.similarity.students)[:MOST_MAPS]):
                if run.similarity.students[arm].layers:
                    drawing = draw_similarity(run.similarity, arm)
                    self.maps.append(self._save(f"similarity-{number}-{arm}", drawing, f"student {arm}"))
        self.timing: list[tuple[Path, str]] = []
        if run.timing is not None:
            self.timing = [self._save("timing", draw_timing(run.timing), run.timing.basis())]

    def _save(self, name: str, drawing: Figure, caption: str) -> tuple[Path, str]:
        file = self.folder / f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', name)}.png"
        save(drawing, file)
        return file, caption


def _page(run: Run, plots: _Plots) -> Iterator[str]:
    result = run.result
    yield paragraph(_subtitle(run), "soft")
    for arm, sentence in zip(result.arms[1:], result.verdicts(), strict=True):
        yield paragraph(sentence, f"verdict {_kind(result.clear(arm))}")
    yield section(
        "Results",
        _results(result),
        paragraph(result.basis(), "soft"),
        figures([picture(*one) for one in plots.scores], wide=True),
    )
    yield section("Sizes and cost", table(*_sizes(result)), *map(paragraph, result.stops()))
    more = f"Also logged, in metrics.csv: {', '.join(plots.left_out)}." if plots.left_out else ""
    yield section(
        "Curves",
        paragraph("Lines are means over the seeds, bands reach from the lowest to the highest.", "soft"),
        figures([picture(*one) for one in plots.curves]) or paragraph("Nothing was logged."),
        paragraph(more, "soft") if more else "",
    )
    yield section("Similarity to the teacher", *_likeness(run, plots))
    if run.timing is not None:
        header, *rows = run.timing.rows()
        yield section(
            "Time of a step",
            table(header, rows),
            figures([picture(*one) for one in plots.timing], wide=True),
        )
    elif (run.folder / "run.json").exists() and any(arm.stops for arm in result.arms):
        yield section("Time of a step", paragraph(UNTIMED))
    yield section("Seed by seed", *_seeds(result))
    yield section(
        "How it was made",
        facts(_about(run)),
        details("The composed config", run.config) if run.config else "",
    )


def _subtitle(run: Run) -> str:
    names = ", ".join(f"student {arm.name}" for arm in run.result.arms)
    return f"Knowledge distillation: a teacher, {names}; seeds {', '.join(map(str, run.result.seeds))}."


def _kind(clear: bool | None) -> str:
    return {True: "good", False: "unclear", None: ""}[clear]


def _results(result: Result) -> str:
    """All arms by all measures, and the gains; on its side where there are many measures."""
    header, *rows = result.rows()
    kinds = [[""] * len(header) for _ in rows]
    gains: list[Row] = []
    for arm in result.arms[1:]:
        gains.append(
            (f"gain, {arm.name}", *(result.gain_text(arm, measure) for measure in result.measures), "")
        )
        kinds.append(["", *(_kind(result.clear(arm, measure)) for measure in result.measures), ""])
    every = [header, *rows, *gains]
    every_kind = [[""] * len(header), *kinds]
    if len(result.measures) > 4:
        every = list(zip(*every, strict=True))
        every_kind = list(map(list, zip(*every_kind, strict=True)))
    else:  # the parameters stand among the sizes
        every, every_kind = [row[:-1] for row in every], [row[:-1] for row in every_kind]
    return table(every[0], every[1:], every_kind[1:])


def _sizes(result: Result) -> tuple[Row, list[Row]]:
    def row(name: str, parameters: int, flops: int | None) -> Row:
        share = 100 * parameters / result.teacher_parameters if result.teacher_parameters else 100.0
        return name, f"{parameters:,}", f"{share:.3g}", operations(flops)

    header = ("", "parameters", "of the teacher's (%)", "forward of one sample")
    students = [row(f"student {arm.name}", arm.parameters, arm.flops) for arm in result.arms]
    return header, [row("teacher", result.teacher_parameters, result.teacher_flops), *students]


def _likeness(run: Run, plots: _Plots) -> Iterator[str]:
    found = run.similarity
    if found is None:
        return
    if found.teacher:
        yield paragraph(f"Measured on {found.basis()}.", "soft")
    header, *rows = found.agreement_rows() or [()]
    if rows:
        yield table(header, rows)
    yield figures([picture(file, f"Linear CKA, {arm}") for file, arm in plots.maps], wide=True)
    yield from map(paragraph, found.reasons())


def _seeds(result: Result) -> Iterator[str]:
    for measure in result.measures:
        yield f"<h3>{paragraph(measure.title)[3:-4]}</h3>"
        yield table(*result.by_seed(measure))


def _about(run: Run) -> Iterator[tuple[str, str]]:
    about = run.about
    for key in ("command", "started", "took", "machine", "threads"):
        if about.get(key) is not None:
            yield key, str(about[key])
    yield "seeds", ", ".join(map(str, run.result.seeds))
    if versions := about.get("versions"):
        yield "versions", ", ".join(f"{name} {version}" for name, version in versions.items())


def _sections(run: Run, plots: _Plots) -> Iterator[str]:
    """The same for report.md, with pictures by their path."""
    yield from (_linked(run, *one) for one in plots.scores)
    yield "## Sizes and cost"
    yield "\n".join(markdown_table(*_sizes(run.result)))
    if run.similarity is not None:
        yield "## Similarity to the teacher"
        if run.similarity.teacher:
            yield f"Measured on {run.similarity.basis()}."
        header, *rows = run.similarity.agreement_rows() or [()]
        if rows:
            yield "\n".join(markdown_table(header, rows))
        yield from run.similarity.reasons()
        yield from (_linked(run, file, f"Linear CKA, {arm}") for file, arm in plots.maps)
    if run.timing is not None:
        header, *rows = run.timing.rows()
        yield "## Time of a step"
        yield "\n".join(markdown_table(header, rows))
        yield from (_linked(run, *one) for one in plots.timing)
    if plots.curves:
        yield "## Curves"
        yield from (_linked(run, *one) for one in plots.curves)
    yield "## How it was made"
    yield "\n".join(f"- {name}: {value}" for name, value in _about(run))
    yield "## Files"


def _linked(run: Run, file: Path, caption: str) -> str:
    return f"![{caption}]({file.relative_to(run.folder).as_posix()})"
