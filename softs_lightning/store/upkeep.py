"""What a store holds, whether it is sound, getting data out, and clearing away."""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from softs_lightning.product import ProductSpec
from softs_lightning.selectors import resolve_spec
from softs_lightning.store.build import readable_size
from softs_lightning.store.column import DESCRIPTION, SHARD, Column, ColumnKey
from softs_lightning.store.errors import StoreError
from softs_lightning.store.folder import Folder
from softs_lightning.store.restored import skeleton
from softs_lightning.store.shard import Shard
from softs_lightning.store.store import ProductStore, canonical, decoded

__all__ = ["Contents", "Problem", "clear", "contents", "export", "verify"]

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class Contents:
    """One column's account.

    Attributes:
        key: what it is of.
        samples: how many.
        shards: in how many files.
        nbytes: on disk.
        error: the largest of any value, as measured when it was written.
    """

    key: ColumnKey
    samples: int
    shards: int
    nbytes: int
    error: dict[str, float]

    def __str__(self) -> str:
        teacher = self.key.teacher
        who = teacher.get("identity") or f"{teacher.get('class')} {str(teacher.get('weights'))[:8]}"
        lost = ", ".join(f"{name} {value:.3g}" for name, value in self.error.items()) or "no samples"
        notes = [f"feed {self.key.feed}"] if self.key.feed else []
        notes += [f"autocast {self.key.autocast}"] if self.key.autocast else []
        notes += [f"tokens {self.key.tokens}"] if self.key.tokens != "all" else []
        return (
            f"{self.key.product}  {self.key.encoding}  {self.samples:,} samples  {readable_size(self.nbytes)} in "
            f"{self.shards} shards  error {lost}  by {', '.join([who, *notes])}"
        )


def contents(path: PathLike) -> list[Contents]:
    """What is in a store, column by column. Raises as :class:`ProductStore` does."""
    return [
        Contents(column.key, len(column), len(column.shards), column.nbytes, column.error)
        for column in ProductStore(path).columns()
    ]


@dataclass(frozen=True)
class Problem:
    """Something wrong in a store: the file, what is wrong, and whether it was set aside."""

    where: str
    what: str
    repaired: bool

    def __str__(self) -> str:
        return f"{self.what}" + (" (set aside)" if self.repaired else "")


def verify(path: PathLike, *, repair: bool = False) -> list[Problem]:
    """Read every byte of a store and compare it with its checksums.

    Args:
        path: of the store.
        repair: set damaged shards aside, so that their samples are computed again; of two shards that hold
            unlike samples under one id, both.

    Returns:
        what is wrong; nothing when all is well.
    """
    store = ProductStore(path, mode="read")
    problems: list[Problem] = []
    for name in store.folder.names():
        folder = store.folder.child(name)
        shards = [shard for shard in folder.names() if shard.endswith(SHARD)]
        if not shards and not folder.has(DESCRIPTION):
            continue
        try:
            ColumnKey.parse(folder.read(DESCRIPTION), f"{folder}/{DESCRIPTION}")
        except FileNotFoundError:
            problems.append(Problem(str(folder), f"{folder} has shards but no {DESCRIPTION}", False))
        except StoreError as error:
            problems.append(Problem(str(folder), str(error), False))
        problems += _verify_shards(folder, shards, repair)
    return problems


def _verify_shards(folder: Folder, names: Sequence[str], repair: bool) -> Iterator[Problem]:
    seen: dict[str, tuple[bytes, str]] = {}
    for name in names:
        where = f"{folder}/{name}"
        problem = None
        try:
            shard = Shard(folder.map(name), where)
            for index in range(len(shard)):
                shard.parts(index, recheck=True)
        except FileNotFoundError:
            continue  # merged in this moment
        except StoreError as error:
            problem = str(error)
        else:
            for index, id in enumerate(shard.ids):
                digest, first = seen.setdefault(id, (shard.digest(index), name))
                if digest != shard.digest(index):
                    problem = f"{where} and {folder}/{first} hold unlike samples under the id {id!r}"
                    if repair and folder.has(first):
                        folder.set_aside(first)
        if problem is not None:
            if repair:
                folder.set_aside(name)
            yield Problem(where, problem, repair)


