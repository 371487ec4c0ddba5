"""What a recipe may say, and how it is refused."""

from __future__ import annotations

import inspect
import shlex
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from softs_lightning import DistillationCallback, Pair, config
from softs_lightning.catalog import recipes
from softs_lightning.compose import WRITE_NOTHING, compose
from softs_lightning.config import Refusal, build, check, in_braces, nearest


def number(*, real: float = 0.0, imag: float = 0.0) -> complex:
    return complex(real, imag)


def composed(*arguments: str) -> Any:
    seen: list[Any] = []
    compose([*arguments, *WRITE_NOTHING], seen.append)
    return seen[0]


@pytest.fixture(scope="module")
def digits() -> dict[str, Any]:
    plain = OmegaConf.to_container(composed())
    assert isinstance(plain, dict)
    return plain  # type: ignore[return-value]


def refusal(recipe: dict[str, Any]) -> str:
    with pytest.raises(Refusal) as raised:
        check(OmegaConf.create(recipe))
    return str(raised.value)


@pytest.mark.parametrize("name", sorted(recipes()))
def test_every_packaged_recipe_passes(name: str) -> None:
    check(composed(f"recipe={name}"))


def test_the_primary_config_has_exactly_the_sections_that_are_checked(digits: dict[str, Any]) -> None:
    assert set(digits) - set(config.NAMED) == set(config.SECTIONS)


def test_pair_options_are_those_of_the_class() -> None:
    assert set(inspect.signature(Pair).parameters) == set(config.PAIR_OPTIONS)


def test_the_callback_group_offers_only_options_of_the_callback(digits: dict[str, Any]) -> None:
    offered = set(digits["callbacks"]["distill"]) - {"_target_"}
    assert offered <= set(inspect.signature(DistillationCallback).parameters)


@pytest.mark.parametrize("section", config.SECTIONS)
def test_a_missing_section_is_named(digits: dict[str, Any], section: str) -> None:
    assert f"does not say {section!r}" in refusal({k: v for k, v in digits.items() if k != section})
    assert f"does not say {section!r}" in refusal({**digits, section: "???"})


def test_a_misspelt_section_gets_the_nearest_name(digits: dict[str, Any]) -> None:
    assert "'studnet', which nothing reads. Did you mean student?" in refusal({**digits, "studnet": {}})


@pytest.mark.parametrize("seeds", [3, [], [0, 0], [True], ["0"], [0.5], [-1], None])
def test_seeds_are_different_whole_numbers(digits: dict[str, Any], seeds: Any) -> None:
    assert "'seeds' must be different whole numbers" in refusal({**digits, "seeds": seeds})


@pytest.mark.parametrize("threads", [0, -1, 1.5, "2", True])
def test_threads_are_a_positive_number(digits: dict[str, Any], threads: Any) -> None:
    assert "'threads' must be a whole number" in refusal({**digits, "threads": threads})


@pytest.mark.parametrize("key", ["data", "teacher", "student", "trainer"])
def test_what_is_built_names_its_target(digits: dict[str, Any], key: str) -> None:
    assert f"{key!r} must name what to build in _target_" in refusal({**digits, key: {"width": 3}})


@pytest.mark.parametrize("pairs", [[], {}, None, "outputs[a]"])
def test_pairs_are_a_list_of_at_least_one(digits: dict[str, Any], pairs: Any) -> None:
    assert "'pairs' must be a list of at least one pair" in refusal({**digits, "pairs": pairs})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"teacher": "outputs[early"}, "pairs.0.teacher: this product_id is not understood"),
        ({"student": "output[network]"}, "pairs.0.student: this product_id is not understood"),
        ({"student": "outputs[]"}, "pairs.0.student selects nothing"),
        ({"student": 3}, "pairs.0.student: a product_id is a string"),
        ({"student": "outputs[a|b]"}, "selects 1 of the teacher's activations"),
        ({"wieght": 2.0}, "an option 'wieght'. Did you mean weight?"),
    ],
)
def test_a_pair_is_refused_where_it_is_wrong(digits: dict[str, Any], change: Any, message: str) -> None:
    recipe = deepcopy(digits)
    recipe["pairs"][0].update(change)
    assert message in refusal(recipe)


