"""The way back through a sharded student from an activation inside of one of its units.

FSDP2 gathers a unit again for its backward when a gradient arrives at what the unit has *returned*. A term on an
activation inside of a unit whose own result reaches no loss would come in by another door, and find the parameters
freed. So each such activation gathers the units around it when its gradient is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from softs_lightning.product import ProductSpec
from softs_lightning.selectors import resolve_module

__all__ = ["Gathering"]


class Gathering:
    """Gathers what FSDP2 has sharded, on the way back.

    Args:
        student: of whose modules some may be sharded.

    >>> tensor = nn.Linear(2, 2)(Tensor([[1.0, 2.0]]))
    >>> Gathering(nn.Linear(2, 2)).before_backward(ProductSpec.parse("outputs[.]"), [tensor])
    """

    def __init__(self, student: nn.Module) -> None:
        self.student = student
        self._inside = [(m, set(m.modules())) for m in student.modules() if hasattr(m, "unshard")]
        self._around: dict[str, list[Any]] = {}

    def before_backward(self, spec: ProductSpec, values: Sequence[Any]) -> None:
        """See that the units around the activations `values` of `spec` are whole when gradients go back from there."""
        if not self._inside:
            return
        for (_, item), value in zip(spec, values, strict=True):
            units = self._units(item.name)
            if units and isinstance(value, Tensor) and value.requires_grad:
                value.register_hook(_gather(units))  # type: ignore[no-untyped-call]

    def _units(self, name: str) -> list[Any]:
        if name not in self._around:
            module = resolve_module(self.student, name).module
            self._around[name] = [unit for unit, inside in self._inside if module in inside]
        return self._around[name]


def _gather(units: list[Any]) -> Any:
    def gather(gradient: Tensor) -> None:
        for unit in units:
            unit.unshard()

    return gather
