"""StoredTeacher: a teacher that looks up what it has said before.

To a training step it is a :class:`~softs_lightning.teacher.Teacher` like any other. What the store
lacks is computed by the live model, on the whole batch as it stands, kept, and handed over as it
will be read later, so that the first epoch sees the same numbers as all others.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from softs_lightning.catcher import Capture
from softs_lightning.product import Kind, ProductSpec, describe
from softs_lightning.selectors import nearest
from softs_lightning.store.column import Column, ColumnKey
from softs_lightning.store.encoding import Encoding, encoding
from softs_lightning.store.errors import MissingSampleError, SampleChangedError, StoreMismatchError
from softs_lightning.store.fingerprint import feed_fingerprint, teacher_fingerprint
from softs_lightning.store.samples import Ids, Samples, identify, named
from softs_lightning.store.shard import Row
from softs_lightning.store.store import Mode, ProductStore, canonical, lacking
from softs_lightning.store.tokens import Kept, restore, token_dims, trim
from softs_lightning.teacher import Cost, Teacher

__all__ = ["StoredTeacher"]

Choice = str | Encoding | Mapping[str, str | Encoding] | None


class _Absent(nn.Module):
    """Stands where the live model would: everything comes from the store."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the teacher is not here: this StoredTeacher only reads")


class _Restored(Capture):
    """A buffer filled from the store; ``select`` gives the values as a forward would have."""

    def __init__(self, spec: ProductSpec, values: Mapping[str, Tensor]) -> None:
        super().__init__(spec, {})
        self.values_by_name = dict(values)
        for kind, item in spec:
            if not item.pick and item.call is None:
                value = self.values_by_name[_name(kind, item)]
                entry = value if kind == "outputs" else {"args": (value,), "kwargs": {}}
                self[item.name][kind].append(entry)

    def select(self, product_id: str | ProductSpec | None = None) -> list[Any]:
        spec = self.spec if product_id is None else ProductSpec.parse(product_id)
        absent = [name for name in canonical(spec) if name not in self.values_by_name]
        if absent:
            raise LookupError(
                f"{', '.join(absent)} was not asked of this session, which captured {self.spec}"
            )
        return [self.values_by_name[_name(kind, item)] for kind, item in spec]


def _name(kind: Kind, item: Any) -> str:
    return canonical(ProductSpec(**{kind: (item,)}))[0]


