"""A teacher outlined by a scan against the teacher that runs."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, LlamaConfig, LlamaForCausalLM

from softs_lightning import ProductSpec, Teacher
from softs_lightning.outline import outline


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def bert() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    return BertModel(BertConfig(vocab_size=50, num_hidden_layers=4, **sizes))


def gpt2() -> nn.Module:
    return GPT2Model(GPT2Config(vocab_size=50, n_embd=16, n_layer=4, n_head=2, n_positions=32))


def llama(hidden: int = 16, layers: int = 4, heads: int = 2, middle: int = 32, words: int = 50) -> nn.Module:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=words,
            hidden_size=hidden,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            intermediate_size=middle,
        )
    )


TOKENS = {
    "input_ids": torch.ones(2, 7, dtype=torch.long),
    "attention_mask": torch.ones(2, 7, dtype=torch.long),
}

CASES = [
    (mlp, torch.ones(3, 4), "inputs[2]|outputs[0|1]"),
    (mlp, torch.ones(3, 4), "outputs[.]"),
    (bert, TOKENS, "outputs[encoder.layer.{0..2}|embeddings]"),
    (bert, TOKENS, "outputs[%hidden_states.1|pooler]"),
    (gpt2, TOKENS, "outputs[h.1#0?]|inputs[h.2#0]"),
    (llama, TOKENS, "outputs[model.layers.0|model.layers.2]"),
    (llama, TOKENS, "inputs[lm_head]"),
]


@pytest.mark.parametrize(("factory", "batch", "product_id"), CASES)
@pytest.mark.parametrize("early_exit", [True, False])
def test_a_scan_finds_what_a_run_finds(factory: Any, batch: Any, product_id: str, early_exit: bool) -> None:
    spec = ProductSpec.parse(product_id)
    real = Teacher(factory, early_exit=early_exit)
    real.place("cpu")
    values = real.supply(batch, spec).select()
    with outline(Teacher(factory, early_exit=early_exit), batch, spec) as seen:
        assert seen.ran is None
        assert all(p.is_meta for p in seen.module.parameters())
        found = seen.products.select()
        assert [(v.shape, v.dtype) for v in found] == [(v.shape, v.dtype) for v in values]
        assert seen.cost == real.cost(batch, spec)


def test_a_model_of_seven_billion_parameters_needs_no_memory() -> None:
    teacher = Teacher(lambda: llama(4096, 32, 32, 11008, 32000))
    with outline(teacher, TOKENS, ProductSpec.parse("inputs[lm_head]|outputs[model.layers.7]")) as seen:
        assert sum(p.numel() for p in seen.module.parameters()) == 6_738_415_616
        assert [list(v.shape) for v in seen.products.select()] == [[2, 7, 4096], [2, 7, 4096]]
        # Two operations for each weight of a matrix and token; attention adds to that.
        assert seen.cost.full > 2 * 14 * 6.6e9
        assert 0 < seen.cost.saved < 0.03
        assert seen.cost.stop == "lm_head"


def test_a_module_that_exists_is_scanned_as_it_is_and_left_so() -> None:
    module = mlp().train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with outline(Teacher(module), torch.ones(3, 4), ProductSpec.parse("outputs[1]")) as seen:
        assert seen.ran is None
        assert seen.module is module
    assert module.training
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in module.modules())


def test_what_cannot_be_scanned_runs_and_says_why() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum().item() > 0 else x

    with outline(Teacher(Looks), torch.ones(3, 4), ProductSpec.parse("outputs[layer]")) as seen:
        assert seen.ran is not None
        assert "DataDependent" in seen.ran
        assert not any(p.is_meta for p in seen.module.parameters())
        assert seen.products.select()[0].shape == (3, 2)


def test_a_program_is_scanned_too() -> None:
    def program(model: Any, tracer: Any) -> dict[str, Any]:
        hidden = model[0].output
        tracer.stop()
        return {"h": hidden}

    with outline(Teacher(mlp, program=program), torch.ones(3, 4), ProductSpec.parse("saved[h]")) as seen:
        assert seen.ran is None
        assert seen.products.select()[0].shape == (3, 8)
        assert seen.cost.used == 2 * 3 * 4 * 8
        assert seen.cost.full == 2 * 3 * (4 * 8 + 8 * 16 + 16 * 2)


def test_another_kind_of_teacher_runs_for_real() -> None:
    class Own(Teacher):
        """Supplies its products in some way of its own."""

    with outline(Own(mlp), torch.ones(3, 4), ProductSpec.parse("outputs[0]")) as seen:
        assert seen.ran == "a Own supplies its products in its own way"
        assert seen.products.select()[0].shape == (3, 8)


def test_wrong_requests_are_errors_before_anything_is_built_for_real() -> None:
    built: list[bool] = []

    def factory() -> nn.Module:
        module = bert()
        built.append(next(module.parameters()).is_meta)
        return module

    with pytest.raises(KeyError, match=r"no module named 'encoder\.layers\.0'"):
        outline(Teacher(factory), TOKENS, ProductSpec.parse("outputs[encoder.layers.0]")).__enter__()
    with pytest.raises(TypeError, match="none is in the batch"):
        outline(Teacher(factory), {"x": 1}, ProductSpec.parse("outputs[pooler]")).__enter__()
    assert built == [True, True]


def test_what_a_function_remembers_of_a_scan_is_forgotten() -> None:
    @functools.lru_cache  # here: what is there before all tests is no longer seen by the garbage collector
    def mask(size: int) -> Tensor:
        return torch.ones(size, size).tril()

    class Remembering(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ mask(4).to(x.device)

    x, spec = torch.ones(3, 4), ProductSpec.parse("outputs[.]")
    for _ in range(2):
        with outline(Teacher(lambda: Remembering(4, 4)), x, spec) as seen:
            assert seen.ran is None
    assert mask.cache_info().currsize == 0
    assert type(Remembering(4, 4)(x)) is Tensor
