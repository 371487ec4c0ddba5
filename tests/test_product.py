from __future__ import annotations

from collections import OrderedDict, deque, namedtuple
from dataclasses import FrozenInstanceError, dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from softs_lightning import catcher
from softs_lightning.product import Item, ProductSpec, describe, parse_io_spec, take

# -- parse_io_spec ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "inputs", "outputs"),
    [
        ("inputs[model.layers.0]|outputs[model.layers.0]", ["model.layers.0"], ["model.layers.0"]),
        ("inputs[]|outputs[model.layers.0|model.layers.5]", [], ["model.layers.0", "model.layers.5"]),
        ("outputs[model.layers.0]", [], ["model.layers.0"]),
        ("inputs[a]", ["a"], []),
        ("outputs[b]|inputs[a]", ["a"], ["b"]),
        ("inputs[ a || b |]outputs[\tc\n]", ["a", "b"], ["c"]),
        ("inputs[a] , outputs[b]", ["a"], ["b"]),
        ("inputs[a] ; outputs[b]", ["a"], ["b"]),
        ("inputs[a] & outputs[b]", ["a"], ["b"]),
        ("inputs[a] + outputs[b]", ["a"], ["b"]),
        ("inputs[a]outputs[b]", ["a"], ["b"]),
        ("  |outputs [ a ]|| ", [], ["a"]),
        ("outputs[a]|outputs[b|a]", [], ["a", "b", "a"]),
        ("inputs[]|outputs[]", [], []),
        ("", [], []),
        ("outputs[inputs|outputs]", [], ["inputs", "outputs"]),
        ("outputs[a!1#0.key]", [], ["a!1#0.key"]),
    ],
)
def test_the_documented_forms(text: str, inputs: list[str], outputs: list[str]) -> None:
    assert parse_io_spec(text) == (inputs, outputs)


def test_the_catcher_module_offers_it_too() -> None:
    assert catcher.parse_io_spec is parse_io_spec


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("output[x]", 0),
        ("outputs[x", 0),
        ("outputs x", 0),
        ("outputs[x]]", 10),
        ("inputs[a|outputs[b]", 0),
        ("inputs[a] | foo | outputs[b]", 12),
        ("outputs[a] inputs", 11),
        ("myinputs[a]", 0),
        ("Outputs[a]", 0),
        ("inputs[a]\noutputs(b)", 10),
    ],
)
def test_leftover_text_is_pointed_at(text: str, at: int) -> None:
    with pytest.raises(ValueError, match="not understood") as error:
        parse_io_spec(text)
    _, line, arrow, advice = str(error.value).split("\n")
    assert arrow.index("^") - 4 == at
    assert line[4:] == text.replace("\n", " ")
    assert f"character {at + 1} " in str(error.value)
    assert "brackets closed" in advice


@pytest.mark.parametrize("value", [None, b"outputs[a]", ["outputs[a]"], 3])
def test_what_is_no_string_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="a product_id is a string"):
        parse_io_spec(value)


# -- items and specs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "item"),
    [
        ("a.b", Item("a.b")),
        (".", Item(".")),
        ("a!0", Item("a", 0)),
        ("a#0", Item("a", None, (0,))),
        ("a#-1.k", Item("a", None, (-1, "k"))),
        ("a ! 2 # k . 1", Item("a", 2, ("k", 1))),
        (" a ", Item("a")),
    ],
)
def test_an_item_is_parsed(text: str, item: Item) -> None:
    assert Item.parse(text) == item


@pytest.mark.parametrize("text", ["", "  ", "!1", "#0", " #0"])
def test_an_item_needs_a_name(text: str) -> None:
    with pytest.raises(ValueError, match="names no module"):
        Item.parse(text)


@pytest.mark.parametrize("text", ["a!", "a!x", "a!-1", "a!1.5", "a!1!2", "a!²"])
def test_a_call_is_a_number(text: str) -> None:
    with pytest.raises(ValueError, match="number of a call"):
        Item.parse(text)


@pytest.mark.parametrize("text", ["a#", "a#0.", "a#.k", "a#0..1", "a#0#1", "a#0!1"])
def test_a_pick_is_keys_joined_by_dots(text: str) -> None:
    with pytest.raises(ValueError, match="an index or a key"):
        Item.parse(text)


def test_a_spec_iterates_inputs_first_in_the_order_written() -> None:
    spec = ProductSpec.parse("outputs[b|a]|inputs[d|c#0]")
    assert list(spec) == [
        ("inputs", Item("d")),
        ("inputs", Item("c", None, (0,))),
        ("outputs", Item("b")),
        ("outputs", Item("a")),
    ]
    assert len(spec) == 4


def test_a_spec_is_an_immutable_value() -> None:
    spec = ProductSpec.parse("outputs[b]")
    assert spec == ProductSpec.parse(" outputs[ b | ] ")
    assert len({spec, ProductSpec.parse("outputs[b]")}) == 1
    assert ProductSpec.parse(spec) is spec
    with pytest.raises(FrozenInstanceError):
        spec.inputs = ()  # type: ignore[misc]


