"""What a distillation cannot be combined with, each with the way out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning import LightningModule, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

if TYPE_CHECKING:
    from softs_lightning.callback import DistillationCallback

__all__ = ["refuse"]


def refuse(
    callback: DistillationCallback,
    rivals: Sequence[DistillationCallback],
    trainer: Trainer,
    pl_module: LightningModule,
) -> None:
    """Raise ``MisconfigurationException`` for what is known to train wrongly, before anything is built.

    Args:
        callback: the one that is set up.
        rivals: the trainer's other distillations.
        trainer: whose strategy and callbacks must go with it.
        pl_module: whose way of training must.
    """
    _refuse_step(pl_module, callback.manual)
    _refuse_strategy(trainer)
    for other in trainer.callbacks:  # type: ignore[attr-defined]
        if other is callback:
            break
        if isinstance(other, WeightAveraging):
            raise MisconfigurationException(
                f"{type(other).__name__} stands before the distillation callback and would copy the student without "
                "its projectors: place it after"
            )
    if any(rival.name == callback.name for rival in rivals):
        raise MisconfigurationException(
            f"two distillation callbacks are named {callback.name!r}: give each a name="
        )
    if callback.task_weight != 1.0 and any(rival.task_weight != 1.0 for rival in rivals):
        raise MisconfigurationException("two distillation callbacks set task_weight: set it on one of them")


def _refuse_step(pl_module: LightningModule, manual: bool) -> None:
    name = type(pl_module).__name__
    if not pl_module.automatic_optimization and not manual:
        raise MisconfigurationException(
            f"{name} optimizes manually: its training_step calls backward itself, so a loss added to what it returns "
            "would train nothing. Pass manual=True and add callback.distillation_loss(batch) to the loss in "
            "training_step, or use automatic optimization"
        )
    if pl_module.automatic_optimization and manual:
        raise MisconfigurationException(
            f"{name} optimizes automatically, so the callback adds its loss by itself: leave manual=True out"
        )
    if is_param_in_hook_signature(pl_module.training_step, "dataloader_iter", explicit=True):
        raise MisconfigurationException(
            f"{name}.training_step takes dataloader_iter, so the batch is not known to the teacher: take the batch "
            "instead"
        )


def _refuse_strategy(trainer: Trainer) -> None:
    strategy = trainer.strategy
    if isinstance(strategy, ModelParallelStrategy):
        _refuse_tensor_parallel(strategy)
        return
    name = type(strategy).__name__
    # DeepSpeed's is a DDPStrategy to Lightning.
    if isinstance(strategy, (FSDPStrategy, DeepSpeedStrategy)):
        raise MisconfigurationException(
            f"{name} flattens the parameters of the student and of its projectors into buffers of its own, which the "
            "distillation could neither capture behind nor save whole. Shard with FSDP2 instead: call "
            "torch.distributed.fsdp.fully_shard in the LightningModule's configure_model and pass "
            "strategy=ModelParallelStrategy(data_parallel_size=N, tensor_parallel_size=1), or use strategy='ddp'"
        )
    if not isinstance(strategy, (SingleDeviceStrategy, DDPStrategy)):
        raise MisconfigurationException(
            f"distillation runs on one device, under DDP and under ModelParallelStrategy; {name} would leave "
            "projectors unsynchronised or unsaved. Use strategy='ddp'"
        )


def _refuse_tensor_parallel(strategy: ModelParallelStrategy) -> None:
    mesh = strategy.device_mesh
    size = mesh["tensor_parallel"].size()
    if size > 1:
        raise MisconfigurationException(
            f"ModelParallelStrategy is set up for tensor_parallel_size={size} (its default is all devices of a node): "
            "inside tensor-parallel layers activations are shards that no teacher's can be compared with, and "
            "projectors would be replicated over those ranks by chance only. Pass "
            f"data_parallel_size={mesh.size()}, tensor_parallel_size=1 and shard with fully_shard in configure_model"
        )
