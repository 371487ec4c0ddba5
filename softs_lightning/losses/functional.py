"""The pure functions under the loss modules: ``function(student, teacher, *, ...) -> scalar``."""

from __future__ import annotations

from softs_lightning.losses.chunked import chunked_kl
from softs_lightning.losses.divergences import generalized_jsd, kl_divergence, skewed_kl, total_variation
from softs_lightning.losses.features import cosine_distance, mse, smooth_l1
from softs_lightning.losses.linear import linear_ce_kl, linear_jsd, linear_kl
from softs_lightning.losses.logits import ce_kl, dist, dkd, sigmoid_kl, standardized_kl, topk_kl, uld
from softs_lightning.losses.maps import (
    attention_transfer,
    channel_wise,
    flow_of_solution,
    negative_response,
    neuron_selectivity,
    partial_l2,
)
from softs_lightning.losses.ranking import list_mle, listwise_kl, margin_mse
from softs_lightning.losses.relations import (
    cka,
    correlation_congruence,
    pkt,
    rkd_angle,
    rkd_distance,
    similarity_preserving,
)
from softs_lightning.losses.tokens import next_labels, prediction_mask
from softs_lightning.losses.trained import gaussian_nll, hierarchical_context, log_sum
from softs_lightning.losses.transformers import attention_kl, attention_mse, minilm_relation, patient_distance

__all__ = [
    "attention_kl",
    "attention_mse",
    "attention_transfer",
    "ce_kl",
    "channel_wise",
    "chunked_kl",
    "cka",
    "correlation_congruence",
    "cosine_distance",
    "dist",
    "dkd",
    "flow_of_solution",
    "gaussian_nll",
    "generalized_jsd",
    "hierarchical_context",
    "kl_divergence",
    "linear_ce_kl",
    "linear_jsd",
    "linear_kl",
    "list_mle",
    "listwise_kl",
    "log_sum",
    "margin_mse",
    "minilm_relation",
    "mse",
    "negative_response",
    "neuron_selectivity",
    "next_labels",
    "partial_l2",
    "patient_distance",
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
