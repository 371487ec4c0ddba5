"""Chunked losses: heads, hard labels, unlike vocabularies."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from softs_lightning.losses import Head
from softs_lightning.losses import functional as LF
from tests.parity.comparison import Comparison, Function
from tests.parity.peers import module

BATCH, TOKENS, WIDTH, TEACHER_WIDTH, VOCABULARY = 2, 9, 6, 8, 23


def _head(vocabulary: int, width: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocabulary, width, generator=generator, dtype=torch.float64) / 2


WEIGHT, TEACHER_WEIGHT = _head(VOCABULARY, WIDTH, 1), _head(VOCABULARY, TEACHER_WIDTH, 2)
WIDE = _head(VOCABULARY + 5, TEACHER_WIDTH, 2)
LABELS = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(3))
LABELS[0, :3] = -100


def liger(name: str, labels: Tensor, teacher_weight: Tensor = TEACHER_WEIGHT, **options: Any) -> Function:
    """A fused loss of Liger on flattened tokens, uncompiled, in chunks of five."""

    def other(student: Tensor, teacher: Tensor) -> Tensor:
        loss = getattr(module("liger_kernel.chunked_loss"), name)(compiled=False, chunk_size=5, **options)
        result: Tensor = loss(
            student.flatten(0, 1), WEIGHT, teacher.flatten(0, 1), teacher_weight, labels.flatten()
        )
        return result

    return other


def soft(labels: Tensor = LABELS, **options: Any) -> Function:
    jsd = {"weight_hard_loss": 0.0, "weight_soft_loss": 1.0}
    return liger("LigerFusedLinearJSDLoss", labels, **jsd, **options)


def jsd(beta: float, temperature: float = 1.0) -> Function:
    return lambda student, teacher: LF.linear_jsd(
        student,
        teacher,
        Head(WEIGHT),
        Head(TEACHER_WEIGHT),
        beta=beta,
        temperature=temperature,
        mask=LABELS != -100,
        chunk_size=4,
    )


def ce_kl(temperature: float = 1.0, shift: bool = False, hard: float = 0.3) -> Function:
    return lambda student, teacher: LF.linear_ce_kl(
        student,
        teacher,
        Head(WEIGHT),
        Head(TEACHER_WEIGHT),
        LABELS,
        hard=hard,
        temperature=temperature,
        shift=shift,
        chunk_size=4,
    )


def cut(student: Tensor, teacher: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LF.linear_jsd(student, teacher, Head(WEIGHT), Head(WIDE), mask=LABELS != -100)


def with_phantoms(student: Tensor, teacher: Tensor) -> Tensor:
    return LF.linear_jsd(student, teacher, Head(F.pad(WEIGHT, (0, 0, 0, 5))), Head(WIDE), mask=LABELS != -100)


def cosine(student: Tensor, teacher: Tensor) -> Tensor:
    return LF.cosine_distance(student @ WEIGHT.T, teacher @ TEACHER_WEIGHT.T, mask=LABELS != -100)


HIDDEN, TEACHER_HIDDEN = (BATCH, TOKENS, WIDTH), (BATCH, TOKENS, TEACHER_WIDTH)
SHAPES: dict[str, Any] = {
    "student": HIDDEN,
    "teacher": TEACHER_HIDDEN,
    "peer": "liger-kernel",
    "rtol": 1e-6,  # its sums are float32
}
MIXED = {"weight_hard_loss": 0.3, "weight_soft_loss": 0.7, "beta": 0}
LANGUAGE_MODELS = [
    Comparison(
        loss="LinearKL",
        ours="`LinearKL()`, mask",
        theirs="`LigerFusedLinearJSDLoss(0, 1, beta=0)`, labels",
        run=lambda s, t: LF.linear_kl(s, t, Head(WEIGHT), Head(TEACHER_WEIGHT), mask=LABELS != -100),
        other=soft(beta=0),
        **SHAPES,
    ),
    Comparison(
        loss="LinearJSD",
        ours="`LinearJSD(0.3)`, mask",
        theirs="`LigerFusedLinearJSDLoss(0, 1, beta=0.3)`, labels",
        run=jsd(0.3),
        other=soft(beta=0.3),
        **SHAPES,
    ),
    Comparison(
        loss="LinearJSD",
        ours="`LinearJSD(0.3, 2.0)`, mask",
        theirs="`LigerFusedLinearJSDLoss(0, 1, beta=0.3, temperature=2)`, labels",
        run=jsd(0.3, 2.0),
        other=soft(beta=0.3, temperature=2.0),
        reason="temperature: no factor T²",
        corrected=lambda s, t: jsd(0.3, 2.0)(s, t) / 4,
        **SHAPES,
    ),
    Comparison(
        loss="LinearJSD",
        ours="`LinearJSD()`, a teacher with 5 more entries",
        theirs="`LigerFusedLinearJSDLoss(0, 1)`",
        run=cut,
        other=soft(teacher_weight=WIDE),
        reason="vocabulary: gives the student logits of 0 for the entries it lacks, where ours cuts the teacher's",
        corrected=with_phantoms,
        **SHAPES,
    ),
    Comparison(
        loss="LinearCEKL",
        ours="`LinearCEKL(0.3, shift=False)`",
        theirs="`LigerFusedLinearJSDLoss(0.3, 0.7, beta=0)`",
        run=ce_kl(),
        other=liger("LigerFusedLinearJSDLoss", LABELS, **MIXED),
        **SHAPES,
    ),
    Comparison(
        loss="LinearCEKL",
        ours="`LinearCEKL(0.3)`",
        theirs="`LigerFusedLinearJSDLoss(0.3, 0.7, beta=0)`, the same labels",
        run=ce_kl(shift=True),
        other=liger("LigerFusedLinearJSDLoss", LABELS, **MIXED),
        reason="shift: takes labels that are shifted already",
        corrected=ce_kl(shift=False),
        **SHAPES,
    ),
    Comparison(
        loss="LinearCEKL",
        ours="`LinearCEKL(0.3, 2.0, shift=False)`",
        theirs="`LigerFusedLinearJSDLoss(0.3, 0.7, beta=0, temperature=2)`",
        run=ce_kl(2.0),
        other=liger("LigerFusedLinearJSDLoss", LABELS, temperature=2.0, **MIXED),
        reason="temperature: no factor T² on the soft part",
        corrected=lambda s, t: ce_kl(2.0, hard=0.0)(s, t) * 0.7 / 4 + ce_kl(hard=1.0)(s, t) * 0.3,
        **SHAPES,
    ),
    Comparison(
        loss="CosineDistance",
        ours="`CosineDistance()` on the logits, mask",
        theirs="`LigerFusedLinearCosineSimilarityLoss(0, 1, beta=1)`, labels",
        run=cosine,
        other=liger(
            "LigerFusedLinearCosineSimilarityLoss",
            LABELS,
            weight_hard_loss=0.0,
            weight_soft_loss=1.0,
            beta=1.0,
        ),
        **SHAPES,
    ),
]
