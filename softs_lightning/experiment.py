"""One recipe, run: the teacher, the student alone and the student distilled, in one way or several, over seeds.

Every process of a distributed run goes through all of this and comes to the same decisions; only the
first one prints and writes.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from torch import nn

from softs_lightning.callback import DistillationCallback
from softs_lightning.config import ALONE, DISTILLED, Failure, Refusal, arms, build
from softs_lightning.explain import Plan, build_callbacks, distils, examine, leave_untrained, parameters
from softs_lightning.report import (
    Arm,
    Measure,
    Result,
    Stop,
    draw_curves,
    read_curves,
    write_metrics,
)
from softs_lightning.teacher import Teacher

__all__ = ["run_recipe"]

FILES = {
    "student.ckpt": "the distilled student (of several, the first) of the first seed; its own class loads it with load_from_checkpoint",
    "results.json": "the scores of every seed, for programs",
    "metrics.csv": "everything that was logged: student, seed, step, metric, value",
    "curves.png": "the validation curves, mean and range over the seeds",
    "config.yaml": "the composed config",
    "logs/": "what Lightning wrote for each student",
}


def run_recipe(recipe: DictConfig, *, name: str, directory: Path, sweep: bool = False) -> Result:
    """Run a checked recipe and write what came of it to `directory`.

    Args:
        recipe: as composed by Hydra and passed by `softs_lightning.config.check`.
        name: what the report calls it.
        directory: the run's own folder.
        sweep: whether this is one of several runs of one command.

    Raises:
        Refusal: before any training, when the recipe cannot work.
        Failure: when the teacher scores no better than the student alone.
    """
    if sweep:
        _refuse_processes(recipe)
    if recipe.threads is not None:
        torch.set_num_threads(recipe.threads)
    title, trained = name, arms(recipe)
    plans = {name: _examine(arm, name) for name, arm in trained.items()}
    measures = _measures(recipe)
    teacher = _teacher(recipe)
    seeds = tuple(recipe.seeds)
    ceiling = _scores(recipe, teacher, build(recipe.data, "data"), teacher)
    _say(f"teacher: {measures[0].name} {ceiling[measures[0].name]:.4g}")

    found: list[Arm] = []
    for number, (name, arm) in enumerate(trained.items()):
        scores, size = [], 0
        for position, seed in enumerate(seeds, start=1 + number * len(seeds)):
            _say(f"student {name}, seed {seed} ({position} of {len(trained) * len(seeds)})")
            keep = number == 1 and seed == seeds[0]
            student, data = _train(arm, seed, name, directory, keep=keep)
            scores.append(_scores(arm, student, data, teacher))
            size = parameters(student)
        stops = tuple(Stop(cost.stop, cost.saved) for plan in plans[name] for cost in plan.costs)
        found.append(Arm(name, tuple(scores), size, stops))
        if name == ALONE:
            _refuse_poor_teacher(measures[0], ceiling, found[0])

    result = Result(title, measures, seeds, ceiling, parameters(teacher), tuple(found))
    _write(recipe, result, directory)
    return result


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)


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
        plans = examine(recipe).plans
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
    trainer.fit(build(recipe.student, "student"), datamodule=build(recipe.data, "data"))


def _teacher(recipe: DictConfig) -> nn.Module:
    """The teacher's module, whichever way the recipe gives it."""
    made = build(recipe.teacher, "teacher")
    given = made if isinstance(made, Teacher) else Teacher(made)
    return given.build().eval()


def _train(
    recipe: DictConfig, seed: int, arm: str, directory: Path, *, keep: bool
) -> tuple[L.LightningModule, L.LightningDataModule]:
    """The student after training, and its data. The same seed gives every arm the same weights and batches."""
    recipe = recipe.copy()
    OmegaConf.update(recipe, "seed", seed)
    L.seed_everything(seed, verbose=False)
    student: L.LightningModule = build(recipe.student, "student")
    data: L.LightningDataModule = build(recipe.data, "data")
    callbacks = build_callbacks(recipe)
    if arm == ALONE:
        callbacks = [callback for callback in callbacks if not isinstance(callback, DistillationCallback)]
    logger = CSVLogger(directory / "logs", name=arm, version=str(seed))
    trainer: L.Trainer = build(recipe.trainer, "trainer", callbacks=callbacks, logger=logger)
    trainer.fit(student, datamodule=data)
    if keep:
        trainer.save_checkpoint(directory / "student.ckpt", weights_only=True)
    return student, data


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


@rank_zero_only
def _write(recipe: DictConfig, result: Result, directory: Path) -> None:
    curves = read_curves(directory / "logs")
    write_metrics(curves, directory / "metrics.csv")
    figure = draw_curves(curves, title=f"{result.recipe}: student alone and distilled")
    figure.savefig(directory / "curves.png", dpi=120)
    (directory / "results.json").write_text(result.to_json(), encoding="utf-8")
    OmegaConf.save(recipe, directory / "config.yaml", resolve=True)
    (directory / "report.md").write_text(result.markdown(files=FILES), encoding="utf-8")
    print(f"\n{result.table()}\n")
    for sentence in (*result.stops(), *result.verdicts()):
        print(sentence)
    print(f"Report, student, curves: {directory}")
