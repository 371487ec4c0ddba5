"""Pairs whose product_ids hold selectors: they train as if every name had been written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from softs_lightning import DistillationCallback, Pair
from tests.training import loader, make_student, make_teacher, trainer

# The module has a validation step and no data for it: Lightning says so.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")

WRITTEN = ("outputs[0|3]", "outputs[net.0|net.2]")


def trained(teacher: str, student: str, **options: Any) -> dict[str, torch.Tensor]:
    module = make_student()
    pair = Pair(
        teacher=teacher, student=student, loss=nn.MSELoss(), projector="linear", name="all", **options
    )
    torch.manual_seed(0)
    trainer(DistillationCallback(teacher=make_teacher(), pairs=[pair])).fit(module, loader())
    return dict(module.state_dict())


@pytest.mark.parametrize(
    ("teacher", "student"),
    [
        ("outputs[@Linear]", "outputs[net@Linear]"),
        ("outputs[{0..-1..3}]", "outputs[net.{0..2..2}]"),
        ("outputs[0|-1]", "outputs[@Linear]"),
        WRITTEN,
    ],
)
def test_selectors_train_as_the_names_they_mean(teacher: str, student: str) -> None:
    expected, got = trained(*WRITTEN), trained(teacher, student)
    assert expected.keys() == got.keys()
    assert all(torch.equal(got[key], expected[key]) for key in expected)


def test_unlike_numbers_are_refused_when_the_models_are_known() -> None:
    with pytest.raises(
        ValueError, match=r"selects 2 activations, the student's 'outputs\[net\.0\|net\.1\|net\.2\]' 3"
    ):
        trained("outputs[@Linear]", "outputs[net.*]")


def test_unlike_numbers_of_plain_names_are_refused_at_once() -> None:
    with pytest.raises(ValueError, match="they meet one to one"):
        Pair("outputs[a|b]", "outputs[c]", nn.MSELoss())


@pytest.mark.parametrize(
    ("teacher", "student"), [("outputs[@Conv2d]", "outputs[net.0]"), ("outputs[0]", "outputs[*.9]")]
)
def test_what_selects_nothing_is_refused_at_set_up(teacher: str, student: str) -> None:
    with pytest.raises(KeyError):
        trained(teacher, student)
