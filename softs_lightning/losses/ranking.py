"""Losses for rankers and retrievers: scores ``[queries, candidates]``, a mask over the candidates."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from softs_lightning.losses.arithmetic import (
    DistillationLoss,
    bounded_logits,
    check_same_shape,
    full_precision,
    keep_valid,
    mean_over_rows,
    positive,
)
from softs_lightning.losses.divergences import kl_rows

__all__ = ["ListMLE", "ListwiseKL", "MarginMSE", "list_mle", "listwise_kl", "margin_mse"]


def _check(student: Tensor, teacher: Tensor, mask: Tensor | None, what: str) -> None:
    check_same_shape(student, teacher, what)
    if student.ndim < 2 or (mask is not None and mask.shape != student.shape):
        raise ValueError(
            f"{what} takes scores [queries, candidates] and a mask of that shape, got {tuple(student.shape)} "
            f"and {None if mask is None else tuple(mask.shape)}"
        )


@full_precision
def margin_mse(student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """MarginMSE (arXiv:2010.02666): squared error of the positive's margins over the negatives.

    Args:
        student: scores ``[queries, 1 + negatives]``, the positive first.
        teacher: the same shape.
        mask: the same shape, nonzero where there is a candidate; a query without its positive is left out.

    Returns:
        The mean over all negatives.

    >>> import torch
    >>> margin_mse(torch.tensor([[3.0, 1.0]]), torch.tensor([[9.0, 8.0]])).item()
    1.0
    """
    _check(student, teacher, mask, "margin_mse")
    if student.shape[-1] < 2:
        raise ValueError(f"margin_mse wants one negative at least, got scores {tuple(student.shape)}")
    student, teacher = keep_valid(student, mask), keep_valid(teacher, mask)
    gap = (student[..., :1] - student[..., 1:]) - (teacher[..., :1] - teacher[..., 1:])
    valid = None if mask is None else (mask[..., 1:] != 0) & (mask[..., :1] != 0)
    return mean_over_rows(gap.square(), valid)


@full_precision
def listwise_kl(
    student: Tensor, teacher: Tensor, *, temperature: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """T² · KL of the softmax over each query's candidates (RocketQAv2, arXiv:2110.07367).

    Args:
        student: scores ``[queries, candidates]``.
        teacher: the same shape.
        temperature: divides the scores.
        mask: the same shape, nonzero where there is a candidate; a query with none is left out.

    >>> import torch
    >>> listwise_kl(torch.tensor([[3.0, 1.0]]), torch.tensor([[9.0, 7.0]])).item()
    0.0
    """
    _check(student, teacher, mask, "listwise_kl")
    positive("temperature", temperature)
    student, teacher = (bounded_logits(keep_valid(x, mask), temperature) for x in (student, teacher))
    if mask is not None:
        nowhere = torch.finfo(student.dtype).min / 4
        student, teacher = (x.masked_fill(mask == 0, nowhere) for x in (student, teacher))
    rows = kl_rows(student.log_softmax(-1), teacher.log_softmax(-1))
    return temperature**2 * mean_over_rows(rows, None if mask is None else (mask != 0).any(-1))


@full_precision
def list_mle(student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """ListMLE (ICML 2008) of the teacher's order: −log of its Plackett-Luce likelihood under the student.

    Only the teacher's order counts, not its scores; ties are taken in the order of the candidates. The
    mean is over all places of all queries.

    >>> import torch
    >>> right = list_mle(torch.tensor([[9.0, 1.0]]), torch.tensor([[2.0, 1.0]]))
    >>> wrong = list_mle(torch.tensor([[1.0, 9.0]]), torch.tensor([[2.0, 1.0]]))
    >>> (right < wrong).item()
    True
    """
    _check(student, teacher, mask, "list_mle")
    nowhere = torch.finfo(student.dtype).min / 4
    student, teacher = (bounded_logits(keep_valid(x, mask)) for x in (student, teacher))
    if mask is not None:  # last in the order, and without weight in any denominator
        student, teacher = (x.masked_fill(mask == 0, nowhere) for x in (student, teacher))
    order = teacher.argsort(dim=-1, descending=True, stable=True)
    ranked = student.gather(-1, order)
    remaining = ranked.flip(-1).logcumsumexp(-1).flip(-1)
    return mean_over_rows(remaining - ranked, None if mask is None else mask.gather(-1, order))


class MarginMSE(DistillationLoss):
    """MarginMSE: :func:`~softs_lightning.losses.functional.margin_mse`.

    >>> import torch
    >>> MarginMSE()(torch.tensor([[3.0, 1.0]]), torch.tensor([[9.0, 8.0]])).item()
    1.0
    """

    token_dims: ClassVar[tuple[int, ...]] = (1,)
    row_mean: ClassVar[bool] = False

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return margin_mse(student, teacher, mask=mask)


class ListwiseKL(DistillationLoss):
    """KL over candidates: :func:`~softs_lightning.losses.functional.listwise_kl`.

    >>> import torch
    >>> ListwiseKL(2.0)(torch.tensor([[3.0, 1.0]]), torch.tensor([[9.0, 7.0]])).item()
    0.0
    """

    logits: ClassVar[bool] = True
    token_dims: ClassVar[tuple[int, ...]] = (1,)
    row_mean: ClassVar[bool] = False

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = positive("ListwiseKL's temperature", temperature)

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return listwise_kl(student, teacher, temperature=self.temperature, mask=mask)


class ListMLE(DistillationLoss):
    """The likelihood of the teacher's order: :func:`~softs_lightning.losses.functional.list_mle`.

    >>> import torch
    >>> ListMLE()(torch.zeros(1, 1), torch.zeros(1, 1)).item()
    0.0
    """

    divergence: ClassVar[bool] = False
    logits: ClassVar[bool] = True
    token_dims: ClassVar[tuple[int, ...]] = (1,)
    row_mean: ClassVar[bool] = False

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return list_mle(student, teacher, mask=mask)
