"""One loss both ways: the value, the student's gradient, and where they differ the reason, applied."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = ["Comparison", "Difference", "compare", "entropy"]

Function = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Comparison:
    """A loss here, the same of a peer, and what turns ours into theirs.

    Attributes:
        loss: the class or function compared, as exported.
        ours: how it is called, for the table.
        peer: the distribution that has the other.
        theirs: how that is called.
        run: ours, of two tensors.
        other: theirs, of the same tensors.
        student: shape of the student's tensor.
        teacher: of the teacher's, where it differs.
        reason: why the values differ; empty where they do not.
        corrected: ours, with that difference made.
        rtol: what may remain between (corrected) ours and theirs, of the larger.
        gradient: whether theirs is differentiable.
    """

    loss: str
    ours: str
    peer: str
    theirs: str
    run: Function
    other: Function
    student: tuple[int, ...]
    teacher: tuple[int, ...] | None = None
    reason: str = ""
    corrected: Function | None = None
    rtol: float = 1e-9
    gradient: bool = True

    @property
    def name(self) -> str:
        return f"{self.ours} / {self.peer} {self.theirs}"

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Student and teacher in float64, related as those of a training in progress are."""
        generator = torch.Generator().manual_seed(0)
        shapes = self.student, self.teacher or self.student
        student, teacher = (torch.randn(x, generator=generator, dtype=torch.float64) for x in shapes)
        return (student + teacher) / 2 if student.shape == teacher.shape else student, teacher


@dataclass(frozen=True)
class Difference:
    """Relative differences: of the values as they are, then of value and gradient once corrected."""

    plain: float
    value: float
    gradient: float | None


def compare(comparison: Comparison) -> Difference:
    """Compute a comparison both ways."""
    corrected = comparison.corrected or comparison.run
    student, teacher = comparison.tensors()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs, their_grad = _gradient(comparison.other, student, teacher, comparison.gradient)
        plain, _ = _gradient(comparison.run, student, teacher, False)
        ours, grad = _gradient(corrected, student, teacher, comparison.gradient)
    gradient = None if grad is None or their_grad is None else _relative(grad, their_grad)
    return Difference(_relative(plain, theirs), _relative(ours, theirs), gradient)


def _gradient(
    function: Function, student: Tensor, teacher: Tensor, wanted: bool
) -> tuple[Tensor, Tensor | None]:
    # One seed for what a loss draws; a copy, as some write into what they are given.
    torch.manual_seed(0)
    leaf = student.detach().clone().requires_grad_(wanted)
    value = function(leaf, teacher.clone())
    return value.detach().double(), torch.autograd.grad(value, leaf)[0].double() if wanted else None


def _relative(one: Tensor, two: Tensor) -> float:
    return float(torch.linalg.vector_norm(one - two) / torch.linalg.vector_norm(two))


def entropy(logits: Tensor, *_: Any) -> Tensor:
    """Mean entropy of the rows: what a cross-entropy has above the KL."""
    logs = logits.log_softmax(-1)
    return -(logs.exp() * logs).sum(-1).mean()
