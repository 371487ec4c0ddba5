"""Reading ahead in a loader's workers, so that a step finds its products in memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import default_collate

from softs_lightning.product import ProductSpec
from softs_lightning.store.errors import MissingSampleError, StoreFormatError, StoreMismatchError
from softs_lightning.store.teacher import StoredTeacher

__all__ = ["Prefetch"]


class Prefetch:
    """A collate function that also reads what the store has for the batch it makes.

    In a worker process that brings the pages of local shards into the system's cache, and remote shards into the
    cache folder, while the training step is busy with earlier batches. The batch itself is unchanged; what the store
    does not have yet is passed over.

    Args:
        path: of the store.
        products: those that the training reads.
        collate_fn: makes the batch; ``dataset.collate`` for a :class:`~softs_lightning.store.Numbered` dataset.
        options: as for the :class:`~softs_lightning.store.StoredTeacher` that reads: `ids`, `inputs`, `encoding`, …

    >>> import tempfile, torch
    >>> from torch import nn
    >>> from torch.utils.data import DataLoader
    >>> from softs_lightning.store import ProductStore
    >>> path, data = tempfile.mkdtemp(), torch.randn(8, 3)
    >>> _ = ProductStore.build(path, nn.Linear(3, 2), "outputs[.]", data.split(4), progress=False)
    >>> ahead = Prefetch(path, "outputs[.]")
    >>> batch = next(iter(DataLoader(data, batch_size=4, collate_fn=ahead)))
    >>> ahead.found
    4
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        products: str | ProductSpec | Sequence[str | ProductSpec],
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        **options: Any,
    ) -> None:
        asked = [products] if isinstance(products, (str, ProductSpec)) else list(products)
        self.spec = ProductSpec.union(map(ProductSpec.parse, asked))
        self.collate_fn = collate_fn
        self.reader = StoredTeacher(None, path, **options)
        self.found = 0

    def __call__(self, samples: list[Any]) -> Any:
        batch = self.collate_fn(samples)
        try:
            if self.reader.store is None:
                self.reader.place()
            self.found += self.reader.touch(batch, self.spec)
        except (MissingSampleError, StoreFormatError, StoreMismatchError):
            pass  # nothing is there yet: this epoch writes it
        return batch

    def __getstate__(self) -> dict[str, Any]:
        self.reader.release()  # each process opens the store itself
        return self.__dict__
