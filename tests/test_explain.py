"""What a recipe's product_ids select, found without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from softs_lightning import ProductSpec
from softs_lightning.config import ALONE, Refusal, arms, build
from softs_lightning.explain import Plan, distils, examine, explain_recipe, parameters
from softs_lightning.pretrained import without_weights
from softs_lightning.recipes.digits import DigitsStudent
from softs_lightning.sketch import Sketch
from tests.test_config import composed

BATCH = 250


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SOFTS_LIGHTNING_CACHE", str(tmp_path))
    return tmp_path


def conv(inputs: int, outputs: int, side: int) -> int:
    """Operations of a 3×3 convolution: two for each weight at each place."""
    return 2 * 9 * inputs * outputs * side * side


# The digits teacher by hand: stages at 8×8, 8×8, 4×4, 4×4, then the two heads.
TRUNK = conv(1, 24, 8) + conv(24, 48, 8)
EARLY = 2 * 48 * 16 * 10
REST = conv(48, 64, 4) + conv(64, 96, 4) + 2 * 96 * 16 * 64 + 2 * 64 * 10


def test_the_cost_is_that_counted_by_hand() -> None:
    (plan,) = examine(composed()).plans
    assert plan.cost.full == BATCH * (TRUNK + EARLY + REST)
    assert plan.cost.used == BATCH * (TRUNK + EARLY)
    assert plan.cost.stop == "early"


def test_the_last_product_decides_where_the_teacher_stops() -> None:
    (plan,) = examine(composed("pairs.0.teacher='outputs[head]'")).plans
    assert (plan.cost.stop, plan.cost.saved) == ("head", 0.0)
    (plan,) = examine(composed("callbacks.distill.early_exit=false")).plans
    assert (plan.cost.stop, plan.cost.saved) == (None, 0.0)


def test_both_sides_are_shown_with_their_shapes() -> None:
    seen = examine(composed("data.batch_size=20"))
    ((pair, theirs, ours),) = seen.plans[0].pairs
    assert pair.name == "scores"
    assert [(s.product, s.module, s.value) for s in theirs] == [
        ("outputs[early]", "Sequential", "[20, 10] float32")
    ]
    assert [(s.product, s.module, s.value) for s in ours] == [
        ("outputs[network]", "Sequential", "[20, 10] float32")
    ]


def test_parameters_are_counted() -> None:
    seen = examine(composed())
    assert seen.student_parameters == (9 * 8 + 8) + (9 * 8 * 16 + 16) + (64 * 10 + 10)
    assert seen.plans[0].teacher_parameters == 200_932


def test_nothing_is_trained(cache: Path) -> None:
    examine(composed())
    assert list(cache.iterdir()) == []


def test_the_text_holds_all_of_it() -> None:
    text = explain_recipe(composed())
    assert "student  DigitsStudent, 1,898 parameters" in text
    assert "pair scores: KLDivergence, weight 0.9, no projector" in text
    saved = 100 * REST / (TRUNK + EARLY + REST)
    stop, how, how_the_student = text.splitlines()[-3:]
    assert stop.endswith(f"{saved:.1f} % saved.")
    assert how.startswith("Found by a scan of the teacher")
    assert how_the_student == "Of the student's step nothing was computed, and no weights of it were made."


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("recipe=causal-lm",),
        ("recipe=fashion-features",),
        ("recipe=multi-teacher",),
        ("recipe=cross-architecture",),
    ],
    ids=lambda arguments: " ".join(arguments) or "digits",
)
def test_a_sketch_of_the_student_shows_what_its_step_shows(arguments: tuple[str, ...]) -> None:
    recipe = composed(*arguments)
    for name, arm in arms(recipe).items():
        if name == ALONE or not distils(arm):
            continue
        with without_weights():
            real, sketched = examine(arm), examine(arm, computing=False)
        assert (sketched.student, sketched.student_parameters) == (real.student, real.student_parameters)
        assert sketched.ran is None
        assert [_rows(plan) for plan in sketched.plans] == [_rows(plan) for plan in real.plans]
        assert [plan.untried for plan in sketched.plans] == [plan.untried for plan in real.plans]


def _rows(plan: Plan) -> Any:
    return [(pair.name, str(pair.student), theirs, ours) for pair, theirs, ours in plan.pairs]


def test_a_large_student_takes_no_memory() -> None:
    """GPT-2 on 4,096 tokens: the scores alone are 823 MB, the weights 498."""
    recipe = composed("recipe=causal-lm", "+scale=paper")
    tokens = torch.zeros(recipe.data.batch_size, recipe.data.length, dtype=torch.long)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile, without_weights():
        student = Sketch(lambda: build(recipe.student, "student"))
        spec = ProductSpec.parse(recipe.pairs[0].student)
        (value,) = student.rehearse({"input_ids": tokens, "labels": tokens}, spec).select()
    assert value.shape == (8, 512, 768)
    assert sum(max(event.self_cpu_memory_usage, 0) for event in profile.events()) < 1e6
    assert parameters(student.module) == 124_439_808


def test_a_narrower_student_is_cut_without_weights() -> None:
    text = explain_recipe(composed("recipe=minilm-task-agnostic", "arms=null", "data.news=false"))
    assert text.endswith("Of the student's step nothing was computed, and no weights of it were made.")
    assert text.count(", 192] float32") == 3


class Guessing(DigitsStudent):
    """Its step looks at values, and so does its making."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.share = torch.ones(1).item()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch["image"].sum() > -1e9:
            batch_idx += 1
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss


