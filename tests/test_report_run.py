"""A run's folder: what is in it, that its numbers are true, and that its report can be made again."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from softs_lightning.cli import main
from softs_lightning.report import Result, Similarity, Timing, read_curves, read_metrics
from softs_lightning.report.run import read_run
from tests import tiny

MADE = ("report.md", "report.html", "curves.png", "plots")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three arms, two measures and both loggers."""
    folder = tmp_path_factory.mktemp("run")
    os.environ.pop("HYDRA_FULL_ERROR", None)
    assert tiny.distil(folder, "logger=both", arms=True) == 0
    return tiny.run_of(folder)


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def contents(folder: Path) -> dict[str, bytes]:
    files = [
        file for name in MADE for file in ((folder / name).rglob("*") if name == "plots" else [folder / name])
    ]
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in files}


def test_the_report_is_made_again_from_the_files_without_torch(run: Path, copied: Path) -> None:
    for name in MADE:
        shutil.rmtree(copied / name) if name == "plots" else (copied / name).unlink()
    shutil.rmtree(copied / "logs")
    (copied / "logs").mkdir()
    code = (
        "import sys; from softs_lightning.cli import main; code = main(sys.argv[1:]);"
        "print([name for name in ('torch', 'lightning', 'hydra') if name in sys.modules], code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "report", str(copied)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.splitlines() == [f"Report: {copied / 'report.html'}", "[] 0"]
    assert len(contents(run)) == 3 + 2 + 4 + 3 + 1  # scores, curves, maps, times
    assert contents(copied) == contents(run)


def test_a_picture_of_an_arm_that_is_gone_goes_too(copied: Path) -> None:
    (copied / "plots" / "old.png").write_bytes(b"")
    assert main(["report", str(copied)]) == 0
    assert not (copied / "plots" / "old.png").exists()


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_needs_nothing_beside_it(run: Path) -> None:
    text = (run / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    sources = [attributes["src"] or "" for _, attributes in page.tags if "src" in attributes]
    assert len(sources) == 10
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert not re.search(r"https?:|url\(|@import", re.sub(r"base64,[^\"]+", "", text))
    found = Result.from_json((run / "results.json").read_text())
    for arm in found.arms:
        assert f"student {arm.name}" in page.text
        assert all(measure.text(arm.of(measure)) in page.text for measure in found.measures)
    assert all(sentence in page.text for sentence in (*found.verdicts(), *found.stops()))
    assert 'hard <labels> & "more"' in page.text


def test_the_text_report_says_the_same_and_its_pictures_are_there(run: Path) -> None:
    text = (run / "report.md").read_text()
    linked = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert len(linked) == 10
    assert all((run / name).read_bytes().startswith(b"\x89PNG") for name in linked)
    for name in re.findall(r"^- `(.+?)`:", text, re.MULTILINE):
        assert (run / name).exists()
    assert "command: softs-distill --config-dir configs logger=both recipe=tiny" in text


def test_run_json_says_how_it_was_made(run: Path) -> None:
    about = json.loads((run / "run.json").read_text())
    assert about["threads"] == 1
    assert about["versions"]["torch"] == torch.__version__
    assert about["command"] == "softs-distill --config-dir configs logger=both recipe=tiny"


def test_the_log_says_what_the_terminal_said(run: Path) -> None:
    log = (run / "softs-distill.log").read_text()
    assert re.search(r"^\[\d{4}-.+\] - student alone, seed 1 \(2 of 6\)$", log, re.MULTILINE)
    assert "teacher: accuracy 100" in log
    assert all(sentence in log for sentence in read_run(run).result.verdicts())


def test_tensorboard_holds_the_numbers_of_the_table(run: Path) -> None:
    with (run / "metrics.csv").open(newline="") as lines:
        table = {
            (row["student"], row["seed"], row["metric"], int(row["step"])): np.float32(row["value"])
            for row in csv.DictReader(lines)
        }
    found = {}
    for place in (run / "logs").glob("*/*"):
        events = EventAccumulator(str(place), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            if tag != "epoch":
                for event in events.Scalars(tag):
                    found[place.parent.name, place.name, tag, event.step] = np.float32(event.value)
    assert found == table
    assert len(found) > 300


def test_without_the_csv_logger_the_table_is_read_from_tensorboard(copied: Path) -> None:
    whole = read_metrics(copied / "metrics.csv")
    for file in (copied / "logs").rglob("metrics.csv"):
        file.unlink()
    found = read_curves(copied / "logs")
    assert found.keys() == whole.keys()
    for metric, arms in whole.items():
        for arm, seeds in arms.items():
            for seed, points in seeds.items():
                assert found[metric][arm][seed] == [
                    (step, float(np.float32(value))) for step, value in points
                ]


@pytest.mark.parametrize("logger", ["tensorboard", "{}"])
def test_a_run_needs_no_csv_logger(logger: str, tmp_path: Path) -> None:
    change = ["~logger.csv"] if logger == "{}" else [f"logger={logger}"]
    assert tiny.distil(tmp_path, *change, "seeds=[0]") == 0
    folder = tiny.run_of(tmp_path)
    curves = read_metrics(folder / "metrics.csv")
    assert sorted(curves) == (
        [] if logger == "{}" else ["distill/scores", "distill/total", "train_loss", "val_loss"]
    )
    assert not list(folder.rglob("logs/**/metrics.csv"))
    assert ("Nothing was logged." in (folder / "report.html").read_text()) == (logger == "{}")


def test_similarity_is_that_of_the_students_of_the_run(run: Path) -> None:
    """The kept student is the first arm's beside the student alone, of the first seed."""
    found = Similarity.from_json((run / "similarity.json").read_text())
    arm = list(found.students)[1]
    student = tiny.Student.load_from_checkpoint(run / "student.ckpt", weights_only=True).eval()
    x = tiny.samples(40, 1).tensors[0]
    with torch.no_grad():
        same = (student(x).argmax(1) == tiny.Teacher()(x).argmax(1)).double().mean().item()
    assert found.agreement[arm]["agreement"] == pytest.approx(same, abs=1e-12)
    assert (found.samples, found.part, found.seed) == (40, "validation", 0)
    assert list(found.students) == ["alone", 'hard <labels> & "more"', "scores"]


def test_the_time_of_a_step_is_that_of_the_first_arm_with_a_teacher(run: Path) -> None:
    found = Timing.from_json((run / "timing.json").read_text())
    assert (found.arm, found.seed, found.steps) == ("scores", 0, 20)
    assert sum(found.shares.values()) == pytest.approx(1, abs=1e-12)
    assert min(found.shares[name] for name in ("teacher", "student", "losses", "backward", "optimizer")) > 0
    shown = [float(row[2]) for row in found.rows()[1:]]
    assert sum(round(10 * value) for value in shown) == 1000


def test_operations_and_sizes_are_those_of_the_models(run: Path) -> None:
    found = Result.from_json((run / "results.json").read_text())
    assert [arm.flops for arm in found.arms] == [2 * (8 * 4 + 4 * 3)] * 3
    assert found.teacher_flops == 2 * (2 * 8 * 8 + 8 * 3 + 3 * 3)
    assert found.arms[0].parameters == sum(p.numel() for p in tiny.Student().parameters())


def test_an_older_run_without_the_newer_files_has_a_report(copied: Path) -> None:
    for name in ("similarity.json", "timing.json", "run.json", "metrics.csv", "config.yaml"):
        (copied / name).unlink()
    node = json.loads((copied / "results.json").read_text())
    del node["teacher_flops"]
    for arm in node["arms"]:
        del arm["flops"]
    (copied / "results.json").write_text(json.dumps(node))
    assert main(["report", str(copied)]) == 0
    text = (copied / "report.md").read_text()
    assert "Similarity" not in text
    assert "| student alone | 51 | 27.9 | – |" in text


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda f: shutil.rmtree(f), "There is no folder"),
        (
            lambda f: (f / "results.json").unlink(),
            "is a run that did not come to its end: there are logs of alone",
        ),
        (
            lambda f: ((f / "results.json").unlink(), shutil.rmtree(f / "logs")),
            "in which nothing was trained yet",
        ),
        (lambda f: (f / "results.json").write_text('{"recipe": "t'), "results.json cannot be read"),
        (lambda f: (f / "results.json").write_text('{"recipe": "t"}'), "it lacks 'measures'"),
        (lambda f: (f / "results.json").write_text("[]"), "results.json cannot be read"),
        (lambda f: (f / "timing.json").write_text("{}"), "timing.json cannot be read"),
        (lambda f: (f / "similarity.json").write_text("{"), "similarity.json cannot be read"),
        (
            lambda f: (f / "metrics.csv").write_text("student,seed,step,metric,value\nalone,0,1"),
            "line 2 is not",
        ),
        (lambda f: (f / "metrics.csv").write_text("a,b\n"), "its first line is not student,seed"),
    ],
)
def test_a_folder_that_is_no_whole_run_gets_a_message(
    spoil: object, message: str, copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(copied)  # type: ignore[operator]
    before = sorted(copied.rglob("*")) if copied.exists() else []
    assert main(["report", str(copied)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("softs-distill: ")
    assert message in err
    assert (sorted(copied.rglob("*")) if copied.exists() else []) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["report"], "Write: report FOLDER"),
        (["report", "a", "b"], "Write: report FOLDER"),
        (["reprot", "a"], "Did you mean report"),
    ],
)
def test_report_takes_one_folder(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_other_folders_and_files_are_told_from_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(run.parent)]) == 2
    assert (
        f"is no run: it holds no results.json. Runs are in outputs/RECIPE/TIME. These in it are: {run}."
        in (capsys.readouterr().err)
    )
    assert main(["report", str(run / "report.md")]) == 2
    assert f"is a file: name the run's folder, {run}." in capsys.readouterr().err
