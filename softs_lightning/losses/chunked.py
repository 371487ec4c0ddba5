"""The softened KL on logits that are there already, in chunks of rows.

Written with whole tensors, a KL over a large vocabulary makes some ten passes over memory and keeps several
tensors as large as the logits for its backward. Here a chunk of rows is compared and differentiated while it
lies in the processor's cache, and the gradient is all that is kept. Masked rows are not looked at. Where the
logits need not exist at all, see :mod:`.linear`.
"""

from __future__ import annotations

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
    one_of,
    positive,
    whole,
)
from softs_lightning.losses.divergences import DIRECTIONS
from softs_lightning.losses.linear import _ACCELERATOR_LOGITS, _CPU_LOGITS, _kl_terms, _Plan, keeps_graph

__all__ = ["ChunkedKL", "chunked_kl"]

# A chunk and the handful of buffers that go with it are to stay in the cache of one core.
_SHARE = 8


class _ChunkedSum(torch.autograd.Function):
    """The sum over the chosen rows of ``[rows, classes]``, and its gradient, found in the forward."""

    @staticmethod
    def forward(ctx: Any, plan: _Plan, student: Tensor, teacher: Tensor, rows: Tensor | None) -> Tensor:
        wanted = ctx.needs_input_grad[1]
        gradient = None
        if wanted:
            gradient = torch.empty_like(student) if rows is None else torch.zeros_like(student)
        total = student.new_zeros(())
        for start in range(0, len(student) if rows is None else len(rows), plan.rows_per_chunk):
            place: Any = slice(start, start + plan.rows_per_chunk)
            place = place if rows is None else _together(rows[place])
            ours, within = _bounded(student[place])
            theirs, _ = _bounded(teacher[place])
            values, own = plan.divergence(
                plan.log_probabilities(ours, keep=True), plan.log_probabilities(theirs, keep=True)
            )
            total += values.sum()
            if gradient is not None:
                gradient[place] = own if within is None else own.mul_(within)
        ctx.gradient = gradient
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradient is None:
            raise RuntimeError(
                "the gradient of this chunked loss was handed over by its first backward; keep it for a second one with "
                "retain_graph=True, run the loss again, or use KLDivergence"
            )
        if keeps_graph():
            return None, ctx.gradient * outer, None, None
        # Scaled in place and given away: it is as large as the logits.
        gradient, ctx.gradient = ctx.gradient, None
        return None, gradient.mul_(outer), None, None


def _together(rows: Tensor) -> Any:
    """Numbers of rows, as a slice where they follow one another, which copies nothing."""
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first == len(rows) - 1 else rows


def _bounded(logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """Infinities read as ±√max, and where logits lay within, which alone have a gradient; ``None``: everywhere."""
    bound = torch.finfo(logits.dtype).max ** 0.5
    least, most = logits.aminmax()
    if float(least) >= -bound and float(most) <= bound:
        return logits, None
    return logits.clamp(-bound, bound), logits.abs() <= bound


@full_precision
@eager
def chunked_kl(
    student: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 1.0,
    direction: str = "forward",
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
    chunk_size: int | None = None,
) -> Tensor:
    """:func:`kl_divergence` in value and gradient, for large vocabularies: fewer passes and less memory.

    The teacher is a constant: it gets no gradient. There is no second derivative, and one backward but with
    ``retain_graph=True``.

    Args:
        student: logits ``[..., classes]``.
        teacher: logits of the same shape.
        temperature: divides both logits; the result is multiplied by its square.
        direction: ``"forward"``, ``"reverse"`` or ``"symmetric"``.
        mask: covers leading dimensions, nonzero where a row counts; other rows may hold anything.
        normalizer: what to divide by instead of the number of valid rows.
        chunk_size: rows in a chunk; by default what stays in a cache.

    Raises:
        ValueError: for unlike shapes or an unknown direction.

    >>> import torch
    >>> chunked_kl(torch.zeros(2, 2), torch.tensor([[2.0, 2.0], [0.0, 0.0]])).item()
    0.0
    """
    check_same_shape(student, teacher, "chunked_kl")
    positive("temperature", temperature)
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be 1 at least, got {chunk_size!r}")
    classes, shape = student.shape[-1], student.shape[:-1]
    if chunk_size is None:
        logits = _CPU_LOGITS // _SHARE if student.device.type == "cpu" else _ACCELERATOR_LOGITS
        chunk_size = max(logits // max(classes, 1), 1)
    rows = None
    if mask is not None:
        if mask.ndim > len(shape) or mask.shape != shape[: mask.ndim]:
            raise ValueError(
                f"mask {tuple(mask.shape)} does not cover the leading dimensions of {tuple(student.shape)}"
            )
        valid = (mask != 0).reshape(mask.shape + (1,) * (len(shape) - mask.ndim)).expand(shape)
        rows = valid.flatten().nonzero().squeeze(1)
    plan = _Plan(_kl_terms(direction), temperature, chunk_size)
    total: Tensor = _ChunkedSum.apply(  # type: ignore[no-untyped-call]
        plan, student.reshape(-1, classes), teacher.detach().reshape(-1, classes), rows
    )
    return total / divisor(shape.numel() if rows is None else len(rows), normalizer)


class ChunkedKL(DistillationLoss):
    """:class:`KLDivergence` for large vocabularies, in chunks of rows: :func:`~softs_lightning.losses.functional.chunked_kl`.

    Args:
        temperature: above 0.
        direction: ``"forward"``, ``"reverse"`` or ``"symmetric"``.
        chunk_size: rows in a chunk; by default what stays in a cache.

    >>> import torch
    >>> from softs_lightning.losses import KLDivergence
    >>> student, teacher = torch.randn(2, 3, 50)
    >>> torch.isclose(ChunkedKL(2.0)(student, teacher), KLDivergence(2.0)(student, teacher)).item()
    True
    """

    logits: ClassVar[bool] = True

    def __init__(
        self, temperature: float = 1.0, direction: str = "forward", *, chunk_size: int | None = None
    ) -> None:
        super().__init__()
        self.temperature = positive("ChunkedKL's temperature", temperature)
        self.direction = one_of("ChunkedKL's direction", direction, DIRECTIONS)
        self.chunk_size = None if chunk_size is None else whole("ChunkedKL's chunk_size", chunk_size)

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        return chunked_kl(
            student,
            teacher,
            temperature=self.temperature,
            direction=self.direction,
            mask=mask,
            normalizer=normalizer,
            chunk_size=self.chunk_size,
        )
