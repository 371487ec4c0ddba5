"""The recipes on Fashion-MNIST, on other images in the same file format, and on the real ones where they are."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.metrics import accuracy_score
from torch import Tensor
from torch.nn import functional as F

from softs_lightning.config import Refusal
from softs_lightning.recipes import fashion
from softs_lightning.recipes.digits import UNLABELLED
from softs_lightning.recipes.fashion import FashionMixer, FashionMNIST, FashionTeacher
from softs_lightning.report import Result
from tests.recipes.command import run_folder, softs_distill

pytestmark = pytest.mark.slow

TRAIN = 1400  # of the 1,797 digits; the others are the test


def write_idx(file: Path, values: Tensor, *, packed: bool) -> None:
    """In the format that LeCun's page of MNIST describes."""
    header = struct.pack(">HBB", 0, 8, values.ndim) + b"".join(
        struct.pack(">I", size) for size in values.shape
    )
    content = header + values.to(torch.uint8).numpy().tobytes()
    if packed:
        file.with_name(f"{file.name}.gz").write_bytes(gzip.compress(content))
    else:
        file.write_bytes(content)


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """Scikit-learn's digits at the size of Fashion-MNIST, as bytes."""
    pixels, label = load_digits(return_X_y=True)
    image = F.interpolate(
        torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8), (28, 28), mode="bilinear"
    )
    return (image[:, 0] * 255 / 16).round().to(torch.uint8), torch.tensor(label)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, digits: tuple[Tensor, Tensor]) -> Path:
    """The four files with digits in them, two gzipped and two not."""
    place = tmp_path_factory.mktemp("data")
    image, label = digits
    write_idx(place / "train-images-idx3-ubyte", image[:TRAIN], packed=True)
    write_idx(place / "train-labels-idx1-ubyte", label[:TRAIN], packed=False)
    write_idx(place / "t10k-images-idx3-ubyte", image[TRAIN:], packed=False)
    write_idx(place / "t10k-labels-idx1-ubyte", label[TRAIN:], packed=True)
    return place


def small(folder: Path, **options: object) -> FashionMNIST:
    given = {"images": 1000, "labels": 50, "validation": 400, "batch_size": 50, **options}
    data = FashionMNIST(folder=str(folder), **given)  # type: ignore[arg-type]
    data.setup()
    return data


def test_files_are_read_as_they_were_written(folder: Path, digits: tuple[Tensor, Tensor]) -> None:
    image, label = digits
    for split, rows in (("train", slice(0, TRAIN)), ("test", slice(TRAIN, None))):
        found = fashion.read(folder, split)
        assert torch.equal(found[0][:, 0], image[rows])
        assert torch.equal(found[1], label[rows])


def test_the_parts_are_disjoint_and_complete(folder: Path, digits: tuple[Tensor, Tensor]) -> None:
    data = small(folder, labels=None)
    parts = [sorted(map(bytes, part.image.flatten(1).numpy())) for part in (data.train, data.validation)]
    assert sorted(parts[0] + parts[1]) == sorted(map(bytes, digits[0][:TRAIN].flatten(1).numpy()))
    assert torch.equal(data.test.image[:, 0], digits[0][TRAIN:])
    # A smaller pool never reaches into the validation.
    smaller = small(folder, images=500, labels=None)
    assert torch.equal(smaller.validation.image, data.validation.image)
    assert torch.equal(smaller.train.image, data.train.image[:500])


def test_hidden_labels_are_hidden_and_the_rest_is_balanced(folder: Path) -> None:
    data, whole = small(folder, seed=3), small(folder, labels=None)
    shown = data.train.label != UNLABELLED
    assert torch.bincount(data.train.label[shown]).tolist() == [5] * 10
    assert torch.equal(data.train.label[shown], whole.train.label[shown])
    assert not torch.equal(shown, small(folder, seed=4).train.label != UNLABELLED)


def test_batches_number_their_images(folder: Path) -> None:
    data = small(folder)
    seen = list(data.train_dataloader())
    assert len(seen) == 20
    assert sorted(torch.cat([batch["index"] for batch in seen]).tolist()) == list(range(1000))
    for batch in seen:
        assert torch.equal(batch["image"], data.train.image[batch["index"]].float() / 255)
        assert torch.equal(batch["label"], data.train.label[batch["index"]])
    assert {key: value.shape for key, value in data.example_batch().items()} == {
        key: value.shape for key, value in seen[0].items()
    }


