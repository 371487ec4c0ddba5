"""Pretrained transformers models as teachers: loaded for a run, and known without their weights.

A command that only looks (``softs-distill explain``) needs a model's shape, not its weights, and may have no
network. :class:`Pretrained` therefore also makes the same model with random weights: from the config in its
folder, from one that the recipe gives, or, for the public models of the recipes' papers, from the table here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from softs_lightning.config import nearest
from softs_lightning.folders import MissingFolderError, folder

__all__ = ["KNOWN", "Pretrained", "UnknownShapeError", "only_looking", "without_weights"]

BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"]}
LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
ROBERTA = {
    "model_type": "roberta",
    "architectures": ["RobertaForMaskedLM"],
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}
MINILM = {
    "model_type": "bert",
    "architectures": ["BertModel"],
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_attention_heads": 12,
}

KNOWN: Mapping[str, Mapping[str, Any]] = {
    "bert-base-uncased": BERT,
    "bert-large-uncased": {**BERT, **LARGE},
    "roberta-base": ROBERTA,
    "roberta-large": {**ROBERTA, **LARGE},
    "sentence-transformers/stsb-roberta-base-v2": {**ROBERTA, "architectures": ["RobertaModel"]},
    "distilbert-base-uncased": {"model_type": "distilbert", "architectures": ["DistilBertForMaskedLM"]},
    "gpt2": GPT2,
    "gpt2-medium": {**GPT2, "n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {**GPT2, "n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {**GPT2, "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "sentence-transformers/all-MiniLM-L6-v2": {**MINILM, "num_hidden_layers": 6},
    "sentence-transformers/all-MiniLM-L12-v2": {**MINILM, "num_hidden_layers": 12},
    "sentence-transformers/all-mpnet-base-v2": {
        "model_type": "mpnet",
        "architectures": ["MPNetModel"],
        "vocab_size": 30527,
        "max_position_embeddings": 514,
        "layer_norm_eps": 1e-5,
        "pad_token_id": 1,
        "bos_token_id": 0,
        "eos_token_id": 2,
    },
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000},
    },
}
"""Shapes of public models, by their names on the hub: what differs from transformers' defaults."""


class UnknownShapeError(ValueError):
    """A model is to be made without its weights, and nothing says its shape.

    Attributes:
        given: its name, as it was written.
    """

    def __init__(self, message: str, given: str) -> None:
        super().__init__(message)
        self.given = given


_only_looking: ContextVar[bool] = ContextVar("only_looking", default=False)


@contextmanager
def without_weights() -> Iterator[None]:
    """Inside, every :class:`Pretrained` makes its model with random weights and reads none.

    >>> with without_weights():
    ...     model = Pretrained("no-such-model", config={"model_type": "bert", "num_hidden_layers": 1})()
    >>> type(model).__name__
    'BertModel'
    """
    before = _only_looking.set(True)
    try:
        yield
    finally:
        _only_looking.reset(before)


def only_looking() -> bool:
    """Whether this is inside :func:`without_weights`: what is made now is looked at, never trained or scored."""
    return _only_looking.get()


class Pretrained:
    """Makes a pretrained transformers model; a teacher, or what a student is cut from.

    Args:
        name: what ``from_pretrained`` takes: a folder, or a name on the hub.
        model: the class of transformers that loads it. By default the one that its config names
            (``architectures``), or ``AutoModel`` where it names none.
        config: its shape, as ``model_type`` and what differs from that type's defaults, for names
            that are neither folders nor in :data:`KNOWN`. It is only read when there are no weights to read.
        **options: for ``from_pretrained``: ``revision``, ``attn_implementation``, ``gguf_file``, ...

    Raises:
        FileNotFoundError: for a path (``/a``, ``./a``, ``../a``, ``~/a``) where no folder is; not until the model is
            made where `config` says its shape.
        ValueError: for a class that transformers does not have; from :meth:`untrained`, for a name of
            which nothing is known.

    >>> teacher = Pretrained("bert-base-uncased", model="BertModel", attn_implementation="eager")
    >>> sum(parameter.numel() for parameter in teacher.untrained().parameters())
    109482240
    """

    def __init__(
        self, name: str, *, model: str | None = None, config: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        import transformers

        if not isinstance(name, str) or not name.strip():
            raise ValueError(f"name must be a folder or a model's name, got {name!r}")
        if model is not None and not hasattr(getattr(transformers, model, None), "from_pretrained"):
            raise ValueError(f"transformers has no model class {model!r}; give for example AutoModel")
        if config is not None and "model_type" not in config:
            raise ValueError(
                f"config must say its model_type, has {', '.join(map(str, config)) or 'nothing'}"
            )
        self.name = name if config is not None else folder(name)
        self.model, self.config, self.options = model, config, options

    def __call__(self) -> PreTrainedModel:
        """The model with its weights, in eval mode; inside :func:`without_weights` with random ones.

        Raises:
            FileNotFoundError: when there is neither such a folder nor a way to fetch the name.
        """
        import transformers

        if only_looking():
            return self.untrained()
        name = folder(self.name)
        try:
            kind = self._class(transformers.AutoConfig.from_pretrained(name, **self._of_config()))
            return cast(PreTrainedModel, kind.from_pretrained(name, **self.options).eval())
        except OSError as error:
            raise MissingFolderError(
                f"{self.name!r} is neither a folder with a model nor a name that can be fetched now "
                f"({str(error).splitlines()[0]}). Without a network, give the folder of a copy",
                self.name,
            ) from error

    def untrained(self) -> PreTrainedModel:
        """The same architecture with random weights: enough to look at names, shapes and costs."""
        config = self._shape()
        options = {k: v for k, v in self.options.items() if k in ("attn_implementation", "dtype")}
        with torch.random.fork_rng(devices=()):
            kind = self._class(config)
            make = getattr(kind, "_from_config", None) or kind.from_config
            return cast(PreTrainedModel, make(config, **options).eval())

    def _shape(self) -> PreTrainedConfig:
        from transformers import AutoConfig

        place = Path(self.name).expanduser()
        if place.is_dir():
            return cast(PreTrainedConfig, AutoConfig.from_pretrained(place, **self._of_config()))
        known = self.config or KNOWN.get(self.name)
        if known is None:
            raise UnknownShapeError(
                f"the shape of {self.name!r} is not known here: it is no folder, and not in the table. "
                f"{nearest(self.name, KNOWN)} Or give its shape as config: {{model_type: ..., hidden_size: ...}}",
                self.name,
            )
        kind = known["model_type"]
        return AutoConfig.for_model(kind, **{k: v for k, v in known.items() if k != "model_type"})

    def _of_config(self) -> dict[str, Any]:
        return {k: v for k, v in self.options.items() if k in ("revision", "gguf_file", "trust_remote_code")}

    def _class(self, config: PreTrainedConfig) -> Any:
        import transformers

        named = self.model or next(iter(config.architectures or ()), "AutoModel")
        return getattr(transformers, named)
