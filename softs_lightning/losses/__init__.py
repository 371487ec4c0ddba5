"""Distillation losses: ``loss(student, teacher, *, mask=None) -> scalar``.

One file a family, the pure functions above the thin modules. Computed in float32 at least, also under
autocast; float64 stays float64.
"""

from __future__ import annotations

from softs_lightning.losses.arithmetic import DistillationLoss
from softs_lightning.losses.divergences import GeneralizedJSD, KLDivergence, SkewedKL, TotalVariation
from softs_lightning.losses.features import MSE, CosineDistance, SmoothL1
from softs_lightning.losses.maps import AttentionTransfer

__all__ = [
    "MSE",
    "AttentionTransfer",
    "CosineDistance",
    "DistillationLoss",
    "GeneralizedJSD",
    "KLDivergence",
    "SkewedKL",
    "SmoothL1",
    "TotalVariation",
]
