"""The pure functions under the loss modules: ``function(student, teacher, *, ...) -> scalar``."""

from __future__ import annotations

from softs_lightning.losses.divergences import (
    generalized_jsd,
    kl_divergence,
    skewed_kl,
    total_variation,
)
from softs_lightning.losses.features import cosine_distance, mse, smooth_l1
from softs_lightning.losses.maps import attention_transfer

__all__ = [
    "attention_transfer",
    "cosine_distance",
    "generalized_jsd",
    "kl_divergence",
    "mse",
    "skewed_kl",
    "smooth_l1",
    "total_variation",
]
