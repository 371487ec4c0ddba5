"""Which values outlive a trace (no torch here)."""

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from softs_lightning.tracing.errors import OutsideTraceError
from softs_lightning.tracing.worker import ACTIVE

__all__ = ["Saves", "current_saves", "save", "save_or_call"]

T = TypeVar("T")


@lru_cache(256)  # to ask whether something is a mapping takes longer than all the rest of a read
def _elements(kind: type) -> Callable[[Any], Iterable[Any]] | None:
    if issubclass(kind, Mapping):
        return Mapping.values
    return iter if issubclass(kind, tuple | list) else None


class Saves:
    """The values that one outermost trace is to keep, by identity; and those that were given a name."""

    def __init__(self, outer: "Saves | None" = None) -> None:
        self.outer = outer  # the trace around: what is kept here is kept there
        self._kept: dict[int, Any] = {}
        self.named: dict[str, Any] = {}

    def add(self, value: Any) -> None:
        if self.outer is not None:
            self.outer.add(value)
        if id(value) in self._kept:
            return
        self._kept[id(value)] = value
        elements = _elements(type(value))  # type: ignore[arg-type]
        for each in () if elements is None else elements(value):
            self.add(each)

    def keeps(self, value: Any) -> bool:
        """Whether a name for ``value`` is handed back: only from an outermost trace do unsaved ones not return."""
        return self.outer is not None or id(value) in self._kept


def save(value: T, name: str | None = None) -> T:
    """Keep ``value`` beyond the trace; returns it.

    The names of the block that refer to it are handed back when the trace ends. So are those that refer to an
    element of a saved tuple, list or mapping. It works for values of every kind, and in functions that the
    block calls.

    Args:
        value: anything.
        name: the key under which `Envoy.run` returns it.

    Raises:
        OutsideTraceError: no trace is running on this thread.
        ValueError: another value was saved under the same name.

    >>> import torch
    >>> from softs_lightning.tracing import Envoy
    >>> model = Envoy(torch.nn.Linear(2, 3))
    >>> def shapes(model):
    ...     save(tuple(model.output.shape), "shape")
    >>> model.run(shapes, torch.zeros(4, 2))
    {'shape': (4, 3)}
    """
    saves = current_saves()
    if saves is None:
        raise OutsideTraceError("save() keeps a value beyond a trace, and no trace is running here")
    saves.add(value)
    if name is not None and saves.named.setdefault(name, value) is not value:
        raise ValueError(f"two values were saved under the name {name!r}; names are unique in a trace")
    return value


def current_saves() -> Saves | None:
    """What the trace that is running on this thread keeps; None outside of one."""
    if ACTIVE.worker is not None:
        saves: Saves = ACTIVE.worker.run.saves
        return saves
    collecting: Saves | None = ACTIVE.collecting
    return collecting


def save_or_call(value: Any) -> Any:
    """What ``value.save()`` means in a block: its own method of that name, or else `save`."""
    own = getattr(value, "save", None)
    return save(value) if own is None else own()
