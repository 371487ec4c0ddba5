"""Nested activations: walk them, rebuild them, move them.

Containers keep their type: tuples, named tuples, torch's return types, lists, deques, sets, dicts
and other mappings, dataclasses, transformers' ``ModelOutput`` and ``BatchEncoding``, and objects
that carry a ``.to``. Everything else passes through untouched, modules always.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

__all__ = ["iter_tensors", "map_tensors", "transfer_to_device"]

T = TypeVar("T")


def transfer_to_device(obj: T, device: torch.device | str | int | None) -> T:
    """Move every tensor in `obj` to `device`, keeping the containers' types.

    Args:
        obj: a tensor or any nesting of containers. The containers given are never changed; a tensor
            that stands in two places is moved once, and stays one tensor.
        device: where to; ``None`` leaves everything in place and returns `obj` itself.

    A copy from an accelerator to the CPU is complete when this returns, so it can be read at
    once. Copies to an accelerator are asynchronous where the source is pinned and ordered on
    the current stream.

    >>> import torch
    >>> moved = transfer_to_device({"a": (torch.ones(2), "text")}, "cpu")
    >>> moved["a"][1]
    'text'
    """
    if device is None:
        return obj
    target = torch.device(device)

    def move(tensor: Tensor) -> Tensor:
        # A non-blocking copy to the CPU could be read before it has arrived.
        return tensor.to(target, non_blocking=target.type != "cpu")

    return map_tensors(move, obj, other=lambda value: _move_object(value, target))


def _move_object(value: Any, device: torch.device) -> Any:
    if isinstance(value, (nn.Module, type, torch.device, torch.dtype)):
        return value
    if not callable(getattr(value, "to", None)):
        return value
    mine = copy.copy(value)
    if mine is not value and hasattr(mine, "__dict__"):
        # `.to` may work in place, also in a dict or a list that the object holds: the caller's stay as they are.
        vars(mine).update(map_tensors(lambda tensor: tensor, dict(vars(mine))))
    moved = mine.to(device)
    return mine if moved is None else moved


def map_tensors(fn: Callable[[Tensor], Tensor], obj: T, *, other: Callable[[Any], Any] | None = None) -> T:
    """Rebuild `obj` with `fn` applied to each of its tensors, containers keeping their type.

    Args:
        fn: applied once to each distinct tensor; aliases stay aliases.
        obj: a tensor or a nesting of containers.
        other: applied to what is neither a tensor nor a container; left alone by default.

    >>> import torch
    >>> map_tensors(lambda t: t + 1, [torch.zeros(1), (2,)])
    [tensor([1.]), (2,)]
    """
    return cast(T, _Rebuild(fn, other)(obj))


class _Rebuild:
    def __init__(self, fn: Callable[[Tensor], Tensor], other: Callable[[Any], Any] | None) -> None:
        self.fn = fn
        self.other = other
        self.done: dict[int, tuple[Any, Any]] = {}

    def __call__(self, obj: Any) -> Any:
        if obj is None or isinstance(obj, (str, bytes, int, float, complex, bool, torch.Size)):
            return obj
        if id(obj) in self.done:
            return self.done[id(obj)][1]
        if isinstance(obj, Tensor):
            return self._keep(obj, self.fn(obj))
        if isinstance(obj, nn.Module):
            return obj
        if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
            return self._dataclass(obj)
        if isinstance(obj, Mapping):
            return self._mapping(obj)
        if isinstance(obj, (list, deque, UserList)):
            new: Any = self._keep(obj, copy.copy(obj))
            for at, value in enumerate(obj):
                new[at] = self(value)
            return new
        if isinstance(obj, tuple):
            return self._keep(obj, self._tuple(obj))
        if isinstance(obj, (set, frozenset)):
            return self._keep(obj, type(obj)(self(value) for value in obj))
        return obj if self.other is None else self._keep(obj, self.other(obj))

    def _keep(self, old: Any, new: Any) -> Any:
        self.done[id(old)] = (old, new)  # holding `old` keeps its id from being used again
        return new

    def _tuple(self, obj: tuple[Any, ...]) -> Any:
        cls: Any = type(obj)
        # The lengths in a packed sequence must stay on the CPU.
        stay = obj.batch_sizes if isinstance(obj, PackedSequence) else None
        values = [value if value is stay else self(value) for value in obj]
        if hasattr(cls, "n_sequence_fields"):  # torch's return types, which only their class can make
            return cls(values)
        # Past the class's own __new__, which may take other arguments than the elements.
        new: Any = tuple.__new__(cls, values)
        for name, value in getattr(obj, "__dict__", {}).items():
            new.__dict__[name] = self(value)
        return new

    def _mapping(self, obj: Mapping[Any, Any]) -> Any:
        if not isinstance(obj, MutableMapping):
            # Read-only mappings are made from a dict, as types.MappingProxyType is.
            make = cast(Callable[[dict[Any, Any]], Any], type(obj))
            return self._keep(obj, make({key: self(value) for key, value in obj.items()}))
        new = self._keep(obj, copy.copy(obj))
        for key in obj:
            new[key] = self(obj[key])
        return new

    def _dataclass(self, obj: Any) -> Any:
        # Built without __init__: __post_init__ may refuse or change what is already valid.
        cls: Any = type(obj)
        new = self._keep(obj, cls.__new__(cls))
        for name, value in _attributes(obj):
            object.__setattr__(new, name, self(value))
        if isinstance(obj, dict):  # transformers' ModelOutput is a dict and a dataclass at once
            put = OrderedDict.__setitem__ if isinstance(obj, OrderedDict) else dict.__setitem__
            for key, value in obj.items():
                put(new, key, self(value))
        return new


def _attributes(obj: Any) -> Iterator[tuple[str, Any]]:
    """What a dataclass holds: its fields, also those in slots, and whatever was added to the instance."""
    yield from list(getattr(obj, "__dict__", {}).items())
    for field in dataclasses.fields(obj):
        if field.name not in getattr(obj, "__dict__", {}) and hasattr(obj, field.name):
            yield field.name, getattr(obj, field.name)


def iter_tensors(obj: Any) -> Iterator[Tensor]:
    """The tensors in a nesting of containers, each once, in order.

    >>> import torch
    >>> [t.shape[0] for t in iter_tensors({"a": torch.ones(1), "b": [torch.ones(2), 3]})]
    [1, 2]
    """
    seen: set[int] = set()
    waiting: list[Any] = [obj]
    while waiting:
        value = waiting.pop()
        if isinstance(value, (str, bytes, nn.Module)) or id(value) in seen:
            continue
        if isinstance(value, Tensor):
            seen.add(id(value))
            yield value
        elif isinstance(value, Mapping):
            seen.add(id(value))
            waiting += reversed(list(value.values()))
        elif isinstance(value, (tuple, list, deque, UserList, set, frozenset)):
            seen.add(id(value))
            waiting += reversed(list(value))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            seen.add(id(value))
            waiting += [inner for _, inner in reversed(list(_attributes(value)))]
