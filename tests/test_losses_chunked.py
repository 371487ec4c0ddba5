"""The KL in chunks of rows, against the one on whole tensors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from softs_lightning.losses.functional import chunked_kl, kl_divergence

SHAPE = (3, 5, 11)


def logits(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    student, teacher = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return student.requires_grad_(), teacher


def both(student: Tensor, teacher: Tensor, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Value and gradient, chunked and whole."""
    chunk_size = options.pop("chunk_size", 2)
    found = []
    for loss in (
        chunked_kl(student, teacher, chunk_size=chunk_size, **options),
        kl_divergence(student, teacher, **options),
    ):
        (gradient,) = torch.autograd.grad(3 * loss, student)
        found.append([loss.detach(), gradient])
    return found[0], found[1]


@pytest.mark.parametrize("direction", ["forward", "reverse", "symmetric"])
@pytest.mark.parametrize("chunk_size", [1, 4, 100, None])
def test_value_and_gradient_are_those_on_whole_tensors(direction: str, chunk_size: int | None) -> None:
    ours, theirs = both(*logits(), direction=direction, temperature=2.0, chunk_size=chunk_size)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


MASKS = {
    "padding": [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 1, 1, 0]],
    "holes": [[1, 0, 1, 0, 1], [0, 1, 0, 0, 0], [1, 1, 0, 1, 1]],
    "nothing": [[0] * 5] * 3,
    "samples": [1, 0, 1],
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("normalizer", [None, 7])
def test_masked_rows_do_not_count_whatever_they_hold(mask: list[Any], normalizer: int | None) -> None:
    student, teacher = logits()
    keep = torch.tensor(mask)
    options: dict[str, Any] = {"mask": keep, "normalizer": normalizer}
    _, expected = both(student, teacher, **options)
    whole = keep.bool() if keep.ndim == 2 else keep.bool()[:, None].expand(SHAPE[:2])
    teacher[~whole] = math.nan
    ours = chunked_kl(student, teacher, chunk_size=2, **options)
    (gradient,) = torch.autograd.grad(3 * ours, student)
    torch.testing.assert_close([ours.detach(), gradient], expected, rtol=1e-12, atol=1e-14)


def test_infinite_logits_are_read_as_elsewhere() -> None:
    student, teacher = logits()
    with torch.no_grad():
        student[0, 0, 3] = teacher[0, 0, 3] = teacher[1, 2, 4] = -math.inf
    ours, theirs = both(student, teacher)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    assert ours[1].isfinite().all()


def test_rows_that_were_picked_from_a_larger_tensor_are_compared() -> None:
    student, teacher = logits()
    torch.testing.assert_close(
        *both(student[:, ::2].detach().requires_grad_(), teacher[:, ::2]), rtol=1e-12, atol=1e-14
    )
    torch.testing.assert_close(
        *both(student.mT.detach().requires_grad_(), teacher.mT), rtol=1e-12, atol=1e-14
    )


def test_the_gradient_is_handed_over_once() -> None:
    loss = chunked_kl(*logits())
    loss.backward()
    with pytest.raises(RuntimeError, match=r"handed over by its first backward|a second time"):
        loss.backward()


def test_the_teacher_is_a_constant() -> None:
    student, teacher = logits()
    chunked_kl(student, teacher.requires_grad_()).backward()
    assert teacher.grad is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"direction": "up"}, "direction must be one of"),
        ({"chunk_size": 0}, "chunk_size must be 1 at least"),
        ({"mask": torch.ones(4, 5)}, "does not cover the leading dimensions"),
    ],
)
def test_what_cannot_be_meant_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        chunked_kl(*logits(), **options)


def test_a_graph_that_is_kept_keeps_the_gradient() -> None:
    student = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(3, 5, dtype=torch.float64)
    loss = chunked_kl(student, teacher)
    (first,) = torch.autograd.grad(2 * loss, student, retain_graph=True)
    (second,) = torch.autograd.grad(loss, student)
    (expected,) = torch.autograd.grad(kl_divergence(student, teacher), student)
    torch.testing.assert_close(first, 2 * expected)
    torch.testing.assert_close(second, expected)
