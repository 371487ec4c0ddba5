"""Losses on features, maps and attention, and those that learn something."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softs_lightning import losses
from softs_lightning.losses import functional as LF
from tests.parity.comparison import Comparison, Function, entropy
from tests.parity.peers import module

TOKENS = (3, 6, 8)
MAPS, TEACHER_MAPS = (3, 4, 6, 6), (3, 7, 6, 6)
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0]])


def textbrewer(name: str, mask: Tensor | None = None) -> Function:
    def other(student: Tensor, teacher: Tensor) -> Tensor:
        result: Tensor = getattr(module("textbrewer.losses"), name)(student, teacher, mask)
        return result

    return other


def embed_distill(metric: str) -> Function:
    def other(student: Tensor, teacher: Tensor) -> Tensor:
        package = module("sentence_transformers.sentence_transformer.losses")
        loss = package.EmbedDistillLoss(nn.Identity(), distance_metric=metric)
        result: Tensor = loss.compute_loss_from_embeddings([student], [teacher])
        return result

    return other


def torchmetrics(name: str) -> Function:
    def other(student: Tensor, teacher: Tensor) -> Tensor:
        result: Tensor = getattr(module("torchmetrics.functional.regression"), name)(student, teacher)
        return result

    return other


def mid_level(name: str) -> Any:
    return getattr(module("torchdistill.losses.mid_level"), name)


def _side(path: str) -> dict[str, str]:
    return {"io": "output", "path": path}


def attention_transfer(mode: str) -> Function:
    def other(student: Tensor, teacher: Tensor) -> Tensor:
        loss = mid_level("ATLoss")({"one": {"student": _side("m"), "teacher": _side("m")}}, mode=mode)
        result: Tensor = loss({"m": {"output": student}}, {"m": {"output": teacher}})
        return result

    return other


def transfer_by_norm(student: Tensor, teacher: Tensor) -> Tensor:
    rows = [LF.attention_transfer(s[None], t[None]) for s, t in zip(student, teacher, strict=True)]
    return (torch.stack(rows) * MAPS[2] * MAPS[3]).sqrt().mean()


# Two maps of each model in one tensor, split for the losses of two.
FIRST = 3


def halves(maps: Tensor) -> list[Tensor]:
    return list(maps.split([FIRST, maps.shape[1] - FIRST], 1))


def flow(student: Tensor, teacher: Tensor) -> Tensor:
    return LF.flow_of_solution(halves(student), halves(teacher))


def flow_by_norms(student: Tensor, teacher: Tensor) -> Tensor:
    """For each channel of the second map the norm over the first's channels, summed; a mean of samples."""
    total = student.new_zeros(())
    for s, t in zip(student[:, None], teacher[:, None], strict=True):
        (s1, s2), (t1, t2) = halves(s), halves(t)
        for j in range(s2.shape[1]):
            one = LF.flow_of_solution([s1, s2[:, j : j + 1]], [t1, t2[:, j : j + 1]])
            total = total + (one * FIRST).sqrt()
    return total / len(student)


def torchdistill_flow(student: Tensor, teacher: Tensor) -> Tensor:
    pair = {
        f"{side}_{which}": _side(which) for side in ("student", "teacher") for which in ("first", "second")
    }
    sides = [
        {which: {"output": part} for which, part in zip(("first", "second"), halves(x), strict=True)}
        for x in (student, teacher)
    ]
    result: Tensor = mid_level("FSPLoss")({"one": pair})(*sides)
    return result


def textbrewer_flow(student: Tensor, teacher: Tensor) -> Tensor:
    both = [list(x.split(4, -1)) for x in (student, teacher)]
    result: Tensor = module("textbrewer.losses").fsp_loss(*both, MASK)
    return result


def flow_of_tokens(student: Tensor, teacher: Tensor) -> Tensor:
    both = [list(x.split(4, -1)) for x in (student, teacher)]
    return LF.flow_of_solution(*both, channel_dim=-1, mask=MASK)


