"""Memories on two processes: one on both ranks, that of a single process, and resumed exactly."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from softs_lightning.losses import CRD, QueueKL
from tests.ranks import on_two_ranks

pytestmark = pytest.mark.ddp
WIDTH, SAMPLES, STEPS = 4, 24, 3


class Distilled(nn.Module):
    """A student with both losses in it, as the callback keeps them."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.crd = CRD(WIDTH, WIDTH, SAMPLES, dim=3, negatives=4)
        self.queue = QueueKL(WIDTH, 10)

    def forward(self, inputs: Tensor, teacher: Tensor, index: Tensor, mask: Tensor) -> Tensor:
        hidden = self.body(inputs)
        contrast: Tensor = self.crd(hidden, teacher, batch={"index": index}, mask=mask)
        similar: Tensor = self.queue(hidden, teacher, mask=mask)
        return contrast + similar


def batches() -> list[tuple[Tensor, ...]]:
    """Eight samples a step; of the first rank's four fewer count than of the second's, in one step none."""
    generator = torch.Generator().manual_seed(1)
    order = torch.randperm(SAMPLES, generator=generator).view(STEPS, 8)
    masks = torch.tensor([[1, 0, 1, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 0, 1], [1] * 8])
    return [
        (*torch.randn(2, 8, WIDTH, generator=generator), index, mask)
        for index, mask in zip(order, masks, strict=True)
    ]


def memories(model: Distilled) -> dict[str, Tensor]:
    return {name: buffer.detach().clone() for name, buffer in model.named_buffers()}


def step(model: nn.Module, batch: tuple[Tensor, ...], rank: int) -> None:
    share = slice(4 * rank, 4 * rank + 4)
    torch.autograd.backward(model(*(x[share] for x in batch)))


def on_rank(rank: int, folder: str) -> None:
    for broadcast in (True, False):
        student = Distilled(seed=rank)  # unlike at first: DDP hands out those of the first rank
        model = DistributedDataParallel(student, broadcast_buffers=broadcast)
        start = copy.deepcopy(student.state_dict())
        for number, batch in enumerate(batches()):
            if number == STEPS - 1:
                saved = copy.deepcopy(student.state_dict())
            step(model, batch, rank)
        resumed = Distilled(seed=7)
        resumed.load_state_dict(_of_the_first(saved, rank, folder, broadcast))
        step(DistributedDataParallel(resumed, broadcast_buffers=broadcast), batches()[-1], rank)
        found = {"start": start, "end": memories(student), "resumed": memories(resumed)}
        torch.save(found, f"{folder}/{broadcast}{rank}.pt")


def _of_the_first(state: dict[str, Any], rank: int, folder: str, broadcast: bool) -> dict[str, Any]:
    """What the first rank has written, as a checkpoint is."""
    file = f"{folder}/checkpoint{broadcast}.pt"
    if rank == 0:
        torch.save(state, file)
    dist.barrier()
    loaded: dict[str, Any] = torch.load(file)
    return loaded


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("memories")
    on_two_ranks(on_rank, folder)
    return folder


@pytest.mark.parametrize("broadcast", [True, False], ids=["broadcast buffers", "buffers of their own"])
def test_both_ranks_remember_what_one_process_would(runs: Path, broadcast: bool) -> None:
    ranks = [torch.load(runs / f"{broadcast}{rank}.pt") for rank in (0, 1)]
    alone = Distilled(seed=0)
    alone.load_state_dict(ranks[0]["start"])
    for batch in batches():
        alone(*batch)
    expected = memories(alone)
    for name in expected:
        assert torch.equal(ranks[0]["end"][name], ranks[1]["end"][name]), name
        if not name.endswith("log_constants"):  # an estimate from negatives, which are drawn
            torch.testing.assert_close(ranks[0]["end"][name], expected[name], rtol=1e-5, atol=1e-6)
    assert torch.isfinite(ranks[0]["end"]["crd.log_constants"]).all()
    assert ranks[0]["end"]["queue.filled"] == 10


@pytest.mark.parametrize("broadcast", [True, False], ids=["broadcast buffers", "buffers of their own"])
def test_a_resumed_run_remembers_what_an_uninterrupted_one_does(runs: Path, broadcast: bool) -> None:
    for rank in (0, 1):
        found = torch.load(runs / f"{broadcast}{rank}.pt")
        for name, memory in found["end"].items():
            assert torch.equal(found["resumed"][name], memory), name
