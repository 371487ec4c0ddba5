"""Fashion-MNIST with few labels: the images as files on disk, a residual teacher and a student of another kind.

The 70,000 images (Xiao et al., 2017, arXiv:1708.07747) are read from the four original files, plain or
gzipped. Of the 60,000 for training a part is the pool, 5,000 others choose settings; the 10,000 of the
files t10k-* are only ever scored.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from softs_lightning.config import Refusal
from softs_lightning.recipes.digits import (
    UNLABELLED,
    Classifier,
    as_it_is,
    digest,
    keep_labels,
    whole_batch,
)

__all__ = ["FashionMNIST", "FashionMixer", "FashionTeacher", "accuracy"]

CLASSES = 10
SIDE = 28
IMAGES = 60_000  # to train on
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


@dataclass(frozen=True)
class Source:
    """Images in these four files, and where they come from: `kept` is what torchvision calls their folder."""

    title: str
    folder: str
    kept: Path
    package: Callable[[], Sequence[Path]] = tuple
    how: str = ""

    def places(self, folder: str | None) -> Iterator[Path]:
        """Where the files may lie: in `folder` if it is given, else where packages and torchvision put them."""
        if folder is not None:
            roots = [Path(folder).expanduser()]
        else:
            named = os.environ.get("SOFTS_LIGHTNING_DATA")
            roots = [*([Path(named) / self.folder] if named else []), *self.package()]
        for root in roots:
            yield from (root, root / self.kept)

    def find(self, folder: str | None) -> Path:
        """The folder that holds the four files.

        Raises:
            Refusal: when no folder does; says where was looked and how to get them.
        """
        wanted = [name for names in FILES.values() for name in names]
        for place in self.places(folder):
            if all(any((place / f"{name}{end}").is_file() for end in ("", ".gz")) for name in wanted):
                return place
        looked = ", ".join(str(place) for place in self.places(folder)) or "no folder: none was named"
        raise Refusal(
            f"{self.title} is not there (looked in {looked}). {self.how}torchvision downloads it: "
            f"torchvision.datasets.{self.kept.parts[0]}(FOLDER, download=True). Or put the four files "
            "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and t10k-labels-idx1-ubyte (plain "
            "or .gz) into a folder. Then say where: data.folder=FOLDER, or SOFTS_LIGHTNING_DATA=PARENT for all runs "
            f"(PARENT holds it as PARENT/{self.folder})."
        )


FASHION = Source(
    "Fashion-MNIST",
    "fashion-mnist",
    Path("FashionMNIST/raw"),
    lambda: [DEBIAN],
    "Debian and Ubuntu have it as a package: apt install dataset-fashion-mnist. ",
)


def read_idx(file: Path) -> Tensor:
    """One file in the idx format of MNIST, as unsigned bytes.

    Raises:
        Refusal: when the file is not one, or is cut off.
    """
    plain = file if file.is_file() else file.with_name(f"{file.name}.gz")
    content = gzip.decompress(plain.read_bytes()) if plain.suffix == ".gz" else plain.read_bytes()
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise Refusal(f"{plain} is not an idx file of bytes: it begins with {content[:4].hex()}.")
    dimensions = content[3]
    shape = np.frombuffer(content, ">u4", dimensions, offset=4).tolist()
    values = np.frombuffer(content, np.uint8, offset=4 + 4 * dimensions)
    if values.size != np.prod(shape):
        raise Refusal(f"{plain} says it holds {shape} values, but has {values.size}: it is cut off.")
    return torch.from_numpy(values.copy()).reshape(shape)


@lru_cache(maxsize=2)
def read(place: Path, split: str) -> tuple[Tensor, Tensor]:
    """Images ``(n, 1, 28, 28)`` as bytes and labels ``(n,)`` of one split; kept, since every student asks."""
    images, labels = (read_idx(place / name) for name in FILES[split])
    if images.shape[1:] != (SIDE, SIDE) or labels.shape != images.shape[:1] or int(labels.max()) >= CLASSES:
        raise Refusal(
            f"{place} holds images {list(images.shape)} with labels {list(labels.shape)} up to {int(labels.max())}, not "
            f"28×28 images of ten classes."
        )
    return images[:, None], labels.long()


class Pictures(Dataset[dict[str, Tensor]]):
    """Images of bytes with labels; `index` numbers the images, for losses that remember samples."""

    def __init__(self, image: Tensor, label: Tensor) -> None:
        self.image, self.label = image, label

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {key: value[0] for key, value in self.__getitems__([index]).items()}

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        """A whole batch at once (`torch.utils.data` prefers this over an item at a time)."""
        rows = torch.tensor(indices)
        return {"image": self.image[rows].float() / 255, "label": self.label[rows], "index": rows}


class FashionMNIST(L.LightningDataModule):
    """Batches of `{"image": (batch, 1, 28, 28) in 0..1, "label": (batch,), "index": (batch,)}`.

    Args:
        folder: where the four files are; `None`: `$SOFTS_LIGHTNING_DATA/fashion-mnist`, or Debian's place.
        images: size of the pool to train on; `None`: all training images but those of the validation.
        labels: how many images of the pool keep their label, the same number of each class, the others
            are labelled -100; `None`: all.
        validation: how many training images are kept to choose settings with.
        batch_size: images in a training batch, labelled or not.
        seed: which images keep their label, and the order of the batches. The split into pool,
            validation and test never changes.

    Raises:
        ValueError: if `labels` is not a multiple of ten, or a size is less than one.
        Refusal: when the data are set up: the files are not there, or too few for what is asked.
    """

    source: ClassVar[Source] = FASHION

    def __init__(
        self,
        *,
        folder: str | None = None,
        images: int | None = 20_000,
        labels: int | None = 250,
        validation: int = 5_000,
        batch_size: int = 100,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if labels is not None and (labels < CLASSES or labels % CLASSES):
            raise ValueError(f"labels={labels}: give a multiple of ten, or null for all of them.")
        if min(batch_size, validation, CLASSES if images is None else images) < 1:
            raise ValueError(
                f"images={images}, validation={validation} and batch_size={batch_size}: all must be at least 1."
            )
        self.folder, self.images, self.labels = folder, images, labels
        self.kept_back, self.batch_size, self.seed = validation, batch_size, seed
        self.train: Pictures
        self.validation: Pictures
        self.test: Pictures

    def setup(self, stage: str | None = None) -> None:
        place = self.source.find(self.folder)
        image, label = read(place, "train")
        pool = self._pool(len(image), f"{place} has")
        order = torch.randperm(len(image), generator=torch.Generator().manual_seed(0))
        # From the two ends, so that pools of different sizes never reach into the validation.
        chosen, kept = order[:pool], order[len(order) - self.kept_back :]
        self.train = Pictures(image[chosen], self._hide(label[chosen]))
        self.validation = Pictures(image[kept], label[kept])
        self.test = Pictures(*read(place, "test"))

    def _pool(self, there: int, whose: str) -> int:
        pool = there - self.kept_back if self.images is None else self.images
        if pool < 1 or pool + self.kept_back > there:
            raise Refusal(
                f"{whose} {there:,} images to train on, too few for images={pool} and "
                f"validation={self.kept_back}."
            )
        return pool

    def _hide(self, label: Tensor) -> Tensor:
        if self.labels is None:
            return label
        each = self.labels // CLASSES
        fewest = int(label.bincount(minlength=CLASSES).min())
        if each > fewest:
            raise Refusal(
                f"labels={self.labels}: a class has only {fewest} images in this pool, not {each}. Ask for fewer, or "
                "for null, which keeps all."
            )
        return keep_labels(label, each, classes=CLASSES, seed=self.seed)

    def example_batch(self) -> dict[str, Tensor]:
        """A batch of the right shapes without the files, enough to look at a recipe.

        Raises:
            Refusal: for a pool that the original files do not hold, and a batch that the pool does not.
        """
        size = whole_batch(self.batch_size, self._pool(IMAGES, f"{self.source.title} has"))
        blank = torch.zeros(size, 1, SIDE, SIDE, dtype=torch.uint8)
        return Pictures(blank, torch.arange(size) % CLASSES).__getitems__(range(size))

    def fingerprint(self) -> str:
        """A hash of everything a training run on this data can see."""
        self.setup()
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
        return DataLoader(self.validation, batch_size=1000, collate_fn=as_it_is)


class Residual(nn.Module):
    """Two 3×3 convolutions around which the input is carried (He et al., 2016, arXiv:1512.03385)."""

    def __init__(self, inputs: int, outputs: int, *, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.carry = (
            nn.Identity()
            if (inputs, stride) == (outputs, 1)
            else nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
        )

    def forward(self, image: Tensor) -> Tensor:
        return F.relu(self.carry(image) + self.body(image))


class FashionTeacher(Classifier):
    """A residual network: a stem that halves the image, and stages on grids of 14×14, 7×7 and 4×4.

    `forward` takes images `(batch, 1, 28, 28)` and returns scores `(batch, 10)`; `stages.1` gives maps
    `(batch, widths[1], 7, 7)`.
    """

    def __init__(self, *, widths: Sequence[int] = (16, 32, 64), lr: float = 5e-3) -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters()
        first, second, third = widths
        self.stem = nn.Sequential(
            nn.Conv2d(1, first, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(first), nn.ReLU()
        )
        self.stages = nn.Sequential(
            Residual(first, first), Residual(first, second, stride=2), Residual(second, third, stride=2)
        )
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(third, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.head(self.pool(self.stages(self.stem(image))))
        return scores

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["image"]), batch["label"])


class Mixing(nn.Module):
    """One layer of a ConvMixer: every channel mixes its places, then every place its channels."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.places = nn.Sequential(
            nn.Conv2d(width, width, kernel, padding=kernel // 2, groups=width),
            nn.ReLU(),
            nn.BatchNorm2d(width),
        )
        self.channels = nn.Sequential(nn.Conv2d(width, width, 1), nn.ReLU(), nn.BatchNorm2d(width))

    def forward(self, image: Tensor) -> Tensor:
        mixed: Tensor = self.channels(image + self.places(image))
        return mixed


