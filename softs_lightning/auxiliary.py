"""Trainable helpers that live in the student but outside its state_dict.

As a submodule of the student a projector is moved, wrapped, synchronised and optimised with it.
As part of its ``state_dict`` it would make every checkpoint unreadable without this package, so
the container hides there, and its weights travel in the callback's own state.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["CONTAINER", "Auxiliary", "enrol", "local", "restore", "weights"]

CONTAINER = "_distillation"
"""The attribute of the student that holds the container."""


class Auxiliary(nn.ModuleDict):
    """The one container of a student, with an entry for each callback.

    >>> student = nn.Linear(2, 2)
    >>> Auxiliary.put(student, "distill", nn.Linear(2, 3))
    >>> sorted(student.state_dict()), len(list(student.parameters()))
    (['bias', 'weight'], 4)
    >>> student.load_state_dict(nn.Linear(2, 2).state_dict(), strict=True)
    <All keys matched successfully>
    """

    def __init__(self) -> None:
        super().__init__()
        # On the container, not on the student: averaged copies of the student load through it too.
        register: Any = self.register_load_state_dict_post_hook
        register(_forgive_own_names)

    @classmethod
    def put(cls, student: nn.Module, name: str, module: nn.Module) -> None:
        """Keep `module` in `student` under `name`; the container is made with its first entry."""
        container = getattr(student, CONTAINER, None)
        if container is None:
            container = cls()
            setattr(student, CONTAINER, container)
        if not isinstance(container, cls):
            raise AttributeError(
                f"{type(student).__name__} has an attribute {CONTAINER!r} of its own, which is where the "
                "trainable parts of a distillation are kept: rename it"
            )
        container[_key(name)] = module
        # Sorted, so that optimizer state fits again whatever the order of the callbacks is.
        container._modules = dict(sorted(container._modules.items()))

    @staticmethod
    def remove(student: nn.Module, name: str) -> None:
        """Take one callback's entry out of `student`, and the container with the last of them."""
        container = getattr(student, CONTAINER, None)
        if not isinstance(container, Auxiliary):
            return
        if _key(name) in container:
            del container[_key(name)]
        if not len(container):
            delattr(student, CONTAINER)

    @staticmethod
    def discard(student: nn.Module) -> None:
        """Take out whatever an earlier fit, or the model that this one is a copy of, has left."""
        if isinstance(getattr(student, CONTAINER, None), Auxiliary):
            delattr(student, CONTAINER)

    def __deepcopy__(self, memo: dict[int, Any]) -> Auxiliary:
        # Whole: an averaged copy of the student must have what the student has.
        twin = memo[id(self)] = type(self)()
        twin.update({key: copy.deepcopy(module, memo) for key, module in self.items()})
        return twin.train(self.training)

    def __reduce__(self) -> tuple[Any, ...]:
        # Empty: a student pickled in mid-fit is the plain student, whatever losses are made of.
        return type(self), ()

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        return {} if destination is None else destination


def _key(name: str) -> str:
    return f"{name}_"  # a ModuleDict takes no keys such as 'keys' or 'training'


def enrol(student: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """See that each trainable parameter of the container is in exactly one optimizer group.

    Raises:
        MisconfigurationException: when there is no optimizer, or a parameter is in several groups.
    """
    container = getattr(student, CONTAINER, None)
    parameters = [p for p in container.parameters() if p.requires_grad] if container is not None else []
    if not parameters:
        return
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    if not groups:
        raise MisconfigurationException(
            "configure_optimizers returned no optimizer, so nothing would train the projectors"
        )
    for parameter in parameters:
        holders = sum(any(p is parameter for p in group["params"]) for group in groups)
        if holders > 1:
            raise MisconfigurationException("a projector's parameter is in several optimizer groups")
        if holders == 0:
            # Extending a group, not adding one: most schedulers fail or go wrong on a new group.
            groups[0]["params"].append(parameter)


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy on the CPU of what `module` has learned: plain, whole tensors, for a callback's state.

    What is sharded is gathered, so then every rank must call this.
    """
    return {name: _whole(tensor.detach()).cpu().clone() for name, tensor in module.state_dict().items()}


def restore(module: nn.Module, learned: Mapping[str, Tensor]) -> None:
    """Put back what :func:`weights` has given; each rank takes its shard of what is sharded."""
    own = module.state_dict()
    module.load_state_dict({name: _like(own.get(name), tensor) for name, tensor in learned.items()})


def local(parameter: Tensor) -> Tensor:
    """What of a parameter lies on this rank; gradients go back through it.

    >>> parameter = nn.Linear(2, 2).weight
    >>> local(parameter) is parameter
    True
    """
    if not hasattr(parameter, "to_local"):
        return parameter
    shard: Tensor = parameter.to_local()
    return shard


def _whole(tensor: Tensor) -> Tensor:
    if not hasattr(tensor, "full_tensor"):
        return tensor
    gathered: Tensor = tensor.full_tensor()
    return gathered


def _like(own: Tensor | None, tensor: Tensor) -> Tensor:
    if not hasattr(own, "full_tensor"):
        return tensor
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(own, DTensor)
    return distribute_tensor(tensor.to(own.device), own.device_mesh, own.placements)


def _forgive_own_names(container: nn.Module, incompatible: Any) -> None:
    own = f"{CONTAINER}."
    incompatible.missing_keys[:] = [
        name for name in incompatible.missing_keys if not name.startswith(own) and f".{own}" not in name
    ]
