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
    "CKA": "against a float64 loop in `tests/test_losses_relations.py`",
    "ChannelWise": "against scipy in `tests/test_losses_maps.py`; mmrazor, which has it, does not install",
    "DKD": "against its decomposition of scipy's KL in `tests/test_losses_logits.py`",
    "MiniLMRelation": "against a float64 loop in `tests/test_losses_features.py`",
    "NST": "against the kernels written out in `tests/test_losses_maps.py`; TextBrewer's `mmd_loss` is another loss",
    "OFD": "against scipy's truncated normal and a loop in `tests/test_losses_maps.py`",
    "QueueKL": "against a queue kept by hand in `tests/test_losses_trained.py`",
    "SigmoidKL": "against scipy in `tests/test_losses_logits.py`",
    "SkewedKL": "against scipy in `tests/test_losses_divergences.py`",
    "TopKKL": "against scipy in `tests/test_losses_logits.py`",
    "TotalVariation": "against numpy in `tests/test_losses_divergences.py`; Liger's needs Triton",
    "WhitenedCosine": "against sklearn's PCA in `tests/test_losses_trained.py`",
}
"""Losses that no installable peer has, and what they are checked against instead."""
