"""Ids that stay with their batch through what Lightning and the user do to it before the training step.

A precision plugin that converts inputs, and a hook that transfers or changes a batch, may build a new container,
and what stood beside the old one is lost. While a teacher that wants ids is placed, each of these is followed:
what comes out carries the ids of what went in.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn

from softs_lightning.store.numbered import carry

__all__ = ["follow"]


class _Followed:
    """Stands in for a method on its instance; several teachers may follow one."""

    def __init__(self, owner: Any, name: str, own: Any) -> None:
        self.owner, self.name, self.own = owner, name, own
        self.inner: Callable[..., Any] = getattr(owner, name)
        self.teachers = 0

    def __call__(self, batch: Any, *args: Any, **options: Any) -> Any:
        ids = getattr(batch, "sample_ids", None)
        given = self.inner(batch, *args, **options)
        if ids is None or getattr(given, "sample_ids", None) is not None:
            return given
        try:
            return carry(given, ids)
        except TypeError:
            return given  # a lone tensor, say: the teacher says that it has no ids, if it is asked about this batch

    def leave(self) -> None:
        self.teachers -= 1
        if self.teachers:
            return
        if self.own is None:
            self.owner.__dict__.pop(self.name, None)
        else:
            self.owner.__dict__[self.name] = self.own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._plain_of(memo.get(id(self.owner), self.owner))

    def _plain_of(self, owner: Any) -> Any:
        return getattr(type(owner), self.name).__get__(owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)


def _followed(owner: Any, name: str) -> Callable[[], None]:
    own = owner.__dict__.get(name)
    method = own if isinstance(own, _Followed) else _Followed(owner, name, own)
    method.teachers += 1
    owner.__dict__[name] = method
    return method.leave


def follow(student: nn.Module) -> Callable[[], None]:
    """Let batches on their way to the student's step keep their ids; returns what ends it.

    Args:
        student: attached to a Trainer; without one there is nobody who changes batches on the way.
    """
    trainer = getattr(student, "_trainer", None)
    stack = ExitStack()
    if trainer is not None:
        # The order in which Lightning calls them: convert_input, then both of the module, which call the hooks.
        stack.callback(_followed(trainer.precision_plugin, "convert_input"))
        stack.callback(_followed(student, "_on_before_batch_transfer"))
        stack.callback(_followed(student, "_apply_batch_transfer_handler"))
    return stack.close
