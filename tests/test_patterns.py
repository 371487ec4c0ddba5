from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from softs_lightning.names import UnknownModuleError
from softs_lightning.patterns import expand, is_pattern, positions

NAMES = [
    "embed",
    "layers",
    *(
        name
        for n in range(12)
        for name in (f"layers.{n}", f"layers.{n}.attn", f"layers.{n}.mlp", f"layers.{n}.mlp.up")
    ),
    "stage1",
    "stage1.conv",
    "stage2",
    "stage2.conv",
    "stage10",
    "stage10.conv",
    "head",
    "head.mlp",
]


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("*", ["embed", "layers", "stage1", "stage2", "stage10", "head"]),
        ("layers.*", [f"layers.{n}" for n in range(12)]),
        ("layers.*.mlp", [f"layers.{n}.mlp" for n in range(12)]),
        ("layers.1*", ["layers.1", "layers.10", "layers.11"]),
        ("layers.*1", ["layers.1", "layers.11"]),
        ("l*s.0", ["layers.0"]),
        ("*e*.conv", ["stage1.conv", "stage2.conv", "stage10.conv"]),
        ("layers.**.up", [f"layers.{n}.mlp.up" for n in range(12)]),
        ("layers.0.**", ["layers.0", "layers.0.attn", "layers.0.mlp", "layers.0.mlp.up"]),
        ("**.conv", ["stage1.conv", "stage2.conv", "stage10.conv"]),
        ("**", NAMES),
        ("**.**", NAMES),
        ("layers.{0..2}", ["layers.0", "layers.1", "layers.2"]),
        ("layers.{9..11}", ["layers.9", "layers.10", "layers.11"]),
        ("layers.{1..-1..4}", ["layers.1", "layers.5", "layers.9"]),
        ("layers.{-2..-1}.attn", ["layers.10.attn", "layers.11.attn"]),
        ("layers.{3..3}", ["layers.3"]),
        ("layers.-1", ["layers.11"]),
        ("layers.-12.mlp", ["layers.0.mlp"]),
        ("stage{1..2}.conv", ["stage1.conv", "stage2.conv"]),
        ("stage{1..-1}.conv", ["stage1.conv", "stage2.conv", "stage10.conv"]),
        ("**.-1", ["layers.11"]),
        ("layers.*.nothing", []),
        ("embed.*", []),
        ("embed.-1", []),
        ("**.{0..1}", ["layers.0", "layers.1"]),
    ],
)
def test_patterns_mean_names_in_the_order_given(pattern: str, names: list[str]) -> None:
    assert is_pattern(pattern)
    assert expand(pattern, NAMES) == [name for name in NAMES if name in set(names)]
    assert set(names) <= set(NAMES)


@pytest.mark.parametrize(
    "name", ["", ".", "a", "a.b.0", "a-1", "a.1-", "a.--1", "a.-", "a.-0", "a?b", "a..b"]
)
def test_other_names_are_no_patterns(name: str) -> None:
    assert not is_pattern(name)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("layers.{0..12}", r"'layers.{0..12}' asks for 12, and there are '0 to 11'"),
        ("layers.{-13..3}", r"asks for -13"),
        ("layers.-13", r"'layers.-13' asks for -13"),
        ("stage{1..3}", r"'stage{1..3}' asks for 3, and there are '1 to 2', '10'"),
        ("**.{5..20}", r"asks for 20"),
    ],
)
def test_a_number_that_is_not_there_is_an_error_that_says_which_are(pattern: str, message: str) -> None:
    with pytest.raises(UnknownModuleError) as error:
        expand(pattern, NAMES)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "pattern",
    [
        "layers.{0}x{1}",
        "layers.{",
        "layers.}",
        "layers.{{0..1}}",
        "layers.{0..1}*",
        "layers.0}",
        "**.{a",
        "{x}y{",
    ],
)
def test_braces_that_are_no_range_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"a range is written \{first\.\.last\}"):
        expand(pattern, NAMES)


