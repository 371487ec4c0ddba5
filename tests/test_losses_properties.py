"""Properties that hold for any shape, scale, mask and seed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax
from torch import Tensor, nn

from softs_lightning import losses

SETTINGS = settings(max_examples=60, deadline=None)

LOGIT_LOSSES = [
    losses.KLDivergence(),
    losses.KLDivergence(3.0, "reverse"),
    losses.KLDivergence(0.5, "symmetric"),
    losses.GeneralizedJSD(),
    losses.GeneralizedJSD(1e-5, normalized=True),
    losses.GeneralizedJSD(0.9, 2.0, normalized=True),
    losses.SkewedKL(),
    losses.TotalVariation(),
    losses.StandardizedKL(),
    losses.TopKKL(3),
    losses.ULD(),
]
ROW_LOSSES = [
    *LOGIT_LOSSES,
    losses.SigmoidKL(),
    losses.MSE(),
    losses.SmoothL1(),
    losses.CosineDistance(),
    losses.PKD(None),
]


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    """Student and teacher of any scale, from equal to far apart, and a mask."""
    batch, tokens, width = draw(st.integers(1, 4)), draw(st.integers(1, 6)), draw(st.integers(2, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**30)))
    scale = 10.0 ** draw(st.floats(-3, 2))
    student, noise = torch.randn(2, batch, tokens, width, generator=generator, dtype=torch.float64)
    apart = draw(st.sampled_from([0.0, 1e-6, 1e-2, 1.0]))
    mask = torch.rand(batch, tokens, generator=generator) < draw(st.sampled_from([0.0, 0.5, 1.0]))
    return {"student": scale * student, "teacher": scale * (student + apart * noise), "mask": mask}


@pytest.mark.parametrize("loss", ROW_LOSSES, ids=repr)
@given(case=cases())
@SETTINGS
def test_never_negative_finite_and_zero_at_the_teacher(loss: nn.Module, case: dict[str, Any]) -> None:
    student, teacher = case["student"].float().requires_grad_(), case["teacher"].float()
    value = loss(student, teacher, mask=case["mask"])
    (grad,) = torch.autograd.grad(value, student)
    assert value >= 0
    assert torch.isfinite(value)
    assert torch.isfinite(grad).all()
    assert loss(teacher, teacher).item() <= 1e-6


@pytest.mark.parametrize("loss", ROW_LOSSES, ids=repr)
@given(case=cases(), cut=st.integers(1, 5))
@SETTINGS
def test_packing_padding_and_splitting_change_nothing(
    loss: nn.Module, case: dict[str, Any], cut: int
) -> None:
    student, teacher, mask = case["student"], case["teacher"], case["mask"]
    expected = loss(student, teacher, mask=mask)
    bound: dict[str, Any] = {"rtol": 1e-9, "atol": 1e-12}
    packed = loss(student[mask][None], teacher[mask][None])
    torch.testing.assert_close(packed, expected, **bound)
    pad = torch.full_like(student[:, :1], torch.nan)
    wide = [torch.cat([pad, x, pad], 1) for x in (student, teacher)]
    longer = nn.functional.pad(mask, (1, 1))
    torch.testing.assert_close(loss(*wide, mask=longer), expected, **bound)
    window = mask.sum() / 2  # as if over two micro-batches, or two ranks
    parts = [
        loss(student[:, rows], teacher[:, rows], mask=mask[:, rows], normalizer=window)
        for rows in (slice(0, cut), slice(cut, None))
    ]
    torch.testing.assert_close(torch.stack(parts).mean(), expected, **bound)


@pytest.mark.parametrize("loss", LOGIT_LOSSES, ids=repr)
@given(case=cases(), shift=st.floats(-1e3, 1e3))
@SETTINGS
def test_shifting_logits_changes_nothing(loss: nn.Module, case: dict[str, Any], shift: float) -> None:
    expected = loss(case["student"], case["teacher"])
    moved = loss(case["student"] + shift, case["teacher"] - shift)
    # A shift of 1e3 leaves 1e-13 of each logit, and logit standardisation divides by their spread.
    torch.testing.assert_close(moved, expected, rtol=1e-6, atol=1e-9)


def kl_loop(student: Tensor, teacher: Tensor, mask: Tensor) -> float:
    rows = [
        np.sum(np.exp(t) * (t - s))
        for s, t in zip(
            log_softmax(student[mask].numpy(), -1), log_softmax(teacher[mask].numpy(), -1), strict=True
        )
    ]
    return float(np.mean(rows)) if rows else 0.0


@given(case=cases())
@SETTINGS
def test_kl_equals_the_float64_loop(case: dict[str, Any]) -> None:
    expected = kl_loop(case["student"], case["teacher"], case["mask"])
    exact = losses.KLDivergence()(case["student"], case["teacher"], mask=case["mask"])
    assert exact.item() == pytest.approx(expected, rel=1e-9, abs=1e-12)
    student, teacher = case["student"].float(), case["teacher"].float()
    single = losses.KLDivergence()(student, teacher, mask=case["mask"])
    # Of the same rounded numbers; logits of some hundreds are known to 1e-5 of a nat.
    reference = kl_loop(student.double(), teacher.double(), case["mask"])
    assert single.item() == pytest.approx(reference, rel=1e-4, abs=1e-4)
