"""Which part of the standard library does a sentence document? A text classification made of real text.

Each sentence of prose in a docstring is labelled with the family of modules that it comes from (mail, web, tests,
...). Whoever reads it can often tell, and often cannot: "Return a new instance with the given name." may come
from anywhere. The teacher learns from every label; a student sees all sentences but few labels.
"""

from __future__ import annotations

import hashlib
import math
import sysconfig
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModel

from softs_lightning.losses.functional import attention_mse
from softs_lightning.pretrained import Pretrained
from softs_lightning.recipes.sentence_embeddings import mean_of_tokens
from softs_lightning.recipes.text import (
    load_tokenizer,
    minilm,
    minilm_folder,
    one_cycle,
    percent,
    sentences_of,
)
from softs_lightning.schedules import Unit
from softs_lightning.surgery import from_teacher

__all__ = [
    "FAMILIES",
    "AttentionScores",
    "TextClassifier",
    "Topics",
    "accuracy",
    "labelled_sentences",
]

UNLABELLED = -100

FAMILIES: Mapping[str, Sequence[str]] = {
    "asynchronous": ("asyncio",),
    "files": (
        "shutil.py",
        "tarfile.py",
        "zipfile*",
        "tempfile.py",
        "pathlib.py",
        "os.py",
        "gzip.py",
        "bz2.py",
    ),
    "imports": ("importlib", "pkgutil.py", "runpy.py", "inspect.py", "ast.py", "dis.py"),
    "mail": ("email", "mailbox.py", "smtplib.py", "imaplib.py", "poplib.py"),
    "numbers": ("_pydecimal.py", "fractions.py", "statistics.py", "random.py", "*datetime.py", "calendar.py"),
    "processes": ("multiprocessing", "concurrent", "subprocess.py", "threading.py"),
    "tests": ("unittest", "doctest.py", "pdb.py", "bdb.py"),
    "web": ("http", "urllib", "xmlrpc", "html", "socketserver.py", "ftplib.py", "socket.py", "ssl.py"),
}
"""Label → files and folders of the standard library."""


