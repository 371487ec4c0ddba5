"""Which sample is which: ids, and digests of what the teacher is called with.

A digest covers a sample's own part of every argument without its padding, so that it does not
depend on the batch in which the sample comes. It is what a content id is made of, and what shows
under any other id that a sample is not what it was.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from softs_lightning.product import describe
from softs_lightning.transfer import iter_tensors

__all__ = ["Ids", "Samples", "digests", "identify", "named", "recorded"]

Ids = str | Callable[[Any], Iterable[Any]]


@dataclass
class Samples:
    """The samples of a batch.

    Attributes:
        ids: one a sample.
        arguments: what the teacher is called with, by name.
        mask_name: the argument that tells tokens from padding.
    """

    ids: list[str]
    arguments: Mapping[str, Any]
    mask_name: str | None

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def mask(self) -> Tensor | None:
        """[samples, tokens] on the CPU, true where a token is no padding; ``None`` where there is no mask."""
        found = self.arguments.get(self.mask_name) if self.mask_name is not None else None
        if isinstance(found, Tensor) and found.ndim == 2 and len(found) == _count(self.arguments):
            return found.detach().to("cpu") != 0
        return None

    @cached_property
    def digests(self) -> list[bytes]:
        """16 bytes a sample, see :func:`digests`."""
        return digests(self.arguments, _count(self.arguments), self.mask)


def named(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by name; positional ones are called by their number.

    >>> named((1,), {"scale": 2})
    {'0': 1, 'scale': 2}
    """
    return {**{str(i): value for i, value in enumerate(args)}, **kwargs}