def test_a_union_asks_once_for_each() -> None:
    specs = map(ProductSpec.parse, ["outputs[a|b]", "inputs[a]|outputs[b|c]", "inputs[a#0]"])
    assert str(ProductSpec.union(specs)) == "inputs[a|a#0]|outputs[a|b|c]"
    assert ProductSpec.union([]) == ProductSpec()
    assert not ProductSpec()


NAME_CHARACTERS = st.characters(blacklist_characters="[]|#!.", blacklist_categories=["Cs"])
WORDS = st.text(NAME_CHARACTERS, min_size=1).map(str.strip).filter(bool)
NAMES = st.just(".") | st.lists(WORDS, min_size=1, max_size=3).map(".".join)
PICKS = st.lists(st.integers(-99, 99) | WORDS.filter(lambda w: not w.lstrip("-").isdecimal()), max_size=3)
ITEMS = st.builds(Item, NAMES, st.none() | st.integers(0, 10**6), PICKS.map(tuple))
SPECS = st.builds(ProductSpec, st.lists(ITEMS, max_size=4).map(tuple), st.lists(ITEMS, max_size=4).map(tuple))


@settings(deadline=None)
@given(SPECS)
def test_a_printed_spec_is_parsed_to_the_same_spec(spec: ProductSpec) -> None:
    assert ProductSpec.parse(str(spec)) == spec


GRAMMAR = st.lists(
    st.sampled_from(["inputs", "outputs", "[", "]", "|", "a", ".", "#", "!", "0", "-1", " ", "\n", ",", "²"])
    | st.text(max_size=3),
    max_size=14,
).map("".join)


@settings(max_examples=300, deadline=None)
@given(GRAMMAR | st.text())
def test_any_string_parses_and_prints_to_itself_or_is_a_value_error(text: str) -> None:
    try:
        spec = ProductSpec.parse(text)
    except ValueError:
        return
    assert ProductSpec.parse(str(spec)) == spec


def test_an_endless_number_is_a_value_error_too() -> None:
    for text in (f"outputs[a!{'9' * 5000}]", f"outputs[a#{'9' * 5000}]"):
        with pytest.raises(ValueError, match=r"."):
            ProductSpec.parse(text)


# -- take and describe -----------------------------------------------------------------------------

Point = namedtuple("Point", "x y")


@dataclass
class Pair:
    left: int
    right: Any = None


@pytest.mark.parametrize(
    ("value", "pick", "expected"),
    [
        (7, (), 7),
        ((1, 2), (1,), 2),
        ([1, [2, 3]], (-1, 0), 2),
        (deque([4, 5]), (1,), 5),
        ({"a": 1}, ("a",), 1),
        ({0: "number"}, (0,), "number"),
        ({"0": "text"}, (0,), "text"),
        (Point(1, 2), ("y",), 2),
        (Point(1, 2), (0,), 1),
        (Pair(1, {"k": (5,)}), ("right", "k", 0), 5),
        (OrderedDict(a=None), ("a",), None),
    ],
)
def test_a_pick_is_followed(value: Any, pick: tuple[Any, ...], expected: Any) -> None:
    assert take(value, pick) == expected


def test_a_pick_follows_torch_return_types_and_model_outputs() -> None:
    from transformers.modeling_outputs import BaseModelOutput

    hidden = torch.ones(1)
    output: Any = BaseModelOutput(last_hidden_state=hidden, attentions=(hidden, hidden + 1))
    assert take(output, (0,)) is hidden
    assert take(output, ("last_hidden_state",)) is hidden
    assert take(output, (1, 1)) is output.attentions[1]
    assert take(torch.max(torch.tensor([[1.0, 3.0]]), 1), ("values",)).item() == 3


@pytest.mark.parametrize(
    ("value", "pick", "words"),
    [
        ((1, 2), (2,), "2 is not in the value, which is a tuple of 2 (int, int)"),
        ({"a": (1,)}, ("a", 4), "4 is not in #a, which is a tuple of 1 (int)"),
        ({"a": 1}, ("b",), "'b' is not in the value, which is a dict with keys 'a'"),
        (None, (0,), "0 is not in the value, which is None"),
        (torch.ones(2, 3), (0,), "0 is not in the value, which is a Tensor of shape [2, 3]"),
        ("text", (0,), "0 is not in the value, which is a str"),
        (Pair(1), ("__class__",), "'__class__' is not in the value, which is a Pair"),
        ((1, 2), ("count",), "'count' is not in the value"),
        (SimpleNamespace(a=1), ("a",), "'a' is not in the value"),
        ({1, 2}, (0,), "0 is not in the value, which is a set"),
    ],
)
def test_a_pick_that_leads_nowhere_says_what_stood_there(
    value: Any, pick: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(LookupError) as error:
        take(value, pick)
    assert words in str(error.value.args[0])


def test_a_description_names_type_sizes_and_keys() -> None:
    assert describe(torch.ones(2, 3)) == "a Tensor of shape [2, 3]"
    assert describe({"a": 1, "b": 2}) == "a dict with keys 'a', 'b'"
    assert describe((torch.ones(1), None)) == "a tuple of 2 (Tensor, None)"
    assert describe(None) == "None"
    assert describe(object()) == "a object"
