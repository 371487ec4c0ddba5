"""What enters the heads of a student and a teacher: checked, flattened to tokens, with those that count."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

from torch import Tensor

from softs_lightning.losses.arithmetic import raised
from softs_lightning.losses.heads import Head
from softs_lightning.losses.tokens import IGNORE

__all__ = ["HiddenStates"]


@dataclass(frozen=True)
class HiddenStates:
    """Hidden states of both sides, token by token.

    Attributes:
        student: ``[tokens, features]``.
        teacher: ``[tokens, its features]``, a constant.
        heads: the student's and the teacher's, of one vocabulary; the teacher's is a constant.
        rows: numbers of the tokens that count, or ``None`` for all.
        labels: ``[tokens]``, of the predictions, or ``None``.
    """

    student: Tensor
    teacher: Tensor
    heads: tuple[Head, Head]
    rows: Tensor | None
    labels: Tensor | None

    @property
    def count(self) -> int:
        """How many tokens count."""
        return len(self.student if self.rows is None else self.rows)

    @classmethod
    def of(
        cls,
        student: Tensor,
        teacher: Tensor,
        heads: tuple[Head, Head],
        mask: Tensor | None,
        labels: Tensor | None = None,
    ) -> HiddenStates:
        """From ``[..., features]`` a side, a mask ``[...]`` and labels ``[...]``, both of predictions.

        Raises:
            TypeError: for what is no tensor, or labels that are no whole numbers.
            ValueError: for shapes that do not agree, or labels outside the vocabulary.
        """
        raised(student, teacher)
        if not student.ndim or not teacher.ndim or student.shape[:-1] != teacher.shape[:-1]:
            raise ValueError(
                f"hidden states must agree in all but their features, got student {tuple(student.shape)} and "
                f"teacher {tuple(teacher.shape)}"
            )
        for side, hidden, head in (("student", student, heads[0]), ("teacher", teacher, heads[1])):
            if hidden.shape[-1] != head.weight.shape[1]:
                raise ValueError(
                    f"{side} hidden states have {hidden.shape[-1]} features, its head takes {head.weight.shape[1]}"
                )
        if student.ndim < 2:
            raise ValueError(
                f"hidden states are [..., features] of at least one token, got {tuple(student.shape)}"
            )
        one, two = _shared_vocabulary(*heads)
        tokens = student.shape[:-1]
        valid = None
        if mask is not None:
            if mask.shape != tokens:
                raise ValueError(f"mask {tuple(mask.shape)} does not match the tokens {tuple(tokens)}")
            valid = mask.to(student.device) != 0
        if labels is not None:
            labels = _checked(labels, tokens).to(student.device).long()
            valid = labels != IGNORE if valid is None else valid & (labels != IGNORE)
            scored = labels[valid]
            if len(scored) and not 0 <= int(scored.min()) <= int(scored.max()) < one.vocabulary:
                raise ValueError(
                    f"labels reach from {int(scored.min())} to {int(scored.max())}, the shared vocabulary has "
                    f"{one.vocabulary} entries; the label that is ignored is {IGNORE}"
                )
        bias = None if two.bias is None else two.bias.detach()
        return cls(
            student.flatten(0, -2),
            teacher.detach().flatten(0, -2),
            (one, Head(two.weight.detach(), bias, two.softcap, two.scale)),
            None if valid is None else valid.flatten().nonzero().squeeze(1),
            None if labels is None else labels.flatten(),
        )


def _checked(labels: Tensor, tokens: tuple[int, ...]) -> Tensor:
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"labels are a tensor of whole numbers, got {got}")
    if labels.shape != tokens:
        raise ValueError(f"labels {tuple(labels.shape)} do not match the tokens {tuple(tokens)}")
    return labels


def _shared_vocabulary(student: Head, teacher: Head) -> tuple[Head, Head]:
    if student.vocabulary == teacher.vocabulary:
        return student, teacher
    shared = min(student.vocabulary, teacher.vocabulary)
    warnings.warn(
        f"the student's head has {student.vocabulary} entries, the teacher's {teacher.vocabulary}: the first "
        f"{shared} are compared. That is right where the rest is padding of one and the same vocabulary",
        stacklevel=7,
    )
    return student.cut(shared), teacher.cut(shared)
