"""Divergences between the softmax distributions of two sets of logits.

Logits are ``[..., classes]``: summed over the classes, averaged over all leading dimensions (the valid
ones, where there is a mask). Infinite logits are read as ±√max of the dtype: a class at -inf on both sides
costs nothing, one that only the student excludes costs a very large, finite amount.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from softs_lightning.losses.arithmetic import (
    DistillationLoss,
    Normalizer,
    bounded_logits,
    check_same_shape,
    full_precision,
    keep_valid,
    mean_over_rows,
    non_negative,
    one_of,
    positive,
    unit_interval,
)

__all__ = [
    "DIRECTIONS",
    "GeneralizedJSD",
    "KLDivergence",
    "SkewedKL",
    "TotalVariation",
    "generalized_jsd",
    "jsd_rows",
    "kl_divergence",
    "kl_rows",
    "mixture_logs",
    "skewed_kl",
    "total_variation",
]

DIRECTIONS = ("forward", "reverse", "symmetric")


def _log_probabilities(
    student: Tensor, teacher: Tensor, temperature: float, mask: Tensor | None, what: str
) -> tuple[Tensor, Tensor]:
    check_same_shape(student, teacher, what)
    positive("temperature", temperature)
    return (
        torch.log_softmax(bounded_logits(keep_valid(student, mask), temperature), -1),
        torch.log_softmax(bounded_logits(keep_valid(teacher, mask), temperature), -1),
    )


def kl_rows(log_student: Tensor, log_teacher: Tensor, direction: str = "forward") -> Tensor:
    """KL divergence of each row of log-probabilities, in the given direction."""
    if direction == "forward":
        rows = (log_teacher.exp() * (log_teacher - log_student)).sum(-1)
    elif direction == "reverse":
        rows = (log_student.exp() * (log_student - log_teacher)).sum(-1)
    else:
        one_of("direction", direction, DIRECTIONS)
        rows = ((log_teacher.exp() - log_student.exp()) * (log_teacher - log_student)).sum(-1) / 2
    return non_negative(rows)


def mixture_logs(log_student: Tensor, log_teacher: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """log(M/S) and log(M/T) for M = beta·T + (1−beta)·S, exact also where beta or 1−beta is tiny.

    Taken against the component with the larger share, from the gap between the two: log M minus a log
    would leave only rounding of what is of the order of the smaller share.
    """
    if beta > 0.5:
        over_teacher, over_student = mixture_logs(log_teacher, log_student, 1 - beta)
        return over_student, over_teacher
    gap = log_teacher - log_student
    # Beyond e^80 (near float32's limit) M is beta·T to the last digit, and log(M/T) no longer moves.
    near = gap.clamp(max=80)
    over = torch.log1p(beta * torch.expm1(near))
    return over + (gap - near), over - near


def jsd_rows(log_student: Tensor, log_teacher: Tensor, beta: float = 0.5, normalized: bool = False) -> Tensor:
    """Generalised JSD of each row of log-probabilities; see :func:`generalized_jsd`."""
    if beta in (0, 1):
        return kl_rows(log_student, log_teacher, "forward" if beta == 0 else "reverse")
    over_student, over_teacher = mixture_logs(log_student, log_teacher, beta)
    terms = beta * log_teacher.exp() * over_teacher + (1 - beta) * log_student.exp() * over_student
    rows = non_negative(-terms.sum(-1))
    return rows / (beta * (1 - beta)) if normalized else rows


@full_precision
def kl_divergence(
    student: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 1.0,
    direction: str = "forward",
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
) -> Tensor:
    """Hinton's distillation loss: T² · KL between softened distributions (arXiv:1503.02531).

    ``forward`` is KL(teacher ‖ student) (mean-seeking), ``reverse`` is KL(student ‖ teacher)
    (mode-seeking, MiniLLM, arXiv:2306.08543), ``symmetric`` is half of their sum.

    Args:
        student: logits ``[..., classes]``.
        teacher: logits of the same shape.
        temperature: divides both logits; the factor T² keeps gradients of one size as T grows.
        direction: ``"forward"``, ``"reverse"`` or ``"symmetric"``.
        mask: ``[...]``, nonzero where a row counts.
        normalizer: what to divide by instead of the number of valid rows.

    Returns:
        A scalar in nats: summed over classes, averaged over the valid rows.

    Raises:
        ValueError: for unlike shapes or an unknown direction.

    >>> import torch
    >>> kl_divergence(torch.zeros(2, 2), torch.tensor([[2.0, 2.0], [0.0, 0.0]])).item()
    0.0
    """
    one_of("direction", direction, DIRECTIONS)
    logs = _log_probabilities(student, teacher, temperature, mask, "kl_divergence")
    return temperature**2 * mean_over_rows(kl_rows(*logs, direction), mask, normalizer)


@full_precision
def generalized_jsd(
    student: Tensor,
    teacher: Tensor,
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    normalized: bool = False,
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
) -> Tensor:
    """Generalised Jensen-Shannon divergence, T²-scaled (GKD, arXiv:2306.13649).

    ``JSD = beta·KL(T ‖ M) + (1−beta)·KL(S ‖ M)`` with ``M = beta·T + (1−beta)·S``. Towards the ends it
    vanishes like ``beta·(1−beta)`` times a KL: the forward one at 0, the reverse one at 1. At exactly 0 and 1
    it is that KL, as in the paper. Divided by ``beta·(1−beta)`` (``normalized=True``) it is continuous on all
    of [0, 1]; without, values near the ends are small and jump at them.

    Args:
        student: logits ``[..., classes]``.
        teacher: logits of the same shape.
        beta: the teacher's share of the mixture, in [0, 1]; 0 is the forward KL, 1 the reverse KL.
        temperature: divides both logits; the result is multiplied by its square.
        normalized: divide by ``beta·(1−beta)``.
        mask: ``[...]``, nonzero where a row counts.
        normalizer: what to divide by instead of the number of valid rows.

    Returns:
        A scalar in nats; at ``beta=0.5`` and T = 1 at most log 2.

    >>> import torch
    >>> apart = generalized_jsd(torch.tensor([[100.0, 0.0]]), torch.tensor([[0.0, 100.0]]))
    >>> round(apart.item(), 4)
    0.6931
    """
    unit_interval("beta", beta)
    logs = _log_probabilities(student, teacher, temperature, mask, "generalized_jsd")
    return temperature**2 * mean_over_rows(jsd_rows(*logs, beta, normalized), mask, normalizer)


@full_precision
def skewed_kl(
    student: Tensor,
    teacher: Tensor,
    *,
    skew: float = 0.1,
    temperature: float = 1.0,
    direction: str = "forward",
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
) -> Tensor:
    """KL to a mixture of both distributions (DistiLLM, arXiv:2402.03898), T²-scaled.

    ``forward``: KL(T ‖ skew·T + (1−skew)·S); ``reverse``: KL(S ‖ skew·S + (1−skew)·T). At ``skew=0`` these
    are the plain KL divergences. With skew > 0 the value is bounded by T²·log(1/skew).

    >>> import torch
    >>> student, teacher = torch.tensor([[100.0, 0.0]]), torch.tensor([[0.0, 100.0]])
    >>> round(skewed_kl(student, teacher, skew=0.1).item(), 4)
    2.3026
    """
    if unit_interval("skew", skew) == 1:
        raise ValueError(f"skew must lie in [0, 1), got {skew!r}: at 1 the loss is identically zero")
    log_student, log_teacher = _log_probabilities(student, teacher, temperature, mask, "skewed_kl")
    if one_of("direction", direction, DIRECTIONS[:2]) == "reverse":
        log_student, log_teacher = log_teacher, log_student
    if skew == 0:
        rows = kl_rows(log_student, log_teacher)
    else:
        rows = -(log_teacher.exp() * mixture_logs(log_student, log_teacher, skew)[1]).sum(-1)
    return temperature**2 * mean_over_rows(non_negative(rows), mask, normalizer)


@full_precision
def total_variation(
    student: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
) -> Tensor:
    """Total variation distance ``½ Σ |p_t − p_s|`` of softened distributions, in [0, 1] (arXiv:2307.15190).

    >>> import torch
    >>> total_variation(torch.tensor([[100.0, 0.0]]), torch.tensor([[0.0, 100.0]])).item()
    1.0
    """
    logs = _log_probabilities(student, teacher, temperature, mask, "total_variation")
    rows = (logs[0].exp() - logs[1].exp()).abs().sum(-1) / 2
    return mean_over_rows(rows, mask, normalizer)


class KLDivergence(DistillationLoss):
    """Hinton's softened KL with T² kept: :func:`~softs_lightning.losses.functional.kl_divergence`.

    Args:
        temperature: above 0.
        direction: ``"forward"``, ``"reverse"`` or ``"symmetric"``.

    >>> import torch
    >>> loss = KLDivergence(temperature=2.0)
    >>> round(loss(torch.zeros(1, 2), torch.tensor([[0.0, 2.0]])).item(), 4)
    0.4438
    """

    logits: ClassVar[bool] = True

    def __init__(self, temperature: float = 1.0, direction: str = "forward") -> None:
        super().__init__()
        self.temperature = positive("KLDivergence's temperature", temperature)
        self.direction = one_of("KLDivergence's direction", direction, DIRECTIONS)

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        return kl_divergence(
            student,
            teacher,
            temperature=self.temperature,
            direction=self.direction,
            mask=mask,
            normalizer=normalizer,
        )


class GeneralizedJSD(DistillationLoss):
    """GKD's divergence: :func:`~softs_lightning.losses.functional.generalized_jsd`.

    Args:
        beta: the teacher's share of the mixture, in [0, 1]; 0 is the forward KL, 1 the reverse KL.
        temperature: above 0.
        normalized: divide by ``beta·(1−beta)``, which makes it continuous at both ends.

    >>> import torch
    >>> student, teacher = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
    >>> ends = [GeneralizedJSD(beta, normalized=True)(student, teacher) for beta in (0, 1e-6)]
    >>> torch.isclose(*ends).item()
    True
    """

    logits: ClassVar[bool] = True

    def __init__(self, beta: float = 0.5, temperature: float = 1.0, *, normalized: bool = False) -> None:
        super().__init__()
        self.beta = unit_interval("GeneralizedJSD's beta", beta)
        self.temperature = positive("GeneralizedJSD's temperature", temperature)
        self.normalized = normalized

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        return generalized_jsd(
            student,
            teacher,
            beta=self.beta,
            temperature=self.temperature,
            normalized=self.normalized,
            mask=mask,
            normalizer=normalizer,
        )


class SkewedKL(DistillationLoss):
    """DistiLLM's skewed KL: :func:`~softs_lightning.losses.functional.skewed_kl`.

    >>> import torch
    >>> SkewedKL(0.1)(torch.ones(2, 3), torch.ones(2, 3)).item()
    0.0
    """

    logits: ClassVar[bool] = True

    def __init__(self, skew: float = 0.1, temperature: float = 1.0, direction: str = "forward") -> None:
        super().__init__()
        if unit_interval("SkewedKL's skew", skew) == 1:
            raise ValueError(
                f"SkewedKL's skew must lie in [0, 1), got {skew!r}: at 1 the loss is identically zero"
            )
        self.skew = skew
        self.temperature = positive("SkewedKL's temperature", temperature)
        self.direction = one_of("SkewedKL's direction", direction, DIRECTIONS[:2])

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        return skewed_kl(
            student,
            teacher,
            skew=self.skew,
            temperature=self.temperature,
            direction=self.direction,
            mask=mask,
            normalizer=normalizer,
        )


class TotalVariation(DistillationLoss):
    """Total variation distance: :func:`~softs_lightning.losses.functional.total_variation`.

    >>> import torch
    >>> TotalVariation()(torch.ones(2, 3), torch.ones(2, 3)).item()
    0.0
    """

    logits: ClassVar[bool] = True

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = positive("TotalVariation's temperature", temperature)

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        return total_variation(
            student, teacher, temperature=self.temperature, mask=mask, normalizer=normalizer
        )
