"""Fidelity: how alike student and teacher are, as torchmetrics that add up over batches and ranks.

Each ``update(student, teacher, mask=None)`` takes two activations whose last dimension holds the
classes or features; everything before it is rows. `mask` says which rows count (its shape is that
of the activations without the last dimension).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

__all__ = ["FIDELITY", "Cosine", "LinearCKA", "TeacherKL", "TopOneAgreement", "row_count", "rows"]


def rows(value: Tensor, mask: Tensor | None = None) -> Tensor:
    """An activation as [rows, features] in float64, without the rows that `mask` leaves out.

    Feature maps ``[B, C, H, W]`` have their channels as features, everything else its last dimension.

    >>> rows(torch.ones(2, 3, 4, 4)).shape, rows(torch.ones(2, 5, 8)).shape
    (torch.Size([32, 3]), torch.Size([10, 8]))
    """
    if value.dim() == 4:
        value = value.movedim(1, -1)
    flat = value.detach().reshape(-1, value.shape[-1]).double()
    if mask is None:
        return flat
    if mask.numel() != len(flat):
        raise ValueError(
            f"the mask has shape {list(mask.shape)}, the activation {list(value.shape)}: it takes one "
            "entry for each row"
        )
    return flat[mask.reshape(-1).to(flat.device).bool()]


def row_count(value: Tensor) -> int:
    """How many rows :func:`rows` makes of an activation."""
    features = value.shape[1 if value.dim() == 4 else -1] if value.dim() else 1
    return value.numel() // max(features, 1)


class _Mean(Metric):
    """A mean over rows."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> None:
        if student.shape != teacher.shape:
            raise ValueError(
                f"{type(self).__name__} compares equal shapes, got {list(student.shape)} and {list(teacher.shape)}"
            )
        values = self.of(rows(student, mask), rows(teacher, mask))
        self.total = self.total + values.sum()
        self.count = self.count + len(values)

    def compute(self) -> Tensor:
        return self.total / self.count

    def of(self, student: Tensor, teacher: Tensor) -> Tensor:
        """A value for each row."""
        raise NotImplementedError


class TopOneAgreement(_Mean):
    """The share of rows in which student and teacher have the same largest class.

    >>> metric = TopOneAgreement()
    >>> metric.update(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.0, 9.0], [0.0, 9.0]]))
    >>> metric.compute().item()
    0.5
    """

    higher_is_better = True

    def of(self, student: Tensor, teacher: Tensor) -> Tensor:
        return (student.argmax(-1) == teacher.argmax(-1)).double()


class TeacherKL(_Mean):
    """KL(teacher ‖ student) of the softmax of logits, in nats, at temperature 1; the mean over rows.

    >>> metric = TeacherKL()
    >>> metric.update(torch.zeros(1, 2), torch.zeros(1, 2))
    >>> metric.compute().item()
    0.0
    """

    higher_is_better = False

    def of(self, student: Tensor, teacher: Tensor) -> Tensor:
        p = teacher.log_softmax(-1)
        terms = p.exp() * (p - student.log_softmax(-1))
        # A class of probability 0 adds nothing, also where its logarithm is -inf on both sides.
        return torch.where(p == -torch.inf, 0.0, terms).sum(-1)


class Cosine(_Mean):
    """The cosine between the rows of student and teacher; the mean over rows.

    >>> metric = Cosine()
    >>> metric.update(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]))
    >>> metric.compute().item()
    0.0
    """

    higher_is_better = True

    def of(self, student: Tensor, teacher: Tensor) -> Tensor:
        return torch.nn.functional.cosine_similarity(student, teacher, dim=-1)


class LinearCKA(Metric):
    """Linear centred kernel alignment of all rows seen (Kornblith et al. 2019, arXiv:1905.00414).

    Exact over batches and ranks: it sums the second moments of both sides, whose widths may differ,
    so its memory is (d + D)² numbers in float64, whatever the number of rows. 1 means equal up to
    rotation, scale and shift.

    >>> metric = LinearCKA()
    >>> x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    >>> metric.update(x, 2 * x + 1)
    >>> round(metric.compute().item(), 6)
    1.0
    """

    full_state_update = False
    higher_is_better = True
    count: Tensor
    sums: Tensor
    moments: Tensor

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.width = 0  # of the student's side
        # The widths are not known yet: a rank that saw no batch adds zeros of shape ().
        self.add_state("count", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("sums", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("moments", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> None:
        ours, theirs = rows(student, mask), rows(teacher, mask)
        if len(ours) != len(theirs):
            raise ValueError(
                f"CKA compares the same rows, got {len(ours)} of the student and {len(theirs)} of the teacher"
            )
        both = torch.cat([ours, theirs], -1)
        self.width = ours.shape[-1]
        self.count = self.count + len(both)
        self.sums = self.sums + both.sum(0)
        self.moments = self.moments + both.T @ both

    def compute(self) -> Tensor:
        centred = self.moments - torch.outer(self.sums, self.sums) / self.count
        d = self.width
        cross, ours, theirs = centred[:d, d:], centred[:d, :d], centred[d:, d:]
        aligned: Tensor = cross.square().sum() / (ours.norm() * theirs.norm())
        return aligned


FIDELITY: Mapping[str, type[Metric]] = {
    "agreement": TopOneAgreement,
    "kl": TeacherKL,
    "cosine": Cosine,
    "cka": LinearCKA,
}
"""The metrics by the names under which they are reported."""
