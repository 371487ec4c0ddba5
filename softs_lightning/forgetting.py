"""What is remembered of a scan is forgotten: a mask that a function or a class keeps would have no values later."""

from __future__ import annotations

import functools
import gc
import logging
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from operator import delitem, setitem
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["faking", "forgetting"]

_REMEMBERS = type(functools.lru_cache(int))
_LIBRARIES = {
    "torch",
    "torchvision",
    "lightning",
    "pytorch_lightning",
    "torchmetrics",
    "transformers",
    "softs_lightning",
}
_CONTAINERS = dict, OrderedDict, defaultdict, list, deque
_MANY = 10_000  # of which more are data
_DEPTH = 5  # of a tensor in a tuple in a list in an entry of a cache


@contextmanager
def forgetting() -> Iterator[None]:
    """Afterwards, those caches of ``functools`` that hold a fake or a meta tensor are emptied: it is made anew.

    Likewise the attributes of classes of layers, the variables of the Python modules that these are in, and the
    containers in both: where one holds such a tensor, all of it is set back. Not looked for is what torch, Lightning
    and transformers keep themselves, and what is kept in closures and in attributes of other objects.

    Meanwhile torch's own log on what fake tensors cannot do is silent: whoever scans says why a scan failed.

    >>> import torch
    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> @functools.lru_cache
    ... def mask(size):
    ...     return torch.ones(size, size).tril()
    >>> with forgetting(), FakeTensorMode():
    ...     print(type(mask(2)).__name__)
    FakeTensor
    >>> mask(2).sum()
    tensor(3.)
    """
    before = [_contents(space) for space in _spaces()]
    logger = logging.getLogger(FakeTensor.__module__)
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)
        for found in gc.get_objects():
            if type(found) is _REMEMBERS and _holds_fakes(found, _DEPTH):
                found.cache_clear()
        for contents in before:
            _set_back(contents)


@contextmanager
def faking(**options: Any) -> Iterator[FakeTensorMode]:
    """A mode to be entered, in which tensors have a shape and a type only; afterwards see :func:`forgetting`.

    Args:
        **options: of the mode.

    >>> import torch
    >>> with faking() as mode, mode:
    ...     print(torch.ones(2) + 1)
    FakeTensor(..., size=(2,))
    """
    with forgetting():
        yield FakeTensorMode(allow_non_fake_inputs=True, **options)


def _spaces() -> list[Any]:
    """The classes of users' layers, and the variables of the modules that these are in."""
    todo, seen, found = list(nn.Module.__subclasses__()), set[int](), dict[int, Any]()
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        todo += each.__subclasses__()
        if _is_library(each.__module__):
            continue
        found[id(each)] = each
        for code in list(vars(each).values()):
            if _is(code, FunctionType) and not _is_library(code.__globals__.get("__name__")):
                found[id(code.__globals__)] = code.__globals__
    return list(found.values())


def _is_library(name: Any) -> bool:
    return str(name).partition(".")[0] in _LIBRARIES


def _items(holder: Any) -> dict[Any, Any]:
    if isinstance(holder, type):
        return {name: value for name, value in vars(holder).items() if not name.startswith("__")}
    return dict(holder) if isinstance(holder, dict) else dict(enumerate(holder))


def _contents(space: Any) -> list[tuple[Any, dict[Any, Any]]]:
    """A space and the containers in it, each with what it holds."""
    found: dict[int, tuple[Any, dict[Any, Any]]] = {}
    todo: list[tuple[Any, int]] = [(space, _DEPTH)]
    while todo:
        holder, left = todo.pop()
        if id(holder) not in found and left:
            found[id(holder)] = holder, _items(holder)
            values = found[id(holder)][1].values()
            todo += [(each, left - 1) for each in values if _opens(each)]
    return list(found.values())


def _opens(value: Any) -> bool:
    return any(type(value) is kind for kind in _CONTAINERS) and len(value) <= _MANY


def _is(value: Any, *kinds: type) -> bool:
    """As isinstance, which asks proxies what they stand for: that may be gone."""
    return issubclass(type(value), kinds)


def _set_back(contents: list[tuple[Any, dict[Any, Any]]]) -> None:
    if not any(_is_empty(each, _DEPTH) for holder, items in contents for each in _news(holder, items)):
        return
    for holder, items in contents:
        if isinstance(holder, list | deque):
            holder.clear()
            holder.extend(items.values())
            continue
        put, take = (type.__setattr__, type.__delattr__) if isinstance(holder, type) else (setitem, delitem)
        now = _items(holder)
        for name in now.keys() - items.keys():
            if not _is(now[name], ModuleType):  # an import is not made once more
                take(holder, name)
        for name, value in items.items():
            if name not in now or now[name] is not value:
                put(holder, name, value)


def _news(holder: Any, items: dict[Any, Any]) -> list[Any]:
    return [each for name, each in _items(holder).items() if items.get(name) is not each]


def _is_empty(value: Any, depth: int) -> bool:
    if _is(value, Tensor):
        return _is(value, FakeTensor) or value.is_meta
    if not depth or not (_is(value, tuple) or _opens(value)):
        return False
    return any(_is_empty(each, depth - 1) for each in (value.values() if _is(value, dict) else value))


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _holds_fakes(holder: Any, depth: int) -> bool:
    for inner in gc.get_referents(holder):
        if isinstance(inner, FakeTensor) or (isinstance(inner, Tensor) and inner.is_meta):
            return True
        entry = type(inner) in (dict, tuple, list) or type(inner).__name__ == "_lru_list_elem"
        if entry and depth and _holds_fakes(inner, depth - 1):
            return True
    return False
