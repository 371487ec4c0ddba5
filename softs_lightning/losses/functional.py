"""The pure functions under the loss modules: ``function(student, teacher, *, ...) -> scalar``."""

from __future__ import annotations

from softs_lightning.losses.divergences import (
    generalized_jsd,
    kl_divergence,
    skewed_kl,
    total_variation,
)
from softs_lightning.losses.features import cosine_distance, mse, smooth_l1
from softs_lightning.losses.linear import linear_ce_kl, linear_jsd, linear_kl
from softs_lightning.losses.logits import ce_kl, dist, dkd, sigmoid_kl, standardized_kl, topk_kl, uld
from softs_lightning.losses.maps import attention_transfer
from softs_lightning.losses.relations import (
    cka,
    correlation_congruence,
    pkt,
    rkd_angle,
    rkd_distance,
    similarity_preserving,
)
from softs_lightning.losses.tokens import next_labels, prediction_mask

__all__ = [
    "attention_transfer",
    "ce_kl",
    "cka",
    "correlation_congruence",
    "cosine_distance",
    "dist",
    "dkd",
    "generalized_jsd",
    "kl_divergence",
    "linear_ce_kl",
    "linear_jsd",
    "linear_kl",
    "mse",
    "next_labels",
    "pkt",
    "prediction_mask",
    "rkd_angle",
    "rkd_distance",
    "sigmoid_kl",
    "similarity_preserving",
    "skewed_kl",
    "smooth_l1",
    "standardized_kl",
    "topk_kl",
    "total_variation",
    "uld",
]
