"""StoredTeacher: a teacher that looks up what it has said before.

To a training step it is a :class:`~softs_lightning.teacher.Teacher` like any other. What the store
lacks is computed by the live model, on the whole batch as it stands, kept, and handed over as it
will be read later, so that the first epoch sees the same numbers as all others.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from softs_lightning.catcher import Capture
from softs_lightning.names import nearest
from softs_lightning.product import ProductSpec
from softs_lightning.selectors import resolve_spec
from softs_lightning.store.alone import prove_independent, single
from softs_lightning.store.buffers import Buffers
from softs_lightning.store.column import Column, ColumnKey
from softs_lightning.store.encoding import Encoding, encoding
from softs_lightning.store.errors import MissingSampleError
from softs_lightning.store.fingerprint import feed_fingerprint, teacher_fingerprint
from softs_lightning.store.following import follow
from softs_lightning.store.numbered import refuse_random
from softs_lightning.store.restored import Absent, Restored, modules_of, skeleton
from softs_lightning.store.rows import keep, look_up, places, put_together
from softs_lightning.store.samples import Ids, Samples, identify, named, recorded
from softs_lightning.store.store import Mode, ProductStore, canonical, lacking
from softs_lightning.store.tokens import Kept
from softs_lightning.teacher import Cost, Teacher

__all__ = ["Encodings", "StoredTeacher"]

Encodings = str | Encoding | Mapping[str, str | Encoding] | None
Call = tuple[tuple[Any, ...], dict[str, Any]]


class StoredTeacher(Teacher):
    """A teacher whose products are kept in a :class:`ProductStore` and taken from there.

    Args:
        source: the module or a function that returns it, as for :class:`~softs_lightning.teacher.Teacher`; ``None``
            reads only, and the teacher need not be installed.
        path: of the store.
        mode: ``"write"`` (the default where there is a `source`) computes and keeps what is missing, and refuses a
            store of another teacher; ``"add"`` lets several share one; ``"read"`` computes nothing.
        encoding: how products are kept (see :func:`~softs_lightning.store.encoding.encoding`), for all or by
            product; ``"exact"`` by default when writing, whatever is there when reading.
        ids: ``"content"``, ``"index"``, a field's key or a function, see :func:`~softs_lightning.store.samples.identify`.
        seed: key or function that gives the seed of each sample's augmentation, which becomes part of its id.
        feed: the tokenizer or transform, or a name for it; see :func:`~softs_lightning.store.feed_fingerprint`.
        mask: the teacher's argument that tells tokens from padding. Products are kept without their padding.
        fill: what stands at padded positions of what is read: NaN by default, so that a loss which does not mask
            them cannot train on invented numbers.
        keep: keep a share of the tokens only (a number, or :class:`Kept`); use it with ``Pair(mask=teacher.kept)``.
        identity: says who the teacher is, in place of the digest of its weights; without a `source` it selects one.
        check: ``"all"`` compares what the teacher would be called with with what it was called with, for every sample
            under an id other than its content, and runs one sample alone when it first computes something, to see
            that products do not depend on the rest of the batch. ``"none"`` leaves both out, and with them a copy of
            the inputs from an accelerator each step.
        shard_nbytes: what waits in memory is committed when it is so much,
        commit_seconds: or when it has waited so long.
        cache: where remote shards are kept once they were read.
        options: `inputs`, `early_exit`, `dtype` and others, as for :class:`~softs_lightning.teacher.Teacher`.

    Raises:
        StoreMismatchError: when placed or first used, for a teacher, product, encoding or feed that is not in the store.
        MissingSampleError: in mode ``"read"``, for a sample that is not in the store.
        SampleChangedError: for a sample that is not what it was: a random augmentation, another dataset.

    Attributes:
        seen: samples supplied so far.
        computed: samples in the batches that the live teacher ran on.

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
        encoding: Encodings = None,
        ids: Ids = "content",
        seed: Ids | None = None,
        feed: Any = None,
        mask: str | None = "attention_mask",
        fill: float = float("nan"),
        keep: float | Kept | None = None,
        identity: str | None = None,
        check: Literal["all", "none"] = "all",
        shard_nbytes: int = 64 << 20,
        commit_seconds: float = 60.0,
        cache: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(Absent if source is None else source, **options)
        if self.placement == "sharded":
            raise ValueError(
                "a sharded teacher runs on all ranks or on none, and with a store each rank runs it for what it lacks: "
                "use placement='cpu' or 'replicated'"
            )
        self.mode: Mode = mode or ("read" if source is None else "write")
        if self.mode not in ("read", "write", "add"):
            raise ValueError(f"mode must be 'read', 'write' or 'add', got {mode!r}")
        if source is None and self.mode != "read":
            raise ValueError(f"mode={self.mode!r} computes what is missing, and needs a teacher to do it")
        if check not in ("all", "none"):
            raise ValueError(f"check must be 'all' or 'none', got {check!r}")
        for what, source_of_ids in (("ids", ids), ("seed", seed)):
            if not (
                isinstance(source_of_ids, str) or callable(source_of_ids) or (seed is None and what == "seed")
            ):
                raise TypeError(
                    f"{what} must be a field of the batch or a function of it, got {source_of_ids!r}"
                )
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, (int, float, Kept))):
            raise TypeError(f"keep must be a share of the tokens, such as 0.25, or a Kept, got {keep!r}")
        self.absent = source is None
        self.path = os.fspath(path)
        self.encodings = _encodings(encoding)
        self._encoded: dict[str, Encoding] = {}
        self.ids, self.seed = ids, seed
        self.feed = feed_fingerprint(feed)
        self.mask, self.fill = mask, float(fill)
        self.keep = Kept(keep) if isinstance(keep, (int, float)) else keep
        self.identity, self.compares = identity, check == "all" and ids != "content"
        self.alone = check == "all"
        self.shard_nbytes, self.commit_seconds, self.cache = int(shard_nbytes), float(commit_seconds), cache
        self.seen = self.computed = 0
        self.store: ProductStore | None = None
        self._fingerprint: dict[str, Any] | None = None
        self._modules_noted: list[list[Any]] = []
        self._device: torch.device | None = None
        self._columns: dict[tuple[str, str | None], Column] = {}
        self._given: tuple[Any, Call] | None = None
        self._kept: Tensor | None = None
        self._buffers = Buffers()
        self._unfollow: Callable[[], None] = _nothing
        self._proven: set[str] = set()
        self._resolved: dict[ProductSpec, ProductSpec] = {}

    @classmethod
    def around(cls, teacher: Teacher, path: str | os.PathLike[str], **options: Any) -> StoredTeacher:
        """A stored teacher in place of a live one, with its options (`inputs`, `early_exit`, `dtype` and so on).

        >>> live = Teacher(nn.Linear(2, 2), inputs=lambda batch: batch["x"], early_exit=False)
        >>> stored = StoredTeacher.around(live, "products", encoding="fp16")
        >>> stored.source is live.source, stored.inputs is live.inputs, stored.early_exit
        (True, True, False)
        """
        names = list(inspect.signature(Teacher.__init__).parameters)[2:]  # behind self and source
        return cls(teacher.source, path, **{name: getattr(teacher, name) for name in names}, **options)

    # -- the life of a teacher -------------------------------------------------------------------

    def build(self) -> nn.Module:
        """The live teacher; without one, a skeleton with the module names of the one that filled the store."""
        if not self.absent:
            return super().build()
        store = ProductStore(self.path, mode="read", cache=self.cache)
        return skeleton(store.modules(identity=self.identity, feed=self.feed or None))

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
            if student is not None and self.ids != "content":
                self._unfollow = follow(student)
            self.store = ProductStore(self.path, mode=self.mode, cache=self.cache)
            for product, kept in self.encodings.items():
                names = canonical(self._resolve(ProductSpec.parse(product))) if product else [""]
                self._encoded.update(dict.fromkeys(names, kept))
            if not self.absent:
                assert self.module is not None
                if self.program is not None and not self.identity:
                    raise ValueError(
                        "a teacher with a program is more than its weights: say who it is with identity='name and version'"
                    )
                by_hand = {"identity": self.identity} if self.identity else None
                self._fingerprint = by_hand or teacher_fingerprint(self.module)
                self._modules_noted = modules_of(self.module)
                if self.mode != "add" and not self.store.knows(self._origin()):
                    raise self.store.foreign(self._origin())
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        self._unfollow()
        self._unfollow = _nothing
        try:
            self.commit()
        finally:
            self.store = self._fingerprint = self._device = self._given = self._kept = None
            self._columns, self._proven, self._resolved, self._encoded = {}, set(), {}, {}
            self._buffers.clear()
            super().release()

    def commit(self) -> int:
        """Write what waits in memory; returns how many samples' products that were."""
        return sum(column.commit() for column in self._columns.values())

    def columns(self) -> dict[str, Column]:
        """The columns in use, by product."""
        return {product: column for (product, _), column in self._columns.items()}

    def __getstate__(self) -> dict[str, Any]:
        if self.module is not None:
            raise RuntimeError(
                "this teacher is placed: release() it before it is copied or sent to another process"
            )
        return self.__dict__

    def check(self, spec: ProductSpec) -> None:
        """Raise ``KeyError`` for a name that is not in the teacher, ``StoreMismatchError`` for what cannot be read."""
        if not self.absent:
            super().check(spec)
        names = canonical(self._resolve(spec))
        for product in self._encoded:
            if product and product not in names:
                close = ", ".join(nearest(product, names) or names)
                raise KeyError(f"encoding= names {product}, which no pair asks for: they ask for {close}")
        if self.mode == "read":
            assert self.store is not None
            for name in names:
                self.store.find(name, **self._choice(name))

    def _origin(self) -> dict[str, Any]:
        return {"teacher": self._fingerprint, "feed": self.feed}

    def _choice(self, product: str) -> dict[str, Any]:
        wanted = self._encoded.get(product, self._encoded.get(""))
        return {
            "origin": None if self.absent else self._origin(),
            "encoding": None if wanted is None else wanted.name,
            "tokens": "all" if self.keep is None else self.keep.name,
            "identity": self.identity if self.absent else None,
            "feed": self.feed or None,
        }

    def inspect(self, dataset: Any) -> None:
        """Refuse a map-style dataset with a random augmentation, unless `seed` tells its variants apart.

        Raises:
            SampleChangedError: see :func:`~softs_lightning.store.refuse_random`.
        """
        if self.seed is None:
            refuse_random(dataset)

    # -- a batch ---------------------------------------------------------------------------------

    def supply(self, batch: Any, spec: ProductSpec) -> Capture:
        """The products of `batch`, from the store where they are there, else from the live teacher.

        Raises:
            MissingSampleError: when a sample is not there and nothing may be computed.
            SampleChangedError: when a sample is not what it was when its products were computed.
        """
        self._require()
        asked, spec = spec, self._resolve(spec)
        columns = {name: self._column(name) for name in canonical(spec)}
        args, kwargs = self.arguments(batch)
        arguments = named(args, kwargs)
        samples = identify(batch, arguments, self.ids, mask=self.mask, seed=self.seed)
        if any(column.missing(samples.ids) for column in columns.values()):
            self._given = batch, (args, kwargs)
            try:
                self._compute(batch, spec, columns, samples, sorted(arguments))
            finally:
                self._given = None
        self._kept = None
        values = {name: self._restore(column, samples) for name, column in columns.items()}
        self.seen += len(samples)
        self._commit_if_due()
        device = self._device or _device(arguments)
        return Restored(asked, {name: value.to(device) for name, value in values.items()}, self._resolve)

    def touch(self, batch: Any, spec: ProductSpec) -> int:
        """Read ahead what the store has of `batch`, for :class:`~softs_lightning.store.Prefetch`; returns how many it found."""
        columns = [self._column(name) for name in canonical(self._resolve(spec))]
        arguments = named(*self.arguments(batch))
        samples = identify(batch, arguments, self.ids, mask=self.mask, seed=self.seed)
        found = 0
        for column in columns:
            absent = set(column.missing(samples.ids))
            there = [column.row(id) for id in samples.ids if id not in absent]
            found += len(there)
        return found

    def arguments(self, batch: Any) -> Call:
        """What the teacher is called with for `batch`, or was when its products were computed, as (args, kwargs)."""
        if self._given is not None and self._given[0] is batch:
            return self._given[1]
        if not self.absent or self.inputs is not None:
            return super().arguments(batch)
        for column in self._columns.values():
            if column.facts is None:
                column.refresh()
            if column.facts is not None:
                return recorded(batch, column.facts["arguments"])
        raise MissingSampleError(
            f"{self.path} has no samples of {', '.join(p for p, _ in self._columns)} yet"
        )

    def _resolve(self, spec: ProductSpec) -> ProductSpec:
        """`spec` with the names that its selectors mean in the teacher."""
        if spec not in self._resolved:
            self._resolved[spec] = resolve_spec(self._require()[0], spec)
        return self._resolved[spec]

    def _column(self, product: str) -> Column:
        """The column of a product: one that is there or, where that may be, a new one."""
        assert self.store is not None
        autocast = self._autocast()
        if (product, autocast) not in self._columns:
            choice = self._choice(product)
            if self.mode == "read":
                column = self.store.find(product, autocast=autocast, **choice)
            else:
                column = self.store.open(
                    ColumnKey(
                        **self._origin(),
                        autocast=autocast,
                        product=product,
                        encoding=choice["encoding"] or "exact",
                        tokens=choice["tokens"],
                    ),
                    self._modules_noted,
                )
            self._columns[product, autocast] = column
        return self._columns[product, autocast]

    def _autocast(self) -> str | None:
        device = "cpu" if self._device is None else self._device.type
        if self.dtype is not None:
            return None  # it runs in its own type, outside autocast
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
        values = super().supply(batch, spec).select(spec)
        if self.alone and len(samples) > 1 and not self._proven.issuperset(canonical(spec)):
            self._prove_independent(spec, values, len(samples))
        for name, value in zip(canonical(spec), values, strict=True):
            keep(columns[name], value, samples, arguments=arguments, kept=self.keep)
        self.computed += len(samples)

    def _prove_independent(self, spec: ProductSpec, values: Sequence[Any], count: int) -> None:
        """Once for each product: run one sample alone, and see that it is what it was in the batch."""
        assert self._given is not None
        call, marker = self._given[1], object()

        names = canonical(spec)

        def alone(index: int) -> dict[str, Any]:
            self._given = marker, single(call, count, index)
            return dict(zip(names, Teacher.supply(self, marker, spec).select(spec), strict=True))

        together = dict(zip(names, values, strict=True))
        prove_independent(together, alone, count, lowered=self._autocast() is not None)
        self._proven.update(together)

    def _restore(self, column: Column, samples: Samples) -> Tensor:
        rows = look_up(column, samples, compare=self.compares)
        where = places(column, rows, samples, self.keep)
        if where is not None and samples.mask is not None:
            self._kept = torch.zeros(samples.mask.shape, dtype=torch.bool)
            for own, place in zip(self._kept, where, strict=True):
                own[place] = True
        return put_together(column, rows, samples, where, self.fill, self._buffers)

    def kept(self, batch: Any = None) -> Tensor:
        """Which tokens of the batch supplied last have products, [samples, tokens]: for ``Pair(mask=teacher.kept)``.

        Raises:
            RuntimeError: when no batch with tokens was supplied yet.
        """
        if self._kept is None:
            raise RuntimeError("no batch with tokens was supplied, so it is not known which of them are kept")
        return self._kept if self._device is None else self._kept.to(self._device)

    @property
    def waiting_nbytes(self) -> int:
        """What waits in memory to be committed."""
        return sum(column.waiting_nbytes for column in self._columns.values())

    def _commit_if_due(self) -> None:
        waiting = [column for column in self._columns.values() if column.waiting]
        if not waiting:
            return
        if (
            self.waiting_nbytes >= self.shard_nbytes
            or time.monotonic() - min(c.waiting_since for c in waiting) >= self.commit_seconds
        ):
            self.commit()

    def cost(self, batch: Any, spec: ProductSpec) -> Cost:
        """What a look-up costs in operations, none, beside the whole forward where the teacher is here."""
        full = 0 if self.absent else _Live(self).cost(batch, spec).full
        return Cost(full, 0, None)


class _Live(Teacher):
    """The live teacher inside a stored one, asked past the store."""

    def __init__(self, outer: StoredTeacher) -> None:
        self.__dict__ = outer.__dict__


def _nothing() -> None:
    """Nothing is followed."""


def _encodings(choice: Encodings) -> dict[str, Encoding]:
    if choice is None:
        return {}
    if not isinstance(choice, Mapping):
        return {"": encoding(choice)}
    return {str(ProductSpec.parse(product)): encoding(name) for product, name in choice.items()}


def _device(arguments: Mapping[str, Any]) -> torch.device:
    return next((v.device for v in arguments.values() if isinstance(v, Tensor)), torch.device("cpu"))
