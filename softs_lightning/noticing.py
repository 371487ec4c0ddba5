"""Looking at numbers of an accelerator without making it wait for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = ["Noticing"]


class Noticing:
    """Small tensors, handed in as a step makes them and given back once their values are known.

    On a CPU that is at once. An accelerator copies them while it goes on, and they are given back
    when its copy is done, most often a step later: nothing waits, and nothing is lost.

    >>> noticing = Noticing()
    >>> noticing.put(3, torch.tensor([1.0, 2.0]))
    >>> [(note, values.tolist()) for note, values in noticing.known()]
    [(3, [1.0, 2.0])]
    >>> list(noticing.known())
    []
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Any, Tensor, torch.Event | None]] = []

    def put(self, note: Any, values: Tensor) -> None:
        """Keep `values` with a `note` that says what they are."""
        values = values.detach()
        if values.device.type == "cpu":
            self._waiting.append((note, values, None))
            return
        copy = values.to("cpu", non_blocking=True)
        event = torch.Event(device=values.device)
        event.record()
        self._waiting.append((note, copy, event))

    def known(self, *, wait: bool = False) -> Iterator[tuple[Any, Tensor]]:
        """Give what is known, oldest first, and forget it; with `wait`, all that was put in."""
        while self._waiting:
            note, values, event = self._waiting[0]
            if event is not None and not event.query():
                if not wait:
                    return
                event.synchronize()
            del self._waiting[0]
            yield note, values
