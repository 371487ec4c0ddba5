"""The callback in a YAML file of LightningCLI, against the same training built by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import nn

from softs_lightning import DistillationCallback, Pair, Teacher
from softs_lightning.balancing import UncertaintyBalance
from softs_lightning.losses import KLDivergence
from softs_lightning.schedules import Linear
from tests.training import Student, assert_untouched, loader, make_teacher, trainer

# Lightning calls jsonargparse in ways that its later versions advise against.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

BUILT: list[int] = []


class Data(L.LightningDataModule):
    def __init__(self, rows: int = 24) -> None:
        super().__init__()
        self.rows = rows

    def train_dataloader(self) -> Any:
        return loader(self.rows)

    val_dataloader = train_dataloader


def function() -> nn.Module:
    BUILT.append(8)
    return make_teacher()


class Net(nn.Sequential):
    """A teacher with arguments."""

    def __init__(self, width: int) -> None:
        BUILT.append(width)
        super().__init__(*make_teacher(width))


WAYS = {
    "a function": (f"{__name__}.function", function),
    "a class with arguments": (
        f"{{class_path: {__name__}.Net, init_args: {{width: 8}}}}",
        lambda: Net(8),
    ),
    "a Teacher": (
        f"{{class_path: softs_lightning.Teacher, init_args: {{source: {__name__}.function, dtype: float64}}}}",
        Teacher(function, dtype="float64"),
    ),
}

CONFIG = """
seed_everything: 2
trainer:
  accelerator: cpu
  max_epochs: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  enable_model_summary: false
  default_root_dir: FOLDER
  callbacks:
    - class_path: softs_lightning.DistillationCallback
      init_args:
        teacher: TEACHER
        pairs:
          - teacher: outputs[1]
            student: outputs[net.1]
            loss: {class_path: torch.nn.MSELoss}
            weight: {class_path: softs_lightning.schedules.Linear, init_args: {start: 0.5, end: 1.0, over: 4}}
            projector: linear
            name: hidden
          - class_path: softs_lightning.Pair
            init_args:
              teacher: outputs[3]
              student: outputs[net]
              loss: {class_path: softs_lightning.losses.KLDivergence, init_args: {temperature: 2.0}}
              schedules:
                temperature: {class_path: softs_lightning.schedules.Linear, init_args: {start: 4, end: 1, over: 9}}
              name: logits
        task_weight: 0.5
        balance: {class_path: softs_lightning.balancing.UncertaintyBalance}
        validate: true
data:
  rows: 24
model:
  width: 6
"""


def by_hand(teacher: Any) -> tuple[Student, L.Trainer]:
    L.seed_everything(2, verbose=False)
    pairs = [
        Pair(
            "outputs[1]",
            "outputs[net.1]",
            nn.MSELoss(),
            weight=Linear(0.5, 1.0, over=4),
            projector="linear",
            name="hidden",
        ),
        Pair(
            "outputs[3]",
            "outputs[net]",
            KLDivergence(temperature=2.0),
            schedules={"temperature": Linear(4, 1, over=9)},
            name="logits",
        ),
    ]
    callback = DistillationCallback(
        teacher, pairs, task_weight=0.5, balance=UncertaintyBalance(), validate=True
    )
    run = trainer(callback, max_epochs=2)
    student = Student(6)
    run.fit(student, datamodule=Data())
    return student, run


@pytest.fixture(autouse=True)
def _no_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py"])


def cli(command: str, config: Path, **options: Any) -> Any:
    return LightningCLI(Student, Data, args=[command, "--config", str(config)], **options)


@pytest.mark.situation("LightningCLI", proves=("equal to a reference", "left as it was"))
@pytest.mark.parametrize("way", WAYS)
def test_fit_from_yaml_equals_the_run_built_by_hand_and_so_does_its_saved_config(
    way: str, tmp_path: Path
) -> None:
    said, teacher = WAYS[way]
    student, expected = by_hand(teacher)
    config = tmp_path / "run.yaml"
    config.write_text(CONFIG.replace("FOLDER", str(tmp_path / "first")).replace("TEACHER", said))
    again = tmp_path / "first" / "config.yaml"
    for file, options in ((config, {}), (again, {"save_config_callback": None})):
        run = cli("fit", file, **options)
        assert all(map(torch.equal, run.model.parameters(), student.parameters()))
        assert run.trainer.callback_metrics == expected.callback_metrics
        assert_untouched(run.model)
    assert again.exists()


@pytest.mark.situation("LightningCLI", "validate, test and predict", proves="left as it was")
@pytest.mark.parametrize("way", WAYS)
def test_validate_from_yaml_builds_no_teacher(way: str, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    text = CONFIG.replace("FOLDER", str(tmp_path)).replace("TEACHER", WAYS[way][0])
    config.write_text(text.replace("  max_epochs: 2\n", ""))
    BUILT.clear()
    run = cli("validate", config, save_config_callback=None)
    assert not BUILT
    assert_untouched(run.model)


@pytest.mark.situation("LightningCLI", proves="refused with message")
def test_a_wrong_option_is_refused_before_anything_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "run.yaml"
    text = CONFIG.replace("FOLDER", str(tmp_path)).replace("TEACHER", WAYS["a function"][0])
    config.write_text(text.replace("projector: linear", "projektor: linear"))
    with pytest.raises(SystemExit):
        cli("fit", config, save_config_callback=None)
    assert "projektor" in capsys.readouterr().err
