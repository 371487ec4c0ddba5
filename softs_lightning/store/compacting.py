"""Many small shards made into few: what first epochs, several ranks and short runs leave behind.

A larger shard is written, whole, before those it replaces are removed. So whoever reads finds every sample at
every moment, one that is killed leaves samples that are there twice, which is allowed, and two at once lose
nothing: a shard is removed only when a later one holds all that it holds.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from softs_lightning.store.build import readable_size
from softs_lightning.store.column import SHARD, Column
from softs_lightning.store.shard import Row, Shard, pack
from softs_lightning.store.store import ProductStore

__all__ = ["Compacted", "compact"]


@dataclass(frozen=True)
class Compacted:
    """What became, or would become, of one column.

    Attributes:
        product: the column's.
        before: its shards.
        after: how many there are now.
        freed: bytes of samples that were there twice and of headers, less what the new shards need.
    """

    product: str
    before: int
    after: int
    freed: int

    def __str__(self) -> str:
        return f"{self.product}  {self.before} shards, now {self.after}  {readable_size(max(self.freed, 0))} freed"


def compact(
    path: str | os.PathLike[str], *, shard_nbytes: int = 64 << 20, dry_run: bool = False
) -> list[Compacted]:
    """Merge the small shards of every column; readers and writers may go on meanwhile.

    Args:
        path: of the store.
        shard_nbytes: about how large a merged shard becomes; shards of half of this stay as they are.
        dry_run: change nothing.

    Returns:
        the columns in which something was or would be merged.

    Raises:
        DamagedShardError: for a shard that is not what was written; those merged before it stay merged.
        SampleChangedError: when two shards hold unlike samples under one id.
        StoreReadOnlyError, StoreFullError: nothing is lost.
        ValueError: for a size that is no size.
    """
    if shard_nbytes < 1:
        raise ValueError(f"shard_nbytes must be 1 at least, got {shard_nbytes}")
    store = ProductStore(path)
    if not dry_run:
        store.folder.refuse_read_only()
    done = []
    for column in store.columns():
        sizes = {}
        for name in column.folder.names():
            with suppress(FileNotFoundError):  # merged by another in this moment
                if name.endswith(SHARD):
                    sizes[name] = column.folder.size(name)
        groups = list(_groups(sizes, shard_nbytes))
        if not groups:
            continue
        freed = 0 if dry_run else sum(_merge(column, group, sizes) for group in groups)
        after = len(sizes) - sum(len(group) - 1 for group in groups)
        done.append(Compacted(column.key.product, len(sizes), after, freed))
    return done


def _groups(sizes: dict[str, int], target: int) -> Iterator[list[str]]:
    """Small shards, several together, in the order in which they were written."""
    group: list[str] = []
    for name in sorted(sizes):
        if sizes[name] * 2 > target:
            continue
        if group and sum(sizes[other] for other in group) + sizes[name] > target:
            if len(group) > 1:
                yield group
            group = []
        group.append(name)
    if len(group) > 1:
        yield group


def _merge(column: Column, names: Sequence[str], sizes: dict[str, int]) -> int:
    folder = column.folder
    rows: dict[str, Row] = {}
    there: list[str] = []
    for name in names:
        try:
            shard = Shard(folder.map(name), f"{folder}/{name}")
        except FileNotFoundError:
            continue  # another merges too, and has it in a shard of its own
        there.append(name)
        for index, id in enumerate(shard.ids):
            # The first one counts, as it does for all who read. An error is known of a shard as a whole.
            parts = shard.parts(index, recheck=True)
            rows.setdefault(id, Row(id, shard.digest(index), shard.shape(index), parts, shard.error))
    if len(there) < 2:
        return 0
    assert column.facts is not None
    data = pack(list(rows.values()), column.facts)
    folder.write(f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}{SHARD}", data)
    for name in there:
        folder.remove(name)
    return sum(sizes[name] for name in there) - len(data)
