"""Losses on logits that never exist whole: from hidden states and heads, in chunks of rows.

The logits of a language model, tokens × vocabulary, are by far its largest tensor. Here each chunk of
tokens is projected, compared and differentiated before the next; what is kept is the gradient of the
hidden states and of the head, which is all that the backward needs. The teacher's side is a constant: no
gradient is computed for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from softs_lightning.losses.arithmetic import (
    Normalizer,
    divisor,
    eager,
    named,
    one_of,
    positive,
    unit_interval,
    whole,
)
from softs_lightning.losses.divergences import DIRECTIONS, mixture_logs
from softs_lightning.losses.heads import Head
from softs_lightning.losses.hidden import HiddenStates
from softs_lightning.losses.tokens import next_labels

__all__ = ["linear_ce_kl", "linear_jsd", "linear_kl"]

# Logits in a chunk where no chunk size is given, of which a handful of buffers exist: 8 MiB each in float32
# on a CPU, where the caches gain from more of them little; an accelerator wants larger products.
_CPU_LOGITS, _ACCELERATOR_LOGITS = 2**21, 2**26

# From log-probabilities of a chunk (may be overwritten): the value of each row, and its gradient with
# respect to the student's logits, which for a function L of probabilities S is S · (u − Σ S·u), u = dL/dS.
Terms = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _kl_terms(direction: str) -> Terms:
    def forward(log_student: Tensor, log_teacher: Tensor) -> tuple[Tensor, Tensor]:
        gap = log_teacher - log_student
        teacher = log_teacher.exp_()
        rows = gap.mul_(teacher).sum(-1)
        return rows, log_student.exp_().sub_(teacher)

    def reverse(log_student: Tensor, log_teacher: Tensor) -> tuple[Tensor, Tensor]:
        gap = log_student - log_teacher
        student = log_student.exp_()
        rows = torch.mul(gap, student, out=log_teacher).sum(-1)
        return rows, gap.sub_(rows.unsqueeze(-1)).mul_(student)

    def symmetric(log_student: Tensor, log_teacher: Tensor) -> tuple[Tensor, Tensor]:
        one, two = forward(log_student.clone(), log_teacher.clone()), reverse(log_student, log_teacher)
        return (one[0] + two[0]) / 2, one[1].add_(two[1]).div_(2)

    terms = {"forward": forward, "reverse": reverse, "symmetric": symmetric}
    return terms[one_of("direction", direction, DIRECTIONS)]


def _jsd_terms(beta: float, normalized: bool) -> Terms:
    if unit_interval("beta", beta) in (0, 1):
        return _kl_terms("forward" if beta == 0 else "reverse")
    weight = 1 / (beta * (1 - beta)) if normalized else 1.0

    def terms(log_student: Tensor, log_teacher: Tensor) -> tuple[Tensor, Tensor]:
        over_student, over_teacher = mixture_logs(log_student, log_teacher, beta)
        student, teacher = log_student.exp_(), log_teacher.exp_()
        pull = over_student.mul_(student).mul_(-weight * (1 - beta))
        sums = pull.sum(-1)
        rows = sums - weight * beta * over_teacher.mul_(teacher).sum(-1)
        return rows, pull.sub_(student.mul_(sums.unsqueeze(-1)))

    return terms


@dataclass(frozen=True)
class _Plan:
    """What to compute of each chunk: ``soft`` of the divergence (T²-scaled), ``hard`` of the cross-entropy."""

    terms: Terms
    temperature: float
    rows_per_chunk: int
    soft: float = 1.0
    hard: float = 0.0

    def log_probabilities(self, logits: Tensor, keep: bool = False) -> Tensor:
        """Softened log-probabilities; overwrites the logits unless they are to be kept."""
        if self.temperature != 1:
            logits = logits / self.temperature if keep else logits.div_(self.temperature)
        return logits.log_softmax(-1)

    def divergence(self, log_student: Tensor, log_teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Values and gradients of a chunk's rows; overwrites what it is given."""
        rows, gradient = self.terms(log_student, log_teacher)
        # Rounding alone can leave a divergence below zero.
        rows = rows.clamp_min_(0) * (self.soft * self.temperature**2)
        weight = self.soft * self.temperature
        return rows, gradient if weight == 1 else gradient.mul_(weight)

    def cross_entropy(self, logits: Tensor, labels: Tensor, gradient: Tensor) -> Tensor:
        """Values of a chunk's rows; their gradient is added to ``gradient``."""
        log_student = logits.log_softmax(-1)
        target = labels.unsqueeze(-1)
        rows = log_student.gather(-1, target).squeeze(-1) * -self.hard
        gradient.add_(log_student.exp_(), alpha=self.hard)
        gradient.scatter_add_(-1, target, gradient.new_full((), -self.hard).expand(target.shape))
        return rows


