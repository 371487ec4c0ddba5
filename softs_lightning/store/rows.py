"""From a batch of activations to a column's rows and back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from softs_lightning.product import describe
from softs_lightning.store.buffers import Buffers
from softs_lightning.store.column import Column
from softs_lightning.store.errors import SampleChangedError
from softs_lightning.store.samples import Samples
from softs_lightning.store.shard import Row
from softs_lightning.store.tokens import Kept, restore, token_dims, trim

__all__ = ["keep", "look_up", "places", "put_together"]


def keep(
    column: Column, value: Any, samples: Samples, *, arguments: Sequence[str], kept: Kept | None = None
) -> None:
    """Add to a column what it lacks of a batch.

    Args:
        column: of this product.
        value: [samples, ...], as the teacher gave it, on any device.
        samples: of the batch.
        arguments: what the teacher was called with, by name.
        kept: the share of tokens that is kept.

    Raises:
        TypeError: for a value that is no tensor.
        ValueError: when the batch is not its first dimension, or its encoding cannot hold it.
    """
    product = column.key.product
    if not isinstance(value, Tensor):
        raise TypeError(f"{product} is {describe(value)}, not a tensor: pick one with '#', as in 'name#0'")
    if not value.ndim or len(value) != len(samples):
        raise ValueError(
            f"{product} has shape {list(value.shape)} for a batch of {len(samples)} samples: only what has the batch as "
            "its first dimension can be kept by sample"
        )
    dims = token_dims(value.shape, None if samples.mask is None else samples.mask.shape)
    if kept is not None and len(dims) != 1:
        raise ValueError(
            f"keep= takes a share of tokens, and {product} {list(value.shape)} has no one dimension of them"
        )
    dtype = str(value.dtype).removeprefix("torch.")
    facts = {"dtype": dtype, "dims": list(dims), "arguments": list(arguments)}
    value = value.detach().to("cpu")  # complete when this returns, also from an accelerator
    absent = set(column.missing(samples.ids))
    for index, id in enumerate(samples.ids):
        if id in absent:
            own = trim(value[index], None if samples.mask is None else samples.mask[index], dims)
            digest = samples.digests[index]
            if kept is not None:
                own = own.index_select(dims[0], kept.positions(own.shape[dims[0]], digest))
            column.add(_row(column, id, digest, own), facts)


def _row(column: Column, id: str, digest: bytes, value: Tensor) -> Row:
    try:
        parts = column.encoding.encode(value)
    except ValueError as problem:
        raise ValueError(f"{column.key.product}, sample {id!r}: {problem}") from None
    # A view would keep the whole batch in memory for as long as its sample waits.
    parts = {name: part.clone() if _is_view(part) else part for name, part in parts.items()}
    lost = column.encoding.error(value, column.encoding.decode(parts, tuple(value.shape)))
    return Row(id, digest, tuple(value.shape), parts, lost)


def _is_view(part: Tensor) -> bool:
    return part.untyped_storage().nbytes() > part.nbytes


def look_up(column: Column, samples: Samples, *, compare: bool) -> list[Row]:
    """The rows of a batch's samples, all of which are there.

    Raises:
        SampleChangedError: with `compare`, for a sample that is not what it was when its products were computed.
    """
    rows = [column.row(id) for id in samples.ids]
    if compare:
        for row, digest in zip(rows, samples.digests, strict=True):
            if row.digest != digest:
                raise SampleChangedError(
                    f"sample {row.id!r} is not what it was when its products were written to {column.folder}: a random "
                    "augmentation (replay it with Numbered(dataset, seed=0), or give seed=), a dataset that changed or "
                    "was reordered, or another tokenizer"
                )
    return rows


def places(
    column: Column, rows: Sequence[Row], samples: Samples, kept: Kept | None = None
) -> list[Tensor] | None:
    """Where the tokens of each row stand in the batch; ``None`` for a product without tokens.

    Raises:
        ValueError: when the batch does not say which tokens are padding.
        SampleChangedError: when a sample has more or fewer tokens than it had.
    """
    assert column.facts is not None
    dims = column.facts["dims"]
    if not dims:
        return None
    if samples.mask is None:
        raise ValueError(
            f"{column.key.product} was kept without padding, and the teacher is given no mask that says where tokens stand"
        )
    found = [mask.nonzero().squeeze(1) for mask in samples.mask]
    if kept is not None:
        found = [own[kept.positions(len(own), row.digest)] for own, row in zip(found, rows, strict=True)]
    for row, own in zip(rows, found, strict=True):
        if row.shape[dims[0]] != len(own):
            raise SampleChangedError(
                f"sample {row.id!r} has {len(own)} tokens, and {row.shape[dims[0]]} when its products were computed"
            )
    return found


def put_together(
    column: Column,
    rows: Sequence[Row],
    samples: Samples,
    where: list[Tensor] | None,
    fill: float,
    buffers: Buffers,
) -> Tensor:
    """The batch of a product from its rows, padded as this batch is, on the CPU."""
    assert column.facts is not None
    values = (column.encoding.decode(row.parts, row.shape) for row in rows)
    tokens = 0 if samples.mask is None else samples.mask.shape[1]
    dtype: torch.dtype = getattr(torch, column.facts["dtype"])
    empty = partial(buffers.empty, column.key.name)
    return restore(
        values, [row.shape for row in rows], where, tokens, column.facts["dims"], dtype, fill, empty
    )
