"""Selectors in a product_id: which modules they mean, and what they refuse."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from softs_lightning.catcher import ModelIOCatcher
from softs_lightning.patching import register_patch_mapping, unregister_patch_mapping
from softs_lightning.product import Item, ProductSpec
from softs_lightning.recording import OutputRecorder, capture_outputs
from softs_lightning.selectors import UnknownModuleError, resolve_spec
from tests.recorded_models import Block, Decoder, Inner, outer, x


def resolved(model: nn.Module, product_id: str) -> str:
    return str(resolve_spec(model, ProductSpec.parse(product_id)))


def outputs(model: nn.Module, selector: str) -> list[str]:
    spec = resolve_spec(model, ProductSpec.parse(f"outputs[{selector}]"))
    assert not spec.inputs
    return [str(item) for item in spec.outputs]


# -- names, patterns, classes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        ("layers.1", ["layers.1"]),
        (".", ["."]),
        ("layers.*", ["layers.0", "layers.1", "layers.2"]),
        ("layers.*.self_attn.proj", [f"layers.{n}.self_attn.proj" for n in range(3)]),
        ("layers.{0..1}", ["layers.0", "layers.1"]),
        ("layers.{0..-1..2}", ["layers.0", "layers.2"]),
        ("layers.-1", ["layers.2"]),
        ("**.self_attn", [f"layers.{n}.self_attn" for n in range(3)]),
        ("@Block", ["layers.0", "layers.1", "layers.2"]),
        ("@Decoder", ["."]),
        ("@Attention", [f"layers.{n}.{a}" for n in range(3) for a in ("self_attn", "crossattention")]),
        ("@Attention:self_attn", [f"layers.{n}.self_attn" for n in range(3)]),
        ("@Attention:layers.1", ["layers.1.self_attn", "layers.1.crossattention"]),
        ("@Attention:crossattention", [f"layers.{n}.crossattention" for n in range(3)]),
        ("layers.1@Attention", ["layers.1.self_attn", "layers.1.crossattention"]),
        ("layers.{1..2}@Attention:self_attn", ["layers.1.self_attn", "layers.2.self_attn"]),
        (".@Block", ["layers.0", "layers.1", "layers.2"]),
        ("layers.0@Block", ["layers.0"]),
        ("@torch.nn.modules.normalization.LayerNorm", ["norm"]),
        ("@tests.recorded_models.Block", ["layers.0", "layers.1", "layers.2"]),
        ("layers.-1!2#0.k", ["layers.2!2#0.k"]),
        ("@Block#0?", ["layers.0#0?", "layers.1#0?", "layers.2#0?"]),
        ("layers.{0..1}!3", ["layers.0!3", "layers.1!3"]),
        ("norm|layers.-1|norm", ["norm", "layers.2", "norm"]),
    ],
)
def test_what_a_selector_means(selector: str, names: list[str]) -> None:
    assert outputs(Decoder(), selector) == names


def test_both_sections_and_their_order_are_kept() -> None:
    assert resolved(Decoder(2), "outputs[norm|layers.*]|inputs[layers.-1|.]") == (
        "inputs[layers.1|.]|outputs[norm|layers.0|layers.1]"
    )


def test_what_is_never_called_is_left_out() -> None:
    assert outputs(Decoder(1), "*") == ["norm"]
    assert outputs(Decoder(1), "**") == [
        "layers.0",
        "layers.0.self_attn",
        "layers.0.self_attn.proj",
        "layers.0.crossattention",
        "layers.0.crossattention.proj",
        "layers.0.my_crossattention",
        "norm",
    ]
    attention = nn.ModuleDict({"a": nn.MultiheadAttention(4, 2), "b": nn.Linear(4, 4)})
    assert outputs(attention, "@Linear") == ["b"]
    assert outputs(attention, "**") == ["a", "b"]
    with pytest.raises(UnknownModuleError, match="'layer\\*' selects only 'layers', which no forward calls"):
        resolved(Decoder(), "outputs[layer*]")


def test_a_subclass_and_a_class_that_was_made_on_the_fly_are_of_the_class() -> None:
    model = Decoder(2)
    model.layers[1].__class__ = type("FSDPBlock", (Block,), {})
    assert outputs(model, "@Block") == ["layers.0", "layers.1"]
    assert outputs(model, "@FSDPBlock") == ["layers.1"]


class FastBlock(nn.Identity):
    """Replaces Block without being one."""


@pytest.mark.parametrize("name", ["Block", "^Block$"])
def test_a_class_stands_for_its_registered_replacement_too(name: str) -> None:
    model = Decoder(3)
    model.layers[1] = FastBlock()
    assert outputs(model, "@Block") == ["layers.0", "layers.2"]
    register_patch_mapping({name: FastBlock})
    try:
        assert outputs(model, "@Block") == ["layers.0", "layers.1", "layers.2"]
        assert outputs(model, "@tests.recorded_models.Block") == ["layers.0", "layers.1", "layers.2"]
        assert outputs(model, "@FastBlock") == ["layers.1"]
    finally:
        unregister_patch_mapping([name])


def test_a_shared_module_is_meant_once_under_its_first_name() -> None:
    model = Decoder(3)
    model.layers[2] = model.layers[0]
    assert outputs(model, "layers.*") == ["layers.0", "layers.1"]
    assert outputs(model, "@Block") == ["layers.0", "layers.1"]
    assert outputs(model, "layers.-1") == ["layers.2"]


class Wrapper(nn.Module):
    """Puts a module where a real wrapper puts it, and calls it."""

    def __init__(self, inner: nn.Module, attribute: str) -> None:
        super().__init__()
        self.attribute = attribute
        self.add_module(attribute, inner)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, self.attribute)(*args, **kwargs)


@pytest.mark.parametrize("attribute", ["module", "_orig_mod", "_fsdp_wrapped_module"])
def test_wrappers_around_the_model_do_not_change_the_names(attribute: str) -> None:
    model = Wrapper(Wrapper(Decoder(2), attribute), "module")
    assert outputs(model, "layers.*") == ["layers.0", "layers.1"]
    assert outputs(model, "layers.-1.self_attn") == ["layers.1.self_attn"]
    assert outputs(model, "@Block") == ["layers.0", "layers.1"]
    assert outputs(model, "layers.1@Attention:self_attn") == ["layers.1.self_attn"]
    assert outputs(model, "%attentions") == ["layers.0.self_attn#1?", "layers.1.self_attn#1?"]
    names = resolved(model, "outputs[%hidden_states]")
    assert (
        names == f"inputs[layers.0#hidden_states]|outputs[layers.0#0?|module.{attribute}#last_hidden_state]"
    )
    with ModelIOCatcher(model).for_product("outputs[%hidden_states]", early_exit=False) as buffer:
        out = model(x(), output_hidden_states=True)
    assert all(a is b for a, b in zip(buffer.select(), out.hidden_states, strict=True))


def test_a_wrapper_inside_the_model_stands_for_what_it_wraps() -> None:
    model = Decoder(2)
    model.layers[1] = Wrapper(model.layers[1], "_checkpoint_wrapped_module")
    assert outputs(model, "layers.*") == ["layers.0", "layers.1"]
    # A class means the module itself, not its wrapper.
    assert outputs(model, "@Block") == ["layers.0", "layers.1._checkpoint_wrapped_module"]
    assert outputs(model, "%attentions") == ["layers.0.self_attn#1?", "layers.1.self_attn#1?"]


# -- names that look like selectors ----------------------------------------------------------------


def odd() -> nn.ModuleDict:
    keys = [
        "*",
        "-1",
        "{0..1}".replace(".", ""),
        "@Linear",
        "%attentions",
        "a@b:c",
        "a%b",
        "a#0",
        "a!1",
        "0",
        "1",
    ]
    return nn.ModuleDict({key: nn.Linear(1, 1) for key in keys})


@pytest.mark.parametrize("key", odd())
def test_the_exact_name_of_a_module_wins(key: str) -> None:
    assert outputs(odd(), key) == [key]


def test_other_readings_remain_beside_such_names() -> None:
    assert len(outputs(odd(), "**")) == len(odd())
    assert outputs(odd(), "{0..1}") == ["0", "1"]
    assert outputs(odd(), "-2") == ["0"]
    assert outputs(odd(), "1#0") == ["1#0"]


# -- recorded keys ---------------------------------------------------------------------------------


def test_recorded_keys_become_names_with_picks() -> None:
    assert resolved(Decoder(2), "outputs[%hidden_states]") == (
        "inputs[layers.0#hidden_states]|outputs[layers.0#0?|.#last_hidden_state]"
    )
    assert outputs(Decoder(2), "%attentions") == ["layers.0.self_attn#1?", "layers.1.self_attn#1?"]
    assert outputs(Decoder(1), "%cross_attentions!2#0") == ["layers.0.crossattention!2#1?.0"]
    assert resolved(Decoder(1), "inputs[%attentions|%hidden_states]") == "inputs[layers.0.self_attn|layers.0]"


@pytest.mark.parametrize(
    ("at", "expected"),
    [
        ("0", "inputs[layers.0#hidden_states]"),
        ("1", "outputs[layers.0#0?]"),
        ("-1", "outputs[.#last_hidden_state]"),
        ("-3", "outputs[layers.0#0?]"),
        ("{1..2}", "outputs[layers.0#0?|layers.1#0?]"),
        ("{0..-1..3}", "inputs[layers.0#hidden_states]|outputs[.#last_hidden_state]"),
    ],
)
def test_one_or_some_of_what_is_recorded(at: str, expected: str) -> None:
    assert resolved(Decoder(3), f"outputs[%hidden_states.{at}]") == expected


def test_a_recorded_key_is_what_the_model_returns() -> None:
    model = Decoder()
    catcher = ModelIOCatcher(model)
    with catcher.for_product(
        "outputs[%hidden_states|%attentions|%cross_attentions]", early_exit=False
    ) as buffer:
        out = catcher.run(x(), output_hidden_states=True, output_attentions=True)
    expected = [*out.hidden_states, *out.attentions, *out.cross_attentions]
    assert all(a is b for a, b in zip(buffer.select(), expected, strict=True))
    for key in ("hidden_states", "attentions", "cross_attentions"):
        got = buffer.select(f"outputs[%{key}]")
        assert all(a is b for a, b in zip(got, getattr(out, key), strict=True))
    assert buffer.select("outputs[%hidden_states.-1]")[0] is out.hidden_states[-1]


def test_an_untied_or_an_undecorated_model_ends_with_its_last_layer() -> None:
    class Undecorated(Decoder):
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
            return hidden_states

    model = Decoder(1)
    model.config = {"tie_last_hidden_states": False}
    expected = "inputs[layers.0#hidden_states]|outputs[layers.0#0?]"
    assert resolved(model, "outputs[%hidden_states]") == expected
    assert resolved(Undecorated(1), "outputs[%hidden_states]") == expected


def test_without_an_initial_state_there_is_none() -> None:
    model = Inner(2)
    model._can_record_outputs = {"hidden_states": OutputRecorder(Block, capture_initial_hidden_state=False)}
    assert resolved(model, "outputs[%hidden_states]") == "outputs[layers.0#0?|.#last_hidden_state]"


class Starred(nn.Module):
    def forward(self, *args: Tensor) -> Tensor:
        return args[0]


def test_a_first_input_without_a_name_is_picked_by_position() -> None:
    class Net(nn.Sequential):
        _can_record_outputs = {"hidden_states": Starred}  # noqa: RUF012

    net = Net(Starred(), Starred())
    product = "outputs[%hidden_states]"
    assert resolved(net, product) == "inputs[0#0]|outputs[0#0?|1#0?]"
    with ModelIOCatcher(net).for_product(product, early_exit=False) as buffer:
        start = x()
        net(start)
    assert buffer.select()[0] is start


def test_several_models_that_record_are_told_apart_by_name() -> None:
    model = outer()
    with pytest.raises(KeyError, match=r"could mean any of '\.%hidden_states', 'inner%hidden_states'"):
        resolved(model, "outputs[%hidden_states]")
    assert resolved(model, "outputs[inner%hidden_states]") == (
        "inputs[inner.layers.0#hidden_states]|outputs[inner#last_hidden_state]"
    )
    assert resolved(model, "outputs[%attentions]") == "outputs[inner.layers.0.self_attn#1?]"
    assert resolved(model, "outputs[**%hidden_states.-1]") == (
        "outputs[.#last_hidden_state|inner#last_hidden_state]"
    )
    assert resolved(model, "outputs[inn*%attentions]") == "outputs[inner.layers.0.self_attn#1?]"


def test_a_scope_may_hold_the_model_that_records() -> None:
    model = nn.ModuleDict({"a": nn.Sequential(Inner(1)), "b": nn.Sequential(nn.Identity(), Inner(1))})
    assert outputs(model, "b%attentions") == ["b.1.layers.0.self_attn#1?"]
    assert outputs(model, "*%attentions") == ["a.0.layers.0.self_attn#1?", "b.1.layers.0.self_attn#1?"]
    assert outputs(model, "b.-1%attentions") == ["b.1.layers.0.self_attn#1?"]


def test_the_root_alone_of_several_can_be_said() -> None:
    assert resolved(outer(), "outputs[.%hidden_states]") == (
        "inputs[layers.0#hidden_states]|outputs[layers.0#0?|.#last_hidden_state]"
    )


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selector", "message"),
    [
        ("layers.*.slef_attn", "nearest names are 'layers.2.self_attn'"),
        ("layers.{0..5}", "asks for 5, and there are '0 to 2'"),
        ("layers.-4", "asks for -4"),
        ("@Blok", "no module of a class 'Blok'; the nearest are 'Block'"),
        ("@qqqq", "the nearest are 'Attention', 'Block', 'Decoder'"),
        ("@Attention:attn", "the modules of class 'Attention' are 'layers.0.self_attn'"),
        ("norm@Block", "the modules of class 'Block' are 'layers.0'"),
        ("nrom@Block", "nearest names are 'norm'"),
        ("%attention", "records 'attention'; recorded are 'attentions', 'cross_attentions', 'hidden_states'"),
        ("norm%attentions", "no part of Decoder below 'norm' records 'attentions'"),
        ("%hidden_states.4", "asks for 4, and there are '0 to 3'"),
        ("%hidden_states.{0..9}", "asks for 9"),
    ],
)
def test_what_selects_nothing_is_a_key_error_with_what_is_near(selector: str, message: str) -> None:
    with pytest.raises(KeyError) as error:
        resolved(Decoder(), f"outputs[{selector}]")
    assert message in str(error.value)


@pytest.mark.parametrize(
    "selector",
    [
        "@",
        "@:x",
        "@A:",
        "a@b@c",
        "%",
        "%a%b",
        "a@b%c",
        "%a.",
        "%hidden_states.x",
        "%hidden_states.{0}x",
        "@A:b:c@",
        "layers.{0..",
        "layers.{2..0}",
        "%hidden_states.{3..1}",
    ],
)
def test_what_is_not_written_as_a_selector_is_a_value_error(selector: str) -> None:
    with pytest.raises(ValueError, match=r"is selected by|range|neither a number|before it begins") as error:
        resolved(Decoder(), f"outputs[{selector}]")
    assert not isinstance(error.value, KeyError)


def test_a_model_that_declares_nothing_says_so() -> None:
    with pytest.raises(KeyError, match=r"recorded are no outputs at all \(_can_record_outputs\)"):
        resolved(nn.Sequential(nn.Linear(1, 1)), "outputs[%hidden_states]")


# -- in a session ----------------------------------------------------------------------------------


def test_selectors_work_wherever_a_catcher_takes_names() -> None:
    model = Decoder()
    catcher = ModelIOCatcher(model)
    with catcher(inputs=["@Block"], outputs=["layers.-1"]) as buffer:
        model(x())
    assert list(buffer) == ["layers.0", "layers.1", "layers.2"]
    assert [list(kinds) for kinds in buffer.values()] == [["inputs"], ["inputs"], ["inputs", "outputs"]]
    assert buffer["layers.2"]["outputs"][0] is model.layers[2].gave[0]
    with pytest.raises(KeyError, match="'@Blok' selects nothing"):
        catcher.for_product("outputs[@Blok]")


def test_a_buffer_is_read_by_the_selectors_it_was_filled_by() -> None:
    model = Decoder()
    catcher = ModelIOCatcher(model)
    union = ProductSpec.union(map(ProductSpec.parse, ["outputs[layers.*]", "outputs[@Block|norm]"]))
    with catcher.for_product(union, early_exit=False) as buffer:
        model(x())
    gave = [block.gave[0] for block in model.layers]
    for product_id in ("outputs[layers.*]", "outputs[@Block]", "outputs[layers.{0..2}]"):
        assert all(a is b for a, b in zip(buffer.select(product_id), gave, strict=True))
    with pytest.raises(LookupError, match="was not asked of this session"):
        buffer.select("outputs[@Attention]")


def test_selectors_are_looked_up_again_when_a_layer_was_replaced() -> None:
    model = Decoder()
    catcher = ModelIOCatcher(model)
    catcher.for_product("outputs[@Block]")
    model.layers[1] = nn.Identity()
    with catcher.for_product("outputs[@Block]", early_exit=False) as buffer:
        model(x())
    assert list(buffer) == ["layers.0", "layers.2"]


def test_selectors_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    catcher = ModelIOCatcher(Decoder())
    catcher.for_product("outputs[@Block|%hidden_states]")
    monkeypatch.setattr("softs_lightning.catcher.resolve_spec", None)
    with catcher.for_product("outputs[@Block|%hidden_states]", early_exit=False) as buffer:
        catcher.run(x())
    assert len(buffer.select()) == 7


def test_a_pick_that_finds_none_names_the_reason() -> None:
    net = nn.ModuleDict({"attn": nn.MultiheadAttention(4, 2)})
    catcher = ModelIOCatcher(net["attn"])
    with catcher(outputs=[".#1"]) as buffer:
        net["attn"](x(), x(), x(), need_weights=False)
    with pytest.raises(LookupError, match=r"outputs\[.#1\] is None: .* only for need_weights=True"):
        buffer.select()


# -- modules whose hooks do not fire ---------------------------------------------------------------


def encoder() -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


def test_the_out_proj_of_an_attention_never_runs_and_the_error_says_why() -> None:
    layer = encoder()
    catcher = ModelIOCatcher(layer)
    with torch.no_grad(), catcher.for_product("outputs[self_attn.out_proj]") as buffer:
        catcher.run(torch.ones(1, 3, 8))
    with pytest.raises(LookupError, match="reads the weights of its out_proj and never calls it"):
        buffer.select()


def test_a_container_never_runs_and_the_error_says_why() -> None:
    catcher = ModelIOCatcher(Decoder())
    with catcher(outputs=["layers"]) as buffer:
        catcher.run(x())
    with pytest.raises(LookupError, match="a ModuleList is a container, which no forward calls"):
        buffer.select()


@pytest.mark.parametrize("inside", ["self_attn#0", "linear1", "linear2", "norm1", "norm2", "."])
def test_a_hook_takes_the_encoder_layer_off_its_fused_path(inside: str) -> None:
    layer, batch = encoder(), torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
    expected = {}
    twin = encoder()
    for name, module in twin.named_modules():
        module.register_forward_hook(
            lambda module, args, output, name=name: expected.update({name or ".": output})
        )
    catcher = ModelIOCatcher(layer)
    with torch.no_grad(), catcher.for_product(f"outputs[{inside}]") as buffer:
        twin(batch)
        assert catcher.run(batch) is None
    got, wanted = buffer.select()[0], expected[inside.partition("#")[0]]
    assert torch.equal(got, wanted[0] if "#" in inside else wanted)


def test_recording_takes_it_off_too() -> None:
    class Net(nn.Module):
        _can_record_outputs = {"feed_forward": OutputRecorder(nn.Linear, layer_name="linear2")}  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([encoder(), encoder()])

        @capture_outputs
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> dict[str, Any]:
            for layer in self.layers:
                hidden_states = layer(hidden_states)
            return {"last_hidden_state": hidden_states}

    with torch.no_grad():
        got = Net().eval()(torch.ones(1, 3, 8), output_feed_forward=True)["feed_forward"]
    assert [list(value.shape) for value in got] == [[1, 3, 8]] * 2


# -- writing it down -------------------------------------------------------------------------------

WRITTEN = [
    "outputs[model.layers.{0..5}]",
    "outputs[model.layers.{1..-1..2}#0?]",
    "outputs[model.layers.-1]",
    "inputs[**.mlp]|outputs[@LlamaAttention:self_attn#1|@LlamaMLP!0]",
    "outputs[%hidden_states.{0..-2}|decoder%cross_attentions.-1]",
    "inputs[.]|outputs[encoder@torch.nn.modules.linear.Linear]",
]


@pytest.mark.parametrize("product_id", WRITTEN)
def test_a_product_id_goes_through_hydras_command_line_in_quotes(product_id: str) -> None:
    for quote in "'\"":
        override = OverridesParser.create().parse_override(f"pairs.0.teacher={quote}{product_id}{quote}")
        assert override.value() == product_id
        assert not override.is_sweep_override()


@pytest.mark.parametrize("product_id", WRITTEN)
def test_a_product_id_goes_through_yaml_quoted_and_bare(product_id: str) -> None:
    for text in (product_id, f'"{product_id}"', f"'{product_id}'"):
        assert yaml.safe_load(f"teacher: {text}\nother: 1") == {"teacher": product_id, "other": 1}


@pytest.mark.parametrize("product_id", WRITTEN)
def test_the_printed_form_is_canonical(product_id: str) -> None:
    spec = ProductSpec.parse(product_id)
    assert str(spec) == product_id
    spaced = product_id.replace("[", " [ ").replace("|", " | ").replace("#", " # ").replace("!", " ! ")
    assert ProductSpec.parse(spaced) == spec


MODELS: list[nn.Module] = [Decoder(2), outer(), odd(), encoder(), Wrapper(Decoder(1), "module")]
SIGNS = st.sampled_from(
    [
        "layers",
        "0",
        "1",
        "-1",
        "*",
        "**",
        "{0..1}",
        "{0..-1}",
        ".",
        ".",
        "@",
        "%",
        ":",
        "#",
        "!",
        "|",
        "?",
        "{",
        "}",
        "Block",
        "Attention",
        "Linear",
        "hidden_states",
        "attentions",
        "inner",
        "module",
        "self_attn",
        " ",
        "é",
    ]
)
SELECTORS = st.lists(SIGNS, max_size=8).map("".join)


@given(SELECTORS, SELECTORS, st.sampled_from(MODELS))
def test_a_selector_resolves_to_what_stays_or_is_refused(inputs: str, outputs: str, model: nn.Module) -> None:
    try:
        spec = ProductSpec.parse(f"inputs[{inputs}]|outputs[{outputs}]")
        assert ProductSpec.parse(str(spec)) == spec
        concrete = resolve_spec(model, spec)
    except (ValueError, KeyError):
        return
    assert resolve_spec(model, concrete) == concrete
    assert resolve_spec(model, spec) == concrete
    assert all("**" not in item.name for _, item in concrete)


@given(st.text(), st.sampled_from(MODELS))
def test_no_text_escapes_with_another_error(text: str, model: nn.Module) -> None:
    try:
        resolve_spec(model, ProductSpec.parse(text))
        resolve_spec(model, ProductSpec(outputs=(Item(text),)))
    except (ValueError, KeyError):
        pass


@pytest.mark.parametrize(
    "piece", ["**.", "*a", "@", "%", "{0..1}.", "{", "layers.", "#0", "!0", "a|", "[", "]", ":"]
)
def test_long_text_ends_soon(piece: str) -> None:
    for text in (piece * 5000, f"outputs[{piece * 2000}]", f"outputs[layers.{piece * 500}x]"):
        try:
            resolve_spec(MODELS[0], ProductSpec.parse(text))
        except (ValueError, KeyError):
            continue


# -- imports ---------------------------------------------------------------------------------------


def test_transformers_is_not_imported_for_a_plain_model() -> None:
    program = """
import sys
import softs_lightning.recording, softs_lightning.patching, softs_lightning.selectors, softs_lightning.catcher
from tests.recorded_models import Decoder, x
model = Decoder()
assert len(model(x(), output_hidden_states=True).hidden_states) == 4
with softs_lightning.catcher.ModelIOCatcher(model).for_product("outputs[@Block]", early_exit=False):
    model(x())
softs_lightning.patching.patch_output_recorders(model)
assert not {"transformers", "lightning", "torch._dynamo"} & set(sys.modules)
softs_lightning.patching.register_patch_mapping({"Block": Decoder})
assert sys.modules["transformers.monkey_patching"].get_patch_mapping() == {"Block": Decoder}
"""
    subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", program], check=True, timeout=300)
