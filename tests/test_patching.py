from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import monkey_patching
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaPreTrainedModel

from softs_lightning.catcher import ModelIOCatcher
from softs_lightning.patching import (
    find_replacement,
    get_patch_mapping,
    patch_output_recorders,
    register_patch_mapping,
    unregister_patch_mapping,
)
from softs_lightning.recording import OutputRecorder
from tests.architectures import ARCHITECTURES, built
from tests.recorded_models import Attention, Block, Decoder, Inner, x


@pytest.fixture(autouse=True)
def empty_registry() -> Iterator[None]:
    assert get_patch_mapping() == {}
    built("llama")  # before anything is replaced
    declaration = LlamaPreTrainedModel._can_record_outputs
    LlamaPreTrainedModel._can_record_outputs = copy.copy(declaration)
    yield
    monkey_patching.clear_patch_mapping()
    LlamaPreTrainedModel._can_record_outputs = declaration


class Other(nn.Identity):
    """Stands in for something that it is no subclass of."""


class Third(nn.Identity):
    pass


# -- the registry ----------------------------------------------------------------------------------


def test_exact_names_win_over_patterns_and_the_first_pattern_over_the_rest() -> None:
    register_patch_mapping({".*Attention$": Other, "Attention": Block, "MyAttention": Third})
    assert find_replacement("MyAttention") is Third
    assert find_replacement("YourAttention") is Other
    assert find_replacement("Attention") is Block
    assert find_replacement("AttentionPool") is Block  # "Attention" is found within it
    assert find_replacement("MLP") is None


def test_a_pattern_is_found_anywhere_unless_it_is_anchored() -> None:
    register_patch_mapping({r"^Llama\d+Attention$": Other, "Experts": Third})
    assert find_replacement("Llama2Attention") is Other
    assert find_replacement("MyLlama2Attention") is None
    assert find_replacement("Qwen2MoeExperts") is Third


def test_a_second_registration_needs_overwrite() -> None:
    register_patch_mapping({"A": Other})
    with pytest.raises(
        ValueError, match=r"'A' is registered already; nothing was changed\. Pass overwrite=True"
    ):
        register_patch_mapping({"B": Third, "A": Third})
    assert get_patch_mapping() == {"A": Other}
    register_patch_mapping({"B": Third, "A": Third}, overwrite=True)
    assert get_patch_mapping() == {"A": Third, "B": Third}


@pytest.mark.parametrize("wrong", [int, nn.Identity(), "Other", None, 3])
def test_what_is_no_module_class_is_refused_and_nothing_is_registered(wrong: Any) -> None:
    with pytest.raises(TypeError, match=r"the replacement for 'B' must be a torch\.nn\.Module class"):
        register_patch_mapping({"A": Other, "B": wrong})
    assert get_patch_mapping() == {}


@pytest.mark.parametrize("name", [3, None, "", ("A",)])
def test_a_name_is_a_string(name: Any) -> None:
    with pytest.raises(TypeError, match="class names or regular expressions"):
        register_patch_mapping({"A": Other, name: Other})
    assert get_patch_mapping() == {}


def test_an_expression_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'\(Attention' is neither a class name nor a regular expression: "):
        register_patch_mapping({"A": Other, "(Attention": Other})
    assert get_patch_mapping() == {}


def test_the_mapping_must_be_one() -> None:
    with pytest.raises(TypeError, match="maps names to module classes, got list"):
        register_patch_mapping([("A", Other)])  # type: ignore[arg-type]


def test_unregistering_is_all_or_nothing() -> None:
    register_patch_mapping({"Attention": Other, "Block": Third})
    with pytest.raises(
        ValueError, match="under 'Atention', so nothing was removed; registered are 'Attention'"
    ):
        unregister_patch_mapping(["Block", "Atention"])
    assert get_patch_mapping() == {"Attention": Other, "Block": Third}
    unregister_patch_mapping(["Attention", "Attention"])
    assert get_patch_mapping() == {"Block": Third}
    with pytest.raises(TypeError, match=r"give a list of names: unregister_patch_mapping\(\['Block'\]\)"):
        unregister_patch_mapping("Block")


def test_a_failure_within_transformers_registry_leaves_it_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    register_patch_mapping({"A": Other, "B": Other})
    real = monkey_patching.register_patch_mapping, monkey_patching.unregister_patch_mapping

    def half(mapping: dict[str, Any], overwrite: bool = False) -> None:
        monkeypatch.setattr(monkey_patching, "register_patch_mapping", real[0])
        real[0](dict(list(mapping.items())[:1]), overwrite=overwrite)
        raise KeyboardInterrupt

    monkeypatch.setattr(monkey_patching, "register_patch_mapping", half)
    with pytest.raises(KeyboardInterrupt):
        register_patch_mapping({"A": Third, "C": Third}, overwrite=True)
    assert get_patch_mapping() == {"A": Other, "B": Other}

    def removes_one(names: list[str]) -> None:
        monkeypatch.setattr(monkey_patching, "unregister_patch_mapping", real[1])
        real[1](names[:1])
        raise KeyboardInterrupt

    monkeypatch.setattr(monkey_patching, "unregister_patch_mapping", removes_one)
    with pytest.raises(KeyboardInterrupt):
        unregister_patch_mapping(["A", "B"])
    assert get_patch_mapping() == {"A": Other, "B": Other}


