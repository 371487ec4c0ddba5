from __future__ import annotations

import inspect
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softs_lightning.recording import OutputRecorder, capture_outputs, merge_with_config_defaults
from tests.recorded_models import Attention, Block, Decoder, Inner, Output, config, outer, x

plain_forward: Any = inspect.unwrap(Decoder.forward)


def same(got: Any, expected: list[Tensor]) -> bool:
    return len(got) == len(expected) and all(a is b for a, b in zip(got, expected, strict=True))


def blocks(model: Any) -> list[Any]:
    return list(model.layers)


# -- what is recorded ------------------------------------------------------------------------------


def test_hidden_states_are_the_first_input_and_each_output_tied_to_the_last() -> None:
    model = Decoder()
    out = model(x(), output_hidden_states=True)
    own = [blocks(model)[0].given[0], *(block.gave[0] for block in blocks(model)[:-1]), out.last_hidden_state]
    assert same(out.hidden_states, own)
    assert out.attentions is None


def test_without_the_tie_the_last_is_what_the_last_layer_returns() -> None:
    class Untied(Decoder):
        @capture_outputs(tie_last_hidden_states=False)
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            return plain_forward(self, hidden_states)

    model = Untied()
    out = model(x(), output_hidden_states=True)
    assert same(out.hidden_states, [blocks(model)[0].given[0], *(block.gave[0] for block in blocks(model))])


@pytest.mark.parametrize("tied", [True, False])
def test_the_config_decides_about_the_tie(tied: bool) -> None:
    model = Decoder(config=config(tie_last_hidden_states=tied))
    out = model(x(), output_hidden_states=True)
    assert (out.hidden_states[-1] is out.last_hidden_state) is tied
    assert (out.hidden_states[-1] is blocks(model)[-1].gave[0]) is not tied


def test_layer_names_tell_two_modules_of_one_class_apart() -> None:
    model = Decoder()
    out = model(x(), output_attentions=True, output_cross_attentions=True)
    assert same(out.attentions, [block.self_attn.seen[0] for block in blocks(model)])
    assert same(out.cross_attentions, [block.crossattention.seen[0] for block in blocks(model)])


@pytest.mark.parametrize(("asked", "got"), [({}, True), ({"output_cross_attentions": False}, False)])
def test_cross_attentions_follow_attentions_unless_told_otherwise(asked: dict[str, bool], got: bool) -> None:
    out = Decoder()(x(), output_attentions=True, **asked)
    assert (out.cross_attentions is not None) is got


def test_a_follower_that_the_model_does_not_have_is_left_out() -> None:
    model = Decoder()
    for block in blocks(model):
        block.crossattention = nn.Identity()
        block.forward = lambda hidden_states, block=block: block.self_attn(hidden_states)[0]
    out = model(x(), output_attentions=True)
    assert out.cross_attentions is None
    assert len(out.attentions) == 3
    with pytest.raises(ValueError, match="matches none of its modules"):
        model(x(), output_cross_attentions=True)


def test_the_first_input_is_found_when_it_comes_by_keyword() -> None:
    class ByKeyword(Decoder):
        @capture_outputs
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            for layer in self.layers:
                hidden_states = layer(hidden_states=hidden_states)
            return Output(hidden_states)

    model = ByKeyword()
    out = model(x(), output_hidden_states=True)
    assert out.hidden_states[0] is blocks(model)[0].given[0]


def test_the_first_input_can_be_left_out() -> None:
    model = Decoder()
    model._can_record_outputs = {"hidden_states": OutputRecorder(Block, capture_initial_hidden_state=False)}
    assert len(model(x(), output_hidden_states=True).hidden_states) == 3


def test_nothing_is_hooked_before_something_is_recorded() -> None:
    model = Decoder()
    model(x())
    assert not any(module._forward_hooks for module in model.modules())
    model(x(), output_attentions=True)
    assert sum(len(module._forward_hooks) for module in model.modules()) == 9
    model(x(), output_attentions=True)
    assert sum(len(module._forward_hooks) for module in model.modules()) == 9


def test_recording_changes_nothing_of_the_output() -> None:
    torch.manual_seed(0)
    model = Decoder()
    assert torch.equal(model(x()).last_hidden_state, model(x(), output_hidden_states=True).last_hidden_state)


