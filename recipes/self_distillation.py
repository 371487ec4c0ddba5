"""A student of digits that looks at each image slightly moved, and learns from models of its own kind."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from softs_lightning.recipes.digits import DigitsStudent

__all__ = ["MovedDigits", "moved"]


def moved(image: Tensor, *, pixels: int = 1) -> Tensor:
    """Each image of ``(batch, channels, height, width)`` moved by up to so many pixels each way; zeros come in.

    >>> moved(torch.ones(2, 1, 4, 4), pixels=0).sum().item()
    32.0
    """
    if pixels == 0:
        return image
    size = 2 * pixels + 1
    height, width = image.shape[-2:]
    padded = F.pad(image, (pixels,) * 4)
    down, right = torch.randint(size, (2, len(image), 1), device=image.device)
    rows = down + torch.arange(height, device=image.device)
    columns = right + torch.arange(width, device=image.device)
    place = torch.arange(len(image), device=image.device)[:, None, None]
    # Indexed dimensions come first: [batch, height, width, channels].
    return padded[place, :, rows[:, :, None], columns[:, None, :]].movedim(-1, 1)


class MovedDigits(DigitsStudent):
    """The student of the recipe `digits`, trained on images moved by up to one pixel.

    A teacher beside it sees the images as they are, so that the two never say the same of the same thing:
    without that, a moving average of the student would have nothing to tell it.
    """

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step({**batch, "image": moved(batch["image"])}, batch_idx)
