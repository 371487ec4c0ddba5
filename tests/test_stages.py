"""Pairs that take turns: only the current one is armed, and the teacher stops where its turn ends."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from softs_lightning import DistillationCallback, Pair
from softs_lightning.schedules import Between, Linear, Piecewise, Until
from softs_lightning.stages import turns
from tests.training import trainer as short_trainer


class Student(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = self.net(batch)
        return out.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pairs(*weights: Any) -> list[Pair]:
    return [
        Pair(f"outputs[{i}]", f"outputs[net.{i}]", nn.MSELoss(), weight=weight, name=str(i))
        for i, weight in enumerate(weights)
    ]


def test_in_each_stage_the_teacher_runs_to_the_layer_whose_turn_it_is_and_no_other_term_is_taken() -> None:
    teacher = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    ran: list[list[int]] = []
    taken: list[list[str]] = []
    for i, layer in enumerate(teacher):
        layer.register_forward_hook(lambda module, args, output, i=i: ran[-1].append(i))

    class Watch(L.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            ran.append([])
            taken.append([])

    def noting(name: str) -> Any:
        def loss(student: Tensor, teacher: Tensor) -> Tensor:
            taken[-1].append(name)
            return nn.functional.mse_loss(student, teacher)

        return loss

    turn = pairs(Between(0, 2), Between(2, 4), Between(4, 6))
    for pair in turn:
        pair.loss = noting(pair.name)
    rows = torch.utils.data.DataLoader(torch.ones(7, 4), batch_size=1)  # type: ignore[arg-type]
    short_trainer(DistillationCallback(teacher, turn), Watch(), max_epochs=1).fit(Student(), rows)
    assert ran == [[0], [0], [0, 1], [0, 1], [0, 1, 2], [0, 1, 2], []]
    assert taken == [["0"], ["0"], ["1"], ["1"], ["2"], ["2"], []]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ((1.0, 2.0), []),
        ((Linear(1, 0, over=3), 1.0), []),
        ((Until(3), 1.0), [(0, ["0", "1"]), (3, ["1"])]),
        ((Until(3), Piecewise([0, 3], [0.0, 2.0])), [(0, ["0"]), (3, ["1"])]),
        ((Between(2, 4), Between(2, 4)), [(0, []), (2, ["0", "1"]), (4, [])]),
        ((Piecewise([0, 5], [1.0, 0.5]), 1.0), []),
        ((Until(3), Until(2, by="epoch")), []),
        ((lambda step: float(step < 3), 1.0), []),
    ],
)
def test_turns_are_the_stretches_in_which_the_same_pairs_are_on(weights: Any, expected: Any) -> None:
    found = turns(pairs(*weights))
    assert [(start, [pair.name for pair in on]) for start, _, on in found] == expected
    for start, unit, on in found:  # what the pairs themselves say at that step
        assert unit == "step"
        for pair in pairs(*weights):
            weight = pair.weight(start) if callable(pair.weight) else pair.weight
            assert (weight != 0) == (pair.name in [one.name for one in on])
