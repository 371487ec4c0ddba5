"""What a running trace puts around a model, and takes away again: a stand-in for the forward of each module,
eager execution of what is compiled, and around a block's thread ``Tensor.save``.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from softs_lightning.tracing.saving import save
from softs_lightning.tracing.worker import ACTIVE

__all__ = ["interposed", "saveable"]

_lock = threading.Lock()  # several threads may trace, even the same model, at once
_traces = _blocks = 0
_eager = ExitStack()


class _Forward:
    """Stands in a module's ``__dict__`` for its forward, while any trace on any thread covers the module.

    Calls from a thread that is not running a traced model go straight through; so do those of blocks, which
    apply modules without visiting them.
    """

    __slots__ = ("__wrapped__", "count", "key", "own")

    def __init__(self, module: nn.Module) -> None:
        self.key = id(module)
        self.count = 0
        self.own = "forward" in module.__dict__
        self.__wrapped__: Callable[..., Any] = module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = ACTIVE.run
        if run is None or self.key not in run.begun:
            return self.__wrapped__(*args, **kwargs)
        return run.visit(self.key, self.__wrapped__, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:  # a copy of the model, made in a block, gets the forward itself
        return _itself, (self.__wrapped__,)

    def __getattr__(self, name: str) -> Any:  # __self__, __func__, __name__, ...: as of the forward
        return getattr(self.__wrapped__, name)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


class interposed:
    """While entered, ``modules`` report their visits to the run on whose thread they are called."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = modules
        self._installed: list[nn.Module] = []

    def __enter__(self) -> None:
        with _lock:
            _begin()
            try:
                for module in self._modules:
                    slots = module.__dict__
                    forward = slots.get("forward")
                    if type(forward) is not _Forward:
                        forward = slots["forward"] = _Forward(module)
                    forward.count += 1
                    self._installed.append(module)
            except BaseException:
                self._remove()
                raise

    def __exit__(self, *_: object) -> None:
        with _lock:
            self._remove()

    def _remove(self) -> None:
        for module in self._installed:
            slots = module.__dict__
            forward = slots.get("forward")
            if type(forward) is _Forward:  # else the model replaced it during the run: that is its to keep
                forward.count -= 1
                if not forward.count:
                    if forward.own:
                        slots["forward"] = forward.__wrapped__
                    else:
                        del slots["forward"]
        _end()


def _begin() -> None:
    global _traces
    # Compiled code was traced without the stand-ins. If dynamo was never loaded, nothing is compiled.
    if not _traces and "torch._dynamo" in sys.modules:
        _eager.enter_context(torch.compiler.set_stance("force_eager"))
    _traces += 1


def _end() -> None:
    global _traces
    _traces -= 1
    if not _traces:
        _eager.close()


@contextmanager
def saveable() -> Iterator[None]:
    """While entered, ``tensor.save()`` is `save` in functions that a block calls, too."""
    global _blocks
    with _lock:
        _blocks += 1
        torch.Tensor.save = save  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if not _blocks:
                del torch.Tensor.save  # type: ignore[attr-defined]
