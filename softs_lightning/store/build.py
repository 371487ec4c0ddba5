"""Run a teacher over a dataset once and keep what it gives."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

from softs_lightning.product import ProductSpec
from softs_lightning.store.errors import StoreFullError
from softs_lightning.store.teacher import StoredTeacher
from softs_lightning.teacher import Teacher
from softs_lightning.transfer import transfer_to_device

__all__ = ["Built", "build", "forecast", "readable_size", "stored_for"]


@dataclass(frozen=True)
class Built:
    """What a build came to.

    Attributes:
        samples: how many went by.
        computed: for how many the teacher ran; a batch of which anything is missing is computed whole.
        seconds: it took.
        nbytes: of the products' columns on disk, those of earlier builds included.
        errors: for each product the largest error of any value, as it was measured.
    """

    samples: int
    computed: int
    seconds: float
    nbytes: int
    errors: dict[str, dict[str, float]]

    @classmethod
    def of(cls, stored: StoredTeacher, *, seen: int, computed: int, seconds: float) -> Built:
        """The account of what a teacher's columns hold."""
        columns = stored.columns()
        errors = {name: column.error for name, column in columns.items()}
        return cls(seen, computed, seconds, sum(column.nbytes for column in columns.values()), errors)

    def __str__(self) -> str:
        lost = "; ".join(
            f"{product}: " + (", ".join(f"{name} {value:.3g}" for name, value in error.items()) or "nothing")
            for product, error in self.errors.items()
        )
        return (
            f"{self.samples:,} samples, {self.computed:,} of them computed, in {self.seconds:.1f} s; "
            f"{readable_size(self.nbytes)} on disk. Largest errors: {lost}"
        )


def build(
    path: str | os.PathLike[str],
    teacher: Teacher | nn.Module | Callable[[], nn.Module],
    products: str | ProductSpec | Sequence[str | ProductSpec],
    batches: Iterable[Any],
    *,
    device: torch.device | str | None = None,
    progress: bool = True,
    **options: Any,
) -> Built:
    """Run `teacher` on every batch that the store at `path` lacks, and keep `products`.

    It may be stopped at any moment, killed too, and started again: what was committed is not computed
    again. Several may run at once on parts of a dataset.

    Args:
        path: of the store; made if it is not there.
        teacher: as for :class:`StoredTeacher`, or a :class:`~softs_lightning.teacher.Teacher` with its options.
        products: one product_id, or several.
        batches: a ``DataLoader``, or any iterable of batches; their order does not matter.
        device: where the teacher runs; where it is, by default.
        progress: show a progress bar and, after the first batch that is computed, what is still to come.
        options: of :class:`StoredTeacher`: `encoding`, `ids`, `feed`, `keep`, `mode`, …

    Raises:
        StoreFullError: before the second batch when the disk will not hold the rest, or when it does not.
        SampleChangedError: for a dataset with a random augmentation.
        ValueError: when there are no batches or no products.

    >>> import tempfile
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> loader = DataLoader(TensorDataset(torch.randn(10, 4)), batch_size=5)
    >>> built = build(tempfile.mkdtemp(), nn.Linear(4, 2), "outputs[.]", loader, encoding="fp16", progress=False)
    >>> built.samples, built.computed, built.errors["outputs[.]"]["max_abs"] < 1e-2
    (10, 10, True)
    """
    stored, spec = stored_for(path, teacher, products, **options)
    stored.inspect(getattr(batches, "dataset", None))
    started = time.monotonic()
    stored.place(device)
    try:
        stored.check(spec)
        bar = tqdm(batches, unit="batch", disable=not progress, desc="precompute", dynamic_ncols=True)
        announced = False
        for number, batch in enumerate(bar, start=1):
            began = time.monotonic()
            stored.supply(_moved(batch, device), spec)
            if stored.computed and not announced:
                announced = True
                if bar.total is not None:
                    text = forecast(stored, bar.total - number, time.monotonic() - began)
                    if not bar.disable:
                        bar.write(text)
            bar.set_postfix(computed=stored.computed, refresh=False)
        stored.commit()
        if not stored.seen:
            raise ValueError("there was no batch to compute anything from")
        seconds = time.monotonic() - started
        return Built.of(stored, seen=stored.seen, computed=stored.computed, seconds=seconds)
    finally:
        stored.release()


def stored_for(
    path: str | os.PathLike[str],
    teacher: Teacher | nn.Module | Callable[[], nn.Module],
    products: str | ProductSpec | Sequence[str | ProductSpec],
    **options: Any,
) -> tuple[StoredTeacher, ProductSpec]:
    """A stored teacher and the union of what is to be kept of it. Raises ``ValueError`` for no products."""
    asked = [products] if isinstance(products, (str, ProductSpec)) else list(products)
    spec = ProductSpec.union(ProductSpec.parse(product) for product in asked)
    if not spec:
        raise ValueError("no product is named, so there is nothing to keep: write 'outputs[name]'")
    make: Callable[..., StoredTeacher] = (
        StoredTeacher.around if isinstance(teacher, Teacher) else StoredTeacher
    )
    return make(teacher, path, **options), spec


def _moved(batch: Any, device: torch.device | str | None) -> Any:
    if hasattr(batch, "sample_ids"):  # its own way keeps the ids
        return batch if device is None else batch.to(device)
    return transfer_to_device(batch, device)


def forecast(stored: StoredTeacher, left: int, seconds: float, *, ranks: int = 1) -> str:
    """What is still to come, from the batch just computed, the first.

    Args:
        stored: the teacher that computed it.
        left: batches to come, in this process.
        seconds: that the batch took.
        ranks: processes that do the same.

    Raises:
        StoreFullError: when it will not fit on the disk.
    """
    nbytes = sum(column.added_nbytes for column in stored.columns().values()) * left * ranks
    assert stored.store is not None
    free = stored.store.folder.free()
    text = f"{left:,} batches to come: about {readable_size(nbytes)} and {seconds * left / 60:.1f} minutes"
    if free is not None and nbytes > free:
        raise StoreFullError(
            errno.ENOSPC,
            f"{text}, and {stored.store.folder} has {readable_size(free)} free: choose a smaller encoding= or another disk",
        )
    return text + ("" if free is None else f"; {readable_size(free)} free")


def readable_size(nbytes: float) -> str:
    """A number of bytes for people.

    >>> readable_size(512), readable_size(3_250_000)
    ('512 B', '3.2 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
