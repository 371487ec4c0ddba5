"""Logits as their largest log-probabilities and the mass of the rest.

The mass that is left out is kept in log space, taken from the logits left out themselves: one
minus the sum of the kept probabilities has no digits left where the tail is small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from softs_lightning.store.encoding import Parts

__all__ = ["TopK"]

# What stands for the logarithm of no probability at all: zero when exponentiated, finite in a product with zero.
_LEAST = torch.finfo(torch.float16).min


@dataclass(frozen=True)
class TopK:
    """The largest log-probabilities along the last dimension, and the log of the remaining mass.

    Args:
        k: how many are kept; the most that are kept if `mass` is given.
        mass: keep as few as hold this much probability instead.
        values: type of the kept log-probabilities; the remaining mass is always float32.

    What is read back are log-probabilities (logits up to a constant for each position): the kept
    ones, and the remaining mass in equal shares for all others, so that every distribution sums to
    one and no class is impossible. Each position takes ``4 k + 4`` bytes with ``fp16`` and up to
    65,536 classes. Its error is measured as the Kullback-Leibler divergence, in nats, of what is
    read from what the teacher said: ``max_kl`` is the largest of any position.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 0.0, -1.0, -1.0]])
    >>> back = TopK(2, values="fp32").decode(TopK(2, values="fp32").encode(logits), (1, 4))
    >>> torch.testing.assert_close(back, logits.log_softmax(-1))  # the tail was uniform
    """

    k: int
    mass: float | None = None
    values: Literal["fp16", "fp32"] | str = "fp16"

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"top-k keeps at least one class, got k={self.k}")
        if self.mass is not None and not 0 < self.mass < 1:
            raise ValueError(f"mass must lie between 0 and 1, got {self.mass}")
        if self.values not in ("fp16", "fp32"):
            raise ValueError(f"kept values are fp16 or fp32, got {self.values!r}")

    @property
    def name(self) -> str:
        kept = f"top{self.k}" if self.mass is None else f"mass{self.mass:g}-max{self.k}"
        return f"{kept}-{self.values}"

    def encode(self, value: Tensor) -> Parts:
        if not value.is_floating_point() or not value.ndim or value.shape[-1] <= self.k:
            raise ValueError(
                f"{self.name} is for logits over more than {self.k} classes, and this activation is {value.dtype} "
                f"of shape {list(value.shape)}"
            )
        logp = _log_probabilities(value)
        if bool(logp.isnan().any()):
            raise ValueError("these logits hold NaN or +inf, or a position where every class is impossible")
        top, where = logp.topk(self.k, dim=-1)
        kept = torch.ones_like(top, dtype=torch.bool)
        if self.mass is not None:
            # The smallest set: a class is kept if those before it do not hold the mass yet.
            kept = top.exp().cumsum(-1) - top.exp() < self.mass
        rest = logp.scatter(-1, torch.where(kept, where, where[:, :1]), -math.inf)
        dtype = torch.float16 if self.values == "fp16" else torch.float32
        wide = value.shape[-1] > 65536
        parts = {
            "values": top[kept].clamp(min=_LEAST).to(dtype),
            "classes": where[kept].to(torch.int32 if wide else torch.uint16),
            "tail": rest.logsumexp(-1).clamp(min=_LEAST).to(torch.float32),
        }
        if self.mass is not None:
            parts["counts"] = kept.sum(-1).to(torch.int32)
        return parts

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        classes = shape[-1]
        tail = parts["tail"].to(torch.float32)
        counts = parts["counts"] if "counts" in parts else torch.full_like(tail, self.k, dtype=torch.int32)
        share = tail - torch.log((classes - counts).to(torch.float32))
        dense = share[:, None].expand(-1, classes).clone()
        row = torch.repeat_interleave(torch.arange(len(tail)), counts.to(torch.int64))
        dense[row, parts["classes"].to(torch.int64)] = parts["values"].to(torch.float32)
        return dense.reshape(shape)

    def error(self, value: Tensor, decoded: Tensor) -> dict[str, float]:
        teacher, ours = _log_probabilities(value), _log_probabilities(decoded)
        # What is impossible to the teacher adds nothing, whatever is read.
        terms = torch.where(teacher.isinf(), torch.zeros_like(teacher), teacher.exp() * (teacher - ours))
        return {"max_kl": float(terms.sum(-1).max()) if terms.numel() else 0.0}


def _log_probabilities(value: Tensor) -> Tensor:
    rows = value.reshape(-1, value.shape[-1])
    return rows.to(torch.promote_types(rows.dtype, torch.float32)).log_softmax(-1)
