"""A recipe's student outside of a fit: what a fit would have made of it, and what is said where that is not enough.

A student may read its trainer in its steps, and may make its layers in ``setup`` or ``configure_model``. So it gets a
trainer, which is the recipe's own and runs nothing.
"""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from omegaconf import DictConfig

from softs_lightning.config import Refusal, build

__all__ = ["NeedsFitError", "explaining", "prepare", "trainer_of"]

_NO_CODE_OF_USERS = ("torch", "lightning", "softs_lightning")
_OF_A_FIT = ("trainer", "optimizers(", "lr_schedulers(", "logger")


class NeedsFitError(Refusal):
    """A student that cannot be looked at outside of a fit, or that is wrong: the fit itself knows which."""


def trainer_of(recipe: DictConfig, data: L.LightningDataModule) -> L.Trainer:
    """The recipe's trainer as a fit on the CPU begins with it, without callbacks, logs or other processes.

    Args:
        recipe: as composed and checked.
        data: which gets the trainer, and whose loaders the trainer knows once it is set up.

    Raises:
        Refusal: for settings that the trainer does not take.
    """
    here = {"accelerator": "cpu", "devices": 1, "num_nodes": 1, "strategy": "auto", "precision": "32-true"}
    quiet = {"logger": False, "profiler": None, "enable_checkpointing": False, "callbacks": None}
    shown = {"enable_progress_bar": False, "enable_model_summary": False, "plugins": None}
    with _unheard("lightning.pytorch.utilities.rank_zero"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a device that is not used here
        trainer: L.Trainer = build(recipe.trainer, "trainer", **here, **quiet, **shown)
    trainer.state.fn, trainer.state.status = TrainerFn.FITTING, TrainerStatus.RUNNING
    trainer.training = True
    trainer._data_connector.attach_datamodule(L.LightningModule(), data)
    return trainer


def prepare(student: L.LightningModule, trainer: L.Trainer) -> L.LightningModule:
    """The student, with its trainer, behind ``setup("fit")`` and ``configure_model``."""
    student.trainer = trainer
    trainer.strategy.connect(student)
    with trainer.precision_plugin.module_init_context():
        student.setup("fit")
        student.configure_model()
    return student


@contextmanager
def explaining(where: str) -> Iterator[None]:
    """What the student's own code raises is said in one sentence, with the line of the user's that was reached.

    Raises:
        NeedsFitError: instead of any other error than a Refusal.
    """
    try:
        yield
    except Refusal:
        raise
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if _is_of_users(f.filename)]
        line = frames[-1].line or "" if frames else ""
        reached = f", reached from {frames[-1].filename}:{frames[-1].lineno}: {line}" if frames else ""
        said = str(error.args[0] if error.args else error).strip().partition("\n")[0].rstrip(".")
        fit = ""
        if any(word in line for word in _OF_A_FIT):
            fit = " That may be there in a fit only, and nothing is fitted here: a run may work all the same."
        raise NeedsFitError(f"{where}: {type(error).__name__}: {said}{reached}.{fit}") from error


def _is_of_users(file: str) -> bool:
    from importlib.util import find_spec

    if file.startswith("<"):
        return False
    recipes = find_spec("softs_lightning.recipes")
    if recipes is not None and recipes.origin is not None and _inside(file, recipes.origin):
        return True
    origins = [find_spec(name) for name in _NO_CODE_OF_USERS]
    return not any(spec is not None and spec.origin and _inside(file, spec.origin) for spec in origins)


def _inside(file: str, init: str) -> bool:
    return Path(init).parent in Path(file).parents


@contextmanager
def _unheard(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)

    def nothing(record: Any) -> bool:
        return False

    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)