class _ChunkedSum(torch.autograd.Function):
    """The sum of a plan's rows; its gradients are taken chunk by chunk in the forward."""

    @staticmethod
    def forward(
        ctx: Any,
        plan: _Plan,
        heads: tuple[Head, Head],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        teacher_hidden: Tensor,
        labels: Tensor | None,
        rows: Tensor | None,
    ) -> Tensor:
        _, _, wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        # As in the model itself, products are in the dtype of their operands; all else is in a wide one.
        narrow = torch.promote_types(hidden.dtype, weight.dtype)
        wide = torch.promote_types(narrow, torch.float32)
        student, teacher = (
            heads[0].to(narrow),
            heads[1].to(torch.promote_types(teacher_hidden.dtype, heads[1].weight.dtype)),
        )
        total = hidden.new_zeros((), dtype=wide)
        hidden_grad = torch.zeros_like(hidden) if wants_hidden else None
        # Sums over all tokens: in the wide dtype, or small tokens would vanish beside what is there.
        weight_grad = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        bias_grad = torch.zeros_like(weight[:, 0], dtype=wide) if wants_bias else None
        for start in range(0, len(hidden if rows is None else rows), plan.rows_per_chunk):
            # Gathered a chunk at a time: all valid rows at once would be a copy of all hidden states.
            chunk: slice | Tensor = slice(start, start + plan.rows_per_chunk)
            chunk = chunk if rows is None else rows[chunk]
            logits = _bounded(student.logits(hidden[chunk]))
            keep = labels is not None or student.softcap is not None
            log_student = plan.log_probabilities(logits, keep)
            if not keep:
                logits = logits[:0].clone()  # as large as the chunk: gone before the teacher's are made
            log_teacher = plan.log_probabilities(_bounded(teacher.logits(teacher_hidden[chunk]).to(wide)))
            values, gradient = plan.divergence(log_student, log_teacher)
            total += values.sum()
            if labels is not None:
                total += plan.cross_entropy(logits, labels[chunk], gradient).sum()
            if not (wants_hidden or wants_weight or wants_bias):
                continue
            if student.softcap is not None:  # the derivative of c·tanh(x/c) is 1 − tanh²
                gradient.mul_(1 - (logits / student.softcap).square_())
            if student.scale != 1:
                gradient.mul_(student.scale)
            if bias_grad is not None:
                bias_grad += gradient.sum(0)
            gradient = gradient.to(narrow)
            if hidden_grad is not None:
                hidden_grad[chunk] = gradient @ student.weight
            if weight_grad is not None:
                _add_product(weight_grad, gradient.t(), hidden[chunk].to(narrow))
        ctx.gradients = (hidden_grad, weight_grad, bias_grad)
        ctx.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the gradients of this chunked loss were handed over by its first backward; keep them for a "
                "second one with retain_graph=True, run the loss again, or use the same loss on the logits"
            )
        if keeps_graph():
            given = [None if grad is None else grad * outer for grad in ctx.gradients]
        else:
            # Scaled in place and given away: the head's gradient is as large as the head.
            given = [None if grad is None else grad.mul_(outer) for grad in ctx.gradients]
            ctx.gradients = None
        hidden, weight, bias = (
            None if grad is None else grad.to(dtype) for grad, dtype in zip(given, ctx.dtypes, strict=True)
        )
        return None, None, hidden, weight, bias, None, None, None


def keeps_graph() -> bool:
    """Whether the backward that runs now was asked to keep the graph for another one."""
    # GradientBalance and its like differentiate each term before the whole.
    return torch._C._autograd._get_current_graph_task_keep_graph()


def _bounded(logits: Tensor) -> Tensor:
    bound = torch.finfo(logits.dtype).max ** 0.5
    return logits.clamp_(-bound, bound)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