def recorded(batch: Any, names: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call that was recorded, made of this batch, where the teacher is not here to say what it takes.

    Raises:
        KeyError: when the batch lacks one of `names`.

    >>> recorded({"x": 1, "labels": 2}, ["x"]), recorded((3, 4), ["0"])
    (((), {'x': 1}), ((3,), {}))
    """
    inner = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(inner, Mapping):
        return (inner,), {}
    absent = [name for name in names if name not in inner]
    if absent:
        raise KeyError(
            f"the teacher was called with {', '.join(map(repr, absent))}, which the batch, {describe(inner)}, does not "
            "have: pass inputs=lambda batch: ... as when the store was made"
        )
    return (), {name: inner[name] for name in names}


def identify(
    batch: Any, arguments: Mapping[str, Any], ids: Ids, *, mask: str | None, seed: Ids | None = None
) -> Samples:
    """The samples of a batch.

    Args:
        batch: as the training step gets it.
        arguments: what the teacher is called with, by name.
        ids: ``"content"`` (a digest of the sample's input), ``"index"`` (the numbers that
            :class:`~softs_lightning.store.Numbered` attaches), the key of a field of the batch, or a function of it.
        mask: the argument that tells tokens from padding, if the teacher is given one.
        seed: key or function that gives the seed of each sample's random transformation; it becomes part of the id.

    Raises:
        KeyError: when the batch has no such field.
        ValueError: when there are more or fewer ids than samples, or an id twice for two unlike samples.
    """
    count = _count(arguments)
    samples = Samples([], arguments, mask)
    if ids == "content":
        names = [digest.hex() for digest in samples.digests]
    else:
        names = _read(batch, ids, count, "ids")
    if seed is not None:
        seeds = _read(batch, seed, count, "seeds")
        names = [f"{name}@{number}" for name, number in zip(names, seeds, strict=True)]
    samples.ids = names
    if len(set(names)) < count:
        seen: dict[str, bytes] = {}
        for name, digest in zip(names, samples.digests, strict=True):
            if seen.setdefault(name, digest) != digest:
                raise ValueError(
                    f"two unlike samples of one batch have the id {name!r}: ids must name one sample each"
                )
    return samples


def _count(arguments: Mapping[str, Any]) -> int:
    for tensor in iter_tensors(dict(arguments)):
        if tensor.ndim:
            return len(tensor)
    raise TypeError("the teacher is called without a tensor, so the samples of the batch cannot be counted")


def _read(batch: Any, source: Ids, count: int, what: str) -> list[str]:
    if source == "index":
        values = getattr(batch, "sample_ids", None)
        if values is None:
            raise KeyError(
                f"the batch, {describe(batch)}, carries no sample ids: wrap the dataset in Numbered and give the loader "
                "its collate, or use ids='content'. If it is wrapped, something other than Lightning's own hooks has made "
                "a new container"
            )
    elif isinstance(source, str):
        if not isinstance(batch, Mapping) or source not in batch:
            raise KeyError(
                f"the batch, {describe(batch)}, has no field {source!r} for the {what} of its samples"
            )
        values = batch[source]
    else:
        values = source(batch)
    if isinstance(values, Tensor):
        values = values.tolist()
    names = [_name(value) for value in values]
    if len(names) != count:
        raise ValueError(f"{len(names)} {what} for a batch of {count} samples")
    return names


def _name(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return str(operator.index(value))
    except TypeError:
        raise TypeError(f"a sample's id is a string or a whole number, got {value!r}") from None


def digests(arguments: Mapping[str, Any], count: int, mask: Tensor | None = None) -> list[bytes]:
    """16 bytes a sample that change when anything changes that the teacher is given for it.

    Args:
        arguments: by name. Of a tensor or list whose length is `count` a sample has its own entry, anything
            else is shared by all.
        count: how many samples.
        mask: [count, tokens], on the CPU. Entries along `tokens` are taken only where it is true; the position of the
            first one counts as well, unless there are ``position_ids``.

    >>> ids = torch.tensor([[5, 6, 0], [5, 6, 7]])
    >>> alone, _ = digests({"x": ids}, 2, torch.tensor([[True, True, False], [True, True, True]]))
    >>> alone == digests({"x": ids[:1, :2]}, 1, torch.tensor([[True, True]]))[0]
    True
    """
    hashes = [hashlib.blake2b(digest_size=16) for _ in range(count)]
    chosen = None if mask is None else [_slice(row) for row in mask]
    if mask is not None and "position_ids" not in arguments:
        for own, first in zip(hashes, mask.int().argmax(1).tolist(), strict=True):
            own.update(b"%d" % first)
    for name in sorted(arguments):
        for own, part in zip(hashes, _entries(name, arguments[name], count, mask, chosen), strict=True):
            own.update(part)
    return [own.digest() for own in hashes]


def _entries(
    name: str, value: Any, count: int, mask: Tensor | None, chosen: list[Any] | None
) -> Iterable[bytes]:
    if isinstance(value, Tensor):
        value = value.detach().to("cpu")
        if not value.ndim or len(value) != count:
            return [_bytes(name, value)] * count
        if mask is not None and chosen is not None and value.ndim > 1 and value.shape[1] == mask.shape[1]:
            return (_bytes(name, row[pick]) for row, pick in zip(value, chosen, strict=True))
        return (_bytes(name, row) for row in value)
    if isinstance(value, Mapping):
        parts = [list(_entries(f"{name}.{k}", value[k], count, mask, chosen)) for k in sorted(value, key=str)]
        return [b"".join(column) for column in zip(*parts, strict=True)] if parts else [b""] * count
    if isinstance(value, (list, tuple)):
        if len(value) == count and all(isinstance(v, (str, int, float)) for v in value):
            return [f"{name}={v!r}\n".encode() for v in value]
        parts = [list(_entries(f"{name}.{i}", v, count, mask, chosen)) for i, v in enumerate(value)]
        return [b"".join(column) for column in zip(*parts, strict=True)] if parts else [b""] * count
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.device)):
        return [f"{name}={value!r}\n".encode()] * count
    raise TypeError(
        f"the teacher's argument {name!r} is {describe(value)}, whose content cannot be told: pass inputs=lambda batch: ... "
        "that gives tensors, numbers and strings"
    )


def _slice(row: Tensor) -> Any:
    """The true entries of a mask, as a slice where they stand together."""
    count, first = int(row.sum()), int(row.int().argmax())
    return slice(first, first + count) if bool(row[first : first + count].all()) else row


def _bytes(name: str, tensor: Tensor) -> bytes:
    head = f"{name}:{tensor.dtype}:{list(tensor.shape)}\n".encode()
    return head + tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
