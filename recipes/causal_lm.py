"""Causal language models of CPython's own documentation, small enough to be trained in minutes.

Text: the topics of ``help()`` and the docstrings of the standard library's top-level modules, in tokens of a byte-pair
encoding that is trained on it. The teacher is a Llama of under a million parameters; students are smaller ones.
"""

from __future__ import annotations

import ast
import hashlib
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, cast
from weakref import WeakKeyDictionary

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from softs_lightning.pretrained import Pretrained, only_looking
from softs_lightning.recipes.text import load_tokenizer, percent
from softs_lightning.trained import cache_folder

__all__ = ["Documentation", "LanguageModel", "OnPolicy", "nats", "paragraphs"]

VOCABULARY = 512
END = 0  # the token between two texts


@cache
def paragraphs() -> tuple[str, ...]:
    """Every different paragraph of at least 40 characters in the help topics and the docstrings."""
    from pydoc_data.topics import topics

    texts = list(topics.values())
    library = Path(sysconfig.get_path("stdlib"))
    for file in sorted(library.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                texts.append(ast.get_docstring(node) or "")
    found = dict.fromkeys(p.strip() for text in texts for p in text.split("\n\n") if len(p.strip()) >= 40)
    return tuple(found)


@cache
def byte_pairs(texts: tuple[str, ...]) -> Any:
    """A byte-pair encoding of `VOCABULARY` tokens, trained on `texts`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


class Documentation(L.LightningDataModule):
    """Batches of `{"input_ids": (batch, length), "labels": the same}`; paragraphs follow each other without padding.

    A tenth of the paragraphs is kept to choose settings with (`validation`), a fifth for the judge (`test`).

    Args:
        batch_size: rows in a training batch.
        length: tokens in a row.
        written_by: what makes a language model that writes the training text, for distillation on the level of
            sequences (Kim & Rush, 2016): it continues the first `prompt` tokens of each of the first
            `rows` rows. The text is kept in the cache.
        rows: how many rows it writes.
        prompt: tokens of each row that are real.
        tokenizer: the teacher's tokenizer, or its folder or name, instead of the byte pairs.
        text: a file with one text a line instead of the documentation.
        seed: the order of the batches.
    """

    def __init__(
        self,
        *,
        batch_size: int = 16,
        length: int = 64,
        written_by: Callable[[], nn.Module] | None = None,
        rows: int = 1024,
        prompt: int = 8,
        tokenizer: Any = None,
        text: str | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.batch_size, self.length, self.seed = batch_size, length, seed
        self.written_by, self.rows, self.prompt = written_by, rows, prompt
        if not 1 <= prompt < length:
            raise ValueError(f"prompt={prompt}: give from 1 to {length - 1} of the {length} tokens of a row")
        # The parts are read, never written to: what needs other rows puts them in place of these.
        self.encode, self.end, parts = _read(tokenizer, text, length, only_looking())
        self.train, self.validation, self.test = parts

    def fingerprint(self) -> str:
        """A hash of everything a training run on this data can see."""
        return hashlib.sha256(self.train.numpy().tobytes()).hexdigest()

    def setup(self, stage: str) -> None:
        # While the recipe is only looked at, rows of the same shape will do.
        if stage == "fit" and self.written_by is not None and not only_looking():
            self.train = written_text(self.written_by, self.train[: self.rows], prompt=self.prompt)
            self.written_by = None

    def train_dataloader(self) -> DataLoader[Tensor]:
        # A generator of its own: whatever else draws random numbers, all students meet the same batches.
        return DataLoader(
            self.train,  # type: ignore[arg-type]
            batch_size=self.batch_size,
            shuffle=True,
            drop_last=True,
            generator=torch.Generator().manual_seed(self.seed),
            collate_fn=_collate,
        )

    def val_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self.validation, batch_size=64, collate_fn=_collate)  # type: ignore[arg-type]


def _collate(rows: Sequence[Tensor]) -> dict[str, Tensor]:
    ids = torch.stack(list(rows))
    return {"input_ids": ids, "labels": ids.clone()}


@lru_cache(maxsize=8)
def _read(
    tokenizer: Any, text: str | None, length: int, looking: bool
) -> tuple[Callable[[str], list[int]], int, tuple[Tensor, Tensor, Tensor]]:
    """How texts become tokens, the token that ends one, and the rows to train, to choose settings and to judge with.

    Once in a process: every student of a run has data of its own, and all of them would read the same again.
    """
    texts = paragraphs() if text is None else _lines(text)
    train, validation, test = (
        tuple(t for t in texts if percent(t) in part) for part in (range(30, 100), range(20, 30), range(20))
    )
    encode, end = _encoder(tokenizer, train)

    def rows(texts: Sequence[str]) -> Tensor:
        tokens = [token for text in texts for token in (*encode(text), end)]
        whole = len(tokens) // length * length
        return torch.tensor(tokens[:whole]).reshape(-1, length)

    return encode, end, (rows(train), rows(validation), rows(test))


def _lines(file: str) -> tuple[str, ...]:
    from softs_lightning.recipes.text import SourceFolder

    found: tuple[str, ...] = SourceFolder.lines(file)
    return found


def _encoder(tokenizer: Any, texts: tuple[str, ...]) -> tuple[Callable[[str], list[int]], int]:
    """What makes tokens of a text, and the token that ends one."""
    if tokenizer is None:
        pairs = byte_pairs(texts)
        return lambda text: cast(list[int], pairs.encode(text).ids), END
    loaded = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
    if loaded.eos_token_id is None:
        raise ValueError(f"the tokenizer {tokenizer!r} has no token that ends a text (eos_token)")
    return lambda text: cast(list[int], loaded(text)["input_ids"]), int(loaded.eos_token_id)


class LanguageModel(L.LightningModule):
    """A causal language model under next-token cross-entropy; teacher and students are of this class.

    Args:
        shape: its config, `model_type` and what differs from that type's defaults; or
        pretrained: a name or folder for `from_pretrained`; or
        model: what makes it, such as `softs_lightning.from_teacher`'s node.
        lr: the highest learning rate of AdamW's cycle.
        freeze_embeddings: leave the token embeddings as they come, and with them a head that is tied to them.

    `forward` takes `input_ids (batch, tokens)` and returns the scores of the next tokens,
    `(batch, tokens, vocabulary)`.
    """

    def __init__(
        self,
        *,
        shape: Mapping[str, Any] | None = None,
        pretrained: str | None = None,
        model: PreTrainedModel | None = None,
        lr: float = 3e-3,
        freeze_embeddings: bool = False,
    ) -> None:
        super().__init__()
        if sum(given is not None for given in (shape, pretrained, model)) != 1:
            raise ValueError("give one of shape, pretrained and model")
        self.save_hyperparameters(ignore=["model"])
        self.lr = lr
        if shape is not None:
            model = cast(Any, AutoModelForCausalLM).from_config(AutoConfig.for_model(**shape))
        if pretrained is not None:
            model = Pretrained(pretrained)()
        self.model = cast(Any, model).train()
        if freeze_embeddings:
            self.model.get_input_embeddings().requires_grad_(False)
        self.model.generation_config = cast(Any, GenerationConfig)(pad_token_id=END, do_sample=True, top_k=0)

    def forward(self, input_ids: Tensor) -> Tensor:
        scores: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
        return scores

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = next_token_loss(self(batch["input_ids"]), batch["labels"])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        loss = next_token_loss(self(batch["input_ids"]), batch["labels"])
        self.log("val_nats", loss, prog_bar=True, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        cycle = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.lr, total_steps=int(self.trainer.estimated_stepping_batches), pct_start=0.1
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


def next_token_loss(scores: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of each token but the first, in nats."""
    return nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def continued(model: Any, ids: Tensor, *, prompt: int, temperature: float = 1.0) -> Tensor:
    """Rows as long as `ids` that begin with its first `prompt` tokens and go on as `model` samples."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            written = model.generate(
                ids[:, :prompt],
                attention_mask=torch.ones_like(ids[:, :prompt]),
                max_new_tokens=ids.shape[1] - prompt,
                min_new_tokens=ids.shape[1] - prompt,
                temperature=temperature,
                do_sample=True,
                top_k=0,
            )
    finally:
        model.train(training)
    return cast(Tensor, written)


def written_text(writer: Callable[[], nn.Module], rows: Tensor, *, prompt: int) -> Tensor:
    """What a teacher writes on from the beginnings of `rows`; kept in the cache by its weights and those rows."""
    teacher: Any = writer()
    digest = hashlib.sha256(rows.numpy().tobytes() + str(prompt).encode())
    for name, value in teacher.state_dict().items():
        digest.update(name.encode() + value.float().numpy().tobytes())
    file = cache_folder() / f"written-{digest.hexdigest()[:16]}.pt"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(0)
            inner = getattr(teacher, "model", teacher)
            found = torch.cat([continued(inner, part, prompt=prompt) for part in torch.split(rows, 128)])
        part = file.with_suffix(".part")
        torch.save(found, part)
        part.replace(file)
    written: Tensor = torch.load(file, weights_only=True)
    return written


class OnPolicy(L.Callback):
    """Lets the student write some of the batches that it is then distilled on (GKD, Agarwal et al., 2024).

    Before the step, a batch's rows are replaced by what the student samples from their beginnings; the
    distillation then compares both models on that text. Set the callback's `task_weight` to 0, as GKD does: the
    student's own loss would teach it what it wrote.

    Args:
        fraction: of the batches that are written by the student.
        prompt: tokens of each row that stay.
        temperature: of the sampling.
        start: steps before the first of them: a student that cannot write yet has nothing to be corrected in, and
            GKD begins with one that was trained on text.
    """

    def __init__(
        self, *, fraction: float = 0.5, prompt: int = 8, temperature: float = 1.0, start: int = 0
    ) -> None:
        super().__init__()
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction must lie above 0 and be 1 at most, got {fraction}")
        if start < 0:
            raise ValueError(f"start must be a number of steps, 0 or more, got {start}")
        self.fraction, self.prompt, self.temperature, self.start = fraction, prompt, temperature, start

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        # Which batches: spread evenly, the same in every run.
        if trainer.global_step < self.start or int((batch_idx + 1) * self.fraction) == int(
            batch_idx * self.fraction
        ):
            return
        ids = batch["input_ids"]
        written = continued(pl_module.model, ids, prompt=self.prompt, temperature=self.temperature)
        batch["input_ids"], batch["labels"] = written, written.clone()


_liked: WeakKeyDictionary[nn.Module, dict[bytes, Tensor]] = WeakKeyDictionary()
JUDGED_ROWS = 8  # at a time: the scores of a large vocabulary fill the memory


def nats(model: nn.Module, *, data: Documentation, teacher: nn.Module) -> dict[str, float]:
    """Cross-entropy of the held-out text, in nats a token, and how often the likeliest token is the teacher's (%)."""
    theirs = likeliest(teacher, data.test)
    total = alike = count = 0.0
    with torch.no_grad():
        for rows, liked in zip(*(torch.split(x, JUDGED_ROWS) for x in (data.test, theirs)), strict=True):
            scores = _scores(model, rows)
            tokens = rows[:, 1:].numel()
            total += float(next_token_loss(scores.double(), rows)) * tokens
            alike += float((scores.argmax(-1) == liked)[:, :-1].sum())
            count += tokens
    return {"nats per token": total / count, "as the teacher": 100 * alike / count}


def likeliest(teacher: nn.Module, rows: Tensor) -> Tensor:
    """The teacher's likeliest next token at each place of `rows`; found once for each teacher and text."""
    known, digest = _liked.setdefault(teacher, {}), hashlib.sha256(rows.numpy().tobytes()).digest()
    if digest not in known:
        with torch.no_grad():
            known[digest] = torch.cat(
                [_scores(teacher, part).argmax(-1) for part in torch.split(rows, JUDGED_ROWS)]
            )
    return known[digest]


def _scores(model: nn.Module, rows: Tensor) -> Tensor:
    """Scores of the next tokens, from one of our models or one of transformers."""
    found = model(rows)
    return cast(Tensor, getattr(found, "logits", found))
