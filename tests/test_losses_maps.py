"""Feature-map and transformer losses against numpy, scipy and plain loops in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.special import rel_entr, softmax
from scipy.stats import norm
from sklearn.metrics.pairwise import linear_kernel, polynomial_kernel, rbf_kernel
from sklearn.preprocessing import normalize
from torch import Tensor

from softs_lightning import losses
from softs_lightning.losses import functional as LF


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_channel_wise_equals_scipys_entropies() -> None:
    student, teacher = draw(2, 2, 3, 4, 5)
    p, q = (softmax(x.flatten(2).numpy() / 4, -1) for x in (student, teacher))
    expected = 16 * rel_entr(q, p).sum(-1).mean()
    assert losses.ChannelWise()(student, teacher).item() == pytest.approx(expected, rel=1e-10)


def test_fsp_equals_a_loop_over_channels() -> None:
    student = [draw(2, 3, 4, 4, seed=1), draw(2, 5, 4, 4, seed=2)]
    teacher = [draw(2, 3, 6, 6, seed=3), draw(2, 5, 6, 6, seed=4)]
    gaps = []
    for b in range(2):
        for i in range(3):
            for j in range(5):
                flows = [float((m[0][b, i] * m[1][b, j]).mean()) for m in (student, teacher)]
                gaps.append((flows[0] - flows[1]) ** 2)
    assert losses.FSP()(student, teacher).item() == pytest.approx(np.mean(gaps), rel=1e-12)


def test_fsp_pools_the_larger_map_to_the_smaller() -> None:
    maps = [draw(2, 3, 4, 4, seed=1), draw(2, 5, 2, 2, seed=2)]
    pooled = [torch.nn.functional.max_pool2d(maps[0], 2), maps[1]]
    other = [draw(2, 3, 2, 2, seed=3), draw(2, 5, 2, 2, seed=4)]
    torch.testing.assert_close(losses.FSP()(maps, other), losses.FSP()(pooled, other))


KERNELS: dict[str, Callable[..., np.ndarray]] = {
    "linear": lambda a, b, _: linear_kernel(a, b),
    "polynomial": lambda a, b, _: polynomial_kernel(a, b, degree=2, gamma=1, coef0=0),
    "gaussian": lambda a, b, width: rbf_kernel(a, b, gamma=1 / width),
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_nst_equals_sklearns_kernels(kernel: str) -> None:
    student, teacher = draw(2, 3, 4, 4), draw(2, 6, 4, 4, seed=1)
    rows = []
    for s, t in zip(student.flatten(2).numpy(), teacher.flatten(2).numpy(), strict=True):
        s, t = normalize(s), normalize(t)
        width = ((t[:, None] - t[None]) ** 2).sum(-1).mean()
        k = [KERNELS[kernel](a, b, width).mean() for a, b in ((s, s), (t, t), (s, t))]
        rows.append(k[0] + k[1] - 2 * k[2])
    assert losses.NST(kernel)(student, teacher).item() == pytest.approx(np.mean(rows), rel=1e-10)


def test_ofd_equals_its_three_cases() -> None:
    student, teacher = draw(2, 2, 3, 4, 4)
    margins = [-0.5, -1.0, -0.1]
    total = []
    for (b, c, i, j), t in np.ndenumerate(teacher.numpy()):
        s, target = float(student[b, c, i, j]), max(t, margins[c])
        total.append(0.0 if s <= target <= 0 else (s - target) ** 2)
    loss = LF.partial_l2(student, teacher, torch.tensor(margins, dtype=torch.float64))
    assert loss.item() == pytest.approx(np.mean(total), rel=1e-12)


@pytest.mark.parametrize(("mean", "std"), [(0.0, 1.0), (1.0, 2.0), (-3.0, 0.5), (8.0, 1.0)])
def test_negative_response_equals_the_integral(mean: float, std: float) -> None:
    density = norm(mean, std)
    low = min(mean, 0) - 12 * std
    expected = quad(lambda x: x * density.pdf(x), low, 0)[0] / quad(density.pdf, low, 0)[0]
    result = LF.negative_response(torch.tensor([mean]).double(), torch.tensor([std]).double())
    assert result.item() == pytest.approx(expected, rel=1e-6)
    margin = losses.OFD(torch.tensor([mean]).double(), torch.tensor([std]).double()).margin
    torch.testing.assert_close(margin, result)


MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])


def test_attention_mse_equals_a_loop_over_valid_pairs() -> None:
    student, teacher = draw(2, 2, 3, 5, 5)
    gaps = [
        float((student[b, h, i, j] - teacher[b, h, i, j]) ** 2)
        for b, h, i, j in np.ndindex(2, 3, 5, 5)
        if MASK[b, i] and MASK[b, j]
    ]
    loss = losses.AttentionMSE()(student, teacher, mask=MASK)
    assert loss.item() == pytest.approx(np.mean(gaps), rel=1e-12)


def attention_probabilities(heads: int, seed: int) -> Tensor:
    scores = draw(2, heads, 5, 5, seed=seed).masked_fill(MASK[:, None, None] == 0, -torch.inf)
    return scores.softmax(-1)


def test_attention_kl_equals_scipys_entropy_over_valid_queries() -> None:
    student, teacher = attention_probabilities(3, 0), attention_probabilities(3, 1)
    rows = [
        rel_entr(teacher[b, h, i].numpy(), student[b, h, i].numpy()).sum()
        for b, h, i in np.ndindex(2, 3, 5)
        if MASK[b, i]
    ]
    loss = losses.AttentionKL()(student, teacher, mask=MASK)
    assert loss.item() == pytest.approx(np.mean(rows), rel=1e-11)


def test_attention_kl_ignores_what_padding_holds() -> None:
    student, teacher = attention_probabilities(3, 0), attention_probabilities(3, 1)
    expected = LF.attention_kl(student, teacher, mask=MASK)
    gone = (MASK[:, None, :, None] == 0).expand_as(student)
    student = student.masked_fill(gone, torch.nan).requires_grad_()
    loss = LF.attention_kl(student, teacher.masked_fill(gone, torch.nan), mask=MASK)
    torch.testing.assert_close(loss, expected)
    assert torch.isfinite(torch.autograd.grad(loss, student)[0]).all()
    assert LF.attention_kl(student, teacher, mask=torch.zeros_like(MASK)).item() == 0


def test_attention_kl_is_least_at_the_teacher_in_every_direction() -> None:
    teacher = attention_probabilities(3, 1)
    student = teacher.clone().requires_grad_()
    grad = torch.autograd.grad(LF.attention_kl(student, teacher, mask=MASK), student)[0]
    torch.testing.assert_close(grad, torch.zeros_like(grad))


def minilm_loop(student: Tensor, teacher: Tensor, heads: int, mask: Tensor) -> float:
    rows = []
    for b in range(len(student)):
        valid = mask[b].bool()
        for h in range(heads):
            p, q = (
                softmax(x @ x.T / np.sqrt(x.shape[1]), -1)
                for x in (s[b, valid].chunk(heads, -1)[h].numpy() for s in (student, teacher))
            )
            rows.append(rel_entr(q, p).sum(-1) / heads)
    return float(np.concatenate(rows).sum() / int(mask.sum()))


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_minilm_equals_a_loop_over_relation_heads(heads: int) -> None:
    student, teacher = draw(2, 5, 8), draw(2, 5, 12, seed=1)
    loss = losses.MiniLMRelation(heads)(student, teacher, mask=MASK)
    assert loss.item() == pytest.approx(minilm_loop(student, teacher, heads, MASK), rel=1e-11)


def test_minilm_regroups_states_that_come_in_heads() -> None:
    student, teacher = draw(2, 5, 8), draw(2, 5, 12, seed=1)
    split = student.view(2, 5, 4, 2).transpose(1, 2), teacher.view(2, 5, 3, 4).transpose(1, 2)
    loss = losses.MiniLMRelation(2)
    torch.testing.assert_close(loss(*split, mask=MASK), loss(student, teacher, mask=MASK))


def test_pkd_equals_the_distance_of_normalised_cls_states() -> None:
    student, teacher = draw(2, 2, 5, 8)
    gaps = [
        ((s / np.linalg.norm(s) - t / np.linalg.norm(t)) ** 2).sum()
        for s, t in zip(student[:, 0].numpy(), teacher[:, 0].numpy(), strict=True)
    ]
    assert losses.PKD()(student, teacher).item() == pytest.approx(np.mean(gaps), rel=1e-12)
    everywhere = losses.PKD(token=None)(student, teacher, mask=MASK)
    torch.testing.assert_close(everywhere, 2 * LF.cosine_distance(student, teacher, mask=MASK))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.NST("cubic"), "linear, polynomial, gaussian"),
        (lambda: LF.neuron_selectivity(draw(2, 3, 4, 4), draw(2, 3, 2, 2)), "one set of positions"),
        (lambda: losses.FSP()([draw(1, 2, 2, 2)], [draw(1, 2, 2, 2)]), "2 maps a side"),
        (lambda: losses.FSP()([draw(1, 2, 2, 2)] * 2, [draw(1, 3, 2, 2)] * 2), "channel by channel"),
        (lambda: losses.OFD(torch.zeros(3), torch.zeros(3)), "std above 0"),
        (lambda: losses.MiniLMRelation(0), "heads must be 1 at least"),
        (lambda: losses.MiniLMRelation(3)(draw(1, 2, 8), draw(1, 2, 9)), "student width 8 does not divide"),
        (lambda: losses.MiniLMRelation(1)(draw(1, 2, 8), draw(1, 3, 8)), "token by token"),
        (lambda: LF.attention_mse(draw(1, 2, 3), draw(1, 2, 3)), "heads, tokens, tokens"),
        (
            lambda: LF.attention_kl(draw(1, 2, 3, 3), draw(1, 2, 3, 3), mask=torch.ones(1, 2)),
            r"mask \(1, 2\)",
        ),
        (lambda: losses.ChannelWise(0), "temperature"),
    ],
)
def test_bad_input_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
