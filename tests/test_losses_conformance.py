"""Every loss of the package passes ``check_loss``, and each check fails on a loss with that very defect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softs_lightning import losses
from softs_lightning.losses import DistillationLoss, LossCheckError, check_loss
from softs_lightning.losses import functional as LF
from softs_lightning.losses.checks import CHECKS

MAPS = (3, 4, 5, 5)
LABELS = {"labels": torch.tensor([[0, 1, 2, -100, 5]] * 3)}


def probabilities(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    student, teacher = torch.randn(2, 2, 3, 4, 4, generator=generator, dtype=torch.float64).softmax(-1)
    return student, teacher


def draw(*shapes: tuple[int, ...]) -> Callable[[torch.Generator], Any]:
    """A sample of as many maps a side as half the shapes given."""

    def sample(generator: torch.Generator) -> Any:
        maps = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        half = len(maps) // 2
        return maps[:half], maps[half:]

    return sample


def warmed_crd() -> nn.Module:
    """With the constants of the first call in place: in them is the input of that call."""
    torch.manual_seed(0)
    loss = losses.CRD(8, 6, samples=10, dim=8, negatives=5)
    loss(torch.randn(6, 8), torch.randn(6, 6), batch={"index": torch.arange(6)})
    return loss


def linear(loss: Any) -> nn.Module:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(8, 23))
    loss.bind(head, head)
    assert isinstance(loss, nn.Module)
    return loss


HEADS: dict[str, Any] = {"student_head": "0", "teacher_head": "0"}
CATALOGUE: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "kl": (lambda: losses.KLDivergence(2.0), {}),
    "kl reverse": (lambda: losses.KLDivergence(direction="reverse"), {}),
    "kl symmetric": (lambda: losses.KLDivergence(direction="symmetric"), {}),
    "chunked kl": (lambda: losses.ChunkedKL(2.0, chunk_size=2), {}),
    "chunked kl reverse": (lambda: losses.ChunkedKL(direction="reverse"), {}),
    "jsd": (lambda: losses.GeneralizedJSD(0.3), {}),
    "jsd normalized": (lambda: losses.GeneralizedJSD(1e-4, normalized=True), {}),
    "jsd end": (lambda: losses.GeneralizedJSD(1.0, normalized=True), {}),
    "skewed": (lambda: losses.SkewedKL(), {}),
    "skewed reverse": (lambda: losses.SkewedKL(0.1, 2.0, "reverse"), {}),
    "total variation": (lambda: losses.TotalVariation(), {}),
    "mse": (lambda: losses.MSE(), {}),
    "smooth l1": (lambda: losses.SmoothL1(0.5), {}),
    "cosine": (lambda: losses.CosineDistance(), {}),
    "dkd": (lambda: losses.DKD(), {"batch": LABELS}),
    "dist": (lambda: losses.DIST(), {}),
    "standardized": (lambda: losses.StandardizedKL(), {}),
    "ce kl": (lambda: losses.CEKL(temperature=2.0), {"batch": LABELS}),
    "top k": (lambda: losses.TopKKL(3), {}),
    "sigmoid": (lambda: losses.SigmoidKL(), {}),
    "uld": (lambda: losses.ULD(), {}),
    "uld unlike": (lambda: losses.ULD(), {"teacher_shape": (3, 5, 11)}),
    "margin mse": (lambda: losses.MarginMSE(), {"shape": (4, 6)}),
    "listwise kl": (lambda: losses.ListwiseKL(2.0), {"shape": (4, 6)}),
    "list mle": (lambda: losses.ListMLE(), {"shape": (4, 6)}),
    "attention transfer": (lambda: losses.AttentionTransfer(), {"shape": MAPS}),
    "attention transfer tokens": (lambda: losses.AttentionTransfer(channel_dim=-1), {}),
    "channel wise": (lambda: losses.ChannelWise(), {"shape": MAPS}),
    "channel wise tokens": (lambda: losses.ChannelWise(channel_dim=-1), {}),
    "fsp": (
        lambda: losses.FSP(),
        {"sample": draw((2, 3, 6, 6), (2, 4, 4, 4), (2, 3, 5, 5), (2, 4, 5, 5)), "masked": False},
    ),
    "fsp alike": (
        lambda: losses.FSP(),
        {
            "sample": draw((2, 3, 5, 5), (2, 4, 5, 5), (2, 3, 5, 5), (2, 4, 5, 5)),
            "shape": (2, 3, 5, 5),
        },
    ),
    "fsp tokens": (
        lambda: losses.FSP(channel_dim=-1),
        {"sample": draw((2, 5, 3), (2, 5, 4), (2, 5, 3), (2, 5, 4)), "shape": (2, 5, 3)},
    ),
    "nst tokens": (lambda: losses.NST(channel_dim=-1), {"teacher_shape": (3, 5, 11)}),
    "nst linear": (lambda: losses.NST("linear"), {"shape": MAPS}),
    "nst polynomial": (lambda: losses.NST(), {"shape": MAPS}),
    "nst gaussian": (lambda: losses.NST("gaussian"), {"shape": MAPS}),
    "ofd": (lambda: losses.OFD(torch.zeros(4), torch.ones(4)), {"shape": MAPS}),
    "sp": (lambda: losses.SimilarityPreserving(), {}),
    "sp tokens": (lambda: losses.SimilarityPreserving(tokens=True), {"teacher_shape": (3, 5, 11)}),
    "pkt": (lambda: losses.PKT(), {}),
    "pkt tokens": (lambda: losses.PKT(tokens=True), {}),
    "cc": (lambda: losses.CorrelationCongruence(), {}),
    "rkd": (lambda: losses.RKD(), {}),
    "rkd tokens": (lambda: losses.RKD(tokens=True), {"teacher_shape": (3, 5, 11)}),
    "cka": (lambda: losses.CKA(), {"shape": (6, 8)}),
    "cka tokens": (lambda: losses.CKA(tokens=True), {"shape": (3, 9, 4)}),
    "attention mse": (lambda: losses.AttentionMSE(), {"shape": (2, 3, 6, 6)}),
    "attention kl": (lambda: losses.AttentionKL(), {"sample": probabilities, "masked": False}),
    "minilm": (lambda: losses.MiniLMRelation(2), {}),
    "minilm unlike": (lambda: losses.MiniLMRelation(4, 2.0), {"teacher_shape": (3, 5, 12)}),
    "pkd": (lambda: losses.PKD(), {}),
    "pkd all tokens": (lambda: losses.PKD(None), {"row_mean": True}),
    "vid": (lambda: losses.VID(8, 6), {"teacher_shape": (3, 5, 6)}),
    "srd": (lambda: losses.SRD(8, 6), {"shape": (6, 8), "teacher_shape": (6, 6)}),
    "srd maps": (lambda: losses.SRD(4, 6), {"shape": MAPS, "teacher_shape": (3, 6, 5, 5)}),
    "srd tokens": (lambda: losses.SRD(8, 6, channel_dim=-1), {"teacher_shape": (3, 5, 6)}),
    "mgd": (lambda: losses.MGD(4, 6), {"shape": MAPS, "teacher_shape": (3, 6, 5, 5)}),
    "mgd nothing zeroed": (
        lambda: losses.MGD(4, 6, ratio=0.0),
        {"shape": MAPS, "teacher_shape": (3, 6, 5, 5), "compiled": False},
    ),
    "reviewkd": (
        lambda: losses.ReviewKD((4, 8), (6, 12), hidden=8),
        {
            "sample": draw((2, 4, 8, 8), (2, 8, 4, 4), (2, 6, 8, 8), (2, 12, 4, 4)),
            "mask_dims": (),
            "token_dims": (),
        },
    ),
    "crd": (warmed_crd, {"shape": (6, 8), "teacher_shape": (6, 6), "batch": {"index": torch.arange(6)}}),
    "queue kl": (lambda: losses.QueueKL(8, 16), {"shape": (6, 8)}),
    "whitened cosine": (
        lambda: losses.WhitenedCosine.fit(torch.randn(99, 8, generator=torch.Generator().manual_seed(0))),
        {"shape": (6, 8)},
    ),
    "linear kl": (lambda: linear(losses.LinearKL(2.0, **HEADS)), {}),
    "linear jsd": (lambda: linear(losses.LinearJSD(0.3, chunk_size=2, **HEADS)), {}),
    "linear ce kl": (lambda: linear(losses.LinearCEKL(**HEADS)), {"batch": LABELS}),
}


@pytest.mark.parametrize("name", CATALOGUE)
def test_every_loss_conforms(name: str) -> None:
    torch.manual_seed(0)
    make, options = CATALOGUE[name]
    assert check_loss(make(), **options).passed


def test_the_catalogue_has_every_loss() -> None:
    exported = {getattr(losses, name) for name in losses.__all__}
    classes = {x for x in exported if isinstance(x, type) and issubclass(x, DistillationLoss)}
    assert classes - {DistillationLoss} == {type(make()) for make, _ in CATALOGUE.values()}


def kl(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    """A sound loss, for the defects to be put into."""
    return LF.kl_divergence(student, teacher, mask=mask)


def plain_kl(student: Tensor, teacher: Tensor) -> Tensor:
    gap = teacher.log_softmax(-1) - student.log_softmax(-1)
    return (teacher.softmax(-1) * gap).sum(-1).mean()


class Forgetful(torch.autograd.Function):
    """A gradient that is half of the right one."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


