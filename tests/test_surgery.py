"""Students cut from teachers: the right layers, and models that plain transformers loads to the same numbers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from softs_lightning import from_teacher
from softs_lightning.surgery import layer_stacks
from tests.architectures import ARCHITECTURES, built

CUT = ["bert", "roberta", "distilbert", "gpt2", "llama", "qwen2", "mixtral", "t5", "vit", "clip", "whisper"]


def tensors(output: Any) -> list[Tensor]:
    """All tensors of a model's output that do not depend on caches."""
    return [value for value in output.to_tuple() if isinstance(value, Tensor)]


def run(model: nn.Module, name: str) -> list[Tensor]:
    with torch.no_grad():
        return tensors(
            model.eval()(**ARCHITECTURES[name].batch(), **({"use_cache": False} if name in CACHED else {}))
        )


CACHED = ("gpt2", "llama", "qwen2", "mixtral", "t5", "whisper")


@pytest.mark.parametrize("name", CUT)
def test_a_student_is_the_teacher_with_the_other_layers_taken_out_by_hand(name: str) -> None:
    teacher = copy.deepcopy(built(name))
    student = from_teacher(teacher, layers=[0, 2])
    expected = run(_by_hand(teacher, [0, 2]), name)
    assert expected
    for ours, theirs in zip(run(student, name), expected, strict=True):
        assert torch.equal(ours, theirs)


def _by_hand(model: nn.Module, kept: Sequence[int]) -> nn.Module:
    owners = [
        (owner, name)
        for owner in model.modules()
        for name, part in owner.named_children()
        if isinstance(part, nn.ModuleList) and name in LISTS and type(owner).__name__ not in PARTS
    ]
    for owner, name in owners:
        setattr(owner, name, nn.ModuleList(owner.get_submodule(f"{name}.{i}") for i in kept))
        config = getattr(owner, "config", None)
        for number in ("num_hidden_layers", "num_layers"):
            if config is not None and hasattr(config, number):
                setattr(config, number, len(kept))
    return model


