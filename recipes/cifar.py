"""CIFAR-100 at the scale of published papers: the images from their original files, residual networks, hub models.

Nothing here runs in a minute: it is what `+scale=paper` of the image recipes trains, on one GPU in hours.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import AutoConfig, AutoModelForImageClassification

from softs_lightning.config import Refusal
from softs_lightning.folders import folder
from softs_lightning.recipes.digits import UNLABELLED, as_it_is, digest, keep_labels, whole_batch
from softs_lightning.recipes.fashion import Residual
from softs_lightning.recipes.self_distillation import moved

__all__ = ["CIFAR100", "CifarResNet", "ImageClassifier", "MovedCifarResNet", "accuracy"]

CLASSES = 100
IMAGES = 50_000
MEAN = torch.tensor([0.5071, 0.4867, 0.4408]).reshape(3, 1, 1)
SPREAD = torch.tensor([0.2675, 0.2565, 0.2761]).reshape(3, 1, 1)


def find(folder: str | None) -> Path:
    """The folder `cifar-100-python`.

    Raises:
        Refusal: when it is not there; says where it was looked for and how to get it.
    """
    root = Path(folder or os.environ.get("SOFTS_LIGHTNING_DATA") or ".").expanduser()
    for place in (root, root / "cifar-100-python"):
        if (place / "train").is_file() and (place / "test").is_file():
            return place
    raise Refusal(
        f"CIFAR-100 is not there (looked in {root} and its cifar-100-python). It is the archive "
        "cifar-100-python.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html; "
        "torchvision.datasets.CIFAR100(FOLDER, download=True) unpacks it too. Then: data.folder=FOLDER."
    )


@lru_cache(maxsize=2)
def read(place: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images ``(n, 3, 32, 32)`` as bytes and fine labels ``(n,)`` of `train` or `test`; kept, since every student asks."""
    with (place / split).open("rb") as file:
        content = pickle.load(file, encoding="bytes")  # a file of the user's own
    image = torch.from_numpy(content[b"data"]).reshape(-1, 3, 32, 32)
    return image, torch.tensor(content[b"fine_labels"])


class Photographs(Dataset[dict[str, Tensor]]):
    """Images of bytes, normalised and resized a batch at a time; if asked, moved by up to four pixels and mirrored."""

    def __init__(self, image: Tensor, label: Tensor, *, size: int, augment: bool) -> None:
        self.image, self.label, self.size, self.augment = image, label, size, augment

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[0] for key, value in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """A whole batch at once (`torch.utils.data` prefers this over an item at a time)."""
        rows = torch.tensor(indices)
        image = (self.image[rows].float() / 255 - MEAN) / SPREAD
        if self.augment:
            image = moved(image, pixels=4)
            mirrored = torch.rand(len(rows), 1, 1, 1) < 0.5
            image = torch.where(mirrored, image.flip(3), image)
        if self.size != image.shape[-1]:
            image = F.interpolate(image, (self.size, self.size), mode="bilinear", antialias=True)
        return {"image": image, "label": self.label[rows], "index": rows}


