"""A transformer for the digits: the teacher from which a convolutional student learns."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softs_lightning.recipes.digits import CLASSES, Classifier

__all__ = ["DigitsTransformer"]


class DigitsTransformer(Classifier):
    """A small vision transformer (Dosovitskiy et al., 2021, arXiv:2010.11929) on patches of 2×2 pixels.

    `forward` takes images `(batch, 1, 8, 8)` and returns scores `(batch, 10)`; `layers.N` gives tokens
    `(batch, 17, width)`, the class token first and then a 4×4 grid of places.
    """

    def __init__(self, *, width: int = 48, depth: int = 4, heads: int = 4, lr: float = 3e-3) -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters()
        self.patches = nn.Conv2d(1, width, 2, stride=2)
        self.classifying = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, heads, 2 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True
            )
            for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        tokens = self.patches(image).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.classifying.expand(len(tokens), -1, -1), tokens], 1) + self.places
        for layer in self.layers:
            tokens = layer(tokens)
        scores: Tensor = self.head(self.norm(tokens[:, 0]))
        return scores

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["image"]), batch["label"])
