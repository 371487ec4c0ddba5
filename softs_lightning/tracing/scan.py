"""A trace that computes nothing: what shapes a model has where."""

import copy
import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
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

_CONTAINERS = {dict, list, set, deque, OrderedDict, defaultdict}
_lock = threading.RLock()


class ScanningTracer(InterleavingTracer):
    """An `InterleavingTracer` that runs the model under fake tensors: no compute, no weights.

    Read shapes, dtypes and devices, and save those; fake tensors hold no data, in the block or after it. On a
    model with meta weights, the input is moved to the meta device too. What the model did meanwhile to attributes
    of its modules, to containers in them, and to attributes of other objects in them, is undone, because it holds
    fake tensors. Meanwhile no other thread can use the model.
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

        def fake(tensor: torch.Tensor) -> torch.Tensor:
            if meta and not tensor.is_meta:
                moved = tensor.detach().to("meta")
                tensor = (
                    nn.Parameter(moved, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else moved
                )
            return mode.from_tensor(tensor, static_shapes=True)

        def run() -> None:
            with _lock:
                weights = [each for module in modules for state in _states(module) for each in state.values()]
                if any(isinstance(each, FakeTensor) and each.fake_mode is not around for each in weights):
                    raise RuntimeError(f"{path} is being scanned on another thread; scan it after that")
                if any(nn.parameter.is_lazy(each) for each in weights):
                    raise ValueError(f"{path} has lazy modules, whose shapes a first real call has to make")
                before.extend(_contents(modules))
                for module in modules:  # what is real is computed with, fake mode or not
                    for state in _states(module):
                        state.update({name: fake(each) for name, each in state.items() if each is not None})
            with mode:
                trace(map_tensors(fake, inputs), saves)

        def restore() -> None:
            while _lock._is_owned():  # type: ignore[attr-defined]  # Ctrl-C came before it was let go
                _lock.release()
            if torch._C._get_dispatch_mode(mode._mode_key) is mode:  # Ctrl-C came as it was being left
                torch._C._unset_dispatch_mode(mode._mode_key)
                if around is not None:
                    torch._C._set_dispatch_mode(around)
            for container, contents in before:
                container.clear()
                (container.update if hasattr(container, "update") else container.extend)(contents)

        trace = super()._interleave
        surely(run, restore)


def _states(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._buffers, module._parameters


def _contents(modules: Iterable[nn.Module]) -> list[tuple[Any, Any]]:
    """What modules hold, with a copy of each: their attributes, containers in them, those of other objects."""
    found: dict[int, tuple[Any, Any]] = {}
    todo: list[tuple[Any, bool]] = [(vars(module), True) for module in modules]
    while todo:
        container, own = todo.pop()
        if id(container) in found:
            continue
        found[id(container)] = container, copy.copy(container)
        for each in list(container.values() if isinstance(container, dict) else container):
            if type(each) in _CONTAINERS:
                todo.append((each, own))
            elif own and not isinstance(each, nn.Module | torch.Tensor | type | FunctionType | ModuleType):
                inside = getattr(each, "__dict__", None)
                if type(inside) is dict:
                    todo.append((inside, False))
    return list(found.values())
