from __future__ import annotations

import gc
import weakref
from operator import attrgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

from softs_lightning.caches import KeptOut
from softs_lightning.catcher import Capture, ModelIOCatcher
from softs_lightning.product import ProductSpec
from softs_lightning.recorders import declared, find_recorded, ties_last_hidden_state
from softs_lightning.recording import capture_outputs, merge_with_config_defaults
from softs_lightning.selectors import resolve_spec
from tests.architectures import ARCHITECTURES, built

RECORDED = [(name, selector) for name, a in ARCHITECTURES.items() for selector in a.recorded]


def returned(name: str, model: nn.Module) -> Any:
    """What the model itself returns when it is asked for everything."""
    case = ARCHITECTURES[name]
    with torch.no_grad():
        return model(**case.batch(), output_hidden_states=True, output_attentions=True, **case.flags)


@pytest.mark.parametrize(("name", "selector"), RECORDED)
def test_a_recorded_key_is_what_the_model_returns(name: str, selector: str) -> None:
    case, model = ARCHITECTURES[name], built(name)
    expected = attrgetter(case.recorded[selector])(returned(name, model))
    catcher = ModelIOCatcher(model)
    with torch.no_grad(), catcher.for_product(f"outputs[{selector}]") as buffer:
        assert catcher.run(**case.batch()) is None
    got = buffer.select()
    assert len(got) == len(expected) == 3 + selector.endswith("hidden_states")
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))
    assert all(a is b for a, b in zip(buffer.select(f"outputs[{selector}]"), got, strict=True))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_capture_leaves_the_models_own_record_alone(name: str) -> None:
    case, model = ARCHITECTURES[name], built(name)
    expected = returned(name, model)
    catcher = ModelIOCatcher(model)
    product = "|".join(f"outputs[{selector}]" for selector in case.recorded)
    with catcher.for_product(product, early_exit=False) as buffer:
        output = returned(name, model)
    for selector, where in case.recorded.items():
        again, before = attrgetter(where)(output), attrgetter(where)(expected)
        assert all(torch.equal(a, b) for a, b in zip(again, before, strict=True))
        assert all(a is b for a, b in zip(buffer.select(f"outputs[{selector}]"), again, strict=True))
    catcher.detach_hooks()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_early_exit_stops_after_the_layer_that_was_asked_for(name: str) -> None:
    case, model = ARCHITECTURES[name], built(name)
    selector, where = case.first_state
    expected = attrgetter(where)(returned(name, model))[1]
    ran: list[int] = []
    layers = list(model.get_submodule(case.layers).children())
    handles = [
        layer.register_forward_pre_hook(lambda module, args, at=at: ran.append(at))
        for at, layer in enumerate(layers)
    ]
    catcher = ModelIOCatcher(model)
    with torch.no_grad(), catcher.for_product(f"outputs[{selector}]") as buffer:
        assert catcher.run(**case.batch()) is None
    for handle in handles:
        handle.remove()
    assert len(layers) == 3
    assert ran == [0]
    assert torch.equal(buffer.select()[0], expected)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_glob_names_the_layers_as_the_models_names_do(name: str) -> None:
    case, model = ARCHITECTURES[name], built(name)
    names = [f"{case.layers}.{at}" for at in range(3)]
    for selector in (f"{case.layers}.*", f"{case.layers}.{{0..2}}", f"{case.layers}.{{0..-1}}"):
        assert (
            str(resolve_spec(model, ProductSpec.parse(f"outputs[{selector}]")))
            == f"outputs[{'|'.join(names)}]"
        )
    spec = resolve_spec(model, ProductSpec.parse(f"inputs[{case.layers}.-1]"))
    assert str(spec) == f"inputs[{case.layers}.2]"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_class_names_the_layers_too(name: str) -> None:
    case, model = ARCHITECTURES[name], built(name)
    layer = type(model.get_submodule(f"{case.layers}.0")).__name__
    spec = resolve_spec(model, ProductSpec.parse(f"outputs[{case.layers}@{layer}]"))
    assert [item.name for item in spec.outputs] == [f"{case.layers}.{at}" for at in range(3)]


# -- attention weights that are not computed -------------------------------------------------------


def with_sdpa(name: str) -> Any:
    model = ARCHITECTURES[name].build()
    model.set_attn_implementation("sdpa")
    return model


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "t5"])
def test_weights_that_sdpa_does_not_compute_are_an_error_that_names_the_switch(name: str) -> None:
    model, case = with_sdpa(name), ARCHITECTURES[name]
    selector = next(selector for selector in case.recorded if selector.endswith("%attentions"))
    catcher = ModelIOCatcher(model)
    with torch.no_grad(), catcher.for_product(f"outputs[{selector}]") as buffer:
        catcher.run(**case.batch())
    with pytest.raises(LookupError, match="'sdpa' attention computes no weights") as error:
        buffer.select()
    assert 'attn_implementation="eager"' in str(error.value)


# -- before and after the final norm ---------------------------------------------------------------


@pytest.mark.parametrize(("name", "norm"), [("llama", "model.norm"), ("gpt2", "transformer.ln_f")])
def test_a_tied_last_hidden_state_is_after_the_final_norm(name: str, norm: str) -> None:
    case, model = ARCHITECTURES[name], built(name)
    catcher = ModelIOCatcher(model)
    product = f"outputs[%hidden_states.-1|{case.layers}.-1#0?|{norm}]"
    with torch.no_grad(), catcher.for_product(product) as buffer:
        catcher.run(**case.batch())
    last, before, after = buffer.select()
    assert torch.equal(last, after)
    assert torch.equal(last, model.get_submodule(norm)(before))
    assert not torch.equal(last, before)