@eager
def _chunked_mean(
    student: Tensor,
    teacher: Tensor,
    heads: tuple[Head, Head],
    terms: Terms,
    *,
    temperature: float,
    mask: Tensor | None,
    normalizer: Normalizer,
    chunk_size: int | None,
    labels: Tensor | None = None,
    hard: float = 0.0,
) -> Tensor:
    positive("temperature", temperature)
    states = HiddenStates.of(student, teacher, heads, mask, labels)
    student_head = states.heads[0]
    if chunk_size is None:
        logits = _CPU_LOGITS if student.device.type == "cpu" else _ACCELERATOR_LOGITS
        chunk_size = max(logits // student_head.vocabulary, 16)
    plan = _Plan(terms, temperature, whole("chunk_size", chunk_size), soft=1 - hard, hard=hard)
    with torch.autocast(student.device.type, enabled=False):
        total: Tensor = _ChunkedSum.apply(  # type: ignore[no-untyped-call]
            plan,
            states.heads,
            states.student,
            student_head.weight,
            student_head.bias,
            states.teacher,
            states.labels,
            states.rows,
        )
    return total / divisor(states.count, normalizer)


@named
def linear_kl(
    student: Tensor,
    teacher: Tensor,
    student_head: Head,
    teacher_head: Head,
    *,
    temperature: float = 1.0,
    direction: str = "forward",
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
    chunk_size: int | None = None,
) -> Tensor:
    """``kl_divergence`` of the logits of two heads, without ever holding them.

    Args:
        student: the hidden states that enter the student's head, ``[..., features]``.
        teacher: those that enter the teacher's, ``[..., its features]``, with the same leading dimensions.
        student_head: receives gradients where its tensors require them.
        teacher_head: a constant, and so is ``teacher``.
        temperature: divides the logits; the result is multiplied by its square.
        direction: ``"forward"``, ``"reverse"`` or ``"symmetric"``.
        mask: ``[...]``, nonzero where a token counts; only these tokens are projected.
        normalizer: what to divide by instead of the number of valid tokens.
        chunk_size: tokens at a time; by default as many as make 2 Mi logits on a CPU, 64 Mi elsewhere.

    Returns:
        The mean over the valid tokens, in float32 at least.

    >>> import torch
    >>> head = Head(torch.eye(3))
    >>> linear_kl(torch.ones(2, 3), torch.ones(2, 3), head, head).item()
    0.0
    """
    return _chunked_mean(
        student,
        teacher,
        (student_head, teacher_head),
        _kl_terms(direction),
        temperature=temperature,
        mask=mask,
        normalizer=normalizer,
        chunk_size=chunk_size,
    )


@named
def linear_jsd(
    student: Tensor,
    teacher: Tensor,
    student_head: Head,
    teacher_head: Head,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    normalized: bool = False,
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
    chunk_size: int | None = None,
) -> Tensor:
    """``generalized_jsd`` of the logits of two heads, without ever holding them; see :func:`linear_kl`.

    >>> import torch
    >>> head = Head(100 * torch.eye(2))
    >>> apart = linear_jsd(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]]), head, head)
    >>> round(apart.item(), 4)
    0.6931
    """
    return _chunked_mean(
        student,
        teacher,
        (student_head, teacher_head),
        _jsd_terms(beta, normalized),
        temperature=temperature,
        mask=mask,
        normalizer=normalizer,
        chunk_size=chunk_size,
    )


@named
def linear_ce_kl(
    student: Tensor,
    teacher: Tensor,
    student_head: Head,
    teacher_head: Head,
    labels: Tensor,
    *,
    hard: float = 0.5,
    temperature: float = 1.0,
    direction: str = "forward",
    shift: bool = True,
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
    chunk_size: int | None = None,
) -> Tensor:
    """``hard · cross-entropy + (1 − hard) · T² · KL`` of the same tokens, in one pass over the chunks.

    Args:
        student: the hidden states that enter the student's head, ``[batch, tokens, features]``.
        teacher: those that enter the teacher's.
        student_head: receives gradients where its tensors require them.
        teacher_head: a constant, and so is ``teacher``.
        labels: ``[batch, tokens]``; -100 is ignored, by both terms.
        hard: the share of the cross-entropy, in [0, 1]; it is taken at temperature 1.
        temperature: of the KL.
        direction: of the KL.
        shift: labels are those of the inputs (as in transformers): the one at ``t + 1`` belongs to the
            prediction at ``t``. ``False`` where the batch holds them already shifted.
        mask: ``[batch, tokens]``, nonzero where a prediction counts, beside the labels.
        normalizer: what to divide by instead of the number of valid tokens.
        chunk_size: tokens at a time.

    >>> import torch
    >>> head, hidden = Head(100 * torch.eye(3)), torch.eye(3)[None]
    >>> linear_ce_kl(hidden, hidden, head, head, torch.tensor([[0, 0, 1]]), hard=1.0).item()
    0.0
    """
    unit_interval("hard", hard)
    if shift:
        labels = next_labels(labels)
    return _chunked_mean(
        student,
        teacher,
        (student_head, teacher_head),
        _kl_terms(direction),
        temperature=temperature,
        mask=mask,
        normalizer=normalizer,
        chunk_size=chunk_size,
        labels=labels,
        hard=hard,
    )
