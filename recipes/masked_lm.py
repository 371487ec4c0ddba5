"""Masked words of Wikipedia: DistilBERT's way of pretraining, small enough for a CPU.

The text is a hundred articles that come with gensim. The teacher is MiniLM under a head for masked words, trained on it
once: as it is packaged, MiniLM has none. Students are cut from the teacher, with its embeddings and its head.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, cast
from weakref import WeakKeyDictionary

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel, get_linear_schedule_with_warmup

from softs_lightning.pretrained import only_looking
from softs_lightning.recipes.digits import whole_batch
from softs_lightning.recipes.pretrained_lm import spread
from softs_lightning.recipes.text import SourceFolder, load_tokenizer, minilm, minilm_folder, percent
from softs_lightning.recipes.wikipedia import articles
from softs_lightning.surgery import from_teacher

__all__ = ["MaskedLanguageModel", "MaskedText", "guesses", "minilm_with_a_head", "places"]

IGNORED = -100  # the label of a token that nobody is asked for
JUDGED_ROWS = 32  # at a time

Batch = dict[str, Tensor]


class MaskedText(L.LightningDataModule):
    """Batches of `{"input_ids", "attention_mask", "labels"}`, all `(batch, max_length)`; some words are masked.

    Passages are as long as they may be and never cross the border of a document. A tenth of the documents is kept to
    choose settings with (`validation`), a fifth for the judge (`test`); what is masked in these never changes.

    Args:
        batch_size: passages in a training batch.
        max_length: tokens in a passage, with the two that begin and end it.
        share: of the tokens that somebody is asked for: of these 80 % are masked, 10 % are replaced by any other
            and 10 % stay.
        judged: how many at most of the passages kept for the judge are used, spread over them; `None`: all.
        text: a file with one document a line instead of Wikipedia.
        tokenizer: a folder or name of the teacher's tokenizer; by default MiniLM's, which is BERT's.
        seed: the order of the batches, and what is masked in them.

    Raises:
        ValueError: for a share, length or size out of range, for text that is too short, and for a tokenizer without a
            token to mask with.
    """

    def __init__(
        self,
        *,
        batch_size: int = 16,
        max_length: int = 24,
        share: float = 0.15,
        judged: int | None = 1000,
        text: str | None = None,
        tokenizer: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 0 < share < 1:
            raise ValueError(f"share must lie between 0 and 1, got {share}")
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if max_length < 4:
            raise ValueError(
                f"max_length={max_length}: a passage has 4 tokens at least, two of which are words"
            )
        self.batch_size, self.share, self.seed = batch_size, share, seed
        self.tokenizer = load_tokenizer(tokenizer or minilm_folder())
        if self.tokenizer.mask_token_id is None:
            raise ValueError(f"the tokenizer {tokenizer!r} has no token to mask with (mask_token)")
        special = torch.zeros(len(self.tokenizer), dtype=torch.bool)
        special[list(self.tokenizer.all_special_ids)] = True
        self.special, self.words = special, (~special).nonzero().flatten()
        # Read-only: all students of a process share these rows.
        self.train, watched, judged_rows = _rows(tokenizer, text, max_length, only_looking())
        if judged is not None:
            judged_rows = spread(judged_rows, min(judged, len(judged_rows)), "judged")
        self.validation, self.test = self.masked(watched, seed=0), self.masked(judged_rows, seed=1)

    def fingerprint(self) -> str:
        """A hash of everything a training run on this data can see."""
        return hashlib.sha256(self.train.numpy().tobytes()).hexdigest()

    def example_batch(self) -> Batch:
        """Two passages: enough to look at models, however large the batch is that they will be trained on.

        Raises:
            Refusal: for a batch that the training text does not hold.
        """
        return self.masked(self.train[: min(2, whole_batch(self.batch_size, len(self.train)))], seed=0)

    def masked(self, ids: Tensor, *, seed: int) -> Batch:
        """A batch of these rows `(batch, tokens)`, masked as a generator of that seed says."""
        return self._mask(ids, torch.Generator().manual_seed(seed))

    def _mask(self, ids: Tensor, generator: torch.Generator) -> Batch:
        candidates = (~self.special[ids]).flatten().nonzero().flatten()
        order = torch.randperm(len(candidates), generator=generator)
        chosen = candidates[order[: math.ceil(self.share * len(candidates))]]
        labels = torch.full_like(ids, IGNORED).flatten()
        labels[chosen] = ids.flatten()[chosen]
        fate = torch.rand(len(chosen), generator=generator)
        drawn = torch.randint(len(self.words), (len(chosen),), generator=generator)
        seen = ids.flatten().clone()
        hidden, other = fate < 0.8, fate >= 0.9
        seen[chosen[hidden]] = self.tokenizer.mask_token_id
        seen[chosen[other]] = self.words[drawn[other]]
        mask = (ids != self.tokenizer.pad_token_id).long()
        return {"input_ids": seen.view_as(ids), "attention_mask": mask, "labels": labels.view_as(ids)}

    def train_dataloader(self) -> DataLoader[Tensor]:
        # Generators of their own: whatever else draws random numbers, all students meet the same batches.
        order, masks = (torch.Generator().manual_seed(2 * self.seed + i) for i in range(2))
        return DataLoader(
            self.train,  # type: ignore[arg-type]
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            generator=order,
            collate_fn=lambda rows: self._mask(torch.stack(rows), masks),
        )

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(split(self.validation, 64), batch_size=None)  # type: ignore[arg-type]


@lru_cache(maxsize=4)
def _rows(
    tokenizer: str | None, text: str | None, length: int, looking: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The passages `(passages, length)` to train, to choose settings and to judge with; once in a process."""
    loaded = load_tokenizer(tokenizer or minilm_folder())
    documents = articles() if text is None else tuple((line, (line,)) for line in SourceFolder.lines(text))
    parts: tuple[list[Tensor], ...] = ([], [], [])
    for title, paragraphs in documents:
        tokens = [
            t for p in paragraphs for t in loaded(p, add_special_tokens=False, verbose=False)["input_ids"]
        ]
        place = percent(title)
        parts[0 if place >= 30 else 1 if place >= 20 else 2].extend(_passages(tokens, loaded, length))
    if not all(parts):
        raise ValueError(f"{text}: {len(documents)} documents are too few to train and to judge with")
    train, watched, judged = (torch.stack(part) for part in parts)
    return train, watched, judged


