"""EMATeacher: a teacher whose weights are a moving average of the student's own.

A :class:`~softs_lightning.callback.DistillationCallback` owns the teacher, freezes it and asks it for
products as ever; this callback only moves its weights, after each optimizer step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, SingleDeviceStrategy
from torch import Tensor, nn

from softs_lightning.auxiliary import CONTAINER, weights
from softs_lightning.callback import DistillationCallback
from softs_lightning.names import nearest
from softs_lightning.schedules import Schedule, as_schedule

__all__ = ["EMATeacher"]


@dataclass(frozen=True)
class _Followed:
    """The student's tensors and the teacher's, name by name: those that are averaged and those that are copied."""

    averaged: list[tuple[Tensor, Tensor]]
    copied: list[tuple[Tensor, Tensor]]
    buffers: list[Tensor]

    @torch.no_grad()
    def move(self, decay: float, *, spread: bool = False) -> None:
        """One step of the average; `spread` gives all ranks the first one's buffers."""
        for student, teacher in self.averaged:
            # In the teacher's type: where the student is trained in another, its numbers are rounded once.
            teacher.lerp_(student.detach().to(teacher.device, teacher.dtype), 1 - decay)
        for student, teacher in self.copied:
            teacher.copy_(student)
        # Parameters are alike on all ranks, statistics of batches are not: a checkpoint has the first rank's.
        for buffer in self.buffers if spread else ():
            torch.distributed.broadcast(buffer, 0)


