"""Averages over all tokens of an accumulation window, for pairs with ``over_window=True``.

Lightning adds up the gradients of ``accumulate_grad_batches`` batches, each batch's loss divided by
their number: a mean of means, in which the tokens of a batch with few of them count for more. The
mean over all tokens weights batch i by ``tokens of i / tokens of the window``, and the first
backward needs the second number. So the window's batches are taken from the loader when its first
batch begins, and their masks are counted; they wait in the CPU's memory for their turn. Nothing is
corrected afterwards: the task's gradients, loss scaling and clipping are as without it.

A batch whose step is skipped (``None``) counts as one that gave nothing, as in Lightning's own mean.
Without worker processes, a dataset that draws random numbers draws them earlier than it would have.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from lightning import Trainer
from torch import Tensor

from softs_lightning.noticing import Noticing
from softs_lightning.pairing import BoundPair

__all__ = ["Lookahead", "Window"]


class Lookahead(Iterator[Any]):
    """An iterator that can be looked into without taking anything from it.

    >>> ahead = Lookahead(iter("abc"))
    >>> ahead.peek(2), next(ahead), ahead.peek(9), list(ahead)
    (['a', 'b'], 'a', ['b', 'c'], ['b', 'c'])
    """

    def __init__(self, inner: Iterator[Any]) -> None:
        self._inner = inner
        self._ahead: deque[Any] = deque()

    def peek(self, count: int) -> list[Any]:
        """The next `count` elements, or as many as there are."""
        while len(self._ahead) < count:
            try:
                self._ahead.append(next(self._inner))
            except StopIteration:
                break
        return list(self._ahead)[:count]

    def __next__(self) -> Any:
        return self._ahead.popleft() if self._ahead else next(self._inner)


class Window:
    """What the batches of an accumulation window weigh, for the pairs that are averaged over it.

    Args:
        trainer: whose training loop gives the batches.
        pairs: those with ``over_window``.
    """

    def __init__(self, trainer: Trainer, pairs: Sequence[BoundPair]) -> None:
        self.trainer = trainer
        self.pairs = list(pairs)
        self._which: tuple[Lookahead, int] | None = None
        self._first = self._now = 0
        # A row for each pair, a column for each batch.
        self._counts = self._shared = torch.zeros(0)
        self._mistaken = Noticing()

    def begin(self, batch: Any) -> None:
        """A training step begins; with the first one of a window, the window's other batches are counted too."""
        # Asked of the loop and not told by a hook: Lightning's tuners call no hooks of other callbacks.
        size, batch_idx = self.trainer.accumulate_grad_batches, self.trainer.fit_loop.epoch_loop.batch_idx
        which = self._ahead(), batch_idx // size
        if which != self._which:
            self._which, self._first = which, batch_idx
            batches = [batch, *self._following(which[0], size - batch_idx % size - 1, batch_idx)]
            counted = [[bound.count(each) for each in batches] for bound in self.pairs]
            device = self.trainer.strategy.root_device
            counts = torch.zeros(len(self.pairs), size, dtype=torch.float64, device=device)
            for row, found in zip(counts, counted, strict=True):
                row[: len(found)] = torch.stack([count.to(row) for count in found])
            self._counts, self._shared = counts, _over_ranks(counts, self.pairs)
        self._now = batch_idx - self._first

    def factor(self, bound: BoundPair, batch: Any) -> Tensor:
        """What the term of this batch is multiplied by: its share of the tokens, times the number of batches."""
        row = self.pairs.index(bound)
        counted = bound.count(batch).to(self._counts)
        self._mistaken.put(bound, torch.stack([self._counts[row, self._now], counted]))
        self.check()
        shared = self._shared[row]
        return self.trainer.accumulate_grad_batches * shared[self._now] / shared.sum().clamp_min(1)

    def check(self, *, wait: bool = False) -> None:
        """Raise ``RuntimeError`` if a mask was another one in its step than it was when it was counted."""
        for bound, (before, now) in self._mistaken.known(wait=wait):
            if before != now:
                raise RuntimeError(
                    f"pair {bound.pair.name!r}: the mask of a batch counts {before:g} entries as the dataloader gives "
                    f"it, and {now:g} in its training step, so over_window=True would weight it wrongly: a batch hook "
                    "of the module changes it. Do that in the dataset or the collate function"
                )

    def _ahead(self) -> Lookahead:
        """The loop's iterator over the data, made into one that can be looked into."""
        fetcher = self._fetcher()
        if not isinstance(fetcher.iterator, Lookahead):
            fetcher.iterator = Lookahead(fetcher.iterator)
        found: Lookahead = fetcher.iterator
        return found

    def _fetcher(self) -> Any:
        fetcher = self.trainer.fit_loop._data_fetcher
        assert fetcher is not None, "a training step has data"
        return fetcher

    def _following(self, ahead: Lookahead, count: int, batch_idx: int) -> list[Any]:
        """The batches after this one, at most `count`, as the precision converts them."""
        count = int(min(count, self.trainer.num_training_batches - batch_idx - 1))
        # A loader of unknown length is one batch ahead already.
        ready = list(getattr(self._fetcher(), "batches", ()))[:count]
        ready += ahead.peek(count - len(ready))
        return [self.trainer.precision_plugin.convert_input(batch) for batch, *_ in ready]


def _over_ranks(counts: Tensor, pairs: Sequence[BoundPair]) -> Tensor:
    """The counts of all ranks together where a pair is averaged over them too."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return counts
    everyone = counts.clone()
    torch.distributed.all_reduce(everyone)
    rows = [everyone[i] if bound.pair.over_ranks else counts[i] for i, bound in enumerate(pairs)]
    return torch.stack(rows)
