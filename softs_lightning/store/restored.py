"""What a stored teacher hands over, and what stands for the model where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from softs_lightning.catcher import Capture
from softs_lightning.names import strip_wrappers
from softs_lightning.product import ProductSpec
from softs_lightning.selectors import never_called
from softs_lightning.store.store import canonical

__all__ = ["Absent", "Restored", "modules_of", "skeleton"]

Modules = Sequence[Sequence[Any]]
"""Name, class and whether a forward calls it, for every module of a teacher, outer ones first."""


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


def modules_of(module: nn.Module) -> list[list[Any]]:
    """What :func:`skeleton` needs to know of a model, as plain data.

    >>> modules_of(nn.Sequential(nn.ReLU()))
    [['', 'Sequential', True], ['0', 'ReLU', True]]
    """
    found: dict[str, list[Any]] = {}
    for path, inner in module.named_modules(remove_duplicate=False):
        name = strip_wrappers(path)  # what is wrapped stands behind its wrapper, and counts
        found[name] = [name, type(inner).__name__, never_called(inner) is None]
    return list(found.values())


def skeleton(modules: Modules) -> Absent:
    """A model with the module names of another, so that selectors select what they did there, and nothing else of it.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([nn.ReLU()]))
    >>> list(dict(skeleton(modules_of(net)).named_modules())) == list(dict(net.named_modules()))
    True
    """
    root: Absent | None = None
    for name, cls, called in modules:
        bases: tuple[type, ...] = (Absent,) if called or not name else (nn.Module,)
        own: Any = type(str(cls), bases, {})()
        if root is None:
            root = own
            continue
        outer, _, last = str(name).rpartition(".")
        root.get_submodule(outer).add_module(last, own)
    return Absent() if root is None else root


class Restored(Capture):
    """A buffer filled from the store: ``select`` gives each activation of `spec` as a forward would have.

    Args:
        spec: as it was asked.
        values: by canonical name.
        resolve: what selectors mean.

    >>> import torch
    >>> spec = ProductSpec.parse("outputs[h.3#0]")
    >>> Restored(spec, {"outputs[h.3#0]": torch.ones(2)}).select()
    [tensor([1., 1.])]
    """

    def __init__(
        self,
        spec: ProductSpec,
        values: Mapping[str, Tensor],
        resolve: Callable[[ProductSpec], ProductSpec] = lambda spec: spec,
    ) -> None:
        super().__init__(spec, {})
        self.values_by_name = dict(values)
        self.resolve = resolve
        for (kind, item), name in zip(spec, canonical(spec), strict=True):
            if not item.pick and item.call is None and name in self.values_by_name:
                value = self.values_by_name[name]
                self[item.name][kind].append({"args": (value,), "kwargs": {}} if kind == "inputs" else value)

    def select(self, product_id: str | ProductSpec | None = None) -> list[Any]:
        spec = self.spec if product_id is None else ProductSpec.parse(product_id)
        names = canonical(spec)
        if any(name not in self.values_by_name for name in names):
            names = canonical(self.resolve(spec))
        absent = [name for name in names if name not in self.values_by_name]
        if absent:
            raise LookupError(
                f"{', '.join(absent)} was not asked of this session, which captured {self.spec}"
            )
        return [self.values_by_name[name] for name in names]