class EMATeacher(Callback):
    """Make the teacher of a distillation an exponential moving average of the student (Mean Teacher, arXiv:1703.01780).

    After each optimizer step: ``teacher = decay · teacher + (1 − decay) · student``, for parameters and for
    buffers of floating point (the statistics of batch norms); other buffers are copied. A fit begins with
    the student's weights in the teacher, whatever its factory gave it. The teacher stays in eval mode, without
    gradients, and out of the student's checkpoints; its weights travel in this callback's state, so that resuming
    goes on exactly.

    Args:
        decay: between 0 and 1: a number, or a function of the step or the epoch (:mod:`softs_lightning.schedules`),
            such as ``Cosine(0.996, 1.0, over=10_000)``. It is read with the number of steps done, from 1 on.
        part: the module of the student that the teacher is built like; by default the whole of it.
        of: the ``name`` of the :class:`~softs_lightning.callback.DistillationCallback` whose teacher it moves.

    Raises:
        ValueError: for a decay outside 0..1: a number at once, a schedule's value when it is met.
        MisconfigurationException: at the start of a fit: no distillation of that name; a teacher that was handed over
            as a module (its weights would be lost: pass a factory) or reads from a store; a teacher that is not
            built like the student; weights in less than float32, in which an average stands still; a strategy
            that shards the student; a checkpoint that was written without this callback.

    Example::

        >>> import torch, lightning as L
        >>> from torch import nn
        >>> from softs_lightning import DistillationCallback, Pair
        >>> class Student(L.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        ...     def training_step(self, batch, batch_idx):
        ...         return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> def same_net():
        ...     return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))
        >>> pair = Pair(teacher="outputs[2]", student="outputs[net]", loss=nn.MSELoss())
        >>> mean = EMATeacher(decay=0.9, part="net")
        >>> data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
        >>> trainer = L.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        ...     enable_progress_bar=False, enable_model_summary=False,
        ...     callbacks=[DistillationCallback(same_net, [pair]), mean])
        >>> trainer.fit(Student(), torch.utils.data.DataLoader(data, batch_size=4))
        >>> same_net().load_state_dict(mean.weights)
        <All keys matched successfully>
    """

    def __init__(self, decay: float | Schedule = 0.999, *, part: str = "", of: str = "distill") -> None:
        super().__init__()
        if isinstance(decay, (int, float)) and not isinstance(decay, bool):
            _share(float(decay), "decay")
        self._decay = as_schedule(decay, "decay")
        if not isinstance(part, str) or not isinstance(of, str):
            raise TypeError(f"part and of are names, got {part!r} and {of!r}")
        self.part = part
        self.of = of
        self._step = 0
        self._followed: _Followed | None = None
        self._teacher: nn.Module | None = None
        self._kept: dict[str, Tensor] = {}
        self._resumed = False

    @property
    def state_key(self) -> str:
        return self._generate_state_key(of=self.of)

    @property
    def weights(self) -> Mapping[str, Tensor]:
        """The average as a ``state_dict`` on the CPU, of the whole student or of its `part`; empty before any fit."""
        self._keep()
        return dict(self._kept)

    # -- the fit --------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._let_go()
        self._resumed = False
        self._refuse(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The earliest moment at which the student's weights are those of a checkpoint, or those that DDP has spread.
        teacher = self._distillation(trainer).teacher.module
        assert teacher is not None, "a distillation places its teacher in setup"
        followed = follow(self._student(pl_module), teacher)
        followed.move(0.0)
        if self._resumed:
            teacher.load_state_dict(self._kept)
        self._followed, self._teacher = followed, teacher

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = trainer.global_step  # that of the checkpoint by now

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # While gradients are accumulated there is no step to follow.
        if self._followed is None or trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        decay = _share(self._decay(self._step, trainer.current_epoch), "decay")
        self._followed.move(decay, spread=trainer.world_size > 1)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._let_go()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._let_go()

    def _keep(self) -> None:
        if self._teacher is not None:
            self._kept = weights(self._teacher)

    def _let_go(self) -> None:
        self._keep()
        self._followed = self._teacher = None

    # -- the callback's state -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self._keep()
        return {"weights": self._kept} if self._kept else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if "weights" in state_dict:
            self._kept = dict(state_dict["weights"])
            self._resumed = True

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn == "fit" and self.state_key not in checkpoint.get("callbacks", {}):
            raise MisconfigurationException(
                f"this checkpoint holds no moving average for the distillation {self.of!r}, which would start anew: it "
                "was written without EMATeacher, or with save_weights_only=True. To begin a new fit from its weights, "
                "load them into the LightningModule and pass no ckpt_path"
            )

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles are those of a callback between fits.
        self._keep()
        return {**self.__dict__, "_followed": None, "_teacher": None}

    # -- what cannot work -----------------------------------------------------------------------

    def _distillation(self, trainer: Trainer) -> DistillationCallback:
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        there = {c.name: c for c in callbacks if isinstance(c, DistillationCallback)}
        if self.of not in there:
            names = ", ".join(map(repr, there)) or "none at all"
            raise MisconfigurationException(
                f"EMATeacher(of={self.of!r}) follows the student for a DistillationCallback of that name, and the "
                f"trainer has {names}"
            )
        return there[self.of]

    def _refuse(self, trainer: Trainer) -> None:
        distillation = self._distillation(trainer)
        strategy = trainer.strategy
        if isinstance(strategy, DeepSpeedStrategy) or not isinstance(
            strategy, (SingleDeviceStrategy, DDPStrategy)
        ):
            raise MisconfigurationException(
                f"EMATeacher averages whole weights, on one device or under DDP; {type(strategy).__name__} may leave each "
                "process a part of them. Use strategy='ddp'"
            )
        teacher = distillation.teacher
        if isinstance(teacher.source, nn.Module):
            raise MisconfigurationException(
                f"the teacher of {self.of!r} is a module of yours, whose weights the student's would overwrite: pass a "
                "factory, such as functools.partial(Net, ...)"
            )
        from softs_lightning.store import StoredTeacher  # its files are read by those who use it only

        if isinstance(teacher, StoredTeacher):
            raise MisconfigurationException(
                f"the teacher of {self.of!r} reads from a store, and what a moving average said before is not what it "
                "says now: leave store out"
            )

    def _student(self, pl_module: LightningModule) -> nn.Module:
        try:
            return pl_module.get_submodule(self.part)
        except AttributeError:
            names = [name for name, _ in pl_module.named_modules() if name]
            raise MisconfigurationException(
                f"EMATeacher(part={self.part!r}): {type(pl_module).__name__} has no such module; nearest: "
                f"{', '.join(nearest(self.part, names)) or 'none'}"
            ) from None


def follow(student: nn.Module, teacher: nn.Module) -> _Followed:
    """Pair the tensors of both by name.

    Raises:
        MisconfigurationException: when names or shapes differ, or weights have less than 32 bits.
    """
    own = CONTAINER + "."
    ours, theirs = (
        {n: t for n, t in [*m.named_parameters(), *m.named_buffers()] if not n.startswith(own)}
        for m in (student, teacher)
    )
    unlike = [name for name in {**ours, **theirs} if name not in ours or name not in theirs]
    unlike += [name for name in ours if name in theirs and ours[name].shape != theirs[name].shape]
    if unlike:
        raise MisconfigurationException(
            f"a moving average needs a teacher built like the student, and {type(teacher).__name__} and "
            f"{type(student).__name__} differ in {', '.join(sorted(unlike)[:5])}{', ...' if unlike[5:] else ''}. Build both "
            "by the same factory, or name the part of the student that is like the teacher with part="
        )
    for name, tensor in theirs.items():
        if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
            raise MisconfigurationException(
                f"the teacher's {name!r} is {str(tensor.dtype).removeprefix('torch.')}, in which a moving average stands "
                "still: its steps are smaller than the gaps between numbers. Use a mixed precision, such as 'bf16-mixed', "
                "without teacher_dtype"
            )
    floats = [name for name, tensor in theirs.items() if tensor.is_floating_point()]
    return _Followed(
        [(ours[name], theirs[name]) for name in floats],
        [(ours[name], theirs[name]) for name in theirs if name not in floats],
        list(teacher.buffers()),
    )


def _share(value: float, what: str) -> float:
    if not (math.isfinite(value) and 0 <= value <= 1):
        raise ValueError(f"{what} must lie between 0 and 1, got {value}")
    return value
