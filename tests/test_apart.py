"""Students that need what a fit gives them, examined and run by a recipe."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softs_lightning.apart import NeedsFitError, explaining, trainer_of
from softs_lightning.cli import main
from softs_lightning.config import Refusal, build
from softs_lightning.experiment import _examine
from softs_lightning.explain import examine, explain_recipe
from softs_lightning.trained import TrainedTeacher
from tests.test_config import composed


class Plain(L.LightningModule):
    """Digits by one hidden layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.make()

    def make(self) -> None:
        self.network = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.network(image)
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch["image"]), batch["label"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.25)


class Epochs(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        share = self.trainer.global_step / self.trainer.estimated_stepping_batches
        assert (share, self.trainer.current_epoch, self.trainer.training) == (0, 0, True)
        return super().training_step(batch, batch_idx)


class Configured(Plain):
    def make(self) -> None:
        self.network = None  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.network is None:
            super().make()


class SetUp(Plain):
    def make(self) -> None:
        """Not yet."""

    def setup(self, stage: str) -> None:
        assert stage == "fit"
        assert self.trainer.datamodule.batch_size == 250
        super().make()


class Manual(Plain):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        assert optimizer.param_groups[0]["lr"] == 0.25
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


class Rates(Plain):
    """Logs the learning rate before anything runs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        assert self.lr_schedulers() is None
        self.log("rate", optimizer.param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


class Loaders(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        count = len(self.trainer.train_dataloader)
        return super().training_step(batch, batch_idx) / count


class Misfit(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.network[1](batch["image"]).mean()


class Teacher(nn.Linear):
    """One that no image fits."""

    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image)


def recipe(student: type[Plain], *more: str) -> Any:
    target = f"student._target_={__name__}.{student.__name__}"
    pair = "pairs.0.student='outputs[network]'"
    return composed(target, "data.batch_size=250", pair, "data.labels=250", *more)


@pytest.fixture(autouse=True)
def no_teacher_is_trained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def train(*_: Any) -> None:
        raise AssertionError("a teacher was trained")

    monkeypatch.setenv("SOFTS_LIGHTNING_CACHE", str(tmp_path))
    monkeypatch.setattr(TrainedTeacher, "_train", train)


@pytest.mark.parametrize("kind", [Plain, Epochs, Configured, SetUp, Manual, Rates])
@pytest.mark.parametrize("computing", [False, True])
def test_a_student_is_examined_as_a_fit_begins_with_it(kind: type[Plain], computing: bool) -> None:
    seen = examine(recipe(kind), computing=computing)
    ((_, _, (ours,)),) = seen.plans[0].pairs
    assert (ours.module, ours.value) == ("Sequential", "[250, 10] float32")
    assert seen.student_parameters == 65 * 16 + 17 * 10
    assert (seen.made, seen.ran) == (None, None)


def test_the_trainer_is_the_recipes_own_and_does_nothing() -> None:
    made = composed(
        "trainer.max_epochs=7", "trainer.devices=4", "trainer.strategy=ddp", "trainer.log_every_n_steps=3"
    )
    data = build(made.data, "data")
    trainer = trainer_of(made, data)
    assert (trainer.max_epochs, trainer.log_every_n_steps, trainer.world_size) == (7, 3, 1)
    assert (trainer.loggers, trainer.checkpoint_callbacks, trainer.progress_bar_callback) == ([], [], None)
    assert data.trainer is trainer
    with pytest.raises(Refusal, match=r"trainer .*max_epoch"):
        trainer_of(composed("+trainer.max_epoch=1"), data)


def test_what_only_a_fit_has_is_said_with_the_line_that_reads_it() -> None:
    with pytest.raises(NeedsFitError) as raised:
        explain_recipe(recipe(Loaders))
    said = str(raised.value)
    assert said.startswith(
        "distill, student's training step: TypeError: object of type 'NoneType' has no len(), "
    )
    assert f"{__file__}:" in said
    assert "count = len(self.trainer.train_dataloader)" in said
    assert said.endswith("nothing is fitted here: a run may work all the same.")
    assert ".." not in said


@pytest.mark.filterwarnings("ignore:You passed in a `val_dataloader` but have no `validation_step`")
def test_a_run_tries_it_in_a_fit_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert _examine(recipe(Loaders), "distilled") == ()
    assert "So what the distillation stops at is not known before the fit" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        _examine(recipe(Misfit), "distilled")


def test_a_step_that_is_wrong_is_refused_in_one_sentence(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "torch._subclasses.fake_tensor"):
        code = main(["explain", f"student._target_={__name__}.Misfit", "pairs.0.student='outputs[network]'"])
        logging.getLogger("torch._subclasses.fake_tensor").error("heard again")
    out, said = capfd.readouterr()
    assert (code, out) == (2, "")
    said = said.replace(next((line for line in said.splitlines(True) if "heard again" in line), ""), "")
    assert said.startswith(
        "softs-distill: distill, student's training step: RuntimeError: mat1 and mat2 shapes "
    )
    assert said.rstrip().endswith('return self.network[1](batch["image"]).mean().')
    assert said.count("\n") == 1
    assert [r.message for r in caplog.records if "fake_tensor" in r.name] == ["heard again"]


def test_a_scan_of_a_teacher_that_fails_is_silent_as_well(capfd: pytest.CaptureFixture[str]) -> None:
    own = f"+teacher={{_target_: {__name__}.Teacher, _partial_: true}}"
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        explain_recipe(composed("~teacher", own, "pairs.0.teacher='outputs[.]'"))
    assert "failed while attempting" not in capfd.readouterr().err


def test_a_student_cut_from_a_teacher_is_refused_before_that_is_trained() -> None:
    mistaken = composed("recipe=distilbert-init", "student.layers=[0,9]")
    with pytest.raises(Refusal, match="there is no layer 9 to keep"):
        _examine(mistaken, "distilled")


def test_refusals_are_said_as_they_are() -> None:
    with pytest.raises(Refusal, match=r"^as it is$"), explaining("student"):
        raise Refusal("as it is")
