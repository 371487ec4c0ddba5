"""What holds of names everywhere: wrappers, fragments, near misses, and what a function goes by.

A module's name is its key in ``model.named_modules()``. A wrapper (``DistributedDataParallel``,
``torch.compile``, FSDP, activation checkpointing) puts a component of its own into the names of what
it wraps; the *bare* name leaves those out, so a name means the same with and without the wrapper.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import nn

__all__ = [
    "WRAPPERS",
    "UnknownModuleError",
    "called",
    "class_names",
    "has_fragment",
    "nearest",
    "quoted",
    "strip_wrappers",
]

WRAPPERS = frozenset({"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""What wrappers call the module inside them: DDP and DataParallel, torch.compile, FSDP, checkpointing."""


class UnknownModuleError(KeyError):
    """A name or a selector that selects no module of the model."""

    def __str__(self) -> str:  # KeyError prints its message quoted, on one line
        return str(self.args[0])


def called(made: Any) -> str:
    """What a loss or a projector goes by: a module or an object by its class, a function by its name.

    The function inside a ``functools.partial``, or inside what has a ``__wrapped__``, is what counts, however deep.

    >>> called(nn.MSELoss()), called(partial(nn.functional.huber_loss, delta=2.0))
    ('MSELoss', 'huber_loss')
    """
    seen: list[Any] = []  # what wraps itself ends the search
    while not isinstance(made, nn.Module) and not any(made is one for one in seen):
        seen.append(made)
        if isinstance(made, partial) and "__name__" not in vars(made):
            made = made.func
        elif not isinstance(made, (partial, type)):
            made = getattr(made, "__wrapped__", made)
    own = type(made).__name__
    return own if isinstance(made, nn.Module) else str(getattr(made, "__name__", own))


def strip_wrappers(name: str) -> str:
    """The name without the components that wrappers add.

    >>> strip_wrappers("module.encoder._orig_mod.layer.0")
    'encoder.layer.0'
    """
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def has_fragment(path: str, fragment: str) -> bool:
    """Whether `fragment` stands in `path`, both read as whole dotted components.

    >>> has_fragment("layers.0.self_attn", "self_attn"), has_fragment("layers.0.my_self_attn", "self_attn")
    (True, False)
    """
    return f".{fragment.strip('.')}." in f".{path}."


def class_names(module: nn.Module) -> set[str]:
    """The names by which a module's class may be called: its own and its bases', short and in full.

    >>> sorted(name for name in class_names(nn.ReLU()) if name.endswith("ReLU"))
    ['ReLU', 'torch.nn.modules.activation.ReLU']
    """
    bases = [base for base in type(module).__mro__ if issubclass(base, nn.Module)]
    return {name for base in bases for name in (base.__name__, f"{base.__module__}.{base.__qualname__}")}


def nearest(name: str, names: Sequence[str], count: int = 5) -> list[str]:
    """The `count` entries of `names` closest to `name`, those that end alike first.

    >>> nearest("layers.2.mpl", ["layers.2.mlp", "embed"])
    ['layers.2.mlp']
    """
    ends = [n for n in names if n.endswith(f".{name}") or n.startswith(f"{name}.")]
    close = difflib.get_close_matches(name[:200], names, n=count, cutoff=0.5)
    return list(dict.fromkeys([*ends[:count], *close]))[:count]


def quoted(names: Sequence[str], nothing: str = "none") -> str:
    """The names in one line, for messages.

    >>> quoted(["a", "b"])
    "'a', 'b'"
    """
    return ", ".join(map(repr, names)) or nothing
