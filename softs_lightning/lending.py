"""Modules on loan: what a user handed over comes back as it was, once nobody uses it any more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from torch import nn

__all__ = ["borrow"]


@dataclass
class _Loan:
    """How many teachers use a module now, and how to give it back when the last of them is done."""

    count: int
    give_back: Callable[[], None]


_LOANS: WeakKeyDictionary[nn.Module, _Loan] = WeakKeyDictionary()


def borrow(module: nn.Module, *, move: bool) -> Callable[[], None]:
    """Note the state of a user's module; calling what is returned puts it back, once nobody else uses it."""
    loan = _LOANS.get(module)
    if loan is None:
        loan = _LOANS[module] = _Loan(0, _remember(module, move))
    loan.count += 1

    def give_back() -> None:
        loan.count -= 1
        if loan.count == 0:
            _LOANS.pop(module, None)
            loan.give_back()

    return give_back


def _remember(module: nn.Module, move: bool) -> Callable[[], None]:
    """Note modes, flags and devices of a module; the function returned puts them back."""
    modes = [(m, m.training) for m in module.modules()]
    flags = [(p, p.requires_grad) for p in module.parameters()]
    devices = {t.device for t in [*module.parameters(), *module.buffers()]}

    def give_back() -> None:
        if move and len(devices) == 1:
            module.to(next(iter(devices)))
        for m, training in modes:
            m.training = training
        for p, requires_grad in flags:
            p.requires_grad_(requires_grad)

    return give_back