def test_a_batch_that_is_looked_at_may_be_the_whole_pool_and_no_more() -> None:
    assert len(FashionMNIST(images=30, batch_size=30).example_batch()["image"]) == 30
    with pytest.raises(Refusal, match="not one batch"):
        FashionMNIST(images=30, batch_size=31).example_batch()


def test_the_judge_is_the_accuracy_on_the_test_images(folder: Path, digits: tuple[Tensor, Tensor]) -> None:
    torch.manual_seed(0)
    model = FashionMixer().eval()
    with torch.no_grad():
        guess = model(digits[0][TRAIN:, None].float() / 255).argmax(1)
    expected = 100 * accuracy_score(digits[1][TRAIN:], guess)
    assert fashion.accuracy(model, data=small(folder), teacher=model) == pytest.approx(expected)


def test_missing_files_are_refused_with_how_to_get_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTS_LIGHTNING_DATA", str(tmp_path))
    monkeypatch.setattr(fashion, "DEBIAN", tmp_path / "no-debian")
    with pytest.raises(
        Refusal, match=r"(?s)looked in .*fashion-mnist.*no-debian.*apt install dataset-fashion-mnist"
    ):
        FashionMNIST().setup()
    done = softs_distill(
        "recipe=fashion-logits", f"data.folder={tmp_path}/none", folder=tmp_path, cache=tmp_path / "cache"
    )
    assert done.returncode == 2
    assert "apt install dataset-fashion-mnist" in done.stderr
    assert "Traceback" not in done.stderr
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_torchvisions_layout_is_found(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fashion-mnist" / "FashionMNIST").mkdir(parents=True)
    (tmp_path / "fashion-mnist" / "FashionMNIST" / "raw").symlink_to(folder)
    monkeypatch.setenv("SOFTS_LIGHTNING_DATA", str(tmp_path))
    assert fashion.FASHION.find(None) == tmp_path / "fashion-mnist" / "FashionMNIST" / "raw"


def test_files_that_are_cut_off_or_something_else_are_refused(folder: Path, tmp_path: Path) -> None:
    whole = (folder / "train-labels-idx1-ubyte").read_bytes()
    (tmp_path / "short").write_bytes(whole[:-1])
    (tmp_path / "other").write_bytes(b"PK\x03\x04")
    with pytest.raises(Refusal, match=r"holds \[1400\] values, but has 1399: it is cut off"):
        fashion.read_idx(tmp_path / "short")
    with pytest.raises(Refusal, match="is not an idx file of bytes: it begins with 504b0304"):
        fashion.read_idx(tmp_path / "other")


@pytest.mark.parametrize("options", [{"labels": 55}, {"labels": 0}, {"images": 0}, {"batch_size": 0}])
def test_impossible_sizes_are_refused(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        FashionMNIST(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [({"images": 1001}, "1,400 images to train on, too few"), ({"labels": 990}, "a class has only")],
)
def test_more_than_there_is_is_refused(folder: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(Refusal, match=message):
        small(folder, **options)


SHORT = (
    "data.images=1000",
    "data.validation=400",
    "data.labels=20",
    "seeds=[0]",
    "trainer.enable_progress_bar=false",
    "teacher.trainer.max_epochs=12",
    "+teacher.trainer.enable_progress_bar=false",
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def logits(tmp_path_factory: pytest.TempPathFactory, folder: Path, cache: Path) -> tuple[Path, str]:
    place = tmp_path_factory.mktemp("logits")
    steps = ("data.batch_size=25", "trainer.max_epochs=5")
    done = softs_distill(
        "recipe=fashion-logits", *SHORT, *steps, f"data.folder={folder}", folder=place, cache=cache
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return run_folder(place, "fashion-logits"), done.stdout


@pytest.fixture(scope="module")
def features(
    tmp_path_factory: pytest.TempPathFactory, folder: Path, cache: Path, logits: object
) -> tuple[Path, str]:
    place = tmp_path_factory.mktemp("features")
    steps = ("data.batch_size=50", "trainer.max_epochs=1")
    done = softs_distill(
        "recipe=fashion-features", *SHORT, *steps, f"data.folder={folder}", folder=place, cache=cache
    )
    assert done.returncode == 0, done.stderr
    return run_folder(place, "fashion-features"), done.stdout


def test_scores_of_all_losses_beat_twenty_labels(logits: tuple[Path, str]) -> None:
    found = Result.from_json((logits[0] / "results.json").read_text())
    assert [arm.name for arm in found.arms] == [
        "alone",
        "KD",
        "generalised JSD",
        "standardised KL",
        "DKD",
        "alone, twice the steps",
    ]
    gains = {arm.name: found.gain(arm) for arm in found.arms}
    assert gains["KD"] > 15
    assert gains["standardised KL"] > 10
    assert {arm.parameters for arm in found.arms} == {sum(p.numel() for p in FashionMixer().parameters())}
    assert found.teacher_parameters == sum(p.numel() for p in FashionTeacher().parameters())
    assert found.teacher["test accuracy"] > 90


def test_the_exported_student_scores_what_the_results_say(
    logits: tuple[Path, str], digits: tuple[Tensor, Tensor]
) -> None:
    student = FashionMixer.load_from_checkpoint(logits[0] / "student.ckpt", weights_only=True).cpu().eval()
    with torch.no_grad():
        guess = student(digits[0][TRAIN:, None].float() / 255).argmax(dim=1)
    found = Result.from_json((logits[0] / "results.json").read_text())
    expected = 100 * accuracy_score(digits[1][TRAIN:], guess)
    assert found.arms[1].scores[0]["test accuracy"] == pytest.approx(expected)


def test_the_teacher_stops_where_the_features_are(features: tuple[Path, str]) -> None:
    found = Result.from_json((features[0] / "results.json").read_text())
    stops = {arm.name: [stop.module for stop in arm.stops] for arm in found.arms}
    assert stops == {
        "alone": [],
        "hints": ["stages.1"],
        "attention": ["stages.1"],
        "RKD": ["pool"],
        "similarity": ["pool"],
        "CRD": ["pool"],
        "DIST": ["head"],
        "hints and scores": ["head"],
    }
    saved = {arm.name: [stop.saved for stop in arm.stops] for arm in found.arms}
    assert saved["hints"] == saved["attention"] == [pytest.approx(0.36, abs=0.005)]


def test_both_recipes_train_one_teacher(
    features: tuple[Path, str], cache: Path, logits: tuple[Path, str]
) -> None:
    assert logits[1].count("Training the teacher, once") == 1
    assert "Training the teacher" not in features[1]
    assert len(list(cache.iterdir())) == 1


def test_every_feature_loss_trained_its_student(features: tuple[Path, str]) -> None:
    """Its term fell."""
    lines = [line.split(",") for line in (features[0] / "metrics.csv").read_text().splitlines()[1:]]
    found = Result.from_json((features[0] / "results.json").read_text())
    for arm in found.arms[1:]:
        terms = [
            (int(step), float(value))
            for student, _, step, metric, value in lines
            if student == arm.name and metric == "distill/total"
        ]
        assert sorted(terms)[-1][1] < sorted(terms)[0][1], arm.name


@pytest.mark.skipif(
    not (fashion.DEBIAN / "train-images-idx3-ubyte.gz").is_file(),
    reason="Debian's package dataset-fashion-mnist is not installed",
)
def test_the_real_files_are_the_published_ones() -> None:
    data = FashionMNIST(folder=str(fashion.DEBIAN), images=None, labels=None)
    data.setup()
    assert [len(part) for part in (data.train, data.validation, data.test)] == [55_000, 5_000, 10_000]
    label = torch.cat([data.train.label, data.validation.label])
    assert label.bincount().tolist() == [6000] * 10
    assert data.test.label.bincount().tolist() == [1000] * 10
    # The mean over the training images as it is quoted everywhere.
    pixels = torch.cat([data.train.image, data.validation.image]).double() / 255
    assert pixels.mean().item() == pytest.approx(0.2860, abs=5e-5)
    assert pixels.std().item() == pytest.approx(0.3530, abs=5e-5)