def test_threads_that_register_one_name_do_not_both_succeed() -> None:
    failures: list[Exception] = []
    start = threading.Barrier(8)

    def register() -> None:
        start.wait()
        try:
            register_patch_mapping({"A": Other, "B": Third})
        except ValueError as error:
            failures.append(error)

    threads = [threading.Thread(target=register) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 7
    assert get_patch_mapping() == {"A": Other, "B": Third}


def test_it_is_the_registry_of_transformers() -> None:
    register_patch_mapping({"A": Other})
    assert monkey_patching.get_patch_mapping() == {"A": Other}
    monkey_patching.register_patch_mapping({"B": Third})
    assert find_replacement("B") is Third
    with pytest.raises(ValueError, match="'B' is registered already"):
        register_patch_mapping({"B": Other})
    unregister_patch_mapping(["B"])
    assert monkey_patching.get_patch_mapping() == {"A": Other}


def test_an_expression_that_only_transformers_accepts_matches_nothing() -> None:
    monkey_patching.register_patch_mapping({"(Attention": Other})
    assert find_replacement("Attention") is None
    assert find_replacement("(Attention") is Other


# -- plain modules ---------------------------------------------------------------------------------


class FastAttention(nn.Module):
    """Replaces Attention without being one."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weights = (hidden_states @ hidden_states.mT).softmax(-1)
        self.seen.append(weights)
        return weights @ hidden_states, weights


def replaced(*, depth: int = 3, only: int | None = None) -> Decoder:
    """A decoder whose self attention was replaced, in all layers or in one."""
    model = Decoder(depth)
    for at, block in enumerate(model.layers):
        if only in (None, at):
            block.self_attn = FastAttention()
    return model


def seen(model: Decoder) -> list[torch.Tensor]:
    return [block.self_attn.seen[-1] for block in model.layers]


def records(model: Decoder) -> bool:
    got = model(x(), output_attentions=True).attentions
    return len(got) == len(model.layers) and all(a is b for a, b in zip(got, seen(model), strict=True))


def test_a_model_with_replaced_layers_records_after_patching_only() -> None:
    model = replaced()
    register_patch_mapping({"Attention": FastAttention})
    with pytest.raises(ValueError, match="declares Attention within 'self_attn' for it"):
        model(x(), output_attentions=True)
    patch_output_recorders(model)
    assert records(model)


def test_the_class_and_other_models_of_it_stay_as_they_are() -> None:
    before = copy.deepcopy(Decoder._can_record_outputs)
    register_patch_mapping({"Attention": FastAttention})
    patch_output_recorders(replaced())
    assert before == Decoder._can_record_outputs
    assert records(Decoder())


def test_what_was_patched_stays_when_the_mapping_goes() -> None:
    model = replaced()
    register_patch_mapping({"Attention": FastAttention})
    patch_output_recorders(model)
    unregister_patch_mapping(["Attention"])
    assert records(model)
    patch_output_recorders(model)
    assert records(model)


def test_it_counts_after_hooks_are_there() -> None:
    model = Decoder()
    assert records(model)
    for block in model.layers:
        block.self_attn = FastAttention()
    register_patch_mapping({"Attention": FastAttention})
    patch_output_recorders(model)
    assert records(model)


def test_where_some_layers_are_replaced_all_are_recorded() -> None:
    model = replaced(only=1)
    register_patch_mapping({"Attention": FastAttention})
    patch_output_recorders(model)
    assert records(model)


def test_a_model_without_replaced_layers_records_as_before() -> None:
    model = Decoder()
    register_patch_mapping({"Attention": FastAttention})
    patch_output_recorders(model)
    assert records(model)


@pytest.mark.parametrize(
    ("declaration", "patched"),
    [
        (Attention, Other),
        ("Attention", Other),
        (OutputRecorder(Attention, 0, "a"), OutputRecorder(Other, 0, "a")),
        (OutputRecorder("Attention", 2), OutputRecorder(Other, 2)),
        ([Attention, Block], [Other, Block]),
        ([[Attention], OutputRecorder(Attention)], [Other, OutputRecorder(Other)]),
        (Block, Block),
    ],
)
def test_every_form_of_a_declaration_is_patched_and_keeps_its_form(declaration: Any, patched: Any) -> None:
    model: Any = nn.Module()
    model._can_record_outputs = {"attentions": declaration}
    register_patch_mapping({"Attention": Other})
    patch_output_recorders(model)
    assert model._can_record_outputs == {"attentions": patched}


def test_submodels_are_patched_too() -> None:
    holder: Any = nn.ModuleDict({"a": Inner(1), "b": nn.Sequential(Inner(1))})
    for model in (holder["a"], holder["b"][0]):
        model.layers[0].crossattention = Third()
    register_patch_mapping({"^Attention$": Third})
    patch_output_recorders(holder)
    recorder = holder["b"][0]._can_record_outputs["cross_attentions"]
    assert recorder == OutputRecorder(Third, index=1, layer_name="crossattention")


# -- transformers' models --------------------------------------------------------------------------


class FastLlamaAttention(LlamaAttention):
    """The same computation in a class of another name."""


class ScaledAttention(nn.Module):
    """Holds a LlamaAttention without being one."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.held = [LlamaAttention(*args, **kwargs)]  # in a list: not a submodule that would be found
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden_states, weights = self.held[0](*args, **kwargs)
        return hidden_states * self.scale, weights


def llama(**settings: Any) -> Any:
    return ARCHITECTURES["llama"].build(**settings)


def by_hand(replacement: type[nn.Module]) -> Any:
    """Llama with replaced attention, made with the patches applied but not by from_pretrained."""
    register_patch_mapping({"LlamaAttention": replacement}, overwrite=True)
    config = transformers.LlamaConfig(**ARCHITECTURES["llama"].settings)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    with monkey_patching.apply_patches():
        model: Any = transformers.LlamaForCausalLM(config)
        return model.eval()


def own(model: Any) -> list[torch.Tensor]:
    """What transformers' own capture gives."""
    with torch.no_grad():
        return list(model(**ARCHITECTURES["llama"].batch(), output_attentions=True).attentions)


def ours(model: nn.Module) -> list[torch.Tensor]:
    catcher = ModelIOCatcher(model)
    with torch.no_grad(), catcher.for_product("outputs[%attentions]") as buffer:
        catcher.run(**ARCHITECTURES["llama"].batch())
    return buffer.select()


def equal(got: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return len(got) == len(expected) == 3 and all(map(torch.equal, got, expected))


@pytest.mark.parametrize("replacement", [FastLlamaAttention, ScaledAttention])
def test_a_patched_model_records_as_before_by_either_capture(replacement: type[nn.Module]) -> None:
    model = by_hand(replacement)
    assert type(model.model.layers[0].self_attn) is replacement
    patch_output_recorders(model)
    expected = [weights for weights in own(model) if weights is not None]
    assert equal(ours(model), expected)
    assert equal(own(built("llama")), ours(built("llama")))
    assert LlamaPreTrainedModel._can_record_outputs["attentions"] is LlamaAttention


def test_the_values_are_those_of_the_model_before_it_was_patched() -> None:
    plain = built("llama")
    model = by_hand(ScaledAttention)
    patch_output_recorders(model)
    for layer, twin in zip(model.model.layers, plain.model.layers, strict=True):
        layer.self_attn.held[0].load_state_dict(twin.self_attn.state_dict())
    model.load_state_dict(plain.state_dict(), strict=False)
    assert equal(own(model), own(plain))
    assert equal(ours(model), own(plain))


def test_hooks_that_transformers_placed_before_are_placed_again() -> None:
    model = by_hand(FastLlamaAttention)
    batch = ARCHITECTURES["llama"].batch()
    expected = own(model)  # a subclass: found without a patch, and the hooks are there from now on
    for layer in model.model.layers:
        held = layer.self_attn
        layer.self_attn = ScaledAttention(held.config, held.layer_idx)
        layer.self_attn.held[0].load_state_dict(held.state_dict())
    assert own(model) == []
    assert len(model(**batch, output_hidden_states=True).hidden_states) == 4
    register_patch_mapping({"LlamaAttention": ScaledAttention}, overwrite=True)
    patch_output_recorders(model)
    assert equal(own(model), expected)
    assert equal(ours(model), expected)
    patch_output_recorders(model)
    assert equal(own(model), expected)
    assert len(model(**batch, output_hidden_states=True).hidden_states) == 4


def test_what_is_registered_here_reaches_models_that_transformers_builds() -> None:
    register_patch_mapping({"LlamaAttention": FastLlamaAttention})
    model = llama()
    assert type(model.model.layers[0].self_attn) is FastLlamaAttention
    assert equal(ours(model), own(model))


def test_it_reaches_from_pretrained(tmp_path: Path) -> None:
    built("llama").save_pretrained(tmp_path)
    register_patch_mapping({"Llama.*Attention$": FastLlamaAttention})
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    model.eval()
    assert type(model.model.layers[0].self_attn) is FastLlamaAttention
    assert equal(own(model), own(built("llama")))
    assert equal(ours(model), own(model))


def test_what_is_registered_with_transformers_counts_here() -> None:
    monkey_patching.register_patch_mapping({"LlamaAttention": FastLlamaAttention})
    model = llama()
    assert equal(ours(model), own(model))
    monkey_patching.register_patch_mapping({"^Attention$": FastAttention})
    plain = replaced()
    patch_output_recorders(plain)
    assert records(plain)
