"""Which predictions count: the one shift between labels and predictions, ignored labels, packed sequences.

A causal model's prediction at position ``t`` is about the token at ``t + 1``. Labels as transformers'
models take them are *not* shifted: ``labels[t]`` is the token at ``t``. The shift is made here and nowhere
else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from softs_lightning.losses.arithmetic import pick

__all__ = ["IGNORE", "BatchKey", "check_segments", "labels_of", "next_labels", "prediction_mask"]

#: What names a tensor of the batch: a key, a position, or a function of the batch.
BatchKey = str | int | Callable[[Any], Tensor]

#: The label that is not scored, as in ``torch.nn.functional.cross_entropy``.
IGNORE = -100


def next_labels(labels: Tensor, *, segments: Tensor | None = None) -> Tensor:
    """The label of each prediction: ``labels`` moved left by one, the last ignored.

    Args:
        labels: ``[batch, tokens]``, unshifted.
        segments: ``[batch, tokens]`` numbers of the packed documents (any integers that change where a
            document ends); no prediction is scored across an end.

    >>> import torch
    >>> next_labels(torch.tensor([[5, 6, 7, 8]]), segments=torch.tensor([[0, 0, 1, 1]]))
    tensor([[   6, -100,    8, -100]])
    """
    if labels.ndim < 1 or (segments is not None and segments.shape != labels.shape):
        raise ValueError(
            f"labels are [batch, tokens] and segments alike, got {tuple(labels.shape)} and "
            f"{None if segments is None else tuple(segments.shape)}"
        )
    following = torch.full_like(labels, IGNORE)
    following[..., :-1] = labels[..., 1:]
    if segments is not None:
        following[..., :-1].masked_fill_(segments[..., 1:] != segments[..., :-1], IGNORE)
    return following


def labels_of(
    batch: Any, labels: BatchKey, what: str, *, shift: bool = False, segments: BatchKey | None = None
) -> Tensor:
    """The label of each prediction that a loss reads from its batch, shifted here where it is to be.

    >>> batch = {"labels": torch.tensor([[5, 6, 7]]), "document": torch.tensor([[0, 0, 1]])}
    >>> labels_of(batch, "labels", "CEKL", shift=True, segments="document")
    tensor([[   6, -100, -100]])
    """
    found = pick(batch, labels, what)
    if not shift:
        return found
    return next_labels(found, segments=None if segments is None else pick(batch, segments, what))


def check_segments(what: str, shift: bool, segments: BatchKey | None) -> BatchKey | None:
    """``segments``, or a ``ValueError`` where there is no shift that they could stop."""
    if segments is not None and not shift:
        raise ValueError(
            f"{what}'s segments keep the shift from crossing documents, and shift is False: with labels shifted before, "
            "set those of the last tokens to -100"
        )
    return segments


def prediction_mask(labels: Tensor, *, segments: Tensor | None = None) -> Tensor:
    """True where the prediction is scored: the mask for a token-level loss on a causal model's logits.

    >>> import torch
    >>> prediction_mask(torch.tensor([[-100, -100, 7, 8]]))
    tensor([[False,  True,  True, False]])
    """
    return next_labels(labels, segments=segments) != IGNORE
