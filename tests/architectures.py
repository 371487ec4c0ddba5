"""Tiny random transformers models of eleven architectures, and where each returns what it records."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import transformers
from torch import Tensor, nn

__all__ = ["ARCHITECTURES", "Architecture", "built"]

SMALL = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
DECODER = {**SMALL, "num_hidden_layers": 3, "num_key_value_heads": 1, "max_position_embeddings": 32}


def _ids(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(3, 40, shape, generator=torch.Generator().manual_seed(seed))


def _floats(*shape: int, seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _text() -> dict[str, Any]:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    return {"input_ids": _ids(2, 6), "attention_mask": mask}


def _text_pair() -> dict[str, Any]:
    return {**_text(), "decoder_input_ids": _ids(2, 4, seed=3)}


def _clip() -> dict[str, Any]:
    return {"input_ids": _ids(2, 6), "pixel_values": _floats(2, 3, 8, 8)}


def _speech() -> dict[str, Any]:
    return {"input_features": _floats(2, 8, 16), "decoder_input_ids": _ids(2, 4, seed=3)}


@dataclass(frozen=True)
class Architecture:
    """A model class, its config, a batch, and what is recorded.

    `recorded` maps a selector to the attribute of the output, called with the flags, that it must
    equal; `first` and `layers` name the first layer and all layers that it stops, in order.
    """

    model: str
    config: str
    settings: Mapping[str, Any]
    batch: Callable[[], dict[str, Any]]
    recorded: Mapping[str, str]
    layers: str
    first_state: tuple[str, str] = ("%hidden_states.1", "hidden_states")
    flags: Mapping[str, Any] = field(default_factory=dict)

    def build(self, **settings: Any) -> Any:
        config = getattr(transformers, self.config)(**{**self.settings, **settings})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = getattr(transformers, self.model)._from_config(config, attn_implementation="eager")
            assert isinstance(model, nn.Module)
            return model.eval()


@cache
def built(name: str) -> Any:
    return ARCHITECTURES[name].build()


PLAIN = {"%hidden_states": "hidden_states", "%attentions": "attentions"}
SEQ2SEQ = {
    "encoder%hidden_states": "encoder_hidden_states",
    "encoder%attentions": "encoder_attentions",
    "decoder%hidden_states": "decoder_hidden_states",
    "decoder%attentions": "decoder_attentions",
    "%cross_attentions": "cross_attentions",
}
CLIP = {
    f"{part}_model%{key}": f"{part}_model_output.{key}"
    for part in ("text", "vision")
    for key in ("hidden_states", "attentions")
}
TOWER = {k: v for k, v in SMALL.items() if k != "vocab_size"}

ARCHITECTURES = {
    "bert": Architecture(
        "BertModel", "BertConfig", {**SMALL, "num_hidden_layers": 3}, _text, PLAIN, "encoder.layer"
    ),
    "distilbert": Architecture(
        "DistilBertModel",
        "DistilBertConfig",
        {"vocab_size": 40, "dim": 16, "hidden_dim": 24, "n_layers": 3, "n_heads": 2},
        _text,
        PLAIN,
        "transformer.layer",
    ),
    "roberta": Architecture(
        "RobertaForMaskedLM",
        "RobertaConfig",
        {**SMALL, "num_hidden_layers": 3, "max_position_embeddings": 32},
        _text,
        PLAIN,
        "roberta.encoder.layer",
    ),
    "gpt2": Architecture(
        "GPT2LMHeadModel",
        "GPT2Config",
        {"vocab_size": 40, "n_embd": 16, "n_layer": 3, "n_head": 2, "n_positions": 16},
        _text,
        PLAIN,
        "transformer.h",
    ),
    "llama": Architecture("LlamaForCausalLM", "LlamaConfig", DECODER, _text, PLAIN, "model.layers"),
    "qwen2": Architecture("Qwen2ForCausalLM", "Qwen2Config", DECODER, _text, PLAIN, "model.layers"),
    "mixtral": Architecture(
        "MixtralForCausalLM",
        "MixtralConfig",
        {**DECODER, "num_local_experts": 3, "num_experts_per_tok": 2},
        _text,
        {**PLAIN, "%router_logits": "router_logits"},
        "model.layers",
        flags={"output_router_logits": True},
    ),
    "t5": Architecture(
        "T5ForConditionalGeneration",
        "T5Config",
        {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 3, "num_heads": 2},
        _text_pair,
        SEQ2SEQ,
        "decoder.block",
        ("decoder%hidden_states.1", "decoder_hidden_states"),
    ),
    "vit": Architecture(
        "ViTForImageClassification",
        "ViTConfig",
        {**TOWER, "num_hidden_layers": 3, "image_size": 8, "patch_size": 4},
        lambda: {"pixel_values": _floats(2, 3, 8, 8)},
        PLAIN,
        "vit.layers",
    ),
    "clip": Architecture(
        "CLIPModel",
        "CLIPConfig",
        {
            "text_config": {**SMALL, "num_hidden_layers": 3, "max_position_embeddings": 8, "eos_token_id": 2},
            "vision_config": {**TOWER, "num_hidden_layers": 3, "image_size": 8, "patch_size": 4},
            "projection_dim": 8,
        },
        _clip,
        CLIP,
        "vision_model.encoder.layers",
        ("vision_model%hidden_states.1", "vision_model_output.hidden_states"),
    ),
    "whisper": Architecture(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {
            "vocab_size": 40,
            "d_model": 16,
            "encoder_layers": 3,
            "decoder_layers": 3,
            "encoder_attention_heads": 2,
            "decoder_attention_heads": 2,
            "encoder_ffn_dim": 24,
            "decoder_ffn_dim": 24,
            "num_mel_bins": 8,
            "max_source_positions": 8,
            "max_target_positions": 8,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
        _speech,
        {f"{'model.' if k[0] != '%' else ''}{k}": v for k, v in SEQ2SEQ.items()},
        "model.decoder.layers",
        ("model.decoder%hidden_states.1", "decoder_hidden_states"),
    ),
}
