"""Losses with a memory of earlier samples, and embeddings: CRD, queue KL, whitened cosine.

The memories are buffers: they travel in the loss's ``state_dict``, and are updated by each call in
training mode. In a distributed run each rank remembers the samples of all ranks, so that the memories are
one on all of them whether or not the strategy broadcasts buffers, and the checkpoint of one rank is that of
all. For that all ranks must call the loss in the same steps of a training; in eval mode each is by itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from softs_lightning.losses.arithmetic import (
    DistillationLoss,
    mean_over_rows,
    pick,
    positive,
    raised,
    run_raised,
    unit_interval,
    unit_rows,
    whole,
)
from softs_lightning.losses.divergences import kl_rows
from softs_lightning.losses.features import cosine_distance
from softs_lightning.losses.ranks import last_of_each, log_sum_over_ranks, rows_of_ranks

__all__ = ["CRD", "QueueKL", "WhitenedCosine"]


class CRD(DistillationLoss):
    """Contrastive representation distillation (arXiv:1910.10699): noise-contrastive, with a memory a side.

    Each sample's student embedding is told from ``negatives`` remembered teacher embeddings by its own
    teacher embedding, and the other way round. The normalising constants are estimated in the first call,
    as in the authors' code.

    Args:
        student_features: width of the student's product ``[batch, features]``.
        teacher_features: width of the teacher's.
        samples: size of the training set.
        dim: of the embeddings.
        negatives: drawn for each sample.
        temperature: of the similarities.
        momentum: what a memory keeps of an old embedding.
        index: key or position in the batch, or a function of it, that gives each sample's number.
        labels: ``[samples]`` classes of the training set; negatives are then of other classes.

    A mask is of samples, ``[batch]``: whole products are embedded. Those left out are neither compared nor
    remembered.

    >>> import torch
    >>> loss = CRD(4, 6, samples=10, dim=8, negatives=5)
    >>> loss(torch.randn(3, 4), torch.randn(3, 6), batch={"index": torch.tensor([0, 4, 9])}).ndim
    0
    """

    same_shape: ClassVar[bool] = False
    divergence: ClassVar[bool] = False
    row_mean: ClassVar[bool] = False

    student_memory: Tensor
    teacher_memory: Tensor
    log_constants: Tensor
    order: Tensor
    first: Tensor
    alike: Tensor

    def __init__(
        self,
        student_features: int,
        teacher_features: int,
        samples: int,
        *,
        dim: int = 128,
        negatives: int = 16384,
        temperature: float = 0.07,
        momentum: float = 0.5,
        index: str | int | Callable[[Any], Tensor] = "index",
        labels: Tensor | None = None,
    ) -> None:
        super().__init__()
        sizes = {
            "student_features": student_features,
            "teacher_features": teacher_features,
            "samples": samples,
            "dim": dim,
            "negatives": negatives,
        }
        for name, size in sizes.items():
            whole(f"CRD's {name}", size)
        if samples < 2:
            raise ValueError(f"CRD's samples must be 2 at least, got {samples!r}")
        if unit_interval("CRD's momentum", momentum) == 1:
            raise ValueError(f"CRD's momentum must lie in [0, 1), got {momentum!r}")
        classes = torch.arange(samples) if labels is None else labels.cpu()
        numbers: Tensor = torch.unique(classes, return_inverse=True)[1]
        if classes.shape != (samples,) or int(numbers.max()) == 0:
            raise ValueError(
                f"CRD's labels are the [{samples}] classes of the set, two at least, got {tuple(classes.shape)}"
            )
        self.samples, self.negatives = samples, negatives
        self.temperature = positive("CRD's temperature", temperature)
        self.momentum = momentum
        self.index = index
        self.student_embed = nn.Linear(student_features, dim)
        self.teacher_embed = nn.Linear(teacher_features, dim)
        # From a seed of its own, for one beginning on all ranks: not every strategy hands out buffers.
        start = unit_rows(torch.randn(2, samples, dim, generator=torch.Generator("cpu").manual_seed(0)))
        self.register_buffer("student_memory", start[0].clone())
        self.register_buffer("teacher_memory", start[1].clone())
        self.register_buffer("log_constants", torch.full((2,), math.nan))
        # Samples in order of their class; each one's run of like samples begins at first and has length
        # alike. Without labels a sample is like itself alone.
        alike = numbers.bincount()
        self.register_buffer("order", numbers.argsort(stable=True), persistent=False)
        self.register_buffer("first", (alike.cumsum(0) - alike)[numbers], persistent=False)
        self.register_buffer("alike", alike[numbers], persistent=False)

    def _draw(self, index: Tensor) -> Tensor:
        """``[batch, negatives]`` numbers of unlike samples, uniformly: the run of like ones is stepped over."""
        first, alike = self.first[index, None], self.alike[index, None]
        place = torch.rand(len(index), self.negatives, device=index.device, dtype=torch.float64)
        place = (place * (self.samples - alike)).long()
        return self.order[place + alike * (place >= first)]

    def _contrast(
        self, side: int, embedding: Tensor, memory: Tensor, index: Tensor, others: Tensor
    ) -> Tensor:
        chosen = memory[torch.cat([index[:, None], others], 1)].to(embedding.dtype)
        scores = torch.einsum("bd,bkd->bk", embedding, chosen) / self.temperature
        total, count = scores.detach().flatten().logsumexp(0), scores.new_tensor(scores.numel())
        if self.training:  # when all ranks are here; a validation may be of unlike numbers of batches
            total, count = log_sum_over_ranks(total, scores.numel())
        estimate = total + (self.samples / count).log().to(total)
        known = self.log_constants[side]
        # Chosen without a branch: reading the number would wait for the device at each step.
        constant = torch.where(known.isnan() & (count > 0), estimate, known.to(estimate))
        if self.training:
            self.log_constants[side] = constant
        log_p = scores - constant
        noise = log_p.new_tensor(math.log(self.negatives / self.samples))
        both = torch.logaddexp(log_p, noise)
        return (both - log_p)[:, 0] + (both - noise)[:, 1:].sum(-1)

    def forward(self, student: Tensor, teacher: Tensor, *, batch: Any, mask: Tensor | None = None) -> Tensor:
        student, teacher = raised(student, teacher)
        for side, values, embed in (
            ("student", student, self.student_embed),
            ("teacher", teacher, self.teacher_embed),
        ):
            if values.ndim < 2 or values.shape[1:].numel() != embed.in_features:
                raise ValueError(
                    f"CRD's {side} product must have {embed.in_features} features a sample, got {tuple(values.shape)}"
                )
        index = pick(batch, self.index, type(self).__name__).to(student.device).long()
        if not index.shape == student.shape[:1] == teacher.shape[:1]:
            raise ValueError(
                f"CRD compares one batch with one number a sample, got student {tuple(student.shape)}, teacher "
                f"{tuple(teacher.shape)} and index {tuple(index.shape)}"
            )
        # On a device, looking would wait for it at each step; there, indexing itself fails.
        looking = index.device.type == "cpu" and not torch.compiler.is_compiling()
        if looking and len(index) and not 0 <= index.min() <= index.max() < self.samples:
            raise ValueError(
                f"CRD was made for samples numbered 0 to {self.samples - 1}, got {int(index.min())} to {int(index.max())}"
            )
        if mask is not None:
            _check_samples(mask, student, "CRD", "it embeds whole samples")
            student, teacher, index = (x[mask != 0] for x in (student, teacher, index))
        with torch.autocast(student.device.type, enabled=False):
            one = unit_rows(run_raised(self.student_embed, student.flatten(1)))
            two = unit_rows(run_raised(self.teacher_embed, teacher.flatten(1)))
            others = self._draw(index)
            rows = self._contrast(0, one, self.teacher_memory, index, others)
            rows = rows + self._contrast(1, two, self.student_memory, index, others)
        if self.training:
            index, one, two = (rows_of_ranks(x) for x in (index, one, two))
            last = last_of_each(index)
            index, one, two = (x[last] for x in (index, one, two))
            self._remember(self.student_memory, index, one)
            self._remember(self.teacher_memory, index, two)
        return mean_over_rows(rows)

    @torch.no_grad()
    def _remember(self, memory: Tensor, index: Tensor, embedding: Tensor) -> None:
        kept = self.momentum * memory[index] + (1 - self.momentum) * embedding.to(memory.dtype)
        memory[index] = unit_rows(kept)


def _check_samples(mask: Tensor, values: Tensor, name: str, why: str) -> None:
    if mask.shape != values.shape[:1]:
        raise ValueError(
            f"{name}'s mask is of samples, [{len(values)}], got {tuple(mask.shape)}: {why}; where the batch has a mask "
            "of tokens, give the pair mask=False or one of samples"
        )


class QueueKL(DistillationLoss):
    """KL of similarities to a queue of the teacher's embeddings (SEED, arXiv:2101.04731).

    Both embeddings' cosines to the teacher's embeddings of this batch and of the last ``size`` samples,
    softened, are compared. The queue fills up during the first steps; empty places do not count. Samples that
    a mask ``[batch]`` leaves out are neither compared nor queued.

    Args:
        features: width of both embeddings ``[batch, features]``.
        size: of the queue.
        student_temperature: divides the student's cosines.
        teacher_temperature: divides the teacher's; lower than the student's sharpens the target, and the
            minimum is then no longer at the teacher.

    >>> import torch
    >>> loss = QueueKL(4, size=8)
    >>> loss(torch.eye(4), torch.eye(4)).item()
    0.0
    """

    row_mean: ClassVar[bool] = False

    queue: Tensor
    filled: Tensor

    def __init__(
        self,
        features: int,
        size: int = 8192,
        *,
        student_temperature: float = 0.07,
        teacher_temperature: float = 0.07,
    ) -> None:
        super().__init__()
        whole("QueueKL's features", features)
        whole("QueueKL's size", size)
        self.student_temperature = positive("QueueKL's student_temperature", student_temperature)
        self.teacher_temperature = positive("QueueKL's teacher_temperature", teacher_temperature)
        self.register_buffer("queue", torch.zeros(size, features))
        self.register_buffer("filled", torch.zeros((), dtype=torch.long))

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        student, teacher = raised(student, teacher)
        if student.shape != teacher.shape or student.ndim != 2 or student.shape[1] != self.queue.shape[1]:
            raise ValueError(
                f"QueueKL compares embeddings [batch, {self.queue.shape[1]}], got student {tuple(student.shape)} "
                f"and teacher {tuple(teacher.shape)}"
            )
        if mask is not None:
            _check_samples(mask, student, "QueueKL", "a row is a sample")
            student, teacher = student[mask != 0], teacher[mask != 0]
        with torch.autocast(student.device.type, enabled=False):
            one, two = unit_rows(student), unit_rows(teacher)
            keys = torch.cat([two.detach(), self.queue.to(two.dtype)])
            empty = torch.arange(len(keys), device=keys.device) >= len(two) + self.filled
            logs = []
            for rows, temperature in ((one, self.student_temperature), (two, self.teacher_temperature)):
                scores = (rows @ keys.mT / temperature).masked_fill(empty, torch.finfo(rows.dtype).min / 4)
                logs.append(scores.log_softmax(-1))
            loss = mean_over_rows(kl_rows(logs[0], logs[1]))
        if self.training:
            self._push(rows_of_ranks(two))
        return loss

    @torch.no_grad()
    def _push(self, embeddings: Tensor) -> None:
        """Newest first; what no longer fits falls off the end."""
        size = len(self.queue)
        self.queue.copy_(torch.cat([embeddings.to(self.queue.dtype), self.queue])[:size])
        self.filled.add_(len(embeddings)).clamp_(max=size)


class WhitenedCosine(DistillationLoss):
    """Cosine distance to whitened teacher embeddings (whitening: arXiv:2103.15316).

    Embeddings of pretrained encoders lie in a narrow cone, where all cosines are near 1; centred and
    whitened (and cut to ``dim`` leading components) they use all directions. The whitening is fitted once
    on a sample of the teacher's embeddings.

    Args:
        mean: ``[features]`` of the teacher.
        matrix: ``[features, dim]``.

    >>> import torch
    >>> embeddings = torch.randn(100, 8)
    >>> loss = WhitenedCosine.fit(embeddings, dim=4)
    >>> round(loss(loss.whiten(embeddings), embeddings).item(), 6)
    0.0
    """

    same_shape: ClassVar[bool] = False
    divergence: ClassVar[bool] = False  # zero at the whitened teacher, not at the teacher

    mean: Tensor
    matrix: Tensor

    def __init__(self, mean: Tensor, matrix: Tensor) -> None:
        super().__init__()
        if mean.ndim != 1 or matrix.ndim != 2 or len(mean) != len(matrix):
            raise ValueError(
                f"WhitenedCosine's mean is [features] and its matrix [features, dim], got {tuple(mean.shape)} and {tuple(matrix.shape)}"
            )
        self.register_buffer("mean", mean)
        self.register_buffer("matrix", matrix)

    @classmethod
    def fit(cls, embeddings: Tensor, dim: int | None = None) -> WhitenedCosine:
        """Whitening of ``[samples, features]``: principal components, each to unit variance.

        Raises:
            ValueError: where the samples do not span ``dim`` components.
        """
        dim = embeddings.shape[1] if dim is None else dim
        mean = embeddings.double().mean(0)
        _, singular, components = torch.linalg.svd(embeddings.double() - mean, full_matrices=False)
        rank = int((singular > singular[0] * 1e-7).sum())
        if not 1 <= dim <= rank:
            raise ValueError(
                f"WhitenedCosine was asked for {dim} components, {len(embeddings)} samples span {rank}"
            )
        matrix = components[:dim].mT / singular[:dim] * math.sqrt(len(embeddings) - 1)
        return cls(mean.to(embeddings.dtype), matrix.to(embeddings.dtype))

    def whiten(self, embeddings: Tensor) -> Tensor:
        """``[..., features]`` centred and whitened to ``[..., dim]``."""
        embeddings, mean, matrix = raised(embeddings, self.mean, self.matrix)
        if not embeddings.ndim or embeddings.shape[-1] != len(mean):
            raise ValueError(
                f"WhitenedCosine was fitted on embeddings of {len(mean)} features, got {tuple(embeddings.shape)}"
            )
        with torch.autocast(embeddings.device.type, enabled=False):
            return (embeddings - mean) @ matrix

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return cosine_distance(student, self.whiten(teacher), mask=mask)
