"""Losses on feature maps: channels against positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from softs_lightning.losses.arithmetic import (
    DistillationLoss,
    bounded_logits,
    by_position,
    check_same_shape,
    check_sides,
    full_precision,
    keep_valid,
    mean_over_rows,
    mean_over_tokens,
    non_negative,
    one_of,
    positive,
    raised,
    unit_rows,
)
from softs_lightning.losses.divergences import kl_rows

__all__ = [
    "FSP",
    "KERNELS",
    "NST",
    "OFD",
    "AttentionTransfer",
    "ChannelWise",
    "attention_transfer",
    "channel_wise",
    "flow_of_solution",
    "negative_response",
    "neuron_selectivity",
    "partial_l2",
]

KERNELS = ("linear", "polynomial", "gaussian")


@full_precision
def attention_transfer(
    student: Tensor,
    teacher: Tensor,
    *,
    power: float = 2.0,
    channel_dim: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention transfer (arXiv:1612.03928): squared distance of unit-length activation maps.

    The map is the mean of ``|feature|^power`` over the channels, flattened and L2-normalised per sample; the
    squared gaps are averaged over positions and samples, as in the paper's own code (the paper's formula
    takes the norm instead of its square).

    Args:
        student: ``[batch, channels, *positions]``; with ``channel_dim=-1`` tokens
            ``[batch, tokens, features]``.
        teacher: the same batch and positions; the number of channels may differ.
        power: at least 1.
        channel_dim: where the channels are.
        mask: ``[batch, *positions]``, nonzero where a position counts.

    >>> import torch
    >>> maps = torch.eye(4).reshape(1, 4, 2, 2)
    >>> attention_transfer(maps, 3 * torch.cat([maps, maps], 1)).item()
    0.0
    """
    if positive("power", power) < 1:
        raise ValueError(f"power must be 1 at least, got {power!r}: its gradient at zero is infinite")
    one, two, valid = _two_maps(student, teacher, channel_dim, mask)
    gap = unit_rows(one.abs().pow(power).mean(1)) - unit_rows(two.abs().pow(power).mean(1))
    return mean_over_rows(gap * gap, valid)