def half_gradient(student: Tensor, teacher: Tensor) -> Tensor:
    return kl(Forgetful.apply(student), teacher)  # type: ignore[no-untyped-call]


def rounding(student: Tensor, teacher: Tensor) -> Tensor:
    return kl(student.float(), teacher.float())


def matmul_in_autocast(student: Tensor, teacher: Tensor) -> Tensor:
    return (student @ student.mT - teacher @ teacher.mT).float().square().mean()


def in_place(student: Tensor, teacher: Tensor) -> Tensor:
    teacher.sub_(1)
    return kl(student, teacher)


def reads_padding(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    rows = (student - teacher).square().mean(-1)
    return rows.mean() if mask is None else (rows * mask).sum() / mask.sum()


def counts_padding(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = torch.ones_like(student[..., 0]) if mask is None else mask
    return (student - teacher).masked_fill((mask == 0)[..., None], 0).square().mean()


def ignores_the_mask(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    return kl(student, teacher)


def mean_of_means(student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
    mask = torch.ones_like(student[..., 0]) if mask is None else mask
    return torch.stack([kl(s, t, mask=m) for s, t, m in zip(student, teacher, mask, strict=True)]).mean()


def compiled_differently(student: Tensor, teacher: Tensor) -> Tensor:
    return kl(student, teacher) * (2 if torch.compiler.is_compiling() else 1)


def first_sample_only(student: Tensor, teacher: Tensor) -> Tensor:
    return kl(student[:1], teacher[:1])


def cross_entropy(student: Tensor, teacher: Tensor) -> Tensor:
    return -(teacher.softmax(-1) * student.log_softmax(-1)).sum(-1).mean()


MUTANTS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "finite scalar": (lambda s, t: (s - t).square().mean(-1), {}),
    "gradient reaches the student": (lambda s, t: kl(s.detach(), t) + 0 * s.sum(), {}),
    "inputs are left alone": (in_place, {}),
    "one answer for one input": (
        lambda s, t, calls=[]: kl(s, t) + len(calls) if calls.append(1) is None else None,
        {},
    ),
    "never negative": (lambda s, t: kl(s, t) - 0.1, {}),
    "zero at the teacher": (cross_entropy, {}),
    "shifted logits change nothing": (lambda s, t: LF.mse(s, t), {"logits": True}),
    "half precision is raised": (nn.MSELoss(), {}),
    "float64 is kept": (rounding, {}),
    "autocast does not reach inside": (matmul_in_autocast, {}),
    "gradient is the numerical one": (half_gradient, {}),
    "extreme values stay finite": (plain_kl, {"logits": True}),
    "order of the batch": (first_sample_only, {}),
    "split batch adds up": (mean_of_means, {"row_mean": True}),
    "padding is not read": (reads_padding, {}),
    "extra padding changes nothing": (counts_padding, {}),
    "no valid token is a zero": (reads_padding, {}),
    "all valid equals no mask": (lambda s, t, mask=None: kl(s, t) * (1 if mask is None else 2), {}),
    "unlike shapes are refused": (nn.MSELoss(), {}),
    "compiled equals eager": (compiled_differently, {}),
}


@pytest.mark.parametrize("check", CHECKS)
def test_each_check_catches_its_defect(check: str) -> None:
    loss, options = MUTANTS[check]
    with pytest.raises(LossCheckError) as caught:
        check_loss(loss, compiled=check == "compiled equals eager", **options)
    failures = {failure.name for failure in caught.value.report.failures}
    assert check in failures
    assert "finite scalar" not in failures - {check}  # it ran


def test_a_mask_that_is_not_used_is_caught() -> None:
    with pytest.raises(LossCheckError, match="padding is not read"):
        check_loss(ignores_the_mask, compiled=False)


def test_the_table_names_the_loss_and_every_check() -> None:
    text = str(check_loss(losses.MSE(), compiled=False))
    assert text.splitlines()[0] == "MSE()"
    assert all(check in text for check in CHECKS if check != "compiled equals eager")
    assert "n/a   shifted logits change nothing   reads no logits" in text


def test_the_loss_under_test_stays_as_it_was() -> None:
    loss = losses.QueueKL(8, 16)
    check_loss(loss, shape=(6, 8), compiled=False)
    assert loss.filled == 0
    assert loss.queue.dtype == torch.float32


def test_a_function_is_named_in_the_report() -> None:
    with pytest.raises(LossCheckError, match="cross_entropy"):
        check_loss(cross_entropy, compiled=False)