@pytest.mark.parametrize("option", ["teacher", "student", "loss"])
def test_a_pair_says_what_it_compares(digits: dict[str, Any], option: str) -> None:
    recipe = deepcopy(digits)
    del recipe["pairs"][0][option]
    assert f"pairs.0 does not say {option!r}" in refusal(recipe)


def test_a_judge_has_a_name_and_a_score(digits: dict[str, Any]) -> None:
    assert "'judge' must have a name, a score" in refusal({**digits, "judge": {"name": "accuracy"}})


def test_callbacks_are_named(digits: dict[str, Any]) -> None:
    assert "'callbacks' must be named callbacks" in refusal({**digits, "callbacks": [1]})


@pytest.mark.parametrize("logger", [[1], None, "csv"])
def test_loggers_are_named(digits: dict[str, Any], logger: Any) -> None:
    assert "'logger' must be named loggers" in refusal({**digits, "logger": logger})


@pytest.mark.parametrize(
    ("choice", "names"),
    [("csv", ["csv"]), ("tensorboard", ["tensorboard"]), ("both", ["csv", "tensorboard"])],
)
def test_the_logger_group_names_what_it_adds(choice: str, names: list[str]) -> None:
    assert sorted(composed(f"logger={choice}").logger) == names


def test_an_unresolved_reference_is_refused(digits: dict[str, Any]) -> None:
    assert refusal({**digits, "student": {"_target_": "x", "width": "${widht}"}}) == (
        "The recipe is not complete: student.width: Interpolation key 'widht' not found"
    )


def test_an_argument_without_a_value_is_named(digits: dict[str, Any]) -> None:
    with pytest.raises(Refusal) as raised:
        check(composed("loss@losses.scores=vid"))
    assert str(raised.value) == (
        "The recipe is not complete: losses.scores.student_features has no value yet. "
        "Give it one: losses.scores.student_features=..."
    )


def test_a_recipe_in_the_wrong_place_is_told_how_to_begin(digits: dict[str, Any]) -> None:
    assert "must begin with the line '# @package _global_'" in refusal({**digits, "recipe": {"seeds": [1]}})


def test_build_says_where_and_why() -> None:
    with pytest.raises(Refusal, match=r"student \(builtins.complex\): TypeError: .*'imaginary'"):
        build(OmegaConf.create({"_target_": "builtins.complex", "imaginary": 1}), "student")
    with pytest.raises(Refusal, match=r"unexpected keyword argument 'imga'. Did you mean imag\?"):
        build(OmegaConf.create({"_target_": "tests.test_config.number", "imga": 1}), "student")
    with pytest.raises(Refusal, match=r"data \(nowhere.Data\): .*nowhere"):
        build(OmegaConf.create({"_target_": "nowhere.Data"}), "data")


def test_build_hands_over_plain_containers() -> None:
    made = build(OmegaConf.create({"_target_": "builtins.dict", "a": [1, {"b": 2}]}), "x")
    assert made == {"a": [1, {"b": 2}]}
    assert type(made["a"]) is list
    assert type(made["a"][1]) is dict


def test_nearest_names_close_ones_or_all() -> None:
    assert nearest("digit", ["digits", "other"]) == "Did you mean digits?"
    assert nearest("zzz", ["b", "a"]) == "There are: a, b."
    assert nearest("zzz", []) == "There are none."


