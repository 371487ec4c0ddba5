"""What a recipe's product_ids select, found without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from softs_lightning.config import Refusal
from softs_lightning.explain import examine, explain_recipe
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
    stop, how = text.splitlines()[-2:]
    assert stop.endswith(f"{saved:.1f} % saved.")
    assert how.startswith("Found by a scan of the teacher")


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
        examine(composed(override))


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
