"""Handwritten digits with few labels: the data, a deeply supervised teacher and a tiny student.

The images are scikit-learn's 1,797 real 8×8 scans (UCI "Optical Recognition of Handwritten Digits"),
split once into a pool of 1,000 to train on, 200 to choose settings with and 597 that are only ever scored.
The teacher learns from every label of the pool; the student sees all of its images but few of its labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from softs_lightning.config import Refusal

__all__ = ["Digits", "DigitsStudent", "DigitsTeacher", "accuracy"]

CLASSES = 10
UNLABELLED = -100
POOL, VALIDATION = 1000, 200


class Images(Dataset[dict[str, Tensor]]):
    """Images with labels, `passes` times over: one long epoch instead of hundreds of very short ones."""

    def __init__(self, image: Tensor, label: Tensor, *, passes: int = 1) -> None:
        self.image, self.label, self.passes = image, label, passes

    def __len__(self) -> int:
        return len(self.image) * self.passes

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        index %= len(self.image)
        return {"image": self.image[index], "label": self.label[index]}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """A whole batch at once (`torch.utils.data` prefers this over an item at a time)."""
        rows = torch.tensor(indices) % len(self.image)
        return {"image": self.image[rows], "label": self.label[rows]}


def as_it_is(batch: Any) -> Any:
    return batch


def keep_labels(label: Tensor, each: int, *, classes: int, seed: int) -> Tensor:
    """Labels of which `each` of every class are left, drawn by `seed`; the others are -100."""
    order = torch.randperm(len(label), generator=torch.Generator().manual_seed(seed))
    kept = torch.cat([order[label[order] == c][:each] for c in range(classes)])
    hidden = torch.full_like(label, UNLABELLED)
    hidden[kept] = label[kept]
    return hidden


def whole_batch(batch_size: int, rows: int) -> int:
    """`batch_size`, which an epoch over so many rows must reach: what is left over at its end is dropped.

    Raises:
        Refusal: when it does not, as where the first batch of an epoch is looked for and none comes.
    """
    if batch_size > rows:
        raise Refusal(
            "data: the training data holds not one batch; a smaller batch_size may help "
            f"(batch_size={batch_size}, and {rows:,} to train on)."
        )
    return batch_size


def digest(*tensors: Tensor) -> str:
    """A hash of everything that the tensors hold."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


class Digits(L.LightningDataModule):
    """Batches of `{"image": (batch, 1, 8, 8) in 0..1, "label": (batch,)}`; a hidden label is -100.

    Args:
        labels: how many images of the pool keep their label, the same number of each class; `None`: all.
        batch_size: images in a training batch, labelled or not.
        passes: how often one epoch goes through the pool.
        seed: which images keep their label, and the order of the batches. The split into pool,
            validation and test never changes.
        half: train on the first (0) or the second (1) half of the pool only; `None`: on all of it.

    Raises:
        ValueError: if `labels` is not a multiple of ten in 10..500 (200 in a half of the pool: no class
            has fewer images), `batch_size` or `passes` is less than one, or `half` neither 0 nor 1.

    >>> data = Digits(labels=50)
    >>> (data.train.label >= 0).sum().item(), len(data.train), len(data.validation), len(data.test)
    (50, 1000, 200, 597)
    """

    def __init__(
        self,
        *,
        labels: int | None = None,
        batch_size: int = 250,
        passes: int = 1,
        seed: int = 0,
        half: int | None = None,
    ) -> None:
        super().__init__()
        most = 500 if half is None else 200
        if labels is not None and (labels % CLASSES or not CLASSES <= labels <= most):
            raise ValueError(
                f"labels={labels}: give a multiple of ten from 10 to {most}, or null for all of them."
            )
        if half not in (None, 0, 1):
            raise ValueError(f"half={half}: the pool has a half 0 and a half 1; null is all of it.")
        if batch_size < 1 or passes < 1:
            raise ValueError(f"batch_size={batch_size} and passes={passes}: both must be at least 1.")
        self.labels, self.batch_size, self.passes, self.seed = labels, batch_size, passes, seed
        pixels, digits = load_digits(return_X_y=True)
        image = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
        label = torch.tensor(digits, dtype=torch.int64)
        order = torch.randperm(len(image), generator=torch.Generator().manual_seed(0))
        pool, validation, test = order.tensor_split([POOL, POOL + VALIDATION])
        if half is not None:
            pool = pool.chunk(2)[half]
        self.train = Images(image[pool], self.hide(label[pool]), passes=passes)
        self.validation = Images(image[validation], label[validation])
        self.test = Images(image[test], label[test])

    def hide(self, label: Tensor) -> Tensor:
        if self.labels is None:
            return label
        return keep_labels(label, self.labels // CLASSES, classes=CLASSES, seed=self.seed)

    def fingerprint(self) -> str:
        """A hash of everything a training run on this data can see."""
        return digest(self.train.image, self.train.label)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        # A generator of its own: whatever else draws random numbers, both students meet the same batches.
        generator = torch.Generator().manual_seed(self.seed)
        return DataLoader(
            self.train,
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            generator=generator,
            collate_fn=as_it_is,
        )

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(self.validation, batch_size=len(self.validation), collate_fn=as_it_is)


class Classifier(L.LightningModule):
    """What teacher and student share: accuracy on the validation images, AdamW and one learning-rate cycle."""

    def __init__(self, *, lr: float) -> None:
        super().__init__()
        self.lr = lr

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        right = self(batch["image"]).argmax(dim=1) == batch["label"]
        self.log("val_accuracy", 100 * right.float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


def stage(inputs: int, outputs: int, *, halve: bool) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2)) if halve else nn.Sequential(*layers)