def test_a_student_that_has_to_run_is_said_to() -> None:
    text = explain_recipe(composed("student._target_=tests.test_explain.Guessing"))
    last = text.splitlines()[-1]
    assert last.startswith(
        "The student's step had to run for real, a scan of it failed: GuardOnDataDependentSymNode: "
    )
    (seen,) = [examine(composed("student._target_=tests.test_explain.Guessing"), computing=False)]
    assert seen.made == "RuntimeError: Tensor.item() cannot be called on meta tensors"


def test_losses_that_read_heads_are_tried_without_weights() -> None:
    recipe = composed("recipe=causal-lm", "arms=null")
    assert "not tried" not in explain_recipe(recipe)
    with pytest.raises(
        Refusal, match=r"pair 'scores': .*teacher hidden states have 512 features, its head takes"
    ):
        explain_recipe(composed("recipe=causal-lm", "arms=null", "pairs.0.teacher='outputs[model.lm_head]'"))
    with pytest.warns(UserWarning, match="the student's head has 600 entries, the teacher's 512"):
        explain_recipe(composed("recipe=causal-lm", "arms=null", "student.shape.vocab_size=600"))


def test_a_pair_is_headed_by_the_name_of_its_function() -> None:
    huber = "_target_: torch.nn.functional.huber_loss, _partial_: true"
    text = explain_recipe(composed(f"pairs.0.loss={{{huber}, delta: 2.0}}"))
    assert "pair scores: huber_loss, weight" in text


def test_a_scheduled_weight_and_a_selector_are_shown_as_they_are() -> None:
    text = explain_recipe(
        composed(
            "pairs.0.weight={_target_: softs_lightning.schedules.Until, value: 1, stop: 9}",
            "pairs.0.teacher='outputs[head.{3..3}]'",
            "pairs.0.student='outputs[network.{6..6}]'",
        )
    )
    assert "weight Until(stop=9, value=1" in text
    assert "teacher  outputs[head.3]" in text
    assert "student  outputs[network.6]" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("pairs.0.teacher='outputs[erly]'", "teacher: DigitsTeacher has no module named 'erly'.*'early'"),
        ("pairs.0.student='outputs[net]'", "student: DigitsStudent has no module named 'net'.*'network'"),
        ("pairs.0.teacher='outputs[early#3]'", "teacher: .*#3"),
        ("data.batch_size=200000", "the training data holds not one batch"),
        *(
            (f"{data} data.batch_size=1000000", "the training data holds not one batch")
            for data in (
                "recipe=fashion-features",
                "recipe=cross-architecture +scale=paper",
                "recipe=distilbert-init",
            )
        ),
        (
            "recipe=fashion-features data.images=900 data.batch_size=901",
            "batch_size=901, and 900 to train on",
        ),
        (
            "recipe=fashion-features data.images=null data.validation=59990 data.batch_size=11",
            "and 10 to train",
        ),
        (
            "recipe=fashion-features data.images=60000",
            "has 60,000 images to train on, too few for images=60000",
        ),
        ("data.labels=7", "data .*labels=7: give a multiple of ten"),
        ("~callbacks.distill", "None of the recipe's callbacks distils"),
        ("+student.depth=3", "student .*'depth'"),
        (
            "pairs.0.teacher='outputs[head.0]'",
            r"pair 'scores': .* \[250, 10\], .* \[250, 1536\]\. Add or change",
        ),
        ("+pairs.0.mask=valid", "pair 'scores': the batch, .*, has no mask 'valid'"),
    ],
)
def test_what_does_not_fit_is_refused(override: str, message: str) -> None:
    with pytest.raises(Refusal, match=message):
        examine(composed(*override.split()))


def test_the_sentence_teacher_stops_behind_its_fourth_layer() -> None:
    earlier = (
        "pairs.0.teacher='outputs[encoder.layer.1|encoder.layer.3]'",
        "pairs.1.teacher='outputs[encoder.layer.3]'",
    )
    (plan,) = examine(composed("recipe=sentence-embeddings", "data.batch_size=4", *earlier)).plans
    assert plan.cost.stop == "encoder.layer.3"
    # Six equal layers and a pooler on one token: two sixths of the layers' work is saved.
    assert plan.cost.saved == pytest.approx(1 / 3, abs=0.01)
    assert [s.product for s in _ours(plan)] == [
        "outputs[encoder.encoder.layer.0!0]",
        "outputs[encoder.encoder.layer.1!0]",
    ]


def _ours(plan: Any) -> Any:
    return plan.pairs[0][2]
