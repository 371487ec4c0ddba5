"""Text recipes at the size of their papers, looked at without weights; and that results are those of their recipes."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

import softs_lightning.recipes
from softs_lightning.config import arms, check
from softs_lightning.explain import explain_recipe
from softs_lightning.report import Result
from tests.test_config import composed

pytestmark = pytest.mark.slow

FOLDER = Path(softs_lightning.recipes.__file__).parent

# What the papers' models have: parameters of the student, of the teacher, and where that stops.
PAPERS = {
    "sentence-embeddings": ("67,352,064", "124,645,632", "encoder.layer.11"),
    "minilm-task-agnostic": ("22,565,376", "109,482,240", "encoder.layer.11.attention.self.value"),
    "tinybert-two-stage": ("14,255,096", "108,897,800", "head"),
    "distilbert-init": ("66,987,066", "109,514,298", "cls.predictions.transform"),
    "layerwise": ("66,364,416", "109,482,240", "encoder.layer.11"),
    "causal-lm": ("124,439,808", "1,557,611,200", "lm_head"),
    "causal-lm-pretrained": ("81,912,576", "124,439,808", "lm_head"),
}


@pytest.mark.parametrize("name", PAPERS)
def test_a_paper_setting_is_explained_without_weights(name: str) -> None:
    recipe = composed(f"recipe={name}", "+scale=paper")
    check(recipe)
    if (
        recipe.teacher._target_ == "softs_lightning.Pretrained"
    ):  # nothing is left of the small teacher's options
        assert set(recipe.teacher) == {"_target_", "name", "model"}
    text = explain_recipe(recipe)
    student, teacher, stop = PAPERS[name]
    assert re.search(rf"^student .*, {student} parameters$", text, re.MULTILINE), text
    assert re.search(rf"^teacher .*, {teacher} parameters$", text, re.MULTILINE), text
    assert f"The teacher's forward stops at {stop}:" in text


@pytest.mark.parametrize("file", sorted((FOLDER / "results").glob("*.json")), ids=lambda file: file.stem)
def test_results_are_those_of_the_recipe(file: Path) -> None:
    said = file.read_text(encoding="utf-8")
    found = Result.from_json(said)
    last = json.loads(said)["command"].rpartition("&&")[2]
    command, *arguments = shlex.split(last)
    assert command == "softs-distill"
    recipe = composed(*arguments)
    assert [arm.name for arm in found.arms] == list(arms(recipe))
    others = recipe.judge.get("others") or {}
    assert [measure.name for measure in found.measures] == [recipe.judge.name, *others]
    assert found.headline.lower is bool(recipe.judge.get("lower", False))
    assert len(found.seeds) >= 3 or found.recipe == "digits"
    assert found.headline.better(
        found.teacher[found.headline.name], sum(found.alone.of(found.headline)) / len(found.seeds)
    )


@pytest.mark.parametrize("name", PAPERS)
def test_a_recipe_quotes_only_what_its_results_say(name: str) -> None:
    text = (FOLDER / "recipe" / f"{name}.yaml").read_text(encoding="utf-8")
    header = text.partition("defaults:")[0]
    file = FOLDER / "results" / f"{name}.json"
    assert (f"recipes/results/{name}.json" in header) is file.exists()
    quoted = re.findall(r"\d+\.\d+ ± \d+\.\d+", header)
    if file.exists():
        found = Result.from_json(file.read_text(encoding="utf-8"))
        said = {measure.text(arm.of(measure)) for arm in found.arms for measure in found.measures}
        assert set(quoted) <= said
    else:
        assert quoted == []
        assert "not been measured" in header
