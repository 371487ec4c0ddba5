"""One recipe, run: the teacher, the student alone and the student distilled, in one way or several, over seeds.

Every process of a distributed run goes through all of this and comes to the same decisions; only the
first one prints and writes.
"""

from __future__ import annotations

import datetime
import json
import logging
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from torch import nn

from softs_lightning.apart import NeedsFitError
from softs_lightning.callback import DistillationCallback
from softs_lightning.config import ALONE, DISTILLED, Failure, Refusal, arms, build
from softs_lightning.ema import EMATeacher
from softs_lightning.explain import Plan, build_callbacks, distils, examine, leave_untrained, parameters
from softs_lightning.likeness import Likeness
from softs_lightning.report import Arm, Measure, Result, Stop, Timing, read_curves, write_metrics
from softs_lightning.report.run import RESULTS, write_report
from softs_lightning.stopwatch import Stopwatch
from softs_lightning.teacher import Teacher
from softs_lightning.trained import leaving_untrained

__all__ = ["run_recipe"]

log = logging.getLogger(__name__)

PACKAGES = ("softs-lightning", "torch", "lightning", "transformers", "torchmetrics", "hydra-core")
"""Whose versions a run notes."""


def run_recipe(
    recipe: DictConfig, *, name: str, directory: Path, sweep: bool = False, command: str = ""
) -> Result:
    """Run a checked recipe and write what came of it to `directory`.

    Args:
        recipe: as composed by Hydra and passed by `softs_lightning.config.check`.
        name: what the report calls it.
        directory: the run's own folder.
        sweep: whether this is one of several runs of one command.
        command: what the report says that the run was started with.

    Raises:
        Refusal: before any training, when the recipe cannot work.
        Failure: when the teacher scores no better than the student alone.
    """
    began, clock = datetime.datetime.now().astimezone(), time.monotonic()
    if sweep:
        _refuse_processes(recipe)
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    title, trained = name, arms(recipe)
    _loggers(
        recipe, directory, ALONE, recipe.seeds[0]
    )  # one that cannot be made is refused before any training
    plans = {name: _examine(arm, name) for name, arm in trained.items()}
    measures = _measures(recipe)
    teacher = _teacher(recipe)
    seeds = tuple(recipe.seeds)
    ceiling = _scores(recipe, teacher, build(recipe.data, "data"), teacher)
    _say(f"teacher: {measures[0].name} {ceiling[measures[0].name]:.4g}")

    found: list[Arm] = []
    likeness: Likeness | None = None
    watch = Stopwatch()
    timed: str | None = None
    for number, (name, arm) in enumerate(trained.items()):
        scores, size, flops = [], 0, None
        for position, seed in enumerate(seeds, start=1 + number * len(seeds)):
            _say(f"student {name}, seed {seed} ({position} of {len(trained) * len(seeds)})")
            keep = number == 1 and seed == seeds[0]
            watched: list[L.Callback] = []
            if timed is None and name != ALONE and distils(arm):
                timed, watched = name, [watch]
            student, data = _train(arm, seed, name, directory, keep=keep, further=watched)
            scores.append(_scores(arm, student, data, teacher))
            size = parameters(student)
            if seed == seeds[0]:
                likeness = likeness or _likeness(trained, teacher, data, seed)
                flops = likeness.add(name, student)
        stops = tuple(Stop(cost.stop, cost.saved) for plan in plans[name] for cost in plan.costs)
        found.append(Arm(name, tuple(scores), size, stops, flops))
        if name == ALONE:
            _refuse_poor_teacher(measures[0], ceiling, found[0])

    assert likeness is not None
    result = Result(title, measures, seeds, ceiling, parameters(teacher), tuple(found), likeness.flops)
    timing = watch.timing(timed, seeds[0]) if timed is not None else None
    about = _about(recipe, command, began, time.monotonic() - clock)
    _write(recipe, result, likeness, timing, about, directory)
    return result


