"""What is captured equals what the model computes when it is cut at that place."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softs_lightning.caches import without_caches
from softs_lightning.catcher import ModelIOCatcher
from tests.models import CASES

DEPTHS = [0, 1, 3]
MODELS = sorted(CASES)


class _Reached(Exception):
    pass


def by_hand(model: nn.Module, name: str, kind: str, batch: dict[str, Any]) -> Any:
    """What a hook placed by hand on a copy of the model sees; it ends the forward there."""
    cut, seen = copy.deepcopy(model), []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        seen.append(copy.deepcopy((args, dict(kwargs))))
        raise _Reached

    def after(module: nn.Module, args: Any, output: Any) -> None:
        seen.append(copy.deepcopy(output))
        raise _Reached

    place = cut.get_submodule(name)
    if kind == "inputs":
        place.register_forward_pre_hook(before, with_kwargs=True)
    else:
        place.register_forward_hook(after)
    with pytest.raises(_Reached), torch.no_grad():
        cut(**batch)
    return seen[0]


def first(value: Any) -> Any:
    return value if isinstance(value, Tensor) else value[0]


def argument(entry: dict[str, Any]) -> Any:
    """The first argument, however it was passed."""
    return [*entry["args"], *entry["kwargs"].values()][0]


@pytest.mark.parametrize("early_exit", [True, False])
@pytest.mark.parametrize("k", DEPTHS)
@pytest.mark.parametrize("name", MODELS)
def test_a_layers_output_is_the_truncated_models(name: str, k: int, early_exit: bool) -> None:
    case = CASES[name]
    model, batch, layer = case.build(), case.batch(), case.layer.format(k)
    catcher = ModelIOCatcher(model)
    with catcher.for_product(f"outputs[{layer}]", early_exit=early_exit) as buf:
        result = catcher.run(**batch)
    got = first(buf[layer]["outputs"][0])
    # Inside the MLP the activation follows its layer; what ends before the next layer includes it.
    got = torch.tanh(got) if name == "mlp" else got
    assert torch.equal(got, case.before(model, k + 1, batch))
    assert (result is None) is early_exit


@pytest.mark.parametrize("early_exit", [True, False])
@pytest.mark.parametrize("k", DEPTHS)
@pytest.mark.parametrize("name", MODELS)
def test_a_layers_input_is_the_truncated_models(name: str, k: int, early_exit: bool) -> None:
    case = CASES[name]
    model, batch, layer = case.build(), case.batch(), case.layer.format(k)
    catcher = ModelIOCatcher(model)
    with catcher.for_product(f"inputs[{layer}]", early_exit=early_exit) as buf:
        result = catcher.run(**batch)
    assert torch.equal(argument(buf[layer]["inputs"][0]), case.before(model, k, batch))
    assert (result is None) is early_exit


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(same, left, right))
    return type(left) is type(right) and (left == right or not isinstance(left, (int, float, str, bool)))


INSIDE = [
    ("mlp", "act"),
    ("mlp", "head"),
    ("resnet", "stem.0"),
    ("resnet", "blocks.1.conv2"),
    ("resnet", "pool"),
    ("bert", "embeddings"),
    ("bert", "encoder.layer.2.attention.self"),
    ("bert", "encoder.layer.2.intermediate"),
    ("bert", "pooler"),
    ("gpt2", "h.1.attn"),
    ("gpt2", "h.2.mlp.act"),
    ("gpt2", "ln_f"),
    ("llama", "rotary_emb"),
    ("llama", "layers.2.self_attn"),
    ("llama", "layers.2.mlp.down_proj"),
]


@pytest.mark.parametrize(("name", "inside"), INSIDE)
@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_inner_modules_are_seen_as_by_a_hook_placed_by_hand(name: str, inside: str, kind: str) -> None:
    case = CASES[name]
    model, batch = case.build(), case.batch()
    expected = by_hand(model, inside, kind, batch)
    catcher = ModelIOCatcher(model)
    with torch.no_grad(), catcher.for_product(f"{kind}[{inside}]") as buf:
        assert catcher.run(**batch) is None
    got = buf[inside][kind][0]
    if kind == "inputs":
        got, expected = (got["args"], got["kwargs"]), without_caches(*expected)
    assert same(got, expected)


@pytest.mark.parametrize("name", MODELS)
def test_nothing_after_the_deepest_module_runs(name: str) -> None:
    case = CASES[name]
    model, batch, ran = case.build(), case.batch(), []
    for k in range(case.depth):
        model.get_submodule(case.layer.format(k)).register_forward_pre_hook(lambda m, a, k=k: ran.append(k))
    catcher = ModelIOCatcher(model)
    product = f"inputs[{case.layer.format(0)}]|outputs[{case.layer.format(1)}]"
    with catcher.for_product(product):
        catcher.run(**batch)
    assert ran == [0, 1]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_models_output_and_gradients_are_bit_identical(name: str, mode: str) -> None:
    case = CASES[name]
    batch = case.batch()

    def gradients(watch: bool) -> list[Tensor | None]:
        model = case.build().train(mode == "train")
        torch.manual_seed(3)
        names = [n for n, _ in model.named_modules() if n]
        # Modules that write in place: the copy keeps the warning about them away.
        catcher = ModelIOCatcher(model, copy=True)
        with catcher(inputs=names if watch else [], outputs=names if watch else ["."]):
            out = model(**batch)
        out = out if isinstance(out, Tensor) else out.last_hidden_state
        out.square().sum().backward()
        return [out.detach(), *(p.grad for p in model.parameters())]

    for watched, alone in zip(gradients(True), gradients(False), strict=True):
        assert same(watched, alone)


@pytest.mark.parametrize("name", MODELS)
def test_a_captured_output_carries_the_gradient(name: str) -> None:
    case = CASES[name]
    model, batch, layer = case.build(), case.batch(), case.layer.format(1)
    catcher = ModelIOCatcher(model)
    with catcher.for_product(f"outputs[{layer}]") as buf:
        catcher.run(**batch)
    first(buf[layer]["outputs"][0]).square().sum().backward()
    reached = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    assert any(n.startswith(case.layer.format(0)) for n in reached)
    assert not any(n.startswith(case.layer.format(2)) for n in reached)