# -- which flags -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("default", "call", "recorded"),
    [
        (None, {}, False),
        (None, {"output_attentions": None}, False),
        (True, {}, True),
        (True, {"output_attentions": None}, True),
        (True, {"output_attentions": False}, False),
        (False, {"output_attentions": True}, True),
        (False, {"output_attentions": None}, False),
    ],
)
def test_a_flag_is_the_calls_then_the_configs(default: Any, call: dict[str, Any], recorded: bool) -> None:
    for settings in (config(output_attentions=default), {"output_attentions": default}):
        out = Decoder(config=settings)(x(), **call)
        assert (out.attentions is not None) is recorded


def test_a_flag_may_stand_among_the_positional_arguments() -> None:
    class Positional(Decoder):
        @capture_outputs
        def forward(self, hidden_states: Tensor, output_attentions: Any = None) -> Any:  # type: ignore[override]
            self.saw = output_attentions
            return plain_forward(self, hidden_states)

    model = Positional(config=config(output_attentions=True))
    assert model(x(), False).attentions is None
    assert model(x(), None).attentions is not None
    assert model.saw is True


def test_a_forward_without_a_place_for_flags_is_not_given_them() -> None:
    class Closed(Decoder):
        @capture_outputs
        def forward(self, hidden_states: Tensor) -> Any:  # type: ignore[override]
            return plain_forward(self, hidden_states)

    assert Closed()(x(), output_attentions=True).attentions is not None
    with pytest.raises(TypeError, match="unexpected keyword"):
        Closed()(x(), output_nothing=True)


def test_a_forward_that_takes_them_sees_them_resolved() -> None:
    class Open(Decoder):
        @capture_outputs
        def forward(self, hidden_states: Tensor, output_attentions: Any = None, **kwargs: Any) -> Any:
            self.saw = output_attentions, kwargs
            return Output(hidden_states)

    model = Open(config=config(output_attentions=False, output_hidden_states=False))
    model(x(), output_hidden_states=None)
    assert model.saw == (False, {"output_hidden_states": False})


@pytest.mark.parametrize(
    ("positions", "kept"),
    [(0, {0}), (1, {1}), ([0, 3], {0, 3}), ([-1], {3}), ((-4, 2), {0, 2}), ([3, -1], {3})],
)
def test_positions_keep_those_values_and_none_elsewhere(positions: Any, kept: set[int]) -> None:
    model = Decoder()
    full = model(x(), output_hidden_states=True).hidden_states
    got = model(x(), output_hidden_states=positions).hidden_states
    assert len(got) == 4
    for at, value in enumerate(got):
        assert torch.equal(value, full[at]) if at in kept else value is None


def test_no_positions_are_nothing() -> None:
    assert Decoder()(x(), output_hidden_states=[]).hidden_states is None


@pytest.mark.parametrize("positions", [4, [0, 4], -5])
def test_a_position_that_is_not_there_is_an_error_before_anything_runs(positions: Any) -> None:
    model = Decoder()
    with pytest.raises(IndexError, match="is out of range: 4 values will be recorded"):
        model(x(), output_hidden_states=positions)
    assert not blocks(model)[0].given


@pytest.mark.parametrize("flag", ["yes", 1.0, [True], [0.0], {0: 1}])
def test_a_flag_of_another_kind_is_refused(flag: Any) -> None:
    with pytest.raises(
        TypeError, match="output_attentions must be True, False, None, an int or a list of ints"
    ):
        Decoder()(x(), output_attentions=flag)


# -- declarations ----------------------------------------------------------------------------------


def record(declaration: Any, key: str = "attentions", model: Any = None) -> Any:
    model = Inner() if model is None else model
    model._can_record_outputs = {key: declaration}
    return model(x(), **{f"output_{key}": True})[key], model


@pytest.mark.parametrize(
    "declaration",
    [
        Attention,
        "Attention",
        OutputRecorder(Attention, index=1),
        OutputRecorder("Attention", index=1),
        OutputRecorder(None, index=1, class_name="Attention"),
        OutputRecorder(Attention, index=-1),
        [Attention],
        [[Attention], []],
        ("self_attn", ["crossattention"]),
        [OutputRecorder(Attention, 1, "self_attn"), OutputRecorder(Attention, 1, ".crossattention")],
        [Attention, "Attention"],
    ],
)
def test_the_forms_of_a_declaration_agree(declaration: Any) -> None:
    got, model = record(declaration)
    assert same(got, [a.seen[0] for block in blocks(model) for a in (block.self_attn, block.crossattention)])


def test_a_subclass_is_of_its_class_also_by_name() -> None:
    class Fast(Attention):
        pass

    for declaration in (Attention, "Attention"):
        model = Inner(depth=1)
        blocks(model)[0].self_attn = Fast()
        assert len(record(declaration, model=model)[0]) == 2


