"""A user's module, teachers, data and trainers, as the tests of the callback use them."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from softs_lightning import DistillationCallback, Pair
from softs_lightning.auxiliary import CONTAINER


class Student(L.LightningModule):
    """A user's module: nothing in it knows of distillation."""

    def __init__(self, width: int = 6, lr: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.cross_entropy(self(batch[0]), batch[1]))

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        out: Tensor = self(batch[0])
        return out

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.LinearLR(optimizer)}


def make_teacher(width: int = 8) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Dropout(0.5), nn.Linear(width, 3))


def make_student(width: int = 6) -> Student:
    torch.manual_seed(2)
    return Student(width)


def data(n: int = 24, dtype: torch.dtype = torch.float32) -> Dataset[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(n, 4, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(3, (n,), generator=generator))


def loader(n: int = 24, batch_size: int = 4, dtype: torch.dtype = torch.float32) -> DataLoader[Any]:
    return DataLoader(data(n, dtype), batch_size=batch_size)


def trainer(*callbacks: L.Callback, **options: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 1,
    }
    return L.Trainer(callbacks=list(callbacks), **{**defaults, **options})


def hidden(**options: Any) -> Pair:
    options = {"loss": nn.MSELoss(), "projector": "linear", "weight": 0.5, "name": "hidden", **options}
    return Pair(teacher="outputs[1]", student="outputs[net.1]", **options)


def logits(**options: Any) -> Pair:
    return Pair(teacher="outputs[3]", student="outputs[net]", loss=nn.MSELoss(), name="logits", **options)


class Look(L.Callback):
    """Keeps the projector as it is before the first step."""

    def __init__(self, callback: DistillationCallback) -> None:
        self.callback = callback
        self.seen: list[nn.Module] = []

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.seen.append(copy.deepcopy(self.callback.projectors["hidden"][0]))


def assert_untouched(student: L.LightningModule) -> None:
    assert not hasattr(student, CONTAINER)
    assert "training_step" not in student.__dict__
    assert "configure_model" not in student.__dict__
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in student.modules())