def test_an_untied_last_hidden_state_is_before_it() -> None:
    case, model = ARCHITECTURES["vit"], built("vit")
    catcher = ModelIOCatcher(model)
    with (
        torch.no_grad(),
        catcher.for_product("outputs[%hidden_states.-1|vit.layers.-1|vit.layernorm]") as buffer,
    ):
        catcher.run(**case.batch())
    last, before, after = buffer.select()
    assert torch.equal(last, before)
    assert not torch.equal(last, after)


# -- key-value caches ------------------------------------------------------------------------------


def cached_call(device: str | None) -> tuple[DynamicCache, dict[str, Any], Capture]:
    """One call of Llama that fills a cache: the cache, what the first layer was called with, the buffer."""
    model = built("llama")
    catcher = ModelIOCatcher(model, device=device)
    with torch.no_grad(), catcher.for_product("inputs[model.layers.0]", early_exit=False) as buffer:
        output = catcher.run(**_batch(), use_cache=True)
    catcher.detach_hooks()
    caches = [value for value in output.values() if isinstance(value, DynamicCache)]
    return caches[0], buffer["model.layers.0"]["inputs"][0]["kwargs"], buffer


def _batch() -> dict[str, Any]:
    return ARCHITECTURES["llama"].batch()


def test_a_cache_is_neither_moved_nor_kept() -> None:
    cache, arguments, _ = cached_call("meta")
    assert KeptOut("DynamicCache") in arguments.values()
    assert not any(isinstance(value, DynamicCache) for value in arguments.values())
    assert arguments["position_ids"].device.type == "meta"
    keys: Any = cache.layers[0].keys  # type: ignore[union-attr]
    assert isinstance(keys, Tensor)
    assert (keys.device.type, keys.shape[2]) == ("cpu", 6)
    gone = weakref.ref(cache)
    del cache, keys
    gc.collect()
    assert gone() is None


def test_a_cache_cannot_be_a_product() -> None:
    _, arguments, buffer = cached_call(None)
    name = next(name for name, value in arguments.items() if isinstance(value, KeptOut))
    with pytest.raises(LookupError, match=r"is a key-value cache \(DynamicCache\), which is not kept"):
        buffer.select(f"inputs[model.layers.0#{name}]")


class Decoder(nn.Module):
    """A layer with a cache of its own, a tuple of tensors."""

    def forward(self, x: Tensor, past_key_values: Any = None, scale: Any = None) -> Tensor:
        return x


def test_a_cache_of_the_models_own_is_known_by_the_name_of_its_argument() -> None:
    net = nn.ModuleDict({"layer": Decoder()})
    past = ((torch.ones(1), torch.ones(1)),)
    with ModelIOCatcher(net["layer"])(inputs=["."]) as buffer:
        net["layer"](torch.ones(1), past_key_values=past, scale=past)
        net["layer"](torch.ones(1), past_key_values=None)
    first, second = buffer["."]["inputs"]
    assert first["kwargs"] == {"past_key_values": KeptOut("tuple"), "scale": past}
    assert second["kwargs"] == {"past_key_values": None}


def test_a_cache_is_known_by_its_class_wherever_it_stands() -> None:
    layer, cache = Decoder(), DynamicCache()
    with ModelIOCatcher(layer)(inputs=["."]) as buffer:
        layer(torch.ones(1), cache, scale=cache)
    assert buffer["."]["inputs"][0]["args"][1] == KeptOut("DynamicCache")
    assert buffer["."]["inputs"][0]["kwargs"] == {"scale": KeptOut("DynamicCache")}


# -- this package's decorators on transformers' models ---------------------------------------------


def undecorated(function: Any) -> Any:
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def redecorate(model: nn.Module) -> int:
    """Give every model within `model` that records this package's decorators in place of transformers'."""
    found = 0
    for module in model.modules():
        if declared(module) and hasattr(type(module).forward, "__wrapped__") and find_recorded(module):
            tie = ties_last_hidden_state(module)
            forward = capture_outputs(tie_last_hidden_states=tie)(undecorated(type(module).forward))
            again = {"forward": merge_with_config_defaults(forward)}
            module.__class__ = type(type(module).__name__, (type(module),), again)
            found += 1
    return found


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_decorators_record_what_those_of_transformers_do(name: str) -> None:
    case, model = ARCHITECTURES[name], ARCHITECTURES[name].build()
    expected = returned(name, model)
    for module in model.modules():
        module._forward_hooks.clear()
    assert redecorate(model) == (2 if name in ("t5", "clip", "whisper") else 1)
    got = returned(name, model)
    for where in case.recorded.values():
        ours, theirs = attrgetter(where)(got), attrgetter(where)(expected)
        assert len(ours) == len(theirs)
        assert all(map(torch.equal, ours, theirs))
    assert type(got) is type(expected)
    with torch.no_grad():
        plain = model(**case.batch(), return_dict=False)
    assert isinstance(plain, tuple)
    assert getattr(model(**case.batch()), "attentions", None) is None
