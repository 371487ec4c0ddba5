"""Losses on logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from softs_lightning import losses
from tests.parity.comparison import Comparison, Function, entropy
from tests.parity.peers import file_of, module

ROWS, CLASSES, TOKENS = 12, 10, 5
CLASS_LABELS = torch.arange(ROWS) % CLASSES
TOKEN_LABELS = torch.tensor([[1, 2, -100, 4, -100], [-100, 7, 8, -100, -100], [3, 3, 3, 3, 3]])
MASK = TOKEN_LABELS != -100
NO_SQUARE = "no factor T²"


def torchdistill(name: str, targets: Tensor | None = None, **options: Any) -> Function:
    """A mid-level loss of torchdistill on what one module of each model returns."""
    where = {f"{side}_module_{part}": "m" for side in ("student", "teacher") for part in ("path", "io")}

    def other(student: Tensor, teacher: Tensor) -> Tensor:
        loss = getattr(module("torchdistill.losses.mid_level"), name)(**where, **options)
        result: Tensor = loss({"m": {"m": student}}, {"m": {"m": teacher}}, targets=targets)
        return result

    return other


def torchtune(name: str) -> Function:
    def other(student: Tensor, teacher: Tensor) -> Tensor:
        loss = getattr(file_of("torchtune", "torchtune/modules/loss/kd_losses.py"), name)()
        result: Tensor = loss(student, teacher, TOKEN_LABELS)
        return result

    return other


def modelopt(reduction: str) -> Function:
    def other(student: Tensor, teacher: Tensor) -> Tensor:
        loss = module("modelopt.torch.distill.losses").LogitsDistillationLoss(2.0, reduction)
        result: Tensor = loss(student, teacher)
        return result

    return other


def torchmetrics(name: str, **options: Any) -> Function:
    def other(student: Tensor, teacher: Tensor) -> Tensor:
        logs = teacher.log_softmax(-1), student.log_softmax(-1)
        result: Tensor = getattr(module("torchmetrics.functional.regression"), name)(
            *logs, log_prob=True, **options
        )
        return result

    return other


def masked_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    return entropy(teacher[MASK])


def kl(temperature: float = 1.0, direction: str = "forward", mask: Tensor | None = None) -> Function:
    loss = losses.KLDivergence(temperature, direction)
    return lambda student, teacher: loss(student, teacher, mask=mask)


def trl_jsd(beta: float, temperature: float) -> Function:
    def other(student: Tensor, teacher: Tensor) -> Tensor:
        trainer = module("trl.experimental.gkd.gkd_trainer").GKDTrainer
        result: Tensor = trainer.generalized_jsd_loss(
            student, teacher, labels=TOKEN_LABELS, beta=beta, temperature=temperature
        )
        return result

    return other


def jsd(beta: float, temperature: float = 1.0) -> Function:
    loss = losses.GeneralizedJSD(beta, temperature)
    return lambda student, teacher: loss(student, teacher, mask=MASK)


def ce_kl(student: Tensor, teacher: Tensor) -> Tensor:
    loss: Tensor = losses.CEKL(0.3, 2.0)(student, teacher, batch={"labels": CLASS_LABELS})
    return loss


def standardized_and_hard(student: Tensor, teacher: Tensor) -> Tensor:
    soft: Tensor = losses.StandardizedKL(2.0)(student, teacher)
    return 0.5 * torch.nn.functional.cross_entropy(student, CLASS_LABELS) + 9 * soft


GOLD_LABELS = torch.tensor([[-100, 1, 2, 3, 4, 5], [-100, -100, -100, 1, 2, 3]])


def trl_uld(student: Tensor, teacher: Tensor) -> Tensor:
    gold = module("trl.experimental.gold.gold_trainer")
    config = module("types").SimpleNamespace(
        uld_crossentropy_weight=0.0,
        uld_distillation_weight=1.0,
        uld_student_temperature=1.0,
        uld_teacher_temperature=1.0,
        uld_skip_student_eos=False,
        uld_skip_teacher_eos=False,
        use_extended_uld=False,
        uld_token_merge_strategy="bayesian",
    )
    ids = GOLD_LABELS.clamp_min(0)
    result: Tensor = gold.ULDLoss(config)(student, teacher, GOLD_LABELS, GOLD_LABELS, ids, ids)
    return result


def uld(student: Tensor, teacher: Tensor) -> Tensor:
    loss: Tensor = losses.ULD()(student, teacher, mask=losses.functional.prediction_mask(GOLD_LABELS))
    return loss


def uld_by_sequence(student: Tensor, teacher: Tensor) -> Tensor:
    mask = losses.functional.prediction_mask(GOLD_LABELS)
    rows = [losses.ULD()(s, t, mask=m) for s, t, m in zip(student, teacher, mask, strict=True)]
    return torch.stack(rows).mean()


FLAT, SEQUENCES = (ROWS, CLASSES), (3, TOKENS, CLASSES)
LOGITS = [
    Comparison(
        "KLDivergence",
        "`KLDivergence()`",
        "torchmetrics",
        "`kl_divergence`",
        kl(),
        torchmetrics("kl_divergence"),
        FLAT,
    ),
    Comparison(
        "KLDivergence",
        "`KLDivergence(4.0)`",
        "torchdistill",
        "`KDLoss(temperature=4, alpha=0)`",
        kl(4.0),
        torchdistill("KDLoss", temperature=4.0, alpha=0),
        FLAT,
        reason=f"temperature: {NO_SQUARE} where `alpha` is 0",
        corrected=lambda s, t: kl(4.0)(s, t) / 16,
    ),
    Comparison(
        "KLDivergence",
        "`KLDivergence(2.0)`",
        "nvidia-modelopt",
        "`LogitsDistillationLoss(2.0)`",
        kl(2.0),
        modelopt("mean"),
        FLAT,
        reason="reduction: its default `mean` divides by the classes as well",
        corrected=lambda s, t: kl(2.0)(s, t) / CLASSES,
    ),
    Comparison(
        "KLDivergence",
        "`KLDivergence(2.0)` on tokens",
        "nvidia-modelopt",
        '`LogitsDistillationLoss(2.0, "batchmean")`',
        kl(2.0),
        modelopt("batchmean"),
        SEQUENCES,
        reason="reduction: `batchmean` divides by the sequences, not by their tokens",
        corrected=lambda s, t: kl(2.0)(s, t) * TOKENS,
    ),
    Comparison(
        "KLDivergence",
        "`KLDivergence(2.0)`",
        "textbrewer",
        "`kd_ce_loss(temperature=2)`",
        kl(2.0),
        lambda s, t: module("textbrewer.losses").kd_ce_loss(s, t, temperature=2),
        FLAT,
        reason=f"temperature: {NO_SQUARE}; a cross-entropy: not 0 at the teacher, but its entropy",
        corrected=lambda s, t: kl(2.0)(s, t) / 4 + entropy(t / 2),
    ),
    Comparison(
        "KLDivergence",
        "`KLDivergence()`, mask",
        "torchtune",
        "`ForwardKLLoss`",
        kl(mask=MASK),
        torchtune("ForwardKLLoss"),
        SEQUENCES,
        reason="a cross-entropy: not 0 at the teacher, but its entropy",
        corrected=lambda s, t: kl(mask=MASK)(s, t) + masked_entropy(s, t),
        rtol=1e-5,
    ),
    Comparison(
        "KLDivergence",
        '`KLDivergence(direction="reverse")`, mask',
        "torchtune",
        "`ReverseKLLoss`",
        kl(direction="reverse", mask=MASK),
        torchtune("ReverseKLLoss"),
        SEQUENCES,
        rtol=1e-5,
    ),
    Comparison(
        "KLDivergence",
        '`KLDivergence(direction="symmetric")`, mask',
        "torchtune",
        "`SymmetricKLLoss`",
        kl(direction="symmetric", mask=MASK),
        torchtune("SymmetricKLLoss"),
        SEQUENCES,
        reason="its forward half is a cross-entropy: half the teacher's entropy above ours",
        corrected=lambda s, t: kl(direction="symmetric", mask=MASK)(s, t) + masked_entropy(s, t) / 2,
        rtol=1e-5,
    ),
    Comparison(
        "GeneralizedJSD",
        "`GeneralizedJSD(0.5)`",
        "torchmetrics",
        "`jensen_shannon_divergence`",
        lambda s, t: losses.GeneralizedJSD(0.5)(s, t),
        torchmetrics("jensen_shannon_divergence"),
        FLAT,
        rtol=1e-6,
    ),
    *(
        Comparison(
            "GeneralizedJSD",
            f"`GeneralizedJSD({beta})`, mask",
            "trl",
            f"`GKDTrainer.generalized_jsd_loss(beta={beta})`, labels",
            jsd(beta),
            trl_jsd(beta, 1.0),
            SEQUENCES,
        )
        for beta in (0, 0.3, 1)
    ),
    Comparison(
        "GeneralizedJSD",
        "`GeneralizedJSD(0.3, 2.0)`, mask",
        "trl",
        "`GKDTrainer.generalized_jsd_loss(beta=0.3, temperature=2)`, labels",
        jsd(0.3, 2.0),
        trl_jsd(0.3, 2.0),
        SEQUENCES,
        reason=f"temperature: {NO_SQUARE}",
        corrected=lambda s, t: jsd(0.3, 2.0)(s, t) / 4,
    ),
    Comparison(
        "CEKL",
        "`CEKL(0.3, 2.0)`",
        "torchdistill",
        "`KDLoss(temperature=2, alpha=0.3)`",
        ce_kl,
        torchdistill("KDLoss", CLASS_LABELS, temperature=2.0, alpha=0.3),
        FLAT,
    ),
    Comparison(
        "StandardizedKL",
        "`StandardizedKL(2.0)`",
        "torchdistill",
        "`LogitStdKDLoss(temperature=2, alpha=0.5, beta=9)`",
        lambda s, t: losses.StandardizedKL(2.0)(s, t),
        torchdistill("LogitStdKDLoss", CLASS_LABELS, temperature=2.0, alpha=0.5, beta=9),
        FLAT,
        reason="holds the task's cross-entropy as well: `0.5 · cross-entropy + 9 · ours`",
        corrected=standardized_and_hard,
        rtol=1e-6,
    ),
    Comparison(
        "DIST",
        "`DIST(temperature=2.0)`",
        "torchdistill",
        "`DISTLoss(tau=2)`",
        lambda s, t: losses.DIST(temperature=2.0)(s, t),
        torchdistill("DISTLoss", tau=2.0),
        FLAT,
    ),
    Comparison(
        "ULD",
        "`ULD()`, `prediction_mask(labels)`",
        "trl",
        "`ULDLoss` of GOLD, `use_extended_uld=False`",
        uld,
        trl_uld,
        (2, 6, 8),
        (2, 6, 11),
        reason="reduction: a mean over sequences of each one's mean over tokens, not over all tokens",
        corrected=uld_by_sequence,
    ),
]
