"""What a teacher's products look like and cost, found without its weights where that can be done.

A factory that can build its model on the meta device gives a model without memory, and a scan under
fake tensors gives shapes, types and operations without computing anything: a model of billions of
parameters takes seconds. What cannot be scanned is run for real, and the outline says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from softs_lightning.catcher import Capture, ModelIOCatcher
from softs_lightning.forgetting import forgetting
from softs_lightning.product import ProductSpec
from softs_lightning.selectors import UnknownModuleError, resolve_module, resolve_spec
from softs_lightning.teacher import Cost, Teacher, add_saved, arguments, flop_counter
from softs_lightning.tracing import Envoy

__all__ = ["Outline", "outline"]


@dataclass(frozen=True)
class Outline:
    """A teacher seen from outside.

    Attributes:
        module: the teacher, perhaps without weights.
        products: what its products would be; after a scan, fake tensors that have a shape and a type only.
        cost: of the whole forward and up to the early exit.
        ran: why it had to run for real; ``None`` when it was scanned.
    """

    module: nn.Module
    products: Capture
    cost: Cost
    ran: str | None


@contextmanager
def outline(teacher: Teacher, batch: Any, spec: ProductSpec) -> Iterator[Outline]:
    """Find what `spec` selects in a teacher for a batch; the teacher is given back at the end.

    Args:
        teacher: not placed.
        batch: as a training step gets it, on the CPU.
        spec: the product; selectors are resolved.

    Raises:
        KeyError: for what selects nothing.
        TypeError: when the batch lacks what the teacher's forward requires.

    >>> teacher = Teacher(lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    >>> with outline(teacher, torch.ones(3, 4), ProductSpec.parse("outputs[1]")) as seen:
    ...     print(list(seen.products.select()[0].shape), seen.cost, next(seen.module.parameters()).device)
    [3, 8] Cost(full=288, used=192, stop='1') meta
    """
    try:
        with forgetting():
            seen = _scan(teacher, batch, spec)
    except UnknownModuleError:
        raise
    except _UnfitError as error:
        raise error.reason from None
    except Exception as error:
        said = str(error).strip().partition("\n")[0]
        ran = said if isinstance(error, _CannotScanError) else f"{type(error).__name__}: {said}"
    else:
        yield seen
        return
    try:
        teacher.place("cpu")
        assert teacher.module is not None
        resolved = resolve_spec(teacher.module, spec)
        products = teacher.supply(batch, resolved)
        yield Outline(teacher.module, products, teacher.cost(batch, resolved), ran)
    finally:
        teacher.release()


class _CannotScanError(Exception):
    """A teacher that a scan would not understand."""


class _UnfitError(Exception):
    """Wraps what is wrong with the request itself, which running for real would not mend."""

    def __init__(self, reason: TypeError) -> None:
        super().__init__(str(reason))
        self.reason = reason


def _scan(teacher: Teacher, batch: Any, spec: ProductSpec) -> Outline:
    if type(teacher) is not Teacher:
        raise _CannotScanError(f"a {type(teacher).__name__} supplies its products in its own way")
    if isinstance(teacher.source, nn.Module):
        module = teacher.source
    else:
        with torch.device("meta"):
            module = teacher.build()
    modes = [(m, m.training) for m in module.modules()]
    try:
        module.eval()
        resolved = resolve_spec(module, spec)
        try:
            args, kwargs = arguments(module, batch, teacher.inputs)
        except TypeError as error:
            raise _UnfitError(error) from error
        return _forward(teacher, module, args, kwargs, resolved)
    finally:
        for m, training in modes:
            m.training = training


def _forward(
    teacher: Teacher, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], spec: ProductSpec
) -> Outline:
    def scan(program: Callable[..., Any]) -> dict[str, Any]:
        return Envoy(module).run(program, *args, method=teacher.method, scan=True, **kwargs)

    hooked = replace(spec, saved=())
    catcher = ModelIOCatcher(module)
    with ExitStack() as stack:
        stack.callback(catcher.detach_hooks)
        stack.enter_context(torch.no_grad())
        products = Capture(spec, {})
        if hooked:
            products = stack.enter_context(catcher.for_product(hooked, early_exit=False))
        counter = stack.enter_context(flop_counter())
        meter = _Meter(module, hooked, counter.get_total_flops)
        stack.callback(meter.remove)
        saved = scan(teacher.program or _nothing)
        used = counter.get_total_flops()
    if teacher.program is not None:
        with torch.no_grad(), flop_counter() as counter:
            scan(_nothing)
        cost = Cost(counter.get_total_flops(), used, None)
    elif teacher.early_exit and meter.stop is not None:
        cost = Cost(used, meter.used, meter.stop)
    else:
        cost = Cost(used, used, None)
    add_saved(products, spec, saved)
    return Outline(module, products, cost, None)


def _nothing(model: Envoy) -> None:
    """A program that reads nothing: the forward runs to its end."""


class _Meter:
    """Notes what was spent when the last of a product came to be."""

    def __init__(self, module: nn.Module, spec: ProductSpec, spent: Callable[[], int]) -> None:
        self.spent = spent
        self.used = 0
        self.stop: str | None = None
        self.missing: dict[tuple[str, str], int] = {}
        for kind, item in spec:
            key = (item.name, kind)
            self.missing[key] = max(self.missing.get(key, 1), (item.call or 0) + 1)
        self._handles = [
            self._hook(resolve_module(module, name).module, name, kind) for name, kind in self.missing
        ]

    def _hook(self, module: nn.Module, name: str, kind: str) -> Any:
        def note(*_: Any) -> None:
            if (name, kind) not in self.missing:
                return
            self.missing[name, kind] -= 1
            if not self.missing[name, kind]:
                del self.missing[name, kind]
                if not self.missing:
                    self.used, self.stop = self.spent(), name

        return (
            module.register_forward_pre_hook(note) if kind == "inputs" else module.register_forward_hook(note)
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
