"""ProductStore: a folder of columns, opened for reading or writing.

Files::

    PATH/store.json                                     the format's version
    PATH/outputs_encoder.layer.3-fp16-5f2a…/column.json what the column is
                                           /….safetensors  its shards
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from softs_lightning.names import nearest, strip_wrappers
from softs_lightning.product import ProductSpec
from softs_lightning.store.column import DESCRIPTION, Column, ColumnKey
from softs_lightning.store.errors import MissingSampleError, StoreFormatError, StoreMismatchError
from softs_lightning.store.fingerprint import differences
from softs_lightning.store.folder import Folder
from softs_lightning.store.shard import FORMAT

if TYPE_CHECKING:
    from softs_lightning.store.build import Built

__all__ = ["Mode", "ProductStore", "canonical"]

Mode = Literal["read", "write", "add"]

HEADER = "store.json"


def canonical(product_id: str | ProductSpec) -> list[str]:
    """The activations of a product_id one by one, named as the store names them.

    >>> canonical("outputs[module.h.3#0|h.5]")
    ['outputs[h.3#0]', 'outputs[h.5]']
    """
    spec = ProductSpec.parse(product_id)
    return [f"{kind}[{replace(item, name=strip_wrappers(item.name) or '.')}]" for kind, item in spec]


class ProductStore:
    """Products on disk, found by sample, teacher, product and feed.

    Args:
        path: a folder, or a URL that fsspec understands.
        mode: ``"read"`` needs a store that is there, ``"write"`` makes one if there is none, ``"add"`` may
            begin a column for a teacher or feed that the store has not seen.
        cache: where remote shards are kept once they were read.

    Raises:
        StoreFormatError: when there is no store at `path` to be read, or one of another format version.
        StoreReadOnlyError: when it is to be written where nothing can be.

    >>> import tempfile
    >>> from torch import nn
    >>> from softs_lightning.store import StoredTeacher
    >>> path = tempfile.mkdtemp()
    >>> teacher = StoredTeacher(nn.Linear(2, 3), path)
    >>> teacher.place()
    >>> _ = teacher.supply(torch.ones(4, 2), ProductSpec.parse("outputs[.]"))
    >>> teacher.release()
    >>> [(column.key.product, len(column)) for column in ProductStore(path).columns()]
    [('outputs[.]', 1)]
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        mode: Mode = "read",
        cache: str | os.PathLike[str] | None = None,
    ) -> None:
        if mode not in ("read", "write", "add"):
            raise ValueError(f"mode must be 'read', 'write' or 'add', got {mode!r}")
        self.mode = mode
        self.folder = Folder(path, cache=cache)
        self._columns: dict[str, Column] = {}
        if mode != "read":
            self.folder.refuse_read_only()
        if self.folder.has(HEADER):
            _check_version(self.folder)
        elif mode == "read":
            raise StoreFormatError(
                f"there is no product store at {self.folder}: make one with mode='write', or with softs-distill precompute"
            )
        elif self.folder.names():
            raise StoreFormatError(
                f"{self.folder} holds other files and is no product store: choose an empty folder"
            )
        else:
            self.folder.write(
                HEADER, json.dumps({"format": FORMAT, "what": "softs_lightning product store"}).encode()
            )

    def columns(self) -> list[Column]:
        """All columns, by name, with the shards that are there now.

        Raises:
            DamagedShardError, StoreFormatError: for what cannot be read; ``verify`` says all of it.
        """
        self._look()
        columns = [self._columns[name] for name in sorted(self._columns)]
        for column in columns:
            column.refresh()
        return columns

    def _look(self) -> None:
        for name in self.folder.names():
            folder = self.folder.child(name)
            if name not in self._columns and "." not in name[:1] and folder.has(DESCRIPTION):
                text = folder.read(DESCRIPTION)
                key = ColumnKey.parse(text, f"{folder}/{DESCRIPTION}")
                self._columns[name] = Column(folder, key, json.loads(text).get("modules", ()))

    def find(
        self,
        product: str,
        origin: Mapping[str, Any] | None = None,
        *,
        encoding: str | None = None,
        tokens: str | None = None,
        identity: str | None = None,
        feed: str | None = None,
        autocast: str | None = None,
    ) -> Column:
        """The one column that fits.

        Args:
            product: ``outputs[name]`` or ``inputs[name]``.
            origin: teacher and feed; without it the store must leave no choice.
            encoding: its name, or whichever there is.
            tokens: as in :class:`ColumnKey`, or whichever there are.
            identity: how the digest of the teacher's weights or its identity begins, where there are several teachers.
            feed: its fingerprint, or whichever there is.
            autocast: preferred where there are columns with and without.

        Raises:
            StoreMismatchError: when none fits, with what differs, or several do.
        """
        self._look()
        keys = {name: column.key for name, column in self._columns.items()}
        fits = {name: key for name, key in keys.items() if key.product == product}
        if not fits:
            known = sorted({key.product for key in keys.values()})
            close = nearest(product, known) or known
            raise StoreMismatchError(
                f"{self.folder} holds no {product}: it has {', '.join(close) or 'nothing yet'}. Compute it with a run "
                "that has the teacher (mode='write')"
            )
        if origin is not None:
            own = {name: key for name, key in fits.items() if key.origin == origin}
            if not own:
                raise self.foreign(origin, fits.values())
            fits = own
        for what, asked in {
            "identity": identity,
            "feed": feed,
            "encoding": encoding,
            "tokens": tokens,
        }.items():
            chosen = {n: k for n, k in fits.items() if asked is None or _is(k, what, asked)}
            if not chosen:
                there = "; ".join(map(_account, fits.values()))
                raise StoreMismatchError(
                    f"{self.folder} holds {product}, but with no {what} {asked!r}: there is {there}"
                )
            fits = chosen
        if len(fits) > 1:
            fits = {n: k for n, k in fits.items() if k.autocast == autocast} or fits
        if len(fits) > 1:
            there = "; ".join(map(_account, fits.values()))
            raise StoreMismatchError(
                f"{self.folder} holds several columns of {product}: {there}. Choose with encoding=, feed= or identity="
            )
        return self._columns[next(iter(fits))]

    def foreign(
        self, origin: Mapping[str, Any], keys: Iterable[ColumnKey] | None = None
    ) -> StoreMismatchError:
        """The refusal of an origin that is not in the store: what differs from the nearest that is."""
        keys = list(keys) if keys is not None else [column.key for column in self._columns.values()]
        nearest_first = sorted((differences(key.origin, origin) for key in keys), key=len)
        lines = "\n  ".join(nearest_first[0][:8]) if nearest_first else "the store is empty"
        return StoreMismatchError(
            f"{self.folder} holds products of another origin:\n  {lines}\nUse another folder, or mode='add' to keep both "
            "in one"
        )

    def knows(self, origin: Mapping[str, Any]) -> bool:
        """Whether the store is empty or has a column of this teacher on this feed."""
        self._look()
        origins = [column.key.origin for column in self._columns.values()]
        return not origins or origin in origins

    def modules(self, *, identity: str | None = None, feed: str | None = None) -> list[list[Any]]:
        """The modules of the teacher whose products are here.

        Raises:
            StoreMismatchError: when there is none such, or several that differ in their modules.
        """
        self._look()
        columns = [c for c in self._columns.values() if identity is None or _is(c.key, "identity", identity)]
        columns = [c for c in columns if feed is None or c.key.feed == feed]
        if not columns:
            there = "; ".join(sorted({_account(c.key) for c in self._columns.values()})) or "nothing yet"
            asked = [f"identity {identity!r}"] * bool(identity) + [f"feed {feed!r}"] * bool(feed)
            raise StoreMismatchError(
                f"{self.folder} holds no products with {', '.join(asked) or 'any teacher'}: there is {there}"
            )
        if len({json.dumps(column.modules) for column in columns}) > 1:
            there = "; ".join(sorted({_account(column.key) for column in columns}))
            raise StoreMismatchError(f"{self.folder} holds several teachers: {there}. Choose with identity=")
        return columns[0].modules

    def open(self, key: ColumnKey, modules: Sequence[Sequence[Any]] = ()) -> Column:
        """The column of this key, begun if it is not there, with the teacher's `modules` noted beside it.

        Raises:
            StoreMismatchError: in mode ``"write"`` when the store holds another teacher's or feed's products only.
        """
        if self.mode == "read":
            raise StoreMismatchError(f"{self.folder} is opened with mode='read', which begins no column")
        if self.mode == "write" and not self.knows(key.origin):
            raise self.foreign(key.origin)
        if key.name not in self._columns:
            self._columns[key.name] = Column(self.folder.child(key.name), key, modules)
            self._columns[key.name].refresh()
        return self._columns[key.name]

    def read(self, product: str, ids: Sequence[str], **choice: Any) -> list[Tensor]:
        """The activations of samples by id, one tensor a sample, without padding.

        Encoded values are brought back to the type they had; ``exact`` ones are views of the file.

        Args:
            product: ``outputs[name]`` or ``inputs[name]``.
            ids: the samples', in any order.
            choice: as for :meth:`find`.

        Raises:
            MissingSampleError: for ids that are not there.
        """
        column = self.find(product, **choice)
        if absent := column.missing(ids):
            raise MissingSampleError(lacking(str(self.folder), product, absent, column.ids()))
        return [decoded(column, id) for id in ids]

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "mode": self.mode}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.folder, self.mode, self._columns = state["folder"], state["mode"], {}

    @classmethod
    def build(cls, *args: Any, **options: Any) -> Built:
        """Run a teacher over a dataset and keep what it gives, see :func:`softs_lightning.store.build.build`."""
        from softs_lightning.store.build import build

        return build(*args, **options)


