"""Narrower models: exact where they can be, and made of the parts that matter where they cannot."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DistilBertConfig, DistilBertForMaskedLM

from softs_lightning import from_teacher, narrowing
from softs_lightning.narrowing import narrow_hidden, narrow_intermediate
from tests.architectures import ARCHITECTURES, built

# Llama's norms and rotations are computed in float32 whatever the weights are.
FLOAT32_NORMS = {"rtol": 1e-4, "atol": 1e-6}

FEED_FORWARD = {  # which weights hold the neurons, and along which dimension
    "bert": {"encoder.layer.1.intermediate.dense.weight": 0, "encoder.layer.1.output.dense.weight": 1},
    "gpt2": {"transformer.h.1.mlp.c_fc.weight": 1, "transformer.h.1.mlp.c_proj.weight": 0},
    "llama": {
        "model.layers.1.mlp.gate_proj.weight": 0,
        "model.layers.1.mlp.up_proj.weight": 0,
        "model.layers.1.mlp.down_proj.weight": 1,
    },
    "t5": {
        "encoder.block.1.layer.1.DenseReluDense.wi.weight": 0,
        "encoder.block.1.layer.1.DenseReluDense.wo.weight": 1,
    },
}


def logits(model: Any, **batch: Tensor) -> Tensor:
    with torch.no_grad():
        output = model.eval()(**batch)
    found: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return found


@pytest.mark.parametrize("name", FEED_FORWARD)
def test_the_neurons_with_the_largest_products_of_norms_stay(name: str) -> None:
    teacher = built(name)
    student = narrow_intermediate(teacher, 10)
    weights = {n: teacher.get_parameter(n).double() for n in FEED_FORWARD[name]}
    score = torch.stack([w.norm(dim=1 - FEED_FORWARD[name][n]) for n, w in weights.items()]).prod(0)
    kept = sorted(score.argsort(descending=True)[:10].tolist())
    for parameter, dim in FEED_FORWARD[name].items():
        expected = teacher.get_parameter(parameter).index_select(dim, torch.tensor(kept))
        assert torch.equal(student.get_parameter(parameter), expected)


@pytest.mark.parametrize("name", FEED_FORWARD)
def test_leaving_out_neurons_that_do_nothing_changes_nothing(name: str) -> None:
    teacher = copy.deepcopy(built(name)).double()
    with torch.no_grad():
        for parameter, value in teacher.named_parameters():
            for known, dim in FEED_FORWARD[name].items():
                if parameter.split(".")[-3:] == known.split(".")[-3:] and parameter.count(".") == known.count(
                    "."
                ):
                    value.index_fill_(dim, torch.arange(3, value.shape[dim], 2), 0.0)
    width = teacher.get_parameter(next(iter(FEED_FORWARD[name]))).shape[
        next(iter(FEED_FORWARD[name].values()))
    ]
    used = 3 + (width - 3) // 2
    batch = ARCHITECTURES[name].batch()
    student = narrow_intermediate(teacher, used)
    torch.testing.assert_close(logits(student, **batch), logits(teacher, **batch), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["llama", "qwen2"])
def test_a_rotation_at_full_width_leaves_the_logits(name: str) -> None:
    teacher = _rough(ARCHITECTURES[name].build().double())
    batch = ARCHITECTURES[name].batch()
    student = narrow_hidden(teacher, 16)
    assert not torch.allclose(student.get_input_embeddings().weight, teacher.get_input_embeddings().weight)
    torch.testing.assert_close(logits(student, **batch), logits(teacher, **batch), **FLOAT32_NORMS)


def _rough(model: Any) -> Any:
    """Norms with weights of their own: random models have ones, which hide where they belong."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if "norm" in name:
                value.copy_(1 + 0.5 * torch.rand(value.shape, generator=generator, dtype=torch.float64))
    return model


