"""What a stored teacher hands over, and what stands for the model where there is none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from softs_lightning.catcher import Capture
from softs_lightning.product import ProductSpec
from softs_lightning.store.store import canonical

__all__ = ["Absent", "Restored"]


class Absent(nn.Module):
    """Stands where the live model would be: everything comes from the store."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the teacher is not here: this StoredTeacher only reads")

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(
                f"the teacher is not here, so its {name!r} cannot be looked at: a loss that is shown both models needs "
                "the StoredTeacher to have one"
            ) from None


class Restored(Capture):
    """A buffer filled from the store: ``select`` gives each activation of `spec` as a forward would have.

    >>> import torch
    >>> spec = ProductSpec.parse("outputs[h.3#0]")
    >>> Restored(spec, {"outputs[h.3#0]": torch.ones(2)}).select()
    [tensor([1., 1.])]
    """

    def __init__(self, spec: ProductSpec, values: Mapping[str, Tensor]) -> None:
        super().__init__(spec, {})
        self.values_by_name = dict(values)
        for (kind, item), name in zip(spec, canonical(spec), strict=True):
            if not item.pick and item.call is None:
                value = self.values_by_name[name]
                self[item.name][kind].append(value if kind == "outputs" else {"args": (value,), "kwargs": {}})

    def select(self, product_id: str | ProductSpec | None = None) -> list[Any]:
        names = canonical(self.spec if product_id is None else product_id)
        absent = [name for name in names if name not in self.values_by_name]
        if absent:
            raise LookupError(
                f"{', '.join(absent)} was not asked of this session, which captured {self.spec}"
            )
        return [self.values_by_name[name] for name in names]