class StoredTeacher(Teacher):
    """A teacher whose products are kept in a :class:`ProductStore` and taken from there.

    Args:
        source: the module or a function that returns it, as for :class:`~softs_lightning.teacher.Teacher`; ``None``
            reads only, and the teacher need not be installed.
        path: of the store.
        mode: ``"write"`` (the default where there is a `source`) computes and keeps what is missing, and refuses a
            store of another teacher; ``"add"`` lets several share one; ``"read"`` runs nothing.
        encoding: how products are kept (see :func:`~softs_lightning.store.encoding.encoding`), for all or by
            product; ``"exact"`` by default when writing, whatever is there when reading.
        ids: ``"content"``, ``"index"``, a field's key or a function, see :func:`~softs_lightning.store.samples.identify`.
        seed: key or function that gives the seed of each sample's augmentation.
        feed: the tokenizer or transform, or a name for it.
        mask: the teacher's argument that tells tokens from padding. Products are kept without their padding.
        fill: what stands at padded positions of what is read: NaN by default, so that a loss which does not mask
            them cannot train on invented numbers.
        keep: keep a share of the tokens only (a number, or :class:`Kept`); use it with ``Pair(mask=teacher.kept)``.
        identity: says who the teacher is, in place of the digest of its weights; selects one when reading.
        check: compare what the teacher would be called with with what it was, for ``"all"`` samples or ``"none"``.
        shard_nbytes: a shard is committed when so much waits in memory.
        commit_seconds: or when it has waited so long.
        options: `inputs`, `early_exit`, `copy`, as for :class:`~softs_lightning.teacher.Teacher`.

    Raises:
        StoreMismatchError: when placed or first used, for a teacher, product, encoding or feed that is not in the store.
        MissingSampleError: when reading, for a sample that is not in the store.
        SampleChangedError: for a sample that is not what it was: a random augmentation, another dataset.

    Under DDP each rank keeps what it computes, and all read all. ``release`` commits what waits; what was not
    committed when a process is killed is computed again.

    >>> import tempfile
    >>> path, x = tempfile.mkdtemp(), torch.randn(4, 2)
    >>> spec = ProductSpec.parse("outputs[0]")
    >>> teacher = StoredTeacher(nn.Sequential(nn.Linear(2, 3), nn.Tanh()), path)
    >>> teacher.place()
    >>> said = teacher.supply(x, spec).select()[0]
    >>> teacher.release()
    >>> reader = StoredTeacher(None, path)
    >>> reader.place()
    >>> torch.equal(reader.supply(x[[2, 0]], spec).select()[0], said[[2, 0]])
    True
    """

    def __init__(
        self,
        source: nn.Module | Callable[[], nn.Module] | None,
        path: str | os.PathLike[str],
        *,
        mode: Mode | None = None,
        encoding: Choice = None,
        ids: Ids = "content",
        seed: Ids | None = None,
        feed: Any = None,
        mask: str | None = "attention_mask",
        fill: float = float("nan"),
        keep: float | Kept | None = None,
        identity: str | None = None,
        check: str = "all",
        shard_nbytes: int = 64 << 20,
        commit_seconds: float = 60.0,
        cache: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(_Absent if source is None else source, **options)
        self.mode: Mode = mode or ("read" if source is None else "write")
        if source is None and self.mode != "read":
            raise ValueError(f"mode={self.mode!r} computes what is missing, and needs a teacher to do it")
        if check not in ("all", "none"):
            raise ValueError(f"check must be 'all' or 'none', got {check!r}")
        self.absent = source is None
        self.path = os.fspath(path)
        self.encodings = _encodings(encoding)
        self.ids, self.seed = ids, seed
        self.feed = feed_fingerprint(feed)
        self.mask, self.fill = mask, float(fill)
        self.keep = Kept(keep) if isinstance(keep, (int, float)) else keep
        self.identity, self.checks = identity, check == "all"
        self.shard_nbytes, self.commit_seconds, self.cache = int(shard_nbytes), float(commit_seconds), cache
        self.store: ProductStore | None = None
        self.computed = 0
        self._fingerprint: dict[str, Any] | None = None
        self._device: torch.device | None = None
        self._open: dict[tuple[str, str | None], Column] = {}
        self._given: tuple[Any, tuple[tuple[Any, ...], dict[str, Any]]] | None = None
        self._places: tuple[Any, list[Tensor], int] | None = None

    # -- the life of a teacher -------------------------------------------------------------------

    def place(
        self,
        device: torch.device | str | None = None,
        convert: Callable[[nn.Module], nn.Module] | None = None,
        *,
        student: nn.Module | None = None,
    ) -> None:
        super().place(device, convert, student=student)
        self._device = None if device is None else torch.device(device)
        try:
            self.store = ProductStore(self.path, mode=self.mode, cache=self.cache)
            if not self.absent:
                assert self.module is not None
                self._fingerprint = (
                    {"identity": self.identity} if self.identity else teacher_fingerprint(self.module)
                )
                if self.mode != "add" and not self.store.knows(self._origin(None)):
                    raise self.store.foreign(self._origin(None))
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        try:
            self.commit()
        finally:
            self.store = self._device = self._given = self._places = self._fingerprint = None
            self._open = {}
            super().release()

    def commit(self) -> int:
        """Write what waits in memory; returns how many samples' products that were."""
        return sum(column.commit() for column in self._open.values())

    def __getstate__(self) -> dict[str, Any]:
        if self.module is not None:
            raise RuntimeError(
                "this teacher is placed: release() it before it is copied or sent to another process"
            )
        return self.__dict__

    def check(self, spec: ProductSpec) -> None:
        """Raise ``KeyError`` for a name not in the teacher, ``StoreMismatchError`` for a product that cannot be read."""
        names = canonical(spec)
        for product in self.encodings:
            if product and product not in names:
                close = nearest(product, names) or names
                raise KeyError(
                    f"encoding= names {product}, which no pair asks for: they ask for {', '.join(close)}"
                )
        if not self.absent:
            super().check(spec)
        if self.mode == "read":
            for name in names:
                self._column(name, None, anything=True)

    def _origin(self, autocast: str | None) -> dict[str, Any]:
        assert self._fingerprint is not None
        return {"teacher": self._fingerprint, "autocast": autocast, "feed": self.feed}

    # -- a batch ---------------------------------------------------------------------------------

    def supply(self, batch: Any, spec: ProductSpec) -> Capture:
        """The products of `batch`, from the store where they are there, else from the live teacher.

        Raises:
            MissingSampleError: when a sample is not there and nothing may be computed.
            SampleChangedError: when a sample is not what it was when its products were computed.
        """
        self._require()
        self._given = None
        autocast = self._autocast(batch)
        columns = {name: self._column(name, autocast) for name in canonical(spec)}
        args, kwargs = self.arguments(batch, columns)
        arguments = named(args, kwargs)
        samples = identify(batch, arguments, self.ids, mask=self.mask, seed=self.seed)
        if any(column.missing(samples.ids) for column in columns.values()):
            self._given = batch, (args, kwargs)
            self._compute(batch, spec, columns, samples, sorted(arguments))
        values = {name: self._restore(column, samples) for name, column in columns.items()}
        self._commit_if_due()
        device = self._device or _device(arguments)
        return _Restored(spec, {name: value.to(device) for name, value in values.items()})

    def arguments(
        self, batch: Any, columns: Mapping[str, Column] | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the teacher is, or was, called with for `batch`, as (args, kwargs)."""
        if self._given is not None and self._given[0] is batch:
            return self._given[1]
        if not self.absent or self.inputs is not None:
            return super().arguments(batch)
        column = next(iter((columns or {}).values()), None)
        if column is not None and column.facts is None:
            column.refresh()
        return _recorded(batch, [] if column is None or column.facts is None else column.facts["arguments"])

    def _column(self, name: str, autocast: str | None, *, anything: bool = False) -> Column:
        """The column of a product: the one that is there, or where that may be, a new one."""
        assert self.store is not None
        if (name, autocast) in self._open and not anything:
            return self._open[name, autocast]
        wanted = self.encodings.get(name, self.encodings.get(""))
        tokens = self.keep.name if self.keep is not None else None
        if self.mode == "read":
            origin = None if self.absent or anything else self._origin(autocast)
            column = self.store.find(
                name,
                origin,
                encoding=wanted.name if wanted else None,
                tokens=tokens,
                identity=self.identity if self.absent else None,
            )
            if self.absent and column.key.feed != self.feed and self.feed:
                raise StoreMismatchError(
                    f"{self.path} holds {name} of the feed {column.key.feed!r}, and this one is {self.feed!r}"
                )
        else:
            kept = wanted.name if wanted else "exact"
            column = self.store.open(
                ColumnKey(**self._origin(autocast), product=name, encoding=kept, tokens=tokens or "all")
            )
        if not anything:
            self._open[name, autocast] = column
        return column

    def _autocast(self, batch: Any) -> str | None:
        device = (self._device or torch.device("cpu")).type
        if not torch.is_autocast_enabled(device):
            return None
        return str(torch.get_autocast_dtype(device)).removeprefix("torch.")

    def _compute(
        self,
        batch: Any,
        spec: ProductSpec,
        columns: Mapping[str, Column],
        samples: Samples,
        arguments: Sequence[str],
    ) -> None:
        if self.mode == "read":
            for name, column in columns.items():
                if absent := column.missing(samples.ids):
                    raise MissingSampleError(lacking(self.path, name, absent, column.ids()))
        captured = super().supply(batch, spec)
        self._given = None
        for (kind, item), value in zip(spec, captured.select(spec), strict=True):
            self._keep(columns[_name(kind, item)], value, samples, arguments)
        self.computed += len(samples)

    def _keep(self, column: Column, value: Any, samples: Samples, arguments: Sequence[str]) -> None:
        product = column.key.product
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{product} is {describe(value)}, not a tensor: pick one with '#', as in 'name#0'"
            )
        if not value.ndim or len(value) != len(samples):
            raise ValueError(
                f"{product} has shape {list(value.shape)} for a batch of {len(samples)} samples: only what has the batch as its "
                "first dimension can be kept by sample"
            )
        dims = token_dims(value.shape, None if samples.mask is None else samples.mask.shape)
        facts = {
            "dtype": str(value.dtype).removeprefix("torch."),
            "dims": list(dims),
            "arguments": list(arguments),
        }
        value = value.detach().to("cpu")  # complete when this returns, also from an accelerator
        absent = set(column.missing(samples.ids))
        for index, id in enumerate(samples.ids):
            if id not in absent:
                continue
            own = trim(value[index], None if samples.mask is None else samples.mask[index], dims)
            digest = samples.digests[index]
            if self.keep is not None:
                if len(dims) != 1:
                    raise ValueError(
                        f"keep= takes a share of the tokens, and {product} {list(value.shape)} has no one dimension of them"
                    )
                own = own.index_select(dims[0], self.keep.positions(own.shape[dims[0]], digest))
            try:
                parts = column.encoding.encode(own)
            except ValueError as error:
                raise ValueError(f"{product}, sample {id!r}: {error}") from None
            # A view of the batch would keep all of it in memory for as long as the sample waits.
            parts = {
                name: part.clone() if part.untyped_storage().nbytes() > 2 * part.nbytes else part
                for name, part in parts.items()
            }
            error = column.encoding.error(own, column.encoding.decode(parts, tuple(own.shape)))
            column.add(Row(id, digest, tuple(own.shape), parts, error), facts)

    def _restore(self, column: Column, samples: Samples) -> Tensor:
        rows = [column.row(id) for id in samples.ids]
        if self.checks and self.ids != "content":
            for row, digest in zip(rows, samples.digests, strict=True):
                if row.digest != digest:
                    raise SampleChangedError(_changed(self.path, row.id))
        assert column.facts is not None
        dims, dtype = column.facts["dims"], getattr(torch, column.facts["dtype"])
        values = [column.encoding.decode(row.parts, row.shape) for row in rows]
        places = None
        if dims:
            if samples.mask is None:
                raise ValueError(
                    f"{column.key.product} was kept without padding, and the batch has no {self.mask!r} that says where tokens stand"
                )
            places = [mask.nonzero().squeeze(1) for mask in samples.mask]
            if self.keep is not None:
                places = [
                    p[self.keep.positions(len(p), row.digest)] for p, row in zip(places, rows, strict=True)
                ]
            for row, place in zip(rows, places, strict=True):
                if row.shape[dims[0]] != len(place):
                    raise SampleChangedError(
                        f"sample {row.id!r} has {len(place)} tokens, and {row.shape[dims[0]]} when its products were computed"
                    )
            self._places = samples.ids, places, samples.mask.shape[1]
        tokens = 0 if samples.mask is None else samples.mask.shape[1]
        return restore(values, places, tokens, dims, dtype, self.fill)

    def kept(self, batch: Any) -> Tensor:
        """Which tokens of the batch last supplied have products, [samples, tokens]: for ``Pair(mask=teacher.kept)``."""
        if self._places is None:
            raise RuntimeError(
                "no batch with tokens was supplied yet, so it is not known which of them are kept"
            )
        _, places, tokens = self._places
        mask = torch.zeros(len(places), tokens, dtype=torch.bool)
        for own, place in zip(mask, places, strict=True):
            own[place] = True
        return mask if self._device is None else mask.to(self._device)

    def _commit_if_due(self) -> None:
        waiting = [column for column in self._open.values() if column.waiting]
        if not waiting:
            return
        full = sum(column.waiting_nbytes for column in waiting) >= self.shard_nbytes
        if full or time.monotonic() - min(c.waiting_since for c in waiting) >= self.commit_seconds:
            self.commit()

    def cost(self, batch: Any, spec: ProductSpec) -> Cost:
        """What a look-up costs in operations, none, beside the whole forward where the teacher is here."""
        if self.absent:
            return Cost(0, 0, None)
        full = Teacher.cost(_Live(self), batch, spec).full
        return Cost(full, 0, None)


class _Live(Teacher):
    """The live teacher inside a stored one, asked past the store."""

    def __init__(self, outer: StoredTeacher) -> None:
        self.__dict__ = {**outer.__dict__, "_given": None}


def _encodings(choice: Choice) -> dict[str, Encoding]:
    if choice is None:
        return {}
    if not isinstance(choice, Mapping):
        return {"": encoding(choice)}
    found = {}
    for product, name in choice.items():
        for one in canonical(product):
            found[one] = encoding(name)
    return found


def _recorded(batch: Any, names: Sequence[str]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call that was recorded, made of this batch, where the teacher is not here to say what it takes."""
    inner = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(inner, Mapping):
        return (inner,), {}
    absent = [name for name in names if name not in inner]
    if absent:
        raise KeyError(
            f"the teacher was called with {', '.join(map(repr, absent))}, which the batch, {describe(inner)}, does not have: pass "
            "inputs=lambda batch: ... as when the store was made"
        )
    return (), {name: inner[name] for name in names}


def _device(arguments: Mapping[str, Any]) -> torch.device:
    return next((v.device for v in arguments.values() if isinstance(v, Tensor)), torch.device("cpu"))


def _changed(where: str, id: str) -> str:
    return (
        f"sample {id!r} is not what it was when its products were written to {where}: a random augmentation (replay it with "
        "Numbered(dataset, seed=0), or give seed=), a dataset that changed or was reordered, or another tokenizer"
    )
