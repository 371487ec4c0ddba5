"""Filling a store from several processes, each of which runs the teacher over its share of the data.

Lightning starts the processes and tells them apart; what is here is which sample belongs to whom. No sample
belongs to two, none is repeated to make shares equal, and the order of the dataset decides, not a shuffling
sampler that each process would draw in its own way.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from softs_lightning.product import ProductSpec
from softs_lightning.store.build import Built, forecast
from softs_lightning.store.teacher import StoredTeacher

__all__ = ["build_over_ranks", "share"]


def share(loader: DataLoader[Any], rank: int, ranks: int, indices: Sequence[int]) -> DataLoader[Any]:
    """A loader of every `ranks`-th of these samples, in the dataset's order, in batches of the same size.

    >>> loader = DataLoader(list(range(7)), batch_size=2, shuffle=True)
    >>> [batch.tolist() for rank in range(2) for batch in share(loader, rank, 2, range(7))]
    [[0, 2], [4, 6], [1, 3], [5]]
    """
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        raise TypeError(
            f"the loader's {type(loader.batch_sampler).__name__} does not say how large its batches are (batch_size), so "
            "its samples cannot be shared out: run precompute in one process"
        )
    own: list[int] = list(indices[rank::ranks])
    return DataLoader(
        loader.dataset,
        batch_size=size,  # and a sampler: Lightning would make a batch sampler anew for predicting, of all samples
        sampler=own,
        collate_fn=loader.collate_fn,
        num_workers=loader.num_workers,
        pin_memory=loader.pin_memory,
        worker_init_fn=loader.worker_init_fn,
        multiprocessing_context=loader.multiprocessing_context,
    )


def _chosen(loader: DataLoader[Any]) -> Sequence[int]:
    """The samples that the loader draws, each once, in the dataset's order."""
    dataset: Any = loader.dataset
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(
            f"{type(dataset).__name__} has no index, so its samples cannot be shared out over processes: run precompute in "
            "one process"
        )
    if type(loader.batch_sampler) is not BatchSampler:
        return sorted({index for batch in loader.batch_sampler or () for index in batch})
    if isinstance(loader.sampler, SequentialSampler) or (
        isinstance(loader.sampler, RandomSampler)
        and not loader.sampler.replacement
        and loader.sampler.num_samples == len(dataset)
    ):
        return range(len(dataset))
    return sorted(set(loader.sampler))


class _Filling(L.LightningModule):
    """What Lightning runs in each process."""

    def __init__(self, stored: StoredTeacher, spec: ProductSpec, loader: DataLoader[Any]) -> None:
        super().__init__()
        self.stored, self.spec, self.loader = stored, spec, loader
        self.built: Built | None = None
        self._began = self._batch_began = 0.0

    def predict_dataloader(self) -> DataLoader[Any]:
        # A sampler may draw at random which samples it takes: one process says it for all.
        chosen = self.trainer.strategy.broadcast(_chosen(self.loader))
        return share(self.loader, self.trainer.global_rank, self.trainer.world_size, chosen)

    def on_predict_start(self) -> None:
        self._began = time.monotonic()
        self.stored.place(self.trainer.strategy.root_device, self.trainer.precision_plugin.convert_module)
        self.stored.check(self.spec)

    def predict_step(self, batch: Any, batch_idx: int) -> int:
        began, before = time.monotonic(), self.stored.computed
        self.stored.supply(batch, self.spec)
        if self.stored.computed and not before:
            (batches,) = self.trainer.num_predict_batches
            seconds = time.monotonic() - began
            text = forecast(self.stored, int(batches) - batch_idx - 1, seconds, ranks=self.trainer.world_size)
            self.print(text)  # in the first process
        return self.stored.seen  # nothing at all would be taken for a mistake

    def on_predict_end(self) -> None:
        self.stored.commit()
        strategy = self.trainer.strategy
        counts = torch.tensor([self.stored.seen, self.stored.computed], device=strategy.root_device)
        # All have committed when this returns.
        seen, computed = strategy.reduce(counts, reduce_op="sum").tolist()
        for column in self.stored.columns().values():
            column.refresh()
        self.built = Built.of(
            self.stored, seen=seen, computed=computed, seconds=time.monotonic() - self._began
        )
        self.stored.release()


def build_over_ranks(
    trainer: L.Trainer, stored: StoredTeacher, spec: ProductSpec, loader: DataLoader[Any]
) -> Built:
    """Run `stored` on every sample that the store lacks, in the trainer's processes and precision.

    Args:
        trainer: with ``use_distributed_sampler=False`` and ``inference_mode=False``; its devices and strategy say how
            many processes there are.
        stored: not placed yet.
        spec: the products.
        loader: of a map-style dataset.

    Returns:
        what all processes together came to, in each of them.

    Raises:
        TypeError: for data that cannot be shared out.
        ValueError: when there are no samples.
    """
    _chosen(loader)  # refused before any process is started
    share(loader, 0, 1, range(0))
    filling = _Filling(stored, spec, loader)
    try:
        trainer.predict(filling, return_predictions=False)
    finally:
        stored.release()
    if filling.built is None or not filling.built.samples:
        raise ValueError("there was no batch to compute anything from")
    return filling.built
