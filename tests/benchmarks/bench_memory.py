"""Peak memory of a distilled step over the larger of the teacher's forward and the student's step.

Bytes of live tensor storages that the step has made, counted at every operation: exact, and the
same on every machine.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from softs_lightning import Pair, Teacher
from softs_lightning.pairing import BoundPair
from softs_lightning.step import Distillation, DistilledStep
from tests.benchmarks import Row
from tests.benchmarks.bench_step import Block, Net, Plain


class Peak(TorchDispatchMode):
    """Counts the bytes of the storages that are born inside it and still live."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)
        }
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage(), given)
        return out

    def _note(self, storage: Any, given: set[int]) -> None:
        key = storage._cdata
        if key in self.seen or key in given:
            return
        self.seen.add(key)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


def peak(step: Callable[[], Any]) -> int:
    """The most bytes alive at once while `step` runs."""
    with Peak() as counter:
        step()
    return counter.most


SETTINGS = {
    "teacher 8 × 256 whole, student 4 × 128, 8 × 64 tokens": (8, 256, 4, 128, 7),
    "teacher 8 × 256 to layer 4, student 4 × 128, 8 × 64 tokens": (8, 256, 4, 128, 3),
    "teacher 4 × 128 whole, student 8 × 128, 8 × 64 tokens": (4, 128, 8, 128, 3),
}


def rows() -> Iterator[Row]:
    for setting, (depth, wide, shallow, width, teacher_at) in SETTINGS.items():
        torch.manual_seed(0)
        teacher = Net(lambda wide=wide: Block(wide), depth, wide)
        net = Net(lambda width=width: Block(width), shallow, width)
        net.layers.insert(0, nn.Linear(wide, width))
        student = Plain(net)
        student.log = lambda *args, **kwargs: None  # type: ignore[method-assign]
        batch = torch.randn(8, 64, wide), torch.randint(10, (8 * 64,))
        pair = Pair(
            f"outputs[layers.{teacher_at}]",
            f"outputs[net.layers.{shallow}]",
            nn.MSELoss(),
            0.5,
            nn.Linear(width, wide),
            "h",
        )

        frozen = copy.deepcopy(teacher).eval().requires_grad_(False)

        def forward(frozen: Any = frozen, x: Any = batch[0]) -> None:
            with torch.no_grad():
                frozen(x)

        def step(student: Any = student, batch: Any = batch) -> None:
            student.training_step(batch, 0).backward()
            student.zero_grad()

        alone = max(peak(forward), peak(step))
        placed = Teacher(teacher, inputs=lambda batch: batch[0])
        placed.place("cpu")
        share = Distillation("distill", placed, student, [BoundPair(pair)])
        DistilledStep.join(student, share)
        step()  # the first step proves the pairs
        ratio = peak(step) / alone
        yield Row(
            setting, "distilled step / larger of teacher forward and student step", ratio, ratio, ratio, 1.10
        )