LISTS = ("layer", "layers", "h", "block")
PARTS = ("T5Block",)  # whose own "layer" are the parts of one layer


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("layers", [[0], [0, 2]], ids=["one", "two"])
def test_plain_transformers_loads_a_student_to_the_same_numbers(
    name: str, layers: list[int], tmp_path: Path
) -> None:
    student = from_teacher(
        built(name), layers=layers, **({} if name in ("mixtral", "clip") else {"intermediate": 20})
    )
    student.save_pretrained(tmp_path)
    loaded = type(student).from_pretrained(tmp_path, attn_implementation="eager")
    assert {n: type(m) for n, m in loaded.named_modules()} == {n: type(m) for n, m in student.named_modules()}
    for ours, theirs in zip(run(student, name), run(loaded, name), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2"])
def test_generation_with_a_cache_equals_generation_without(name: str) -> None:
    student = from_teacher(built(name), layers=[0, 2]).eval()
    prompt = ARCHITECTURES[name].batch()["input_ids"][:1]
    options: dict[str, Any] = {
        "max_new_tokens": 6,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    with torch.no_grad():
        cached = student.generate(prompt, use_cache=True, **options)
        plain = student.generate(prompt, use_cache=False, **options)
    assert torch.equal(cached, plain)
    places = [m.layer_idx for m in student.modules() if hasattr(m, "layer_idx")]
    assert sorted(set(places)) == [0, 1]


@pytest.mark.parametrize(("name", "expected"), [("gpt2", True), ("t5", True), ("llama", False)])
def test_tied_embeddings_stay_tied_and_untied_ones_apart(name: str, expected: bool, tmp_path: Path) -> None:
    student = from_teacher(built(name), layers=[0, 1])
    student.save_pretrained(tmp_path)
    for model in (student, type(student).from_pretrained(tmp_path)):
        shared = model.get_input_embeddings().weight is model.get_output_embeddings().weight
        assert shared is expected
        assert shared is bool(model.config.tie_word_embeddings)


def test_lists_with_an_entry_a_layer_are_cut_likewise() -> None:
    kinds = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    teacher = ARCHITECTURES["qwen2"].build(
        num_hidden_layers=4, layer_types=kinds, sliding_window=3, use_sliding_window=True
    )
    student = from_teacher(teacher, layers=[1, 2])
    assert student.config.layer_types == ["sliding_attention", "full_attention"]
    assert [layer.self_attn.sliding_window for layer in student.model.layers] == [3, None]


def test_a_student_shares_no_memory_with_its_teacher_and_takes_its_dtype() -> None:
    teacher = copy.deepcopy(built("bert")).double()
    student = from_teacher(teacher, layers=[1])
    assert {p.dtype for p in student.parameters()} == {torch.float64}
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(1)
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())
    assert student.training
    assert not teacher.training


def test_random_numbers_drawn_afterwards_do_not_show_that_a_student_was_cut() -> None:
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    from_teacher(built("bert"), layers=[0], intermediate=12)
    assert torch.equal(torch.rand(3), expected)


def test_every_and_negative_layers_and_stacks_by_name() -> None:
    assert from_teacher(built("bert"), every=2).config.num_hidden_layers == 2
    last = from_teacher(built("bert"), layers=[-1])
    assert torch.equal(
        last.encoder.layer[0].attention.self.query.weight,
        built("bert").encoder.layer[2].attention.self.query.weight,
    )
    student = from_teacher(built("t5"), layers={"decoder": [0]})
    assert (student.config.num_layers, student.config.num_decoder_layers) == (3, 1)
    assert (len(student.encoder.block), len(student.decoder.block)) == (3, 1)
    clip = from_teacher(built("clip"), layers={"vision_model": [0, 2], "text_model": [1]})
    assert (clip.config.vision_config.num_hidden_layers, clip.config.text_config.num_hidden_layers) == (2, 1)


def test_t5_keeps_its_relative_positions_when_the_first_layer_goes() -> None:
    student, teacher = from_teacher(built("t5"), layers=[1, 2]), built("t5")
    ours = student.encoder.block[0].layer[0].SelfAttention
    theirs = teacher.encoder.block
    assert torch.equal(
        ours.relative_attention_bias.weight, theirs[0].layer[0].SelfAttention.relative_attention_bias.weight
    )
    assert torch.equal(ours.q.weight, theirs[1].layer[0].SelfAttention.q.weight)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"layers": [0, 3]}, "there is no layer 3 to keep; there is encoder.layer with the layers 0 to 2"),
        ({"layers": [2, 0]}, "layers must rise"),
        ({"layers": [0, -3]}, "layers must rise"),
        ({"layers": []}, "at least one"),
        ({"layers": [0.5]}, "whole numbers"),
        (
            {"layers": {"decoder": [0]}},
            r"layers\['decoder'\] names no list of layers; there is encoder.layer",
        ),
        ({"layers": {"encoder": [0], "layer": [1]}}, "says something twice"),
        ({"every": 0}, "every must be a whole number"),
        ({"every": 2, "layers": [0]}, "give one of them"),
        ({}, "nothing to cut"),
        ({"intermediate": 25}, "is not narrower: the teacher's is 24"),
        ({"hidden": 12}, "multiple of the head size 8"),
        ({"hidden": 24}, "is not narrower"),
        ({"hidden": True}, "whole number"),
        ({"layers": [0], "inputs": []}, "give hidden too"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_what_there_is(options: Mapping[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        from_teacher(built("bert"), **options)


def test_shared_layers_are_refused_with_the_reason() -> None:
    config = transformers.AlbertConfig(
        vocab_size=9,
        embedding_size=4,
        hidden_size=8,
        num_attention_heads=2,
        intermediate_size=8,
        num_hidden_layers=3,
    )
    with pytest.raises(ValueError, match="num_hidden_layers=3, and no list of its modules grows with it"):
        from_teacher(transformers.AlbertModel(config), layers=[0])


def test_layers_that_would_be_others_at_their_new_places_are_refused() -> None:
    scaled = ARCHITECTURES["gpt2"].build(scale_attn_by_inverse_layer_idx=True)
    with pytest.raises(ValueError, match="scaled by the layer's place"):
        from_teacher(scaled, layers=[0, 2])
    config = transformers.Qwen2MoeConfig(
        vocab_size=40, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_attention_heads=2,
        shared_expert_intermediate_size=8, num_key_value_heads=1, num_hidden_layers=3, num_experts=2,
        num_experts_per_tok=1, mlp_only_layers=[1],
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"layer 2 of layers cannot be kept as layer 1: its mlp is Qwen2MoeSparse"
    ):
        from_teacher(transformers.Qwen2MoeModel(config), layers=[0, 2])


def test_a_model_changed_after_it_was_built_and_what_is_no_model_are_refused() -> None:
    changed = copy.deepcopy(built("bert"))
    changed.pooler = None
    with pytest.raises(ValueError, match=r"pooler\.dense\.weight .* missing"):
        from_teacher(changed, layers=[0])
    changed = copy.deepcopy(built("bert"))
    changed.encoder.layer[0].adapter = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"adapter\..* has no place"):
        from_teacher(changed, layers=[0])
    with pytest.raises(TypeError, match="got Linear"):
        from_teacher(nn.Linear(2, 2), layers=[0])  # type: ignore[arg-type]


def test_a_folder_and_a_factory_are_teachers(tmp_path: Path) -> None:
    built("bert").save_pretrained(tmp_path)
    expected = from_teacher(built("bert"), layers=[0, 2]).state_dict()
    for source in (tmp_path, str(tmp_path), lambda: built("bert")):
        student = from_teacher(source, layers=[0, 2])
        assert type(student).__name__ == "BertModel"
        assert all(torch.equal(value, expected[name]) for name, value in student.state_dict().items())


@settings(max_examples=12, deadline=None)
@given(depth=st.integers(1, 5), data=st.data())
def test_any_rising_choice_of_layers_gives_their_weights_in_order(depth: int, data: st.DataObject) -> None:
    kept = sorted(data.draw(st.sets(st.integers(0, depth - 1), min_size=1)))
    teacher = ARCHITECTURES["llama"].build(num_hidden_layers=depth)
    (stack,) = layer_stacks(teacher)
    assert (stack.key, stack.names, stack.depth) == ("num_hidden_layers", ("model.layers",), depth)
    student = from_teacher(teacher, layers=kept)
    assert len(student.model.layers) == len(kept) == student.config.num_hidden_layers
    for ours, index in zip(student.model.layers, kept, strict=True):
        for (name, one), (_, other) in zip(
            ours.named_parameters(), teacher.model.layers[index].named_parameters(), strict=True
        ):
            assert torch.equal(one, other), name