class FashionMixer(Classifier):
    """A ConvMixer (Trockman and Kolter, 2022, arXiv:2201.09792): patches of 4×4, and one 7×7 grid throughout.

    Its own loss is that of the labelled images. It knows nothing of teachers: this is the module a user
    would have written anyway. `layers.N` gives maps `(batch, width, 7, 7)`, `pool` vectors `(batch, width)`.
    """

    def __init__(self, *, width: int = 24, depth: int = 2, kernel: int = 5, lr: float = 1e-2) -> None:
        super().__init__(lr=lr)
        self.save_hyperparameters()
        self.patches = nn.Sequential(nn.Conv2d(1, width, 4, stride=4), nn.ReLU(), nn.BatchNorm2d(width))
        self.layers = nn.Sequential(*(Mixing(width, kernel) for _ in range(depth)))
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(width, CLASSES)

    def forward(self, image: Tensor) -> Tensor:
        scores: Tensor = self.head(self.pool(self.layers(self.patches(image))))
        return scores

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch["image"]), batch["label"], ignore_index=UNLABELLED, reduction="sum")
        # A batch may hold no labelled image at all: its mean would be 0 / 0.
        loss = loss / (batch["label"] != UNLABELLED).sum().clamp(min=1)
        self.log("train_loss", loss)
        return loss


def accuracy(model: nn.Module, *, data: FashionMNIST, teacher: nn.Module) -> float:
    """Percent of the test images that `model` classifies right."""
    with torch.no_grad():
        right = sum(
            int((model(image.float() / 255).argmax(dim=1) == label).sum())
            for image, label in zip(data.test.image.split(1000), data.test.label.split(1000), strict=True)
        )
    return 100 * right / len(data.test)
