"""One store filled by two processes: shared out, killed, gone on with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from softs_lightning.store import ProductStore
from softs_lightning.store.upkeep import verify
from tests.ddp.run_store_precompute import COUNT, Mortal, data
from tests.recipes.command import softs_distill

SCRIPT = Path(__file__).with_name("run_store_precompute.py")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

pytestmark = pytest.mark.ddp


def start(store: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), str(store), *arguments],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    return said


def ran(said: str) -> dict[str, int]:
    """On how many samples each process ran the teacher."""
    counts: dict[str, int] = {}
    for line in said.splitlines():
        if " ran on " in line:
            process, count = line.split(" ran on ")
            counts[process] = counts.get(process, 0) + int(count)
    return counts


def assert_complete(store: Path) -> None:
    """Every sample once, and what the teacher says, bit for bit with the same batches or to rounding with others."""
    assert verify(store) == []
    (column,) = ProductStore(store).columns()
    assert sum(map(len, column.shards)) == len(column) == COUNT
    x = torch.stack([item.item[0] for item in data().dataset])
    ours = ProductStore(store).read("outputs[hidden]", [f"train:{i}" for i in range(COUNT)])
    torch.testing.assert_close(torch.stack(ours), Mortal().hidden(x).detach(), rtol=1e-6, atol=1e-6)


def test_two_processes_share_the_samples_out(tmp_path: Path) -> None:
    """And run the teacher on nothing the second time."""
    said = finish(start(tmp_path / "store", "2"))
    assert sorted(ran(said).values()) == [25, 26]
    assert said.count(f"{COUNT} samples, {COUNT} of them computed") == 1
    assert said.count(f"{COUNT} samples, 0 of them computed") == 1
    assert_complete(tmp_path / "store")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_process_that_is_killed_leaves_a_store_that_is_gone_on_with(tmp_path: Path, rank: int) -> None:
    store = tmp_path / "store"
    process = start(store, "1", str(rank))
    said, _ = process.communicate(timeout=600)  # both end: the other does not go on alone for ever
    assert process.returncode != 0, said
    before = len(ProductStore(store).columns()[0])
    assert before < COUNT
    # Its first two batches had been committed before the third.
    ProductStore(store).read("outputs[hidden]", [f"train:{i}" for i in range(COUNT)[rank::2][:8]])
    said = finish(start(store, "1"))
    assert sum(ran(said).values()) == COUNT - before
    assert_complete(store)


SHORT = [
    "data.passes=1",
    "teacher.data.passes=1",
    "+teacher.trainer.logger=false",
    "+teacher.trainer.enable_checkpointing=false",
    "trainer.enable_progress_bar=false",
]


def command(folder: Path, *words: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *launcher, "-m", "softs_lightning", "precompute", f"store={folder}/store", *words],
        env={**ENVIRONMENT, "SOFTS_LIGHTNING_CACHE": str(folder / "cache")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def test_the_command_shares_a_recipes_data_out(tmp_path: Path) -> None:
    two = ["trainer.devices=2", "trainer.strategy=ddp"]
    done = command(tmp_path, *SHORT, *two)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("1,000 samples, 1,000 of them computed") == 1
    (column,) = ProductStore(tmp_path / "store").columns()
    assert sorted(map(len, column.shards)) == [500, 500]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["cache", "store"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    again = command(tmp_path, *SHORT, *two, launcher=launcher)
    assert again.returncode == 0, again.stderr
    assert again.stdout.count("1,000 samples, 0 of them computed") == 1
    refused = command(tmp_path, *SHORT, launcher=launcher)
    assert "started in 2 processes, of which each would compute everything" in refused.stdout + refused.stderr


def test_a_recipe_in_half_precision_keeps_what_it_will_ask_for(tmp_path: Path) -> None:
    words = ("precompute", "store=store", *SHORT, "trainer.precision=bf16-mixed")
    done = softs_distill(*words, folder=tmp_path, cache=tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    (column,) = ProductStore(tmp_path / "store").columns()
    assert (column.key.autocast, len(column)) == ("bfloat16", 1000)
