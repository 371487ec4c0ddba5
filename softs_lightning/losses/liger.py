"""The chunked losses by Liger-Kernel instead of by this package, where that is asked for.

Liger's chunked divergence is compiled by ``torch.compile`` on a CUDA device, where it can be the faster one;
elsewhere it runs uncompiled. It does less: what it cannot do is refused by name. It computes logits and the
sums of the head's gradient in the dtype of the head, where this package sums in float32 at least.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from softs_lightning.losses.arithmetic import Normalizer, divisor, eager
from softs_lightning.losses.hidden import HiddenStates

__all__ = ["BACKENDS", "check_liger", "check_liger_head", "liger_mean"]

BACKENDS = ("torch", "liger")


def check_liger(what: str, direction: str = "forward") -> None:
    """Refuse, at once, what Liger cannot do or what cannot be run here.

    Raises:
        ModuleNotFoundError: where liger-kernel is not installed.
        ValueError: for a direction that it lacks.
    """
    if importlib.util.find_spec("liger_kernel") is None:
        raise ModuleNotFoundError(
            f'{what}(backend="liger") needs liger-kernel, which is not installed: pip install liger-kernel, or leave '
            "backend out for the chunked loss of this package",
            name="liger_kernel",
        )
    if direction == "symmetric":
        raise ValueError(
            f'{what}(backend="liger") has no direction="symmetric": take forward or reverse, or leave backend out'
        )


def check_liger_head(what: str, side: str, softcap: float | None, scale: float) -> None:
    """Refuse a head whose logits are more than its linear layer."""
    for name, value in (("softcap", softcap), ("scale", None if scale == 1 else scale)):
        if value is not None:
            raise ValueError(
                f'{what}(backend="liger") applies no {name} to logits, the {side} has one of {value!r}: leave backend '
                "out"
            )


@eager
def liger_mean(
    states: HiddenStates,
    *,
    beta: float,
    temperature: float,
    normalizer: Normalizer = None,
    chunk_size: int | None = None,
    hard: float = 0.0,
) -> Tensor:
    """``hard · cross-entropy + (1 − hard) · T² · JSD(beta)``, the mean over the tokens that count.

    Args:
        states: what enters both heads; its labels are needed where ``hard`` is not 0.
        beta: 0 is the forward KL, 1 the reverse KL.
        temperature: of the divergence; the factor T², which Liger leaves out, is in.
        normalizer: what to divide by instead of the number of tokens that count.
        chunk_size: tokens at a time; by default Liger's own, 1,024.
        hard: the share of the cross-entropy.
    """
    from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss

    # Selected, not marked as ignored: a NaN in padding would still reach the gradient of the head.
    hidden, constant = (
        x if states.rows is None else x[states.rows] for x in (states.student, states.teacher)
    )
    ours, its = states.heads
    if not len(hidden):
        zero = hidden.sum() + ours.weight.sum() * 0
        return zero if ours.bias is None else zero + ours.bias.sum() * 0
    labels = torch.zeros(len(hidden), dtype=torch.long, device=hidden.device)
    if states.labels is not None:
        labels = states.labels if states.rows is None else states.labels[states.rows]
    dtype = torch.promote_types(hidden.dtype, ours.weight.dtype)
    ours, its = ours.to(dtype), its.to(dtype)
    options: dict[str, Any] = {} if chunk_size is None else {"chunk_size": chunk_size}
    loss = LigerFusedLinearJSDLoss(
        weight_hard_loss=hard,
        weight_soft_loss=(1 - hard) * temperature**2,
        beta=beta,
        temperature=temperature,
        compiled=hidden.is_cuda,
        **options,
    )
    operands = hidden.to(dtype), ours.weight, constant.to(dtype), its.weight, labels, ours.bias, its.bias
    with torch.autocast(hidden.device.type, enabled=False):
        mean: Tensor = loss(*operands)
    return mean * (len(hidden) / divisor(len(hidden), normalizer))
