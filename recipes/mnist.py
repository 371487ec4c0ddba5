"""MNIST, and the two networks with which Hinton, Vinyals and Dean (2015, arXiv:1503.02531) showed distillation on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softs_lightning.recipes.digits import UNLABELLED, Classifier
from softs_lightning.recipes.fashion import FashionMNIST, Source
from softs_lightning.recipes.self_distillation import moved

__all__ = ["MNIST", "Perceptron"]


class MNIST(FashionMNIST):
    """The original handwritten digits, in the same four files as :class:`~softs_lightning.recipes.fashion.FashionMNIST`.

    No package brings them: `folder` or `$SOFTS_LIGHTNING_DATA/mnist` says where they are.
    """

    source = Source("MNIST", "mnist", Path("MNIST/raw"))


class Perceptron(Classifier):
    """Two hidden layers of rectified linear units, regularised or not.

    Args:
        width: units in each hidden layer.
        dropout: share of hidden units left out in training; a fifth of the pixels goes with them if it is not 0.
        norm: largest length of the weights into one unit; `None`: any.
        jitter: pixels by which a training image is moved at most.
        lr: peak of the learning rate.

    `forward` takes images `(batch, 1, 28, 28)` and returns scores `(batch, 10)`. A label of -100 does not count.
    """

    def __init__(
        self,
        *,
        width: int = 800,
        dropout: float = 0.0,
        norm: float | None = None,
        jitter: int = 0,
        lr: float = 1e-3,
    ) -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters()
        self.norm, self.jitter = norm, jitter
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Dropout(0.2 if dropout else 0.0),
            nn.Linear(28 * 28, width),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Dropout(dropout),
        )
        self.head = nn.Linear(width, 10)

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(image))
        return scores

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        scores = self(moved(batch["image"], pixels=self.jitter))
        loss = F.cross_entropy(scores, batch["label"], ignore_index=UNLABELLED, reduction="sum")
        loss = loss / (batch["label"] != UNLABELLED).sum().clamp(min=1)
        self.log("train_loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.norm is None:
            return
        with torch.no_grad():
            for layer in self.modules():
                if isinstance(layer, nn.Linear):
                    layer.weight.copy_(layer.weight.renorm(2, 0, self.norm))