def _two_maps(
    student: Tensor, teacher: Tensor, channel_dim: int, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Both maps as ``[batch, channels, positions]`` of one batch and one set of positions, and their mask."""
    one, two = (by_position(x, channel_dim)[0] for x in (student, teacher))
    if one[:, 0].shape != two[:, 0].shape:
        raise ValueError(
            f"maps of one batch and one set of positions are compared, got student {tuple(student.shape)} and "
            f"teacher {tuple(teacher.shape)} with channels at {channel_dim}"
        )
    one, valid = by_position(student, channel_dim, mask)
    return one, by_position(teacher, channel_dim, mask)[0], valid


class AttentionTransfer(DistillationLoss):
    """Attention transfer: :func:`~softs_lightning.losses.functional.attention_transfer`.

    Args:
        power: exponent of the activations, at least 1.
        channel_dim: 1 for feature maps, -1 for tokens.

    >>> import torch
    >>> AttentionTransfer()(torch.ones(2, 3, 4, 4), torch.ones(2, 5, 4, 4)).item()
    0.0
    """

    same_shape: ClassVar[bool] = False
    row_mean: ClassVar[bool] = False

    def __init__(self, power: float = 2.0, channel_dim: int = 1) -> None:
        super().__init__()
        if positive("AttentionTransfer's power", power) < 1:
            raise ValueError(
                f"AttentionTransfer's power must be 1 at least, got {power!r}: its gradient at zero is infinite"
            )
        self.power = power
        self.channel_dim = channel_dim

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return attention_transfer(student, teacher, power=self.power, channel_dim=self.channel_dim, mask=mask)


@full_precision
def channel_wise(
    student: Tensor,
    teacher: Tensor,
    *,
    temperature: float = 4.0,
    channel_dim: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """Channel-wise distillation (CWD, arXiv:2011.13256): T² · KL of each channel's softmax over positions.

    Args:
        student: ``[batch, channels, *positions]``; with ``channel_dim=-1`` tokens
            ``[batch, tokens, features]``.
        teacher: the same shape.
        temperature: divides the activations.
        channel_dim: where the channels are.
        mask: ``[batch, *positions]``, nonzero where a position counts; the softmax is over these alone, and
            a sample without one is left out.

    Returns:
        Summed over positions, averaged over samples and channels.

    >>> import torch
    >>> channel_wise(torch.zeros(1, 2, 3, 3), torch.ones(1, 2, 3, 3)).item()
    0.0
    """
    check_same_shape(student, teacher, "channel_wise")
    one, two, valid = _two_maps(student, teacher, channel_dim, mask)
    logs = []
    for values in (one, two):
        values = bounded_logits(values, positive("temperature", temperature))
        if valid is not None:
            values = values.masked_fill(~valid.unsqueeze(1), torch.finfo(values.dtype).min / 4)
        logs.append(values.log_softmax(-1))
    samples = None if valid is None else valid.any(1)
    return temperature**2 * mean_over_rows(kl_rows(logs[0], logs[1]), samples)


@full_precision
def flow_of_solution(
    student: Sequence[Tensor],
    teacher: Sequence[Tensor],
    *,
    channel_dim: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """FSP (Yim et al., CVPR 2017): squared error of the Gram matrices between two layers' maps.

    ``G[i, j]`` is the mean over positions of channel i of the first map times channel j of the second; the
    larger map is max-pooled to the positions of the smaller, as in the paper.

    Args:
        student: two maps ``[batch, channels, height, width]``; with ``channel_dim=-1`` two layers' tokens
            ``[batch, tokens, features]``.
        teacher: two maps with the same channels as the student's.
        channel_dim: where the channels are.
        mask: ``[batch, *positions]``, nonzero where a position counts; all four maps must have these
            positions, as pooling would mix valid ones with others. A sample without one is left out.

    Returns:
        The mean over both channels and the batch.

    >>> import torch
    >>> maps = [torch.ones(1, 2, 4, 4), torch.ones(1, 3, 2, 2)]
    >>> flow_of_solution(maps, maps).item()
    0.0
    """
    check_sides(student, teacher, 2)
    flows, samples = [], None
    for first, second in (student, teacher):
        if first.ndim != second.ndim or first.shape[:1] != second.shape[:1]:
            raise ValueError(
                f"two maps of one batch are related, got {tuple(first.shape)} and {tuple(second.shape)}"
            )
        if mask is None:
            first, second = _pooled_alike(first, second, channel_dim)
        one, valid = by_position(first, channel_dim, mask)
        two, _ = by_position(second, channel_dim, mask)
        count: Tensor | int = one.shape[-1]
        if valid is not None:
            count, samples = valid.sum(1).clamp_min(1)[:, None, None], valid.any(1)
        flows.append(one @ two.mT / count)
    check_same_shape(flows[0], flows[1], "flow_of_solution (its channel by channel matrices)")
    return mean_over_rows((flows[0] - flows[1]).square().mean((1, 2)), samples)


def _pooled_alike(first: Tensor, second: Tensor, channel_dim: int) -> tuple[Tensor, Tensor]:
    """Both maps at the positions of the smaller."""
    lengths = [by_position(x, channel_dim)[0].shape[-1] for x in (first, second)]
    if lengths[0] == lengths[1]:
        return first, second
    if first.ndim != 4 or channel_dim % 4 != 1:
        raise ValueError(
            f"maps with unlike positions are pooled only as [batch, channels, height, width], got "
            f"{tuple(first.shape)} and {tuple(second.shape)} with channels at {channel_dim}"
        )
    size = [min(a, b) for a, b in zip(first.shape[2:], second.shape[2:], strict=True)]
    pooled = [x if list(x.shape[2:]) == size else F.adaptive_max_pool2d(x, size) for x in (first, second)]
    return pooled[0], pooled[1]


@full_precision
def neuron_selectivity(
    student: Tensor,
    teacher: Tensor,
    *,
    kernel: str = "polynomial",
    channel_dim: int = 1,
    mask: Tensor | None = None,
) -> Tensor:
    """NST (arXiv:1707.01219): squared MMD between the channels' unit-length activation maps.

    Args:
        student: ``[batch, channels, *positions]``; with ``channel_dim=-1`` tokens
            ``[batch, tokens, features]``.
        teacher: the same batch and positions; the number of channels may differ.
        kernel: ``"linear"`` (x·y), ``"polynomial"`` ((x·y)²), or ``"gaussian"`` with the mean squared
            distance between the teacher's own maps as its 2σ².
        channel_dim: where the channels are.
        mask: ``[batch, *positions]``, nonzero where a position counts; a sample without one is left out.

    >>> import torch
    >>> maps = torch.rand(2, 3, 4, 4)
    >>> neuron_selectivity(maps, maps).item()
    0.0
    """
    one_of("kernel", kernel, KERNELS)
    one, two, valid = _two_maps(student, teacher, channel_dim, mask)
    one, two = unit_rows(one), unit_rows(two)
    dots = [a @ b.mT for a, b in ((one, one), (two, two), (one, two))]
    if kernel == "gaussian":
        squared = [2 - 2 * dot for dot in dots]
        width = squared[1].mean((1, 2), keepdim=True)
        dots = [torch.exp(-x / width.where(width > 0, 1.0)) for x in squared]
    elif kernel == "polynomial":
        dots = [dot.square() for dot in dots]
    within_one, within_two, across = (dot.mean((1, 2)) for dot in dots)
    samples = None if valid is None else valid.any(1)
    return mean_over_rows(non_negative(within_one + within_two - 2 * across), samples)


@full_precision
def partial_l2(
    student: Tensor, teacher: Tensor, margin: Tensor, *, channel_dim: int = 1, mask: Tensor | None = None
) -> Tensor:
    """OFD (arXiv:1904.01866): distance to the teacher's margin ReLU, before either activation.

    The target is ``max(teacher, margin)``, with a negative margin a channel; where it is not above 0 and
    the student is below it already, nothing is to be learned. The mean is over all entries.

    Args:
        student: pre-activations, channels at ``channel_dim``.
        teacher: the same shape.
        margin: ``[channels]``, below 0: the teacher's mean negative response, see
            :func:`negative_response`.
        channel_dim: where the channels are.
        mask: ``[batch, *positions]``, nonzero where a position counts.

    >>> import torch
    >>> teacher = torch.tensor([[-5.0, 2.0]])
    >>> partial_l2(torch.tensor([[-9.0, 1.0]]), teacher, torch.tensor([-1.0, -1.0])).item()
    0.5
    """
    check_same_shape(student, teacher, "partial_l2")
    if not -student.ndim <= channel_dim < student.ndim or student.shape[channel_dim] != len(margin):
        raise ValueError(
            f"{len(margin)} channels at {channel_dim} are wanted, one for each margin, got {tuple(student.shape)}"
        )
    student, teacher = (keep_valid(x.movedim(channel_dim, -1), mask) for x in (student, teacher))
    target = teacher.maximum(margin.to(teacher))
    idle = (student <= target) & (target <= 0)
    return mean_over_tokens((student - target).masked_fill(idle, 0).square(), mask)


def negative_response(mean: Tensor, std: Tensor) -> Tensor:
    """E[x | x < 0] of normal x: OFD's margin, from the bias and ``|weight|`` of the teacher's batch norm.

    Exact also where hardly any response is negative: ``mean − std · φ(z)/Φ(−z)`` in log space.

    >>> import torch
    >>> round(negative_response(torch.zeros(1), torch.ones(1)).item(), 4)
    -0.7979
    """
    mean, std = raised(mean, std)
    z = (mean / std).double()
    ratio = torch.exp(-z.square() / 2 - math.log(2 * math.pi) / 2 - torch.special.log_ndtr(-z))
    return (mean.double() - std.double() * ratio).to(mean)


class ChannelWise(DistillationLoss):
    """CWD: :func:`~softs_lightning.losses.functional.channel_wise`.

    Args:
        temperature: above 0.
        channel_dim: 1 for feature maps, -1 for tokens.

    >>> import torch
    >>> ChannelWise()(torch.zeros(1, 2, 3, 3), torch.ones(1, 2, 3, 3)).item()
    0.0
    """

    sample_mean: ClassVar[bool] = True

    def __init__(self, temperature: float = 4.0, channel_dim: int = 1) -> None:
        super().__init__()
        self.temperature = positive("ChannelWise's temperature", temperature)
        self.channel_dim = channel_dim

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return channel_wise(
            student, teacher, temperature=self.temperature, channel_dim=self.channel_dim, mask=mask
        )


class FSP(DistillationLoss):
    """Flow of solution: :func:`~softs_lightning.losses.functional.flow_of_solution` of two maps a side.

    Args:
        channel_dim: 1 for feature maps, -1 for tokens.

    >>> import torch
    >>> maps = [torch.ones(1, 2, 4, 4), torch.ones(1, 3, 2, 2)]
    >>> FSP()(maps, maps).item()
    0.0
    """

    same_shape: ClassVar[bool] = False
    together: ClassVar[bool] = True
    sample_mean: ClassVar[bool] = True

    def __init__(self, channel_dim: int = 1) -> None:
        super().__init__()
        self.channel_dim = channel_dim

    def forward(
        self, student: Sequence[Tensor], teacher: Sequence[Tensor], *, mask: Tensor | None = None
    ) -> Tensor:
        return flow_of_solution(student, teacher, channel_dim=self.channel_dim, mask=mask)


class NST(DistillationLoss):
    """Neuron selectivity: :func:`~softs_lightning.losses.functional.neuron_selectivity`.

    Args:
        kernel: ``"linear"``, ``"polynomial"`` or ``"gaussian"``.
        channel_dim: 1 for feature maps, -1 for tokens.

    >>> import torch
    >>> NST("linear")(torch.ones(2, 3, 4, 4), torch.ones(2, 5, 4, 4)).item()
    0.0
    """

    same_shape: ClassVar[bool] = False
    sample_mean: ClassVar[bool] = True

    def __init__(self, kernel: str = "polynomial", channel_dim: int = 1) -> None:
        super().__init__()
        self.kernel = one_of("NST's kernel", kernel, KERNELS)
        self.channel_dim = channel_dim

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return neuron_selectivity(
            student, teacher, kernel=self.kernel, channel_dim=self.channel_dim, mask=mask
        )


class OFD(DistillationLoss):
    """Overhauled feature distillation: :func:`~softs_lightning.losses.functional.partial_l2`.

    Args:
        mean: ``[channels]`` of the teacher's pre-activations: the bias of the batch norm before its ReLU.
        std: ``[channels]``, their standard deviation: the absolute weight of that batch norm.
        channel_dim: where the channels are.

    >>> import torch
    >>> norm = torch.nn.BatchNorm2d(3)
    >>> loss = OFD(norm.bias, norm.weight.abs())
    >>> loss(torch.ones(2, 3, 4, 4), torch.ones(2, 3, 4, 4)).item()
    0.0
    """

    margin: Tensor

    def __init__(self, mean: Tensor, std: Tensor, *, channel_dim: int = 1) -> None:
        super().__init__()
        if mean.ndim != 1 or mean.shape != std.shape or not bool((std > 0).all()):
            raise ValueError(
                f"OFD's mean and std are [channels], std above 0, got {tuple(mean.shape)}, {tuple(std.shape)}"
            )
        self.channel_dim = channel_dim
        self.register_buffer("margin", negative_response(mean.detach(), std.detach()))

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return partial_l2(student, teacher, self.margin, channel_dim=self.channel_dim, mask=mask)
