"""``backend="liger"``: the same numbers as ours, or a refusal; by Liger where it is installed, else by a stand-in.

The stand-in computes what Liger documents, densely: no factor T², the mean over the labels that are not -100.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softs_lightning.losses import LinearCEKL, LinearJSD, LinearKL
from softs_lightning.losses import liger as backend

INSTALLED = importlib.util.find_spec("liger_kernel") is not None
HEADS: dict[str, Any] = {"student_head": "0", "teacher_head": "0", "chunk_size": 4}
LABELS = torch.tensor([[1, 2, -100, 4, 5, 6, 0], [-100, -100, 7, 8, 9, -100, 3]])
MASK = torch.tensor([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]])


class StandIn:
    def __init__(self, **options: Any) -> None:
        self.__dict__.update(options)

    def __call__(
        self,
        student: Tensor,
        weight: Tensor,
        teacher: Tensor,
        teacher_weight: Tensor,
        labels: Tensor,
        bias: Tensor | None = None,
        teacher_bias: Tensor | None = None,
    ) -> Tensor:
        logits, target = F.linear(student, weight, bias), F.linear(teacher, teacher_weight, teacher_bias)
        hard = F.cross_entropy(logits, labels)
        s, t = (x / self.temperature for x in (logits, target))
        if self.beta in (0, 1):
            p, q = (t, s) if self.beta == 0 else (s, t)
            soft = F.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="batchmean")
        else:
            mixed = (self.beta * t.softmax(-1) + (1 - self.beta) * s.softmax(-1)).log()
            of_teacher = F.kl_div(mixed, t.softmax(-1), reduction="batchmean")
            of_student = F.kl_div(mixed, s.softmax(-1), reduction="batchmean")
            soft = self.beta * of_teacher + (1 - self.beta) * of_student
        return self.weight_hard_loss * hard + self.weight_soft_loss * soft


@pytest.fixture(params=["stand-in", "liger"])
def liger(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "liger":
        if not INSTALLED:
            pytest.skip("liger-kernel is not installed")
        return "liger"
    found = ModuleType("liger_kernel.chunked_loss")
    found.LigerFusedLinearJSDLoss = StandIn  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "liger_kernel", ModuleType("liger_kernel"))
    monkeypatch.setitem(sys.modules, "liger_kernel.chunked_loss", found)
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    return "stand-in"


KINDS: dict[str, Any] = {
    "forward": lambda **o: LinearKL(2.0, **o),
    "reverse": lambda **o: LinearKL(direction="reverse", **o),
    "jsd": lambda **o: LinearJSD(0.3, 2.0, **o),
    "jsd normalized": lambda **o: LinearJSD(0.1, normalized=True, **o),
    "jsd end": lambda **o: LinearJSD(1.0, normalized=True, **o),
    "ce": lambda **o: LinearCEKL(0.3, 2.0, **o),
    "ce reverse, shifted before": lambda **o: LinearCEKL(0.7, direction="reverse", shift=False, **o),
}


def models(bias: bool) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    student, teacher = (nn.Sequential(nn.Linear(width, 11, bias=bias)) for width in (6, 8))
    return student.double(), teacher.double()


def both(kind: str, bias: bool = True, **options: Any) -> list[list[Tensor]]:
    """Value and gradients, by our own and by the other backend."""
    results = []
    for name in ("torch", "liger"):
        student, teacher = models(bias)
        loss = KINDS[kind](backend=name, **HEADS)
        loss.bind(student, teacher)
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(2, 7, 6, generator=generator, dtype=torch.float64).requires_grad_()
        fixed = torch.randn(2, 7, 8, generator=generator, dtype=torch.float64)
        batch = {"batch": {"labels": LABELS}} if kind.startswith("ce") else {}
        value = 3 * loss(hidden, fixed, **batch, **options)
        results.append(
            [value.detach().double(), *torch.autograd.grad(value, [hidden, *student.parameters()])]
        )
    return results


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradients_equal_ours(liger: str, kind: str, bias: bool) -> None:
    for options in ({}, {"mask": MASK}, {"mask": MASK, "normalizer": 5.0}):
        ours, theirs = both(kind, bias, **options)
        for one, two in zip(ours, theirs, strict=True):
            # Its cross-entropy and its sums are float32.
            torch.testing.assert_close(two, one, rtol=1e-6, atol=1e-7)


def test_without_a_valid_token_it_is_a_zero_in_the_graph(liger: str) -> None:
    ours, theirs = both("forward", mask=torch.zeros(2, 7))
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one, two)
        assert not one.any()


@pytest.mark.parametrize("make", [LinearKL, LinearJSD, LinearCEKL])
def test_where_it_is_not_installed_the_error_says_what_to_do(
    make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ModuleNotFoundError, match=rf"{make.__name__}.*not installed: pip install liger-kernel"
    ):
        make(backend="liger")
    assert make().backend == "torch"  # and nobody else needs it


def test_what_liger_cannot_do_is_refused_by_name(liger: str) -> None:
    for make in (LinearKL, LinearCEKL):
        with pytest.raises(ValueError, match=rf'{make.__name__}.*has no direction="symmetric"'):
            make(direction="symmetric", backend="liger")
    with pytest.raises(ValueError, match=r"LinearJSD.*applies no softcap.*student has one of 30.0"):
        LinearJSD(backend="liger", student_softcap=30.0)
    with pytest.raises(ValueError, match=r"LinearKL.*applies no scale.*teacher has one of 0.5"):
        LinearKL(backend="liger", teacher_scale=0.5)
    with pytest.raises(ValueError, match="LinearKL's backend must be one of torch, liger, got 'triton'"):
        LinearKL(backend="triton")


def test_a_softcap_in_the_models_config_is_refused_when_it_is_bound(liger: str) -> None:
    class Gemma(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 9)
            self.config = SimpleNamespace(final_logit_softcapping=30.0)

        def get_output_embeddings(self) -> nn.Module:
            return self.head

    plain = nn.Sequential(nn.Linear(4, 9))
    with pytest.raises(ValueError, match=r"teacher's config has one of 30\.0"):
        LinearKL(backend="liger", student_head="0").bind(plain, Gemma())


@pytest.mark.filterwarnings("ignore:the student's head has 11 entries")
def test_unlike_vocabularies_are_cut_as_by_ours(liger: str) -> None:
    values = []
    for name in ("torch", "liger"):
        student, _ = models(True)
        wide = nn.Sequential(nn.Linear(8, 14)).double()
        torch.nn.init.ones_(wide[0].weight)
        loss = LinearKL(backend=name, **HEADS)
        loss.bind(student, wide)
        torch.manual_seed(2)
        values.append(loss(torch.randn(5, 6).double(), torch.randn(5, 8).double()).double())
    torch.testing.assert_close(values[0], values[1], rtol=1e-6, atol=0)