@rank_zero_only
def _say(text: str) -> None:
    """Say it on the terminal, and in the run's log with the time."""
    print(text, flush=True)
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            handler.handle(log.makeRecord(log.name, logging.INFO, "", 0, text, (), None))


def _refuse_processes(recipe: DictConfig) -> None:
    trainer = build(recipe.trainer, "trainer", logger=False)
    if isinstance(trainer.strategy.launcher, _SubprocessScriptLauncher):
        raise Refusal(
            "--multirun cannot be combined with a strategy that starts its processes by running the command "
            "again: each of them would run the whole sweep. Use trainer.strategy=ddp_spawn, or one command a run."
        )


def _examine(recipe: DictConfig, arm: str) -> tuple[Plan, ...]:
    """What the distillation of one arm will do, found before anything is trained."""
    try:
        if arm == ALONE:
            return ()
        if not distils(recipe):
            _rehearse(recipe)
            return ()
        plans: tuple[Plan, ...] = ()
        try:
            plans = examine(recipe).plans
        except NeedsFitError as error:
            _say(
                f"{error}\nSo what the distillation stops at is not known before the fit, which is tried now."
            )
        _rehearse(recipe)
    except Refusal as refusal:
        raise refusal if arm == DISTILLED else Refusal(f"arms.{arm}: {refusal}") from None
    return plans


def _rehearse(recipe: DictConfig) -> None:
    """One step of the whole fit, without a log: what fails at all fails now, not after the students alone."""
    build(recipe.trainer, "trainer", logger=False)
    callbacks = build_callbacks(recipe)
    for callback in callbacks:
        if isinstance(callback, DistillationCallback):
            leave_untrained(callback)
    # In this process only: a strategy's other processes would begin before the teacher is trained.
    here = {"devices": 1, "num_nodes": 1, "strategy": "auto"}
    quick = {"fast_dev_run": 1, "logger": False, "enable_progress_bar": False}
    trainer: L.Trainer = build(recipe.trainer, "trainer", callbacks=callbacks, **quick, **here)
    with leaving_untrained():  # what it is cut from
        student = build(recipe.student, "student")
    trainer.fit(student, datamodule=build(recipe.data, "data"))


def _teacher(recipe: DictConfig) -> nn.Module:
    """The teacher's module, whichever way the recipe gives it."""
    made = build(recipe.teacher, "teacher")
    given = made if isinstance(made, Teacher) else Teacher(made)
    return given.build().eval()


def _train(
    recipe: DictConfig,
    seed: int,
    arm: str,
    directory: Path,
    *,
    keep: bool,
    further: Sequence[L.Callback] = (),
) -> tuple[L.LightningModule, L.LightningDataModule]:
    """The student after training, and its data. The same seed gives every arm the same weights and batches."""
    recipe = recipe.copy()
    OmegaConf.update(recipe, "seed", seed)
    L.seed_everything(seed, verbose=False)
    student: L.LightningModule = build(recipe.student, "student")
    data: L.LightningDataModule = build(recipe.data, "data")
    callbacks = build_callbacks(recipe)
    if arm == ALONE:
        callbacks = [c for c in callbacks if not isinstance(c, (DistillationCallback, EMATeacher))]
    loggers = _loggers(recipe, directory, arm, seed) or False
    trainer: L.Trainer = build(recipe.trainer, "trainer", callbacks=[*callbacks, *further], logger=loggers)
    trainer.fit(student, datamodule=data)
    if keep:
        trainer.save_checkpoint(directory / "student.ckpt", weights_only=True)
    return student, data


def _loggers(recipe: DictConfig, directory: Path, arm: str, seed: int) -> list[Logger]:
    """The recipe's loggers for one student; those set to null are left out."""
    place = {"save_dir": str(directory / "logs"), "name": arm, "version": str(seed)}
    return [build(node, f"logger.{key}", **place) for key, node in recipe.logger.items() if node]


