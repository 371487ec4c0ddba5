"""Schedules in a fit, and losses asked for by hand, against loops written by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F

from softs_lightning import DistillationCallback, Pair
from softs_lightning.schedules import Between, Linear, Until
from tests.training import (
    Look,
    Student,
    assert_untouched,
    hidden,
    loader,
    logits,
    make_student,
    make_teacher,
    trainer,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

DOUBLE = torch.float64


class Soft(nn.Module):
    """A loss with a temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
        t = self.temperature
        return F.kl_div(
            (student / t).log_softmax(-1),
            (teacher / t).log_softmax(-1),
            log_target=True,
            reduction="batchmean",
        ) * (t * t)


def scheduled() -> list[Pair]:
    return [
        hidden(weight=Between(1, 4)),
        Pair(
            "outputs[3]",
            "outputs[net]",
            Soft(),
            weight=lambda epoch: 1.0 if epoch == 0 else 0.25,
            schedules={"temperature": Linear(4, 1, over=8)},
            name="soft",
        ),
    ]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_schedules_equal_a_hand_written_loop(accumulate: int) -> None:
    student = make_student()
    by_hand = copy.deepcopy(student).double()
    callback = DistillationCallback(make_teacher(), scheduled())
    look = Look(callback)
    batches = loader(dtype=DOUBLE)
    trainer(callback, look, max_epochs=2, precision="64-true", accumulate_grad_batches=accumulate).fit(
        student, batches
    )

    frozen, projector = make_teacher().double().eval(), look.seen[0]
    optimizer = torch.optim.Adam([*by_hand.parameters(), *projector.parameters()], lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    steps = 0
    for epoch in range(2):
        for i, (x, y) in enumerate(batches):
            h = by_hand.net[1](by_hand.net[0](x))
            out = by_hand.net[2](h)
            loss = F.cross_entropy(out, y)
            target = frozen[1](frozen[0](x)).detach()
            # A term that is off leaves zero gradients, not none: an Adam step moves its projector on.
            loss = loss + (1.0 if 1 <= steps < 4 else 0.0) * F.mse_loss(projector(h), target)
            t = 4 - 3 * min(steps / 8, 1)
            p = (frozen(x).detach() / t).softmax(-1)
            kl = (p * (p.log() - (out / t).log_softmax(-1))).sum(-1).mean() * t * t
            loss = loss + (1.0 if epoch == 0 else 0.25) * kl
            (loss / accumulate).backward()
            if (i + 1) % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
        scheduler.step()
    for mine, its in zip(student.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-10)
    learned = callback.state_dict()["projectors"]["0.projectors.0.weight"]
    torch.testing.assert_close(learned, projector.weight.data, rtol=0, atol=1e-10)


def test_a_schedule_goes_on_where_a_resumed_run_left_it(tmp_path: Path) -> None:
    def run(name: str, epochs: int, resume: Path | None = None) -> Student:
        student = make_student()
        torch.manual_seed(3)
        save = ModelCheckpoint(tmp_path / name, filename="{epoch}", save_top_k=-1)
        callback = DistillationCallback(make_teacher(), scheduled(), every_n_steps=2)
        trainer(callback, save, enable_checkpointing=True, max_epochs=epochs).fit(
            student, loader(), ckpt_path=resume, weights_only=True if resume else None
        )
        return student

    whole = run("whole", 3)
    resumed = run("resumed", 3, tmp_path / "whole" / "epoch=0.ckpt")
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


def test_a_term_that_is_off_costs_nothing_and_is_not_logged() -> None:
    teacher = make_teacher()
    calls = {"first": 0, "last": 0}
    teacher[0].register_forward_hook(lambda *_: calls.__setitem__("first", calls["first"] + 1))
    teacher[3].register_forward_hook(lambda *_: calls.__setitem__("last", calls["last"] + 1))
    pairs = [hidden(weight=Until(4), projector=nn.Linear(6, 8)), logits(weight=Until(2))]
    fit = trainer(DistillationCallback(teacher, pairs))
    student = make_student()
    fit.fit(student, loader())
    assert calls == {"first": 4, "last": 2}
    before = {"distill/logits", "distill/hidden", "distill/total"}
    off = trainer(DistillationCallback(teacher, [logits(weight=Between(99, 100))]))
    off.fit(make_student(), loader())
    assert fit.callback_metrics.keys() == before
    assert not off.callback_metrics
    assert_untouched(student)


def test_every_n_steps_counts_optimizer_steps() -> None:
    teacher, calls = make_teacher(), []
    teacher[0].register_forward_hook(lambda *_: calls.append(1))
    callback = DistillationCallback(teacher, [logits()], every_n_steps=3)
    trainer(callback, max_epochs=2, accumulate_grad_batches=2).fit(make_student(), loader())
    assert len(calls) == 4  # steps 0 and 3, two batches each


def test_a_term_may_wait_for_its_part_to_be_unfrozen() -> None:
    class Unfreeze(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
            pl_module.net[0].requires_grad_(trainer.global_step >= 2)

    waits = DistillationCallback(make_teacher(), [hidden(weight=Between(2, 99), projector=nn.Linear(6, 8))])
    trainer(Unfreeze(), waits).fit(make_student(), loader())
    hasty = DistillationCallback(make_teacher(), [hidden(projector=nn.Linear(6, 8))])
    with pytest.raises(RuntimeError, match=r"frozen part \(start the term when that is unfrozen"):
        trainer(Unfreeze(), hasty).fit(make_student(), loader())


def test_settings_that_the_loss_does_not_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r"the loss Soft has no attribute 'temprature'.*it has temperature"):
        Pair("outputs[3]", "outputs[net]", Soft(), schedules={"temprature": Linear(4, 1, over=8)})
    with pytest.raises(TypeError, match="weight must be a number or a function"):
        Pair("outputs[3]", "outputs[net]", Soft(), weight="0.5")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every_n_steps must be a whole number of at least 1, got 0"):
        DistillationCallback(make_teacher(), [logits()], every_n_steps=0)


# -- manual optimization ---------------------------------------------------------------------------


class Adversarial(L.LightningModule):
    """A generator that learns from a teacher as well, and a discriminator, each with its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
        self.critic = nn.Linear(3, 1)
        self.distillation: DistillationCallback | None = None

    def losses(self, x: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        made = self.net(x)
        return -self.critic(made).mean(), lambda: self.critic(made.detach()).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.optimizers()
        assert self.distillation is not None
        generator, critic = self.losses(batch[0])
        loss = generator + self.distillation.distillation_loss(batch)
        first.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.zero_grad()
        self.manual_backward(critic())
        second.step()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.net.parameters(), lr=0.01),
            torch.optim.SGD(self.critic.parameters(), lr=0.1),
        ]


def adversarial() -> Adversarial:
    torch.manual_seed(2)
    return Adversarial()


@pytest.mark.parametrize("weight", [2.0, Until(8, 2.0)])
@pytest.mark.situation("manual optimization, several optimizers", proves="equal to a reference")
def test_two_optimizers_by_hand_equal_a_hand_written_loop(weight: Any) -> None:
    student = adversarial()
    by_hand = copy.deepcopy(student).double()
    callback = DistillationCallback(make_teacher(), [hidden(), logits(weight=weight)], manual=True)
    look = Look(callback)
    student.distillation = callback
    batches = loader(dtype=DOUBLE)
    fit = trainer(callback, look, precision="64-true")
    fit.fit(student, batches)
    assert {"distill/hidden", "distill/logits", "distill/total"} <= fit.callback_metrics.keys()

    frozen, projector = make_teacher().double().eval(), look.seen[0]
    first = torch.optim.Adam([*by_hand.net.parameters(), *projector.parameters()], lr=0.01)
    second = torch.optim.SGD(by_hand.critic.parameters(), lr=0.1)
    for i, (x, _) in enumerate(batches):
        h = by_hand.net[1](by_hand.net[0](x))
        made = by_hand.net[2](h)
        loss = -by_hand.critic(made).mean() + 0.5 * F.mse_loss(projector(h), frozen[1](frozen[0](x)).detach())
        if not callable(weight) or 2 * i < 8:  # Lightning counts the steps of both optimizers
            loss = loss + 2.0 * F.mse_loss(made, frozen(x).detach())
        first.zero_grad()
        loss.backward()
        first.step()
        second.zero_grad()
        by_hand.critic(made.detach()).square().mean().backward()
        second.step()
    for mine, its in zip(student.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-10)


def test_the_loss_can_be_asked_for_twice_in_a_step() -> None:
    seen: list[Tensor] = []

    class Twice(Adversarial):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            first, _ = self.optimizers()
            assert self.distillation is not None
            for part in (batch[0][:2], batch[0][2:]):
                self.net(part)
                seen.append(self.distillation.distillation_loss([part]).detach())
            first.step()

    torch.manual_seed(2)
    student = Twice()
    start = copy.deepcopy(student.net)
    student.distillation = DistillationCallback(make_teacher(), [logits()], manual=True)
    trainer(student.distillation, max_steps=1).fit(student, loader())
    x, _ = next(iter(loader()))
    expected = F.mse_loss(start(x), make_teacher().eval()(x), reduction="none").mean(-1).detach()
    torch.testing.assert_close(torch.stack(seen), torch.stack([expected[:2].mean(), expected[2:].mean()]))


def test_manual_and_automatic_are_not_mixed_up() -> None:
    automatic = DistillationCallback(make_teacher(), [logits()])
    with pytest.raises(RuntimeError, match="this callback adds its loss by itself"):
        automatic.distillation_loss(None)
    manual = DistillationCallback(make_teacher(), [logits()], manual=True)
    with pytest.raises(RuntimeError, match="is for the training_step of a fit, and none is running"):
        manual.distillation_loss(None)
    student = make_student()
    with pytest.raises(MisconfigurationException, match="leave manual=True out"):
        trainer(manual).fit(student, loader())
    assert_untouched(student)
    with pytest.raises(ValueError, match="leave task_weight out"):
        DistillationCallback(make_teacher(), [logits()], manual=True, task_weight=0.5)


@pytest.mark.situation(
    "manual optimization, several optimizers", proves=("refused with message", "left as it was")
)
def test_a_manual_step_that_never_asks_for_the_loss_is_an_error() -> None:
    class Forgets(Adversarial):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.net(batch[0])

    student = Forgets()
    callback = DistillationCallback(make_teacher(), [logits()], manual=True)
    with pytest.raises(MisconfigurationException, match="never called distillation_loss"):
        trainer(callback).fit(student, loader())
    assert_untouched(student)
