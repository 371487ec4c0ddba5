"""From the names in a product_id to the modules of a real model.

Names are those of ``model.named_modules()``. A shared module answers to each of its names, and
wrappers between the model and the name (``DistributedDataParallel``, ``torch.compile``, FSDP)
need not be spelled out.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from torch import nn

from softs_lightning.product import Item, ProductSpec

__all__ = ["ROOT", "Target", "UnknownModuleError", "nearest", "resolve_module", "resolve_spec"]

ROOT = "."
WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""What wrappers call the module inside them: DDP and DataParallel, torch.compile, FSDP, checkpointing."""


class UnknownModuleError(KeyError):
    """A name that selects no module of the model."""

    def __str__(self) -> str:  # KeyError prints its message quoted, on one line
        return str(self.args[0])


@dataclass(frozen=True)
class Target:
    """A module found under a name: `path` is its place in the model as it stands, wrappers included."""

    path: str
    module: nn.Module


def resolve_module(model: nn.Module, name: str) -> Target:
    """The module that `name` means in `model`.

    A name of ``model.named_modules()`` means that module; ``"."`` and ``""`` mean the model. Any
    other name is compared with wrappers left out on both sides.

    Raises:
        UnknownModuleError: (a ``KeyError``) with the nearest names.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> resolve_module(net, "1").module is net[1]
    True
    """
    if name in (ROOT, ""):
        return Target("", model)
    modules = dict(model.named_modules(remove_duplicate=False))
    if name in modules:
        return Target(name, modules[name])
    bare = strip_wrappers(name)
    found = sorted((path for path in modules if path and strip_wrappers(path) == bare), key=len)
    if not found or not bare:
        raise UnknownModuleError(_unknown(model, name, list(modules)))
    outermost = found[0]
    if any(not _inside(path, outermost) for path in found):
        raise UnknownModuleError(
            f"{name!r} could mean any of {', '.join(map(repr, found))}: write one of these"
        )
    return Target(outermost, modules[outermost])


def strip_wrappers(name: str) -> str:
    """The name without the components that wrappers add.

    >>> strip_wrappers("module.encoder._orig_mod.layer.0")
    'encoder.layer.0'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _inside(path: str, outer: str) -> bool:
    """Whether `path` is `outer` or a chain of wrappers within it."""
    rest = path[len(outer) :]
    return path.startswith(outer) and not strip_wrappers(rest.lstrip("."))


def _unknown(model: nn.Module, name: str, names: list[str]) -> str:
    close = nearest(name, [n for n in names if n])
    hint = f"the nearest names are {', '.join(map(repr, close))}" if close else "no name is near it"
    children = ", ".join(repr(n) for n, _ in model.named_children()) or "none"
    return (
        f"{type(model).__name__} has no module named {name!r}: {hint}. "
        f"Its direct children are {children}; list(dict(model.named_modules())) shows all {len(names) - 1} names."
    )


def nearest(name: str, names: list[str], count: int = 5) -> list[str]:
    """The `count` entries of `names` closest to `name`, those that end alike first.

    >>> nearest("layers.2.mpl", ["layers.2.mlp", "embed"])
    ['layers.2.mlp']
    """
    ends = [n for n in names if n.endswith(f".{name}") or n.startswith(f"{name}.")]
    close = difflib.get_close_matches(name, names, n=count, cutoff=0.5)
    return list(dict.fromkeys([*ends[:count], *close]))[:count]


def resolve_spec(model: nn.Module, spec: ProductSpec) -> ProductSpec:
    """`spec` with every item standing for one existing module of `model`.

    Raises:
        UnknownModuleError: for an item that selects nothing.
    """
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}

    def resolve(item: Item) -> Item:
        if str(item) in names:  # a module whose own name holds '#' or '!'
            return Item(str(item))
        resolve_module(model, item.name)
        return item

    return ProductSpec(tuple(map(resolve, spec.inputs)), tuple(map(resolve, spec.outputs)))
