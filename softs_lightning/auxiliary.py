"""Trainable helpers that live in the student but outside its state_dict.

As a submodule of the student a projector is moved, wrapped, synchronised and optimised with it.
As part of its ``state_dict`` it would make every checkpoint unreadable without this package, so
the container hides there, and its weights travel in the callback's own state.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

__all__ = ["CONTAINER", "Auxiliary", "weights"]

CONTAINER = "_distillation"
"""The attribute of the student that holds the container."""


class Auxiliary(nn.ModuleDict):
    """The one container of a student, with an entry for each callback.

    >>> student = nn.Linear(2, 2)
    >>> Auxiliary.of(student)["distill"] = nn.Linear(2, 3)
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
    def of(cls, student: nn.Module) -> Auxiliary:
        """The container of `student`, made if there is none yet."""
        found = getattr(student, CONTAINER, None)
        if found is None:
            found = cls()
            setattr(student, CONTAINER, found)
        if not isinstance(found, cls):
            raise AttributeError(
                f"{type(student).__name__} has an attribute {CONTAINER!r} of its own, which is where the "
                "trainable parts of a distillation are kept: rename it"
            )
        return found

    @staticmethod
    def remove(student: nn.Module, key: str) -> None:
        """Take one callback's entry out of `student`, and the container with the last of them."""
        container = getattr(student, CONTAINER, None)
        if not isinstance(container, Auxiliary):
            return
        if key in container:
            del container[key]
        if not len(container):
            delattr(student, CONTAINER)

    def state_dict(
        self, *args: Any, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        return {} if destination is None else destination


def weights(module: nn.Module) -> dict[str, Tensor]:
    """A copy on the CPU of what `module` has learned: plain tensors, for a callback's state."""
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


def _forgive_own_names(container: nn.Module, incompatible: Any) -> None:
    own = f"{CONTAINER}."
    incompatible.missing_keys[:] = [
        name for name in incompatible.missing_keys if not name.startswith(own) and f".{own}" not in name
    ]
