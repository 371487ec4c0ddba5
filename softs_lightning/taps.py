"""The hook that watches one module, shared by every way of capturing.

A tap is placed as a forward hook and stays; what makes it speak is being armed. An idle tap costs
one attribute check, in compiled code one guard.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["Tap", "has_compiled"]


def has_compiled(model: nn.Module) -> bool:
    """Whether `model`, or anything in it, is compiled: compiled code may not see a hook that is added later."""
    wrapped = getattr(sys.modules.get("torch._dynamo"), "OptimizedModule", None)
    if wrapped is None:  # nothing can have been compiled
        return False
    return any(isinstance(m, wrapped) or m._compiled_call_impl is not None for m in model.modules())


class Tap:
    """One hook on one module. Copies of a hooked model get taps of their own, which nobody arms.

    A subclass calls ``self.deliver(...)`` from ``__call__`` if it is armed, and says in
    ``_deliver`` where things go.
    """

    armed = False

    def arm(self) -> None:
        if "torch._dynamo" in sys.modules and "deliver" not in self.__dict__:
            self.__dict__["deliver"] = _outside_graphs(self._deliver)
        self.armed = True

    def disarm(self) -> None:
        self.armed = False

    def _deliver(self, *what: Any) -> None:
        raise NotImplementedError

    def deliver(self, *what: Any) -> None:
        self._deliver(*what)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tap:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


def _outside_graphs(deliver: Callable[..., None]) -> Any:
    """Compiled code may check whether to deliver, but must not trace into the buffer."""
    disable: Callable[..., Any] = torch.compiler.disable
    reason = (
        "activations are captured here, which fullgraph=True rules out: compile without it, or capture from the "
        "model that is not compiled"
    )
    try:
        return disable(deliver, reason=reason)
    except TypeError:  # torch 2.6 takes no reason
        return disable(deliver)