def test_a_string_that_is_no_class_is_the_end_of_a_name_in_whole_components() -> None:
    got, model = record(OutputRecorder("crossattention", index=1))
    assert same(got, [block.crossattention.seen[0] for block in blocks(model)])  # not my_crossattention
    got, model = record(OutputRecorder("layers.1.self_attn", index=1))
    assert same(got, [blocks(model)[1].self_attn.seen[0]])


def test_a_layer_name_is_a_fragment_in_whole_components() -> None:
    got, model = record(OutputRecorder(Attention, index=1, layer_name="layers.1"))
    assert same(got, [blocks(model)[1].self_attn.seen[0], blocks(model)[1].crossattention.seen[0]])


def test_two_parts_of_one_module_are_two_values() -> None:
    got, _ = record([OutputRecorder(Attention, 0, "self_attn"), OutputRecorder(Attention, 1, "self_attn")])
    assert [list(value.shape) for value in got] == [[2, 3, 4], [2, 3, 3]] * 3


def test_a_key_decides_about_the_default_index() -> None:
    got, _ = record(Attention, key="cross_hidden_states")
    assert list(got[0].shape) == [2, 3, 4]
    assert list(record(Attention)[0][0].shape) == [2, 3, 3]


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, hidden_states: Tensor) -> Any:
        return self.value


Named = namedtuple("Named", "a b")


class ModelOutput(OrderedDict[str, Any]):
    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self.values())


class Single(nn.Module):
    """One layer that returns what it is told to."""

    _can_record_outputs = {"values": OutputRecorder("Returns", index=1)}  # noqa: RUF012

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.layer = Returns(value)

    @capture_outputs
    def forward(self, hidden_states: Tensor) -> Any:
        self.layer(hidden_states)
        return {}


@pytest.mark.parametrize("value", [("a", "b"), ["a", "b"], Named("a", "b"), ModelOutput(k="a", v="b"), "b"])
def test_an_index_picks_from_tuples_and_lists_and_takes_other_values_whole(value: Any) -> None:
    assert Single(value)(x(), output_values=True) == {"values": ("b",)}


def test_a_dict_is_a_value_whole() -> None:
    assert Single({"a": 1})(x(), output_values=True) == {"values": ({"a": 1},)}


def test_an_index_out_of_range_names_the_module_and_the_length() -> None:
    with pytest.raises(IndexError) as error:
        Single(("only",))(x(), output_values=True)
    assert str(error.value) == (
        "_can_record_outputs['values'] takes element 1 of what 'layer' (Returns) returns: "
        "there is no element 1 in a tuple of 1 (str)"
    )


def test_none_among_values_is_passed_over() -> None:
    model = Decoder()
    blocks(model)[1].self_attn.forward = lambda hidden_states: (hidden_states, None)
    assert len(model(x(), output_attentions=True).attentions) == 2


