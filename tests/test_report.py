"""The table, the verdict, the curves."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from softs_lightning.report import (
    Arm,
    Curves,
    Measure,
    Result,
    Stop,
    draw_curve,
    draw_curves,
    read_curves,
    read_metrics,
    write_metrics,
)
from softs_lightning.report.style import colours

ACCURACY = Measure("test accuracy", "%")
LOSS = Measure("nats", "", lower=True)


def arm(name: str, *columns: tuple[float, ...], size: int = 1_898, stops: tuple[Stop, ...] = ()) -> Arm:
    names = [ACCURACY.name, LOSS.name][: len(columns)]
    scores = tuple(dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True))
    return Arm(name, scores, size, stops)


def result(alone: tuple[float, ...], *others: tuple[float, ...], unit: str = "%") -> Result:
    stop = (Stop("early", 0.6755),)
    names = ["distilled"] if len(others) == 1 else [f"way {number}" for number in range(len(others))]
    ways = [arm(name, scores, stops=stop) for name, scores in zip(names, others, strict=True)]
    return Result(
        "digits",
        (Measure(ACCURACY.name, unit),),
        tuple(range(len(alone))),
        {ACCURACY.name: 99.0},
        200_932,
        (arm("alone", alone), *ways),
    )


def both_measures() -> Result:
    return Result(
        "digits",
        (ACCURACY, LOSS),
        (0, 1),
        {ACCURACY.name: 99.0, LOSS.name: 0.1},
        200_932,
        (arm("alone", (80.0, 84.0), (0.9, 1.0)), arm("distilled", (95.0, 97.0), (0.5, 0.55))),
    )


def test_mean_and_spread_are_numpys() -> None:
    alone, distilled = (80.0, 84.5, 79.1), (95.2, 97.0, 96.1)
    found = result(alone, distilled)
    rows = found.rows()
    assert rows[1] == ("teacher", "99.0", "200,932")
    assert rows[2][1] == f"{np.mean(alone):.1f} ± {np.std(alone, ddof=1):.1f}"
    assert rows[3][1] == f"{np.mean(distilled):.1f} ± {np.std(distilled, ddof=1):.1f}"
    assert found.gain(found.arms[1]) == pytest.approx(np.mean(distilled) - np.mean(alone), abs=1e-12)


@pytest.mark.parametrize(
    ("alone", "distilled", "clear"),
    [
        ((80.0, 84.0), (95.0, 97.0), True),
        ((80.0, 84.0), (82.0, 86.0), False),  # every seed gained 2, the spreads add up to 5.7
        ((80.0, 80.0, 80.0), (90.0, 90.0, 79.9), False),  # one seed lost
        ((80.0, 80.1), (70.0, 70.1), False),
        ((80.0,), (95.0,), None),
    ],
)
def test_clear_means_every_seed_and_more_than_both_spreads(
    alone: tuple[float, ...], distilled: tuple[float, ...], clear: bool | None
) -> None:
    found = result(alone, distilled)
    assert found.clear(found.arms[1]) is clear


def test_the_verdict_says_it_in_words() -> None:
    (yes,) = result((80.0, 84.0), (95.0, 97.0)).verdicts()
    assert yes.startswith("Gain: +14.0 percentage points, clear of the seeds' spread (2 of 2 seeds gained;")
    assert "NOT clear" in next(result((80.0, 84.0), (82.0, 86.0)).verdicts())
    assert "single seed" in next(result((80.0,), (95.0,)).verdicts())
    assert next(result((0.4, 0.41), (0.5, 0.51), unit="").verdicts()).startswith("Gain: +0.100, clear")


def test_several_ways_are_judged_by_name() -> None:
    found = result((80.0, 84.0), (95.0, 97.0), (81.0, 84.5))
    first, second = found.verdicts()
    assert first.startswith("way 0: Gain: +14.0 percentage points, clear")
    assert second.startswith("way 1: Gain: +0.8 percentage points, NOT clear")


def test_less_is_better_where_the_measure_says_so() -> None:
    found = both_measures()
    alone, distilled = found.arms
    assert found.gain(distilled, LOSS) == pytest.approx(0.95 - 0.525, abs=1e-12)
    assert found.clear(distilled, LOSS) is True
    worse = Result("x", (LOSS,), (0, 1), {LOSS.name: 0.1}, 1, (distilled, alone))
    assert worse.clear(worse.arms[1]) is False
    assert "Less is better: nats." in found.markdown(files={})
    assert "| student distilled | +14.0 (clear) | +0.425 (clear) |" in found.markdown(files={})


def test_the_stop_says_what_is_saved() -> None:
    assert str(Stop("early", 0.6755)) == "stops at early (67.5 % of its FLOPs saved)"
    assert str(Stop(None, 0.0)) == "runs to its end (0.0 % of its FLOPs saved)"


def test_stops_are_said_once_and_with_names_where_they_differ() -> None:
    assert list(result((1.0,), (2.0,), (3.0,)).stops()) == [
        "The teacher stops at early (67.5 % of its FLOPs saved)."
    ]
    found = result((1.0,), (2.0,))
    late = arm("late", (4.0,), stops=(Stop(None, 0.0),))
    found = Result(
        found.recipe,
        found.measures,
        found.seeds,
        found.teacher,
        found.teacher_parameters,
        (*found.arms, late),
    )
    assert list(found.stops()) == [
        "The teacher stops at early (67.5 % of its FLOPs saved), for distilled.",
        "The teacher runs to its end (0.0 % of its FLOPs saved), for late.",
    ]


def test_the_markdown_holds_the_table_the_verdict_and_each_seed() -> None:
    found = result((80.0, 84.0), (95.0, 97.0))
    text = found.markdown(files={"student.ckpt": "the student"})
    assert next(found.verdicts()) in text
    assert all(f"| {' | '.join(row)} |" in text for row in found.rows())
    assert "| 1 | 84.0 | 97.0 |" in text
    assert "The teacher stops at early (67.5 % of its FLOPs saved)." in text
    assert "- `student.ckpt`: the student" in text


def test_many_measures_stand_one_below_the_other() -> None:
    found = both_measures()
    third = Measure("third")
    ways = tuple(
        Arm(way.name, tuple({**scores, "third": 1.0} for scores in way.scores), way.parameters)
        for way in found.arms
    )
    wide = Result("x", (ACCURACY, LOSS, third), (0, 1), {**found.teacher, "third": 2.0}, 7, ways)
    lines = wide.table().splitlines()
    assert lines[0].split() == ["teacher", "student", "alone", "student", "distilled"]
    assert lines[3].split() == ["third", "2.000", "1.000", "±", "0.000", "1.000", "±", "0.000"]


def test_json_gives_the_result_back() -> None:
    found = both_measures()
    assert Result.from_json(found.to_json()) == found
    assert Result.from_json(result((80.0,), (95.0,)).to_json()) == result((80.0,), (95.0,))


def test_operations_are_kept_and_older_results_have_none() -> None:
    found = both_measures()
    counted = replace(found, teacher_flops=9, arms=(replace(found.arms[0], flops=5), found.arms[1]))
    assert Result.from_json(counted.to_json()) == counted
    old = json.loads(found.to_json())
    del old["teacher_flops"], old["arms"][0]["flops"], old["arms"][1]["flops"]
    assert Result.from_json(json.dumps(old)) == found


def test_a_bar_in_a_name_does_not_break_the_table() -> None:
    assert "| student a\\|b |" in replace(
        result((1.0,), (2.0,)), arms=(arm("alone", (1.0,)), arm("a|b", (2.0,)))
    ).markdown(files={})


@pytest.fixture
def curves(tmp_path: Path) -> Curves:
    for arm, base in (("alone", 10), ("distilled", 20)):
        for seed in (0, 1):
            folder = tmp_path / arm / str(seed)
            folder.mkdir(parents=True)
            rows = [
                "epoch,step,train_loss,val_accuracy",
                "0,9,0.5,",
                f"0,9,,{base + seed}",
                f"0,19,,{base + 2 * seed}",
            ]
            (folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    return read_curves(tmp_path)


def test_curves_are_read_by_metric_student_and_seed(curves: Curves) -> None:
    assert curves["val_accuracy"]["distilled"] == {0: [(9, 20.0), (19, 20.0)], 1: [(9, 21.0), (19, 22.0)]}
    assert curves["train_loss"]["alone"][1] == [(9, 0.5)]
    assert set(curves) == {"train_loss", "val_accuracy"}


def test_the_metrics_table_holds_every_point_once(curves: Curves, tmp_path: Path) -> None:
    write_metrics(curves, tmp_path / "metrics.csv")
    with (tmp_path / "metrics.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert list(rows[0]) == ["student", "seed", "step", "metric", "value"]
    points = {(r["metric"], r["student"], int(r["seed"]), int(r["step"]), float(r["value"])) for r in rows}
    assert points == {
        (metric, arm, seed, step, value)
        for metric, arms in curves.items()
        for arm, seeds in arms.items()
        for seed, series in seeds.items()
        for step, value in series
    }
    assert len(rows) == len(points)


def test_the_picture_shows_mean_and_range_of_validation_metrics(curves: Curves, tmp_path: Path) -> None:
    figure = draw_curves(curves, title="digits")
    (axes,) = figure.axes
    assert axes.get_ylabel() == "val accuracy"
    drawn = {str(line.get_label()): np.asarray(line.get_xydata()).tolist() for line in axes.lines}
    assert drawn == {
        "student alone": [[9.0, 10.5], [19.0, 11.0]],
        "student distilled": [[9.0, 20.5], [19.0, 21.0]],
    }
    heights = np.concatenate([path.vertices for path in axes.collections[1].get_paths()])[:, 1]
    assert (heights.min(), heights.max()) == (20.0, 22.0)
    figure.savefig(tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_the_table_of_metrics_is_read_back(curves: Curves, tmp_path: Path) -> None:
    write_metrics(curves, tmp_path / "metrics.csv")
    assert read_metrics(tmp_path / "metrics.csv") == curves


def test_names_are_drawn_as_they_are_written_and_bad_numbers_do_no_harm(tmp_path: Path) -> None:
    points = [(0, 1.0), (1, float("inf")), (2, float("nan")), (3, 2.0)]
    drawn = draw_curve({"cost_in_$^": {"a$b^$": {0: points, 1: points}}}, "cost_in_$^")
    drawn.savefig(tmp_path / "a.png")
    assert drawn.axes[0].get_ylabel() == r"cost in \$^"
    assert drawn.legends[0].get_texts()[0].get_text() == r"student a\$b^\$"


def test_an_arm_has_the_same_colour_in_every_picture(curves: Curves) -> None:
    arms = ["alone", "other", "distilled"]
    one = draw_curve(curves, "val_accuracy", arms=arms)
    alone, distilled = one.axes[0].lines
    assert (alone.get_color(), distilled.get_color()) == ("#767676", colours(arms)["distilled"])
    assert len(set(colours([f"way {n}" for n in range(7)]).values())) == 7


def test_the_legend_covers_no_data(curves: Curves) -> None:
    drawn = draw_curve(curves, "val_accuracy")
    drawn.draw_without_rendering()
    (legend,), (axes,) = drawn.legends, drawn.axes
    assert legend.get_window_extent().y0 >= axes.get_window_extent().y1


def test_without_validation_metrics_the_others_are_drawn(curves: Curves) -> None:
    figure = draw_curves({"train_loss": curves["train_loss"]}, title="digits")
    assert [axes.get_ylabel() for axes in figure.axes] == ["train loss"]
    assert draw_curves({}, title="nothing was logged").axes == []
