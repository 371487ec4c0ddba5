"""Relational losses against sklearn, scipy and plain loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.spatial.distance import pdist, squareform
from sklearn.metrics.pairwise import cosine_similarity, rbf_kernel
from sklearn.preprocessing import normalize
from torch import Tensor, nn

from softs_lightning import losses
from softs_lightning.losses import functional as LF

ROWS = 6


def features(rows: int = ROWS, one: int = 5, two: int = 9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(rows, one, generator=generator, dtype=torch.float64)
    return student, torch.randn(rows, two, generator=generator, dtype=torch.float64)


def smooth_l1(gap: np.ndarray) -> float:
    gap = np.abs(gap)
    return float(np.where(gap < 1, gap**2 / 2, gap - 0.5).mean())


def test_sp_equals_sklearns_normalised_grams() -> None:
    grams = [normalize(x.numpy() @ x.numpy().T) for x in features()]
    expected = ((grams[0] - grams[1]) ** 2).sum() / ROWS**2
    assert losses.SimilarityPreserving()(*features()).item() == pytest.approx(expected, rel=1e-12)


def test_cc_approaches_sklearns_rbf_kernel_as_its_order_grows() -> None:
    kernels = [rbf_kernel(normalize(x.numpy()), gamma=0.4) for x in features()]
    expected = ((kernels[0] - kernels[1]) ** 2).mean()
    exact = losses.CorrelationCongruence(0.4, order=20)(*features())
    assert exact.item() == pytest.approx(expected, rel=1e-12)


def test_cc_equals_the_papers_expansion() -> None:
    kernels = []
    for x in features():
        cosines = cosine_similarity(x.numpy())
        kernels.append(math.exp(-0.8) * sum(0.8**p / math.factorial(p) * cosines**p for p in range(3)))
    expected = ((kernels[0] - kernels[1]) ** 2).mean()
    assert losses.CorrelationCongruence()(*features()).item() == pytest.approx(expected, rel=1e-12)


def test_pkt_equals_a_loop_over_neighbours() -> None:
    rows = 0.0
    similarities = [(1 + cosine_similarity(x.numpy())) / 2 for x in features()]
    for i in range(ROWS):
        p, q = (np.delete(s[i], i) / np.delete(s[i], i).sum() for s in similarities)
        rows += float((q * np.log(q / p)).sum())
    assert losses.PKT()(*features()).item() == pytest.approx(rows / ROWS, rel=1e-12)


def test_rkd_distance_equals_scipys_distances() -> None:
    distances = [squareform(pdist(x.numpy())) / pdist(x.numpy()).mean() for x in features()]
    expected = smooth_l1(distances[0] - distances[1])
    assert LF.rkd_distance(*features()).item() == pytest.approx(expected, rel=1e-12)


def test_rkd_angle_equals_a_loop_over_triplets() -> None:
    angles = []
    for x in (f.numpy() for f in features()):
        cosines = np.zeros((ROWS, ROWS, ROWS))
        for i in range(ROWS):
            for j in range(ROWS):
                for k in range(ROWS):
                    a, b = x[j] - x[i], x[k] - x[i]
                    if a.any() and b.any():
                        cosines[i, j, k] = a @ b / np.linalg.norm(a) / np.linalg.norm(b)
        angles.append(cosines)
    expected = smooth_l1(angles[0] - angles[1])
    assert LF.rkd_angle(*features()).item() == pytest.approx(expected, rel=1e-12)
    whole = losses.RKD(distance=3.0, angle=5.0)(*features())
    torch.testing.assert_close(whole, 3 * LF.rkd_distance(*features()) + 5 * LF.rkd_angle(*features()))


def test_rkd_angle_in_blocks_equals_all_triplets_at_once() -> None:
    # 90 rows take three blocks of anchors.
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 90, 7, generator=generator, dtype=torch.float64)
    student.requires_grad_()

    def cosines(rows: Tensor) -> Tensor:
        sides = nn.functional.normalize(rows[None] - rows[:, None], dim=-1)
        return sides @ sides.mT

    expected = nn.functional.smooth_l1_loss(cosines(student), cosines(teacher))
    loss = LF.rkd_angle(student, teacher)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, student), torch.autograd.grad(expected, student))


@pytest.mark.parametrize("rows", [ROWS, 40])
def test_cka_equals_its_definition_on_either_path(rows: int) -> None:
    # 6 rows against 14 features takes the Gram matrices, 40 the cross-covariances.
    student, teacher = features(rows)
    centring = np.eye(rows) - 1 / rows
    grams = [centring @ (x.numpy() @ x.numpy().T) @ centring for x in (student, teacher)]
    expected = 1 - (grams[0] * grams[1]).sum() / np.sqrt((grams[0] ** 2).sum() * (grams[1] ** 2).sum())
    assert losses.CKA()(student, teacher).item() == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("rows", [ROWS, 40])
def test_cka_does_not_see_rotations_shifts_and_scales(rows: int) -> None:
    _, teacher = features(rows)
    rotation = torch.linalg.qr(torch.randn(9, 9, generator=torch.Generator().manual_seed(0)).double())[0]
    assert LF.cka(7 * teacher @ rotation + 3, teacher).item() == pytest.approx(0, abs=1e-12)


RELATIONS = [losses.SimilarityPreserving, losses.PKT, losses.RKD, losses.CorrelationCongruence, losses.CKA]


@pytest.mark.parametrize("kind", RELATIONS)
def test_tokens_are_rows_and_padding_is_none(kind: type[nn.Module]) -> None:
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(3, 5, 4, generator=generator, dtype=torch.float64)
    teacher = torch.randn(3, 5, 7, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [0, 0, 0, 0, 0]])
    expected = kind()(student[mask > 0], teacher[mask > 0])
    torch.testing.assert_close(kind(tokens=True)(student, teacher, mask=mask), expected)
    # As samples: the third has no valid token and is left out, the second is zero where it is padded.
    blank = [(x * mask[..., None])[:2].flatten(1) for x in (student, teacher)]
    torch.testing.assert_close(kind()(student, teacher, mask=mask), kind()(*blank))


@pytest.mark.parametrize("kind", RELATIONS)
def test_twins_and_constant_rows_have_finite_gradients(kind: type[nn.Module]) -> None:
    student = torch.zeros(5, 4)
    student[3:] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    student.requires_grad_()
    loss = kind()(student, torch.randn(5, 6, generator=torch.Generator().manual_seed(0)))
    assert torch.isfinite(loss)
    assert torch.isfinite(torch.autograd.grad(loss, student)[0]).all()


@pytest.mark.parametrize("kind", RELATIONS)
def test_unlike_batches_are_refused(kind: type[nn.Module]) -> None:
    with pytest.raises(ValueError, match="5 and 4 rows"):
        kind()(torch.zeros(5, 3), torch.zeros(4, 3))
    with pytest.raises(ValueError, match=r"\[batch, ..., features\]"):
        kind()(torch.zeros(5), torch.zeros(5))


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ValueError, match="order"):
        losses.CorrelationCongruence(order=0)
    with pytest.raises(ValueError, match="gamma"):
        losses.CorrelationCongruence(gamma=-1)
    with pytest.raises(ValueError, match="not both 0"):
        losses.RKD(0, 0)
