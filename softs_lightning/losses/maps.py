"""Losses on feature maps: channels against positions."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from softs_lightning.losses.arithmetic import (
    DistillationLoss,
    full_precision,
    keep_valid,
    mean_over_rows,
    positive,
    unit_rows,
)

__all__ = ["AttentionTransfer", "attention_transfer"]


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
