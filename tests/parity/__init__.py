"""The losses against those of other libraries, on the same tensors.

``python -m tests.parity`` writes ``.docs/parity.md``; ``test_parity.py`` asserts what it says. Peers are
optional: a comparison runs where its peer is installed.
"""

from __future__ import annotations

from tests.parity.comparison import Comparison, Difference, compare
from tests.parity.features import FEATURES
from tests.parity.language_models import LANGUAGE_MODELS
from tests.parity.logits import LOGITS
from tests.parity.rankings import RANKINGS
from tests.parity.relations import RELATIONS

__all__ = ["COMPARISONS", "WITHOUT_A_PEER", "Comparison", "Difference", "compare"]

COMPARISONS: list[Comparison] = [*LOGITS, *LANGUAGE_MODELS, *FEATURES, *RELATIONS, *RANKINGS]

WITHOUT_A_PEER: dict[str, str] = {
    "CKA": "test_losses_relations.py::test_cka_equals_its_definition_on_either_path",
    "ChunkedKL": "test_losses_chunked.py::test_value_and_gradient_are_those_on_whole_tensors",
    "ChannelWise": "test_losses_maps.py::test_channel_wise_equals_scipys_entropies",
    "DKD": "test_losses_logits.py::test_dkd_equals_its_two_divergences",
    "MiniLMRelation": "test_losses_maps.py::test_minilm_equals_a_loop_over_relation_heads",
    "NST": "test_losses_maps.py::test_nst_equals_sklearns_kernels",
    "OFD": "test_losses_maps.py::test_ofd_equals_its_three_cases",
    "QueueKL": "test_losses_trained.py::test_queue_kl_compares_with_what_was_pushed_and_no_more",
    "SigmoidKL": "test_losses_logits.py::test_sigmoid_kl_equals_binary_entropies",
    "SkewedKL": "test_losses_divergences.py::test_skewed_kl_equals_the_kl_to_the_mixture",
    "TopKKL": "test_losses_logits.py::test_topk_kl_equals_the_kl_of_k_classes_and_a_bucket",
    "TotalVariation": "test_losses_divergences.py::test_total_variation_is_half_the_l1_distance",
    "WhitenedCosine": "test_losses_trained.py::test_whitened_embeddings_have_unit_covariance",
}
"""Losses that no installable peer has, and the test that checks them against something else."""
