"""Capture: the buffer that a session fills, and how a product's values are read from it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from weakref import ref

from torch import nn

from softs_lightning.caches import KeptOut
from softs_lightning.product import Item, Kind, ProductSpec, describe, take
from softs_lightning.recorders import configured
from softs_lightning.selectors import never_called

__all__ = ["Capture"]


class Capture(dict[str, dict[str, list[Any]]]):
    """The buffer of one session: ``buf[name]["inputs"]`` and ``buf[name]["outputs"]`` are lists.

    One entry a call of the module: ``{"args": tuple, "kwargs": dict}`` for inputs, the return value
    for outputs, containers as the module made them. Only the kinds that were asked for are there; a
    module that did not run has an empty list. The buffer keeps no module alive; a copy of it or its
    pickle is a plain dict.

    Attributes:
        spec: what the session was armed with.
        stopped_at: the module at which the last forward was cut short, ``None`` if it ran to its end.
    """

    def __init__(
        self,
        spec: ProductSpec,
        modules: dict[str, nn.Module],
        resolve: Callable[[ProductSpec], ProductSpec] = lambda spec: spec,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.stopped_at: str | None = None
        self._resolve = resolve
        self._modules = {name: ref(module) for name, module in modules.items()}
        # Read now: the buffer stays readable when the model is gone.
        self._arguments = {
            item.name: _argument_names(modules[item.name]) for item in spec.inputs if item.name in modules
        }
        for kind, item in spec:
            self.setdefault(item.name, {})[kind] = []

    def __missing__(self, name: str) -> dict[str, list[Any]]:
        if name == "" and "." in self:  # what named_modules() calls the model itself
            return self["."]
        raise KeyError(f"{name!r} was not asked of this session, which captured {self.spec}")

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def select(self, product_id: str | ProductSpec | None = None) -> list[Any]:
        """The values that a product_id names, after exactly one forward: inputs first, each section in order.

        Args:
            product_id: by default what the session was armed with. Selectors mean what they meant then.

        Raises:
            LookupError: when a module did not run, ran several times and the product_id does not say
                which call (``name!0`` is the first), when a pick (``name#0``) finds nothing or
                ``None``, and when the value is a key-value cache.

        >>> import torch
        >>> from softs_lightning.catcher import ModelIOCatcher
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with ModelIOCatcher(net).for_product("outputs[0]", early_exit=False) as buf:
        ...     _ = net(torch.ones(1, 2))
        >>> buf.select()[0] is buf["0"]["outputs"][0]
        True
        """
        spec = self.spec if product_id is None else ProductSpec.parse(product_id)
        if any(kind not in self.get(item.name, ()) for kind, item in spec):
            spec = self._resolve(spec)
        return [self._value(kind, item) for kind, item in spec]

    def _value(self, kind: Kind, item: Item) -> Any:
        what = f"{kind}[{item}]"
        entries = self.get(item.name, {}).get(kind)
        if entries is None:
            raise LookupError(f"{what} was not asked of this session, which captured {self.spec}")
        if not entries:
            raise LookupError(f"{what} was not captured: {self._why_never(item.name)}")
        if item.call is None and len(entries) > 1:
            raise LookupError(
                f"{what} is ambiguous: {item.name!r} ran {len(entries)} times. "
                f"Say which call: {item.name}!0 is the first, {item.name}!{len(entries) - 1} the last"
            )
        if (item.call or 0) >= len(entries):
            raise LookupError(f"{what} was not captured: {item.name!r} ran only {len(entries)} times")
        entry = entries[item.call or 0]
        try:
            value = self._input(item, entry) if kind == "inputs" else take(entry, item.pick)
        except LookupError as error:
            raise LookupError(f"{what}: {error.args[0]}") from None
        if value is None and item.pick and kind == "outputs":
            raise LookupError(f"{what} is None{self._why_none(item.name)}")
        if isinstance(value, KeptOut):
            raise LookupError(f"{what} is a key-value cache ({value.name}), which is not kept")
        return value

    def _why_never(self, name: str) -> str:
        module = self._modules[name]()
        never = None if module is None else never_called(module)
        return never or (
            f"the module {name!r} never ran in this forward, or ran in compiled code that is older than its hook"
        )

    def _why_none(self, name: str) -> str:
        module = self._modules[name]()
        implementation = None if module is None else configured(module, "_attn_implementation")
        if isinstance(module, nn.MultiheadAttention):
            return ": it computes attention weights only for need_weights=True"
        if implementation not in (None, "eager"):
            return (
                f": the {implementation!r} attention computes no weights. Build the model with "
                'attn_implementation="eager", or call model.set_attn_implementation("eager")'
            )
        return ""

    def _input(self, item: Item, entry: dict[str, Any]) -> Any:
        args, kwargs = entry["args"], entry["kwargs"]
        if item.pick:
            first, rest = item.pick[0], item.pick[1:]
            if isinstance(first, str) and first not in kwargs:
                names = self._arguments.get(item.name, ())
                first = names.index(first) if first in names else first
            try:
                chosen = kwargs[first] if isinstance(first, str) else args[first]
            except LookupError:
                pass
            else:
                return take(chosen, rest)
        elif len(args) + len(kwargs) == 1:
            return next(iter([*args, *kwargs.values()]))
        given = [f"#{i} is {describe(v)}" for i, v in enumerate(args)]
        given += [f"#{k} is {describe(v)}" for k, v in kwargs.items()]
        raise LookupError(f"choose one of its arguments: {'; '.join(given) or 'it was called with none'}")


def _argument_names(module: nn.Module) -> tuple[str, ...]:
    """The parameters of ``module.forward`` that may be given by position."""
    forward = module.forward
    function = getattr(forward, "__func__", None)
    if function is None or getattr(forward, "__self__", None) is not module:
        return _positional(forward)
    return _positional_of_method(function)


@lru_cache(maxsize=1024)
def _positional_of_method(function: Callable[..., Any]) -> tuple[str, ...]:
    return _positional(function)[1:]


def _positional(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a forward that is not written in Python
        return ()
    return tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)
