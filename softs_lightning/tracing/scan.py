"""A trace that computes nothing: what shapes a model has where."""

import contextlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from softs_lightning.tracing.batching import Inputs
from softs_lightning.tracing.baton import surely
from softs_lightning.tracing.saving import Saves
from softs_lightning.tracing.tracer import InterleavingTracer, tree
from softs_lightning.transfer import map_tensors

__all__ = ["ScanningTracer"]

_OBJECTS = 3  # how far objects in objects are followed
_MANY = 10_000  # values in one that are looked through
_PLAIN = {str, bytes, int, float, bool, type(None)}
_lock = threading.RLock()


class ScanningTracer(InterleavingTracer):
    """An `InterleavingTracer` that runs the model under fake tensors: no compute, no weights.

    Read shapes, dtypes and devices, and save those; fake tensors hold no data, in the block or after it. On a
    model with meta weights, the input is moved to the meta device too. Tensors that modules hold, as attributes, in
    containers or in other objects, are fake meanwhile, and where the run put something that holds fake ones, that
    container or object is set back. Meanwhile no other thread can use the model.
    """

    def _interleave(self, inputs: Inputs, saves: Saves) -> None:
        from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        assert self.envoy is not None
        path, modules = self.envoy.path, tree(self.envoy.module).values()
        meta = any(each.is_meta for each in self.envoy.module.parameters())
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(assume_static_by_default=True))
        around = torch._C._get_dispatch_mode(mode._mode_key)
        before: list[tuple[Any, Any]] = []
        fakes: dict[int, torch.Tensor] = {}  # by the id of what is real
        reals: dict[int, torch.Tensor] = {}  # by the id of what is fake

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if meta and not tensor.is_meta:
                moved = tensor.detach().to("meta")
                tensor = (
                    nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
                )
            return mode.from_tensor(tensor, static_shapes=True)

        def is_fake(value: Any) -> bool:
            return isinstance(value, FakeTensor) and value.fake_mode is mode

        def run() -> None:
            with _lock:
                held = _held(modules)
                tensors = [
                    each for _, items in held for each in _values(items) if isinstance(each, torch.Tensor)
                ]
                if any(isinstance(each, FakeTensor) and each.fake_mode is not around for each in tensors):
                    raise RuntimeError(f"{path} is being scanned on another thread; scan it after that")
                if any(nn.parameter.is_lazy(each) for each in tensors):
                    raise ValueError(f"{path} has lazy modules, whose shapes a first real call has to make")
                before.extend(held)
                fakes.update({id(each): fake(each) for each in tensors})
                reals.update({id(fakes[id(each)]): each for each in tensors})
                for holder, _ in held:  # what is real is computed with, fake mode or not
                    _replace(holder, fakes)
            with mode:
                trace(map_tensors(fake, inputs), saves)

        def restore() -> None:
            while _lock._is_owned():  # type: ignore[attr-defined]  # Ctrl-C came before it was let go
                _lock.release()
            if torch._C._get_dispatch_mode(mode._mode_key) is mode:  # Ctrl-C came as it was being left
                torch._C._unset_dispatch_mode(mode._mode_key)
                if around is not None:
                    torch._C._set_dispatch_mode(around)
            for holder, items in before:
                known = {*map(id, _values(items)), *reals}
                if any(id(each) not in known and _holds(each, is_fake, set()) for each in _values(holder)):
                    _fill(holder, items)  # not that entry alone: others may say that it is there
                else:
                    _replace(holder, reals)

        trace = super()._interleave
        surely(run, restore)


def _values(holder: Any) -> list[Any]:
    return list(holder.values() if isinstance(holder, dict) else holder)


def _inside(value: Any) -> Any:
    """What a value holds, if it is a container or a plain object."""
    if type(value) in _PLAIN:
        return None
    if isinstance(value, dict | list | tuple | set | deque):
        return value
    if isinstance(value, nn.Module | torch.Tensor | type | FunctionType | ModuleType):
        return None
    if type(value).__module__.partition(".")[0] in ("lightning", "pytorch_lightning"):  # leads everywhere
        return None
    with contextlib.suppress(Exception):
        inside = value.__dict__
        return inside if type(inside) is dict else None
    return None


def _held(modules: Iterable[nn.Module]) -> list[tuple[Any, Any]]:
    """The attributes of modules, the containers in them and the attributes of other objects, with a copy of each."""
    found: dict[int, tuple[Any, Any]] = {}
    todo: list[tuple[Any, int]] = [(vars(module), _OBJECTS) for module in modules]
    while todo:
        holder, left = todo.pop()
        if id(holder) in found:
            continue
        items = dict(holder.items()) if isinstance(holder, dict) else list(holder)
        found[id(holder)] = holder, items
        if isinstance(items, dict):  # what hooks see is for those who registered them
            items = {
                key: each for key, each in items.items() if not (isinstance(key, str) and "_hooks" in key)
            }
        for each in _values(items):
            inside = _inside(each)
            deeper = left - (inside is not each)
            if inside is not None and deeper >= 0:
                todo.append((inside, deeper))
    return list(found.values())


def _holds(value: Any, is_fake: Callable[[Any], bool], seen: set[int]) -> bool:
    """Whether a value is a fake tensor, or one is in it."""
    if is_fake(value):
        return True
    if id(value) in seen or len(seen) > _MANY:
        return False
    seen.add(id(value))
    if isinstance(value, nn.Module):
        return any(map(is_fake, (*value.parameters(), *value.buffers())))
    inside = _inside(value)
    return inside is not None and any(_holds(each, is_fake, seen) for each in _values(inside))


def _replace(holder: Any, by: dict[int, torch.Tensor]) -> None:
    values = _values(holder)
    if any(id(each) in by for each in values):
        new = [by.get(id(each), each) for each in values]
        _fill(holder, dict(zip(list(holder), new, strict=True)) if isinstance(holder, dict) else new)


def _fill(holder: Any, items: Any) -> None:
    """Give a holder these items; before anything else is taken away, so that Ctrl-C cannot come in between."""
    if isinstance(holder, dict):
        kind = OrderedDict if isinstance(holder, OrderedDict) else dict  # past what a subclass makes of it
        for key, value in items.items():
            kind.__setitem__(holder, key, value)
        for key in holder.keys() - items.keys():
            kind.__delitem__(holder, key)
    elif isinstance(holder, set):
        holder.update(items)
        holder.intersection_update(items)
    elif isinstance(holder, list):
        holder[:] = items
    elif isinstance(holder, deque):
        holder.extend(items)
        while len(holder) > len(items):
            holder.popleft()
