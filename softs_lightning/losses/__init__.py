"""Distillation losses: ``loss(student, teacher, *, mask=None) -> scalar``.

One file a family, the pure functions above the thin modules. Computed in float32 at least, also under
autocast; float64 stays float64.
"""

from __future__ import annotations

from softs_lightning.losses.arithmetic import DistillationLoss
from softs_lightning.losses.conformance import LossCheckError, LossReport, check_loss
from softs_lightning.losses.divergences import GeneralizedJSD, KLDivergence, SkewedKL, TotalVariation
from softs_lightning.losses.features import MSE, CosineDistance, SmoothL1
from softs_lightning.losses.heads import Head
from softs_lightning.losses.language_models import LinearCEKL, LinearJSD, LinearKL
from softs_lightning.losses.logits import CEKL, DIST, DKD, ULD, SigmoidKL, StandardizedKL, TopKKL
from softs_lightning.losses.maps import AttentionTransfer
from softs_lightning.losses.relations import CKA, PKT, RKD, CorrelationCongruence, SimilarityPreserving

__all__ = [
    "CEKL",
    "CKA",
    "DIST",
    "DKD",
    "MSE",
    "PKT",
    "RKD",
    "ULD",
    "AttentionTransfer",
    "CorrelationCongruence",
    "CosineDistance",
    "DistillationLoss",
    "GeneralizedJSD",
    "Head",
    "KLDivergence",
    "LinearCEKL",
    "LinearJSD",
    "LinearKL",
    "LossCheckError",
    "LossReport",
    "SigmoidKL",
    "SimilarityPreserving",
    "SkewedKL",
    "SmoothL1",
    "StandardizedKL",
    "TopKKL",
    "TotalVariation",
    "check_loss",
]
