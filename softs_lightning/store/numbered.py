"""A dataset whose samples know their numbers, whatever the loader does with their order."""

from __future__ import annotations

import copy
import hashlib
import pickle
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from softs_lightning.product import describe
from softs_lightning.store.errors import SampleChangedError
from softs_lightning.transfer import map_tensors

__all__ = ["Numbered", "refuse_random"]


class Sample:
    """An item of a :class:`Numbered` dataset. Its loader needs ``collate_fn=dataset.collate``."""

    def __init__(self, item: Any, id: str) -> None:
        self.item = item
        self.id = id


class _Fetched:
    """What a dataset gave for several indices at once."""

    def __init__(self, items: Any, ids: list[str]) -> None:
        self.items = items
        self.ids = ids


class _Carrier:
    """Mixed into a batch's own class: it carries its samples' ids, to another device and through a worker's queue."""

    sample_ids: list[str]

    def to(self, *args: Any, **options: Any) -> Any:
        plain = _plain(self)
        if hasattr(plain, "to"):
            moved = plain.to(*args, **options)
            moved = plain if moved is None else moved
        else:
            moved = map_tensors(lambda tensor: tensor.to(*args, **options), plain)
        return carry(moved, self.sample_ids)

    def pin_memory(self) -> Any:
        return carry(map_tensors(Tensor.pin_memory, _plain(self)), self.sample_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return carry, (_plain(self), self.sample_ids)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()

    def __copy__(self) -> Any:
        return carry(copy.copy(_plain(self)), self.sample_ids)


_MIXED: dict[type, type] = {}
"""One class for each class of batches: what is compiled for a batch's type must fit the next batch too."""


def _kind(cls: type) -> type:
    if cls not in _MIXED:
        _MIXED[cls] = type(f"Numbered{cls.__name__.capitalize()}", (_Carrier, cls), {})
    return _MIXED[cls]


def _plain(batch: Any) -> Any:
    """The batch as the collate function made it."""
    return _dressed(type(batch).__mro__[2], batch)  # behind the mixed class and _Carrier


def _dressed(cls: Any, batch: Any) -> Any:
    """The same batch as an instance of another class, a base or a descendant of its own."""
    other: Any
    if isinstance(batch, tuple):
        other = tuple.__new__(cls, batch)  # past a named tuple's own __new__, which takes its fields
    elif isinstance(batch, defaultdict):
        other = cls(batch.default_factory, batch)
    elif isinstance(batch, OrderedDict):
        other = cls.__new__(cls)
        for key in batch:  # past an own __setitem__: transformers' outputs keep attributes beside their items
            OrderedDict.__setitem__(other, key, OrderedDict.__getitem__(batch, key))
    elif isinstance(batch, dict):
        other = dict.__new__(cls)
        dict.update(other, batch)
    elif isinstance(batch, list):
        other = list.__new__(cls)
        other.extend(batch)
    else:
        other = object.__new__(cls)
    attributes = {n: value for n, value in getattr(batch, "__dict__", {}).items() if n != "sample_ids"}
    if attributes:
        other.__dict__.update(attributes)
    return other


def carry(batch: Any, ids: Sequence[str]) -> Any:
    """The batch with the ids beside it, as an instance of its own class all the same.

    Raises:
        TypeError: for a lone tensor or another value that is no container.
    """
    if isinstance(batch, _Carrier):
        batch = _plain(batch)
    container = isinstance(batch, (Mapping, list, tuple)) or hasattr(batch, "__dict__")
    if isinstance(batch, (Tensor, type)) or not container or callable(batch):
        raise TypeError(_CANNOT.format(describe(batch)))
    try:
        batch = _dressed(_kind(type(batch)), batch)
        batch.__dict__["sample_ids"] = list(ids)
    except (TypeError, AttributeError):  # a class of its own kind, with slots or none to derive from
        raise TypeError(_CANNOT.format(describe(batch))) from None
    return batch


_CANNOT = (
    "the collate function gave {}, which cannot carry ids beside it: let it give a dict, a list or a tuple, or use "
    "ids='content'"
)


class Numbered(Dataset[Any]):
    """Any map-style dataset, its samples carrying their index.

    Args:
        dataset: has ``__getitem__`` and ``__len__``.
        collate_fn: how samples become a batch, as for the loader without this wrapper.
        name: put before the number; needed when several datasets share one store.
        seed: makes each sample's random transformations the same in every epoch (Python's, NumPy's and torch's
            generators are seeded for each sample and put back afterwards). The seed is part of the ids.

    Batches are what `collate_fn` makes of the plain items, with an attribute ``sample_ids``; a training step sees
    no difference. The attribute survives workers, pinning, the move to a device and, in a fit, what builds a new
    container on the way: a precision plugin that converts inputs, a transfer hook of yours.

    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> data = Numbered(TensorDataset(torch.arange(4.0)), name="train")
    >>> batch = next(iter(DataLoader(data, batch_size=2, collate_fn=data.collate)))
    >>> batch, batch.sample_ids
    ([tensor([0., 1.])], ['train:0', 'train:1'])
    """

    def __init__(
        self,
        dataset: Any,
        *,
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        name: str = "",
        seed: int | None = None,
    ) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
            raise TypeError(
                f"{type(dataset).__name__} has no index to number its samples by: give each sample an id field and name it "
                "with ids='field', or use ids='content'"
            )
        self.dataset = dataset
        self.collate_fn = collate_fn
        self.name = name
        self.seed = seed
        if seed is None and hasattr(dataset, "__getitems__"):
            self.__getitems__ = self._fetch  # the loader asks for whole batches where a dataset gives them

    def __len__(self) -> int:
        return len(self.dataset)

    def _id(self, index: int) -> str:
        number = index if index >= 0 else len(self) + index
        return f"{self.name}:{number}" if self.name else str(number)

    def _fetch(self, indices: Sequence[int]) -> _Fetched:
        return _Fetched(self.dataset.__getitems__(indices), [self._id(index) for index in indices])

    def __getitem__(self, index: int) -> Sample:
        number = index if index >= 0 else len(self) + index
        id = self._id(index)
        if self.seed is None:
            return Sample(self.dataset[index], id)
        with _random_state_kept():
            key = hashlib.blake2b(f"{self.seed}:{number}".encode(), digest_size=8).digest()
            _seed(int.from_bytes(key, "little"))
            return Sample(self.dataset[index], f"{id}@{self.seed}")

    def collate(self, samples: list[Sample] | _Fetched) -> Any:
        """The loader's ``collate_fn``: what the dataset's own makes, with the ids attached."""
        if isinstance(samples, _Fetched):
            return carry(self.collate_fn(samples.items), samples.ids)
        return carry(self.collate_fn([sample.item for sample in samples]), [sample.id for sample in samples])


def refuse_random(dataset: Any, *, index: int = 0, readings: int = 3) -> None:
    """Refuse a dataset that gives something else each time it is asked for one sample.

    Args:
        dataset: a map-style dataset; anything else passes unseen.
        index: of the sample that is read.
        readings: how often. The state of the random generators stays as it was.

    Raises:
        SampleChangedError: when two readings differ: a random crop, flip, mask or noise.

    >>> refuse_random([1.0, 2.0])
    """
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or len(dataset) <= index:
        return
    with _random_state_kept():
        found = {_digest(dataset[index]) for _ in range(readings)}
    if len(found) > 1:
        raise SampleChangedError(
            f"sample {index} of {type(dataset).__name__} differs between two readings: a random augmentation. Products "
            "that are computed once would belong to other inputs. Take the augmentation out, or replay it with "
            "Numbered(dataset, seed=0)"
        )


def _digest(item: Any) -> bytes:
    """Of everything an item holds: tensors, arrays, images, numbers, strings."""
    own = hashlib.blake2b(digest_size=16)
    waiting = [item]
    while waiting:
        value = waiting.pop()
        if isinstance(value, Sample):
            waiting.append(value.item)
        elif isinstance(value, Mapping):
            waiting += [part for key in sorted(value, key=str) for part in (str(key), value[key])]
        elif isinstance(value, (list, tuple)):
            waiting += list(value)
        elif isinstance(value, Tensor):
            own.update(value.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            array = np.asarray(value)  # numbers, strings and pictures
            own.update(pickle.dumps(value) if array.dtype.hasobject else array.tobytes())
    return own.digest()


@contextmanager
def _random_state_kept() -> Iterator[None]:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def _seed(number: int) -> None:
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.manual_seed(number % 2**63)
