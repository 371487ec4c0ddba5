"""Where a teacher lies in a run of one or several processes.

==============  ====================================================================================
``replicated``  whole on the device of each rank
``sharded``     in equal parts on all ranks (FSDP2): a layer is whole while it runs, and no longer
``cpu``         whole in the memory of each rank's machine, where it runs; its products are moved
==============  ====================================================================================

A sharded teacher runs on all ranks at once or on none: each gathers a layer from all others. On one
process it is whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["PLACEMENTS", "after_forward", "checked", "is_spread", "prove_equal_batches", "shard"]

PLACEMENTS = ("replicated", "sharded", "cpu")
"""The values that ``placement=`` takes."""


def checked(placement: str) -> str:
    """The placement, or ``ValueError`` with those there are.

    >>> checked("shard")
    Traceback (most recent call last):
    ValueError: there is no placement 'shard'; there are 'replicated', 'sharded', 'cpu'
    """
    if placement not in PLACEMENTS:
        there = ", ".join(map(repr, PLACEMENTS))
        raise ValueError(f"there is no placement {placement!r}; there are {there}")
    return placement


def is_spread() -> bool:
    """Whether there are other processes to share a teacher with."""
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def shard(module: nn.Module, device: torch.device) -> None:
    """Spread a frozen teacher over all ranks, in place; this cannot be undone.

    Each element of a ``ModuleList`` or ``Sequential`` becomes a unit that is gathered when it runs, so of the
    layers one at a time is whole; what is left over is gathered with the root for the length of a forward. Scalar
    parameters stay whole.

    Args:
        module: frozen; best still on the CPU, whence it is moved unit by unit.
        device: where the shards lie and where it runs.

    Raises:
        ValueError: for a teacher that is sharded already, and for a version of torch that cannot stop in mid-forward.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    if not hasattr(FSDPModule, "reset_iter_state"):
        raise ValueError(
            f"placement='sharded' needs a torch whose FSDP2 recovers from a forward that stops early, as 2.13 does; this "
            f"is {torch.__version__}. Use placement='cpu' or 'replicated'"
        )
    if any(
        isinstance(m, FSDPModule) or hasattr(p, "full_tensor")
        for m in module.modules()
        for p in m.parameters()
    ):
        raise ValueError("the teacher is sharded already: leave placement='sharded' out")
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    scalars = {p for p in module.parameters() if not p.ndim}
    for unit in [*_units(module), module]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True, ignored_params=scalars)
    module.to(device)  # buffers and scalars


def _units(module: nn.Module) -> list[nn.Module]:
    """The layers that can be gathered one by one, inner ones first: their parameters are used nowhere else."""
    users: dict[nn.Parameter, int] = {}
    for part in module.modules():
        for parameter in part.parameters(recurse=False):
            users[parameter] = users.get(parameter, 0) + 1
    found = list(dict.fromkeys(_elements(module)))
    return [unit for unit in reversed(found) if unit is not module and _is_unit(unit, users)]


def _elements(module: nn.Module) -> Iterator[nn.Module]:
    for part in module.modules():
        if isinstance(part, (nn.ModuleList, nn.Sequential)):
            yield from part.children()


def _is_unit(unit: nn.Module, users: dict[nn.Parameter, int]) -> bool:
    if isinstance(unit, (nn.ModuleList, nn.ModuleDict, nn.ParameterList)) or not any(
        True for _ in unit.parameters()
    ):
        return False  # no forward calls it, or there is nothing in it
    inside: dict[nn.Parameter, int] = {}
    for part in unit.modules():
        for parameter in part.parameters(recurse=False):
            inside[parameter] = inside.get(parameter, 0) + 1
    return all(users[parameter] == count for parameter, count in inside.items())


def after_forward(module: nn.Module) -> None:
    """Put a sharded teacher back in order after a forward, whether it ended, stopped early or failed."""
    reset = getattr(module, "reset_iter_state", None)
    if reset is not None:
        reset()


def prove_equal_batches(counts: Sequence[float], what: str) -> None:
    """Raise ``RuntimeError`` unless all ranks have as many batches: a rank without one would leave the others waiting.

    Args:
        counts: of this rank, for each dataloader.
        what: what they are for.
    """
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, list(counts))
    if any(other != found[0] for other in found):
        raise RuntimeError(
            f"a sharded teacher runs on all ranks at once, and they have unlike numbers of {what} batches, "
            f"{', '.join(map(str, found))}: let a distributed sampler share them out evenly, set limit_{_limit(what)}, "
            "or use placement='replicated'"
        )


def _limit(what: str) -> str:
    return {"training": "train_batches", "validation": "val_batches"}[what]
