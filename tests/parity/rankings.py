"""Losses for rankers and retrievers: a query and its candidates."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from softs_lightning.losses import functional as LF
from tests.parity.comparison import Comparison, Function
from tests.parity.peers import module

QUERIES, CANDIDATES, WIDTH = 5, 4, 6
SCORES = (QUERIES, CANDIDATES)


def of_embeddings(name: str, **options: Any) -> Function:
    """A retriever's loss on embeddings whose dot products are the scores."""

    def other(student: Tensor, teacher: Tensor) -> Tensor:
        package = module("sentence_transformers.sentence_transformer.losses")
        loss = getattr(package, name)(nn.Identity(), **options)
        queries = torch.ones(QUERIES, 1, dtype=student.dtype)
        columns = [queries, *(student[:, i : i + 1] for i in range(CANDIDATES))]
        result: Tensor = loss.compute_loss_from_embeddings(columns, teacher)
        return result

    return other


class Ranker(nn.Module):
    """As much of a cross-encoder as gives the scores it was made with."""

    num_labels = 1
    device = torch.device("cpu")

    def __init__(self, scores: Tensor) -> None:
        super().__init__()
        self.scores = scores

    def preprocess(self, pairs: Any, **_: Any) -> dict[str, Tensor]:
        return {}

    def forward(self, _: Any) -> dict[str, Tensor]:
        return {"scores": self.scores.flatten()}


def list_mle(student: Tensor, teacher: Tensor) -> Tensor:
    package = module("sentence_transformers.cross_encoder.losses")
    loss = package.ListMLELoss(Ranker(student), mini_batch_size=-1, respect_input_order=False)
    documents = [[str(i) for i in range(CANDIDATES)] for _ in range(QUERIES)]
    result: Tensor = loss([["q"] * QUERIES, documents], list(teacher))
    return result


RANKINGS = [
    Comparison(
        "MarginMSE",
        "`MarginMSE()`",
        "sentence-transformers",
        "`MarginMSELoss`",
        LF.margin_mse,
        of_embeddings("MarginMSELoss"),
        SCORES,
    ),
    Comparison(
        "ListwiseKL",
        "`ListwiseKL(2.0)`",
        "sentence-transformers",
        "`DistillKLDivLoss(temperature=2)`",
        lambda s, t: LF.listwise_kl(s, t, temperature=2.0),
        of_embeddings("DistillKLDivLoss", temperature=2.0),
        SCORES,
    ),
    Comparison(
        "ListMLE",
        "`ListMLE()`",
        "sentence-transformers",
        "`ListMLELoss(respect_input_order=False)`",
        LF.list_mle,
        list_mle,
        SCORES,
        reason="reduction: a sum over the places of a query, where ours is a mean",
        corrected=lambda s, t: LF.list_mle(s, t) * CANDIDATES,
        rtol=1e-5,
    ),
]
