"""A recipe that runs in a second, for tests of what runs leave behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from softs_lightning.cli import main

CLASSES, WIDTH = 3, 8

RECIPE = """# @package _global_
# Tiny.
defaults:
  - /callbacks: distill
  - /trainer: cpu
  - _self_
seeds: [0, 1]
threads: 1
data: {_target_: tests.tiny.Data, broken: false}
teacher: {_target_: tests.tiny.Teacher, _partial_: true}
student: {_target_: tests.tiny.Student, width: 4}
pairs:
  - _target_: softs_lightning.Pair
    name: scores
    teacher: outputs[head]
    student: outputs[net]
    loss: {_target_: softs_lightning.losses.KLDivergence, temperature: 2.0}
trainer: {max_epochs: 3, log_every_n_steps: 1, enable_progress_bar: false}
judge:
  name: accuracy
  unit: "%"
  score: {_target_: tests.tiny.score, _partial_: true}
  others: {nats: {lower: true}}
"""

ARMS = """arms:
  hard <labels> & "more": {callbacks: {distill: null}, trainer: {max_epochs: 6}}
  scores: {}
"""


def samples(count: int, seed: int) -> TensorDataset:
    x = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, x[:, :CLASSES].argmax(dim=1))


class Data(L.LightningDataModule):
    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken

    def train_dataloader(self) -> Any:
        if self.broken:
            raise ZeroDivisionError("the data are broken")
        return DataLoader(samples(80, 0), batch_size=8, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(samples(40, 1), batch_size=16)


class Teacher(nn.Module):
    """Knows the rule: the largest of the first three numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Identity()) for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)
        self.tail = nn.Linear(CLASSES, CLASSES)
        for layer in (*(block[0] for block in self.blocks), self.head, self.tail):  # type: ignore[index]
            nn.init.eye_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        scores: Tensor = self.tail(self.head(4 * x))
        return scores


class Student(L.LightningModule):
    def __init__(self, *, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(WIDTH, width), nn.ReLU(), nn.Linear(width, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.net(x)
        return scores

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def score(model: nn.Module, *, data: Data, teacher: nn.Module) -> dict[str, float]:
    x, label = samples(200, 2).tensors
    with torch.no_grad():
        scores = model(x)
    right = (scores.argmax(1) == label).double().mean()
    return {"accuracy": float(100 * right), "nats": float(F.cross_entropy(scores, label))}


def recipe_in(folder: Path, *, arms: bool = False) -> None:
    """Write the recipe where ``--config-dir configs recipe=tiny`` finds it."""
    place = folder / "configs" / "recipe"
    place.mkdir(parents=True)
    (place / "tiny.yaml").write_text(RECIPE + (ARMS if arms else ""))


def distil(folder: Path, *arguments: str, arms: bool = False) -> int:
    """Run the recipe in `folder`, in this process."""
    if not (folder / "configs").exists():
        recipe_in(folder, arms=arms)
    before = Path.cwd(), torch.get_num_threads()
    os.chdir(folder)
    try:
        return main(["--config-dir", "configs", *arguments, "recipe=tiny"])
    finally:
        os.chdir(before[0])
        torch.set_num_threads(before[1])


def run_of(folder: Path) -> Path:
    """The only run in `folder`."""
    (found,) = (folder / "outputs" / "tiny").iterdir()
    return found