@cache
def labelled_sentences() -> tuple[tuple[str, int], ...]:
    """Every different sentence with its label; what occurs in several families is left out.

    Raises:
        FileNotFoundError: where this Python came without the source of its library.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found: dict[str, set[int]] = {}
    for label, patterns in enumerate(FAMILIES.values()):
        paths = [path for pattern in patterns for path in library.glob(pattern)]
        files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
        for file in sorted(files):
            if not {"test", "tests"} & set(file.parts):
                for sentence in sentences_of(file):
                    found.setdefault(sentence, set()).add(label)
    kept = tuple((sentence, min(labels)) for sentence, labels in found.items() if len(labels) == 1)
    fewest = min((Counter(label for _, label in kept)[i] for i in range(len(FAMILIES))), default=0)
    if fewest < 50:
        raise FileNotFoundError(
            f"too few docstrings in {library}: this Python came without its library's source"
        )
    return kept


class Topics(L.LightningDataModule):
    """Batches of `{"input_ids", "attention_mask", "label"}`; a hidden label is -100.

    10 % of all sentences are kept to choose settings with (`validation`), 20 % for the judge (`test`).

    Args:
        labels: how many sentences of each family keep their label for training; `None`: all.
        batch_size: sentences in a training batch, labelled or not.
        max_length: tokens that are kept of a sentence.
        tokenizer: a folder or name of the teacher's tokenizer; by default MiniLM's.
        seed: which sentences keep their label, and the order of the batches. The split never changes.

    Raises:
        ValueError: if some family has fewer sentences than `labels`.
    """

    def __init__(
        self,
        *,
        labels: int | None = None,
        batch_size: int = 16,
        max_length: int = 24,
        tokenizer: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.labels, self.batch_size, self.max_length, self.seed = labels, batch_size, max_length, seed
        self.tokenizer = load_tokenizer(tokenizer or minilm_folder())
        everything = labelled_sentences()
        self.test = [row for row in everything if percent(row[0]) < 20]
        self.validation = [row for row in everything if 20 <= percent(row[0]) < 30]
        self.train = self.hide([row for row in everything if percent(row[0]) >= 30])

    def hide(self, rows: list[tuple[str, int]]) -> list[tuple[str, int]]:
        if self.labels is None:
            return rows
        fewest = min(Counter(label for _, label in rows).values())
        if not 1 <= self.labels <= fewest:
            raise ValueError(
                f"labels={self.labels}: give from 1 to {fewest} for each family, or null for all"
            )
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(self.seed)).tolist()
        shown = {
            i for c in range(len(FAMILIES)) for i in [j for j in order if rows[j][1] == c][: self.labels]
        }
        return [(text, label if i in shown else UNLABELLED) for i, (text, label) in enumerate(rows)]

    def fingerprint(self) -> str:
        """A hash of everything a training run on this data can see."""
        return hashlib.sha256(repr(self.train).encode()).hexdigest()

    def encode(self, rows: Sequence[tuple[str, int]]) -> dict[str, Tensor]:
        texts = [text for text, _ in rows]
        encoded = self.tokenizer(
            texts, padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        )
        label = torch.tensor([label for _, label in rows])
        return {
            "input_ids": encoded["input_ids"],
            "attention_mask": encoded["attention_mask"],
            "label": label,
        }

    def train_dataloader(self) -> DataLoader[tuple[str, int]]:
        # A generator of its own: whatever else draws random numbers, all students meet the same batches.
        return DataLoader(
            self.train,  # type: ignore[arg-type]
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            generator=torch.Generator().manual_seed(self.seed),
            collate_fn=self.encode,
        )

    def val_dataloader(self) -> DataLoader[tuple[str, int]]:
        return DataLoader(self.validation, batch_size=50, collate_fn=self.encode)  # type: ignore[arg-type]


class TextClassifier(L.LightningModule):
    """An encoder and a linear layer on the mean of its tokens; teacher and students are of this class.

    Args:
        layers: which of the encoder's layers it starts with; by default all.
        shape: instead, a new encoder of the teacher's type with random weights: what differs from the
            teacher's config, `{"num_hidden_layers": 2}`.
        encoder: a name or folder of a pretrained encoder; by default MiniLM.
        freeze_embeddings: leave the token embeddings as they come.
        lr: the highest learning rate of AdamW's cycle.
        warmup: the share of a cycle in which the learning rate rises.
        restarts: where the cycle begins anew, in optimizer steps; by default it goes through once. What lies
            beyond the end of the training is never reached.
        restarts_by: or in epochs: `"epoch"`.

    Raises:
        ValueError: for a shape beside layers, or restarts that do not rise from 1.

    `forward` takes `input_ids` and `attention_mask`, both `(batch, tokens)`, and returns scores `(batch, 8)`.
    Attention runs in the plain implementation, since only that has attention maps to show.
    """

    def __init__(
        self,
        *,
        layers: Sequence[int] | None = None,
        shape: Mapping[str, Any] | None = None,
        encoder: str | None = None,
        freeze_embeddings: bool = False,
        lr: float = 1e-4,
        warmup: float = 0.1,
        restarts: Sequence[int] = (),
        restarts_by: Unit = "step",
    ) -> None:
        super().__init__()
        if shape is not None and layers is not None:
            raise ValueError("shape makes a new encoder: leave layers out")
        if restarts_by not in ("step", "epoch") or any(a >= b for a, b in pairwise((0, *restarts))):
            raise ValueError(
                f"restarts must rise from 1, by step or epoch, got {list(restarts)} by {restarts_by!r}"
            )
        self.save_hyperparameters()
        self.lr, self.warmup, self.restarts, self.restarts_by = lr, warmup, tuple(restarts), restarts_by
        made = minilm("eager") if encoder is None else _encoder(encoder)
        if layers is not None:
            made = from_teacher(made, layers=list(layers))
        if shape is not None:
            config = {**made.config.to_dict(), **shape}
            made = cast(Any, AutoModel).from_config(
                AutoConfig.for_model(**config), attn_implementation="eager"
            )
        self.encoder = cast(Any, made).train()
        if hasattr(self.encoder, "pooler"):
            self.encoder.pooler = None
        self.encoder.get_input_embeddings().requires_grad_(not freeze_embeddings)
        self.head = nn.Linear(made.config.hidden_size, len(FAMILIES))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        scores: Tensor = self.head(mean_of_tokens(hidden, attention_mask))
        return scores

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        label = batch["label"]
        scores = self(batch["input_ids"], batch["attention_mask"])
        loss = F.cross_entropy(scores, label, ignore_index=UNLABELLED, reduction="sum")
        # A batch may hold no labelled sentence at all: its mean would be 0 / 0.
        loss = loss / (label != UNLABELLED).sum().clamp(min=1)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        right = self(batch["input_ids"], batch["attention_mask"]).argmax(dim=1) == batch["label"]
        self.log("val_accuracy", 100 * right.float().mean(), prog_bar=True, batch_size=len(right))

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        each = 1
        if self.restarts_by == "epoch":
            each = math.ceil(self.trainer.num_training_batches / self.trainer.accumulate_grad_batches)
        bounds = [0, *(each * at for at in self.restarts if each * at < steps), steps]
        cycles = [
            one_cycle(optimizer, lr=self.lr, steps=end - begin, warmup=self.warmup)
            for begin, end in pairwise(bounds)
        ]
        cycle = torch.optim.lr_scheduler.SequentialLR(optimizer, cycles, milestones=bounds[1:-1])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


class AttentionScores(nn.Module):
    """TinyBERT's loss on attention *before* the softmax, of the queries and keys that it is made of.

    transformers' attention returns probabilities, if anything; what a token thinks of another before they are
    made is the product of its query with the other's key, over the root of a head's width. Mean squared error
    over heads and pairs of tokens, summed over layers.

    Args:
        heads: of both models; their widths may differ.

    A pair names the outputs of queries and keys in turn, layer by layer:
    ``outputs[...query|...key|...query|...key]``, each ``(batch, tokens, width)``.

    >>> states = torch.randn(4, 2, 5, 12)
    >>> AttentionScores(heads=3)(states.unbind(), states.unbind()).item()
    0.0
    """

    together = True
    same_shape = False

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(
        self, student: Sequence[Tensor], teacher: Sequence[Tensor], *, mask: Tensor | None = None
    ) -> Tensor:
        if len(student) % 2 or not student:
            raise ValueError(f"queries and keys come in pairs, got {len(student)} activations")
        terms = [
            attention_mse(self.scores(*student[i : i + 2]), self.scores(*teacher[i : i + 2]), mask=mask)
            for i in range(0, len(student), 2)
        ]
        return torch.stack(terms).sum()

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """`(batch, heads, tokens, tokens)`."""
        width, rest = divmod(query.shape[-1], self.heads)
        if rest:
            raise ValueError(f"queries of width {query.shape[-1]} do not divide into {self.heads} heads")
        one, other = (x.reshape(*x.shape[:2], self.heads, width).transpose(1, 2) for x in (query, key))
        products: Tensor = one @ other.mT
        return products / math.sqrt(width)


def _encoder(name: str) -> Any:
    return Pretrained(name, model="AutoModel", attn_implementation="eager")()


def accuracy(model: nn.Module, *, data: Topics, teacher: nn.Module) -> dict[str, float]:
    """Percent of the held-out sentences that `model` labels right, and as the teacher does."""
    right = alike = 0
    with torch.no_grad():
        for start in range(0, len(data.test), 50):
            batch = data.encode(sorted(data.test, key=lambda row: len(row[0]))[start : start + 50])
            label = batch.pop("label")
            guess, theirs = (one(**batch).argmax(dim=1) for one in (model, teacher))
            right += int((guess == label).sum())
            alike += int((guess == theirs).sum())
    return {"test accuracy": 100 * right / len(data.test), "as the teacher": 100 * alike / len(data.test)}
