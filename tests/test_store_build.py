"""Building a store, stopping it at any moment, and going on."""

from __future__ import annotations

import itertools
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
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from softs_lightning import Teacher
from softs_lightning.product import ProductSpec
from softs_lightning.store import (
    Numbered,
    ProductStore,
    SampleChangedError,
    StoredTeacher,
    StoreFullError,
    StoreReadOnlyError,
)
from softs_lightning.store.folder import Folder
from softs_lightning.store.upkeep import verify

SPEC = ProductSpec.parse("outputs[0|1]")
BATCHES = 6


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh())


def data(count: int = 4 * BATCHES) -> Tensor:
    return torch.randn(count, 3, generator=torch.Generator().manual_seed(2))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(data()), batch_size=4, **options)


def build(path: Path, batches: Any = None, products: Any = SPEC, **options: Any) -> Any:
    options = {"progress": False, **options}
    return ProductStore.build(path, net(), products, loader() if batches is None else batches, **options)


def contents(path: Path) -> dict[str, dict[str, Tensor]]:
    store = ProductStore(path)
    return {
        c.key.product: {id: store.read(c.key.product, [id])[0] for id in c.ids()} for c in store.columns()
    }


def assert_complete(path: Path) -> None:
    """Every sample's products are there, and what the teacher says."""
    assert verify(path) == []
    reader = StoredTeacher(None, path)
    reader.place()
    for (x,) in loader():
        hidden = net()[0](x)
        for ours, theirs in zip(reader.supply([x], SPEC).select(), (hidden, hidden.tanh()), strict=True):
            assert torch.equal(ours, theirs)
    assert {len(own) for own in contents(path).values()} == {4 * BATCHES}


# -- building --------------------------------------------------------------------------------------


def test_a_build_holds_what_the_teacher_says(tmp_path: Path) -> None:
    built = build(tmp_path)
    assert (built.samples, built.computed) == (24, 24)
    assert built.errors == {"outputs[0]": {"max_abs": 0.0}, "outputs[1]": {"max_abs": 0.0}}
    assert built.nbytes == sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors"))
    assert "24 samples, 24 of them computed" in str(built)
    assert_complete(tmp_path)


def test_building_again_computes_nothing(tmp_path: Path) -> None:
    build(tmp_path)
    files = sorted(tmp_path.rglob("*"))
    assert build(tmp_path, loader(shuffle=True)).computed == 0
    assert sorted(tmp_path.rglob("*")) == files


def test_a_teacher_with_options_is_built_from(tmp_path: Path) -> None:
    live = Teacher(net(), inputs=lambda batch: 2 * batch[0], dtype="float64")
    built = ProductStore.build(tmp_path, live, "outputs[0]", loader(), progress=False)
    assert built.computed == 24
    reader = StoredTeacher(None, tmp_path, inputs=lambda batch: 2 * batch[0])
    reader.place()
    for (x,) in loader():
        (ours,) = reader.supply([x], ProductSpec.parse("outputs[0]")).select()
        assert torch.equal(ours, net()[0].double()(2 * x.double()))


def test_several_products_are_named_one_by_one_or_together(tmp_path: Path) -> None:
    build(tmp_path, products=["outputs[0]", "outputs[1]", "outputs[0]"])
    assert_complete(tmp_path)


def test_what_is_to_come_is_said_after_the_first_batch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build(tmp_path, progress=True)
    said = capsys.readouterr()
    assert "5 batches to come: about " in said.out
    assert "minutes; " in said.out
    assert "precompute: 100%" in said.err


def test_a_disk_that_will_not_hold_it_stops_the_build_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folder, "free", lambda self: 100)
    seen = []
    batches = DataLoader(
        TensorDataset(data()), batch_size=4, collate_fn=lambda items: seen.append(1) or [items[0][0][None]]
    )
    with pytest.raises(StoreFullError, match=r"5 batches to come: about .* has 100 B free"):
        build(tmp_path, batches)
    assert len(seen) == 1


def test_a_random_augmentation_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Tensor:
            return data()[index] + torch.randn(3)

    with pytest.raises(SampleChangedError, match="a random augmentation"):
        build(tmp_path, DataLoader(Noisy(), batch_size=4))
    assert not list(tmp_path.iterdir())
    replayed = Numbered(Noisy(), seed=0, collate_fn=lambda items: [torch.stack(items)])
    loader = DataLoader(replayed, batch_size=4, collate_fn=replayed.collate)
    assert build(tmp_path, loader, ids="index").computed == 8
    assert build(tmp_path, loader, ids="index").computed == 0
    # With seeds that tell its variants apart it may vary.
    build(tmp_path / "seeds", DataLoader(Noisy(), batch_size=4), seed=lambda batch: range(len(batch)))


