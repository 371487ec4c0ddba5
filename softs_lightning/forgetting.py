"""What functions remember of a scan is forgotten: a mask that ``functools.lru_cache`` keeps would have no values later."""

from __future__ import annotations

import functools
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

__all__ = ["forgetting"]

_REMEMBERS = type(functools.lru_cache(int))
_DEPTH = 5  # of a tensor in a tuple in a list in an entry of a cache


@contextmanager
def forgetting() -> Iterator[None]:
    """Afterwards, those caches of ``functools`` that hold a fake tensor are emptied: what they kept is made anew.

    >>> import torch
    >>> from torch._subclasses.fake_tensor import FakeTensorMode
    >>> @functools.lru_cache
    ... def mask(size):
    ...     return torch.ones(size, size).tril()
    >>> with forgetting(), FakeTensorMode():
    ...     print(type(mask(2)).__name__)
    FakeTensor
    >>> mask(2).sum()
    tensor(3.)
    """
    try:
        yield
    finally:
        for found in gc.get_objects():
            if type(found) is _REMEMBERS and _holds_fakes(found, _DEPTH):
                found.cache_clear()


def _holds_fakes(holder: Any, depth: int) -> bool:
    for inner in gc.get_referents(holder):
        if isinstance(inner, FakeTensor):
            return True
        entry = type(inner) in (dict, tuple, list) or type(inner).__name__ == "_lru_list_elem"
        if entry and depth and _holds_fakes(inner, depth - 1):
            return True
    return False
