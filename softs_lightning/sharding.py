"""A student that FSDP2 shards: where it lies, and what a distillation trains beside it.

Under ``ModelParallelStrategy`` nothing wraps the LightningModule, so nothing synchronises what is added to it.
What the pairs train is therefore sharded too, over the mesh of the student's own parameters: gradients are
averaged as the student's are, and one optimizer, one gradient clipping, sees tensors of one kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from softs_lightning.attaching import Attachment
from softs_lightning.auxiliary import CONTAINER, Auxiliary, restore, weights
from softs_lightning.pairing import BoundPair

__all__ = [
    "is_sharded",
    "is_sharding",
    "loads_plain_checkpoints",
    "mesh_of",
    "saves_after_the_fit",
    "spread",
]


def is_sharding(trainer: Trainer) -> bool:
    """Whether the strategy leaves it to the LightningModule to shard itself."""
    return isinstance(trainer.strategy, ModelParallelStrategy)


def is_sharded(module: nn.Module) -> bool:
    """Whether a part of `module` is sharded by FSDP2."""
    return any(isinstance(m, FSDPModule) for m in module.modules())


def mesh_of(student: LightningModule) -> DeviceMesh:
    """The mesh over which ``configure_model`` has sharded `student`.

    Raises:
        MisconfigurationException: for a student that is not sharded, or over several meshes.
    """
    meshes: list[DeviceMesh] = []
    for parameter in student.parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh not in meshes:
            meshes.append(parameter.device_mesh)
    if not meshes:
        raise MisconfigurationException(
            f"no parameter of {type(student).__name__} is sharded after configure_model, so the ranks would train "
            "apart: call torch.distributed.fsdp.fully_shard in it, or use strategy='ddp'"
        )
    if len(meshes) > 1:
        raise MisconfigurationException(
            f"{type(student).__name__} is sharded over {len(meshes)} meshes, and which of them a projector belongs to is "
            f"not known: shard it over one; they are {', '.join(map(str, meshes))}"
        )
    return meshes[0]


def spread(bound: nn.ModuleList, mesh: DeviceMesh, trainer: Trainer) -> None:
    """Shard what the pairs train over `mesh`, beginning with the values of the first rank.

    Args:
        bound: the pairs with their projectors, and perhaps a balance.
        mesh: of the student.
        trainer: whose precision and device apply.

    Raises:
        MisconfigurationException: for a trainable scalar, which cannot be sharded.
    """
    if not (any(True for _ in bound.parameters()) or any(True for _ in bound.buffers())):
        return
    trainer.precision_plugin.convert_module(bound.to(trainer.strategy.root_device))
    restore(bound, trainer.strategy.broadcast(weights(bound)))
    for what, part, converts in _parts(bound):
        parameters = list(part.named_parameters())
        if not any(p.requires_grad for _, p in parameters):
            continue
        scalars = [name for name, p in parameters if not p.ndim]
        if scalars:
            raise MisconfigurationException(
                f"{what} has the scalar parameter {scalars[0]!r}, and FSDP2 shards none: make it a tensor of shape [1]"
            )
        # What a student that computes in half precision gives is taken in the projector's own.
        own: Any = (
            MixedPrecisionPolicy(param_dtype=parameters[0][1].dtype) if converts else MixedPrecisionPolicy()
        )
        # Sharded again after each forward, so that outside of it the parameters are always the sharded ones.
        fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=own)


def _parts(bound: nn.ModuleList) -> Iterable[tuple[str, nn.Module, bool]]:
    """What is called as a whole: what it is, the module, and whether its inputs are activations alone."""
    for entry in bound:
        if not isinstance(entry, BoundPair):
            yield f"the balance {type(entry).__name__}", entry, False
            continue
        for projector in entry.projectors:
            yield f"pair {entry.pair.name!r}: the projector", projector, True
        if isinstance(entry.loss, nn.Module):
            yield f"pair {entry.pair.name!r}: the loss {type(entry.loss).__name__}", entry.loss, False


def loads_plain_checkpoints(trainer: Trainer, student: LightningModule, attachment: Attachment) -> None:
    """Let the strategy load a checkpoint that does not have what the student's container holds, which is any.

    ``ModelParallelStrategy`` asks a checkpoint in one file for each parameter of the student by name, those
    included that its ``state_dict`` leaves out. What the student itself must find there is asked for here.
    """
    strategy: Any = trainer.strategy
    inner = strategy.load_checkpoint
    if "load_checkpoint" in vars(strategy):
        return  # for another callback, or by whoever has put it there

    def load_checkpoint(checkpoint_path: Any, weights_only: bool | None = None) -> Any:
        restore_method()
        path = Path(strategy.broadcast(checkpoint_path))
        strict = student.strict_loading
        if not strict or not path.is_file():
            return inner(checkpoint_path, weights_only=weights_only)
        found = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
        missing = [name for name in student.state_dict() if name not in found["state_dict"]]
        if missing:
            raise KeyError(
                f"the checkpoint {path} lacks {', '.join(map(repr, missing[:8]))} of {type(student).__name__}; to load "
                "what it has, set strict_loading = False on the module"
            )
        before = student._strict_loading
        student.strict_loading = False
        try:
            return inner(checkpoint_path, weights_only=weights_only)
        finally:
            student._strict_loading = before

    def restore_method() -> None:
        if vars(strategy).get("load_checkpoint") is load_checkpoint:
            del strategy.load_checkpoint

    strategy.load_checkpoint = load_checkpoint
    attachment.undo(restore_method)


def saves_after_the_fit(trainer: Trainer, student: LightningModule) -> None:
    """Let the strategy find what the optimizers train when the student's container is gone again.

    ``ModelParallelStrategy`` looks each parameter of an optimizer up in the student. This stays with the strategy as
    long as its optimizers hold the projectors: until the next fit.
    """
    strategy: Any = trainer.strategy
    vars(strategy).pop("optimizer_state", None)
    container = getattr(student, CONTAINER, None)
    if container is None:
        return
    inner, entries = strategy.optimizer_state, dict(container.items())

    def optimizer_state(optimizer: Any) -> Any:
        if hasattr(student, CONTAINER):
            return inner(optimizer)
        for key, module in entries.items():
            Auxiliary.put(student, key.removesuffix("_"), module)
        try:
            return inner(optimizer)
        finally:
            Auxiliary.discard(student)

    strategy.optimizer_state = optimizer_state
