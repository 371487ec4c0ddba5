"""Key-value caches among a module's arguments: they are neither moved nor kept.

A cache is the generating loop's own memory: it grows in place after it was captured, it may be as
large as the model, and no loss looks at it. What is captured of a call holds a :class:`KeptOut` in
its place, which says what stood there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

__all__ = ["KeptOut", "without_caches"]

CACHE_ARGUMENTS = frozenset(
    {"past_key_values", "past_key_value", "past_kv", "layer_past", "cache_params", "kv_cache"}
)
"""Keyword arguments that hold a cache, whatever its type: tuples of tensors, objects of a model's own."""


@dataclass(frozen=True)
class KeptOut:
    """Stands where a module was given a key-value cache: `name` is the type of the cache."""

    name: str


def without_caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with a :class:`KeptOut` for each key-value cache; ``None`` stays ``None``.

    A cache is an object of transformers' ``Cache`` classes, or any value but ``None`` under a name
    such as ``past_key_values``.

    >>> without_caches((1,), {"past_key_values": ((2, 3),), "use_cache": True})
    ((1,), {'past_key_values': KeptOut(name='tuple'), 'use_cache': True})
    """
    found = {name: value for name, value in kwargs.items() if name in CACHE_ARGUMENTS or _is_cache(value)}
    kept_out = {name: KeptOut(type(value).__name__) for name, value in found.items() if value is not None}
    if any(map(_is_cache, args)):
        args = tuple(KeptOut(type(value).__name__) if _is_cache(value) else value for value in args)
    return args, {**kwargs, **kept_out}


def _is_cache(value: Any) -> bool:
    if value is None or isinstance(value, (Tensor, tuple, dict, list, str, bool, int, float)):
        return False
    # By name: transformers is not imported for the sake of a model that has nothing to do with it.
    bases = type(value).__mro__
    return any(base.__name__ == "Cache" and base.__module__.startswith("transformers.") for base in bases)
