"""Two ranks on one store, against two ranks with the live teacher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from softs_lightning.store import ProductStore
from softs_lightning.store.upkeep import verify

SCRIPT = Path(__file__).with_name("run_store.py")

pytestmark = pytest.mark.ddp


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    out = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(out), str(out / "store")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out / "store", [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("run", ["write", "read"])
def test_two_ranks_on_one_store_train_as_with_the_live_teacher(
    ran: tuple[Path, list[dict[str, Any]]], run: str, rank: int
) -> None:
    live, ours = ran[1][0]["live"]["student"], ran[1][rank][run]["student"]
    assert all(torch.equal(ours[name], value) for name, value in live.items())


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_resumed_in_mid_epoch_train_as_with_the_live_teacher(
    ran: tuple[Path, list[dict[str, Any]]], rank: int
) -> None:
    """With a worker and shuffling."""
    live, ours = ran[1][0]["live resumed"]["student"], ran[1][rank]["read resumed"]["student"]
    assert all(torch.equal(ours[name], value) for name, value in live.items())


def test_each_rank_computes_its_share_once_and_nothing_is_kept_twice(
    ran: tuple[Path, list[dict[str, Any]]],
) -> None:
    store, ranks = ran
    assert [rank["write"]["computed"] for rank in ranks] == [24, 24]
    assert [rank["read"]["computed"] for rank in ranks] == [0, 0]
    for column in ProductStore(store).columns():
        assert len(column) == 48 == sum(map(len, column.shards))
    assert verify(store) == []
