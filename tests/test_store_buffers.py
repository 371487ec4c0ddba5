"""Memory that is used again, but never under somebody's hands."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
from torch import nn

from softs_lightning.product import ProductSpec
from softs_lightning.store import StoredTeacher
from softs_lightning.store.buffers import Buffers

SHAPE = (300, 1000)  # 1.2 MB


def test_what_a_graph_needs_is_left_alone() -> None:
    buffers = Buffers()
    weight = torch.ones(1000, requires_grad=True)
    values = buffers.empty("a", SHAPE, torch.float32).fill_(2.0)
    loss = (values * weight).sum()
    del values
    buffers.empty("a", SHAPE, torch.float32).fill_(3.0)
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [600.0] * 1000
    del loss
    gc.collect()
    assert len(buffers._memory["a"]) == 2


def test_memory_that_has_become_too_small_is_let_go() -> None:
    buffers = Buffers()
    buffers.empty("a", SHAPE, torch.float32)
    buffers.empty("a", (600, 1000), torch.float32)
    assert [memory.nbytes for memory in buffers._memory["a"]] == [2_400_000]


def test_products_of_earlier_batches_stay_what_they_were(tmp_path: Path) -> None:
    net, spec = nn.Linear(4, 1000), ProductSpec.parse("outputs[.]")
    teacher = StoredTeacher(net, tmp_path)
    teacher.place()
    batches = torch.randn(4, 300, 4)
    held = [teacher.supply(x, spec).select()[0] for x in batches]
    again = [teacher.supply(x, spec).select()[0] for x in batches]
    for x, one, two in zip(batches, held, again, strict=True):
        expected = net(x).detach()
        assert torch.equal(one, expected)
        assert torch.equal(two, expected)
    teacher.release()
    assert torch.equal(held[0], net(batches[0]).detach())