def hierarchical(student: Tensor, teacher: Tensor) -> Tensor:
    loss = mid_level("HierarchicalContextLoss")("m", "output", "m", "output")
    result: Tensor = loss({"m": {"output": (student, None)}}, {"m": {"output": teacher}})
    return result


VARIANCE = torch.linspace(0.5, 3, 8, dtype=torch.float64)


def vid(student: Tensor, teacher: Tensor) -> Tensor:
    loss = mid_level("VIDLoss")({"one": {"student": _side("m"), "teacher": _side("m")}})
    result: Tensor = loss({"m": {"output": (student, VARIANCE)}}, {"m": {"output": teacher}})
    return result


def srd(student: Tensor, teacher: Tensor) -> Tensor:
    names = [
        f"{s}_{k}_module_{p}"
        for s in ("student", "teacher")
        for k in ("feature", "linear")
        for p in ("path", "io")
    ]
    where = {name: ("output" if name.endswith("io") else name.split("_")[1]) for name in names}
    loss = mid_level("SRDLoss")(**where, exponent=4.0)
    sides = [{"feature": {"output": x}, "linear": {"output": x[:, :3]}} for x in (student, teacher)]
    result: Tensor = loss(*sides)
    return result


def srd_corrected(student: Tensor, teacher: Tensor) -> Tensor:
    distance = LF.log_sum(student, teacher, exponent=4.0, eps=0.0)
    summed = distance + torch.tensor(student.numel(), dtype=distance.dtype).log()
    return 2 * summed + LF.kl_divergence(student[:, :3], teacher[:, :3])


def mgd(student: Tensor, teacher: Tensor) -> Tensor:
    loss = _mgd().double()
    result: Tensor = loss(student, teacher)
    return result


def _mgd() -> losses.MGD:
    torch.manual_seed(1)
    return losses.MGD(4, 7, ratio=0.0)


def modelopt_mgd(student: Tensor, teacher: Tensor) -> Tensor:
    ours = _mgd()
    loss = module("modelopt.torch.distill.losses").MGDLoss(4, 7, lambda_mgd=0.0)
    loss.align.load_state_dict(ours.align.state_dict())
    loss.generation.load_state_dict(ours.generator.state_dict())
    result: Tensor = loss.double()(student, teacher)
    return result


def attention_kl(student: Tensor, teacher: Tensor) -> Tensor:
    return LF.attention_kl(student.softmax(-1), teacher.softmax(-1))


