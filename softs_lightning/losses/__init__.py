"""Distillation losses: ``loss(student, teacher, *, mask=None) -> scalar``.

One file a family, the pure functions above the thin modules. Computed in float32 at least, also under
autocast; float64 stays float64.
"""

from __future__ import annotations

from softs_lightning.losses.arithmetic import DistillationLoss
from softs_lightning.losses.chunked import ChunkedKL
from softs_lightning.losses.conformance import LossCheckError, LossReport, check_loss
from softs_lightning.losses.divergences import GeneralizedJSD, KLDivergence, SkewedKL, TotalVariation
from softs_lightning.losses.features import MSE, CosineDistance, SmoothL1
from softs_lightning.losses.heads import Head
from softs_lightning.losses.language_models import LinearCEKL, LinearJSD, LinearKL
from softs_lightning.losses.logits import CEKL, DIST, DKD, ULD, SigmoidKL, StandardizedKL, TopKKL
from softs_lightning.losses.maps import FSP, NST, OFD, AttentionTransfer, ChannelWise
from softs_lightning.losses.memory import CRD, QueueKL, WhitenedCosine
from softs_lightning.losses.ranking import ListMLE, ListwiseKL, MarginMSE
from softs_lightning.losses.relations import CKA, PKT, RKD, CorrelationCongruence, SimilarityPreserving
from softs_lightning.losses.trained import MGD, SRD, VID, ReviewKD
from softs_lightning.losses.transformers import PKD, AttentionKL, AttentionMSE, MiniLMRelation

__all__ = [
    "CEKL",
    "CKA",
    "CRD",
    "DIST",
    "DKD",
    "FSP",
    "MGD",
    "MSE",
    "NST",
    "OFD",
    "PKD",
    "PKT",
    "RKD",
    "SRD",
    "ULD",
    "VID",
    "AttentionKL",
    "AttentionMSE",
    "AttentionTransfer",
    "ChannelWise",
    "ChunkedKL",
    "CorrelationCongruence",
    "CosineDistance",
    "DistillationLoss",
    "GeneralizedJSD",
    "Head",
    "KLDivergence",
    "LinearCEKL",
    "LinearJSD",
    "LinearKL",
    "ListMLE",
    "ListwiseKL",
    "LossCheckError",
    "LossReport",
    "MarginMSE",
    "MiniLMRelation",
    "QueueKL",
    "ReviewKD",
    "SigmoidKL",
    "SimilarityPreserving",
    "SkewedKL",
    "SmoothL1",
    "StandardizedKL",
    "TopKKL",
    "TotalVariation",
    "WhitenedCosine",
    "check_loss",
]
