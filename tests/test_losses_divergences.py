"""Divergences against scipy, plain loops and their own limits."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon
from scipy.special import rel_entr, softmax
from torch import Tensor

from softs_lightning.losses import GeneralizedJSD, KLDivergence, SkewedKL, TotalVariation
from softs_lightning.losses import functional as LF

ROWS, CLASSES = 7, 11


def logits(seed: int = 0, scale: float = 3.0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    pair = scale * torch.randn(2, ROWS, CLASSES, generator=generator, dtype=torch.float64)
    return pair[0].to(dtype), pair[1].to(dtype)


def probabilities(student: Tensor, teacher: Tensor, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    return softmax(student.numpy() / temperature, -1), softmax(teacher.numpy() / temperature, -1)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("direction", ["forward", "reverse", "symmetric"])
def test_kl_equals_scipys_relative_entropy(temperature: float, direction: str) -> None:
    student, teacher = logits()
    p_s, p_t = probabilities(student, teacher, temperature)
    forward, reverse = rel_entr(p_t, p_s).sum(-1), rel_entr(p_s, p_t).sum(-1)
    rows = {"forward": forward, "reverse": reverse, "symmetric": (forward + reverse) / 2}[direction]
    loss = KLDivergence(temperature, direction)(student, teacher)
    assert loss.item() == pytest.approx(temperature**2 * rows.mean(), rel=1e-12)


def test_kl_averages_over_all_leading_dimensions() -> None:
    student, teacher = logits()
    folded = KLDivergence()(student[:6].view(2, 3, -1), teacher[:6].view(2, 3, -1))
    torch.testing.assert_close(folded, KLDivergence()(student[:6], teacher[:6]))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_jsd_at_one_half_equals_scipys_jensen_shannon(temperature: float) -> None:
    student, teacher = logits()
    p_s, p_t = probabilities(student, teacher, temperature)
    expected = temperature**2 * (jensenshannon(p_s, p_t, axis=-1) ** 2).mean()
    assert GeneralizedJSD(0.5, temperature)(student, teacher).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("beta", [0.01, 0.1, 0.7, 0.999])
def test_jsd_weighs_the_teacher_by_beta(beta: float) -> None:
    student, teacher = logits()
    p_s, p_t = probabilities(student, teacher, 1.0)
    mixture = beta * p_t + (1 - beta) * p_s
    rows = beta * rel_entr(p_t, mixture).sum(-1) + (1 - beta) * rel_entr(p_s, mixture).sum(-1)
    assert GeneralizedJSD(beta)(student, teacher).item() == pytest.approx(rows.mean(), rel=1e-10)
    normalized = GeneralizedJSD(beta, normalized=True)(student, teacher).item()
    assert normalized == pytest.approx(rows.mean() / (beta * (1 - beta)), rel=1e-10)


@pytest.mark.parametrize(("beta", "direction"), [(0.0, "forward"), (1.0, "reverse")])
def test_normalized_jsd_is_continuous_at_both_ends(beta: float, direction: str) -> None:
    # In float32: the mixture is within rounding of one side, so a naive form loses every digit.
    student, teacher = logits(dtype=torch.float32, scale=1.0)
    student.requires_grad_()
    losses = [
        KLDivergence(direction=direction)(student, teacher),
        GeneralizedJSD(beta, normalized=True)(student, teacher),
        GeneralizedJSD(abs(beta - 1e-7), normalized=True)(student, teacher),
    ]
    grads = [torch.autograd.grad(loss, student)[0] for loss in losses]
    for loss, grad in zip(losses[1:], grads[1:], strict=True):
        torch.testing.assert_close(loss, losses[0], rtol=2e-6, atol=0)
        torch.testing.assert_close(grad, grads[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("beta", "direction"), [(0.0, "forward"), (1.0, "reverse")])
def test_plain_jsd_is_the_kl_at_its_ends_and_falls_to_it_in_proportion(beta: float, direction: str) -> None:
    student, teacher = logits()
    limit = KLDivergence(2.0, direction)(student, teacher)
    torch.testing.assert_close(GeneralizedJSD(beta, 2.0)(student, teacher), limit, rtol=1e-12, atol=0)
    torch.testing.assert_close(
        LF.generalized_jsd(student, teacher, beta=beta, temperature=2.0), limit, rtol=1e-12, atol=0
    )
    near = GeneralizedJSD(abs(beta - 1e-6), 2.0)(student, teacher)
    torch.testing.assert_close(near / (1e-6 * (1 - 1e-6)), limit, rtol=1e-4, atol=0)


@pytest.mark.parametrize("skew", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_skewed_kl_equals_the_kl_to_the_mixture(skew: float, direction: str) -> None:
    student, teacher = logits()
    p, q = probabilities(student, teacher, 2.0)[:: -1 if direction == "forward" else 1]
    expected = 4 * rel_entr(p, skew * p + (1 - skew) * q).sum(-1).mean()
    loss = SkewedKL(skew, temperature=2.0, direction=direction)(student, teacher)
    assert loss.item() == pytest.approx(expected, rel=1e-10)


def test_total_variation_is_half_the_l1_distance() -> None:
    student, teacher = logits()
    p_s, p_t = probabilities(student, teacher, 1.0)
    expected = sum(abs(a - b) for a, b in zip(p_s.flat, p_t.flat, strict=True)) / 2 / ROWS
    assert TotalVariation()(student, teacher).item() == pytest.approx(expected, rel=1e-12)


def test_high_temperature_limit_is_half_the_variance_of_the_logit_gap() -> None:
    student, teacher = logits()
    limit = (student - teacher).var(-1, correction=0).mean() / 2
    torch.testing.assert_close(KLDivergence(1e5)(student, teacher), limit, rtol=1e-3, atol=0)
    torch.testing.assert_close(
        GeneralizedJSD(0.3, 1e5, normalized=True)(student, teacher), limit, rtol=1e-3, atol=0
    )


def test_low_temperature_limit_is_the_gap_of_the_winners() -> None:
    student, teacher = logits()
    best = teacher.argmax(-1, keepdim=True)
    limit = (student.amax(-1) - student.gather(-1, best).squeeze(-1)).mean()
    temperature = 1e-4
    loss = KLDivergence(temperature)(student, teacher) / temperature
    torch.testing.assert_close(loss, limit, rtol=1e-4, atol=1e-4)


LOSSES = [
    KLDivergence(),
    KLDivergence(2.0, "reverse"),
    KLDivergence(1.0, "symmetric"),
    GeneralizedJSD(),
    GeneralizedJSD(0.0, normalized=True),
    GeneralizedJSD(1e-6, normalized=True),
    SkewedKL(),
    TotalVariation(),
]


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_classes_excluded_on_both_sides_cost_nothing(loss: torch.nn.Module) -> None:
    student, teacher = logits()
    wide = [torch.cat([x, torch.full((ROWS, 3), -math.inf)], -1) for x in (student, teacher)]
    torch.testing.assert_close(loss(*wide), loss(student, teacher))


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
@pytest.mark.parametrize("value", [math.inf, -math.inf, 1e30, -1e30, 1e-30, 0.0])
def test_extreme_logits_give_finite_losses_and_gradients(loss: torch.nn.Module, value: float) -> None:
    student, teacher = logits(dtype=torch.float32)
    student[0], teacher[1], student[2, 3], teacher[3, 4] = value, value, value, value
    student[4], teacher[4] = value, value
    student.requires_grad_()
    result = loss(student, teacher)
    result.backward()
    assert torch.isfinite(result)
    assert student.grad is not None
    assert torch.isfinite(student.grad).all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KLDivergence(0.0), "temperature must be"),
        (lambda: KLDivergence(-1.0), "temperature must be"),
        (lambda: KLDivergence(math.nan), "temperature must be"),
        (lambda: KLDivergence(math.inf), "temperature must be"),
        (lambda: KLDivergence(direction="backward"), "forward, reverse, symmetric"),
        (lambda: GeneralizedJSD(1.5), "beta must lie in"),
        (lambda: SkewedKL(1.0), "identically zero"),
        (lambda: SkewedKL(direction="symmetric"), "must be one of forward, reverse"),
    ],
)
def test_bad_settings_are_refused_at_once(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def test_unlike_shapes_are_refused_with_both_named() -> None:
    with pytest.raises(ValueError, match=r"student \(2, 3\) and teacher \(2, 1\)"):
        KLDivergence()(torch.zeros(2, 3), torch.zeros(2, 1))


def test_an_empty_capture_is_refused_with_the_way_out() -> None:
    with pytest.raises(TypeError, match='attn_implementation="eager"'):
        LF.mse(None, torch.zeros(2, 3))  # type: ignore[arg-type]


def test_a_captured_tuple_is_refused_with_the_way_out() -> None:
    with pytest.raises(TypeError, match="name the element"):
        LF.kl_divergence((torch.zeros(2, 3),), torch.zeros(2, 3))  # type: ignore[arg-type]
