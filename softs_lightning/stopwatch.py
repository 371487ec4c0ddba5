"""Where the time of a distilled training step goes, measured in a few steps of a real fit.

For those steps alone the trainer's profiler is replaced by one that keeps a stack of phases, and the
teacher's ``supply`` and the losses of each distillation are wrapped on their instances; before and after
them nothing is in the way. Phases are exclusive, so together they are the whole time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.profilers import Profiler

from softs_lightning.report import PHASES, Timing
from softs_lightning.step import DistilledStep

__all__ = ["Stopwatch"]


class Stopwatch(Callback):
    """Times a few training steps of a fit under distillation.

    Args:
        skip: steps before the first timed one; the first steps are slower than those that follow.
        steps: how many are timed at most, each from its batch's arrival to that of the next.

    Validation that falls between them is not counted.

    >>> Stopwatch().timing("distilled", 0) is None  # no fit has run
    True
    """

    def __init__(self, *, skip: int = 5, steps: int = 20) -> None:
        super().__init__()
        self.skip, self.steps = skip, steps
        self._phases = _Phases()
        self._seen = 0  # batches begun
        self._full: tuple[int, dict[str, float]] = 0, {}
        self._undo: list[Callable[[], None]] = []

    def timing(self, arm: str, seed: int) -> Timing | None:
        """What was measured; ``None`` when the fit was too short to time one whole step."""
        steps, spent = self._full
        seconds = sum(spent.values())
        if not steps or not seconds:
            return None
        shares = {name: spent.get(name, 0.0) / seconds for name in PHASES}
        return Timing(arm, seed, steps, seconds / steps, shares)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._seen += 1
        if self._seen == self.skip + 1:
            self._begin(trainer, pl_module)
        elif self._undo:
            self._phases.mark()
            self._full = self._seen - self.skip - 1, dict(self._phases.spent)
            if self._full[0] == self.steps:
                self._end()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._phases.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._phases.resume()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    def _begin(self, trainer: Trainer, student: LightningModule) -> None:
        phases = self._phases
        phases.start(student.device)
        profiler: Any = trainer.profiler  # type: ignore[attr-defined]
        trainer.profiler = _PhaseProfiler(phases, profiler)  # type: ignore[attr-defined]
        self._undo.append(lambda: setattr(trainer, "profiler", profiler))
        step = student.__dict__.get("training_step")
        for share in step.shares if isinstance(step, DistilledStep) else ():
            self._wrap(share.teacher, "supply", "teacher")
            self._wrap(share, "loss", "losses")

    def _wrap(self, thing: Any, name: str, phase: str) -> None:
        before = vars(thing).get(name)
        inner = getattr(thing, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._phases.push(phase)
            try:
                return inner(*args, **kwargs)
            finally:
                self._phases.pop()

        def put_back() -> None:
            if before is None:
                del thing.__dict__[name]
            else:
                thing.__dict__[name] = before

        thing.__dict__[name] = timed
        self._undo.append(put_back)

    def _end(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._phases.stop()


class _Phases:
    """A stack of phases: time goes to the innermost."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}
        self._stack: list[str] = []
        self._since: float | None = None
        self._wait: Callable[[], None] = _nothing

    def start(self, device: torch.device) -> None:
        self._wait = _waits_for(device)
        self._stack = ["other"]
        self.resume()

    def stop(self) -> None:
        self.pause()
        self._stack = []

    def pause(self) -> None:
        if self._since is not None:
            self.mark()
            self._since = None

    def resume(self) -> None:
        if self._stack:
            self._wait()
            self._since = perf_counter()

    def mark(self) -> None:
        """Give the time since the last mark to the innermost phase."""
        if self._since is None:
            return
        self._wait()
        now = perf_counter()
        phase = self._stack[-1]
        self.spent[phase] = self.spent.get(phase, 0.0) + now - self._since
        self._since = now

    def push(self, name: str) -> None:
        if self._stack:
            self.mark()
            self._stack.append(name)

    def pop(self) -> None:
        if len(self._stack) > 1:  # empty where the watch stopped inside
            self.mark()
            self._stack.pop()


def _waits_for(device: torch.device) -> Callable[[], None]:
    """What waits until an accelerator is done with what it was given."""
    if device.type == "cpu":
        return _nothing
    return partial(torch.accelerator.synchronize, device)


def _nothing() -> None:
    """A CPU is never behind. Not a lambda: strategies that spawn processes pickle their callbacks."""


ACTIONS = {
    "training_step": "student",
    "backward": "backward",
    "train_dataloader_next": "data",
    "batch_to_device": "data",
    "on_before_batch_transfer": "data",
    "on_after_batch_transfer": "data",
    "optimizer_step": "optimizer",
    "optimizer_zero_grad": "optimizer",
    "configure_gradient_clipping": "optimizer",
}
"""Lightning's name of an action, without its class → the phase it is."""


class _PhaseProfiler(Profiler):
    """Tells phases from the actions that Lightning names, and hands every action on to the user's own profiler."""

    def __init__(self, phases: _Phases, inner: Profiler) -> None:
        super().__init__()
        self.phases, self.inner = phases, inner

    def start(self, action_name: str) -> None:
        self.inner.start(action_name)
        if phase := _phase_of(action_name):
            self.phases.push(phase)

    def stop(self, action_name: str) -> None:
        if _phase_of(action_name):
            self.phases.pop()
        self.inner.stop(action_name)

    def summary(self) -> str:
        return self.inner.summary()


def _phase_of(action_name: str) -> str | None:
    return ACTIONS.get(action_name.rpartition("]")[2].rpartition(".")[2])
