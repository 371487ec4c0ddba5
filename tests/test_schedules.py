"""Schedules as functions of the step and the epoch, and what is no schedule."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from softs_lightning.schedules import Between, Constant, Cosine, Linear, Piecewise, Until, WarmUp, as_schedule


def test_values_against_formulas() -> None:
    for step in range(12):
        share = min(max((step - 2) / 5, 0), 1)
        assert Linear(4, 1, over=5, begin=2)(step) == pytest.approx(4 - 3 * share)
        assert Cosine(4, 1, over=5, begin=2)(step) == pytest.approx(
            1 + 3 * 0.5 * (1 + math.cos(math.pi * share))
        )
        assert WarmUp(2.0, over=4)(step) == min((step + 1) / 4, 1) * 2
        assert Until(3, 0.5)(step) == (0.5 if step < 3 else 0)
        assert Between(3, 5, 0.5)(step) == (0.5 if step in (3, 4) else 0)
        assert Piecewise([0, 4, 8], [1, 2, 3])(step) == 1 + step // 4
        assert Constant(0.25)(step) == 0.25


@pytest.mark.parametrize(
    "schedule",
    [Linear(0, 1, 4, by="epoch"), Cosine(0, 1, 4, by="epoch"), WarmUp(1, 4, by="epoch"), Until(2, by="epoch"),
     Between(1, 2, by="epoch"), Piecewise([0, 2], [0, 1], by="epoch")],
)  # fmt: skip
def test_by_epoch_looks_at_the_epoch_only(schedule: Any) -> None:
    assert len({schedule(step, 1) for step in range(9)}) == 1
    assert len({schedule(5, epoch) for epoch in range(4)}) > 1


def test_functions_are_called_by_what_they_take() -> None:
    both = as_schedule(lambda step, epoch: step + 100 * epoch, "w")
    assert both(3, 2) == 203
    assert as_schedule(lambda epoch: epoch, "w")(3, 2) == 2
    assert as_schedule(lambda t: t, "w")(3, 2) == 3
    assert as_schedule(lambda t, scale=2: t * scale, "w")(3, 2) == 6
    assert as_schedule(Until(2, by="epoch"), "w")(9, 1) == 1
    assert as_schedule(3, "w")(9, 1) == 3.0


def test_schedules_can_be_pickled() -> None:
    ramp = as_schedule(Linear(0, 1, over=4), "w")
    assert pickle.loads(pickle.dumps(ramp))(2, 0) == 0.5


def test_schedules_from_yaml() -> None:
    config = {"_target_": "softs_lightning.schedules.Cosine", "start": 1, "end": 0, "over": 10, "by": "epoch"}
    assert instantiate(config) == Cosine(1, 0, 10, by="epoch")


def test_a_whole_callback_from_yaml() -> None:
    config = OmegaConf.create(
        """
        _target_: softs_lightning.DistillationCallback
        teacher: {_target_: torch.nn.Linear, _partial_: true, in_features: 2, out_features: 3}
        every_n_steps: 2
        balance: {_target_: softs_lightning.balancing.GradientBalance, momentum: 0.5}
        pairs:
          - _target_: softs_lightning.Pair
            teacher: outputs[.]
            student: outputs[net]
            loss: {_target_: torch.nn.SmoothL1Loss, beta: 4}
            weight: {_target_: softs_lightning.schedules.WarmUp, value: 1, over: 10}
            schedules:
              beta: {_target_: softs_lightning.schedules.Linear, start: 4, end: 1, over: 10}
        """
    )
    callback = instantiate(config, _convert_="all")
    (pair,) = callback.pairs
    assert pair.weight == WarmUp(1, 10)
    assert pair.schedules == {"beta": Linear(4, 1, over=10)}
    assert callback.balance.momentum == 0.5
    assert not isinstance(callback.teacher.source, torch.nn.Module)


@pytest.mark.parametrize(
    ("value", "kind", "match"),
    [
        ("0.5", TypeError, "w must be a number or a function of step or epoch, got '0.5'"),
        (True, TypeError, "got True"),
        (Linear, TypeError, "a class: make an instance of it"),
        (float("nan"), ValueError, "w must be finite"),
        (lambda: 1.0, TypeError, "this one takes nothing"),
        (lambda a, b: 1.0, TypeError, "this one takes a, b"),
        (lambda step, b: 1.0, TypeError, "this one takes step, b"),
    ],
)
def test_what_is_no_schedule(value: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        as_schedule(value, "w")


def test_values_of_a_schedule_must_be_finite() -> None:
    with pytest.raises(ValueError, match="w at step 7 of epoch 1 must be finite, got inf"):
        as_schedule(lambda step: math.inf, "w")(7, 1)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Linear(0, 1, over=0),
        lambda: Linear(0, 1, over=2, begin=-1),
        lambda: Cosine(0, 1, over=2, by="batch"),  # type: ignore[arg-type]
        lambda: WarmUp(1, over=0),
        lambda: Until(0),
        lambda: Between(3, 3),
        lambda: Piecewise([1, 2], [1, 2]),
        lambda: Piecewise([0, 2, 2], [1, 2, 3]),
        lambda: Piecewise([0], [1, 2]),
    ],
)
def test_schedules_that_make_no_sense(make: Any) -> None:
    with pytest.raises(ValueError, match="got"):
        make()
