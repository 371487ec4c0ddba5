"""Stores as they should not be, and as nobody thought they would be."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from softs_lightning.product import ProductSpec
from softs_lightning.store import (
    MissingSampleError,
    ProductStore,
    SampleChangedError,
    StoredTeacher,
    StoreFormatError,
    StoreFullError,
    StoreMismatchError,
    StoreReadOnlyError,
)
from softs_lightning.store.compacting import compact
from softs_lightning.store.upkeep import contents, export, verify
from tests.test_store_build import assert_complete, build, data, net

SPEC = ProductSpec.parse("outputs[0]")


def take(batch: Any) -> Any:
    return batch["x"]


def placed(path: Path, **options: Any) -> StoredTeacher:
    teacher = StoredTeacher(net(), path, ids="uid", inputs=take, **options)
    teacher.place()
    return teacher


@pytest.fixture
def store(tmp_path: Path) -> Path:
    build(tmp_path / "store", shard_nbytes=1)
    return tmp_path / "store"


# -- what is gone ----------------------------------------------------------------------------------


def test_a_store_without_its_header_is_neither_read_nor_overwritten(store: Path) -> None:
    (store / "store.json").unlink()
    with pytest.raises(StoreFormatError, match="no product store at"):
        contents(store)
    with pytest.raises(StoreFormatError, match="holds other files"):
        build(store)


def test_a_description_that_is_gone_is_found_and_written_again(store: Path) -> None:
    for file in store.rglob("column.json"):
        file.unlink()
    assert len(verify(store)) == 2
    with pytest.raises(StoreMismatchError, match="holds no"):
        ProductStore(store).read("outputs[0]", ["a"])
    assert build(store).computed == 0  # the folder's name says what it is
    build(store, [[torch.ones(1, 3)]])
    assert verify(store) == []


def test_an_empty_store_says_that_it_is_empty(tmp_path: Path) -> None:
    ProductStore(tmp_path, mode="write")
    assert (contents(tmp_path), verify(tmp_path), compact(tmp_path)) == ([], [], [])
    with pytest.raises(StoreMismatchError, match="nothing yet"):
        ProductStore(tmp_path).read("outputs[0]", ["a"])
    with pytest.raises(StoreMismatchError, match="nothing yet"):
        StoredTeacher(None, tmp_path).place()
    with pytest.raises(ValueError, match="has no sample with all of"):
        export(tmp_path, tmp_path / "out.tar")


def test_a_store_that_goes_while_it_is_read_is_read_on(store: Path) -> None:
    """What was opened stays mapped; what was not is missing, and said to be."""
    reader = StoredTeacher(None, store)
    reader.place()
    x = data().split(4)
    kept = reader.supply([x[0]], SPEC).select()[0]
    shutil.rmtree(store)
    assert torch.equal(reader.supply([x[0]], SPEC).select()[0], kept)
    with pytest.raises(MissingSampleError):
        reader.supply([torch.ones(2, 3)], SPEC)


# -- ids -------------------------------------------------------------------------------------------

IDS = [
    "",
    " ",
    "a/../b",
    "a\nb",
    "\0",
    "日本語",
    "🙂" * 50,
    "e\u0301",
    "\u00e9",
    "1",
    "1.0",
    "x" * 100_000,
    "\ud800",
]


def test_ids_may_be_any_text(tmp_path: Path) -> None:
    x = torch.randn(len(IDS), 3)
    writer = placed(tmp_path)
    said = writer.supply({"x": x, "uid": IDS}, SPEC).select()[0]
    writer.release()
    assert verify(tmp_path) == []
    order = torch.randperm(len(IDS)).tolist()
    read = ProductStore(tmp_path).read("outputs[0]", [IDS[i] for i in order])
    assert all(torch.equal(value, said[i]) for value, i in zip(read, order, strict=True))


@pytest.mark.parametrize("id", [2**63, -(2**80)])
def test_whole_numbers_of_any_size_are_ids(tmp_path: Path, id: int) -> None:
    writer = placed(tmp_path)
    writer.supply({"x": torch.ones(1, 3), "uid": [id]}, SPEC)
    writer.release()
    assert ProductStore(tmp_path).columns()[0].ids() == [str(id)]


@pytest.mark.parametrize("id", [1.5, None, b"a", (1, 2)])
def test_what_is_no_id_is_refused(tmp_path: Path, id: Any) -> None:
    writer = placed(tmp_path)
    with pytest.raises(TypeError, match="a sample's id is a string or a whole number"):
        writer.supply({"x": torch.ones(1, 3), "uid": [id]}, SPEC)


def test_one_id_for_unlike_samples_is_refused_wherever_they_meet(tmp_path: Path) -> None:
    two = {"x": torch.stack([torch.ones(3), torch.zeros(3)]), "uid": ["a", "a"]}
    writer = placed(tmp_path)
    with pytest.raises(ValueError, match="two unlike samples of one batch have the id 'a'"):
        writer.supply(two, SPEC)
    writer.supply({"x": torch.ones(1, 3), "uid": ["a"]}, SPEC)
    with pytest.raises(SampleChangedError, match="'a' is not what it was"):
        writer.supply({"x": torch.zeros(1, 3), "uid": ["a"]}, SPEC)


# -- two writers -----------------------------------------------------------------------------------


def test_two_writers_of_the_same_samples_keep_each_once(tmp_path: Path) -> None:
    one, two = placed(tmp_path), placed(tmp_path)
    batch = {"x": torch.ones(2, 3), "uid": ["a", "b"]}
    for writer in (one, two):
        writer.supply(batch, SPEC)
    assert (one.commit(), two.commit()) == (2, 0)
    (column,) = ProductStore(tmp_path).columns()
    assert sum(map(len, column.shards)) == 2


def test_two_writers_of_unlike_samples_under_one_id_do_not_pass_unseen(tmp_path: Path) -> None:
    one, two = placed(tmp_path), placed(tmp_path)
    one.supply({"x": torch.ones(1, 3), "uid": ["a"]}, SPEC)
    two.supply({"x": torch.zeros(1, 3), "uid": ["a"]}, SPEC)
    one.commit()
    with pytest.raises(SampleChangedError, match="two unlike samples have the id 'a'"):
        two.commit()


# -- a disk that fails while shards are merged -----------------------------------------------------


@pytest.mark.parametrize(
    ("number", "error"), [(errno.ENOSPC, StoreFullError), (errno.EROFS, StoreReadOnlyError)]
)
def test_a_merge_that_finds_no_room_loses_nothing(
    store: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[OSError]
) -> None:
    before = sorted(store.rglob("*"))

    def fail(handle: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        with pytest.raises(error):
            compact(store)
    assert sorted(store.rglob("*")) == before
    assert_complete(store)


# -- from elsewhere --------------------------------------------------------------------------------


def test_another_major_version_of_torch_is_named_and_reading_without_the_teacher_goes_on(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import importlib.metadata

    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "99.0" if name == "torch" else real(name))
    with pytest.raises(StoreMismatchError, match="torch"):
        StoredTeacher(net(), store).place()
    reader = StoredTeacher(None, store)
    reader.place()
    assert torch.equal(reader.supply([data()[:4]], SPEC).select()[0], net()[0](data()[:4]))
