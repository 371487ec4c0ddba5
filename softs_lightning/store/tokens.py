"""Tokens without their padding: trimmed when a product is kept, put back when it is read.

``token dimensions`` are those of one sample's activation that run over the tokens of the
batch: the first for hidden states, both last ones for attention maps.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Kept", "restore", "token_dims", "trim"]


def token_dims(shape: Sequence[int], mask: Sequence[int] | None) -> tuple[int, ...]:
    """Which dimensions of one sample run over tokens, from the shapes of a batch of activations and of its mask.

    >>> token_dims((8, 16, 384), (8, 16)), token_dims((8, 12, 16, 16), (8, 16)), token_dims((8, 384), (8, 16))
    ((0,), (1, 2), ())
    """
    if mask is None or len(shape) < 2:
        return ()
    tokens = mask[1]
    if len(shape) == 4 and shape[2] == shape[3] == tokens:
        return (1, 2)
    if shape[1] == tokens:
        return (0,)
    return (1,) if len(shape) == 4 and shape[2] == tokens else ()


@dataclass(frozen=True)
class Kept:
    """A share of a sample's tokens, the same each time: drawn from the sample's digest.

    Args:
        share: of the tokens, rounded up.
        seed: another one draws others.

    >>> Kept(0.25).positions(8, b"a").shape
    torch.Size([2])
    """

    share: float
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.share < 1:
            raise ValueError(f"the share of tokens that is kept lies between 0 and 1, got {self.share}")

    @property
    def name(self) -> str:
        return f"{self.share:g}/{self.seed}"

    def positions(self, length: int, digest: bytes) -> Tensor:
        """Which of `length` tokens are kept, in order; one at least."""
        key = hashlib.blake2b(digest + str(self.seed).encode(), digest_size=7).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(key, "little"))
        count = max(1, math.ceil(length * self.share)) if length else 0
        return torch.randperm(length, generator=generator)[:count].sort().values


def trim(value: Tensor, mask: Tensor | None, dims: Sequence[int]) -> Tensor:
    """One sample's activation with the tokens that `mask` [tokens] keeps, along each of `dims`."""
    if mask is None or not dims or bool(mask.all()):
        return value
    where = mask.nonzero().squeeze(1)
    for dim in dims:
        value = value.index_select(dim, where.to(value.device))
    return value


def restore(
    values: Iterable[Tensor],
    shapes: Sequence[Sequence[int]],
    places: Sequence[Tensor] | None,
    tokens: int,
    dims: Sequence[int],
    dtype: torch.dtype,
    fill: float,
    empty: Callable[[tuple[int, ...], torch.dtype], Tensor] = lambda shape, dtype: torch.empty(
        shape, dtype=dtype
    ),
) -> Tensor:
    """A batch from its samples' activations.

    Args:
        values: one a sample, without padding; drawn one by one, so that each may be forgotten before the next.
        shapes: theirs.
        places: for each sample where its tokens stand; ``None`` when the activations have no tokens.
        tokens: the length of the batch.
        dims: the token dimensions of a sample.
        dtype: of the batch.
        fill: what stands where there is no token; integers and booleans get zero.
        empty: gives the memory of the batch.

    Raises:
        ValueError: when activations differ in shape, apart from their numbers of tokens.
    """
    dims = () if places is None else dims
    padded = {tuple(tokens if dim in dims else n for dim, n in enumerate(shape)) for shape in shapes}
    if len(padded) > 1:
        raise ValueError(f"these samples' activations differ in shape: {', '.join(map(str, sorted(padded)))}")
    batch = empty((len(shapes), *padded.pop()), dtype)
    if places is None:
        for own, value in zip(batch, values, strict=True):
            own.copy_(value)
        return batch
    padding = fill if dtype.is_floating_point else 0
    for own, value, place in zip(batch, values, places, strict=True):
        _put(own, value, place, dims, padding)
    return batch


def _put(own: Tensor, value: Tensor, place: Tensor, dims: Sequence[int], padding: float) -> None:
    count = len(place)
    first, last = (int(place[0]), int(place[-1])) if count else (0, -1)
    together = last - first == count - 1  # then a view takes them
    if together and len(dims) == 1:
        own.narrow(dims[0], 0, first).fill_(padding)
        own.narrow(dims[0], last + 1, own.shape[dims[0]] - last - 1).fill_(padding)
    elif count < own.shape[dims[0]]:
        own.fill_(padding)
    if together:
        for dim in dims:
            own = own.narrow(dim, first, count)
        own.copy_(value)
        return
    index: list[slice | Tensor] = [slice(None)] * own.ndim
    for order, dim in enumerate(dims):
        index[dim] = place.reshape([-1] + [1] * (len(dims) - 1 - order))
    own[tuple(index)] = value.to(own.dtype)
