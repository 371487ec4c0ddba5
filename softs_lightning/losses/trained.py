"""Losses that learn something themselves: regressors, generators and fusions, as their own submodules.

Sizes are explicit. The parameters are trained with the student's; keep them out of weight decay where the
papers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softs_lightning.losses.arithmetic import (
    DistillationLoss,
    Normalizer,
    check_same_shape,
    check_width,
    full_precision,
    keep_valid,
    mean_over_tokens,
    positive,
    raised,
    run_raised,
)

__all__ = ["MGD", "SRD", "VID", "ReviewKD", "gaussian_nll", "hierarchical_context", "log_sum"]


@full_precision
def gaussian_nll(
    mean: Tensor,
    target: Tensor,
    variance: Tensor,
    *,
    mask: Tensor | None = None,
    normalizer: Normalizer = None,
) -> Tensor:
    """−log N(target; mean, variance) up to a constant: ``½ · ((target − mean)² / variance + log variance)``.

    The last dimension is that of ``variance``; the mean is over all elements of the valid rows.

    >>> import torch
    >>> gaussian_nll(torch.zeros(1, 2), torch.ones(1, 2), torch.ones(2)).item()
    0.5
    """
    check_same_shape(mean, target, "gaussian_nll")
    variance = variance.to(mean.dtype)
    gap = keep_valid(mean, mask) - keep_valid(target, mask)
    return mean_over_tokens((gap.square() / variance + variance.log()) / 2, mask, normalizer)


@full_precision
def hierarchical_context(student: Tensor, teacher: Tensor, *, levels: Sequence[int] = (4, 2, 1)) -> Tensor:
    """ReviewKD's HCL (arXiv:2104.09044): MSE of the maps and of average-pooled ones, halving the weight.

    Weights 1, ½, ¼ … of the full map and of each level that is smaller than it, over their sum.

    >>> import torch
    >>> hierarchical_context(torch.ones(1, 2, 8, 8), torch.zeros(1, 2, 8, 8)).item()
    1.0
    """
    check_same_shape(student, teacher, "hierarchical_context")
    total, weights, weight = F.mse_loss(student, teacher), 1.0, 1.0
    for size in levels:
        if size >= student.shape[-2]:
            continue
        weight /= 2
        weights += weight
        gap = F.adaptive_avg_pool2d(student, size) - F.adaptive_avg_pool2d(teacher, size)
        total = total + weight * gap.square().mean()
    return total / weights


@full_precision
def log_sum(student: Tensor, teacher: Tensor, *, exponent: float = 4.0, eps: float = 1e-6) -> Tensor:
    """The log-sum distance of "Understanding the role of the projector" (arXiv:2303.11098).

    ``log(eps + mean |student − teacher|^exponent)``: the logarithm damps the far-off entries that the
    exponent stresses. Its least value is log eps, at the teacher. The mean (the paper sums) leaves out a
    constant, the logarithm of the number of entries.

    >>> import torch
    >>> round(log_sum(torch.ones(2, 3), torch.zeros(2, 3)).item(), 4)
    0.0
    """
    check_same_shape(student, teacher, "log_sum")
    return ((student - teacher).abs().pow(exponent).mean() + eps).log()


def _unlike_sizes(sizes: dict[str, int]) -> None:
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be 1 at least, got {size!r}")


class VID(DistillationLoss):
    """Variational information distillation (arXiv:1904.05835): the teacher's features as a Gaussian.

    A small network predicts the teacher's features from the student's, with one learned variance a
    channel (softplus of a parameter); the loss is the negative log-likelihood.

    Args:
        student_features: channels of the student's product.
        teacher_features: channels of the teacher's.
        hidden: width of the two hidden layers; by default the teacher's.
        channel_dim: where the channels are; -1 for tokens, 1 for feature maps.
        init_variance: the variance to start from, above ``eps``.
        eps: the least variance.

    >>> import torch
    >>> loss = VID(4, 8, channel_dim=1)
    >>> loss(torch.randn(2, 4, 3, 3), torch.randn(2, 8, 3, 3)).ndim
    0
    """

    same_shape: ClassVar[bool] = False
    divergence: ClassVar[bool] = False

    def __init__(
        self,
        student_features: int,
        teacher_features: int,
        *,
        hidden: int | None = None,
        channel_dim: int = -1,
        init_variance: float = 5.0,
        eps: float = 1e-5,
    ) -> None:
        super().__init__()
        _unlike_sizes({"student_features": student_features, "teacher_features": teacher_features})
        if init_variance <= positive("eps", eps):
            raise ValueError(f"init_variance must be above eps, got {init_variance!r} and {eps!r}")
        hidden = teacher_features if hidden is None else hidden
        self.student_features = student_features
        self.channel_dim = channel_dim
        self.eps = eps
        # Linear layers on the channels are the paper's 1×1 convolutions, for any number of positions.
        self.regressor = nn.Sequential(
            nn.Linear(student_features, hidden),
            nn.ReLU(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Linear(hidden, teacher_features),
        )
        start = torch.tensor(init_variance - eps).expm1().log()
        self.raw_variance = nn.Parameter(start.repeat(teacher_features))

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        student, teacher, raw = raised(student, teacher, self.raw_variance)
        check_width(student, self.student_features, self.channel_dim, "VID's student product")
        check_width(teacher, len(raw), self.channel_dim, "VID's teacher product")
        student, teacher = (x.movedim(self.channel_dim, -1) for x in (student, teacher))
        with torch.autocast(student.device.type, enabled=False):
            mean = run_raised(self.regressor, keep_valid(student, mask))
            variance = F.softplus(raw) + self.eps
            return gaussian_nll(mean, teacher, variance, mask=mask, normalizer=normalizer)


class SRD(DistillationLoss):
    """A linear projector, batch norm on both sides and the log-sum distance (arXiv:2303.11098).

    Feature maps are averaged over their positions first, as in the paper.

    Args:
        student_features: channels of the student's product, at dimension 1.
        teacher_features: channels of the teacher's.
        exponent: of the distance.

    >>> import torch
    >>> loss = SRD(4, 8)
    >>> loss(torch.randn(6, 4), torch.randn(6, 8)).ndim
    0
    """

    same_shape: ClassVar[bool] = False
    divergence: ClassVar[bool] = False
    row_mean: ClassVar[bool] = False

    def __init__(self, student_features: int, teacher_features: int, *, exponent: float = 4.0) -> None:
        super().__init__()
        _unlike_sizes({"student_features": student_features, "teacher_features": teacher_features})
        self.exponent = positive("exponent", exponent)
        # No bias: the norm would take it out again.
        self.projector = nn.Linear(student_features, teacher_features, bias=False)
        self.student_norm = nn.BatchNorm1d(teacher_features, eps=1e-4, affine=False)
        self.teacher_norm = nn.BatchNorm1d(teacher_features, eps=1e-4, affine=False)

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        student, teacher = raised(student, teacher)
        check_width(student, self.projector.in_features, 1, "SRD's student product")
        check_width(teacher, self.projector.out_features, 1, "SRD's teacher product")
        with torch.autocast(student.device.type, enabled=False):
            student, teacher = (x.flatten(2).mean(-1) if x.ndim > 2 else x for x in (student, teacher))
            one = run_raised(self.student_norm, run_raised(self.projector, student))
            two = run_raised(self.teacher_norm, teacher)
            return log_sum(one, two, exponent=self.exponent)


class MGD(DistillationLoss):
    """Masked generative distillation (arXiv:2205.01529): rebuild the teacher's map from a masked student's.

    The student's map is aligned by a 1×1 convolution where the channels differ, a random part of its
    positions is zeroed, and two convolutions must generate the teacher's whole map; the loss is the MSE
    (the paper sums over the map: its weight of 7e-5 there is one over the number of entries here).

    Args:
        student_features: channels of the student's map ``[batch, channels, height, width]``.
        teacher_features: channels of the teacher's, at the same positions.
        ratio: share of the positions that is zeroed, in [0, 1).

    >>> import torch
    >>> loss = MGD(4, 8)
    >>> loss(torch.randn(2, 4, 5, 5), torch.randn(2, 8, 5, 5)).ndim
    0
    """

    same_shape: ClassVar[bool] = False
    divergence: ClassVar[bool] = False
    row_mean: ClassVar[bool] = False

    def __init__(self, student_features: int, teacher_features: int, *, ratio: float = 0.5) -> None:
        super().__init__()
        _unlike_sizes({"student_features": student_features, "teacher_features": teacher_features})
        if not 0 <= ratio < 1:
            raise ValueError(f"ratio must lie in [0, 1), got {ratio!r}")
        self.ratio, self.student_features = ratio, student_features
        alike = student_features == teacher_features
        self.align: nn.Module = nn.Identity() if alike else nn.Conv2d(student_features, teacher_features, 1)
        self.generator = nn.Sequential(
            nn.Conv2d(teacher_features, teacher_features, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(teacher_features, teacher_features, 3, padding=1),
        )

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        student, teacher = raised(student, teacher)
        check_width(student, self.student_features, 1, "MGD's student product")
        with torch.autocast(student.device.type, enabled=False):
            aligned = run_raised(self.align, student)
            # Drawn in float32 whatever the dtype, so that one seed masks the same positions.
            kept = torch.rand(aligned[:, :1].shape, device=aligned.device) >= self.ratio
            built = run_raised(self.generator, aligned * kept)
            check_same_shape(built, teacher, "MGD (the generated map)")
            return F.mse_loss(built, teacher)


class ReviewKD(DistillationLoss):
    """Knowledge review (arXiv:2104.09044): the student's stages, fused from deep to shallow, with HCL.

    Each stage is projected to ``hidden`` channels and fused with the review of all deeper stages by an
    attention over the two; what comes out is compared with the teacher's map of the stage.

    Args:
        student_features: channels of the student's maps, from shallow to deep.
        teacher_features: channels of the teacher's maps at the same stages.
        hidden: channels of the fused maps.

    >>> import torch
    >>> loss = ReviewKD((4, 8), (6, 12), hidden=16)
    >>> student = [torch.randn(2, 4, 8, 8), torch.randn(2, 8, 4, 4)]
    >>> teacher = [torch.randn(2, 6, 8, 8), torch.randn(2, 12, 4, 4)]
    >>> loss(student, teacher).ndim
    0
    """

    same_shape: ClassVar[bool] = False
    together: ClassVar[bool] = True
    divergence: ClassVar[bool] = False
    row_mean: ClassVar[bool] = False

    def __init__(
        self, student_features: Sequence[int], teacher_features: Sequence[int], *, hidden: int = 512
    ) -> None:
        super().__init__()
        if len(student_features) != len(teacher_features) or not student_features:
            raise ValueError(
                f"as many stages a side, one at least, got {len(student_features)} and {len(teacher_features)}"
            )
        self.student_features = tuple(student_features)
        deepest = len(student_features) - 1
        self.fusions = nn.ModuleList(
            _Fusion(one, hidden, two, fuse=stage < deepest)
            for stage, (one, two) in enumerate(zip(student_features, teacher_features, strict=True))
        )

    def forward(self, student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
        stages = len(self.fusions)
        if len(student) != stages or len(teacher) != stages:
            raise ValueError(f"{stages} maps a side are wanted, got {len(student)} and {len(teacher)}")
        tensors = raised(*student, *teacher)
        terms, review = [], None
        with torch.autocast(tensors[0].device.type, enabled=False):
            for stage in reversed(range(stages)):
                target = tensors[stages + stage]
                channels = self.student_features[stage]
                check_width(tensors[stage], channels, 1, f"ReviewKD's student map of stage {stage}")
                built, review = self.fusions[stage](tensors[stage], review, target.shape[2:])
                terms.append(hierarchical_context(built, target))
        return torch.stack(terms).sum()


class _Fusion(nn.Module):
    """ReviewKD's attention-based fusion of one stage with the review of the deeper ones."""

    def __init__(self, channels: int, hidden: int, out: int, *, fuse: bool) -> None:
        super().__init__()
        self.reduce = nn.Sequential(nn.Conv2d(channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden))
        self.attend = nn.Sequential(nn.Conv2d(2 * hidden, 2, 1), nn.Sigmoid()) if fuse else None
        self.build = nn.Sequential(nn.Conv2d(hidden, out, 3, padding=1, bias=False), nn.BatchNorm2d(out))

    def forward(self, stage: Tensor, review: Tensor | None, size: Sequence[int]) -> tuple[Tensor, Tensor]:
        stage = run_raised(self.reduce, stage)
        if self.attend is not None and review is not None:
            review = F.interpolate(review, stage.shape[2:], mode="nearest")
            shares = run_raised(self.attend, torch.cat([stage, review], 1))
            stage = stage * shares[:, :1] + review * shares[:, 1:]
        built = run_raised(self.build, stage)
        if built.shape[2:] != torch.Size(size):
            built = F.interpolate(built, list(size), mode="nearest")
        return built, stage