def _passages(tokens: Sequence[int], tokenizer: Any, length: int) -> list[Tensor]:
    inner = length - 2
    found = []
    for start in range(0, len(tokens), inner):
        words = tokens[start : start + inner]
        row = [tokenizer.cls_token_id, *words, tokenizer.sep_token_id]
        found.append(torch.tensor(row + [tokenizer.pad_token_id] * (length - len(row))))
    return found


class MaskedLanguageModel(L.LightningModule):
    """A BERT that guesses masked words; teacher and students are of this class.

    Args:
        source: makes the model: a `BertForMaskedLM`, or a module of this class that holds one.
        layers: which of its layers are kept; by default all. Embeddings and head are kept, and stay one.
        random: take the shape that `layers` gives, and random weights.
        freeze_embeddings: leave the embeddings of the tokens as they come, and with them the head's weight.
        frequencies: begin with a head that guesses each token as often as it stands in the training text.
        lr: the highest learning rate of AdamW, which rises in a line and falls in a line to 0.
        warmup: the share of the steps in which it rises.

    Raises:
        TypeError: for any other model.

    `forward` takes `input_ids` and `attention_mask`, both `(batch, tokens)`, and returns scores
    `(batch, tokens, vocabulary)`; in training they are made at the masked places only.
    """

    def __init__(
        self,
        *,
        source: Callable[[], nn.Module],
        layers: Sequence[int] | None = None,
        random: bool = False,
        freeze_embeddings: bool = False,
        frequencies: bool = False,
        lr: float = 5e-4,
        warmup: float = 0.05,
    ) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["source"])
        self.frequencies, self.lr, self.warmup = frequencies, lr, warmup
        made = source.untrained() if only_looking() and hasattr(source, "untrained") else source()
        model: Any = bert_of(made)
        if layers is not None:
            model = from_teacher(model, layers=list(layers))
        if random:
            model = cast(Any, AutoModelForMaskedLM).from_config(model.config)
        self.model = model.train()
        self.model.get_input_embeddings().requires_grad_(not freeze_embeddings)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        scores: Tensor = self.model.cls.predictions.decoder(states(self.model, input_ids, attention_mask))
        return scores

    def setup(self, stage: str) -> None:
        # Not later: what a checkpoint holds has the last word.
        if stage == "fit" and self.frequencies:
            data = cast(Any, self.trainer).datamodule
            if not isinstance(data, MaskedText):
                raise TypeError(
                    f"frequencies=True counts the tokens of a MaskedText, not of {type(data).__name__}"
                )
            counts = torch.bincount(data.train.flatten(), minlength=self.model.config.vocab_size) + 0.1
            with torch.no_grad():
                self.model.cls.predictions.bias.copy_((counts / counts.sum()).log())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(*asked(self.model, batch))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        scores, labels = asked(self.model, batch)
        self.log(
            "val_nats", nn.functional.cross_entropy(scores, labels), prog_bar=True, batch_size=len(labels)
        )

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.0)
        steps = int(self.trainer.estimated_stepping_batches)
        line = cast(Any, get_linear_schedule_with_warmup)(optimizer, math.ceil(self.warmup * steps), steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": line, "interval": "step"}}


def bert_of(module: nn.Module) -> PreTrainedModel:
    """The BERT with a head for masked words that a module is or holds."""
    model = module.model if isinstance(module, MaskedLanguageModel) else module
    if not hasattr(getattr(getattr(model, "cls", None), "predictions", None), "transform"):
        raise TypeError(
            f"a BertForMaskedLM is wanted, or a module that holds one; got {type(module).__name__}"
        )
    return cast(PreTrainedModel, model)


def states(model: Any, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """What enters the head's last matrix, `(batch, tokens, width)`."""
    hidden = model.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
    entering: Tensor = model.cls.predictions.transform(hidden)
    return entering


def places(batch: Batch) -> Tensor:
    """The places that somebody is asked for, `(batch, tokens)`; as a pair's `mask`, the only ones that are compared."""
    return batch["labels"] != IGNORED


def asked(model: Any, batch: Batch) -> tuple[Tensor, Tensor]:
    """Scores `(words, vocabulary)` and labels `(words,)` at these places."""
    entering = states(model, batch["input_ids"], batch["attention_mask"])[places(batch)]
    return model.cls.predictions.decoder(entering), batch["labels"][places(batch)]


def minilm_with_a_head() -> PreTrainedModel:
    """MiniLM under BERT's head for masked words, which is new but for the matrix that it shares with the embeddings."""
    encoder = minilm()
    config = AutoConfig.for_model(**encoder.config.to_dict())
    model = cast(Any, AutoModelForMaskedLM).from_config(config)
    found = model.bert.load_state_dict(encoder.state_dict(), strict=False)
    assert not found.missing_keys
    assert all(name.startswith("pooler.") for name in found.unexpected_keys)
    return cast(PreTrainedModel, model)


_liked: WeakKeyDictionary[nn.Module, dict[str, list[Tensor]]] = WeakKeyDictionary()


def guesses(model: nn.Module, *, data: MaskedText, teacher: nn.Module) -> dict[str, float]:
    """How well masked words of held-out articles are guessed.

    Nats of cross-entropy a word; the share of words guessed right, and guessed as the teacher does, in %.
    """
    total, right, alike = 0.0, 0, 0
    for (scores, labels), liked in zip(judged(model, data.test), likeliest(teacher, data.test), strict=True):
        total += float(nn.functional.cross_entropy(scores.double(), labels, reduction="sum"))
        right += int((scores.argmax(-1) == labels).sum())
        alike += int((scores.argmax(-1) == liked).sum())
    count = int(places(data.test).sum())
    return {
        "nats per masked word": total / count,
        "guessed right": 100 * right / count,
        "as the teacher": 100 * alike / count,
    }


def judged(module: nn.Module, batch: Batch) -> Iterator[tuple[Tensor, Tensor]]:
    """Scores and labels at the places that are asked for, a few rows at a time: a vocabulary of scores is large."""
    model = bert_of(module)
    with torch.no_grad():
        for part in split(batch, JUDGED_ROWS):
            yield asked(model, part)


def likeliest(teacher: nn.Module, batch: Batch) -> list[Tensor]:
    """The teacher's guesses, part by part; found once for each teacher and text."""
    known, digest = (
        _liked.setdefault(teacher, {}),
        hashlib.sha256(batch["input_ids"].numpy().tobytes()).hexdigest(),
    )
    if digest not in known:
        known[digest] = [scores.argmax(-1) for scores, _ in judged(teacher, batch)]
    return known[digest]


def split(batch: Batch, rows: int) -> list[Batch]:
    """A batch in parts of so many rows, the last one shorter."""
    starts = range(0, len(batch["labels"]), rows)
    return [{name: value[start : start + rows] for name, value in batch.items()} for start in starts]