def test_nothing_but_none_is_an_error_that_names_the_switch() -> None:
    model: Any = Single((1, None))
    with pytest.raises(RuntimeError, match=r"'layer' gave None.*attn_implementation=\"eager\""):
        model(x(), output_values=True)
    model.config = config(_attn_implementation="sdpa")
    with pytest.raises(RuntimeError, match="this model has 'sdpa'"):
        model(x(), output_values=True)


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        (3, "must be a module class, the name of one, an OutputRecorder or a list of those, got 3"),
        (int, "must be a module class"),
        ([None], "must be a module class"),
        ("", "must be a module class"),
    ],
)
def test_another_declaration_is_refused(declaration: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        record(declaration)


def test_a_declaration_must_be_a_mapping() -> None:
    model = Decoder()
    model._can_record_outputs = ["attentions"]
    with pytest.raises(TypeError, match="must map the name of an output"):
        model(x(), output_attentions=True)


@pytest.mark.parametrize(
    "arguments",
    [{"target_class": 3}, {"target_class": int}, {"target_class": None}, {"target_class": "."}]
    + [{"target_class": Block, "index": index} for index in (None, "0", True)]
    + [{"target_class": Block, "layer_name": name} for name in ("", 3)],
)
def test_a_recorder_is_checked_when_it_is_made(arguments: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="a recorder's"):
        OutputRecorder(**arguments)


def test_a_key_without_modules_is_an_error_that_names_the_classes() -> None:
    with pytest.raises(ValueError, match="matches none of its modules") as error:
        record("Nonsense")
    assert "Inner declares 'Nonsense' for it" in str(error.value)
    assert "Attention, Block, Identity, Inner, LayerNorm, Linear, ModuleList" in str(error.value)


def test_a_model_that_declares_nothing_runs_as_ever() -> None:
    class Silent(nn.Module):
        @capture_outputs
        def forward(self, x: Tensor, **kwargs: Any) -> Any:
            return {"x": x, **kwargs}

    assert Silent()(1, output_attentions=True) == {"x": 1, "output_attentions": True}


# -- nested models ---------------------------------------------------------------------------------


def test_a_nested_model_keeps_its_own_declarations() -> None:
    model = outer()
    out = model(x(), output_hidden_states=True)
    own = [blocks(model)[0].given[0], blocks(model)[0].gave[0], out["last_hidden_state"]]
    assert same(out["hidden_states"], own)
    assert "hidden_states" not in out["below"]


def test_a_nested_model_records_for_itself() -> None:
    model = outer()
    out = model(x(), inner=True)
    assert "hidden_states" not in out
    assert same(out["below"]["hidden_states"], [blocks(model.inner)[0].given[0], out["last_hidden_state"]])
    out = model(x(), inner=True, output_hidden_states=True)
    assert (len(out["hidden_states"]), len(out["below"]["hidden_states"])) == (3, 2)


def test_a_layer_that_runs_inside_a_nested_model_is_still_its_own_models() -> None:
    model = outer()
    last = blocks(model)[1]
    blocks(model.inner)[0].forward = lambda hidden_states: last(hidden_states)
    out = model(x(), inner=True, output_hidden_states=True)
    assert len(out["hidden_states"]) == 4  # it ran twice, once within the nested model
    assert out["hidden_states"][2] is last.gave[0]
    assert len(out["below"]["hidden_states"]) == 2


def test_a_model_that_calls_itself_records_the_call_that_asks() -> None:
    class Twice(Decoder):
        @capture_outputs
        def forward(self, hidden_states: Tensor, first: bool = True, **kwargs: Any) -> Any:
            if first:
                hidden_states = self(hidden_states, first=False).last_hidden_state
            return plain_forward(self, hidden_states)

    model = Twice()
    out = model(x(), output_attentions=True)
    assert same(out.attentions, [block.self_attn.seen[1] for block in blocks(model)])


# -- what comes back -------------------------------------------------------------------------------


class Gives(nn.Module):
    """One layer; the output is made by a function."""

    _can_record_outputs = {"hidden_states": "Returns"}  # noqa: RUF012

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layer = Returns("out")
        self.make = make

    @capture_outputs
    def forward(self, hidden_states: Any) -> Any:
        self.layer(hidden_states)
        return self.make()


@dataclass(frozen=True)
class Frozen:
    last_hidden_state: Any
    hidden_states: Any = None


@dataclass
class Short:
    last_hidden_state: Any


def test_a_frozen_dataclass_is_replaced() -> None:
    assert Gives(lambda: Frozen("last"))("in", output_hidden_states=True) == Frozen("last", ("in", "last"))


def test_a_model_output_of_transformers_is_filled() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    out = Gives(lambda: BaseModelOutput(last_hidden_state=torch.ones(1)))("in", output_hidden_states=True)
    assert type(out) is BaseModelOutput
    assert out.hidden_states == out["hidden_states"] == ("in", out.last_hidden_state)


def test_a_dict_without_a_last_hidden_state_ties_nothing() -> None:
    out = Gives(lambda: {"a": 1})("in", output_hidden_states=True)
    assert out == {"a": 1, "hidden_states": ("in", "out")}


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (("a",), r"a tuple of 1 \(str\)"),
        (None, "None"),
        (3, "a int"),
        (Named(1, 2), "a Named"),
        ([1], "a list"),
    ],
)
def test_what_nothing_can_be_put_into_is_an_error_that_says_so(value: Any, what: str) -> None:
    with pytest.raises(TypeError, match=f"Gives.forward returned {what}.*'hidden_states' cannot be put"):
        Gives(lambda: value)("in", output_hidden_states=True)
    assert Gives(lambda: value)("in") == value


def test_a_tensor_is_one_of_those() -> None:
    with pytest.raises(TypeError, match=r"returned a Tensor of shape \[2\]"):
        Gives(lambda: torch.ones(2))("in", output_hidden_states=True)