def export(path: PathLike, out: PathLike, products: Iterable[str] = (), **choice: Any) -> int:
    """Write products as a tar of plain NumPy arrays, one group of files a sample.

    ``000000000.json`` holds the sample's id, ``000000000.<product>.npy`` each activation, without padding and in
    the type it had (float32 for bfloat16, which NumPy lacks). This is the WebDataset layout, which ``webdataset``
    and ``datasets.load_dataset("webdataset", …)`` read as they stand.

    Args:
        path: of the store.
        out: the tar; it is there only when it is complete.
        products: which, all by default; samples that lack any of them are left out.
        choice: as for :meth:`ProductStore.find`.

    Returns:
        the number of samples written.

    Raises:
        StoreMismatchError: for a product that is not there, or there several times without a choice.
        ValueError: when no sample has all of them.
    """
    store = ProductStore(path)
    asked = [one for product in products for one in canonical(product)]
    asked = asked or sorted({column.key.product for column in store.columns()})
    columns = {product: store.find(product, **choice) for product in asked}
    for column in columns.values():
        column.refresh()
    first = next(iter(columns.values()), None)
    ids = (
        [id for id in first.ids() if not any(column.missing([id]) for column in columns.values())]
        if first
        else []
    )
    if not ids:
        raise ValueError(f"{path} has no sample with all of {', '.join(asked) or 'its products'}")
    target = Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        with tarfile.open(unfinished, "w") as tar:
            for number, id in enumerate(ids):
                _put(tar, f"{number:09d}.json", json.dumps({"id": id}).encode())
                for product, column in columns.items():
                    _put(tar, f"{number:09d}.{_file(product)}.npy", _npy(column, id))
        os.replace(unfinished, target)
    finally:
        with suppress(FileNotFoundError):
            unfinished.unlink()
    return len(ids)


def _file(product: str) -> str:
    # WebDataset takes what follows the first dot for the kind of file.
    return re.sub(r"[^A-Za-z0-9_-]+", "_", product).strip("_")


def _npy(column: Column, id: str) -> bytes:
    value = decoded(column, id)
    value = value.to(torch.float32) if value.dtype == torch.bfloat16 else value
    buffer = io.BytesIO()
    np.save(buffer, value.numpy(), allow_pickle=False)
    return buffer.getvalue()


def _put(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(data)
    tar.addfile(entry, io.BytesIO(data))


def clear(path: PathLike, used: Iterable[str] | None = None, *, dry_run: bool = False) -> list[str]:
    """Remove what nobody needs: what dead writers left, what was set aside, and columns that are not in use.

    Args:
        path: of the store. No process should be writing to a column that is removed.
        used: product_ids that are in use, selectors included; ``None`` removes no column.
        dry_run: remove nothing.

    Returns:
        the names, inside the store, of what was or would be removed.

    Raises:
        ValueError: for a product_id that is not understood or whose meaning only the model itself can tell, and when
            no product of the store is in use.
    """
    store = ProductStore(path)
    specs = None if used is None else [ProductSpec.parse(product) for product in used]
    if any("%" in item.name for spec in specs or () for _, item in spec):
        raise ValueError(
            "what a model records (%key) cannot be told without the model: name the modules themselves"
        )
    removed = [] if specs is None else _unused(store, specs)
    for name in ["", *store.folder.names()]:
        folder = store.folder.child(name) if name else store.folder
        if name not in removed:
            removed += [f"{name}/{rest}".lstrip("/") for rest in [*folder.leftovers(), *folder.damaged()]]
    if not dry_run:
        for name in removed:
            store.folder.remove(name)
    return removed


def _unused(store: ProductStore, specs: Sequence[ProductSpec]) -> list[str]:
    unused, there = [], set()
    for name in store.folder.names():
        folder = store.folder.child(name)
        if folder.has(DESCRIPTION):
            text = folder.read(DESCRIPTION)
            key = ColumnKey.parse(text, f"{folder}/{DESCRIPTION}")
            there.add(key.product)
            if key.product not in _selected(specs, json.loads(text).get("modules", ())):
                unused.append(name)
    if unused and len(unused) == sum(
        store.folder.child(name).has(DESCRIPTION) for name in store.folder.names()
    ):
        asked = ", ".join(map(str, specs)) or "nothing"
        raise ValueError(
            f"{store.folder} holds none of the products in use ({asked}), only {', '.join(sorted(there))}, and nothing was "
            "removed: to be rid of all of it, delete the folder"
        )
    return unused


def _selected(specs: Iterable[ProductSpec], modules: Sequence[Sequence[Any]]) -> set[str]:
    """The products that `specs` select in a teacher with these modules."""
    model, found = skeleton(modules), set()
    for spec in specs:
        for kind, item in spec:
            with suppress(KeyError):  # it has none of that name
                found.update(canonical(resolve_spec(model, ProductSpec(**{kind: (item,)}))))
    return found
