"""Distances between features of one shape, ``[..., features]``, row by row."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from softs_lightning.losses.arithmetic import (
    DistillationLoss,
    Normalizer,
    check_same_shape,
    full_precision,
    keep_valid,
    mean_over_rows,
    mean_over_tokens,
    positive,
    unit_rows,
)

__all__ = [
    "MSE",
    "CosineDistance",
    "SmoothL1",
    "cosine_distance",
    "mse",
    "smooth_l1",
]


@full_precision
def mse(
    student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
) -> Tensor:
    """Mean squared error: the hint loss of FitNets (arXiv:1412.6550), without their factor ½.

    Args:
        student: features of any shape.
        teacher: features of the same shape.
        mask: covers the leading dimensions (``[batch, tokens]`` for tokens), nonzero where a row counts.
        normalizer: what to divide by instead of the number of valid rows.

    Returns:
        The mean over all elements of the valid rows.

    >>> import torch
    >>> student, teacher = torch.tensor([[1.0, 1.0], [9.0, 9.0]]), torch.zeros(2, 2)
    >>> mse(student, teacher, mask=torch.tensor([1, 0])).item()
    1.0
    """
    check_same_shape(student, teacher, "mse")
    gap = keep_valid(student, mask) - keep_valid(teacher, mask)
    return mean_over_tokens(gap * gap, mask, normalizer)


@full_precision
def smooth_l1(
    student: Tensor,
    teacher: Tensor,
    *,
    beta: float = 1.0,
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
) -> Tensor:
    """Smooth L1 (Fast R-CNN, arXiv:1504.08083): squared below ``beta``, linear above it.

    >>> import torch
    >>> smooth_l1(torch.tensor([[3.0]]), torch.tensor([[0.0]])).item()
    2.5
    """
    check_same_shape(student, teacher, "smooth_l1")
    positive("beta", beta)
    gaps = F.smooth_l1_loss(keep_valid(student, mask), keep_valid(teacher, mask), beta=beta, reduction="none")
    return mean_over_tokens(gaps, mask, normalizer)


@full_precision
def cosine_distance(
    student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
) -> Tensor:
    """1 − cosine over the last dimension, averaged over the rows (DistilBERT, arXiv:1910.01108).

    Taken as half the squared distance of the unit vectors, which is the same number, is exactly zero at
    the teacher and never below. Two zero vectors are at distance 0, a zero and a nonzero one at ½.

    >>> import torch
    >>> cosine_distance(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]])).item()
    1.0
    """
    check_same_shape(student, teacher, "cosine_distance")
    gap = unit_rows(keep_valid(student, mask)) - unit_rows(keep_valid(teacher, mask))
    return mean_over_rows((gap * gap).sum(-1) / 2, mask, normalizer)


class MSE(DistillationLoss):
    """Mean squared error that takes a mask: :func:`~softs_lightning.losses.functional.mse`.

    >>> import torch
    >>> MSE()(torch.ones(2, 3), torch.zeros(2, 3)).item()
    1.0
    """

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        return mse(student, teacher, mask=mask, normalizer=normalizer)


class SmoothL1(DistillationLoss):
    """Smooth L1 that takes a mask: :func:`~softs_lightning.losses.functional.smooth_l1`.

    >>> import torch
    >>> SmoothL1(beta=2.0)(torch.ones(2, 3), torch.zeros(2, 3)).item()
    0.25
    """

    def __init__(self, beta: float = 1.0) -> None:
        super().__init__()
        self.beta = positive("SmoothL1's beta", beta)

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        return smooth_l1(student, teacher, beta=self.beta, mask=mask, normalizer=normalizer)


class CosineDistance(DistillationLoss):
    """1 − cosine of each row: :func:`~softs_lightning.losses.functional.cosine_distance`.

    >>> import torch
    >>> CosineDistance()(torch.ones(2, 3), 5 * torch.ones(2, 3)).item()
    0.0
    """

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        return cosine_distance(student, teacher, mask=mask, normalizer=normalizer)
