"""Feature losses, masks and precision against numpy, torchmetrics and plain loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.functional import pairwise_cosine_similarity

from softs_lightning.losses import (
    MSE,
    AttentionTransfer,
    CosineDistance,
    GeneralizedJSD,
    KLDivergence,
    SmoothL1,
)

TOKEN_LOSSES = [KLDivergence(2.0), GeneralizedJSD(0.3), MSE(), SmoothL1(), CosineDistance()]


def tokens(dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student, teacher = torch.randn(2, 3, 5, 8, generator=generator, dtype=torch.float64).to(dtype)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 1, 1, 1, 0]])
    return student, teacher, mask


def test_mse_equals_numpy() -> None:
    student, teacher, _ = tokens()
    expected = np.mean((student.numpy() - teacher.numpy()) ** 2)
    assert MSE()(student, teacher).item() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_smooth_l1_equals_its_two_branches(beta: float) -> None:
    student, teacher, _ = tokens()
    gap = np.abs(student.numpy() - teacher.numpy())
    expected = np.where(gap < beta, gap**2 / (2 * beta), gap - beta / 2).mean()
    assert SmoothL1(beta)(student, teacher).item() == pytest.approx(expected, rel=1e-13)


def test_cosine_equals_torchmetrics() -> None:
    student, teacher, _ = tokens()
    student, teacher = student.flatten(0, 1), teacher.flatten(0, 1)
    expected = 1 - pairwise_cosine_similarity(student, teacher).diagonal().mean()
    torch.testing.assert_close(CosineDistance()(student, teacher), expected)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_cosine_neither_under_nor_overflows(scale: float) -> None:
    student, teacher, _ = tokens(torch.float32)
    student.requires_grad_()
    loss = CosineDistance()(student * scale, teacher)
    torch.testing.assert_close(loss, CosineDistance()(student, teacher))
    grad = torch.autograd.grad(loss, student)[0]
    torch.testing.assert_close(grad, torch.autograd.grad(CosineDistance()(student, teacher), student)[0])


def test_cosine_of_zero_rows_has_a_finite_gradient() -> None:
    student = torch.zeros(2, 4, requires_grad=True)
    loss = CosineDistance()(student, torch.tensor([[0.0] * 4, [1.0] * 4]))
    loss.backward()
    assert loss.item() == pytest.approx(0.25)
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()


@pytest.mark.parametrize("power", [1.0, 2.0, 4.0])
def test_attention_transfer_equals_a_plain_loop(power: float) -> None:
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(2, 3, 4, 5, generator=generator, dtype=torch.float64)
    teacher = torch.randn(2, 7, 4, 5, generator=generator, dtype=torch.float64)
    gaps = []
    for a, b in zip(student.numpy(), teacher.numpy(), strict=True):
        maps = [(np.abs(x) ** power).mean(0).ravel() for x in (a, b)]
        maps = [m / np.linalg.norm(m) for m in maps]
        gaps.append((maps[0] - maps[1]) ** 2)
    assert AttentionTransfer(power)(student, teacher).item() == pytest.approx(np.mean(gaps), rel=1e-12)


def test_attention_transfer_on_tokens_ignores_padding() -> None:
    student, teacher, mask = tokens()
    loss = AttentionTransfer(channel_dim=-1)
    expected = sum(
        loss(s[m][None], t[m][None]) * m.sum() for s, t, m in zip(student, teacher, mask.bool(), strict=True)
    )
    student, teacher = (x.masked_fill(mask[..., None] == 0, torch.nan) for x in (student, teacher))
    torch.testing.assert_close(loss(student, teacher, mask=mask), expected / mask.sum())


@pytest.mark.parametrize("loss", TOKEN_LOSSES, ids=repr)
def test_masked_equals_the_valid_rows_alone(loss: nn.Module) -> None:
    student, teacher, mask = tokens()
    expected = loss(student[mask.bool()], teacher[mask.bool()])
    student, teacher = (
        x.masked_fill(mask[..., None] == 0, torch.nan).requires_grad_() for x in (student, teacher)
    )
    result = loss(student, teacher, mask=mask)
    torch.testing.assert_close(result, expected)
    grad = torch.autograd.grad(result, student)[0]
    assert torch.equal(grad.abs().sum(-1) > 0, mask.bool())


@pytest.mark.parametrize("loss", [*TOKEN_LOSSES, AttentionTransfer(channel_dim=-1)], ids=repr)
def test_a_fully_masked_batch_is_a_zero_in_the_graph(loss: nn.Module) -> None:
    student, teacher, mask = tokens()
    student = student.fill_(torch.inf).requires_grad_()
    result = loss(student, teacher, mask=torch.zeros_like(mask))
    assert result.item() == 0
    assert torch.equal(torch.autograd.grad(result, student)[0], torch.zeros_like(student))


@pytest.mark.parametrize("loss", TOKEN_LOSSES, ids=repr)
def test_a_window_normalizer_adds_up_to_the_whole_batch(loss: nn.Module) -> None:
    student, teacher, mask = tokens()
    parts = [loss(student[i], teacher[i], mask=mask[i], normalizer=mask.sum() / 3) for i in range(3)]
    torch.testing.assert_close(torch.stack(parts).mean(), loss(student, teacher, mask=mask))


@pytest.mark.parametrize("normalizer", [-1, float("nan"), float("inf")])
def test_no_window_has_such_a_number_of_tokens(normalizer: float) -> None:
    with pytest.raises(ValueError, match=f"a number of rows, or a tensor of one, got {normalizer}"):
        MSE()(torch.ones(2, 3), torch.ones(2, 3), normalizer=normalizer)


@pytest.mark.parametrize("normalizer", [0, 0.0, torch.tensor(0)])
def test_a_window_without_a_valid_token_is_a_zero(normalizer: Tensor | float) -> None:
    student, teacher, mask = tokens()
    loss = MSE()(student.requires_grad_(), teacher, mask=torch.zeros_like(mask), normalizer=normalizer)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, student)[0].any()


@pytest.mark.parametrize("loss", TOKEN_LOSSES, ids=repr)
def test_a_mask_that_fits_nothing_is_refused(loss: nn.Module) -> None:
    student, teacher, _ = tokens()
    with pytest.raises(ValueError, match=r"mask \(3, 4\)"):
        loss(student, teacher, mask=torch.ones(3, 4))


@pytest.mark.parametrize("loss", [*TOKEN_LOSSES, AttentionTransfer()], ids=repr)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_inputs_are_computed_in_float32(loss: nn.Module, dtype: torch.dtype) -> None:
    student, teacher, _ = tokens(dtype)
    with torch.autocast("cpu", torch.bfloat16):
        result = loss(student, teacher)
    assert torch.equal(result, loss(student.float(), teacher.float()))


@pytest.mark.parametrize("loss", [*TOKEN_LOSSES, AttentionTransfer()], ids=repr)
def test_float64_is_kept_and_never_rounded(loss: nn.Module) -> None:
    student, teacher, _ = tokens()
    with torch.autocast("cpu", torch.bfloat16):
        result = loss(student, teacher)
    assert result.dtype == torch.float64
    assert result != loss(student.float(), teacher.float())


def test_unlike_shapes_are_refused() -> None:
    for loss in (MSE(), SmoothL1(), CosineDistance()):
        with pytest.raises(ValueError, match=r"student \(2, 3\) and teacher \(2, 1\)"):
            loss(torch.zeros(2, 3), torch.zeros(2, 1))
    with pytest.raises(ValueError, match="one set of positions"):
        AttentionTransfer()(torch.zeros(2, 3, 4, 4), torch.zeros(2, 3, 2, 2))


def test_integer_inputs_are_refused() -> None:
    with pytest.raises(TypeError, match=r"floating-point tensors, got torch\.int64"):
        MSE()(torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.long))


def test_settings_show_in_the_repr() -> None:
    assert repr(AttentionTransfer(4.0)) == "AttentionTransfer(power=4.0, channel_dim=1)"