def _measures(recipe: DictConfig) -> tuple[Measure, ...]:
    """The judge's measures, the headline first."""

    def measure(name: str, node: Any) -> Measure:
        return Measure(name, node.get("unit") or "", bool(node.get("lower", False)))

    others = recipe.judge.get("others") or {}
    return (
        measure(recipe.judge.name, recipe.judge),
        *(measure(str(name), node or {}) for name, node in others.items()),
    )


def _scores(
    recipe: DictConfig, model: nn.Module, data: L.LightningDataModule, teacher: nn.Module
) -> dict[str, float]:
    """What the judge makes of `model`, by measure; `data.setup("test")` has been called."""
    data.prepare_data()
    data.setup("test")
    score = build(recipe.judge.score, "judge.score")
    found = score(model.eval(), data=data, teacher=teacher)
    names = [measure.name for measure in _measures(recipe)]
    if not isinstance(found, Mapping):
        found = {names[0]: found}
    if set(found) != set(names):
        raise Refusal(
            f"judge.score gave {', '.join(map(str, found))}, but the judge's measures (name, others) are "
            f"{', '.join(names)}."
        )
    return {name: float(found[name]) for name in names}


def _refuse_poor_teacher(measure: Measure, ceiling: Mapping[str, float], alone: Arm) -> None:
    teacher, mean = ceiling[measure.name], statistics.fmean(alone.of(measure))
    if not measure.better(teacher, mean):
        raise Failure(
            f"The teacher is no better than the student alone ({measure.name}: {teacher:.4g} against "
            f"{mean:.4g} over {len(alone.scores)} seed(s)): there is nothing to learn from it. "
            "Train the teacher longer or on more, or give the student less."
        )


def _likeness(
    trained: Mapping[str, DictConfig], teacher: nn.Module, data: L.LightningDataModule, seed: int
) -> Likeness:
    """What compares the students with the teacher, fed as the first distillation feeds it."""
    distilling = (
        callback
        for arm in trained.values()
        for callback in build_callbacks(arm)
        if isinstance(callback, DistillationCallback)
    )
    first = next(distilling, None)
    if first is None:
        return Likeness(teacher, data, seed=seed)
    logits = any(hasattr(pair.loss, "temperature") for pair in first.pairs)
    return Likeness(teacher, data, seed=seed, inputs=first.teacher.inputs, logits=logits)


def _about(recipe: DictConfig, command: str, began: datetime.datetime, seconds: float) -> dict[str, Any]:
    """How the run came about, for whoever wants to repeat it."""
    minutes, rest = divmod(round(seconds), 60)
    return {
        "command": command,
        "started": began.isoformat(timespec="seconds"),
        "took": f"{minutes} min {rest} s",
        "machine": f"{platform.system()} {platform.machine()}, {_device()}",
        "threads": recipe.threads if recipe.threads is not None else torch.get_num_threads(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    }


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


@rank_zero_only
def _write(
    recipe: DictConfig,
    result: Result,
    likeness: Likeness,
    timing: Timing | None,
    about: Mapping[str, Any],
    directory: Path,
) -> None:
    write_metrics(read_curves(directory / "logs"), directory / "metrics.csv")
    OmegaConf.save(recipe, directory / "config.yaml", resolve=True)
    (directory / "similarity.json").write_text(likeness.found.to_json(), encoding="utf-8")
    if timing is not None:
        (directory / "timing.json").write_text(timing.to_json(), encoding="utf-8")
    (directory / "run.json").write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
    # Last: a folder with results is a whole run.
    (directory / RESULTS).write_text(result.to_json(), encoding="utf-8")
    write_report(directory)
    _say(f"\n{result.table()}\n")
    for sentence in (*result.stops(), *result.verdicts(), *likeness.found.reasons()):
        _say(sentence)
    _say(f"Report, student, curves: {directory}")
