"""Logit losses beyond the plain divergences: decoupled, relational, standardised, mixed, sparse, binary."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from softs_lightning.losses.arithmetic import (
    DistillationLoss,
    Normalizer,
    bounded_logits,
    check_same_shape,
    full_precision,
    keep_valid,
    mean_over_rows,
    one_of,
    pick,
    positive,
    unit_interval,
    unit_rows,
    valid_rows,
    weight,
    whole,
)
from softs_lightning.losses.divergences import DIRECTIONS, kl_rows
from softs_lightning.losses.tokens import IGNORE, BatchKey, check_segments, labels_of, next_labels

__all__ = [
    "CEKL",
    "DIST",
    "DKD",
    "ULD",
    "SigmoidKL",
    "StandardizedKL",
    "TopKKL",
    "ce_kl",
    "dist",
    "dkd",
    "sigmoid_kl",
    "standardized_kl",
    "topk_kl",
    "uld",
]


def _labelled(student: Tensor, labels: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Labels that may be gathered by, and the mask of the rows that have one."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"labels are a tensor of whole numbers, got {got}")
    labels = labels.to(student.device)
    if mask is not None and mask.shape != labels.shape:
        raise ValueError(f"mask {tuple(mask.shape)} does not match the labels {tuple(labels.shape)}")
    if labels.shape != student.shape[:-1]:
        raise ValueError(f"labels {tuple(labels.shape)} do not match logits {tuple(student.shape)}")
    valid = labels != IGNORE
    # On a device, looking would wait for it at each step; there, gathering itself fails.
    looking = labels.device.type == "cpu" and not torch.compiler.is_compiling()
    if looking and bool(valid.any()):
        low, high = int(labels[valid].min()), int(labels[valid].max())
        if low < 0 or high >= student.shape[-1]:
            raise ValueError(
                f"labels reach from {low} to {high}, the logits have {student.shape[-1]} classes; {IGNORE} is ignored"
            )
    labels = labels.long().clamp_min(0)
    return labels.unsqueeze(-1), valid if mask is None else valid & (mask != 0)


@full_precision
def dkd(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 8.0,
    temperature: float = 4.0,
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
) -> Tensor:
    """Decoupled knowledge distillation (arXiv:2203.08679): ``T² · (alpha · TCKD + beta · NCKD)``.

    TCKD is the binary KL of target against all the rest, NCKD the KL among the rest. With ``alpha = 1`` and
    ``beta = 1 − p_t(target)`` it would be the plain KL.

    Args:
        student: logits ``[..., classes]``.
        teacher: logits of the same shape.
        labels: ``[...]`` true classes; rows labelled -100 are left out.
        alpha: weight of the target term.
        beta: weight of the non-target term.
        temperature: divides the logits.
        mask: ``[...]``, nonzero where a row counts.
        normalizer: what to divide by instead of the number of valid rows.

    >>> import torch
    >>> logits = torch.tensor([[1.0, 2.0, 3.0]])
    >>> dkd(logits, logits + 5, torch.tensor([2])).item()
    0.0
    """
    check_same_shape(student, teacher, "dkd")
    positive("temperature", temperature)
    target, valid = _labelled(student, labels, mask)
    binary, rest = [], []
    for logits in (student, teacher):
        logits = bounded_logits(keep_valid(logits, valid), temperature)
        # Far below all else, yet finite: it has no share in the rest, and 0 · (−∞ − −∞) does not arise.
        others = logits.scatter(-1, target, torch.finfo(logits.dtype).min / 4)
        rest.append(others.log_softmax(-1))
        binary.append(
            torch.stack([logits.gather(-1, target).squeeze(-1), others.logsumexp(-1)], -1).log_softmax(-1)
        )
    rows = alpha * kl_rows(binary[0], binary[1]) + beta * kl_rows(rest[0], rest[1])
    return temperature**2 * mean_over_rows(rows, valid, normalizer)


@full_precision
def dist(
    student: Tensor,
    teacher: Tensor,
    *,
    inter: float = 1.0,
    intra: float = 1.0,
    temperature: float = 1.0,
    mask: Tensor | None = None,
) -> Tensor:
    """DIST (arXiv:2205.10536): one minus Pearson's correlation of probabilities, by rows and by columns.

    ``T² · (inter · mean over samples + intra · mean over classes)``. Taken as half the squared distance
    of the centred unit vectors, which is the same and never below zero; two constant vectors are at 0.

    Args:
        student: logits ``[..., classes]``; all leading dimensions together are the batch.
        teacher: logits of the same shape.
        inter: weight of the correlation over the classes of each sample.
        intra: weight of the correlation over the batch of each class.
        temperature: divides the logits.
        mask: ``[...]``, nonzero where a row counts.

    >>> import torch
    >>> logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 5.0, 1.0]])
    >>> dist(logits, logits + 5).item()
    0.0
    """
    check_same_shape(student, teacher, "dist")
    positive("temperature", temperature)
    one, two = (bounded_logits(valid_rows(x, mask), temperature).softmax(-1) for x in (student, teacher))
    by_sample = mean_over_rows(_correlation_gap(one, two, -1))
    # Of no sample there is no column either; its mean would be NaN.
    by_class = mean_over_rows(_correlation_gap(one, two, 0)) if len(one) else one.sum()
    return temperature**2 * (inter * by_sample + intra * by_class)


def _correlation_gap(student: Tensor, teacher: Tensor, dim: int) -> Tensor:
    one, two = (unit_rows(x - x.mean(dim, keepdim=True), dim) for x in (student, teacher))
    return (one - two).square().sum(dim) / 2


@full_precision
def standardized_kl(
    student: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 2.0,
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
) -> Tensor:
    """Logit standardisation (arXiv:2403.01427): T² · KL of z-scored logits.

    Each row is centred and divided by its (unbiased) standard deviation, so that only the shape of the
    logits is compared, not their range. Zero wherever student rows are a·teacher + b with a > 0.

    >>> import torch
    >>> logits = torch.tensor([[1.0, 2.0, 4.0]])
    >>> round(standardized_kl(3 * logits + 1, logits).item(), 6)
    0.0
    """
    check_same_shape(student, teacher, "standardized_kl")
    positive("temperature", temperature)
    logs = []
    for logits in (student, teacher):
        logits = bounded_logits(keep_valid(logits, mask))
        # Unit length times √(n−1) is a z-score, and does not overflow on the way.
        scores = unit_rows(logits - logits.mean(-1, keepdim=True)) * (logits.shape[-1] - 1) ** 0.5
        logs.append((scores / temperature).log_softmax(-1))
    return temperature**2 * mean_over_rows(kl_rows(logs[0], logs[1]), mask, normalizer)


@full_precision
def ce_kl(
    student: Tensor,
    teacher: Tensor,
    labels: Tensor,
    *,
    hard: float = 0.5,
    temperature: float = 1.0,
    direction: str = "forward",
    shift: bool = False,
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
) -> Tensor:
    """``hard · cross-entropy + (1 − hard) · T² · KL``, both over the rows that have a label.

    Args:
        student: logits ``[..., classes]``.
        teacher: logits of the same shape.
        labels: ``[...]``; -100 is ignored by both terms.
        hard: the share of the cross-entropy, in [0, 1]; it is taken at temperature 1.
        temperature: of the KL.
        direction: of the KL.
        shift: labels are those of the inputs: the one at ``t + 1`` belongs to the logits at ``t``.
        mask: ``[...]``, nonzero where a row counts, beside the labels.
        normalizer: what to divide by instead of the number of valid rows.

    >>> import torch
    >>> logits = torch.tensor([[100.0, 0.0]])
    >>> ce_kl(logits, logits, torch.tensor([0])).item()
    0.0
    """
    check_same_shape(student, teacher, "ce_kl")
    positive("temperature", temperature)
    unit_interval("hard", hard)
    target, valid = _labelled(student, next_labels(labels) if shift else labels, mask)
    student, teacher = (bounded_logits(keep_valid(x, valid)) for x in (student, teacher))
    cross_entropy = -student.log_softmax(-1).gather(-1, target).squeeze(-1)
    logs = [(x / temperature).log_softmax(-1) for x in (student, teacher)]
    soft = kl_rows(logs[0], logs[1], direction)
    rows = hard * cross_entropy + (1 - hard) * temperature**2 * soft
    return mean_over_rows(rows, valid, normalizer)


@full_precision
def topk_kl(
    student: Tensor,
    teacher: Tensor,
    *,
    k: int,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
) -> Tensor:
    """T² · KL over the teacher's k likeliest classes and one bucket with all the others.

    A lower bound of the full KL that reaches it as k grows. The tail is kept: renormalised top-k
    probabilities would let the student put any mass outside at no cost. Its mass is summed in log space
    (1 − Σp has no digits left where the teacher is sure).

    >>> import torch
    >>> student, teacher = torch.tensor([[0.0, 0.0, 0.0, 9.0]]), torch.tensor([[5.0, 5.0, 0.0, 0.0]])
    >>> topk_kl(student, teacher, k=2) > 5  # renormalised, this would be 0
    tensor(True)
    """
    check_same_shape(student, teacher, "topk_kl")
    positive("temperature", temperature)
    whole("k", k)
    student, teacher = (bounded_logits(keep_valid(x, mask), temperature) for x in (student, teacher))
    if k < student.shape[-1]:
        top = teacher.topk(k, -1).indices
        student, teacher = (
            torch.cat([x.gather(-1, top), _without(x, top).logsumexp(-1, keepdim=True)], -1)
            for x in (student, teacher)
        )
    rows = kl_rows(student.log_softmax(-1), teacher.log_softmax(-1))
    return temperature**2 * mean_over_rows(rows, mask, normalizer)


def _without(logits: Tensor, classes: Tensor) -> Tensor:
    return logits.scatter(-1, classes, torch.finfo(logits.dtype).min / 4)


@full_precision
def sigmoid_kl(
    student: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
) -> Tensor:
    """T² · KL of independent Bernoullis, for multi-label classifiers (MLD of L2D, arXiv:2308.06453).

    Summed over the classes, averaged over the rows.

    >>> import torch
    >>> logits = torch.tensor([[1.0, -2.0]])
    >>> sigmoid_kl(logits, logits).item()
    0.0
    """
    check_same_shape(student, teacher, "sigmoid_kl")
    positive("temperature", temperature)
    student, teacher = (bounded_logits(keep_valid(x, mask), temperature) for x in (student, teacher))
    logs = [torch.stack([F.logsigmoid(x), F.logsigmoid(-x)], -1) for x in (student, teacher)]
    return temperature**2 * mean_over_rows(kl_rows(logs[0], logs[1]).sum(-1), mask, normalizer)


@full_precision
def uld(
    student: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 1.0,
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
) -> Tensor:
    """Universal logit distillation for unlike vocabularies (arXiv:2402.12030).

    The Wasserstein distance under a uniform cost: L1 between *sorted* probabilities, the shorter
    vocabulary filled up with zeros. It compares how sure both are, not of what.

    Args:
        student: logits ``[..., classes]``.
        teacher: logits ``[..., its classes]`` at the same positions.
        temperature: divides both logits.
        mask: ``[...]``, nonzero where a row counts.
        normalizer: what to divide by instead of the number of valid rows.

    >>> import torch
    >>> round(uld(torch.tensor([[100.0, 0.0]]), torch.tensor([[0.0, 0.0, 100.0]])).item(), 6)
    0.0
    """
    positive("temperature", temperature)
    if student.shape[:-1] != teacher.shape[:-1] or not student.ndim or not teacher.ndim:
        raise ValueError(
            f"uld compares logits at the same positions, got student {tuple(student.shape)} and teacher "
            f"{tuple(teacher.shape)}"
        )
    one, two = (
        bounded_logits(keep_valid(x, mask), temperature).softmax(-1).sort(-1, descending=True).values
        for x in (student, teacher)
    )
    width = max(one.shape[-1], two.shape[-1])
    one, two = (F.pad(x, (0, width - x.shape[-1])) for x in (one, two))
    return mean_over_rows((one - two).abs().sum(-1), mask, normalizer)


class DKD(DistillationLoss):
    """Decoupled knowledge distillation: :func:`~softs_lightning.losses.functional.dkd`.

    Args:
        alpha: weight of the target term.
        beta: weight of the non-target term.
        temperature: above 0.
        labels: key or position in the batch, or a function of the batch, that gives the true classes.

    >>> import torch
    >>> logits = torch.tensor([[1.0, 2.0, 3.0]])
    >>> DKD()(logits, logits, batch={"labels": torch.tensor([2])}).item()
    0.0
    """

    logits: ClassVar[bool] = True

    def __init__(
        self, alpha: float = 1.0, beta: float = 8.0, temperature: float = 4.0, *, labels: BatchKey = "labels"
    ) -> None:
        super().__init__()
        self.alpha = weight("DKD's alpha", alpha)
        self.beta = weight("DKD's beta", beta)
        self.temperature = positive("DKD's temperature", temperature)
        self.labels = labels

    def forward(
        self,
        student: Tensor,
        teacher: Tensor,
        *,
        batch: Any,
        mask: Tensor | None = None,
        normalizer: Normalizer = None,
    ) -> Tensor:
        labels = pick(batch, self.labels, type(self).__name__)
        return dkd(
            student,
            teacher,
            labels,
            alpha=self.alpha,
            beta=self.beta,
            temperature=self.temperature,
            mask=mask,
            normalizer=normalizer,
        )


class DIST(DistillationLoss):
    """Correlation of probabilities: :func:`~softs_lightning.losses.functional.dist`.

    >>> import torch
    >>> DIST()(torch.eye(3), torch.eye(3)).item()
    0.0
    """

    logits: ClassVar[bool] = True
    row_mean: ClassVar[bool] = False

    def __init__(self, inter: float = 1.0, intra: float = 1.0, temperature: float = 1.0) -> None:
        super().__init__()
        self.inter = weight("DIST's inter", inter)
        self.intra = weight("DIST's intra", intra)
        self.temperature = positive("DIST's temperature", temperature)

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return dist(
            student, teacher, inter=self.inter, intra=self.intra, temperature=self.temperature, mask=mask
        )


class StandardizedKL(DistillationLoss):
    """KL of z-scored logits: :func:`~softs_lightning.losses.functional.standardized_kl`.

    >>> import torch
    >>> StandardizedKL()(torch.eye(3), torch.eye(3)).item()
    0.0
    """

    logits: ClassVar[bool] = True

    def __init__(self, temperature: float = 2.0) -> None:
        super().__init__()
        self.temperature = positive("StandardizedKL's temperature", temperature)

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        return standardized_kl(
            student, teacher, temperature=self.temperature, mask=mask, normalizer=normalizer
        )


class CEKL(DistillationLoss):
    """Hard and soft labels mixed: :func:`~softs_lightning.losses.functional.ce_kl`.

    Args:
        hard: share of the cross-entropy, in [0, 1].
        temperature: of the KL, above 0.
        direction: of the KL.
        labels: key or position in the batch, or a function of the batch; -100 is ignored.
        shift: the labels are the inputs' own (transformers' convention) and are shifted here, once.
        segments: where several documents are packed into one row, what of the batch numbers them: no
            prediction is scored across an end. Like ``labels``, a key, a position or a function.

    >>> import torch
    >>> logits = torch.tensor([[100.0, 0.0]])
    >>> CEKL()(logits, logits, batch={"labels": torch.tensor([0])}).item()
    0.0
    """

    logits: ClassVar[bool] = True
    divergence: ClassVar[bool] = False

    def __init__(
        self,
        hard: float = 0.5,
        temperature: float = 1.0,
        direction: str = "forward",
        *,
        labels: BatchKey = "labels",
        shift: bool = False,
        segments: BatchKey | None = None,
    ) -> None:
        super().__init__()
        self.hard = unit_interval("CEKL's hard", hard)
        self.temperature = positive("CEKL's temperature", temperature)
        self.direction = one_of("CEKL's direction", direction, DIRECTIONS)
        self.labels = labels
        self.shift = shift
        self.segments = check_segments("CEKL", shift, segments)

    def forward(
        self,
        student: Tensor,
        teacher: Tensor,
        *,
        batch: Any,
        mask: Tensor | None = None,
        normalizer: Normalizer = None,
    ) -> Tensor:
        return ce_kl(
            student,
            teacher,
            labels_of(batch, self.labels, type(self).__name__, shift=self.shift, segments=self.segments),
            hard=self.hard,
            temperature=self.temperature,
            direction=self.direction,
            mask=mask,
            normalizer=normalizer,
        )


class TopKKL(DistillationLoss):
    """KL over the teacher's top k and the tail: :func:`~softs_lightning.losses.functional.topk_kl`.

    >>> import torch
    >>> TopKKL(2)(torch.eye(3), torch.eye(3)).item()
    0.0
    """

    logits: ClassVar[bool] = True

    def __init__(self, k: int = 64, temperature: float = 1.0) -> None:
        super().__init__()
        self.k = whole("TopKKL's k", k)
        self.temperature = positive("TopKKL's temperature", temperature)

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        return topk_kl(
            student, teacher, k=self.k, temperature=self.temperature, mask=mask, normalizer=normalizer
        )


class SigmoidKL(DistillationLoss):
    """Multi-label KD: :func:`~softs_lightning.losses.functional.sigmoid_kl`.

    >>> import torch
    >>> SigmoidKL()(torch.eye(3), torch.eye(3)).item()
    0.0
    """

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = positive("SigmoidKL's temperature", temperature)

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        return sigmoid_kl(student, teacher, temperature=self.temperature, mask=mask, normalizer=normalizer)


class ULD(DistillationLoss):
    """Distillation across vocabularies: :func:`~softs_lightning.losses.functional.uld`.

    >>> import torch
    >>> ULD()(torch.zeros(2, 4), torch.zeros(2, 4)).item()
    0.0
    """

    same_shape: ClassVar[bool] = False
    logits: ClassVar[bool] = True

    def __init__(self, temperature: float = 1.0) -> None:
        super().__init__()
        self.temperature = positive("ULD's temperature", temperature)

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        return uld(student, teacher, temperature=self.temperature, mask=mask, normalizer=normalizer)
