"""The recipes on digits beyond the default one: two teachers, a transformer, no larger model, a store."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch
from torch import nn

from softs_lightning.recipes.digits import Digits, DigitsStudent, DigitsTeacher
from softs_lightning.recipes.digits_transformer import DigitsTransformer
from softs_lightning.recipes.self_distillation import MovedDigits, moved
from softs_lightning.report import Result
from tests.recipes.command import run_folder, softs_distill

pytestmark = pytest.mark.slow

SHORT = ("seeds=[0]", "trainer.enable_progress_bar=false", "trainer.log_every_n_steps=1")
QUIET = "+teacher.trainer.enable_progress_bar=false"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def run(recipe: str, *options: str, folder: Path, cache: Path) -> tuple[Path, Result]:
    done = softs_distill(f"recipe={recipe}", *SHORT, *options, folder=folder, cache=cache)
    assert done.returncode == 0, done.stderr
    found = run_folder(folder, recipe)
    return found, Result.from_json((found / "results.json").read_text())


def logged(folder: Path, student: str) -> dict[tuple[str, str], str]:
    """(step, metric) → value, as written, of one arm's only seed."""
    with (folder / "metrics.csv").open(newline="") as lines:
        return {
            (r["step"], r["metric"]): r["value"] for r in csv.DictReader(lines) if r["student"] == student
        }


def parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_two_teachers_each_with_a_half(tmp_path: Path, cache: Path) -> None:
    folder, found = run(
        "multi-teacher",
        "data.passes=12",
        "teacher.data.passes=10",
        "callbacks.second.teacher.data.passes=10",
        QUIET,
        "+callbacks.second.teacher.trainer.enable_progress_bar=false",
        folder=tmp_path,
        cache=cache,
    )
    assert [arm.name for arm in found.arms] == ["alone", "both teachers", "first teacher", "second teacher"]
    assert [[stop.module for stop in arm.stops] for arm in found.arms] == [
        [],
        ["head", "head"],
        ["head"],
        ["head"],
    ]
    terms = {
        arm.name: sorted({metric for _, metric in logged(folder, arm.name) if metric.endswith("/scores")})
        for arm in found.arms
    }
    assert terms == {
        "alone": [],
        "both teachers": ["first/scores", "second/scores"],
        "first teacher": ["first/scores"],
        "second teacher": ["second/scores"],
    }
    # Of the first only: with so little training the two teachers disagree.
    falls = [
        float(value) for (_, term), value in logged(folder, "both teachers").items() if term == "first/scores"
    ]
    assert falls[-1] < 0.7 * falls[0]
    kept = {file.name.partition("-")[0]: torch.load(file, weights_only=True) for file in cache.glob("*.pt")}
    DigitsTeacher().load_state_dict(kept["DigitsTeacher"])
    DigitsTransformer().load_state_dict(kept["DigitsTransformer"])


def test_the_halves_of_the_pool_are_disjoint_and_complete() -> None:
    whole, first, second = (Digits(half=half).train for half in (None, 0, 1))
    assert torch.equal(torch.cat([first.image, second.image]), whole.image)
    assert len(first) == len(second) == 500
    assert int((Digits(half=1, labels=200).train.label >= 0).sum()) == 200
    with pytest.raises(ValueError, match="half=2"):
        Digits(half=2)
    with pytest.raises(ValueError, match="from 10 to 200"):
        Digits(half=0, labels=210)


def test_a_transformer_teaches_a_convolutional_network(tmp_path: Path, cache: Path) -> None:
    folder, found = run(
        "cross-architecture", "data.passes=15", "teacher.data.passes=15", QUIET, folder=tmp_path, cache=cache
    )
    stops = {arm.name: [stop.module for stop in arm.stops] for arm in found.arms}
    assert stops == {"alone": [], "tokens and scores": ["head"], "scores": ["head"], "tokens": ["layers.1"]}
    assert found.teacher_parameters == parameters(DigitsTransformer())
    assert {arm.parameters for arm in found.arms} == {parameters(DigitsStudent())}
    gains = {arm.name: found.gain(arm) for arm in found.arms}
    assert min(gains["tokens and scores"], gains["scores"]) > 5
    tokens = [float(v) for (_, metric), v in logged(folder, "tokens").items() if metric == "distill/tokens"]
    assert tokens[-1] < 0.7 * tokens[0]
    # Strict: the projector from maps to tokens stays out of the exported student.
    DigitsStudent.load_from_checkpoint(folder / "student.ckpt", weights_only=True)


