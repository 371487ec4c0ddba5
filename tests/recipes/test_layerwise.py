"""One layer after another: where the teacher stops in each stage, and what that saves."""

from __future__ import annotations

import pytest

from softs_lightning.config import arms
from softs_lightning.explain import examine
from tests.test_config import composed

pytestmark = pytest.mark.slow


def test_each_stage_runs_two_more_layers_of_the_teacher() -> None:
    recipe = composed("recipe=layerwise", "data.batch_size=2", "data.max_length=8")
    (plan,) = examine(arms(recipe)["layer after layer"]).plans
    assert [(stage.start, stage.pairs) for stage in plan.stages] == [
        (0, ("first",)),
        (60, ("second",)),
        (120, ("third",)),
        (180, ()),
    ]
    assert [cost.stop for cost in plan.costs] == ["encoder.layer.1", "encoder.layer.3", "encoder.layer.5"]
    first, second, third = (cost.used for cost in plan.costs)
    assert (second, third) == (2 * first, 3 * first)  # a layer costs what another does
    assert str(plan.stages[0]).endswith("the teacher stops at encoder.layer.1: 66.7 % saved.")
    assert plan.stages[3].cost is None
    assert recipe.trainer.limit_train_batches == 180


def test_stacked_layers_go_on_learning() -> None:
    recipe = composed("recipe=layerwise", "data.batch_size=2", "data.max_length=8")
    (plan,) = examine(arms(recipe)["stacked"]).plans
    assert [stage.pairs for stage in plan.stages[:3]] == [
        ("first",),
        ("first", "second"),
        ("first", "second", "third"),
    ]
    assert [cost.stop for cost in plan.costs] == ["encoder.layer.1", "encoder.layer.3", "encoder.layer.5"]


def test_all_at_once_has_no_stages() -> None:
    recipe = composed("recipe=layerwise", "data.batch_size=2", "data.max_length=8")
    (plan,) = examine(arms(recipe)["all at once"]).plans
    assert plan.stages == ()
    assert [cost.stop for cost in plan.costs] == ["encoder.layer.5"]
