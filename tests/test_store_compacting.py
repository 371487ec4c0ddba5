"""Merging small shards: nothing is lost, whoever reads, writes or is killed meanwhile."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from softs_lightning.store import DamagedShardError, ProductStore, SampleChangedError, StoreReadOnlyError
from softs_lightning.store.column import Column
from softs_lightning.store.commands import run
from softs_lightning.store.compacting import compact
from softs_lightning.store.folder import Folder
from softs_lightning.store.upkeep import verify
from tests.test_store_build import BATCHES, acknowledged, assert_complete, build, contents, in_a_child
from tests.test_store_upkeep import damage, foreign_row


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A shard for each batch, for each of two products."""
    build(tmp_path / "store", shard_nbytes=1)
    return tmp_path / "store"


def shards(path: Path) -> list[Path]:
    return sorted(path.rglob("*.safetensors"))


def test_small_shards_become_one_and_nothing_else_changes(store: Path) -> None:
    before, columns = contents(store), ProductStore(store).columns()
    errors = [column.error for column in columns]
    done = compact(store)
    assert [(d.product, d.before, d.after) for d in done] == [("outputs[0]", 6, 1), ("outputs[1]", 6, 1)]
    assert sum(d.freed for d in done) == sum(c.nbytes for c in columns) - sum(
        file.stat().st_size for file in shards(store)
    )
    assert len(shards(store)) == 2
    after = contents(store)
    for product, own in before.items():
        assert all(torch.equal(own[id], value) for id, value in after[product].items())
    assert_complete(store)
    assert [column.error for column in ProductStore(store).columns()] == errors
    assert build(store).computed == 0
    assert compact(store) == []


def test_the_measured_error_of_a_merged_shard_is_the_largest_of_its_parts(tmp_path: Path) -> None:
    build(tmp_path, shard_nbytes=1, encoding="fp16")
    before = [column.error for column in ProductStore(tmp_path).columns()]
    assert all(error["max_abs"] > 0 for error in before)
    compact(tmp_path)
    assert [column.error for column in ProductStore(tmp_path).columns()] == before


def test_shards_are_merged_up_to_a_size_and_large_ones_stay(store: Path) -> None:
    size = max(file.stat().st_size for file in shards(store))
    compact(store, shard_nbytes=3 * size)
    assert len(shards(store)) == 4  # three of three for each product
    merged = {file: file.stat().st_mtime_ns for file in shards(store)}
    build(store, [[torch.ones(4, 3)]], shard_nbytes=1)
    compact(store, shard_nbytes=3 * size)  # one small one alone stays as it is
    assert {file: file.stat().st_mtime_ns for file in shards(store)}.items() >= merged.items()


def test_a_dry_run_changes_nothing(store: Path) -> None:
    before = shards(store)
    assert [(d.before, d.after) for d in compact(store, dry_run=True)] == [(6, 1), (6, 1)]
    assert shards(store) == before


def test_samples_that_are_there_twice_are_kept_once(store: Path) -> None:
    first = ProductStore(store).columns()[0]
    name = next(iter(first._known))
    copy = Path(str(first.folder)) / f"9{name[1:]}"
    shutil.copy(Path(str(first.folder)) / name, copy)
    assert sum(map(len, ProductStore(store).columns()[0].shards)) == 4 * BATCHES + 4
    compact(store)
    assert sum(map(len, ProductStore(store).columns()[0].shards)) == 4 * BATCHES
    assert_complete(store)


def test_damage_is_not_merged(store: Path) -> None:
    damage(shards(store)[1], "values")
    before = shards(store)
    with pytest.raises(DamagedShardError, match="verify --repair"):
        compact(store)
    assert shards(store) == before


def test_unlike_samples_under_one_id_are_not_merged(tmp_path: Path) -> None:
    batches = [{"x": torch.ones(2, 3), "uid": ["s0", "s1"]}]
    build(tmp_path, batches, ids="uid", inputs=lambda batch: batch["x"])
    foreign_row(tmp_path, bytes(16))
    with pytest.raises(SampleChangedError):
        compact(tmp_path)