def decoded(column: Column, id: str) -> Tensor:
    """One sample's activation in the type it had."""
    row = column.row(id)
    assert column.facts is not None
    dtype: torch.dtype = getattr(torch, column.facts["dtype"])
    return column.encoding.decode(row.parts, row.shape).to(dtype)


def lacking(where: str, product: str, absent: Sequence[str], known: Sequence[str]) -> str:
    """The message for samples that are not in a store."""
    some = ", ".join(map(repr, absent[:5])) + (" …" if len(absent) > 5 else "")
    like = f"its {len(known):,} samples have ids such as {known[0]!r}" if known else "it has no samples yet"
    return (
        f"{where} lacks {len(absent)} of the samples asked for {product}: {some}; {like}. Precompute them, or open the store "
        "with the teacher and mode='write'"
    )


def _is(key: ColumnKey, what: str, asked: str) -> bool:
    if what == "identity":
        return any(str(key.teacher.get(name, "")).startswith(asked) for name in ("weights", "identity"))
    return bool(getattr(key, what) == asked)


def _account(key: ColumnKey) -> str:
    who = key.teacher.get("identity") or f"{key.teacher.get('class')} {str(key.teacher.get('weights'))[:8]}"
    extra = f", autocast {key.autocast}" if key.autocast else ""
    extra += f", feed {key.feed}" if key.feed else ""
    return f"{key.encoding} of {who}{extra}" + (f", tokens {key.tokens}" if key.tokens != "all" else "")


def _check_version(folder: Folder) -> None:
    try:
        version = json.loads(folder.read(HEADER))["format"]
    except (ValueError, KeyError, TypeError):
        raise StoreFormatError(f"{folder}/{HEADER} is damaged, or the folder is no product store") from None
    if version != FORMAT:
        age = "an older" if isinstance(version, int) and version < FORMAT else "another"
        raise StoreFormatError(
            f"{folder} was written in format {version} by {age} version of softs_lightning; this one reads format {FORMAT}. "
            "Compute it anew, or export it with the version that wrote it"
        )
