"""Reading ahead in the loader."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from softs_lightning.store import DamagedShardError, Numbered, Prefetch, ProductStore


def data() -> Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(1))


def build(path: Any, **options: Any) -> None:
    ProductStore.build(path, nn.Linear(3, 2), "outputs[.]", data().split(4), progress=False, **options)


@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_those_of_the_plain_loader(tmp_path: Path, workers: int) -> None:
    build(tmp_path)
    numbered = Numbered(list(data()), collate_fn=lambda items: [torch.stack(items)])
    ahead = Prefetch(tmp_path, "outputs[.]", numbered.collate)
    for batch, expected in zip(
        DataLoader(numbered, 4, collate_fn=ahead, num_workers=workers), data().split(4), strict=True
    ):
        assert torch.equal(batch[0], expected)
        assert len(batch.sample_ids) == 4
    assert ahead.found == (0 if workers else 8)  # a worker's own copy has counted


def test_remote_shards_are_in_the_cache_before_the_step_asks(tmp_path: Path) -> None:
    path = f"memory://{tmp_path.name}"
    build(path, cache=tmp_path / "writer")
    Prefetch(path, "outputs[.]", cache=tmp_path / "reader")([data()[0]])
    assert len(list((tmp_path / "reader").iterdir())) == 1


def test_a_store_that_is_not_there_yet_is_passed_over_until_it_is(tmp_path: Path) -> None:
    ahead = Prefetch(tmp_path / "store", "outputs[.]")
    ahead([data()[0]])
    assert ahead.found == 0
    build(tmp_path / "store")
    ahead([data()[0]])
    ahead([torch.ones(3)])  # and a sample that it does not have
    assert ahead.found == 1


def test_damage_is_not_passed_over(tmp_path: Path) -> None:
    build(tmp_path)
    (shard,) = tmp_path.rglob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(DamagedShardError):
        Prefetch(tmp_path, "outputs[.]")([data()[0]])


def test_it_travels_to_workers_in_use_or_not(tmp_path: Path) -> None:
    build(tmp_path)
    ahead = Prefetch(tmp_path, "outputs[.]")
    ahead([data()[0]])
    pickle.loads(pickle.dumps(ahead))([data()[1]])
    ahead([data()[1]])
    assert ahead.found == 2
