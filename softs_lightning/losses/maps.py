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
    check_same_shape,
    full_precision,
    keep_valid,
    mean_over_rows,
    non_negative,
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


def _positions(features: Tensor, channel_dim: int, power: float, mask: Tensor | None) -> Tensor:
    """Mean over channels of |feature|^power, as ``[batch, positions]`` unit rows."""
    energy = features.abs().pow(power).mean(channel_dim)
    return unit_rows(keep_valid(energy, mask).flatten(1))


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

    The map is the mean of |feature|^power over the channels, flattened and L2-normalised per sample; the
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
    shapes = [list(x.shape) for x in (student, teacher)]
    if min(map(len, shapes)) < 3:
        raise ValueError(
            f"attention_transfer wants [batch, channels, *positions], got {shapes[0]}, {shapes[1]}"
        )
    places = [shape[: channel_dim % len(shape)] + shape[channel_dim % len(shape) + 1 :] for shape in shapes]
    if places[0] != places[1]:
        raise ValueError(
            "attention_transfer compares maps of one batch and one set of positions, got student "
            f"{tuple(student.shape)} and teacher {tuple(teacher.shape)} with channels at {channel_dim}"
        )
    if mask is not None and list(mask.shape) != places[0]:
        raise ValueError(f"mask {tuple(mask.shape)} does not match the positions {tuple(places[0])}")
    # Padding is cleared before the powers too: NaN in it would reach the gradient through the mean.
    blank = None if mask is None else (mask == 0).unsqueeze(channel_dim)
    if blank is not None:
        student, teacher = student.masked_fill(blank, 0), teacher.masked_fill(blank, 0)
    gap = _positions(student, channel_dim, power, mask) - _positions(teacher, channel_dim, power, mask)
    return mean_over_rows(gap * gap, None if mask is None else mask.flatten(1))


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
        if positive("power", power) < 1:
            raise ValueError(f"power must be 1 at least, got {power!r}: its gradient at zero is infinite")
        self.power = power
        self.channel_dim = channel_dim

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        return attention_transfer(student, teacher, power=self.power, channel_dim=self.channel_dim, mask=mask)


@full_precision
def channel_wise(student: Tensor, teacher: Tensor, *, temperature: float = 4.0) -> Tensor:
    """Channel-wise distillation (CWD, arXiv:2011.13256): T² · KL of each channel's softmax over positions.

    Args:
        student: ``[batch, channels, *positions]``.
        teacher: the same shape.
        temperature: divides the activations.

    Returns:
        Summed over positions, averaged over samples and channels.

    >>> import torch
    >>> channel_wise(torch.zeros(1, 2, 3, 3), torch.ones(1, 2, 3, 3)).item()
    0.0
    """
    check_same_shape(student, teacher, "channel_wise")
    logs = [bounded_logits(x.flatten(2), temperature).log_softmax(-1) for x in (student, teacher)]
    return temperature**2 * mean_over_rows(kl_rows(logs[0], logs[1]))


