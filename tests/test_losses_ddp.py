"""Chunked losses and window normalisation on two processes against one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from softs_lightning.losses import LinearKL
from tests.ranks import on_two_ranks

pytestmark = pytest.mark.ddp
WIDTH, VOCABULARY = 8, 24


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.body(inputs))
        return hidden, self.head(hidden)


def data() -> tuple[Tensor, Tensor, Tensor]:
    """Unlike numbers of valid tokens in the two halves: a mean of means would show."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(4, 5, WIDTH, generator=generator)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0], [1, 1, 0, 0, 0]])
    return inputs, torch.randn(4, 5, WIDTH, generator=generator), mask


def loss_of(model: nn.Module, student: nn.Module, rows: slice, ranks: int) -> Tensor:
    inputs, teacher, mask = data()
    torch.manual_seed(2)
    loss = LinearKL(2.0, student_head="head", teacher_head="0", chunk_size=3)
    loss.bind(student, nn.Sequential(nn.Linear(WIDTH, VOCABULARY)))
    hidden, logits = model(inputs[rows])
    value: Tensor = loss(hidden, teacher[rows], mask=mask[rows], normalizer=mask.sum() / ranks)
    # A task loss beside it, through the model's own head, normalised in the same way.
    task: Tensor = (logits.square().mean(-1) * mask[rows]).sum() / (mask.sum() / ranks)
    return value + task


KINDS = ("ddp", "fsdp2", "fsdp2 resharded")


def parallel(kind: str, student: Model) -> nn.Module:
    if kind == "ddp":
        return DistributedDataParallel(student)
    # Resharded after the forward, the head is a DTensor by the time the loss reads it.
    mesh = init_device_mesh("cpu", (2,))
    sharded: Any = fully_shard(student, mesh=mesh, reshard_after_forward=kind == "fsdp2 resharded")
    return cast(nn.Module, sharded)


def on_rank(rank: int, folder: str) -> None:
    for kind in KINDS:
        student = Model()
        model = parallel(kind, student)  # held until after the backward: DDP syncs while it lives
        value = loss_of(model, student, slice(2 * rank, 2 * rank + 2), 2)
        assert isinstance(student.head.weight, DTensor) == (kind == "fsdp2 resharded")
        torch.autograd.backward(value)
        grads: dict[str, Any] = {name: p.grad for name, p in student.named_parameters()}
        whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in grads.items()}
        if rank == 0:
            torch.save(whole, os.path.join(folder, f"{kind}.pt"))


def test_two_processes_equal_one_on_the_union(tmp_path: Path) -> None:
    on_two_ranks(on_rank, tmp_path)
    student = Model()
    torch.autograd.backward(loss_of(student, student, slice(None), 1))
    for kind in KINDS:
        grads = torch.load(tmp_path / f"{kind}.pt")
        for name, parameter in student.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-5, atol=1e-7)
