"""Losses on what is particular to transformers: attention maps, relations of Q, K and V, normalised states.

Masks are ``[batch, tokens]`` as for all token products; a masked token is left out as query and as key.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from softs_lightning.losses.arithmetic import (
    DistillationLoss,
    Normalizer,
    check_same_shape,
    divisor,
    eager,
    full_precision,
    keep_valid,
    mean_over_rows,
    non_negative,
    positive,
    raised,
    unit_rows,
    whole,
)
from softs_lightning.losses.divergences import kl_rows

__all__ = [
    "PKD",
    "AttentionKL",
    "AttentionMSE",
    "MiniLMRelation",
    "attention_kl",
    "attention_mse",
    "minilm_relation",
    "patient_distance",
]


def _pairs(maps: Tensor, mask: Tensor | None) -> Tensor | None:
    """``[batch, 1, tokens, tokens]``: where query and key are both valid."""
    if maps.ndim != 4 or maps.shape[-1] != maps.shape[-2]:
        raise ValueError(f"attention maps are [batch, heads, tokens, tokens], got {tuple(maps.shape)}")
    if mask is None:
        return None
    if mask.shape != (maps.shape[0], maps.shape[-1]):
        raise ValueError(f"mask {tuple(mask.shape)} does not match the tokens of {tuple(maps.shape)}")
    valid = mask != 0
    return (valid[:, :, None] & valid[:, None, :]).unsqueeze(1)


@full_precision
def attention_mse(student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Mean squared error of attention maps (TinyBERT, arXiv:1909.10351).

    Args:
        student: ``[batch, heads, tokens, tokens]``, scores (as in the paper) or probabilities.
        teacher: the same shape.
        mask: ``[batch, tokens]``, nonzero where a token counts.

    Returns:
        The mean over heads and all pairs of valid tokens.

    >>> import torch
    >>> attention_mse(torch.ones(1, 2, 3, 3), torch.zeros(1, 2, 3, 3), mask=torch.tensor([[1, 1, 0]])).item()
    1.0
    """
    check_same_shape(student, teacher, "attention_mse")
    pairs = _pairs(student, mask)
    if pairs is None:
        return mean_over_rows((student - teacher).square())
    pairs = pairs.expand(student.shape)
    gap = student.masked_fill(~pairs, 0) - teacher.masked_fill(~pairs, 0)
    return mean_over_rows(gap.square(), pairs)