@pytest.mark.parametrize("by_inputs", [True, False])
def test_a_stream_of_few_dimensions_is_kept_whole(by_inputs: bool, tmp_path: Path) -> None:
    teacher = _rough(ARCHITECTURES["llama"].build(rms_norm_eps=1e-2).double())
    few = torch.linalg.qr(
        torch.randn(16, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ).Q
    with torch.no_grad():
        embeddings = teacher.get_input_embeddings().weight
        embeddings.copy_(embeddings @ few @ few.T)
        for name, value in teacher.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                value.copy_(few @ few.T @ value)
    batch = ARCHITECTURES["llama"].batch()
    student = narrow_hidden(teacher, 8, inputs=[batch] if by_inputs else None)
    torch.testing.assert_close(logits(student, **batch), logits(teacher, **batch), **FLOAT32_NORMS)
    student.save_pretrained(tmp_path)
    loaded = type(student).from_pretrained(tmp_path, attn_implementation="eager")
    assert (loaded.config.hidden_size, loaded.config.head_dim) == (8, 8)
    assert torch.equal(logits(loaded, **batch), logits(student, **batch))


def test_a_tied_head_is_untied_because_the_last_norms_weight_moves_into_it() -> None:
    teacher = _rough(ARCHITECTURES["llama"].build(tie_word_embeddings=True).double())
    student = narrow_hidden(teacher, 16)
    assert not student.config.tie_word_embeddings
    assert student.lm_head.weight is not student.model.embed_tokens.weight
    batch = ARCHITECTURES["llama"].batch()
    torch.testing.assert_close(logits(student, **batch), logits(teacher, **batch), **FLOAT32_NORMS)


def test_the_principal_directions_are_those_of_the_streams_unit_vectors() -> None:
    teacher = ARCHITECTURES["llama"].build().double()
    batch = ARCHITECTURES["llama"].batch()
    student = narrow_hidden(teacher, 4, inputs=[batch])
    with torch.no_grad():
        first = teacher.eval()(**batch, output_hidden_states=True).hidden_states[0]
        seen: list[Tensor] = []
        for part in (*teacher.model.layers, teacher.model):
            for norm in ("input_layernorm", "post_attention_layernorm", "norm"):
                if hasattr(part, norm):
                    getattr(part, norm).register_forward_pre_hook(
                        lambda _, args: seen.append(args[0].flatten(0, 1))
                    )
        teacher(**batch)
    rows = torch.cat(seen)
    assert torch.equal(seen[0], first.flatten(0, 1))
    basis = torch.linalg.svd(rows / rows.norm(dim=1, keepdim=True)).Vh[:4]
    narrow = student.model.embed_tokens.weight
    expected = teacher.model.embed_tokens.weight @ basis.T
    torch.testing.assert_close(narrow.abs(), expected.abs(), **FLOAT32_NORMS)  # signs are free


def test_bert_keeps_the_same_coordinates_everywhere_and_whole_heads(tmp_path: Path) -> None:
    teacher = copy.deepcopy(built("bert"))
    with torch.no_grad():  # coordinates 4 to 11 weigh much more, and in each layer one head
        for name, value in teacher.named_parameters():
            if name.startswith("embeddings") and value.ndim == 2:
                value[:, 4:12] *= 100
            if "attention.self.value.weight" in name:
                value[slice(8, 16) if ".1." in name else slice(0, 8)] *= 10
    student = from_teacher(teacher, hidden=8)
    rows = [slice(0, 8), slice(8, 16), slice(0, 8)]
    assert torch.equal(
        student.embeddings.word_embeddings.weight, teacher.embeddings.word_embeddings.weight[:, 4:12]
    )
    for ours, theirs, heads in zip(student.encoder.layer, teacher.encoder.layer, rows, strict=True):
        for part in ("query", "key", "value"):
            one, other = (getattr(layer.attention.self, part) for layer in (ours, theirs))
            assert torch.equal(one.weight, other.weight[heads, 4:12])
            assert torch.equal(one.bias, other.bias[heads])
        assert torch.equal(
            ours.attention.output.dense.weight, theirs.attention.output.dense.weight[4:12, heads]
        )
        assert torch.equal(
            ours.attention.output.LayerNorm.weight, theirs.attention.output.LayerNorm.weight[4:12]
        )
        assert torch.equal(ours.output.dense.weight, theirs.output.dense.weight[4:12])
    assert (student.config.hidden_size, student.config.num_attention_heads) == (8, 1)
    student.save_pretrained(tmp_path)
    loaded = type(student).from_pretrained(tmp_path, attn_implementation="eager")
    batch = ARCHITECTURES["bert"].batch()
    assert torch.equal(logits(loaded, **batch), logits(student, **batch))


def _distilbert(weights: dict[str, Tensor], tokens: Tensor, heads: int, depth: int) -> Tensor:
    """The scores of DistilBERT under its head for masked words, written out (Sanh et al., 2019, arXiv:1910.01108)."""

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        spread = x.var(-1, correction=0, keepdim=True)
        plain = (x - x.mean(-1, keepdim=True)) / (spread + 1e-12).sqrt()
        return plain * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        return x * (1 + torch.erf(x / 2**0.5)) / 2

    words = weights["distilbert.embeddings.word_embeddings.weight"]
    places = weights["distilbert.embeddings.position_embeddings.weight"][: tokens.shape[1]]
    x = norm(words[tokens] + places, "distilbert.embeddings.LayerNorm")
    for layer in (f"distilbert.transformer.layer.{n}" for n in range(depth)):
        query, key, value = (
            linear(x, f"{layer}.attention.{part}_lin").unflatten(-1, (heads, -1)).transpose(1, 2)
            for part in "qkv"
        )
        attended = (query @ key.mT / query.shape[-1] ** 0.5).softmax(-1) @ value
        x = norm(
            linear(attended.transpose(1, 2).flatten(2), f"{layer}.attention.out_lin") + x,
            f"{layer}.sa_layer_norm",
        )
        inner = linear(gelu(linear(x, f"{layer}.ffn.lin1")), f"{layer}.ffn.lin2")
        x = norm(inner + x, f"{layer}.output_layer_norm")
    x = norm(gelu(linear(x, "vocab_transform")), "vocab_layer_norm")
    return x @ words.T + weights["vocab_projector.bias"]


def test_a_narrower_distilbert_computes_with_the_weights_that_were_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = DistilBertConfig(
        vocab_size=40, dim=16, n_heads=4, n_layers=2, hidden_dim=24, max_position_embeddings=12
    )
    teacher: Any = DistilBertForMaskedLM(config).double()
    kept, rows = [0, 2, 3, 5, 8, 9, 13, 15], ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])
    with torch.no_grad():  # which coordinates and heads weigh more is known, and all else is of one size
        for name, value in teacher.named_parameters():
            value.copy_(torch.randn_like(value))
            if value.ndim == 2 and value.shape[1] == 16 and "out_lin" not in name:
                value[:, kept] *= 3
            if value.ndim == 2 and len(value) == 16 and not re.search("[qkv]_lin", name):
                value[kept] *= 3
            for layer, of_heads in enumerate(rows):
                if f"layer.{layer}.attention.v_lin.weight" in name:
                    value[of_heads] *= 10
    weights = {name: value.clone() for name, value in teacher.state_dict().items()}
    tokens = torch.randint(40, (3, 7))
    torch.testing.assert_close(logits(teacher, input_ids=tokens), _distilbert(weights, tokens, 4, 2))
    for name, value in weights.items():
        layer = int(name.split(".")[3]) if "transformer.layer" in name else 0
        if "attention" in name:
            outward = "out_lin" in name
            value = value[kept if outward else rows[layer]]
            weights[name] = value[:, rows[layer] if outward else kept] if value.ndim == 2 else value
        else:
            value = value[kept] if len(value) == 16 else value
            weights[name] = value[:, kept] if value.ndim == 2 and value.shape[1] == 16 else value
    student = from_teacher(teacher, hidden=8)
    torch.testing.assert_close(logits(student, input_ids=tokens), _distilbert(weights, tokens, 2, 2))
    assert student.vocab_projector.weight is student.distilbert.embeddings.word_embeddings.weight
    student.save_pretrained(tmp_path)
    loaded = type(student).from_pretrained(tmp_path).state_dict()
    assert loaded.keys() == student.state_dict().keys()
    assert all(torch.equal(value, loaded[name]) for name, value in student.state_dict().items())