def test_arms_change_the_recipe_and_leave_it_as_it_is(digits: dict[str, Any]) -> None:
    recipe = OmegaConf.create({**digits, "arms": {"longer": {"trainer": {"max_epochs": 7}}, "alone": {}}})
    check(recipe)
    found = config.arms(recipe)
    assert list(found) == ["alone", "longer"]
    assert (found["alone"].trainer.max_epochs, found["longer"].trainer.max_epochs) == (1, 7)
    assert found["longer"].pairs == recipe.pairs
    assert recipe.trainer.max_epochs == 1
    assert list(config.arms(OmegaConf.create(digits))) == ["alone", "distilled"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"arms": 3}, "'arms' must be named changes"),
        ({"arms": {"a": {"pars": []}}}, "arms.a has a node 'pars', which nothing reads. Did you mean pairs?"),
        ({"arms": {"a": {"seeds": [1]}}}, "arms.a changes 'seeds'"),
        ({"arms": {"a": {"pairs": []}}}, "arms.a: 'pairs' must be a list of at least one pair"),
        (
            {"judge": {"name": "x", "score": 1, "lowr": True}},
            "judge has an option 'lowr'. Did you mean lower?",
        ),
        ({"judge": {"name": "x", "score": 1, "lower": "yes"}}, "judge.lower must be true or false"),
        ({"judge": {"name": "x", "score": 1, "others": ["y"]}}, "judge.others must be named measures"),
        ({"judge": {"name": "x", "score": 1, "others": {"y": {"unti": "%"}}}}, "Did you mean unit?"),
    ],
)
def test_arms_and_measures_are_checked(digits: dict[str, Any], changes: dict[str, Any], said: str) -> None:
    assert said in refusal({**digits, **changes})


@pytest.mark.parametrize("written", ["scale=paper", "+scale=paper"])
def test_a_scale_is_found_beside_its_recipe(tmp_path: Any, written: str) -> None:
    folder = tmp_path / "scale" / "digits"
    folder.mkdir(parents=True)
    (folder / "paper.yaml").write_text(
        "# @package _global_\ndefaults: [override /trainer: gpu, _self_]\ndata: {labels: 300}\n"
    )
    found = composed("--config-dir", str(tmp_path), written, "data.batch_size=7")
    assert (found.data.labels, found.data.batch_size, found.trainer.accelerator) == (300, 7, "gpu")
    with pytest.raises(Refusal, match=r"digits has no scale 'papr'. Did you mean paper\?"):
        composed("--config-dir", str(tmp_path), "+scale=papr")


def test_a_recipe_without_scales_says_so(tmp_path: Any) -> None:
    (tmp_path / "recipe").mkdir()
    (tmp_path / "recipe" / "own.yaml").write_text("# @package _global_\ndefaults: [/trainer: cpu]\n")
    with pytest.raises(Refusal, match="the recipe own has no settings at another scale"):
        composed("--config-dir", str(tmp_path), "recipe=own", "+scale=paper")


# Arms whose names are more than letters and digits: Hydra takes them in braces only.

STEPS = "{trainer: {max_steps: 5}}"
LIST = "To leave it out, or to change an element of a list, copy the recipe"


@pytest.mark.parametrize(
    ("argument", "name", "instead"),
    [
        ("arms.scores and states.trainer.max_steps=5", "scores and states", STEPS),
        ("arms.'scores and states'.trainer.max_steps=5", "scores and states", STEPS),
        ('+arms."scores and states".trainer={max_steps: 5}', "scores and states", STEPS),
        ("arms.scores_and_states.trainer.max_steps=5", "scores and states", STEPS),
        ("arms.alone, twice the steps.trainer.max_steps=5", "alone, twice the steps", STEPS),
        ("arms.alone_twice_the_steps.trainer.max_steps=5", "alone, twice the steps", STEPS),
        ("arms[scores and states].trainer.max_steps=5", "scores and states", STEPS),
        ('"arms.scores and states".trainer.max_steps=5', "scores and states", STEPS),
        ("'arms.[scores and states].trainer.max_steps=5'", "scores and states", STEPS),
        ("arms.Scores And States.trainer.max_steps=5", "scores and states", STEPS),
        ("arms.scores and statez.trainer.max_steps=5", "scores and states", STEPS),
        ("++arms.scores and stats.trainer.max_steps=5", "scores and states", STEPS),
        ("arms.score_and_states.trainer.max_steps=5", "scores and states", STEPS),
        ("arms.alone, twice as many steps.trainer.max_steps=5", "alone, twice the steps", STEPS),
        ("arms.on polcy.pairs.0.weight=2", "on policy", None),
        ("~arms.on polcy", "on policy", None),
        ("arms.on policy.pairs.0.weight=2", "on policy", None),
        ("~arms.on policy", "on policy", None),
    ],
)
def test_how_an_arm_is_named_on_the_command_line_is_said_and_works(
    argument: str, name: str, instead: str | None
) -> None:
    with pytest.raises(
        Refusal, match=f"Hydra takes no key with the name of the arm '{name}' in it"
    ) as raised:
        composed("recipe=causal-lm", argument)
    if instead is None:
        assert LIST in str(raised.value)
        return
    (written,) = shlex.split(str(raised.value).partition("Write: ")[2])
    before, after = composed("recipe=causal-lm").arms, composed("recipe=causal-lm", written).arms
    assert list(after) == list(before)
    assert after[name].trainer.max_steps == 5
    del after[name].trainer.max_steps
    assert {key: node for key, node in after[name].items() if node} == {
        key: node for key, node in before[name].items() if key != "trainer"
    }
    assert all(after[other] == before[other] for other in before if other != name)


