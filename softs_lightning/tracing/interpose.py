"""What a running trace puts around a model, and takes away again: a stand-in for the forward of each module,
eager execution of what is compiled, and ``Tensor.save`` while a block has a thread.
"""

import copy
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from softs_lightning.tracing.saving import save
from softs_lightning.tracing.worker import ACTIVE

if TYPE_CHECKING:
    from softs_lightning.tracing.interleave import Run

__all__ = ["Interposed"]

# Several threads may trace, even the same model, at once.
_lock = threading.RLock()
_traces: set["Interposed"] = set()
_saving: set["Interposed"] = set()
_stances: list[Any] = []  # of the compiler, before the first of the traces
_copies: list[weakref.ref[nn.Module]] = []  # of traced modules, made in a trace
_NONE = nn.Module.forward  # of a module that has none of its own


class _Forward:
    """Stands in a module's ``__dict__`` for its forward, while any trace on any thread covers the module.

    Calls from a thread that is not running a traced model go straight through; so do those of blocks, which
    apply modules without visiting them. A trace that the model itself makes is part of what the model does: its
    run is nearer to the forward than the one around.
    """

    __slots__ = ("__wrapped__", "key", "own", "users")

    def __init__(self, key: int, forward: Callable[..., Any], own: bool, run: "Run") -> None:
        self.key, self.own, self.users = key, own, [run]
        self.__wrapped__ = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run, forward = ACTIVE.run, self.__wrapped__
        # Asked of the stand-in, not of the run: the model may have kept one that an earlier trace has left.
        while run is not None:
            if run in self.users:
                if run.outer is None:
                    return run.visit(self.key, forward, args, kwargs)
                forward = functools.partial(_visited, run, self.key, forward)
            run = run.outer
        return forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        forward = copy.deepcopy(self.__wrapped__, memo)  # until the trace ends, a copy has its forward itself
        if not self.own and isinstance(owner := getattr(forward, "__self__", None), nn.Module):
            _copies.append(weakref.ref(owner))
        return forward

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self.__wrapped__,)

    def __getattr__(self, name: str) -> Any:  # __self__, __func__, __name__, ...: as of the forward
        return getattr(self.__wrapped__, name)


def _visited(run: "Run", key: int, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return run.visit(key, forward, args, kwargs)


def _is_usual(module: nn.Module) -> bool:
    """Whether what a module has as a forward of its own is that of its class."""
    forward = module.__dict__.get("forward")
    return type(forward) is MethodType and forward == type(module).forward.__get__(module)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


class Interposed:
    """From `put` to `remove`, ``modules`` report their visits to the run on whose thread they are called.

    `remove` takes away whatever `put` has put so far; it may be repeated.
    """

    run: "Run | None" = None

    def __init__(self) -> None:
        self._put: list[tuple[dict[str, Any], _Forward]] = []

    def put(self, modules: Mapping[int, nn.Module], run: "Run") -> None:
        with _lock:
            self.run = run
            _traces.add(self)
            # Compiled code was traced without the stand-ins. If dynamo was never loaded, nothing is compiled.
            if not _stances and (frames := sys.modules.get("torch._dynamo.eval_frame")) is not None:
                _stances.append(frames._stance)  # torch's own way back is lost if Ctrl-C comes on the way in
                torch.compiler.set_stance("force_eager")
            put = self._put
            for key, module in modules.items():
                slots = module.__dict__
                present = slots.get("forward")
                if type(present) is _Forward and present.key == key:
                    put.append((slots, present))
                    present.users.append(run)
                    continue
                forward = getattr(module, "forward", None)
                if forward is None or getattr(forward, "__func__", None) is _NONE:
                    continue  # a list of modules, or a scripted module that is only called from script
                standing = _Forward(key, forward, present is not None and not _is_usual(module), run)
                put.append((slots, standing))
                slots["forward"] = standing

    def saveable(self) -> None:
        """From now on, ``tensor.save()`` is `save` in functions that a block calls, too."""
        with _lock:
            _saving.add(self)
            # Else it is a method of somebody else's, which `value.save()` then means.
            if "save" not in torch.Tensor.__dict__:
                torch.Tensor.save = save  # type: ignore[attr-defined]

    def remove(self) -> None:
        try:
            with _lock:
                self._remove()
        finally:
            while _lock._is_owned():  # type: ignore[attr-defined]  # Ctrl-C came before it was let go
                _lock.release()

    def _remove(self) -> None:
        run: Any = self.run
        for slots, forward in self._put:
            users = forward.users
            if run in users:
                users.remove(run)
            if users or slots.get("forward") is not forward:  # what the model put there is its to keep
                continue
            if forward.own:
                slots["forward"] = forward.__wrapped__
            else:
                del slots["forward"]
        while _copies:
            if (module := _copies[-1]()) is not None and _is_usual(module):
                module.__dict__.pop("forward", None)
            _copies.pop()
        if _saving == {self} and torch.Tensor.__dict__.get("save") is save:
            del torch.Tensor.save  # type: ignore[attr-defined]
        _saving.discard(self)
        if _traces == {self} and _stances:
            sys.modules["torch._dynamo.eval_frame"]._set_stance(_stances[0])
            _stances.clear()
        _traces.discard(self)
        self._put = []
        self.run = None  # whose way to set up a block's thread leads back here