@full_precision
def flow_of_solution(student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
    """FSP (Yim et al., CVPR 2017): squared error of the Gram matrices between two layers' maps.

    ``G[i, j]`` is the mean over positions of channel i of the first map times channel j of the second; the
    larger map is max-pooled to the positions of the smaller, as in the paper.

    Args:
        student: two maps ``[batch, channels, height, width]``.
        teacher: two maps with the same channels as the student's.

    Returns:
        The mean over both channels and the batch.

    >>> import torch
    >>> maps = [torch.ones(1, 2, 4, 4), torch.ones(1, 3, 2, 2)]
    >>> flow_of_solution(maps, maps).item()
    0.0
    """
    if len(student) != 2 or len(teacher) != 2:
        raise ValueError(f"flow_of_solution takes two maps a side, got {len(student)} and {len(teacher)}")
    flows = []
    for first, second in (student, teacher):
        size = [min(a, b) for a, b in zip(first.shape[2:], second.shape[2:], strict=True)]
        first, second = (
            x if list(x.shape[2:]) == size else F.adaptive_max_pool2d(x, size) for x in (first, second)
        )
        one, two = first.flatten(2), second.flatten(2)
        flows.append(one @ two.mT / one.shape[-1])
    check_same_shape(flows[0], flows[1], "flow_of_solution (its channel by channel matrices)")
    return (flows[0] - flows[1]).square().mean()


@full_precision
def neuron_selectivity(student: Tensor, teacher: Tensor, *, kernel: str = "polynomial") -> Tensor:
    """NST (arXiv:1707.01219): squared MMD between the channels' unit-length activation maps.

    Args:
        student: ``[batch, channels, *positions]``.
        teacher: the same batch and positions; the number of channels may differ.
        kernel: ``"linear"`` (x·y), ``"polynomial"`` ((x·y)²), or ``"gaussian"`` with the mean squared
            distance between the teacher's own maps as its 2σ².

    >>> import torch
    >>> maps = torch.rand(2, 3, 4, 4)
    >>> neuron_selectivity(maps, maps).item()
    0.0
    """
    if kernel not in KERNELS:
        raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
    if student.shape[0] != teacher.shape[0] or student.shape[2:] != teacher.shape[2:]:
        raise ValueError(
            "neuron_selectivity compares maps of one batch and one set of positions, got student "
            f"{tuple(student.shape)} and teacher {tuple(teacher.shape)}"
        )
    one, two = (unit_rows(x.flatten(2)) for x in (student, teacher))
    dots = [a @ b.mT for a, b in ((one, one), (two, two), (one, two))]
    if kernel == "gaussian":
        squared = [2 - 2 * dot for dot in dots]
        width = squared[1].mean((1, 2), keepdim=True)
        dots = [torch.exp(-x / width.where(width > 0, 1.0)) for x in squared]
    elif kernel == "polynomial":
        dots = [dot.square() for dot in dots]
    within_one, within_two, across = (dot.mean((1, 2)) for dot in dots)
    return mean_over_rows(non_negative(within_one + within_two - 2 * across))


@full_precision
def partial_l2(student: Tensor, teacher: Tensor, margin: Tensor, *, channel_dim: int = 1) -> Tensor:
    """OFD (arXiv:1904.01866): distance to the teacher's margin ReLU, before either activation.

    The target is ``max(teacher, margin)``, with a negative margin a channel; where it is not above 0 and
    the student is below it already, nothing is to be learned. The mean is over all entries.

    Args:
        student: pre-activations, channels at ``channel_dim``.
        teacher: the same shape.
        margin: ``[channels]``, below 0: the teacher's mean negative response, see
            :func:`negative_response`.
        channel_dim: where the channels are.

    >>> import torch
    >>> teacher = torch.tensor([[-5.0, 2.0]])
    >>> partial_l2(torch.tensor([[-9.0, 1.0]]), teacher, torch.tensor([-1.0, -1.0])).item()
    0.5
    """
    check_same_shape(student, teacher, "partial_l2")
    shape = [1] * student.ndim
    shape[channel_dim] = -1
    target = teacher.maximum(margin.to(teacher).view(shape))
    idle = (student <= target) & (target <= 0)
    return mean_over_rows((student - target).masked_fill(idle, 0).square())


def negative_response(mean: Tensor, std: Tensor) -> Tensor:
    """E[x | x < 0] of normal x: OFD's margin, from the bias and |weight| of the teacher's batch norm.

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

    >>> import torch
    >>> ChannelWise()(torch.zeros(1, 2, 3, 3), torch.ones(1, 2, 3, 3)).item()
    0.0
    """

    def __init__(self, temperature: float = 4.0) -> None:
        super().__init__()
        self.temperature = positive("temperature", temperature)

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        return channel_wise(student, teacher, temperature=self.temperature)


class FSP(DistillationLoss):
    """Flow of solution: :func:`~softs_lightning.losses.functional.flow_of_solution` of two maps a side.

    >>> import torch
    >>> maps = [torch.ones(1, 2, 4, 4), torch.ones(1, 3, 2, 2)]
    >>> FSP()(maps, maps).item()
    0.0
    """

    same_shape: ClassVar[bool] = False
    together: ClassVar[bool] = True

    def forward(self, student: Sequence[Tensor], teacher: Sequence[Tensor]) -> Tensor:
        return flow_of_solution(student, teacher)


class NST(DistillationLoss):
    """Neuron selectivity: :func:`~softs_lightning.losses.functional.neuron_selectivity`.

    >>> import torch
    >>> NST("linear")(torch.ones(2, 3, 4, 4), torch.ones(2, 5, 4, 4)).item()
    0.0
    """

    same_shape: ClassVar[bool] = False

    def __init__(self, kernel: str = "polynomial") -> None:
        super().__init__()
        if kernel not in KERNELS:
            raise ValueError(f"kernel must be one of {', '.join(KERNELS)}, got {kernel!r}")
        self.kernel = kernel

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        return neuron_selectivity(student, teacher, kernel=self.kernel)


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
                f"mean and std are [channels], std above 0, got {tuple(mean.shape)}, {tuple(std.shape)}"
            )
        self.channel_dim = channel_dim
        self.register_buffer("margin", negative_response(mean.detach(), std.detach()))

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        return partial_l2(student, teacher, self.margin, channel_dim=self.channel_dim)