def test_a_misspelt_arm_is_answered_with_the_nearest() -> None:
    with pytest.raises(
        Refusal, match=r"no arm 'scores and statez'\. Did you mean scores and states\? Hydra takes no key"
    ):
        composed("recipe=causal-lm-pretrained", "arms.scores and statez.trainer.max_steps=4")
    with pytest.raises(Refusal, match=r"no arm 'sores'\. Did you mean scores\?") as raised:
        composed("recipe=causal-lm", "arms.sores.trainer.max_steps=4")
    (written,) = shlex.split(str(raised.value).partition("Write: ")[2])
    assert composed("recipe=causal-lm", written).arms.scores.trainer.max_steps == 4
    with pytest.raises(Refusal, match=r"no arm 'no such thing'\. There are: .*scores and states.*'\+\+arms="):
        composed("recipe=causal-lm", "arms.no such thing.trainer.max_steps=4")


def test_what_is_wrong_behind_an_arm_is_not_blamed_on_it() -> None:
    with pytest.raises(Refusal, match=r"no option 'arms\.scores\.pars'. Did you mean arms\.scores\.pairs"):
        composed("recipe=causal-lm-pretrained", "arms.scores.pars=4")
    with pytest.raises(Refusal, match="quoted twice"):
        composed("recipe=causal-lm-pretrained", "arms.scores.pairs.0.teacher=outputs[a")


def test_an_arm_is_not_doubled_by_another_spelling() -> None:
    with pytest.raises(
        Refusal, match=r"has both 'on policy' and 'on_policy'.*'\+\+arms=\{on policy: \{\.\.\."
    ):
        check(composed("recipe=causal-lm", "+arms.on_policy.trainer.max_steps=5"))
    check(composed("recipe=causal-lm", "+arms.another.trainer.max_steps=5"))


@pytest.mark.parametrize("name", ["a, b: c = (d)", "[e] {f}", "back\\slash", "50 % more"])
def test_an_arm_of_nearly_any_name_is_changed_in_braces(name: str) -> None:
    (written,) = shlex.split(in_braces(name, STEPS))
    assert composed("recipe=causal-lm", written).arms[name] == {"trainer": {"max_steps": 5}}


@pytest.mark.parametrize("name", ["the teacher's", "größer als"])
def test_an_arm_that_hydra_cannot_spell_is_for_a_copy(name: str, tmp_path: Path) -> None:
    (tmp_path / "recipe").mkdir()
    text = f'# @package _global_\ndefaults: [/recipe/digits, _self_]\narms: {{"{name}": {{}}}}\n'
    (tmp_path / "recipe" / "own.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(Refusal, match=f"name of the arm .{name}. in it. Copy the recipe"):
        composed("--config-dir", str(tmp_path), "recipe=own", f"arms.{name}.trainer.max_steps=5")


def test_a_second_mistake_does_not_hide_the_first() -> None:
    with pytest.raises(Refusal, match=r"arms\.on policy\.trainer\.max_steps"):
        composed("recipe=causal-lm", "trainer=tpu", "arms.on policy.trainer.max_steps=5")