ATTENTION = (2, 3, 5, 5)
ALL = torch.ones(2, 5)
FEATURES = [
    Comparison(
        "MSE",
        "`MSE()`, mask",
        "textbrewer",
        "`hid_mse_loss`, mask",
        lambda s, t: LF.mse(s, t, mask=MASK),
        textbrewer("hid_mse_loss", MASK),
        TOKENS,
    ),
    Comparison(
        "MSE",
        "`MSE()`",
        "sentence-transformers",
        '`EmbedDistillLoss("mse")`',
        LF.mse,
        embed_distill("mse"),
        (12, 8),
    ),
    Comparison(
        "MSE",
        "`MSE()`",
        "torchmetrics",
        "`mean_squared_error`",
        LF.mse,
        torchmetrics("mean_squared_error"),
        (12, 8),
    ),
    Comparison(
        "SmoothL1",
        "`SmoothL1(0.5)`",
        "torch",
        "`smooth_l1_loss(beta=0.5)`",
        lambda s, t: LF.smooth_l1(s, t, beta=0.5),
        lambda s, t: F.smooth_l1_loss(s, t, beta=0.5),
        TOKENS,
    ),
    Comparison(
        "CosineDistance",
        "`CosineDistance()`, mask",
        "textbrewer",
        "`cos_loss`, mask",
        lambda s, t: LF.cosine_distance(s, t, mask=MASK),
        textbrewer("cos_loss", MASK),
        TOKENS,
    ),
    Comparison(
        "CosineDistance",
        "`CosineDistance()`",
        "sentence-transformers",
        '`EmbedDistillLoss("cosine")`',
        LF.cosine_distance,
        embed_distill("cosine"),
        (12, 8),
    ),
    Comparison(
        "PKD",
        "`PKD()`",
        "textbrewer",
        "`pkd_loss`",
        lambda s, t: losses.PKD()(s, t),
        textbrewer("pkd_loss"),
        TOKENS,
    ),
    Comparison(
        "AttentionMSE",
        "`AttentionMSE()`, mask",
        "textbrewer",
        "`att_mse_loss`, mask",
        lambda s, t: LF.attention_mse(s, t, mask=MASK[:2, :5]),
        textbrewer("att_mse_loss", MASK[:2, :5]),
        ATTENTION,
    ),
    Comparison(
        "AttentionMSE",
        "`AttentionMSE()`",
        "textbrewer",
        "`att_mse_loss`",
        LF.attention_mse,
        textbrewer("att_mse_loss"),
        ATTENTION,
        reason="mask: without one it takes scores at or below -0.001 for masked, and reads them as 0",
        corrected=lambda s, t: LF.attention_mse(*(x.where(x > -1e-3, 0.0) for x in (s, t))),
    ),
    Comparison(
        "AttentionKL",
        "`AttentionKL()` of probabilities",
        "textbrewer",
        "`att_ce_loss` of scores, all valid",
        attention_kl,
        textbrewer("att_ce_loss", ALL),
        ATTENTION,
        reason="a cross-entropy: not 0 at the teacher, but its entropy; takes scores",
        corrected=lambda s, t: attention_kl(s, t) + entropy(t),
    ),
    Comparison(
        "AttentionTransfer",
        "`AttentionTransfer()`",
        "torchdistill",
        '`ATLoss(mode="code")`',
        LF.attention_transfer,
        attention_transfer("code"),
        MAPS,
        TEACHER_MAPS,
    ),
    Comparison(
        "AttentionTransfer",
        "`AttentionTransfer()`",
        "torchdistill",
        '`ATLoss(mode="paper")`',
        LF.attention_transfer,
        attention_transfer("paper"),
        MAPS,
        TEACHER_MAPS,
        reason="reduction: a sample's distance, not its mean square over the positions (the paper's formula; ours is its code)",
        corrected=transfer_by_norm,
    ),
    Comparison(
        "FSP",
        "`FSP()`",
        "torchdistill",
        "`FSPLoss`",
        flow,
        torchdistill_flow,
        (3, 7, 6, 6),
        reason="reduction: norms of the matrix's columns, summed, instead of its mean square",
        corrected=flow_by_norms,
    ),
    Comparison(
        "FSP",
        "`FSP(channel_dim=-1)`, mask",
        "textbrewer",
        "`fsp_loss`, mask",
        flow_of_tokens,
        textbrewer_flow,
        TOKENS,
    ),
    Comparison(
        "VID",
        "`gaussian_nll`, VID's likelihood",
        "torchdistill",
        "`VIDLoss`",
        lambda s, t: LF.gaussian_nll(s, t, VARIANCE),
        vid,
        TOKENS,
    ),
    Comparison(
        "ReviewKD",
        "`hierarchical_context`, ReviewKD's HCL",
        "torchdistill",
        "`HierarchicalContextLoss`",
        LF.hierarchical_context,
        hierarchical,
        (2, 3, 8, 8),
    ),
    Comparison(
        "SRD",
        "`log_sum`, SRD's distance",
        "torchdistill",
        "`SRDLoss(exponent=4)`",
        LF.log_sum,
        srd,
        (12, 8),
        reason="holds a KL of the logits as well, and a sum where ours has a mean: `2 · (ours + log entries) + KL`",
        corrected=srd_corrected,
    ),
    Comparison(
        "MGD",
        "`MGD(ratio=0)`",
        "nvidia-modelopt",
        "`MGDLoss(lambda_mgd=0)`, the same weights",
        mgd,
        modelopt_mgd,
        MAPS,
        TEACHER_MAPS,
    ),
]
