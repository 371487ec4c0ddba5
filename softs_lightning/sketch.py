"""What a student's activations look like, found without its weights and without computing its step where that can be done.

What :mod:`softs_lightning.outline` is for a teacher, for a LightningModule: made on the meta device, and its
``training_step`` run under fake tensors, a student of billions of parameters takes seconds and no memory. What cannot be
found so is found for real, and the sketch says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning import LightningModule, Trainer

from softs_lightning.catcher import Capture
from softs_lightning.dryrun import rehearse
from softs_lightning.forgetting import forgetting
from softs_lightning.product import ProductSpec

__all__ = ["Sketch"]


class Sketch:
    """A student that is looked at.

    Its step runs on a copy, and what functions, classes and modules keep of it is forgotten, as far as
    :func:`softs_lightning.forgetting.forgetting` says.

    Args:
        make: makes it. Called once more where what was made on the meta device will not do.
        computing: make it with its weights and run its step for real, without trying anything else first.
        trainer: whose precision, device and batch hooks apply, and which the student has; none by default.

    Attributes:
        module: the student, perhaps on the meta device.
        made: why its weights had to be made; ``None`` where they were not, or were asked for.
        ran: why its step had to run for real; likewise.

    >>> from lightning.pytorch.demos.boring_classes import BoringModel
    >>> student = Sketch(BoringModel)
    >>> values = student.rehearse(torch.ones(3, 32), ProductSpec.parse("outputs[layer]")).select()
    >>> list(values[0].shape), student.module.layer.weight.device, student.made, student.ran
    ([3, 2], device(type='meta'), None, None)
    """

    def __init__(
        self, make: Callable[[], LightningModule], *, computing: bool = False, trainer: Trainer | None = None
    ) -> None:
        self._make = make
        self._trainer = trainer
        self._computing = computing
        self._has_weights = computing
        self.made: str | None = None
        self.ran: str | None = None
        if computing:
            self.module = make()
            return
        try:
            with forgetting(), torch.device("meta"), warnings.catch_warnings():
                # A checkpoint that is loaded into it: shapes are compared, and no values are wanted.
                warnings.filterwarnings("ignore", message=".*which is a no-op")
                self.module = make()
        except Exception as error:  # if it is real, it comes again
            self._make_weights(error)

    def rehearse(self, batch: Any, spec: ProductSpec) -> Capture:
        """What `spec` selects of the student in a training step on `batch`; see :func:`softs_lightning.dryrun.rehearse`.

        Raises:
            Exception: whatever the step raises when it runs for real.
        """
        while not self._computing:
            try:
                return rehearse(self.module, batch, spec, trainer=self._trainer, computing=False)
            except Exception as error:
                if self._has_weights:
                    self.ran, self._computing = _said(error), True
                else:
                    self._make_weights(error)
        return rehearse(self.module, batch, spec, trainer=self._trainer)

    def _make_weights(self, error: Exception) -> None:
        self.made, self._has_weights = _said(error), True
        self.module = self._make()


def _said(error: Exception) -> str:
    """The first line of what the first of a chain of errors says."""
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
