"""What of a training batch a model is called with."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from softs_lightning.selectors import strip_wrappers

__all__ = ["Takes", "feed", "unwrap"]


def feed(module: nn.Module, batch: Any, takes: Takes | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Choose what of a batch a model is called with, by the signature of its forward.

    A mapping gives the keys that ``forward`` takes by name, never ``labels``; a tuple or list gives
    its first element (which may be a mapping in turn); anything else is the only argument.

    Args:
        module: the model.
        batch: as the user's training step gets it.
        takes: the model's signature, if it was read before.

    Returns:
        (args, kwargs) for the call.

    Raises:
        TypeError: when a required argument is not in the batch, or none of its keys is an argument.

    >>> class Net(nn.Module):
    ...     def forward(self, x, scale=1.0): return x * scale
    >>> feed(Net(), {"x": 2, "labels": 1, "other": 0})
    ((), {'x': 2})
    >>> feed(Net(), [2, 1])
    ((2,), {})
    """
    if isinstance(batch, (tuple, list)):
        if not batch:
            raise TypeError("the batch is empty: the teacher cannot be called")
        return feed(module, batch[0], takes) if isinstance(batch[0], Mapping) else ((batch[0],), {})
    if not isinstance(batch, Mapping):
        return (batch,), {}
    return (), (takes or Takes.of(module)).choose(batch)


@dataclass(frozen=True)
class Takes:
    """What a model's forward takes by name, and which of it is required; read once for many batches."""

    model: str
    named: tuple[str, ...]
    required: tuple[str, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Takes:
        """Read the signature of ``module.forward``, through wrappers."""
        inner = unwrap(module)
        parameters = inspect.signature(inner.forward).parameters.values()
        named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        required = tuple(p.name for p in named if p.default is p.empty)
        return cls(type(inner).__name__, tuple(p.name for p in named), required)

    def choose(self, batch: Mapping[Any, Any]) -> dict[str, Any]:
        """The entries of `batch` that it takes, never ``labels``; raises ``TypeError`` as :func:`feed`."""
        chosen = {name: batch[name] for name in self.named if name in batch and name != "labels"}
        missing = [name for name in self.required if name not in chosen]
        keys = ", ".join(map(repr, batch)) or "no keys"
        way_out = "pass teacher_inputs=lambda batch: ... to say what the teacher is called with"
        if missing:
            raise TypeError(
                f"{self.model}.forward requires {', '.join(map(repr, missing))}, but the batch has {keys}: {way_out}"
            )
        if not chosen:
            takes = ", ".join(map(repr, self.named)) or "no named arguments"
            raise TypeError(
                f"{self.model}.forward takes {takes}, and none is in the batch, which has {keys}: {way_out}"
            )
        return chosen


def unwrap(module: nn.Module) -> nn.Module:
    """The module inside wrappers such as ``torch.compile``'s and ``DistributedDataParallel``."""
    for path, inner in module.named_modules():
        if path and not strip_wrappers(path):
            module = inner
    return module