def test_a_reader_goes_on_through_a_merge(store: Path) -> None:
    """It has opened some shards, is then asked for samples of others that are gone."""
    reader = ProductStore(store)
    ids = list(contents(store)["outputs[0]"])
    expected = [value.clone() for value in ProductStore(store).read("outputs[0]", ids)]
    column = reader.find("outputs[0]")
    assert column.missing(ids[:4]) == []
    compact(store)
    build(store, [[torch.ones(4, 3)]])  # and something new makes it look again
    assert all(torch.equal(a, b) for a, b in zip(reader.read("outputs[0]", ids), expected, strict=True))
    assert column.missing(list(contents(store)["outputs[0]"])) == []


def test_a_shard_that_goes_between_the_listing_and_the_reading_is_found_where_it_went(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, merged = Folder.names, []

    def names(self: Folder) -> list[str]:
        found = real(self)
        if not merged and any(name.endswith(".safetensors") for name in found):
            merged.append(True)
            compact(store)  # right behind the listing
        return found

    ids = list(contents(store)["outputs[0]"])
    monkeypatch.setattr(Folder, "names", names)
    assert ProductStore(store).find("outputs[0]").missing(ids) == []
    assert merged


def test_a_writer_goes_on_through_a_merge(store: Path) -> None:
    column: Column = next(iter(ProductStore(store, mode="write").columns()))
    compact(store)
    assert column.nbytes > 0
    column.refresh()
    assert len(column) == 4 * BATCHES


# -- kill -9 ---------------------------------------------------------------------------------------


def compacting(path: Path, count: int | None = None) -> Callable[[int], None]:
    """Merges pairs of shards again and again; killed before its `count`-th call that changes the disk."""

    def work(pipe: int) -> None:
        torch.set_num_threads(1)
        calls = iter(range(10**6))
        for name in ("fsync", "replace", "unlink", "open"):
            real = getattr(os, name)

            def step(*args: Any, real: Any = real, **options: Any) -> Any:
                if next(calls) == count:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*args, **options)

            setattr(os, name, step)
        os.write(pipe, b"\0")
        size = max(file.stat().st_size for file in shards(path))
        while compact(path, shard_nbytes=2 * size):
            size *= 2
        os._exit(0)

    return work


def test_killed_at_every_step_of_merging(tmp_path: Path) -> None:
    build(tmp_path / "whole", shard_nbytes=1)
    for count in range(200):
        path = tmp_path / str(count)
        shutil.copytree(tmp_path / "whole", path)
        child, reading = in_a_child(compacting(path, count))
        acknowledged(reading)
        survived = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert_complete(path)
        if survived:
            break
    assert survived
    assert count > 20


@pytest.mark.slow
def test_a_hundred_merges_killed_at_random(tmp_path: Path) -> None:
    chance = random.Random(0)
    build(tmp_path / "whole", shard_nbytes=1)
    killed = 0
    while killed < 100:
        path = tmp_path / "again"
        shutil.copytree(tmp_path / "whole", path)
        child, reading = in_a_child(compacting(path))
        os.read(reading, 1)
        time.sleep(chance.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        os.close(reading)
        assert_complete(path)
        shutil.rmtree(path)


def test_two_merges_at_once_and_readers_beside_them_lose_nothing(store: Path) -> None:
    children = [in_a_child(compacting(store)) for _ in range(2)]
    running = {child for child, _ in children}
    while running:
        assert_complete(store)
        for child in list(running):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                assert os.waitstatus_to_exitcode(status) == 0
                running.remove(child)
    for _, reading in children:
        os.close(reading)
    assert verify(store) == []


# -- the command -----------------------------------------------------------------------------------


def test_compact_from_the_command_line(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compact", str(store), "--dry-run"]) == 0
    assert run(["compact", str(store)]) == 0
    assert run(["compact", str(store)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition("  ")[2][:18] for line in lines[:4]] == ["6 shards, now 1  0"] * 2 + [
        line.partition("  ")[2][:18] for line in lines[2:4]
    ]
    assert lines[4:] == ["there is nothing to merge"]


def test_what_cannot_be_written_or_meant_is_refused(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="must be 1 at least"):
        compact(store, shard_nbytes=0)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(StoreReadOnlyError):
        compact(store)
