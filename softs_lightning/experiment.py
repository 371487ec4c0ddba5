"""One recipe, run: the teacher, the student alone and the student distilled, over several seeds.

Every process of a distributed run goes through all of this and comes to the same decisions; only the
first one prints and writes.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning_utilities.core.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from torch import nn

from softs_lightning.callback import DistillationCallback
from softs_lightning.config import Failure, Refusal, build
from softs_lightning.explain import build_callbacks, examine, leave_untrained, parameters
from softs_lightning.report import ALONE, DISTILLED, Result, Stop, draw_curves, read_curves, write_metrics
from softs_lightning.teacher import Teacher

__all__ = ["run_recipe"]

FILES = {
    "student.ckpt": "the distilled student of the first seed; its own class loads it with load_from_checkpoint",
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
    seen = examine(recipe)
    _rehearse(recipe)
    teacher = _teacher(recipe)
    seeds = tuple(recipe.seeds)

    def scores(arm: str) -> tuple[float, ...]:
        found = []
        for number, seed in enumerate(seeds, start=1 if arm == ALONE else 1 + len(seeds)):
            _say(f"student {arm}, seed {seed} ({number} of {2 * len(seeds)})")
            student, data = _train(recipe, seed, arm, directory)
            found.append(_score(recipe, student, data, teacher))
        return tuple(found)

    ceiling = _score(recipe, teacher, build(recipe.data, "data"), teacher)
    _say(f"teacher: {recipe.judge.name} {ceiling:.4g}")
    alone = scores(ALONE)
    _refuse_poor_teacher(recipe, ceiling, alone)
    distilled = scores(DISTILLED)

    result = Result(
        recipe=name,
        judge=recipe.judge.name,
        unit=recipe.judge.get("unit") or "",
        seeds=seeds,
        teacher=ceiling,
        alone=alone,
        distilled=distilled,
        teacher_parameters=parameters(teacher),
        student_parameters=seen.student_parameters,
        stops=tuple(Stop(plan.cost.stop, plan.cost.saved) for plan in seen.plans),
    )
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
    recipe: DictConfig, seed: int, arm: str, directory: Path
) -> tuple[L.LightningModule, L.LightningDataModule]:
    """The student after training, and its data. The same seed gives both arms the same weights and batches."""
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
    if arm == DISTILLED and seed == recipe.seeds[0]:
        trainer.save_checkpoint(directory / "student.ckpt", weights_only=True)
    return student, data


def _score(recipe: DictConfig, model: nn.Module, data: L.LightningDataModule, teacher: nn.Module) -> float:
    """What the judge makes of `model`; `data.setup("test")` has been called."""
    data.prepare_data()
    data.setup("test")
    score = build(recipe.judge.score, "judge.score")
    return float(score(model.eval(), data=data, teacher=teacher))


def _refuse_poor_teacher(recipe: DictConfig, teacher: float, alone: tuple[float, ...]) -> None:
    if not teacher > statistics.fmean(alone):
        raise Failure(
            f"The teacher is no better than the student alone ({recipe.judge.name}: {teacher:.4g} against "
            f"{statistics.fmean(alone):.4g} over {len(alone)} seed(s)): there is nothing to learn from it. "
            "Train the teacher longer or on more, or give the student less."
        )


@rank_zero_only
def _write(recipe: DictConfig, result: Result, directory: Path) -> None:
    curves = read_curves(directory / "logs")
    write_metrics(curves, directory / "metrics.csv")
    figure = draw_curves(curves, title=f"{result.recipe}: student alone and distilled")
    figure.savefig(directory / "curves.png", dpi=120)
    OmegaConf.save(recipe, directory / "config.yaml", resolve=True)
    (directory / "report.md").write_text(result.markdown(files=FILES), encoding="utf-8")
    print(f"\n{result.table()}\n")
    for stop in result.stops:
        print(f"The teacher {stop}.")
    print(f"{result.verdict()}\nReport, student, curves: {directory}")
