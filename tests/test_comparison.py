"""The runs of a sweep beside each other, whole, failed, killed."""

from __future__ import annotations

import csv
import os
import statistics
from pathlib import Path

import pytest
import yaml

from softs_lightning.cli import main
from softs_lightning.config import Refusal
from softs_lightning.report import Arm, Measure, Result
from softs_lightning.report.comparison import draw_tradeoff, read_sweep, write_comparison
from tests import tiny

ACCURACY = Measure("accuracy", "%")


def result(width: int) -> Result:
    def arm(name: str, *scores: float) -> Arm:
        return Arm(name, tuple({"accuracy": one} for one in scores), 10 * width, flops=100 * width)

    arms = (arm("alone", 50.0 + width, 52.0 + width), arm("distilled", 70.0 + width, 73.0 + width))
    return Result("tiny", (ACCURACY,), (0, 1), {"accuracy": 99.0}, 1000, arms, 9000)


def sweep(folder: Path, *, runs: tuple[int, ...] = (2, 4, 8), planned: str = "2,4,8") -> Path:
    task = ["recipe=tiny", f"student.width={planned}"]
    (folder / "multirun.yaml").write_text(yaml.safe_dump({"hydra": {"overrides": {"task": task}}}))
    for number, width in enumerate(runs):
        place = folder / str(number)
        (place / ".hydra").mkdir(parents=True)
        (place / ".hydra" / "overrides.yaml").write_text(f"- recipe=tiny\n- student.width={width}\n")
        (place / "results.json").write_text(result(width).to_json())
    return folder


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "comparison.csv").open(newline="") as lines:
        return list(csv.DictReader(lines))


def test_every_run_and_arm_has_a_row_with_its_numbers(tmp_path: Path) -> None:
    write_comparison(sweep(tmp_path))
    found = rows(tmp_path)
    assert [(row["overrides"], row["student"]) for row in found] == [
        (f"student.width={width}", name) for width in (2, 4, 8) for name in ("alone", "distilled")
    ]
    last = found[-1]
    assert float(last["mean"]) == statistics.fmean((78, 81))
    assert float(last["deviation"]) == statistics.stdev((78, 81))
    assert float(last["gain"]) == pytest.approx(statistics.fmean((78, 81)) - statistics.fmean((58, 60)))
    assert (last["clear"], last["parameters"], last["flops"], last["teacher_flops"]) == (
        "True",
        "80",
        "800",
        "9000",
    )
    text = (tmp_path / "comparison.md").read_text()
    assert (
        "| 2 | student.width=8 | distilled | 79.5 ± 2.1 | +20.5 (clear) | 99.0 | 80 | 8 | 800 FLOP |" in text
    )
    assert "Without a result" not in text


def test_the_picture_shows_cost_quality_and_spread(tmp_path: Path) -> None:
    drawn = draw_tradeoff(read_sweep(sweep(tmp_path)), "flops")
    assert drawn is not None
    (axes,) = drawn.axes
    assert axes.get_ylabel() == "accuracy (%)"
    assert axes.get_xlabel() == "forward of one sample (FLOP)"
    _, distilled = axes.containers
    assert distilled[0].get_xydata().tolist() == [[200.0, 73.5], [400.0, 75.5], [800.0, 79.5]]  # type: ignore[index]
    bars = [segment[:, 1] for segment in distilled[2][0].get_segments()]  # type: ignore[index]
    assert [(high - low) / 2 for low, high in bars] == pytest.approx([statistics.stdev((0, 3))] * 3)
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    assert 0 < left < 200 < 800 < right < 1000
    assert 40 < low < 51 < 82 < high < 95  # the lowest and the highest end of a bar
    assert {text.get_text() for text in axes.texts} == {"0", "1", "2"}


def test_what_has_no_result_is_named(tmp_path: Path) -> None:
    sweep(tmp_path, runs=(2, 4, 8), planned="2,4,8,16")
    (tmp_path / "1" / "results.json").unlink()
    (tmp_path / "2" / "results.json").unlink()
    (tmp_path / "2" / "failed.json").write_text('{"error": "ValueError: too wide"}')
    found = write_comparison(tmp_path)
    assert [str(one) for one in found.unfinished] == [
        "run 1 (student.width=4): it was stopped before its end",
        "run 2 (student.width=8): ValueError: too wide",
        "run 3 (student.width=16): it never began",
    ]
    assert found.total == 4
    for name in ("comparison.md", "comparison.html"):
        text = (tmp_path / name).read_text()
        assert "run 3 (student.width=16): it never began" in text
        assert "ValueError: too wide" in text
    assert {row["run"] for row in rows(tmp_path)} == {"0"}


def test_a_spoilt_result_is_named_and_the_others_compared(tmp_path: Path) -> None:
    (sweep(tmp_path) / "0" / "results.json").write_text("{")
    (one,) = write_comparison(tmp_path).unfinished
    assert "results.json cannot be read" in one.reason
    assert {row["run"] for row in rows(tmp_path)} == {"1", "2"}


def test_without_any_result_there_is_nothing_to_compare(tmp_path: Path) -> None:
    sweep(tmp_path, runs=())
    with pytest.raises(
        Refusal, match=r"no run of this sweep came to its end(.|\n)*student.width=2\): it never"
    ):
        write_comparison(tmp_path)
    with pytest.raises(Refusal, match="is no sweep"):
        read_sweep(tmp_path / "0")


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Path]:
    """A sweep whose first run fails in the user's own code, and its exit code."""
    folder = tmp_path_factory.mktemp("sweep")
    os.environ.pop("HYDRA_FULL_ERROR", None)
    code = tiny.distil(folder, "--multirun", "data.broken=true,false", "student.width=3", "seeds=[0]")
    (place,) = (folder / "outputs" / "sweeps").iterdir()
    return code, place


def test_a_failing_run_is_named_and_the_others_go_on(failing: tuple[int, Path]) -> None:
    code, folder = failing
    assert code == 1
    assert (
        "run 0 (data.broken=True): ZeroDivisionError: the data are broken"
        in (folder / "comparison.md").read_text()
    )
    assert [(row["run"], row["student"], row["measure"], row["parameters"]) for row in rows(folder)] == [
        ("1", student, measure, "39")
        for student in ("alone", "distilled")
        for measure in ("accuracy", "nats")
    ]
    assert (folder / "1" / "report.html").exists()
    found = read_sweep(folder).finished[0].result
    assert float(rows(folder)[2]["mean"]) == found.arms[1].scores[0]["accuracy"]
    about = (folder / "1" / "run.json").read_text()
    assert "softs-distill --config-dir=configs data.broken=False" in about


def test_a_sweep_is_compared_again_from_its_folder(
    failing: tuple[int, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = failing
    names = ("comparison.md", "comparison.html", "comparison.csv", "comparison-parameters.png")
    before = {name: (folder / name).read_bytes() for name in names}
    for name in names:
        (folder / name).unlink()
    assert main(["report", str(folder)]) == 0
    assert {name: (folder / name).read_bytes() for name in names} == before
    out = capsys.readouterr().out
    assert "Without a result: run 0 (data.broken=True): ZeroDivisionError: the data are broken" in out
    assert f"Comparison: {folder}" in out


def test_a_sweep_of_which_all_runs_fail_says_why_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    sweep = ["--multirun", "student.width=3,5", "+student.widht=3", "seeds=[0]"]
    assert tiny.distil(tmp_path, *sweep) == 2
    assert "unexpected keyword argument 'widht'. Did you mean width?" in capfd.readouterr().err
    assert not list(tmp_path.glob("outputs/sweeps/*/comparison*"))