@pytest.mark.parametrize(
    ("batches", "products", "message"),
    [([], SPEC, "no batch"), (None, [], "no product"), (None, "outputs[]", "no product")],
)
def test_nothing_to_do_is_said(tmp_path: Path, batches: Any, products: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(tmp_path, batches, products)


# -- what can go wrong while writing ---------------------------------------------------------------


def failing_after(count: int, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = os.fsync, iter(range(10**6))

    def fsync(handle: int) -> None:
        if next(calls) >= count:
            raise OSError(number, os.strerror(number))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize(("number", "error"), [(28, StoreFullError), (30, StoreReadOnlyError)])
@pytest.mark.parametrize("count", [0, 1, 3, 6, 9, 20])
def test_a_disk_that_fails_leaves_a_sound_store_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, error: type[OSError], count: int
) -> None:
    with monkeypatch.context() as patch:
        failing_after(count, number, patch)
        with pytest.raises(error):
            build(tmp_path, shard_nbytes=1)
    build(tmp_path)
    assert_complete(tmp_path)


# -- kill -9 ---------------------------------------------------------------------------------------


def in_a_child(work: Callable[[int], None]) -> tuple[int, int]:
    """Fork; the child runs `work` with a pipe to report to. Returns its process and the other end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            work(writing)
        finally:
            os._exit(1)  # neither pytest nor its plugins go on in the child
    os.close(writing)
    return child, reading


def building(path: Path, batches: int = BATCHES) -> Callable[[int], None]:
    """Builds in shards of one batch, and reports the number of every batch that is committed."""

    def work(pipe: int) -> None:
        torch.set_num_threads(1)
        teacher = StoredTeacher(net(), path, shard_nbytes=1)
        teacher.place()
        for number, x in enumerate(data().split(4)[:batches]):
            teacher.supply([x], SPEC)
            os.write(pipe, bytes([number]))
        os._exit(0)

    return work


def acknowledged(reading: int) -> list[int]:
    with os.fdopen(reading, "rb") as pipe:
        return list(pipe.read())


def assert_survived(path: Path, numbers: list[int]) -> None:
    """What was acknowledged is there and right, nothing is damaged, and the next build completes the store."""
    if (path / "store.json").exists():
        assert verify(path) == []
    if numbers:
        reader = StoredTeacher(None, path)
        reader.place()
        for number in numbers:
            x = data().split(4)[number]
            assert torch.equal(reader.supply([x], SPEC).select()[0], net()[0](x))
    build(path)
    assert_complete(path)


def test_killed_at_every_step_of_writing(tmp_path: Path) -> None:
    """Killed before each call that touches the disk, one after another, until a build survives."""

    def killing(path: Path, count: int) -> Callable[[int], None]:
        def work(pipe: int) -> None:
            calls = iter(range(10**6))
            for name in ("fsync", "replace", "makedirs", "open"):
                real = getattr(os, name)

                def step(*args: Any, real: Any = real, **options: Any) -> Any:
                    if next(calls) == count:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return real(*args, **options)

                setattr(os, name, step)
            building(path, batches=2)(pipe)

        return work

    survived = False
    for count in range(200):
        path = tmp_path / str(count)
        child, reading = in_a_child(killing(path, count))
        numbers = acknowledged(reading)
        survived = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        if survived:
            break
        if count % 5 == 0:
            assert_survived(path, numbers)
        else:
            assert not (path / "store.json").exists() or verify(path) == []
    assert survived
    assert count > 20


@pytest.mark.slow
def test_a_hundred_builds_killed_at_random(tmp_path: Path) -> None:
    """Each is killed some milliseconds after it has reported some number of batches."""
    chance = random.Random(0)
    killed = 0
    for number in itertools.count():  # one that was done before the signal came does not count
        if killed == 100:
            break
        path = tmp_path / str(number)
        child, reading = in_a_child(building(path))
        numbers = [byte for _ in range(chance.randrange(BATCHES)) for byte in os.read(reading, 1)]
        time.sleep(chance.uniform(0, 0.005))
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        assert_survived(path, numbers + acknowledged(reading))
        shutil.rmtree(path)


def test_two_builds_at_once_make_one_store(tmp_path: Path) -> None:
    children = [in_a_child(building(tmp_path)) for _ in range(2)]
    for child, reading in children:
        assert acknowledged(reading) == list(range(BATCHES))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_complete(tmp_path)
