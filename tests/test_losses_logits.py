"""Logit and ranking losses against scipy, sorting by hand and plain loops in float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.special import expit, log_softmax, rel_entr, softmax
from scipy.stats import pearsonr, wasserstein_distance, zscore
from torch import Tensor

from softs_lightning import losses
from softs_lightning.losses import functional as LF

ROWS, CLASSES = 6, 9
LABELS = torch.tensor([0, 3, 8, -100, 1, 3])


def logits(seed: int = 0, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    student = 2 * torch.randn(ROWS, CLASSES, generator=generator, dtype=torch.float64)
    return student, 2 * torch.randn(ROWS, classes, generator=generator, dtype=torch.float64)


def test_dkd_equals_its_two_divergences() -> None:
    student, teacher = logits()
    temperature, alpha, beta = 4.0, 0.7, 8.0
    rows = []
    for s, t, label in zip(student.numpy(), teacher.numpy(), LABELS.tolist(), strict=True):
        if label == -100:
            continue
        p, q = softmax(s / temperature), softmax(t / temperature)
        binary = [np.array([x[label], 1 - x[label]]) for x in (p, q)]
        rest = [np.delete(x, label) / (1 - x[label]) for x in (p, q)]
        rows.append(alpha * rel_entr(binary[1], binary[0]).sum() + beta * rel_entr(rest[1], rest[0]).sum())
    loss = losses.DKD(alpha, beta, temperature)(student, teacher, batch={"labels": LABELS})
    assert loss.item() == pytest.approx(temperature**2 * np.mean(rows), rel=1e-11)


def test_dkd_with_the_right_weights_is_the_plain_kl() -> None:
    # KL = TCKD + (1 − p_t) · NCKD: one row, so that one beta is right.
    student, teacher = (x[:1] for x in logits())
    beta = 1 - softmax(teacher.numpy())[0, 2]
    loss = LF.dkd(student, teacher, torch.tensor([2]), alpha=1.0, beta=beta, temperature=1.0)
    torch.testing.assert_close(loss, LF.kl_divergence(student, teacher))


def test_dist_equals_scipys_pearson() -> None:
    student, teacher = logits()
    p, q = (softmax(x.numpy() / 2, -1) for x in (student, teacher))
    inter = np.mean([1 - pearsonr(a, b).statistic for a, b in zip(p, q, strict=True)])
    intra = np.mean([1 - pearsonr(a, b).statistic for a, b in zip(p.T, q.T, strict=True)])
    loss = losses.DIST(inter=0.5, intra=2.0, temperature=2.0)(student, teacher)
    assert loss.item() == pytest.approx(4 * (0.5 * inter + 2 * intra), rel=1e-11)


def test_standardized_kl_equals_scipys_zscores() -> None:
    student, teacher = logits()
    p, q = (softmax(zscore(x.numpy(), -1, ddof=1) / 3, -1) for x in (student, teacher))
    loss = losses.StandardizedKL(3.0)(student, teacher)
    assert loss.item() == pytest.approx(9 * rel_entr(q, p).sum(-1).mean(), rel=1e-11)


def test_ce_kl_equals_both_terms() -> None:
    student, teacher = logits()
    kept = LABELS.numpy() != -100
    hard = -log_softmax(student.numpy(), -1)[kept, LABELS.numpy()[kept]].mean()
    p, q = (softmax(x.numpy()[kept] / 3, -1) for x in (student, teacher))
    soft = 9 * rel_entr(q, p).sum(-1).mean()
    loss = losses.CEKL(0.2, 3.0)(student, teacher, batch={"labels": LABELS})
    assert loss.item() == pytest.approx(0.2 * hard + 0.8 * soft, rel=1e-11)


def test_ce_kl_shifts_as_the_chunked_one() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 5, CLASSES, generator=generator, dtype=torch.float64)
    labels = torch.tensor([[1, 2, 3, 4, 5], [-100, -100, 3, 4, -100]])
    eye = losses.Head(torch.eye(CLASSES, dtype=torch.float64))
    torch.testing.assert_close(
        LF.ce_kl(student, teacher, labels, shift=True), LF.linear_ce_kl(student, teacher, eye, eye, labels)
    )


@pytest.mark.parametrize("k", [1, 3, CLASSES - 1])
def test_topk_kl_equals_the_kl_of_k_classes_and_a_bucket(k: int) -> None:
    student, teacher = logits()
    rows = []
    for s, t in zip(student.numpy(), teacher.numpy(), strict=True):
        p, q = softmax(s / 2), softmax(t / 2)
        top = np.argsort(-t)[:k]
        buckets = [np.append(x[top], np.delete(x, top).sum()) for x in (p, q)]
        rows.append(rel_entr(buckets[1], buckets[0]).sum())
    assert losses.TopKKL(k, 2.0)(student, teacher).item() == pytest.approx(4 * np.mean(rows), rel=1e-11)


def test_topk_kl_of_all_classes_is_the_plain_kl() -> None:
    student, teacher = logits()
    torch.testing.assert_close(LF.topk_kl(student, teacher, k=99), LF.kl_divergence(student, teacher))


def test_topk_tail_keeps_its_digits_where_the_teacher_is_sure() -> None:
    # The tail holds 9·e^-40; one minus the rest would be 0 in float32, and the loss infinite or 0.
    teacher = torch.tensor([[40.0] + [0.0] * 9])
    student = torch.tensor([[40.0] + [-20.0] * 9])
    loss = LF.topk_kl(student, teacher, k=1)
    expected = LF.topk_kl(student.double(), teacher.double(), k=1)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-12)
    grad = torch.autograd.grad(LF.topk_kl(student.requires_grad_(), teacher, k=1), student)[0]
    assert grad[0, 1].item() == pytest.approx(-math.exp(-40), rel=1e-4)


def test_sigmoid_kl_equals_binary_entropies() -> None:
    student, teacher = logits()
    p, q = (expit(x.numpy() / 2) for x in (student, teacher))
    rows = (rel_entr(q, p) + rel_entr(1 - q, 1 - p)).sum(-1)
    assert losses.SigmoidKL(2.0)(student, teacher).item() == pytest.approx(4 * rows.mean(), rel=1e-10)


def test_sigmoid_kl_survives_infinite_logits() -> None:
    student = torch.tensor([[math.inf, -math.inf, 0.0]], requires_grad=True)
    loss = LF.sigmoid_kl(student, torch.tensor([[math.inf, -math.inf, 1.0]]))
    torch.testing.assert_close(loss, LF.sigmoid_kl(torch.zeros(1, 1), torch.ones(1, 1)))
    assert torch.isfinite(torch.autograd.grad(loss, student)[0]).all()


@pytest.mark.parametrize("classes", [CLASSES, 14, 5])
def test_uld_equals_sorting_by_hand(classes: int) -> None:
    student, teacher = logits(classes=classes)
    rows = []
    for s, t in zip(student.numpy(), teacher.numpy(), strict=True):
        p, q = (sorted(softmax(x), reverse=True) for x in (s, t))
        rows.append(sum(abs(a - b) for a, b in itertools.zip_longest(p, q, fillvalue=0.0)))
    assert losses.ULD()(student, teacher).item() == pytest.approx(np.mean(rows), rel=1e-11)


def test_uld_is_scipys_wasserstein_distance_of_the_probabilities() -> None:
    student, teacher = (x[:1] for x in logits())
    p, q = (softmax(x.numpy(), -1)[0] for x in (student, teacher))
    assert LF.uld(student, teacher).item() == pytest.approx(CLASSES * wasserstein_distance(p, q), rel=1e-10)


def test_margin_mse_equals_a_loop_over_negatives() -> None:
    student, teacher = logits()
    mask = torch.ones(ROWS, CLASSES)
    mask[0, 5:] = 0
    mask[1, 0] = 0  # a query without its positive
    gaps = [
        ((s[0] - s[j]) - (t[0] - t[j])) ** 2
        for i, (s, t) in enumerate(zip(student.tolist(), teacher.tolist(), strict=True))
        for j in range(1, CLASSES)
        if mask[i, 0] and mask[i, j]
    ]
    assert losses.MarginMSE()(student, teacher, mask=mask).item() == pytest.approx(np.mean(gaps), rel=1e-12)


def test_listwise_kl_is_the_kl_of_the_candidates_there_are() -> None:
    student, teacher = logits()
    mask = torch.ones(ROWS, CLASSES)
    mask[0, 5:] = 0
    mask[2] = 0
    rows = []
    for s, t, m in zip(student.numpy(), teacher.numpy(), mask.numpy() > 0, strict=True):
        if m.any():
            rows.append(4 * rel_entr(softmax(t[m] / 2), softmax(s[m] / 2)).sum())
    loss = losses.ListwiseKL(2.0)(student, teacher, mask=mask)
    assert loss.item() == pytest.approx(np.mean(rows), rel=1e-11)


def test_list_mle_is_the_likelihood_of_the_teachers_order() -> None:
    student, teacher = logits()
    terms = []
    for s, t in zip(student.numpy(), teacher.numpy(), strict=True):
        order = np.argsort(-t)
        for place in range(CLASSES):
            left = s[order[place:]]
            terms.append(-log_softmax(left)[0])
    assert losses.ListMLE()(student, teacher).item() == pytest.approx(np.mean(terms), rel=1e-11)


def test_labels_come_from_any_kind_of_batch() -> None:
    student, teacher = logits()
    expected = LF.dkd(student, teacher, LABELS)
    for key, batch in (("y", {"y": LABELS}), (1, (student, LABELS)), (lambda b: b.T[0], LABELS[:, None])):
        torch.testing.assert_close(losses.DKD(labels=key)(student, teacher, batch=batch), expected)
    with pytest.raises(ValueError, match=r"DKD wants 'labels' of the batch, which has \['y'\]"):
        losses.DKD()(student, teacher, batch={"y": LABELS})


def test_packed_documents_are_not_predicted_across_their_ends() -> None:
    labels = torch.tensor([[1, 2, 3, 4, 5, 6]])
    segments = torch.tensor([[0, 0, 0, 1, 1, 2]])
    assert LF.prediction_mask(labels, segments=segments).tolist() == [[True, True, False, True, False, False]]
    # The same tokens as rows of their own, padded: the same predictions, hence the same loss.
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 1, 6, CLASSES, generator=generator, dtype=torch.float64)
    packed = LF.ce_kl(student, teacher, LF.next_labels(labels, segments=segments))
    apart, mask = (
        torch.tensor([[0, 1, 2], [3, 4, 0], [5, 0, 0]]),
        torch.tensor([[1, 1, 1], [1, 1, 0], [1, 0, 0]]),
    )
    alone = labels[0][apart].masked_fill(mask == 0, -100)
    torch.testing.assert_close(LF.ce_kl(student[0][apart], teacher[0][apart], alone, shift=True), packed)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.DKD(beta=-1), "must be a finite number, 0 at least"),
        (lambda: losses.DIST(inter=-1), "must be a finite number, 0 at least"),
        (lambda: losses.TopKKL(0), "k must be 1 at least"),
        (lambda: losses.CEKL(1.5), "hard must lie in"),
        (lambda: losses.CEKL(direction="up"), "direction must be one of"),
        (lambda: losses.StandardizedKL(0), "temperature must be"),
        (lambda: losses.ListwiseKL(-2), "temperature must be"),
        (lambda: LF.dkd(*logits(), LABELS[1:]), "labels"),
        (lambda: LF.uld(torch.zeros(2, 3), torch.zeros(3, 3)), "same positions"),
        (lambda: LF.margin_mse(torch.zeros(3), torch.zeros(3)), "candidates"),
        (lambda: LF.margin_mse(torch.zeros(3, 1), torch.zeros(3, 1)), "one negative"),
        (lambda: LF.next_labels(LABELS, segments=LABELS[1:]), "segments"),
    ],
)
def test_bad_input_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
