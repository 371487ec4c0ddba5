"""The part of a model before its early exit, compiled as one graph.

An early exit that is an exception raised by excluded code breaks a compiled graph at every capture.
Here hooks, captures and the exit are traced together with the model: what is compiled is the
prefix alone, and the rest of the model is neither compiled nor run.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
from torch import nn

from softs_lightning.capture import Capture
from softs_lightning.names import nearest
from softs_lightning.product import Kind, ProductSpec
from softs_lightning.selectors import resolve_module, resolve_spec

__all__ = ["CompiledPrefix", "check_backend"]

Key = tuple[str, Kind]


def check_backend(name: str) -> None:
    """Refuse a backend that ``torch.compile`` does not know, before anything is built.

    Raises:
        ValueError: with the nearest names.

    >>> check_backend("inductr")
    Traceback (most recent call last):
    ValueError: torch.compile has no backend 'inductr'. Did you mean inductor? There are: ...
    """
    known = torch._dynamo.list_backends(None)
    if name in known:
        return
    near = nearest(name, known, count=1)
    meant = f" Did you mean {near[0]}?" if near else ""
    raise ValueError(f"torch.compile has no backend {name!r}.{meant} There are: {', '.join(known)}")


class _Complete(Exception):
    """Everything is captured. An Exception, since a compiled graph cannot catch others."""


class CompiledPrefix:
    """A model up to the last activation of a product, as one compiled graph.

    Args:
        model: not compiled yet, neither whole nor in part.
        spec: what to capture.
        backend: of ``torch.compile``.
        early_exit: end the graph at the last capture; otherwise the whole model is compiled.

    Attributes:
        compilations: how often a graph was compiled. Further shapes and modes compile again, at most
            ``torch._dynamo.config.recompile_limit`` times, which is an error then.

    Raises:
        ValueError: for a model that is compiled already.
        KeyError: for an unknown module.

    >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)).requires_grad_(False)
    >>> prefix = CompiledPrefix(net, ProductSpec.parse("outputs[1]"), backend="eager")
    >>> torch.equal(prefix(torch.ones(4, 2)).select()[0], net[:2](torch.ones(4, 2)))
    True
    >>> prefix.compilations
    1
    """

    def __init__(
        self, model: nn.Module, spec: ProductSpec, *, backend: str = "inductor", early_exit: bool = True
    ) -> None:
        if any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in model.modules()):
            raise ValueError(
                f"{type(model).__name__} is compiled already, in whole or in part: give the model before torch.compile"
            )
        self.model = model
        self.spec = resolve_spec(model, spec)
        self.early_exit = early_exit
        self.compilations = 0
        self._targets = {item.name: resolve_module(model, item.name).module for _, item in self.spec}
        self._needed: dict[Key, int] = {}
        for kind, item in self.spec:
            key = (item.name, kind)
            self._needed[key] = max(self._needed.get(key, 1), (item.call or 0) + 1)
        self._handles: list[Any] = []
        self._run = self._compile(backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Capture:
        """Run the prefix.

        Returns:
            the filled buffer, as a :class:`~softs_lightning.catcher.ModelIOCatcher` session gives it.
        """
        try:
            found = self._run(args, kwargs)
        except torch._dynamo.exc.FailOnRecompileLimitHit as error:
            raise RuntimeError(
                f"{type(self.model).__name__} was compiled {self.compilations} times, for ever other shapes or modes, and "
                "torch._dynamo.config.recompile_limit allows no more: pad the batches to a few shapes, raise the limit, "
                "or do not compile"
            ) from error
        buffer = Capture(self.spec, self._targets)
        for name, kind in self._needed:
            buffer[name][kind] = list(found[name, kind])
        complete = all(len(found[key]) >= calls for key, calls in self._needed.items())
        if complete and self.early_exit:
            buffer.stopped_at = next(reversed(found))[0]
        return buffer

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _compile(self, backend: str) -> Callable[..., dict[Key, list[Any]]]:
        model, needed, early_exit = self.model, self._needed, self.early_exit
        # Empty before each run and after it: what it holds then is part of what the graph is valid for.
        state: list[dict[Key, list[Any]]] = []

        def deliver(key: Key, value: Any) -> None:
            if not state:
                return  # the model was called by itself
            found = state[0]
            entries = found.pop(key)
            entries.append(value)
            found[key] = entries  # last: where the forward stopped
            if early_exit and all(len(found[other]) >= calls for other, calls in needed.items()):
                raise _Complete

        def prefix(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[Key, list[Any]]:
            found: dict[Key, list[Any]] = {key: [] for key in needed}
            state.append(found)
            try:
                model(*args, **kwargs)
            except _Complete:
                pass
            finally:
                state.clear()
            return found

        for name, kind in needed:
            self._handles.append(_hook(self._targets[name], (name, kind), deliver))
        # A code object of its own: compiled code is looked up by it, and hooks are no part of the key.
        own = types.FunctionType(
            prefix.__code__.replace(co_name=f"prefix_{id(self)}"), globals(), closure=prefix.__closure__
        )
        compiled: Callable[..., dict[Key, list[Any]]] = torch.compile(
            own, backend=self._counting(backend), fullgraph=True
        )
        return compiled

    def _counting(self, backend: str) -> Callable[..., Any]:
        from torch._dynamo.backends.registry import lookup_backend

        inner: Any = lookup_backend(backend)

        def count(graph: Any, inputs: Any) -> Any:
            self.compilations += 1
            return inner(graph, inputs)

        return count


def _hook(module: nn.Module, key: Key, deliver: Callable[[Key, Any], None]) -> Any:
    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        deliver(key, {"args": args, "kwargs": dict(kwargs)})

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        deliver(key, output)

    if key[1] == "inputs":
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)
