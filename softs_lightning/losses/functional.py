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
from softs_lightning.losses.maps import attention_transfer
from softs_lightning.losses.tokens import next_labels, prediction_mask

__all__ = [
    "attention_transfer",
    "cosine_distance",
    "generalized_jsd",
    "kl_divergence",
    "linear_ce_kl",
    "linear_jsd",
    "linear_kl",
    "mse",
    "next_labels",
    "prediction_mask",
    "skewed_kl",
    "smooth_l1",
    "total_variation",
]
