"""The recipe of causal language models from its first line to its table, on a part of the text and few steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from softs_lightning.config import check
from softs_lightning.experiment import run_recipe
from softs_lightning.recipes.causal_lm import Documentation, LanguageModel, nats, paragraphs
from softs_lightning.report import Arm, Result
from tests.test_config import composed

pytestmark = pytest.mark.slow

SMALL = ("hidden_size=64", "intermediate_size=128")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    place = tmp_path_factory.mktemp("run")
    text = place / "text.txt"
    text.write_text("\n".join(" ".join(p.split()) for p in paragraphs()[:500]), encoding="utf-8")
    recipe = composed(
        "recipe=causal-lm",
        *(f"data.text={text}", "data.length=32", "seeds=[0,1]"),
        *(f"+teacher.data.text={text}", "teacher.data.length=32", f"teacher.cache_dir={place / 'cache'}"),
        *(f"teacher.module.shape.{size}" for size in SMALL),
        *("teacher.trainer.max_steps=250", "+teacher.trainer.enable_progress_bar=false"),
        *("trainer.max_steps=40", "trainer.enable_progress_bar=false"),
    )
    recipe.arms["on policy"].callbacks.on_policy.start = 20
    recipe.arms["alone, twice the steps"].trainer.max_steps = 80
    check(recipe)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOFTS_LIGHTNING_CACHE", str(place / "cache"))
        return run_recipe(recipe, name="causal-lm", directory=place), place


def arms(found: Result) -> dict[str, Arm]:
    return {arm.name: arm for arm in found.arms}


def mean(found: Result, name: str) -> float:
    return sum(arms(found)[name].of(found.headline)) / len(found.seeds)


def test_scores_and_states_teach_more_than_the_text_does(run: tuple[Result, Path]) -> None:
    found, _ = run
    assert found.teacher["nats per token"] < mean(found, "alone") - 0.3
    assert mean(found, "scores") < mean(found, "alone")
    assert mean(found, "scores and states") < mean(found, "alone")


def test_the_teacher_stops_before_its_head_and_only_where_it_is_asked(run: tuple[Result, Path]) -> None:
    stops = {name: [stop.module for stop in arm.stops] for name, arm in arms(run[0]).items()}
    assert stops == {
        "alone": [],
        "scores": ["model.lm_head"],
        "scores and states": ["model.lm_head"],
        "written by the teacher": [],
        "on policy": ["model.lm_head"],
        "alone, twice the steps": [],
    }


def test_the_written_text_goes_on_from_beginnings_of_the_training_text(run: tuple[Result, Path]) -> None:
    (file,) = (run[1] / "cache").glob("written-*.pt")
    written = torch.load(file, weights_only=True)
    train = Documentation(length=32, text=str(run[1] / "text.txt")).train
    assert torch.equal(written[:, :8], train[:, :8])
    assert (written != train).any(dim=1).all()


def test_the_kept_student_scores_what_the_table_says(run: tuple[Result, Path]) -> None:
    found, place = run
    recipe = composed("recipe=causal-lm")
    student = LanguageModel(shape=dict(recipe.student.shape)).eval()
    student.load_state_dict(torch.load(place / "student.ckpt", weights_only=True)["state_dict"])
    data = Documentation(length=32, text=str(place / "text.txt"))
    again = nats(student, data=data, teacher=student)["nats per token"]
    assert again == pytest.approx(arms(found)["scores"].scores[0]["nats per token"], abs=1e-5)
