"""What is remembered of a scan is forgotten: a mask that a function or a class keeps would have no values later.

Programs keep tensors that they make once: in functions cached by ``functools``, in attributes of classes, in
variables and dicts of modules. Made in a scan they have a shape and a type only, and a training that found them later
would compute nothing, without an error.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import CellType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["faking", "forgetting"]

_REMEMBERS = type(functools.lru_cache(int))
_LIBRARIES = sys.stdlib_module_names | {
    *(
        "torch",
        "functorch",
        "torchgen",
        "lightning",
        "lightning_fabric",
        "lightning_utilities",
        "pytorch_lightning",
    ),
    *("softs_lightning", "transformers", "accelerate", "torchmetrics", "pytest", "_pytest", "pluggy"),
}
"""Packages that keep no tensors in variables, and are large; their cached functions are looked at all the same."""
_WITH_DICTS = {"_thread", "argparse", "collections", "types", "weakref"}
"""Modules of the standard library whose objects hold what a user puts in."""
_MANY = 100_000  # objects in a container: data, which a step does not write into
_FAR = 50_000  # objects behind one that are looked at


@contextmanager
def forgetting() -> Iterator[None]:
    """Afterwards, nothing that outlives a scan keeps a tensor without values, be it a fake or a meta tensor.

    Caches of ``functools`` that hold one are emptied. Where one is found in a variable of a module, an attribute of
    a class, a closure, or a container or an object in one of these, all of that module or class is set back to what
    it was before. Not searched are what torch, Lightning and transformers keep themselves, installed packages that do
    not import torch, and what is inside of containers of more than 100,000 objects.

    Meanwhile torch's own log on what fake tensors cannot do is silent: whoever scans says why a scan failed.

    Warns:
        UserWarning: for what keeps such a tensor and cannot be set back.

    >>> import torch
    >>> @functools.lru_cache
    ... def mask(size):
    ...     return torch.ones(size, size).tril()
    >>> with forgetting(), FakeTensorMode():
    ...     print(type(mask(2)).__name__)
    FakeTensor
    >>> mask(2).sum()
    tensor(3.)
    """
    known: dict[int, Any] = {}
    places = [_Place(name, root, known) for name, root in _roots()]
    logger = logging.getLogger(FakeTensor.__module__)

    def nothing(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(nothing)
    try:
        yield
    finally:
        logger.removeFilter(nothing)
        for cache in _caches(known.values()):
            if _is_empty(gc.get_referents(cache)):
                cache.cache_clear()
        for place in places:
            place.set_back()


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


def _roots() -> Iterator[tuple[str, Any]]:
    """The variables of all modules of users, and their classes of layers, wherever they are."""
    modules = {name: each for name, each in list(sys.modules.items()) if isinstance(each, ModuleType)}
    with_torch = {name.partition(".")[0] for name, module in modules.items() if _imports_torch(module)}
    for name, module in modules.items():
        of = name.partition(".")[0]
        if not _is_library(name) and (of in with_torch or not _is_installed(module)):
            yield f"the module {name}", vars(module)
    todo, seen = list(nn.Module.__subclasses__()), set[int]()
    while todo:
        each = todo.pop()
        if id(each) not in seen:
            seen.add(id(each))
            todo += each.__subclasses__()
            if not _is_library(each.__module__):
                yield f"the class {each.__qualname__}", each
                for code in list(vars(each).values()):  # of a module that is not to be found by its name
                    if isinstance(code, FunctionType) and not _is_library(code.__globals__.get("__name__")):
                        yield f"the module {code.__globals__.get('__name__')}", code.__globals__


def _imports_torch(module: ModuleType) -> bool:
    return any(
        isinstance(each, ModuleType) and each.__name__.partition(".")[0] == "torch"
        for each in list(vars(module).values())
    )


def _is_installed(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None) or ""
    return module.__name__ == "builtins" or "site-packages" in file or "dist-packages" in file


def _is_library(name: Any) -> bool:
    return str(name).partition(".")[0] in _LIBRARIES


@dataclass
class _Place:
    """A module or a class, with all that is reached from it and was not reached from one before.

    Attributes:
        before: each holder of values, and its values then.
        closed: objects that can be looked into and not set back, and whether they held a tensor without values.
    """

    name: str
    root: Any
    known: dict[int, Any]
    before: list[tuple[Any, Any]] = field(default_factory=list)
    closed: list[tuple[Any, bool]] = field(default_factory=list)

    def __post_init__(self) -> None:
        todo = [self.root]
        while todo:
            each = todo.pop()
            if id(each) in self.known or _is(each, ModuleType, Tensor, str, bytes, int, float):
                continue
            self.known[id(each)] = each
            todo += self._inside(each)

    def _inside(self, each: Any) -> list[Any]:
        if _is(each, type):
            return [] if _is_library(each.__module__) else self._keep(each)
        if _is(each, FunctionType):
            if _is_library(each.__module__):
                return []
            return [*(each.__closure__ or ()), each.__defaults__, vars(each)]
        if _is(each, staticmethod, classmethod) or type(each) is _REMEMBERS:
            return [each.__wrapped__]
        if _is(each, property):
            return [each.fget]
        if _is(each, tuple):
            return list(tuple.__iter__(each))
        origin = str(type(each).__module__)
        of = origin.partition(".")[0]
        opens = _is(each, dict, list, set, deque, CellType)
        found = self._keep(each) if opens else []
        if origin in _WITH_DICTS or of not in _LIBRARIES:
            with suppress(Exception):  # an object may answer for another, which is not there
                found = [*found, object.__getattribute__(each, "__dict__")]
        elsewhere = of in _LIBRARIES and of not in sys.stdlib_module_names
        if not (elsewhere or opens) and gc.is_tracked(each):
            self.closed.append((each, _is_empty(each)))
        return found

    def _keep(self, holder: Any) -> list[Any]:
        values = _values(holder)
        self.before.append((holder, values))
        inside = list(values.values()) if isinstance(values, dict) else values
        return inside if len(inside) <= _MANY else []

    def set_back(self) -> None:
        if any(_is_empty(new) for holder, values in self.before for new in _news(holder, values)):
            for holder, values in self.before:
                _restore(holder, values)
        for each, already in self.closed:
            if not already and _is_empty(each):
                warnings.warn(
                    f"{self.name} keeps a tensor of a dry run, which has no values, in a {type(each).__name__}, and "
                    "that cannot be set back: a training in this process would compute with it. Train in another one",
                    stacklevel=2,
                )


def _values(holder: Any) -> Any:
    """What a holder holds, as a dict or a list of its own; code of a subclass is not asked."""
    if _is(holder, CellType):
        try:
            return [holder.cell_contents]
        except ValueError:  # a variable that has none yet
            return []
    if _is(holder, type):
        return {name: value for name, value in vars(holder).items() if not name.startswith("__")}
    if _is(holder, dict):
        return dict(dict.items(holder))
    return list(_kind(holder).__iter__(holder))


def _kind(holder: Any) -> Any:
    return next(kind for kind in (list, set, deque) if _is(holder, kind))


def _is(each: Any, *kinds: type) -> bool:
    """As isinstance, which asks proxies what they stand for: that may be gone, or be imported for it."""
    return issubclass(type(each), kinds)


def _news(holder: Any, before: Any) -> list[Any]:
    now = _values(holder)
    if isinstance(now, dict):
        return [value for name, value in now.items() if name not in before or before[name] is not value]
    if len(now) == len(before) and all(map(_is_same, now, before)):
        return []
    old = {id(value) for value in before}
    return [value for value in now if id(value) not in old]


def _is_same(one: Any, other: Any) -> bool:
    return one is other


def _restore(holder: Any, before: Any) -> None:
    """Modules that were imported meanwhile stay: they would not be put into a variable once more."""
    now = _values(holder)
    if isinstance(now, dict):
        kept = {name for name, value in now.items() if _is(value, ModuleType)}
        for name in now.keys() - before.keys() - kept:
            type.__delattr__(holder, name) if _is(holder, type) else dict.__delitem__(holder, name)
        for name, value in before.items():
            if name in now and (now[name] is value or name in kept):
                continue
            if _is(holder, type):
                type.__setattr__(holder, name, value)
            else:
                dict.__setitem__(holder, name, value)
    elif len(now) != len(before) or not all(map(_is_same, now, before)):
        if _is(holder, CellType):
            if before:
                holder.cell_contents = before[0]
            else:
                del holder.cell_contents
        else:
            kind = _kind(holder)
            kind.clear(holder)
            (kind.update if kind is set else kind.extend)(holder, before)


def _caches(known: Iterable[Any]) -> list[Any]:
    """The caches of functions, those that no garbage collection visits included where modules or classes have them."""
    # One list after the other: a list that is open as all objects are listed would hold itself, and them, for long.
    found = {id(each): each for each in gc.get_objects() if type(each) is _REMEMBERS}
    found.update((id(each), each) for each in known if type(each) is _REMEMBERS)
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            found.update((id(each), each) for each in list(vars(module).values()) if type(each) is _REMEMBERS)
    return [each for each in found.values() if _of(each) not in sys.stdlib_module_names]


def _of(cache: Any) -> str:
    return str(getattr(cache, "__module__", "")).partition(".")[0]


def _is_empty(value: Any) -> bool:
    """Whether something is, or holds, a tensor without values."""
    todo, seen = [value], dict[int, Any]()
    for _ in range(_FAR):
        if not todo:
            break
        each = todo.pop()
        if _is(each, Tensor):
            if _is(each, FakeTensor) or each.is_meta:
                return True
        elif _is(each, FunctionType):  # its variables are looked at where they are
            todo += [*(each.__closure__ or ()), each.__defaults__]
        elif not _is(each, ModuleType, type, str, bytes, int, float) and id(each) not in seen:
            seen[id(each)] = each
            todo += gc.get_referents(each)
    return False
