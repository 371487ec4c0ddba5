"""Balanced terms against factors worked out by hand."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F

from softs_lightning import DistillationCallback
from softs_lightning.balancing import Balance, GradientBalance, UncertaintyBalance
from softs_lightning.schedules import Until
from tests.test_windows import Scaled
from tests.training import Look, Student, hidden, loader, logits, make_student, make_teacher, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

DOUBLE = torch.float64


class ByHand:
    """The same training in a plain loop."""

    def __init__(self, projector: nn.Module) -> None:
        self.student = make_student().double()
        self.projector = projector
        self.teacher = make_teacher().double().eval()

    def terms(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
        h = self.student.net[1](self.student.net[0](x))
        out = self.student.net[2](h)
        with torch.no_grad():
            theirs = self.teacher[1](self.teacher[0](x))
            target = self.teacher(x)
        terms = {"hidden": F.mse_loss(self.projector(h), theirs), "logits": F.mse_loss(out, target)}
        return F.cross_entropy(out, y), terms, {"hidden": h, "logits": out}

    def assert_equals(self, student: Student) -> None:
        for mine, its in zip(student.parameters(), self.student.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-10)


def fit(balance: Balance, **weights: Any) -> tuple[Student, ByHand]:
    student = make_student()
    pairs = [hidden(), logits(weight=weights.get("logits", 2.0))]
    callback = DistillationCallback(make_teacher(), pairs, balance=balance)
    look = Look(callback)
    trainer(callback, look, precision="64-true").fit(student, loader(dtype=DOUBLE))
    return student, ByHand(look.seen[0])


@pytest.mark.parametrize(("every", "momentum"), [(1, 0.0), (1, 0.9), (2, 0.5)])
def test_gradient_balance(every: int, momentum: float) -> None:
    student, by_hand = fit(GradientBalance(every=every, momentum=momentum))
    optimizer = torch.optim.Adam([*by_hand.student.parameters(), *by_hand.projector.parameters()], lr=0.01)
    torch.optim.lr_scheduler.LinearLR(optimizer)
    averages: dict[str, list[float]] = {}
    for step, (x, y) in enumerate(loader(dtype=DOUBLE)):
        task, terms, activations = by_hand.terms(x, y)
        loss = task
        for name, weight in (("hidden", 0.5), ("logits", 2.0)):
            if step % every == 0:
                norms = [
                    float(torch.autograd.grad(of, activations[name], retain_graph=True)[0].norm())
                    for of in (task, terms[name])
                ]
                old = averages.get(name, norms)
                averages[name] = [momentum * o + (1 - momentum) * n for o, n in zip(old, norms, strict=True)]
            loss = loss + weight * averages[name][0] / averages[name][1] * terms[name]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    by_hand.assert_equals(student)


@pytest.mark.parametrize("until", [None, 3])
def test_uncertainty_balance(until: int | None) -> None:
    student, by_hand = fit(UncertaintyBalance(), logits=Until(until, 2.0) if until else 2.0)
    spread = torch.zeros(2, dtype=DOUBLE, requires_grad=True)
    parameters = [*by_hand.student.parameters(), *by_hand.projector.parameters(), spread]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    torch.optim.lr_scheduler.LinearLR(optimizer)
    for step, (x, y) in enumerate(loader(dtype=DOUBLE)):
        task, terms, _ = by_hand.terms(x, y)
        loss = task + 0.5 * (terms["hidden"] * (-spread[0]).exp() + spread[0]) / 2
        if until is None or step < until:
            loss = loss + 2.0 * (terms["logits"] * (-spread[1]).exp() + spread[1]) / 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    by_hand.assert_equals(student)


@pytest.mark.parametrize("balance", [GradientBalance(momentum=0.9, every=4), UncertaintyBalance()])
def test_balances_resume_where_they_were(tmp_path: Path, balance: Balance) -> None:
    def run(name: str, resume: Path | None = None) -> Student:
        student = make_student()
        torch.manual_seed(3)
        save = ModelCheckpoint(tmp_path / name, filename="{epoch}", save_top_k=-1)
        callback = DistillationCallback(make_teacher(), [hidden(), logits()], balance=balance)
        trainer(callback, save, enable_checkpointing=True, max_epochs=3).fit(
            student, loader(), ckpt_path=resume, weights_only=True if resume else None
        )
        return student

    whole, resumed = run("whole"), run("resumed", tmp_path / "whole" / "epoch=0.ckpt")
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


def test_a_vanishing_term_has_a_bounded_factor() -> None:
    balance = GradientBalance(most=5.0).made_for(["a"])
    x = torch.ones(3, requires_grad=True)
    balanced = balance({"a": (1e-9 * x).sum()}, {"a": [x]}, x.square().sum(), 0)
    torch.testing.assert_close(balanced["a"], 5 * (1e-9 * x).sum())


def test_small_gradients_in_half_precision_are_scaled_as_the_loss_is() -> None:
    balance = GradientBalance(momentum=0.0).made_for(["a"])
    x = torch.ones(3, dtype=torch.float16, requires_grad=True)  # which holds nothing smaller than 6e-8
    task, term = (x.float() * 3e-9).sum(), (x.float() * 1e-9).sum()
    unscaled = balance({"a": term}, {"a": [x]}, task, 0)
    assert unscaled["a"] == 0.0
    balance.loss_scale = lambda: 2.0**16
    balanced = balance({"a": term}, {"a": [x]}, task, 0)
    torch.testing.assert_close(balanced["a"], 3 * term, rtol=1e-3, atol=0.0)
    balance.loss_scale = lambda: 2.0**60  # overflows, and the scaler skips the step
    assert balance({"a": term}, {"a": [x]}, task, 0)["a"] == balanced["a"]


@pytest.mark.situation("precision 16-mixed", proves="equal to a reference")
def test_a_balance_under_loss_scaling_equals_one_without() -> None:
    found = []
    for options in ({"precision": None, "plugins": [Scaled()]}, {"precision": "64-true"}):
        student = make_student()
        torch.manual_seed(5)
        pairs = [hidden(projector=nn.Linear(6, 8)), logits(weight=2.0)]
        callback = DistillationCallback(make_teacher(), pairs, balance=GradientBalance(momentum=0.9))
        trainer(callback, **options).fit(student, loader(dtype=DOUBLE))
        found.append(student)
    for mine, its in zip(*(student.parameters() for student in found), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-10)


@pytest.mark.gpu
@pytest.mark.situation("precision 16-mixed", proves="equal to a reference")
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: Lightning scales losses there only"
)
def test_training_in_half_precision_on_a_gpu_equals_a_loop_with_a_scaler() -> None:
    student = make_student()
    callback = DistillationCallback(make_teacher(), [hidden(), logits()])
    look = Look(callback)
    trainer(callback, look, accelerator="gpu", devices=1, precision="16-mixed").fit(student, loader())

    by_hand, frozen = make_student().cuda(), make_teacher().cuda().eval()
    projector = look.seen[0].cuda()
    optimizer = torch.optim.Adam([*by_hand.parameters(), *projector.parameters()], lr=0.01)
    torch.optim.lr_scheduler.LinearLR(optimizer)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader():
        x, y = x.cuda(), y.cuda()
        with torch.autocast("cuda", torch.float16):
            with torch.no_grad():
                theirs, target = frozen[1](frozen[0](x)), frozen(x)
            h = by_hand.net[1](by_hand.net[0](x))
            out = by_hand.net[2](h)
            task, projected = F.cross_entropy(out, y), projector(h)
        loss = task + 0.5 * F.mse_loss(projected.float(), theirs.float())
        loss = loss + F.mse_loss(out.float(), target.float())
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    for mine, its in zip(student.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine.cpu(), its.cpu(), rtol=0, atol=1e-5)


def test_half_precision_on_a_cpu_is_what_lightning_makes_of_it() -> None:
    """It says so itself, and trains in bfloat16."""
    students = []
    for precision in ("16-mixed", "bf16-mixed"):
        student = make_student()
        callback = DistillationCallback(make_teacher(), [logits()])
        said = pytest.warns(UserWarning, match="AMP with fp16 is not supported on CPU")
        with said if precision == "16-mixed" else nullcontext():
            run = trainer(callback, precision=precision)
        run.fit(student, loader())
        students.append(student)
    assert all(map(torch.equal, *(s.parameters() for s in students)))


def test_what_cannot_be_balanced_is_refused() -> None:
    x, other = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="does not depend on the student's activations"):
        GradientBalance().made_for(["a"])({"a": x.sum()}, {"a": [x]}, other.sum(), 0)
    with pytest.raises(ValueError, match="looks at the task's loss"):
        DistillationCallback(make_teacher(), [logits()], manual=True, balance=GradientBalance())
    with pytest.raises(TypeError, match=r"must be a softs_lightning\.balancing\.Balance"):
        DistillationCallback(make_teacher(), [logits()], balance="gradient")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every must be at least 1"):
        GradientBalance(every=0)
