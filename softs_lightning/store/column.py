"""A column: one product of one teacher in one encoding, for as many samples as there are.

A column is a folder: ``column.json`` says what it is, each shard holds some samples. There is no
index to keep in step: every shard carries its own, and a column's index is what its shards say.
So any number of processes may add shards at once, and one that dies leaves nothing half done.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from softs_lightning.store.encoding import Encoding, encoding
from softs_lightning.store.errors import SampleChangedError, StoreFormatError, StoreMismatchError
from softs_lightning.store.fingerprint import differences
from softs_lightning.store.folder import Folder
from softs_lightning.store.shard import FORMAT, Row, Shard, pack

__all__ = ["DESCRIPTION", "SHARD", "Column", "ColumnKey"]

DESCRIPTION = "column.json"
SHARD = ".safetensors"
_REMOTE_SECONDS = 5.0


@dataclass(frozen=True)
class ColumnKey:
    """What a column is of; two columns with one key hold the same values.

    Attributes:
        teacher: its fingerprint, see :func:`~softs_lightning.store.fingerprint.teacher_fingerprint`.
        autocast: the type to which autocast lowered its operations, ``None`` without autocast.
        feed: the fingerprint of what makes the teacher's input.
        product: ``outputs[name]`` or ``inputs[name]``, one activation.
        encoding: its name.
        tokens: ``"all"``, or which share of them is kept.
    """

    teacher: Mapping[str, Any]
    autocast: str | None
    feed: str
    product: str
    encoding: str
    tokens: str = "all"

    @property
    def origin(self) -> dict[str, Any]:
        """Who computed it and from what, apart from which product it is."""
        return {"teacher": dict(self.teacher), "feed": self.feed}

    @property
    def name(self) -> str:
        """The folder's name: readable, and distinct for distinct keys."""
        digest = hashlib.blake2b(self.json().encode(), digest_size=6).hexdigest()
        readable = re.sub(r"[^A-Za-z0-9._-]+", "_", self.product).strip("_")[:60]
        return f"{readable}-{self.encoding}-{digest}"

    def json(self) -> str:
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps({**plain, "format": FORMAT}, sort_keys=True, indent=1)

    @classmethod
    def parse(cls, text: bytes, where: str) -> ColumnKey:
        """Read a description. Raises ``StoreFormatError`` for one that is damaged or of another version."""
        try:
            plain = json.loads(text)
            plain.pop("modules", None)
            version = plain.pop("format")
            if version == FORMAT:
                return cls(**plain)
        except (ValueError, KeyError, TypeError, AttributeError):
            raise StoreFormatError(f"{where} is not the description of a column, or is damaged") from None
        raise StoreFormatError(f"{where} is of format {version}, and this version reads format {FORMAT}")


