"""Memory for batches that is used again, so that reading disturbs nobody's allocations.

A batch of logits over a large vocabulary takes tens of megabytes. Asked of the allocator anew in each
step and held beside the student's graph, it makes the heap grow and shrink, and the system maps and
clears those pages over and over, mostly within the student's backward: several percent of a step that
moving the values themselves does not cost.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["Buffers"]

_LARGE = 1 << 20
"""Bytes; what is smaller is the allocator's affair."""


class Buffers:
    """Gives out tensors whose memory is taken again once nobody refers to it: no tensor, no view, no graph.

    Args:
        kept: how many pieces of memory are held for one name at most.

    >>> buffers = Buffers()
    >>> first = buffers.empty("logits", (1024, 1024), torch.float32)
    >>> place, view = first.data_ptr(), first[1:]
    >>> del first
    >>> buffers.empty("logits", (1024, 1024), torch.float32).data_ptr() == place  # the view still needs it
    False
    >>> del view
    >>> buffers.empty("logits", (1024, 512), torch.float32).data_ptr() == place
    True
    """

    def __init__(self, kept: int = 2) -> None:
        self.kept = kept
        self._memory: dict[str, list[np.ndarray[Any, np.dtype[np.uint8]]]] = {}

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor on the CPU, in memory used before under this name where some is free."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _LARGE:
            return torch.empty(shape, dtype=dtype)
        held = self._memory.setdefault(name, [])
        free = [number for number in range(len(held)) if _unused(held, number)]
        fits = next((number for number in free if held[number].nbytes >= nbytes), None)
        if fits is None:
            for number in reversed(free):
                del held[number]  # too small for the batches that come now
            memory = np.empty(nbytes, dtype=np.uint8)
            if len(held) < self.kept:
                held.append(memory)
        else:
            memory = held[fits]
        return torch.from_numpy(memory)[:nbytes].view(dtype).view(shape)

    def clear(self) -> None:
        """Let go of the memory; what is in use lives on as long as it is."""
        self._memory.clear()


def _unused(held: list[np.ndarray[Any, np.dtype[np.uint8]]], number: int) -> bool:
    # The list's reference and that of the call itself. Each storage made from the array adds one for as long as
    # any tensor, view or graph needs it.
    return sys.getrefcount(held[number]) == 2
