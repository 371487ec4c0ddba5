"""The default recipe: that it gains, and that what it writes is true."""

from __future__ import annotations

import csv
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score

from softs_lightning.recipes.digits import UNLABELLED, Digits, DigitsStudent, DigitsTeacher, accuracy
from tests.recipes.command import run_folder, scores, softs_distill

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def run(
    tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The default command with two of its five seeds."""
    folder = tmp_path_factory.mktemp("digits")
    done = softs_distill("seeds=[0,1]", folder=folder, cache=cache, cold=True)
    assert done.returncode == 0, done.stderr
    return run_folder(folder, "digits"), done


def held_out() -> tuple[torch.Tensor, np.ndarray]:
    """The last 597 of the images in the recipe's order, drawn again from scikit-learn."""
    pixels, label = load_digits(return_X_y=True)
    rows = torch.randperm(1797, generator=torch.Generator().manual_seed(0))[1200:]
    return torch.tensor(pixels, dtype=torch.float32)[rows].reshape(-1, 1, 8, 8) / 16, label[rows.numpy()]


def test_the_gain_is_real_and_said_to_be_clear(run: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    folder, done = run
    found = scores((folder / "report.md").read_text())
    assert set(found) == {0, 1}
    assert all(alone < 90 < 95 < distilled for alone, distilled in found.values())
    assert "clear of the seeds' spread (2 of 2 seeds gained" in done.stdout
    assert "NOT" not in done.stdout


def test_the_table_is_printed_once_with_stop_and_saving(
    run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = run
    for line in (r"teacher +9\d\.\d +200,932", r"student alone .* 1,898", r"student distilled .* 1,898"):
        assert len(re.findall(f"^{line}$", done.stdout, re.MULTILINE)) == 1
    assert done.stdout.count("The teacher stops at early (67.5 % of its FLOPs saved).") == 1
    assert done.stderr == ""


def test_the_exported_student_scores_what_the_report_says(
    run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = run
    student = DigitsStudent.load_from_checkpoint(folder / "student.ckpt", weights_only=True).cpu().eval()
    image, label = held_out()
    with torch.no_grad():
        guess = student(image).argmax(dim=1)
    reported = scores((folder / "report.md").read_text())[0][1]
    assert round(100 * accuracy_score(label, guess), 1) == reported


def test_the_export_holds_the_student_and_nothing_else(
    run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = run
    checkpoint = torch.load(folder / "student.ckpt", weights_only=True)
    expected = DigitsStudent().state_dict()
    assert {k: v.shape for k, v in checkpoint["state_dict"].items()} == {
        k: v.shape for k, v in expected.items()
    }
    assert not checkpoint.get("callbacks")
    assert "optimizer_states" not in checkpoint


def test_files_are_there_and_the_metrics_agree_with_the_logs(
    run: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    folder, _ = run
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    config = OmegaConf.load(folder / "config.yaml")
    assert OmegaConf.select(config, "pairs")[0].loss.temperature == 4.0
    assert config.seeds == [0, 1]
    with (folder / "metrics.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    logged = {(row["student"], row["metric"]) for row in rows}
    assert {
        ("alone", "val_accuracy"),
        ("distilled", "val_accuracy"),
        ("distilled", "distill/scores"),
    } <= logged
    assert ("alone", "distill/scores") not in logged
    with (folder / "logs" / "distilled" / "1" / "metrics.csv").open(newline="") as lines:
        log = [(row["step"], row["val_accuracy"]) for row in csv.DictReader(lines) if row["val_accuracy"]]
    kept = [
        (row["step"], row["value"])
        for row in rows
        if (row["student"], row["seed"], row["metric"]) == ("distilled", "1", "val_accuracy")
    ]
    assert len(log) == 10
    assert [(s, float(v)) for s, v in log] == [(s, float(v)) for s, v in kept]


def test_the_teacher_is_trained_once_and_then_read(
    run: tuple[Path, subprocess.CompletedProcess[str]], cache: Path, tmp_path: Path
) -> None:
    _, first = run
    assert first.stdout.count("Training the teacher, once") == 1
    (kept,) = cache.iterdir()
    teacher = DigitsTeacher()
    teacher.load_state_dict(torch.load(kept, weights_only=True))
    score = accuracy(teacher.eval(), data=Digits(), teacher=teacher)
    assert score > 98
    again = softs_distill(
        "seeds=[0]", "data.passes=2", "trainer.enable_progress_bar=false", folder=tmp_path, cache=cache
    )
    assert again.returncode == 0, again.stderr
    assert "Training the teacher" not in again.stdout
    assert f"teacher: test accuracy {score:.4g}" in again.stdout


@pytest.mark.ddp
def test_two_processes_write_one_run_and_speak_once(cache: Path, tmp_path: Path) -> None:
    done = softs_distill(
        "trainer.devices=2",
        "trainer.strategy=ddp",
        "trainer.enable_progress_bar=false",
        "seeds=[0]",
        "data.passes=20",
        folder=tmp_path,
        cache=cache,
        cold=True,
    )
    assert done.returncode == 0, done.stderr
    folder = run_folder(tmp_path, "digits")
    assert (folder / "train_ddp_process_1.log").exists()  # the second process was there
    assert sorted(file.name for file in (folder / ".hydra").iterdir()) == [
        "config.yaml",
        "hydra.yaml",
        "overrides.yaml",
    ]
    assert len(list(tmp_path.rglob(".hydra"))) == 1
    assert (folder / "softs-distill.log").stat().st_size
    for once in (
        "student alone, seed 0",
        "student distilled, seed 0",
        "parameters",
        "Report, student, curves",
    ):
        assert done.stdout.count(once) == 1
    assert [file.relative_to(tmp_path).parts[:2] for file in tmp_path.rglob("student.ckpt")] == [
        ("outputs", "digits")
    ]
    student = DigitsStudent.load_from_checkpoint(folder / "student.ckpt", weights_only=True).cpu().eval()
    image, label = held_out()
    with torch.no_grad():
        guess = student(image).argmax(dim=1)
    assert round(100 * accuracy_score(label, guess), 1) == scores((folder / "report.md").read_text())[0][1]


@pytest.mark.ddp
def test_two_processes_refuse_with_one_message(cache: Path, tmp_path: Path) -> None:
    done = softs_distill(
        "trainer.devices=2",
        "trainer.strategy=ddp",
        "trainer.enable_progress_bar=false",
        "+teacher.trainer.enable_progress_bar=false",
        "teacher.data.labels=10",
        "teacher.data.passes=1",
        "teacher.data.batch_size=1000",
        "data.labels=null",
        "data.passes=10",
        "seeds=[0]",
        folder=tmp_path,
        cache=tmp_path / "cache",
        cold=True,
    )
    assert done.returncode == 1
    assert done.stderr.count("The teacher is no better than the student alone") == 1
    assert "Traceback" not in done.stderr
    assert done.stdout.count("Training the teacher, once") == 1


def test_the_parts_of_the_data_are_disjoint_and_complete() -> None:
    data = Digits(labels=50, seed=3)
    rows = [
        tuple(image.flatten().tolist())
        for part in (data.train, data.validation, data.test)
        for image in part.image
    ]
    pixels, _ = load_digits(return_X_y=True)
    assert sorted(rows) == sorted(tuple((row / 16).tolist()) for row in pixels.astype("float32"))
    assert [len(part) for part in (data.train, data.validation, data.test)] == [1000, 200, 597]


def test_hidden_labels_are_hidden_and_the_rest_is_balanced() -> None:
    data, whole = Digits(labels=50, seed=3), Digits()
    shown = data.train.label != UNLABELLED
    assert torch.bincount(data.train.label[shown]).tolist() == [5] * 10
    assert torch.equal(data.train.label[shown], whole.train.label[shown])
    assert not torch.equal(shown, Digits(labels=50, seed=4).train.label != UNLABELLED)


def test_both_students_meet_the_same_batches() -> None:
    def batches() -> list[torch.Tensor]:
        torch.rand(7)  # what another student drew in between must not matter
        return [batch["image"] for batch in Digits(labels=50, seed=1, passes=2).train_dataloader()]

    first, second = batches(), batches()
    assert len(first) == 8
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_a_batch_without_labels_gives_no_loss() -> None:
    student = DigitsStudent()
    student.log = lambda *args, **kwargs: None  # type: ignore[method-assign,assignment]
    batch = {"image": torch.rand(4, 1, 8, 8), "label": torch.full((4,), UNLABELLED)}
    assert student.training_step(batch, 0).item() == 0.0


def test_the_students_loss_is_the_mean_over_labelled_images() -> None:
    torch.manual_seed(0)
    student = DigitsStudent()
    student.log = lambda *args, **kwargs: None  # type: ignore[method-assign,assignment]
    image, label = torch.rand(5, 1, 8, 8), torch.tensor([3, UNLABELLED, 0, 9, UNLABELLED])
    loss = student.training_step({"image": image, "label": label}, 0)
    known = label >= 0
    log_p = student(image)[known].double().log_softmax(dim=1)
    expected = -log_p[torch.arange(3), label[known]].mean()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