class CIFAR100(L.LightningDataModule):
    """Batches of `{"image": (batch, 3, size, size), "label": (batch,), "index": (batch,)}`.

    Args:
        folder: that holds `cifar-100-python`; `None`: `$SOFTS_LIGHTNING_DATA`, or where the command runs.
        labels: how many images keep their label, the same number of each class; `None`: all.
        validation: how many training images are kept to choose settings with; papers keep none (0) and look
            at the test images instead, which here are only ever scored.
        batch_size: images in a training batch.
        size: height and width to which images are resized.
        augment: move and mirror the training images at random.
        workers: processes that prepare batches.
        seed: which images keep their label, and the order of the batches.

    Raises:
        ValueError: if `labels` is not a multiple of one hundred, or a size is out of range.
        Refusal: when the data are set up and the files are not there.
    """

    def __init__(
        self,
        *,
        folder: str | None = None,
        labels: int | None = None,
        validation: int = 5_000,
        batch_size: int = 64,
        size: int = 32,
        augment: bool = True,
        workers: int = 4,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if labels is not None and (labels < CLASSES or labels % CLASSES):
            raise ValueError(f"labels={labels}: give a multiple of one hundred, or null for all of them.")
        if batch_size < 1 or size < 1 or workers < 0 or not 0 <= validation < IMAGES:
            raise ValueError(
                f"batch_size={batch_size} and size={size} must be at least 1, workers={workers} at least 0, and "
                f"validation={validation} less than {IMAGES}."
            )
        self.folder, self.labels, self.kept_back, self.batch_size = folder, labels, validation, batch_size
        self.size, self.augment, self.workers, self.seed = size, augment, workers, seed
        self.train: Photographs
        self.validation: Photographs
        self.test: Photographs

    def setup(self, stage: str | None = None) -> None:
        place = find(self.folder)
        image, label = read(place, "train")
        order = torch.randperm(len(image), generator=torch.Generator().manual_seed(0))
        chosen, kept = order.tensor_split([len(image) - self.kept_back])
        self.train = Photographs(
            image[chosen], self._hide(label[chosen]), size=self.size, augment=self.augment
        )
        self.validation = Photographs(image[kept], label[kept], size=self.size, augment=False)
        self.test = Photographs(*read(place, "test"), size=self.size, augment=False)

    def _hide(self, label: Tensor) -> Tensor:
        if self.labels is None:
            return label
        each, fewest = self.labels // CLASSES, int(label.bincount(minlength=CLASSES).min())
        if each > fewest:
            raise Refusal(f"labels={self.labels}: a class has only {fewest} training images, not {each}.")
        return keep_labels(label, each, classes=CLASSES, seed=self.seed)

    def example_batch(self) -> dict[str, Tensor]:
        """A batch of the right shapes without the files, enough to look at a recipe.

        Raises:
            Refusal: for a batch that the training images do not hold.
        """
        size = whole_batch(self.batch_size, IMAGES - self.kept_back)
        blank = torch.zeros(size, 3, 32, 32, dtype=torch.uint8)
        pictures = Photographs(blank, torch.arange(size) % CLASSES, size=self.size, augment=False)
        return pictures.__getitems__(range(size))

    def fingerprint(self) -> str:
        """A hash of everything a training run on this data can see."""
        self.setup()
        return digest(self.train.image, self.train.label)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        return DataLoader(
            self.train,
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            generator=generator,
            collate_fn=as_it_is,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
        )

    def val_dataloader(self) -> Any:
        if not len(self.validation):
            return []
        return DataLoader(self.validation, batch_size=500, collate_fn=as_it_is)


class _Supervised(L.LightningModule):
    """Cross-entropy on the labelled images and accuracy on the validation images."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        label = batch["label"]
        loss = F.cross_entropy(self(batch["image"]), label, ignore_index=UNLABELLED, reduction="sum")
        loss = loss / (label != UNLABELLED).sum().clamp(min=1)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        right = self(batch["image"]).argmax(dim=1) == batch["label"]
        self.log("val_accuracy", 100 * right.float().mean(), prog_bar=True, sync_dist=True)


class _Block(Residual):
    def __init__(self, inputs: int, outputs: int, *, stride: int = 1) -> None:
        super().__init__(inputs, outputs, stride=stride)
        if not isinstance(self.carry, nn.Identity):
            self.carry = nn.Sequential(self.carry, nn.BatchNorm2d(outputs))


class CifarResNet(_Supervised):
    """The residual networks of the CIFAR papers: `resnet32x4` is `depth=32` and these widths, `resnet8x4` `depth=8`.

    Args:
        depth: layers with weights, 6n + 2.
        widths: of the stem and the three stages.
        lr: of SGD with momentum 0.9, divided by ten at each milestone.
        weight_decay: of all weights.
        milestones: the epochs after which the rate falls.

    `stages.N` gives maps `(batch, widths[N + 1], 32 / 2^N, 32 / 2^N)`, `pool` vectors, `head` scores.

    Raises:
        ValueError: for a depth that is not 6n + 2.
    """

    def __init__(
        self,
        *,
        depth: int = 8,
        widths: Sequence[int] = (32, 64, 128, 256),
        lr: float = 0.05,
        weight_decay: float = 5e-4,
        milestones: Sequence[int] = (150, 180, 210),
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        blocks, rest = divmod(depth - 2, 6)
        if rest or blocks < 1:
            raise ValueError(f"depth={depth}: these networks have 6n + 2 layers, such as 8, 20, 32 or 56.")
        self.lr, self.weight_decay, self.milestones = lr, weight_decay, tuple(milestones)
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()
        )
        self.stages = nn.Sequential(
            *(
                nn.Sequential(
                    _Block(widths[n], widths[n + 1], stride=1 if n == 0 else 2),
                    *(_Block(widths[n + 1], widths[n + 1]) for _ in range(blocks - 1)),
                )
                for n in range(3)
            )
        )
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(widths[3], CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.head(self.pool(self.stages(self.stem(image))))
        return scores

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(
            self.parameters(), lr=self.lr, momentum=0.9, weight_decay=self.weight_decay
        )
        falls = torch.optim.lr_scheduler.MultiStepLR(optimizer, list(self.milestones), gamma=0.1)
        return {"optimizer": optimizer, "lr_scheduler": falls}


class MovedCifarResNet(CifarResNet):
    """Trained on a view of each image of its own, beside that of a teacher: see `MovedDigits`."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return super().training_step({**batch, "image": moved(batch["image"], pixels=4)}, batch_idx)


class ImageClassifier(_Supervised):
    """An image classifier of transformers, from a config or fine-tuned from pretrained weights.

    Args:
        config: `model_type` and what differs from that type's defaults.
        pretrained: a folder or a name on the hub, whose weights are read when training begins: a module that is only
            looked at, or gets other weights, needs none of them. A head of another size is made anew.
        lr: of AdamW, along half a cosine to zero.
        weight_decay: of all weights.
    """

    def __init__(
        self,
        *,
        config: Mapping[str, Any],
        pretrained: str | None = None,
        lr: float = 1e-3,
        weight_decay: float = 0.05,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.pretrained, self.lr, self.weight_decay = pretrained, lr, weight_decay
        self.model = AutoModelForImageClassification.from_config(AutoConfig.for_model(**config))

    def configure_model(self) -> None:
        if self.pretrained is not None:
            self.model = AutoModelForImageClassification.from_pretrained(
                folder(self.pretrained), config=self.model.config, ignore_mismatched_sizes=True
            )
            self.pretrained = None  # Lightning calls this for every fit and test, and weights are read once

    def forward(self, image: Tensor) -> Tensor:
        return cast(Tensor, self.model(pixel_values=image).logits)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=self.weight_decay)
        steps = int(self.trainer.estimated_stepping_batches)
        fall = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": fall, "interval": "step"}}


def accuracy(model: nn.Module, *, data: CIFAR100, teacher: nn.Module) -> float:
    """Percent of the 10,000 test images that `model` classifies right, wherever it is."""
    device = next(model.parameters()).device
    right = 0
    with torch.no_grad():
        for rows in torch.arange(len(data.test)).split(250):
            batch = data.test.__getitems__(rows.tolist())
            right += int((model(batch["image"].to(device)).argmax(dim=1).cpu() == batch["label"]).sum())
    return 100 * right / len(data.test)