class DigitsTeacher(Classifier):
    """A convolutional network with a second classifier halfway, trained together with the last one.

    Deep supervision (Lee et al., 2015, "Deeply-Supervised Nets") makes the `early` scores nearly as good as
    the final ones, so a student can learn from `outputs[early]` while the two last stages never run.

    `forward` takes images `(batch, 1, 8, 8)` and returns final scores `(batch, 10)`.
    """

    def __init__(self, *, widths: Sequence[int] = (24, 48, 64, 96), lr: float = 3e-3) -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters()
        first, second, third, fourth = widths
        self.trunk = nn.Sequential(stage(1, first, halve=False), stage(first, second, halve=True))
        self.early = nn.Sequential(nn.Flatten(), nn.Linear(second * 16, CLASSES))
        self.rest = nn.Sequential(stage(second, third, halve=False), stage(third, fourth, halve=False))
        self.head = nn.Sequential(
            nn.Flatten(), nn.Linear(fourth * 16, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, CLASSES)
        )

    def both(self, image: Tensor) -> tuple[Tensor, Tensor]:
        halfway = self.trunk(image)
        return self.early(halfway), self.head(self.rest(halfway))

    def forward(self, image: Tensor) -> Tensor:
        return self.both(image)[1]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        early, final = self.both(batch["image"])
        return F.cross_entropy(early, batch["label"]) + F.cross_entropy(final, batch["label"])


class DigitsStudent(Classifier):
    """A convolutional network a hundredth the teacher's size; its own loss is that of the labelled images.

    It knows nothing of teachers: this is the module a user would have written anyway.
    """

    def __init__(self, *, widths: Sequence[int] = (8, 16), lr: float = 1e-2) -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters()
        first, second = widths
        self.network = nn.Sequential(
            nn.Conv2d(1, first, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(first, second, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(second * 4, CLASSES),
        )

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.network(image)
        return scores

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["image"]), batch["label"], ignore_index=UNLABELLED, reduction="sum")
        # A batch may hold no labelled image at all: its mean would be 0 / 0.
        loss = loss / (batch["label"] != UNLABELLED).sum().clamp(min=1)
        self.log("train_loss", loss)
        return loss


def accuracy(model: nn.Module, *, data: Digits, teacher: nn.Module) -> float:
    """Percent of the 597 test images that `model` classifies right."""
    with torch.no_grad():
        right = model(data.test.image).argmax(dim=1) == data.test.label
    return float(100 * right.double().mean())