def test_the_pages_name_the_models_whose_width_can_be_reduced() -> None:
    known = {*narrowing.ROTATED, *narrowing.SELECTED}
    page = (Path(__file__).parent.parent / ".docs" / "lightning.md").read_text(encoding="utf-8")
    sentence = " ".join(page.split()).partition("`hidden=` narrows")[2].partition("Any other is refused")[0]
    assert set(re.findall("`([a-z0-9-]+)`", sentence)) == known
    for function in (from_teacher, narrow_hidden):
        assert function.__doc__ is not None
        assert known <= set(re.findall("``([a-z0-9-]+)``", function.__doc__))


@pytest.mark.filterwarnings("ignore:.*which is a no-op")
@pytest.mark.parametrize("name", ["llama", "bert", "roberta"])
def test_without_weights_a_student_of_the_same_shapes_is_cut(name: str) -> None:
    teacher = built(name)
    with torch.device("meta"):
        empty = type(teacher)(teacher.config)
    sketched = from_teacher(empty, hidden=8, intermediate=12)
    real = from_teacher(teacher, hidden=8, intermediate=12)
    assert {n: p.shape for n, p in sketched.named_parameters()} == {
        n: p.shape for n, p in real.named_parameters()
    }
    assert all(parameter.is_meta for parameter in sketched.parameters())
    assert not any(parameter.is_meta for parameter in real.parameters())


def test_tied_embeddings_of_a_narrower_bert_stay_tied() -> None:
    teacher = built("roberta")
    student = from_teacher(teacher, hidden=8, layers=[0, 2], intermediate=12)
    assert student.lm_head.decoder.weight is student.roberta.embeddings.word_embeddings.weight
    assert student.lm_head.decoder.weight.shape == (40, 8)
    assert len(student.roberta.encoder.layer) == 2


@pytest.mark.parametrize(
    ("name", "width", "said"),
    [
        ("gpt2", 8, "not defined for 'gpt2'"),
        ("t5", 8, "not defined for 't5'"),
        ("llama", 9, "multiple of the 2 attention heads"),
        ("llama", 18, "is not narrower: the teacher's is 16"),
    ],
)
def test_widths_that_are_not_defined_are_refused(name: str, width: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        narrow_hidden(built(name), width)


def test_refusals_say_what_is_wrong_with_the_model() -> None:
    with pytest.raises(ValueError, match="with its head"):
        narrow_hidden(built("llama").model, 8)
    with pytest.raises(ValueError, match="fused or per expert"):
        narrow_intermediate(built("mixtral"), 12)
    with pytest.raises(ValueError, match="inputs hold no batch"):
        narrow_hidden(built("llama"), 8, inputs=[])
    with pytest.raises(ValueError, match="by its weights alone"):
        narrow_hidden(built("bert"), 8, inputs=[])
    with pytest.raises(ValueError, match="names no width"):
        narrow_intermediate(built("clip"), 8)
