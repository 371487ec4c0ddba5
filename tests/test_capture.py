"""Reading a product's values from the buffer."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softs_lightning.capture import Capture
from softs_lightning.catcher import ModelIOCatcher
from softs_lightning.product import ProductSpec


def passing_on(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper


class Inner(nn.Module):
    def forward(self, a: Tensor, b: Tensor, *, c: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        return a + b, {"sum": a, "parts": b}


class Decorated(Inner):
    forward = passing_on(Inner.forward)


class Outer(nn.Module):
    """Calls its child once by position, `times` in all, and its other child by keyword."""

    def __init__(self, times: int = 1) -> None:
        super().__init__()
        self.inner, self.other, self.unused = Inner(), Decorated(), nn.Identity()
        self.times = times

    def forward(self, x: Tensor) -> Any:
        for i in range(self.times):
            x, _ = self.inner(x, x + i)
        return self.other(x, b=x, c=None)[0]


X = torch.ones(2)


def captured(product: str, times: int = 1) -> tuple[Outer, Capture]:
    model = Outer(times)
    with ModelIOCatcher(model).for_product(product, early_exit=False) as buf:
        model(X)
    return model, buf


def test_values_come_inputs_first_in_the_order_written() -> None:
    _, buf = captured("outputs[other#0|inner#1.parts]|inputs[.|inner#1]")
    root, second, total, parts = buf.select()
    assert root is X
    assert torch.equal(second, X)
    assert total.tolist() == [4, 4]
    assert parts is second


def test_a_part_of_what_was_captured_can_be_selected() -> None:
    _, buf = captured("inputs[inner]|outputs[inner|.]")
    assert buf.select("outputs[inner#1.sum]") == [buf["inner"]["outputs"][0][1]["sum"]]
    assert buf.select(ProductSpec.parse("outputs[.]"))[0] is buf["."]["outputs"][0]
    assert buf.select("") == []


@pytest.mark.parametrize("pick", ["#0", "#a", "#-2"])
def test_an_argument_is_chosen_by_position_or_name_however_it_was_passed(pick: str) -> None:
    _, buf = captured(f"inputs[inner{pick}]")
    assert buf.select()[0] is X


@pytest.mark.parametrize(("pick", "place"), [("#a", "args"), ("#b", "kwargs"), ("#c", "kwargs")])
def test_an_argument_of_a_decorated_forward_is_chosen_by_its_name(pick: str, place: str) -> None:
    _, buf = captured(f"inputs[other{pick}]")
    entry = buf["other"]["inputs"][0]
    assert buf.select()[0] is (entry["args"][0] if place == "args" else entry["kwargs"][pick[1:]])


def test_a_module_that_is_gone_still_gives_its_arguments_by_position_and_name() -> None:
    model, buf = captured("inputs[inner]")
    del model
    assert torch.equal(buf.select("inputs[inner#1]")[0], X)
    assert buf.select("inputs[inner#a]")[0] is buf["inner"]["inputs"][0]["args"][0]
    with pytest.raises(LookupError, match="choose one of its arguments"):
        buf.select("inputs[inner#other]")


@pytest.mark.parametrize(("pick", "factor"), [("!0", 2), ("!1", 5), ("!2", 12)])
def test_a_call_is_chosen_by_its_number(pick: str, factor: int) -> None:
    _, buf = captured(f"outputs[inner{pick}#0]", times=3)
    assert buf.select()[0].tolist() == [factor] * 2


@pytest.mark.parametrize(
    ("product", "words"),
    [
        (
            "outputs[unused]",
            "outputs[unused] was not captured: the module 'unused' never ran in this forward",
        ),
        (
            "outputs[inner]",
            "outputs[inner] is ambiguous: 'inner' ran 2 times. Say which call: inner!0 is the first",
        ),
        ("outputs[inner!2]", "outputs[inner!2] was not captured: 'inner' ran only 2 times"),
        (
            "outputs[inner!0#7]",
            "outputs[inner!0#7]: 7 is not in the value, which is a tuple of 2 (Tensor, dict)",
        ),
        (
            "outputs[inner!0#1.x]",
            "outputs[inner!0#1.x]: 'x' is not in #1, which is a dict with keys 'sum', 'parts'",
        ),
        (
            "inputs[inner!1]",
            "choose one of its arguments: #0 is a Tensor of shape [2]; #1 is a Tensor of shape [2]",
        ),
        ("inputs[other]", "#0 is a Tensor of shape [2]; #b is a Tensor of shape [2]; #c is None"),
        ("inputs[other#d]", "inputs[other#d]: choose one of its arguments"),
        ("inputs[other#1]", "inputs[other#1]: choose one of its arguments"),
        ("inputs[other#b.k]", "inputs[other#b.k]: 'k' is not in the value, which is a Tensor of shape [2]"),
    ],
)
def test_what_cannot_be_selected_says_why(product: str, words: str) -> None:
    _, buf = captured(product, times=2)
    with pytest.raises(LookupError) as error:
        buf.select()
    assert words in str(error.value)


def test_a_call_without_arguments_has_none_to_choose() -> None:
    class Zero(nn.Module):
        def forward(self) -> int:
            return 0

    model = Zero()
    with ModelIOCatcher(model)(inputs=["."]) as buf:
        model()
    with pytest.raises(LookupError, match="it was called with none"):
        buf.select()


def test_what_was_not_asked_says_what_was() -> None:
    _, buf = captured("outputs[inner]")
    for product in ("outputs[other]", "inputs[inner]"):
        with pytest.raises(
            LookupError, match=r"was not asked of this session, which captured outputs\[inner\]"
        ):
            buf.select(product)
    with pytest.raises(
        KeyError, match=r"'other' was not asked of this session, which captured outputs\[inner\]"
    ):
        buf["other"]
    with pytest.raises(KeyError, match="was not asked"):
        buf[""]


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))])
def test_a_copy_of_a_buffer_is_a_plain_dict(duplicate: Any) -> None:
    _, buf = captured("outputs[.]")
    copied = duplicate(buf)
    assert type(copied) is dict
    assert torch.equal(copied["."]["outputs"][0], buf["."]["outputs"][0])


def test_an_argument_by_name_is_found_when_the_model_is_gone() -> None:
    class Named(nn.Module):
        def forward(self, first: Any, second: Any) -> Any:
            return first

    model = Named()
    with ModelIOCatcher(model)(inputs=["."]) as buffer:
        model(1, 2)
    del model
    gc.collect()
    assert buffer.select("inputs[.#second]") == [2]
