"""Losses on relations: each model's samples are compared with each other, then the two patterns.

Student and teacher may have unlike widths; what must agree is the batch. A row is a sample with everything
but the batch flattened, or with ``tokens=True`` a token. Relations span the batch: a batch that is split
over ranks or accumulation steps has fewer of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from softs_lightning.losses.arithmetic import (
    DistillationLoss,
    eager,
    full_precision,
    non_negative,
    positive,
    unit_rows,
    valid_rows,
    weight,
    whole,
)

__all__ = [
    "CKA",
    "PKT",
    "RKD",
    "CorrelationCongruence",
    "SimilarityPreserving",
    "cka",
    "correlation_congruence",
    "pkt",
    "rkd_angle",
    "rkd_distance",
    "similarity_preserving",
]


def _rows(student: Tensor, teacher: Tensor, mask: Tensor | None, tokens: bool) -> tuple[Tensor, Tensor]:
    one, two = (valid_rows(x, mask, tokens=tokens) for x in (student, teacher))
    if len(one) != len(two) or (tokens and student.shape[:-1] != teacher.shape[:-1]):
        raise ValueError(
            f"relations are compared within one batch, got student {tuple(student.shape)} and teacher "
            f"{tuple(teacher.shape)}: {len(one)} and {len(two)} rows"
        )
    if not len(one):  # one row of zeros stands in, on the graph: it is at no distance from its like
        one, two = (x.new_zeros(1, x.shape[1]) + x.sum() for x in (one, two))
    return one, two


@full_precision
def similarity_preserving(
    student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, tokens: bool = False
) -> Tensor:
    """Similarity-preserving distillation (arXiv:1907.09682): ``‖G_s − G_t‖²_F / n²``.

    G is the n × n matrix of dot products between samples, each row of unit length.

    Args:
        student: ``[batch, ...]``.
        teacher: ``[batch, ...]``.
        mask: covers the leading dimensions, nonzero where an entry counts.
        tokens: relate tokens instead of samples.

    >>> import torch
    >>> similarity_preserving(torch.eye(2), torch.eye(2, 5)).item()
    0.0
    """
    one, two = (unit_rows(x @ x.mT) for x in _rows(student, teacher, mask, tokens))
    return (one - two).square().mean()


@full_precision
def correlation_congruence(
    student: Tensor,
    teacher: Tensor,
    *,
    gamma: float = 0.4,
    order: int = 2,
    mask: Tensor | None = None,
    tokens: bool = False,
) -> Tensor:
    """Correlation congruence (arXiv:1904.01802): ``‖C_s − C_t‖²_F / n²``.

    C holds Gaussian RBF kernels of unit-length rows, Taylor-expanded as in the paper (eq. 8):
    ``exp(−2γ) · Σ_p (2γ)^p / p! · (x_i · x_j)^p`` up to ``order``.

    >>> import torch
    >>> correlation_congruence(torch.eye(2), torch.eye(2, 5)).item()
    0.0
    """
    positive("gamma", gamma)
    whole("order", order)
    kernels: list[Tensor] = []
    for rows in _rows(student, teacher, mask, tokens):
        unit = unit_rows(rows)
        cosines = unit @ unit.mT
        weights = [(2 * gamma) ** p / math.factorial(p) for p in range(order + 1)]
        series = torch.stack([weight * cosines**p for p, weight in enumerate(weights)]).sum(0)
        kernels.append(math.exp(-2 * gamma) * series)
    return (kernels[0] - kernels[1]).square().mean()


@full_precision
def pkt(student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, tokens: bool = False) -> Tensor:
    """Probabilistic knowledge transfer (arXiv:1803.10837): KL of who is whose neighbour.

    ``p(j | i)`` is the cosine similarity, brought to [0, 1], over its sum for all j ≠ i. KL(teacher ‖
    student) is summed over j and averaged over i.

    >>> import torch
    >>> pkt(torch.eye(3), torch.eye(3, 5)).item()
    0.0
    """
    one, two = _rows(student, teacher, mask, tokens)
    apart = ~torch.eye(len(one), dtype=torch.bool, device=one.device)
    logs = []
    for unit in (unit_rows(one), unit_rows(two)):
        # Opposite samples have probability 0: the floor keeps the logarithm and its gradient finite.
        similarity = ((1 + unit @ unit.mT) / 2).clamp_min(1e-7) * apart
        probability = similarity / similarity.sum(-1, keepdim=True).clamp_min(1e-7)
        logs.append(probability.where(apart, 1.0).log())
    terms = (logs[1].exp() * (logs[1] - logs[0])).where(apart, 0.0)
    return non_negative(terms.sum(-1)).mean()


@full_precision
def rkd_distance(
    student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, tokens: bool = False
) -> Tensor:
    """Distance-wise relational distillation (arXiv:1904.05068): smooth L1 of scaled pairwise distances.

    Distances are divided by their mean over distinct pairs; the mean is over all n² entries, as in the
    authors' code.

    >>> import torch
    >>> rkd_distance(torch.eye(3), 7 * torch.eye(3, 5)).item()
    0.0
    """
    scaled = []
    for rows in _rows(student, teacher, mask, tokens):
        # The expanded form |x|² − 2xy + |y|² cancels for neighbours.
        distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
        pairs = (distances > 0).sum().clamp_min(1)
        mean = distances.sum() / pairs
        scaled.append(distances / mean.where(mean > 0, 1.0))
    return F.smooth_l1_loss(scaled[0], scaled[1])


@full_precision
def rkd_angle(
    student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, tokens: bool = False
) -> Tensor:
    """Angle-wise relational distillation (arXiv:1904.05068): smooth L1 of the cosines in all triplets.

    The n³ cosines are never held: anchors are taken in blocks, with the gradient, from two n × n matrices
    (in float64, as the cosines come from differences of their entries). Differentiable once; the teacher is
    a constant.

    >>> import torch
    >>> round(rkd_angle(torch.eye(3), 7 * torch.eye(3, 5)).item(), 6)
    0.0
    """
    one, two = _rows(student, teacher, mask, tokens)
    sides = [part for rows in (one, two.detach()) for part in _gram_and_inverse_distances(rows)]
    return _angles(*sides).to(one.dtype)


def _gram_and_inverse_distances(rows: Tensor) -> tuple[Tensor, Tensor]:
    # There is no float64 on Apple's GPUs; all else has it.
    rows = (rows - rows.detach().mean(0)).to(torch.float32 if rows.device.type == "mps" else torch.float64)
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    apart = distances > 0
    return rows @ rows.mT, distances.where(apart, 1.0).reciprocal().where(apart, 0.0)


@eager
def _angles(*sides: Tensor) -> Tensor:
    total: Tensor = _AngleMean.apply(*sides)  # type: ignore[no-untyped-call]
    return total


class _AngleMean(torch.autograd.Function):
    """Mean smooth L1 of the cosines at all anchors; gradients of the student's side taken in the forward.

    At anchor i, between j and k, the cosine is ``(G_jk − G_ij − G_ik + G_ii) · inverse_ij · inverse_ik``.
    """

    @staticmethod
    def forward(
        ctx: Any, gram: Tensor, inverse: Tensor, target_gram: Tensor, target_inverse: Tensor
    ) -> Tensor:
        size = len(gram)
        total = gram.new_zeros(())
        gram_grad, inverse_grad = torch.zeros_like(gram), torch.zeros_like(inverse)
        block = max(2**18 // size**2, 1)
        for start in range(0, size, block):
            anchors = slice(start, start + block)
            dots, cosines = _cosines(gram, inverse, anchors)
            gaps = cosines - _cosines(target_gram, target_inverse, anchors)[1]
            slopes = gaps.clamp(-1, 1)
            # Smooth L1: slope · (gap − slope / 2) is gap²/2 within 1 and |gap| − ½ beyond.
            total += (slopes * (gaps - slopes / 2)).sum()
            inverse_grad[anchors] = 2 * torch.einsum("ijk,ijk,ik->ij", slopes, dots, inverse[anchors])
            slopes = slopes * inverse[anchors, :, None] * inverse[anchors, None, :]
            gram_grad += slopes.sum(0)
            sums = slopes.sum(2)
            gram_grad[anchors] -= 2 * sums
            gram_grad.diagonal()[anchors] += sums.sum(1)
        ctx.save_for_backward(gram_grad / size**3, inverse_grad / size**3)
        return total / size**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        gram_grad, inverse_grad = ctx.saved_tensors
        return outer * gram_grad, outer * inverse_grad, None, None


def _cosines(gram: Tensor, inverse: Tensor, anchors: slice) -> tuple[Tensor, Tensor]:
    """``[block, n, n]`` dot products of the sides at some anchors, and their cosines."""
    rows = gram[anchors]
    dots = gram - rows[:, :, None] - rows[:, None, :] + gram.diagonal()[anchors, None, None]
    return dots, dots * inverse[anchors, :, None] * inverse[anchors, None, :]


@full_precision
def cka(student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, tokens: bool = False) -> Tensor:
    """One minus linear CKA (arXiv:1905.00414), the cosine between two centred Gram matrices.

    Invariant to rotation and to one scale of all features, not to a rescaling of single ones. Of fewer
    rows than features the Gram matrices are formed, else the smaller cross-covariances.

    Args:
        student: ``[batch, ...]``.
        teacher: ``[batch, ...]``; widths may differ.
        mask: covers the leading dimensions, nonzero where an entry counts.
        tokens: rows are tokens instead of samples.

    >>> import torch
    >>> x = torch.tensor([[0.0, 1.0], [2.0, 0.0], [1.0, 3.0]])
    >>> round(cka(x, 3 * x.flip(1)).item(), 6)
    0.0
    """
    one, two = _rows(student, teacher, mask, tokens)
    one, two = (_unit_scale(x - x.mean(0)) for x in (one, two))
    if len(one) <= one.shape[1] + two.shape[1]:
        # Half the squared distance of unit matrices is 1 − cosine, without its cancellation near 1.
        grams = [unit_rows((x @ x.mT).flatten()) for x in (one, two)]
        return (grams[0] - grams[1]).square().sum() / 2
    shared = (two.mT @ one).square().sum()
    norms = [torch.linalg.matrix_norm(x.mT @ x) for x in (one, two)]
    product: Tensor = norms[0] * norms[1]
    return non_negative(1 - shared / product.where(product > 0, 1.0))


def _unit_scale(values: Tensor) -> Tensor:
    """Divided by its largest entry, which CKA does not see: fourth powers are to come."""
    scale = values.detach().abs().amax()
    return values / scale.where(scale > 0, 1.0)


class _Relation(DistillationLoss):
    """A relational loss under its options."""

    same_shape: ClassVar[bool] = False
    row_mean: ClassVar[bool] = False
    function: ClassVar[Callable[..., Tensor]]

    def __init__(self, *, tokens: bool = False) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return type(self).function(student, teacher, mask=mask, tokens=self.tokens)


class SimilarityPreserving(_Relation):
    """SP: :func:`~softs_lightning.losses.functional.similarity_preserving`.

    >>> import torch
    >>> SimilarityPreserving()(torch.eye(2), torch.eye(2, 5)).item()
    0.0
    """

    function = similarity_preserving


class PKT(_Relation):
    """Probabilistic knowledge transfer: :func:`~softs_lightning.losses.functional.pkt`.

    >>> import torch
    >>> PKT()(torch.eye(3), torch.eye(3, 5)).item()
    0.0
    """

    function = pkt


class CKA(_Relation):
    """One minus linear CKA: :func:`~softs_lightning.losses.functional.cka`.

    >>> import torch
    >>> round(CKA()(torch.eye(3), 2 * torch.eye(3, 5)).item(), 6)
    0.0
    """

    function = cka


class CorrelationCongruence(_Relation):
    """CC: :func:`~softs_lightning.losses.functional.correlation_congruence`.

    >>> import torch
    >>> CorrelationCongruence()(torch.eye(3), torch.eye(3, 5)).item()
    0.0
    """

    def __init__(self, gamma: float = 0.4, order: int = 2, *, tokens: bool = False) -> None:
        super().__init__(tokens=tokens)
        self.gamma = positive("CorrelationCongruence's gamma", gamma)
        self.order = whole("CorrelationCongruence's order", order)

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return correlation_congruence(
            student, teacher, gamma=self.gamma, order=self.order, mask=mask, tokens=self.tokens
        )


class RKD(_Relation):
    """Relational distillation: ``distance · rkd_distance + angle · rkd_angle`` (arXiv:1904.05068).

    Args:
        distance: weight of :func:`~softs_lightning.losses.functional.rkd_distance`.
        angle: weight of :func:`~softs_lightning.losses.functional.rkd_angle`; 0 leaves its n³ out.
        tokens: relate tokens instead of samples.

    >>> import torch
    >>> RKD()(torch.eye(3), torch.eye(3, 5)).item()
    0.0
    """

    def __init__(self, distance: float = 1.0, angle: float = 2.0, *, tokens: bool = False) -> None:
        super().__init__(tokens=tokens)
        if weight("RKD's distance", distance) == weight("RKD's angle", angle) == 0:
            raise ValueError("RKD's distance and angle must be weights, not both 0")
        self.distance, self.angle = distance, angle

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        terms = [
            weight * function(student, teacher, mask=mask, tokens=self.tokens)
            for weight, function in ((self.distance, rkd_distance), (self.angle, rkd_angle))
            if weight
        ]
        return torch.stack(terms).sum()