def test_a_dataclass_without_the_field_is_an_error_that_names_its_fields() -> None:
    with pytest.raises(
        TypeError, match="Short has no field for 'hidden_states'; its fields are 'last_hidden_state'"
    ):
        Gives(lambda: Short("last"))("in", output_hidden_states=True)


@pytest.mark.parametrize(
    "make", [lambda: Frozen("last"), lambda: {"last_hidden_state": "last", "none": None}]
)
def test_a_tuple_holds_what_is_there_in_order(make: Any) -> None:
    model: Any = Gives(make)
    assert model("in", return_dict=False) == ("last",)
    assert model("in", return_dict=False, output_hidden_states=True) == ("last", ("in", "last"))
    model.config = config(return_dict=False)
    assert model("in") == ("last",)
    assert model("in", return_dict=None) == ("last",)
    assert model("in", return_dict=True) == make()


def test_a_model_output_becomes_its_tuple() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    last = torch.ones(1)
    out = Gives(lambda: BaseModelOutput(last_hidden_state=last))(
        "in", output_hidden_states=True, return_dict=False
    )
    assert out == (last, ("in", last))


def test_a_tuple_stays_one_and_a_tensor_cannot_become_one() -> None:
    assert Gives(lambda: (1, None))("in", return_dict=False) == (1, None)
    with pytest.raises(
        TypeError, match=r"return_dict=False asks for a tuple, and Gives\.forward returned a Tensor"
    ):
        Gives(lambda: torch.ones(2))("in", return_dict=False)


# -- defaults from the config ----------------------------------------------------------------------


class Caching(nn.Module):
    @merge_with_config_defaults
    def forward(self, x: Any, use_cache: Any = None, vision_feature_select_strategy: Any = None) -> Any:
        return use_cache, vision_feature_select_strategy


def caching(**settings: Any) -> Any:
    model: Any = Caching()
    model.config = config(**settings)
    return model


@pytest.mark.parametrize("setting", [True, False])
@pytest.mark.parametrize("given", [True, False, None])
def test_the_call_wins_over_the_config(setting: bool, given: bool | None) -> None:
    model = caching(use_cache=setting)
    expected = setting if given is None else given
    assert model(1, use_cache=given)[0] is expected
    assert model(1, given)[0] is expected
    assert vars(model.config) == {"use_cache": setting}


def test_what_the_config_does_not_say_stays_none() -> None:
    assert caching()(1) == (None, None)
    assert Caching()(1) == (None, None)


@pytest.mark.parametrize("strategy", ["default", "full"])
def test_the_vision_strategies_are_known(strategy: str) -> None:
    assert caching(vision_feature_select_strategy=strategy)(1)[1] == strategy
    with pytest.raises(ValueError, match="must be 'default' or 'full', got 'other'"):
        caching(vision_feature_select_strategy=strategy)(1, vision_feature_select_strategy="other")


@pytest.mark.parametrize(
    ("checkpointing", "training", "grad", "cached"),
    [
        (True, True, True, False),
        (True, False, True, True),
        (True, True, False, True),
        (False, True, True, True),
    ],
)
def test_there_is_no_cache_while_activations_are_checkpointed(
    checkpointing: bool, training: bool, grad: bool, cached: bool
) -> None:
    model = caching(use_cache=True).train(training)
    model.gradient_checkpointing = checkpointing
    with torch.set_grad_enabled(grad):
        assert model(1)[0] is cached


def test_the_other_documented_arguments_come_from_the_config_too() -> None:
    class Vision(nn.Module):
        config = config(vision_feature_layer=-2, vision_aspect_ratio="pad", is_causal=True)

        @merge_with_config_defaults
        def forward(self, **kwargs: Any) -> Any:
            return kwargs

    assert Vision()() == {"vision_feature_layer": -2, "vision_aspect_ratio": "pad"}
    assert Vision()(vision_feature_layer=[1])["vision_feature_layer"] == [1]


def test_the_decorators_combine_in_either_order() -> None:
    class Both(Decoder):
        @merge_with_config_defaults
        @capture_outputs(tie_last_hidden_states=False)
        def forward(self, hidden_states: Tensor, use_cache: Any = None, **kwargs: Any) -> Any:
            self.saw = use_cache
            return plain_forward(self, hidden_states)

    class Reversed(Both):
        forward = capture_outputs(merge_with_config_defaults(inspect.unwrap(Both.forward)))

    for kind in (Both, Reversed):
        model = kind(config=config(use_cache=True))
        assert len(model(x(), output_attentions=True).attentions) == 3
        assert model.saw is True
