"""The largest number of bytes that live tensors held at one time, counted at every operation of torch."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["LiveBytes"]


class LiveBytes(TorchDispatchMode):
    """Counts the storages that are made inside it, each from the operation that made it to its end.

    What an operation allocates and frees within itself is not seen.

    >>> with LiveBytes() as count:
    ...     kept = torch.zeros(1000) + 1
    >>> (count.peak, count.now)
    (8000, 4000)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            self._know(leaf, made=False)
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            self._know(leaf, made=True)
        self.peak = max(self.peak, self.now)
        return result

    def _know(self, leaf: Any, made: bool) -> None:
        if not isinstance(leaf, torch.Tensor):
            return
        storage = leaf.untyped_storage()
        if storage in self._known:
            return
        self._known[storage] = True
        if made:
            size = storage.nbytes()
            self.now += size
            weakref.finalize(storage, self._gone, size)

    def _gone(self, size: int) -> None:
        self.now -= size