@pytest.mark.parametrize(
    "text", ["", "0-5", "0..", "..5", "0...5", "a..b", "0..5..0", "0..5..-1", "1.5", "+1", "0..1..2..3"]
)
def test_a_range_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="neither a number nor a range"):
        expand(f"layers.{{{text}}}", NAMES)
    with pytest.raises(ValueError, match="neither a number nor a range"):
        positions(text, range(6), "what")


def test_a_range_does_not_run_backwards() -> None:
    with pytest.raises(ValueError, match=r"'layers\.\{5\.\.0\}' ends before it begins: from 5 to 0"):
        expand("layers.{5..0}", NAMES)


def test_a_gap_within_a_range_is_passed_over_and_its_ends_must_be_there() -> None:
    names = ["a", "a.0", "a.3", "a.4", "a.9", "a.x"]
    assert expand("a.{0..9}", names) == ["a.0", "a.3", "a.4", "a.9"]
    assert expand("a.{0..9..3}", names) == ["a.0", "a.3", "a.9"]
    assert expand("a.{-2..-1}", names) == ["a.4", "a.9"]
    with pytest.raises(UnknownModuleError, match=r"asks for 5, and there are '0', '3 to 4', '9'"):
        expand("a.{0..5}", names)


def test_a_component_that_is_a_name_is_that_name() -> None:
    names = ["a", "a.*", "a.b", "a.-1", "a.0", "a.{0}", "a.**", "a.**.c", "a.b.c"]
    assert expand("a.-1", names) == ["a.-1"]
    assert expand("a.{0}", names) == ["a.{0}"]
    assert expand("*.*", names) == ["a.*"]
    assert expand("a.**.c", names) == ["a.**.c"]


def test_many_stars_end_soon() -> None:
    names = ["a" * 40, ".".join("a" * 40)]
    assert expand("*a" * 30 + "b", names) == []
    assert expand(".".join(["**"] * 500), ["a", "a.b", "a.b.c"]) == ["a", "a.b", "a.b.c"]
    assert expand(".".join(["**", "*"] * 200), ["a", "a.b"]) == []


PART = st.text("ab1", min_size=1, max_size=3)
TREES = st.lists(st.lists(PART, min_size=1, max_size=3).map(".".join), max_size=12).map(
    lambda leaves: list(
        dict.fromkeys(
            ".".join(leaf.split(".")[: n + 1]) for leaf in leaves for n in range(leaf.count(".") + 1)
        )
    )
)
GLOB = st.lists(st.just("**") | st.text("ab1*", min_size=1, max_size=4), min_size=1, max_size=3).map(".".join)


def as_regex(glob: str) -> str:
    """A glob without braces as a regular expression over names that begin with a dot."""
    parts = glob.split(".")
    return "".join(
        r"(?:\.[^.]+)*" if part == "**" else r"\." + re.escape(part).replace(r"\*", "[^.]*") for part in parts
    )


@given(GLOB, TREES)
def test_globs_agree_with_a_regular_expression(glob: str, names: list[str]) -> None:
    expected = [name for name in names if re.fullmatch(as_regex(glob), f".{name}")]
    assert expand(glob, names) == expected


@given(st.integers(-12, 12), st.integers(-12, 12), st.integers(1, 5))
def test_ranges_agree_with_pythons(first: int, last: int, step: int) -> None:
    everything = list(range(8))
    begin, end = first % 8 if -8 <= first < 8 else None, last % 8 if -8 <= last < 8 else None
    text = f"{first}..{last}..{step}"
    if begin is None or end is None:
        with pytest.raises(UnknownModuleError):
            positions(text, everything, "what")
    elif begin > end:
        with pytest.raises(ValueError, match="ends before it begins"):
            positions(text, everything, "what")
    else:
        assert positions(text, everything, "what") == everything[begin : end + 1 : step]


@given(st.text("ab.*{}-10", max_size=20), TREES)
def test_no_text_escapes_with_another_error(text: str, names: list[str]) -> None:
    try:
        found = expand(text, names)
    except (ValueError, KeyError):
        return
    assert found == [name for name in names if name in set(found)]