@full_precision
def attention_kl(student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """KL(teacher ‖ student) of attention *probabilities*, row by row (MiniLM, arXiv:2002.10957).

    Args:
        student: ``[batch, heads, tokens, tokens]``, summing to 1 over the last dimension (over the valid
            keys, where there is a mask).
        teacher: the same shape.
        mask: ``[batch, tokens]``, nonzero where a token counts.

    Returns:
        Summed over keys, averaged over heads and valid queries. Probabilities of 0 cost nothing on the
        teacher's side; on the student's they are read as the smallest normal number.

    >>> import torch
    >>> maps = torch.full((1, 2, 3, 3), 1 / 3)
    >>> attention_kl(maps, maps).item()
    0.0
    """
    check_same_shape(student, teacher, "attention_kl")
    pairs = _pairs(student, mask)
    if pairs is not None:
        student, teacher = (x.masked_fill(~pairs, 0) for x in (student, teacher))
    tiny = torch.finfo(student.dtype).tiny
    # Σ (student − teacher) is zero for probabilities; with it the gradient, too, is zero at the teacher.
    terms = teacher * (teacher.clamp_min(tiny).log() - student.clamp_min(tiny).log()) + student - teacher
    rows = terms.sum(-1).transpose(1, 2)  # [batch, queries, heads]: the mask leads
    return mean_over_rows(non_negative(rows), mask)


def _in_heads(states: Tensor, heads: int, mask: Tensor | None, side: str) -> Tensor:
    """``[batch, heads, tokens, width of a head]``, whatever heads the states came in."""
    if states.ndim == 4:  # [batch, its own heads, tokens, width]: regrouped
        states = states.transpose(1, 2).flatten(2)
    if states.ndim != 3:
        raise ValueError(f"{side} states are [batch, tokens, features], got {tuple(states.shape)}")
    batch, tokens, width = states.shape
    if width % heads:
        raise ValueError(f"{side} width {width} does not divide into {heads} relation heads")
    if mask is not None and mask.shape != (batch, tokens):
        raise ValueError(f"mask {tuple(mask.shape)} does not match the tokens of {tuple(states.shape)}")
    return keep_valid(states, mask).view(batch, tokens, heads, width // heads).transpose(1, 2)


def _relation(states: Tensor, scale: float, valid: Tensor | None) -> Tensor:
    """Log-probabilities ``[batch, heads, tokens, tokens]`` of scaled dot products within the states."""
    scores = states @ states.mT * scale
    if valid is not None:
        scores = scores.masked_fill(~valid[:, None, None, :], torch.finfo(scores.dtype).min / 4)
    return scores.log_softmax(-1)


# Entries of one block of relations, of which a handful of buffers exist: 4 MiB each in float32.
_BLOCK = 2**20


class _RelationSum(torch.autograd.Function):
    """The weighted sum of the rows' KL; gradients of the student's states are taken in the forward."""

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, weights: Tensor, valid: Tensor | None, temperature: float
    ) -> Tensor:
        batch, heads, tokens, _ = student.shape
        scales = [1 / (temperature * math.sqrt(x.shape[-1])) for x in (student, teacher)]
        total = student.new_zeros(())
        gradient = torch.empty_like(student)
        samples = max(_BLOCK // max(heads * tokens**2, 1), 1)
        for start in range(0, batch, samples):
            block = slice(start, start + samples)
            counted = None if valid is None else valid[block]
            log_student = _relation(student[block], scales[0], counted)
            log_teacher = _relation(teacher[block], scales[1], counted)
            weight = weights[block, None, :] / heads
            total += (kl_rows(log_student, log_teacher) * weight).sum()
            pull = log_student.exp_().sub_(log_teacher.exp_()).mul_(weight.unsqueeze(-1) * scales[0])
            # Each state is in its own row, as query, and in all others, as key.
            gradient[block] = (pull + pull.mT) @ student[block]
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return outer * gradient, None, None, None, None


@eager
def _relation_sum(*operands: Any) -> Tensor:
    total: Tensor = _RelationSum.apply(*operands)  # type: ignore[no-untyped-call]
    return total


@full_precision
def minilm_relation(
    student: Tensor,
    teacher: Tensor,
    *,
    heads: int,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
) -> Tensor:
    """Self-attention relations (MiniLMv2, arXiv:2012.15828; with values, MiniLM's value relation).

    The states (queries, keys or values) are regrouped into ``heads`` relation heads, whatever heads the
    models have, so that widths and head counts may differ; each token's scaled dot products with all
    tokens make a distribution, and KL(teacher ‖ student) is averaged over heads and valid tokens.

    The relations, batch × heads × tokens², are never held whole: samples are taken in blocks, with the
    gradient. Differentiable once; the teacher is a constant.

    Args:
        student: ``[batch, tokens, features]``, or ``[batch, heads, tokens, features]``, regrouped.
        teacher: likewise, with a width and heads of its own.
        heads: number of relation heads; divides both widths.
        temperature: divides the scaled dot products.
        mask: ``[batch, tokens]``, nonzero where a token counts.
        normalizer: what to divide by instead of the number of valid tokens.

    >>> import torch
    >>> states = torch.randn(2, 5, 8)
    >>> minilm_relation(states, states, heads=2).item()
    0.0
    """
    positive("temperature", temperature)
    whole("heads", heads)
    one, two = (_in_heads(x, heads, mask, side) for x, side in ((student, "student"), (teacher, "teacher")))
    if one.shape[:3] != two.shape[:3]:
        raise ValueError(
            f"relations are compared token by token, got student {tuple(student.shape)} and teacher "
            f"{tuple(teacher.shape)}"
        )
    valid = None if mask is None else mask.to(one.device) != 0
    counts = one.new_ones(one.shape[0], one.shape[2]) if valid is None else valid.to(one)
    weights = counts / divisor(counts.numel() if valid is None else counts.sum(), normalizer)
    return _relation_sum(one, two.detach(), weights, valid, temperature)


@full_precision
def patient_distance(
    student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
) -> Tensor:
    """Patient distillation (PKD, arXiv:1908.09355): squared distance of unit-length states, row by row.

    >>> import torch
    >>> patient_distance(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 3.0]])).item()
    2.0
    """
    check_same_shape(student, teacher, "patient_distance")
    gap = unit_rows(keep_valid(student, mask)) - unit_rows(keep_valid(teacher, mask))
    return mean_over_rows(gap.square().sum(-1), mask, normalizer)


class AttentionMSE(DistillationLoss):
    """TinyBERT's attention loss: :func:`~softs_lightning.losses.functional.attention_mse`.

    transformers' models return maps only under ``attn_implementation="eager"``.

    >>> import torch
    >>> AttentionMSE()(torch.ones(1, 2, 3, 3), torch.zeros(1, 2, 3, 3)).item()
    1.0
    """

    row_mean: ClassVar[bool] = False
    token_dims: ClassVar[tuple[int, ...]] = (2, 3)

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return attention_mse(student, teacher, mask=mask)


class AttentionKL(DistillationLoss):
    """MiniLM's attention loss on probabilities: :func:`~softs_lightning.losses.functional.attention_kl`.

    transformers' models return maps only under ``attn_implementation="eager"``.

    >>> import torch
    >>> AttentionKL()(torch.full((1, 2, 3, 3), 1 / 3), torch.full((1, 2, 3, 3), 1 / 3)).item()
    0.0
    """

    row_mean: ClassVar[bool] = False
    token_dims: ClassVar[tuple[int, ...]] = (2, 3)

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return attention_kl(student, teacher, mask=mask)


class MiniLMRelation(DistillationLoss):
    """MiniLMv2's relations: :func:`~softs_lightning.losses.functional.minilm_relation`.

    One pair each for queries, keys and values; with values alone and the teacher's head count, MiniLM's
    value relation.

    Args:
        heads: relation heads, dividing both widths.
        temperature: above 0.

    >>> import torch
    >>> states = torch.randn(2, 5, 12)
    >>> MiniLMRelation(heads=4)(states, states).item()
    0.0
    """

    same_shape: ClassVar[bool] = False

    def __init__(self, heads: int, temperature: float = 1.0) -> None:
        super().__init__()
        self.heads = whole("MiniLMRelation's heads", heads)
        self.temperature = positive("MiniLMRelation's temperature", temperature)

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        return minilm_relation(
            student,
            teacher,
            heads=self.heads,
            temperature=self.temperature,
            mask=mask,
            normalizer=normalizer,
        )


class PKD(DistillationLoss):
    """Patient distillation: :func:`~softs_lightning.losses.functional.patient_distance`.

    Args:
        token: the position compared of ``[batch, tokens, features]`` ([CLS] is 0, as in the paper), or
            ``None`` for all of them.

    >>> import torch
    >>> PKD()(torch.ones(2, 5, 8), 3 * torch.ones(2, 5, 8)).item()
    0.0
    """

    row_mean: ClassVar[bool] = False

    def __init__(self, token: int | None = 0) -> None:
        super().__init__()
        self.token = token

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        student, teacher = raised(student, teacher)
        check_same_shape(student, teacher, type(self).__name__)
        if self.token is not None and student.ndim == 3:
            if not -student.shape[1] <= self.token < student.shape[1]:
                raise ValueError(f"PKD compares token {self.token}, got {tuple(student.shape)}")
            if mask is not None and mask.shape != student.shape[:2]:
                raise ValueError(
                    f"PKD's mask {tuple(mask.shape)} does not match the tokens of {tuple(student.shape)}"
                )
            student, teacher = student[:, self.token], teacher[:, self.token]
            mask = None if mask is None else mask[:, self.token]
        return patient_distance(student, teacher, mask=mask, normalizer=normalizer)
