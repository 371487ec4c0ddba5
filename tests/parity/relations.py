"""Losses on the relations within a batch, and contrastive ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softs_lightning import losses
from softs_lightning.losses import functional as LF
from tests.parity.comparison import Comparison, Function
from tests.parity.peers import module

ROWS = 10
STUDENT, TEACHER = (ROWS, 6), (ROWS, 9)


def of_outputs(name: str, *, where: str = "output_path", **options: Any) -> Function:
    """A relational loss of torchdistill on what one module of each model returns."""

    def other(student: Tensor, teacher: Tensor) -> Tensor:
        paths = {f"{side}_{where}": "m" for side in ("student", "teacher")}
        loss = getattr(module("torchdistill.losses.mid_level"), name)(**paths, **options)
        result: Tensor = loss({"m": {"output": student}}, {"m": {"output": teacher}})
        return result

    return other


def similarity_by_sums(student: Tensor, teacher: Tensor) -> Tensor:
    """Rows of the similarity matrix over the sum of their magnitudes, not over their length."""
    one, two = (F.normalize(x @ x.T, p=1) for x in (student, teacher))
    return (one - two).square().mean()


def pkt(student: Tensor, teacher: Tensor) -> Tensor:
    loss = module("torchdistill.losses.mid_level").PKTLoss("m", "output", "m", "output")
    result: Tensor = loss({"m": {"output": student}}, {"m": {"output": teacher}})
    return result


def pkt_with_itself(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(teacher ‖ student) of neighbours, each sample among its own, over all n² entries."""
    logs = []
    for rows in (student, teacher):
        unit = F.normalize(rows)
        similarity = (1 + unit @ unit.T) / 2
        logs.append((similarity / similarity.sum(1, keepdim=True)).log())
    return (logs[1].exp() * (logs[1] - logs[0])).mean()


def correlation(student: Tensor, teacher: Tensor) -> Tensor:
    kernel = {"type": "gaussian", "gamma": 0.4, "max_p": 2}
    loss = module("torchdistill.losses.mid_level").CCKDLoss("m", "m", kernel, "batchmean")
    # It expects unit rows of its models; ours makes them.
    sides = [{"m": {"output": F.normalize(x)}} for x in (student, teacher)]
    result: Tensor = loss(*sides)
    return result


SAMPLES, NEGATIVES, DIM = 20, 7, 6


def _memories() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    memories = F.normalize(torch.randn(2, SAMPLES, DIM, generator=generator, dtype=torch.float64), dim=-1)
    index = torch.arange(ROWS)
    return memories[0], memories[1], index, torch.randint(SAMPLES, (ROWS, NEGATIVES), generator=generator)


def crd(student: Tensor, teacher: Tensor) -> Tensor:
    loss = losses.CRD(DIM, DIM, SAMPLES, dim=DIM, negatives=NEGATIVES).double()
    one, two, index, others = _memories()
    for embed in (loss.student_embed, loss.teacher_embed):
        nn.init.eye_(embed.weight)
        nn.init.zeros_(embed.bias)
    loss.student_memory.copy_(one)
    loss.teacher_memory.copy_(two)
    loss._draw = lambda _: others  # type: ignore[method-assign]
    result: Tensor = loss(student, teacher, batch={"index": index})
    return result


def torchdistill_crd(student: Tensor, teacher: Tensor) -> Tensor:
    loss = module("torchdistill.losses.mid_level").CRDLoss(
        "n", "e", "n", DIM, SAMPLES, NEGATIVES, SAMPLES, temperature=0.07
    )
    one, two, index, others = _memories()
    loss = loss.double()
    loss.memory_v1.copy_(one)
    loss.memory_v2.copy_(two)
    chosen = torch.cat([index[:, None], others], 1)
    io = {"n": {"output": F.normalize(student)}, "e": {"input": {"pos_idx": index, "contrast_idx": chosen}}}
    result: Tensor = loss(io, {"n": {"output": F.normalize(teacher)}})
    return result.sum()


RELATIONS = [
    Comparison(
        "SimilarityPreserving",
        "`SimilarityPreserving()`",
        "torchdistill",
        '`SPKDLoss("batchmean")`',
        LF.similarity_preserving,
        of_outputs("SPKDLoss", reduction="batchmean"),
        STUDENT,
        TEACHER,
        reason="divides each row of similarities by its L1 norm, the paper by its L2 norm",
        corrected=similarity_by_sums,
    ),
    Comparison(
        "CorrelationCongruence",
        "`CorrelationCongruence()`",
        "torchdistill",
        '`CCKDLoss("batchmean")`, unit rows',
        LF.correlation_congruence,
        correlation,
        STUDENT,
        TEACHER,
        reason="reduction: a norm over n², where the paper squares it",
        corrected=lambda s, t: LF.correlation_congruence(s, t).sqrt() / ROWS,
    ),
    Comparison(
        "RKD",
        "`RKD()`",
        "torchdistill",
        "`RKDLoss(dist_factor=1, angle_factor=2)`",
        lambda s, t: losses.RKD()(s, t),
        of_outputs("RKDLoss", dist_factor=1.0, angle_factor=2.0, reduction="mean"),
        STUDENT,
        TEACHER,
    ),
    Comparison(
        "PKT",
        "`PKT()`",
        "torchdistill",
        "`PKTLoss`",
        LF.pkt,
        pkt,
        STUDENT,
        TEACHER,
        reason="counts each sample as its own neighbour, and divides by n² instead of n",
        corrected=pkt_with_itself,
        rtol=1e-5,  # its eps of 1e-7
    ),
    Comparison(
        "CRD",
        "`CRD()`, same memories and negatives",
        "torchdistill",
        "`CRDLoss`",
        crd,
        torchdistill_crd,
        (ROWS, DIM),
        rtol=1e-6,  # its eps of 1e-7
    ),
]
