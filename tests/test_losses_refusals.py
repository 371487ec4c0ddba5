"""Whatever a loss cannot compare, it refuses itself, by its name; an empty batch is a zero."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softs_lightning import losses
from softs_lightning.losses import functional as LF
from tests.test_losses_conformance import CATALOGUE, LABELS

OURS = (TypeError, ValueError)
OTHER_BATCH = {"mgd", "mgd nothing zeroed", "srd", "srd maps", "srd tokens", "reviewkd", "crd"}


def case(name: str) -> tuple[nn.Module, Any, Any, dict[str, Any]]:
    """A loss of the catalogue, inputs that it takes, and the batch where it reads one."""
    torch.manual_seed(0)
    make, options = CATALOGUE[name]
    loss = make()
    generator = torch.Generator().manual_seed(0)
    parameters = inspect.signature(loss.forward).parameters
    shape = options.get("shape", (3, 5, 8) if "mask" in parameters else (6, 8))
    if "sample" in options:
        student, teacher = options["sample"](generator)
    else:
        shapes = shape, options.get("teacher_shape", shape)
        student, teacher = (torch.rand(x, generator=generator) for x in shapes)
    batch = {"batch": options["batch"]} if "batch" in options else {}
    return loss.float(), of(student, Tensor.float), of(teacher, Tensor.float), batch


def of(value: Any, change: Callable[[Tensor], Any]) -> Any:
    return change(value) if isinstance(value, Tensor) else [change(x) for x in value]


BAD: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "no dimension": lambda s, t: (of(s, torch.mean), of(t, torch.mean)),
    "no features": lambda s, t: (of(s, lambda x: x[..., :0]), of(t, lambda x: x[..., :0])),
    "nothing": lambda s, t: (None, t),
    "text": lambda s, t: (s, "teacher"),
    "a dict": lambda s, t: ({"x": s}, t),
    "one side in a list": lambda s, t: ([s], t) if isinstance(s, Tensor) else (s[0], t),
    "whole numbers": lambda s, t: (of(s, Tensor.long), t),
    "complex numbers": lambda s, t: (s, of(t, lambda x: x.to(torch.complex64))),
    "another batch": lambda s, t: (s, of(t, lambda x: x[:-1])),
    "another rank": lambda s, t: (s, of(t, lambda x: x.unsqueeze(0).unsqueeze(0))),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", CATALOGUE)
def test_what_is_no_pair_of_activations_is_refused_by_name(name: str, bad: str) -> None:
    loss, student, teacher, batch = case(name)
    with pytest.raises(OURS, match=type(loss).__name__):
        loss(*BAD[bad](student, teacher), **batch)


@pytest.mark.parametrize(
    "mask", [[1, 1], torch.ones(2, 2, 2, 2, 2), torch.ones(7)], ids=["a list", "wide", "long"]
)
@pytest.mark.parametrize("name", CATALOGUE)
def test_a_mask_that_does_not_fit_is_refused_by_name(name: str, mask: Any) -> None:
    loss, student, teacher, batch = case(name)
    with pytest.raises(OURS, match=type(loss).__name__):
        loss(student, teacher, mask=mask, **batch)


@pytest.mark.parametrize("name", [x for x in CATALOGUE if x not in ("list mle", "margin mse", "listwise kl")])
def test_an_empty_batch_is_a_zero_in_the_graph(name: str) -> None:
    loss, student, teacher, batch = case(name)
    none = of(student, lambda x: x[:0].requires_grad_()), of(teacher, lambda x: x[:0])
    batch = {key: {k: v[:0] for k, v in value.items()} for key, value in batch.items()}
    value = loss(*none, **batch)
    assert value.item() == 0
    torch.autograd.backward(value)


MAP_LOSSES = [losses.ChannelWise(), losses.NST(), losses.AttentionTransfer(), losses.MGD(4, 4)]


@pytest.mark.parametrize("loss", MAP_LOSSES, ids=lambda loss: type(loss).__name__)
def test_map_losses_refuse_rows(loss: nn.Module) -> None:
    with pytest.raises(ValueError, match=rf"{type(loss).__name__}.*\[batch"):
        loss(torch.ones(3, 4), torch.ones(3, 4))


def numbers(cls: type[nn.Module]) -> list[str]:
    """The options of a loss that are numbers, by their defaults."""
    parameters = inspect.signature(cls).parameters.values()
    return [
        p.name for p in parameters if isinstance(p.default, int | float) and not isinstance(p.default, bool)
    ]


REQUIRED: dict[str, dict[str, Any]] = {
    "VID": {"student_features": 4, "teacher_features": 4},
    "SRD": {"student_features": 4, "teacher_features": 4},
    "MGD": {"student_features": 4, "teacher_features": 4},
    "ReviewKD": {"student_features": [4], "teacher_features": [4]},
    "CRD": {"student_features": 4, "teacher_features": 4, "samples": 9},
    "QueueKL": {"features": 4},
    "MiniLMRelation": {"heads": 2},
    "OFD": {"mean": torch.zeros(2), "std": torch.ones(2)},
}
CLASSES = [
    cls
    for cls in map(losses.__dict__.get, losses.__all__)
    if isinstance(cls, type)
    and issubclass(cls, losses.DistillationLoss)
    and cls is not losses.DistillationLoss
]
# Any whole number is a position; it is the activations that have it or not.
POSITIONS = ("channel_dim", "token")
SETTINGS = [(cls, name) for cls in CLASSES for name in numbers(cls) if name not in POSITIONS]


@pytest.mark.parametrize("value", ["a", None, -1.0, float("nan"), [1.0]], ids=str)
@pytest.mark.parametrize(("cls", "setting"), SETTINGS, ids=lambda x: getattr(x, "__name__", x))
def test_settings_that_are_no_fit_number_are_refused_by_name(cls: Any, setting: str, value: Any) -> None:
    with pytest.raises(OURS, match=rf"{cls.__name__}.*{re.escape(setting)}"):
        cls(**{**REQUIRED.get(cls.__name__, {}), setting: value})


CHOICES = [
    (cls, p) for cls in CLASSES for p in ("direction", "kernel") if p in inspect.signature(cls).parameters
]


@pytest.mark.parametrize("value", ["sideways", None, 1, []], ids=str)
@pytest.mark.parametrize(("cls", "setting"), CHOICES, ids=lambda x: getattr(x, "__name__", x))
def test_choices_that_are_none_are_refused_by_name(cls: Any, setting: str, value: Any) -> None:
    with pytest.raises(OURS, match=rf"{cls.__name__}.*{setting} must be one of"):
        cls(**{setting: value})


FUNCTIONS = [
    (function, p)
    for function in map(LF.__dict__.get, LF.__all__)
    for p in ("temperature", "beta", "skew", "hard", "k", "heads", "gamma", "order", "direction", "kernel")
    if callable(function) and p in inspect.signature(function).parameters and function is not LF.dkd
]


@pytest.mark.parametrize("value", ["a", None, -1.0], ids=str)
@pytest.mark.parametrize(("function", "setting"), FUNCTIONS, ids=lambda x: getattr(x, "__name__", x))
def test_functions_check_their_settings_too(function: Any, setting: str, value: Any) -> None:
    rows, head = torch.rand(3, 4), losses.Head(torch.rand(4, 4))
    more: list[Any] = [head, head] if function.__name__.startswith("linear") else []
    if "labels" in inspect.signature(function).parameters:
        more.append(torch.zeros(3, dtype=torch.long))
    options = {name: 2 for name in ("k", "heads") if name in inspect.signature(function).parameters}
    if function in (LF.channel_wise, LF.neuron_selectivity, LF.minilm_relation):
        rows = torch.rand(3, 4, 4)
    with pytest.raises(OURS, match=rf"{function.__name__}.*{setting}"):
        function(rows, rows, *more, **{**options, setting: value})


@pytest.mark.parametrize("loss", [losses.DKD(), losses.CEKL()], ids=repr)
@pytest.mark.parametrize(
    "labels", [torch.full((3, 5), 8), torch.full((3, 5), -1), torch.zeros(3, 5), [[0] * 5] * 3]
)
def test_labels_that_are_no_classes_are_refused(loss: nn.Module, labels: Any) -> None:
    with pytest.raises(OURS, match=rf"{type(loss).__name__}.*labels"):
        loss(torch.rand(3, 5, 8), torch.rand(3, 5, 8), batch={"labels": labels})


def test_a_batch_without_what_a_loss_reads_is_refused() -> None:
    with pytest.raises(ValueError, match=r"DKD wants 'labels' of the batch, which has \['label'\]"):
        losses.DKD()(torch.rand(3, 8), torch.rand(3, 8), batch={"label": LABELS})


@pytest.mark.parametrize(
    ("loss", "inputs", "reason"),
    [
        (
            losses.ReviewKD([4], [4]),
            [torch.rand(2, 4, 3, 3)],
            "its convolutions and pooled contexts mix positions",
        ),
        (losses.CRD(20, 20, samples=9), torch.rand(2, 5, 4), "it embeds whole samples"),
        (losses.QueueKL(4), torch.rand(5, 4), "a row is a sample"),
    ],
    ids=["ReviewKD", "CRD", "QueueKL"],
)
def test_a_mask_over_positions_is_refused_where_it_makes_no_sense(
    loss: nn.Module, inputs: Any, reason: str
) -> None:
    batch = {"batch": {"index": torch.arange(2)}} if isinstance(loss, losses.CRD) else {}
    with pytest.raises(ValueError, match=reason):
        loss(inputs, inputs, mask=torch.ones(2, 3, 3), **batch)


def test_one_error_is_raised_with_one_traceback_and_the_name_once() -> None:
    with pytest.raises(ValueError, match="kl_divergence") as caught:
        losses.KLDivergence()(torch.ones(2, 3), torch.ones(2, 4))
    assert caught.value.__cause__ is None
    assert str(caught.value).count("KLDivergence") == 1
