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
    by_position,
    check_maps,
    check_same_shape,
    check_sides,
    check_width,
    full_precision,
    keep_valid,
    mean_over_tokens,
    positive,
    raised,
    run_raised,
    unit_interval,
    whole,
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


def _channels(values: Tensor, mask: Tensor | None, channel_dim: int) -> Tensor:
    """``[batch, channels]``: the mean over the valid positions, where there are positions."""
    if values.ndim < 3:
        return keep_valid(values, mask)
    if mask is not None and mask.ndim == 1:
        return keep_valid(by_position(values, channel_dim)[0], mask).mean(-1)
    channels, valid = by_position(values, channel_dim, mask)
    return channels.mean(-1) if valid is None else channels.sum(-1) / valid.sum(1, keepdim=True).clamp_min(1)


def _enough_for_a_norm(rows: int, training: bool) -> None:
    if rows == 1 and training:
        raise ValueError("a batch norm needs two samples that count in a batch at least, got one")


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
        whole("VID's student_features", student_features)
        whole("VID's teacher_features", teacher_features)
        if positive("VID's init_variance", init_variance) <= positive("VID's eps", eps):
            raise ValueError(f"VID's init_variance must be above eps, got {init_variance!r} and {eps!r}")
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

    Feature maps are averaged over their (valid) positions first, as in the paper. A sample without a valid
    position is left out, of the batch norms too.

    Args:
        student_features: channels of the student's product.
        teacher_features: channels of the teacher's.
        exponent: of the distance.
        channel_dim: where the channels are; 1 for maps, -1 for tokens.

    >>> import torch
    >>> loss = SRD(4, 8)
    >>> loss(torch.randn(6, 4), torch.randn(6, 8)).ndim
    0
    """

    same_shape: ClassVar[bool] = False
    divergence: ClassVar[bool] = False
    row_mean: ClassVar[bool] = False

    def __init__(
        self,
        student_features: int,
        teacher_features: int,
        *,
        exponent: float = 4.0,
        channel_dim: int = 1,
    ) -> None:
        super().__init__()
        whole("SRD's student_features", student_features)
        whole("SRD's teacher_features", teacher_features)
        self.exponent = positive("SRD's exponent", exponent)
        self.channel_dim = channel_dim
        # No bias: the norm would take it out again.
        self.projector = nn.Linear(student_features, teacher_features, bias=False)
        self.student_norm = nn.BatchNorm1d(teacher_features, eps=1e-4, affine=False)
        self.teacher_norm = nn.BatchNorm1d(teacher_features, eps=1e-4, affine=False)

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        student, teacher = raised(student, teacher)
        check_width(student, self.projector.in_features, self.channel_dim, "SRD's student product")
        check_width(teacher, self.projector.out_features, self.channel_dim, "SRD's teacher product")
        if len(student) != len(teacher):
            raise ValueError(f"one batch is compared, got {len(student)} and {len(teacher)} samples")
        with torch.autocast(student.device.type, enabled=False):
            student, teacher = (_channels(x, mask, self.channel_dim) for x in (student, teacher))
            if mask is not None:
                samples = (mask != 0).flatten(1).any(1) if mask.ndim > 1 else mask != 0
                student, teacher = student[samples], teacher[samples]
            projected = run_raised(self.projector, student)
            if not len(student):
                return projected.sum()
            _enough_for_a_norm(len(student), self.training)
            one = run_raised(self.student_norm, projected)
            two = run_raised(self.teacher_norm, teacher)
            return log_sum(one, two, exponent=self.exponent)


class MGD(DistillationLoss):
    """Masked generative distillation (arXiv:2205.01529): rebuild the teacher's map from a masked student's.

    The student's map is aligned by a 1×1 convolution where the channels differ, a random part of its
    positions is zeroed, and two convolutions must generate the teacher's whole map; the loss is the MSE
    (the paper sums over the map: its weight of 7e-5 there is one over the number of entries here).

    Positions that a mask leaves out are, to the convolutions, as those beyond the edge of the map.

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
    mask_dims: ClassVar[tuple[int, ...]] = (2, 3)

    def __init__(self, student_features: int, teacher_features: int, *, ratio: float = 0.5) -> None:
        super().__init__()
        whole("MGD's student_features", student_features)
        whole("MGD's teacher_features", teacher_features)
        if unit_interval("MGD's ratio", ratio) == 1:
            raise ValueError(f"MGD's ratio must lie in [0, 1), got {ratio!r}")
        self.ratio = ratio
        self.student_features, self.teacher_features = student_features, teacher_features
        alike = student_features == teacher_features
        self.align: nn.Module = nn.Identity() if alike else nn.Conv2d(student_features, teacher_features, 1)
        self.generator = nn.Sequential(
            nn.Conv2d(teacher_features, teacher_features, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(teacher_features, teacher_features, 3, padding=1),
        )

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        student, teacher = raised(student, teacher)
        check_maps(student, self.student_features, "MGD's student product")
        check_maps(teacher, self.teacher_features, "MGD's teacher product")
        if student[:, 0].shape != teacher[:, 0].shape:
            raise ValueError(
                f"MGD compares maps of one batch and size, got {tuple(student.shape)} and {tuple(teacher.shape)}"
            )
        first, activation, second = self.generator
        with torch.autocast(student.device.type, enabled=False):
            valid: Tensor | float = 1.0
            if mask is not None:
                if mask.shape not in (student.shape[:1], student[:, 0].shape):
                    raise ValueError(
                        f"MGD's mask is [batch, height, width] or [batch], got {tuple(mask.shape)} for "
                        f"{tuple(student.shape)}"
                    )
                student, teacher = (
                    keep_valid(x.movedim(1, -1), mask).movedim(-1, 1) for x in (student, teacher)
                )
                valid = (mask != 0).reshape(len(mask), 1, *(mask.shape[1:] or (1, 1))).to(student)
            aligned = run_raised(self.align, student)
            # Drawn in float32 whatever the dtype, so that one seed masks the same positions.
            kept = torch.rand(aligned[:, :1].shape, device=aligned.device) >= self.ratio
            hidden = activation(run_raised(first, aligned * kept * valid))
            built = run_raised(second, hidden * valid)
            gap = keep_valid((built - teacher).movedim(1, -1), mask)
            return mean_over_tokens(gap.square(), mask)


class ReviewKD(DistillationLoss):
    """Knowledge review (arXiv:2104.09044): the student's stages, fused from deep to shallow, with HCL.

    Each stage is projected to ``hidden`` channels and fused with the review of all deeper stages by an
    attention over the two; what comes out is compared with the teacher's map of the stage.

    A mask is of samples, ``[batch]``: the convolutions, resizings and pooled contexts mix positions of several
    sizes, so none over positions could keep what is padding out, and one is refused.

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
        whole("ReviewKD's hidden", hidden)
        if len(student_features) != len(teacher_features) or not student_features:
            raise ValueError(
                f"ReviewKD takes as many stages a side, one at least, got {len(student_features)} and {len(teacher_features)}"
            )
        for size in (*student_features, *teacher_features):
            whole("ReviewKD's sizes", size)
        self.student_features, self.teacher_features = tuple(student_features), tuple(teacher_features)
        deepest = len(student_features) - 1
        self.fusions = nn.ModuleList(
            _Fusion(one, hidden, two, fuse=stage < deepest)
            for stage, (one, two) in enumerate(zip(student_features, teacher_features, strict=True))
        )

    def forward(
        self, student: Sequence[Tensor], teacher: Sequence[Tensor], *, mask: Tensor | None = None
    ) -> Tensor:
        stages = len(self.fusions)
        check_sides(student, teacher, stages)
        tensors = raised(*student, *teacher)
        for number, values in enumerate(tensors):
            name, stage = ("student", "teacher")[number >= stages], number % stages
            channels = (*self.student_features, *self.teacher_features)[number]
            check_maps(values, channels, f"ReviewKD's {name} map of stage {stage}")
            if len(values) != len(tensors[0]):
                raise ValueError(
                    f"maps of one batch are compared, got {len(tensors[0])} and {len(values)} samples"
                )
        if mask is not None:
            if mask.shape != tensors[0].shape[:1]:
                raise ValueError(
                    f"ReviewKD's mask is of samples, [{len(tensors[0])}], got {tuple(mask.shape)}: its convolutions and "
                    "pooled contexts mix positions, so that none can be left out"
                )
            tensors = tuple(x[mask != 0] for x in tensors)
        if not len(tensors[0]):
            # On the graph with all it trains, whose gradients the ranks wait for.
            zero = torch.stack([p.sum() for p in self.parameters()]).sum() * 0
            return torch.stack([x.sum() for x in tensors[:stages]]).sum() + zero
        terms, review = [], None
        with torch.autocast(tensors[0].device.type, enabled=False):
            for stage in reversed(range(stages)):
                target = tensors[stages + stage]
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