class Column:
    """The samples of one column, found by id; what is added waits in memory until :meth:`commit`.

    Args:
        folder: the column's own.
        key: what it holds.
        modules: the teacher's, see :func:`~softs_lightning.store.restored.modules_of`; they are noted beside the key.
    """

    def __init__(self, folder: Folder, key: ColumnKey, modules: Sequence[Sequence[Any]] = ()) -> None:
        self.folder = folder
        self.key = key
        self.modules = [list(entry) for entry in modules]
        self.encoding: Encoding = encoding(key.encoding)
        self.facts: dict[str, Any] | None = None
        self.shards: list[Shard] = []
        self.waiting: dict[str, Row] = {}
        self.waiting_nbytes = 0
        self.added_nbytes = 0
        self.waiting_since = 0.0
        self._looked = -math.inf
        self._known: dict[str, int] = {}
        self._places: dict[str, int] = {}
        self._described = False

    def __len__(self) -> int:
        return len(self._places) + len(self.waiting)

    def __getstate__(self) -> dict[str, Any]:
        # Maps do not travel to other processes; the index is read again there.
        if self.waiting:
            raise RuntimeError(
                "this column has samples that are not committed: call commit() before it is copied"
            )
        return {"folder": self.folder, "key": self.key, "modules": self.modules}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    # -- reading ---------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Take up the shards that were committed since, by this process or another.

        Raises:
            DamagedShardError: for a shard that is not what was written.
            SampleChangedError: when two shards hold unlike samples under one id.
        """
        self._looked = time.monotonic()
        while not self._look():
            pass  # a shard went, merged into one that this listing may not have

    def _look(self) -> bool:
        """Take up what a listing of the folder has that is new; whether all of it was still there."""
        complete = True
        for name in self.folder.names():
            if not name.endswith(SHARD) or name in self._known:
                continue
            try:
                shard = Shard(self.folder.map(name), f"{self.folder}/{name}")
            except FileNotFoundError:
                complete = False
                continue
            self._agree(shard.facts, shard.where)
            self._take_up(shard)
            self._known[name] = shard.nbytes
        return complete

    def _take_up(self, shard: Shard) -> None:
        number = len(self.shards) << 32
        self.shards.append(shard)
        for index, id in enumerate(shard.ids):
            # The first shard counts: names begin with the time, so all who open the store later choose alike.
            place = self._places.setdefault(id, number | index)
            if place != number | index and self._digest(place) != shard.digest(index):
                raise SampleChangedError(_two_samples(id, self.shards[place >> 32].where, shard.where))

    def _digest(self, place: int) -> bytes:
        return self.shards[place >> 32].digest(place & 0xFFFFFFFF)

    def _agree(self, facts: Mapping[str, Any], where: str) -> None:
        if self.facts is None:
            self.facts = dict(facts)
        elif self.facts != dict(facts):
            lines = "; ".join(differences(self.facts, facts))
            raise StoreMismatchError(f"{where} does not fit the other samples of {self.key.product}: {lines}")

    def missing(self, ids: Iterable[str]) -> list[str]:
        """Those of `ids` that are not here, after looking for new shards if there are any."""
        ids = list(ids)
        if all(id in self._places or id in self.waiting for id in ids):
            return []
        # Listing a remote folder takes long, and not seeing another's shard at once only means computing it too.
        if self.folder.fs is None or time.monotonic() - self._looked > _REMOTE_SECONDS:
            self.refresh()
        return [id for id in ids if id not in self._places and id not in self.waiting]

    def row(self, id: str, *, recheck: bool = False) -> Row:
        """One sample. Raises ``KeyError`` when it is not here, ``DamagedShardError`` when it was altered."""
        if id in self.waiting:
            return self.waiting[id]
        place = self._places[id]
        shard, index = self.shards[place >> 32], place & 0xFFFFFFFF
        return Row(id, shard.digest(index), shard.shape(index), shard.parts(index, recheck=recheck))

    def ids(self) -> list[str]:
        """The ids of all samples, those not committed yet last."""
        return [*self._places, *(id for id in self.waiting if id not in self._places)]

    # -- writing ---------------------------------------------------------------------------------

    def add(self, row: Row, facts: Mapping[str, Any]) -> None:
        """Take in one sample; it can be read at once and lasts from the next :meth:`commit`.

        Raises:
            SampleChangedError: when an unlike sample has its id.
            StoreMismatchError: when its activation is unlike the others' in what they must share.
        """
        self._agree(facts, f"sample {row.id!r}")
        if row.id in self.waiting or row.id in self._places:
            if self.row(row.id).digest != row.digest:
                raise SampleChangedError(_two_samples(row.id, str(self.folder), "this batch"))
            return
        if not self.waiting:
            self.describe()  # not only when it is written: another teacher in this store is refused from now on
            self.waiting_since = time.monotonic()
        self.waiting[row.id] = row
        self.waiting_nbytes += row.nbytes
        self.added_nbytes += row.nbytes

    def commit(self) -> int:
        """Write what waits as one shard; when this returns it will survive a kill and a loss of power.

        Returns:
            how many samples it wrote. Samples that another process has committed meanwhile are left out.

        Raises:
            StoreFullError, StoreReadOnlyError: nothing is lost: what waited still waits.
            SampleChangedError: when another process has committed an unlike sample under an id that waits here. All
                others are written.
        """
        if not self.waiting:
            return 0
        self.refresh()
        unlike = [id for id, row in self.waiting.items() if id in self._places and self._unlike(row)]
        rows = [row for id, row in self.waiting.items() if id not in self._places]
        if rows:
            self.describe()
            assert self.facts is not None
            name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}{SHARD}"
            self.folder.write(name, pack(rows, self.facts))
        self.waiting, self.waiting_nbytes = {}, 0
        self.refresh()
        if unlike:
            where = self.shards[self._places[unlike[0]] >> 32].where
            raise SampleChangedError(_two_samples(unlike[0], where, "this process"))
        return len(rows)

    def _unlike(self, row: Row) -> bool:
        return self._digest(self._places[row.id]) != row.digest

    def describe(self) -> None:
        """Say on disk what this column is, if that is not said yet."""
        if not self._described and not self.folder.has(DESCRIPTION):
            # Two processes may both come here; what they write is the same.
            text = json.dumps({**json.loads(self.key.json()), "modules": self.modules}, sort_keys=True)
            self.folder.write(DESCRIPTION, text.encode())
        self._described = True

    # -- what it amounts to ----------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes on disk, indices and headers included."""
        return sum(self._known.values())

    @property
    def values_nbytes(self) -> int:
        """Bytes of the encoded values alone."""
        return sum(shard.values_nbytes for shard in self.shards)

    @property
    def error(self) -> dict[str, float]:
        """The largest error of any value, as it was measured when it was written."""
        found: dict[str, float] = {}
        errors: Sequence[Mapping[str, float]] = [s.error for s in self.shards]
        for error in [*errors, *(row.error for row in self.waiting.values())]:
            for name, value in error.items():
                found[name] = max(value, found.get(name, value))
        return found


def _two_samples(id: str, one: str, other: str) -> str:
    return (
        f"two unlike samples have the id {id!r}, in {one} and in {other}: the dataset changed or was reordered, two datasets "
        "are numbered alike (give them names: Numbered(dataset, name='train')), or a random augmentation is at work "
        "(replay it: Numbered(dataset, seed=0))"
    )