def test_the_transformers_tokens_are_a_class_and_sixteen_places() -> None:
    torch.manual_seed(0)
    teacher = DigitsTransformer().eval()
    seen: list[torch.Tensor] = []
    teacher.layers[-1].register_forward_hook(lambda module, args, output: seen.append(output))
    image = torch.rand(3, 1, 8, 8)
    with torch.no_grad():
        scores = teacher(image)
        expected = teacher.head(teacher.norm(seen[0][:, 0]))
    assert seen[0].shape == (3, 17, 48)
    assert torch.equal(scores, expected)


@pytest.fixture(scope="module")
def self_distilled(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> tuple[Path, Result]:
    place = tmp_path_factory.mktemp("self")
    # An untrained student is a worse teacher than none: the one before is trained for longer here.
    options = ("data.passes=15", "teacher.trainer.max_epochs=6", QUIET)
    return run("self-distillation", *options, folder=place, cache=cache)


def test_no_model_is_larger_than_the_student(self_distilled: tuple[Path, Result]) -> None:
    folder, found = self_distilled
    sizes = {found.teacher_parameters, *(arm.parameters for arm in found.arms)}
    assert sizes == {parameters(MovedDigits())}
    assert [arm.name for arm in found.arms] == [
        "alone",
        "mean teacher",
        "born again",
        "alone, twice the steps",
    ]
    assert ("0", "mean/scores") not in logged(folder, "mean teacher")  # its weight begins at nothing
    assert ("1", "mean/scores") in logged(folder, "mean teacher")
    assert ("0", "distill/scores") in logged(folder, "born again")


def test_images_are_moved_and_nothing_else() -> None:
    torch.manual_seed(0)
    image = torch.rand(64, 2, 5, 6)
    found = moved(image)
    padded = nn.functional.pad(image, (1, 1, 1, 1))
    seen = set()
    for before, after in zip(padded, found, strict=True):
        (place,) = [
            (i, j) for i in range(3) for j in range(3) if torch.equal(before[:, i : i + 5, j : j + 6], after)
        ]
        seen.add(place)
    assert len(seen) == 9


def test_a_moved_student_trains_on_what_it_moved() -> None:
    student = MovedDigits()
    student.log = lambda *args, **kwargs: None  # type: ignore[method-assign,assignment]
    batch = {"image": torch.rand(4, 1, 8, 8), "label": torch.tensor([1, 2, -100, 3])}
    before = batch["image"].clone()
    seen: list[torch.Tensor] = []
    student.network.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    torch.manual_seed(1)
    student.training_step(batch, 0)
    torch.manual_seed(1)
    assert torch.equal(seen[0], moved(before))
    assert torch.equal(batch["image"], before)  # the teacher sees the images as they are


def test_a_student_from_the_store_is_that_of_the_live_teacher(tmp_path: Path, cache: Path) -> None:
    options = ("teacher.data.passes=5", QUIET)
    done = softs_distill(
        "precompute",
        "recipe=from-store",
        "store=products",
        "data.passes=1",
        *options,
        folder=tmp_path,
        cache=cache,
    )
    assert done.returncode == 0, done.stderr
    assert "products: 1,000 samples, 1,000 of them computed" in done.stdout
    before = {file: file.read_bytes() for file in (tmp_path / "products").rglob("*.safetensors")}
    folder, found = run("from-store", "data.passes=4", *options, folder=tmp_path, cache=cache)
    stored, live = (logged(folder, name) for name in ("from the store", "live teacher"))
    assert stored == live
    assert len([key for key in stored if key[1] == "distill/scores"]) == 16
    assert found.arms[1].scores == found.arms[2].scores
    assert {file: file.read_bytes() for file in (tmp_path / "products").rglob("*.safetensors")} == before


def test_a_store_that_is_not_there_yet_is_filled_with_what_the_trained_teacher_says(
    tmp_path: Path, cache: Path
) -> None:
    """The dry run before it, of a teacher with random weights, leaves nothing in it."""
    folder, _ = run(
        "from-store", "data.passes=4", "teacher.data.passes=5", QUIET, folder=tmp_path, cache=cache
    )
    assert logged(folder, "from the store") == logged(folder, "live teacher")
    assert (tmp_path / "products").is_dir()
    listed = softs_distill("store", "ls", "products", folder=tmp_path, cache=cache)
    assert "outputs[early]" in listed.stdout
    assert "1,000" in listed.stdout
