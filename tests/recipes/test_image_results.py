"""What the image recipes say of themselves: their results, and their settings at the scale of papers."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from softs_lightning.cli import main
from softs_lightning.config import Refusal
from softs_lightning.recipes.cifar import CIFAR100, CifarResNet, ImageClassifier, accuracy
from softs_lightning.report import Result

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2] / "recipes"
PAPERS = (
    "cross-architecture",
    "fashion-features",
    "fashion-logits",
    "from-store",
    "multi-teacher",
    "self-distillation",
)
RUNS = {name: ROOT / "recipe" / f"{name}.yaml" for name in PAPERS} | {
    "fashion-logits.all-labels": ROOT / "scale" / "fashion-logits" / "all-labels.yaml"
}


@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_recipe_quotes_its_results_and_has_their_arms(name: str) -> None:
    text = (ROOT / "results" / f"{name}.json").read_text()
    found = Result.from_json(text)
    header = [line[4:] for line in RUNS[name].read_text().splitlines() if line.startswith("#   ")]
    for line in found.table().splitlines():
        assert line in header, line
    recipe = OmegaConf.load(ROOT / "recipe" / f"{found.recipe}.yaml")
    assert [arm.name for arm in found.arms] == ["alone", *recipe.arms]
    assert [measure.name for measure in found.measures] == [recipe.judge.name]
    assert list(found.seeds) == list(recipe.seeds)
    assert len(found.seeds) >= 3
    assert found.headline.better(found.teacher[found.headline.name], min(found.alone.of(found.headline)))
    assert f"recipe={found.recipe}" in json.loads(text)["command"]


def test_the_store_gave_what_the_live_teacher_gave() -> None:
    found = Result.from_json((ROOT / "results" / "from-store.json").read_text())
    assert found.arms[1].scores == found.arms[2].scores


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (
            "fashion-logits",
            ["teacher  CifarResNet, 7,433,860 parameters", "pair scores: DKD, weight Linear("],
        ),
        ("fashion-features", ["pair contrast: CRD, weight 0.8", "stops at stages.1: ", "33.3 % saved"]),
        ("multi-teacher", ["student  CifarResNet, 1,233,540 parameters", "== second teacher"]),
        ("self-distillation", ["teacher  MovedCifarResNet, 1,233,540 parameters"]),
        (
            "cross-architecture",
            ["teacher  ImageClassifier, 85,875,556 parameters", "[4, 197, 768] float32"],
        ),
        ("from-store", ["== from the store", "== live teacher"]),
    ],
)
def test_the_settings_of_papers_are_explained_without_their_data(
    recipe: str,
    expected: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["explain", f"recipe={recipe}", "+scale=paper", "data.batch_size=4"]) == 0
    printed = capsys.readouterr().out
    for line in expected:
        assert line in printed
    assert "had to run for real" not in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("depth", "parameters"), [(8, 1_233_540), (32, 7_433_860)])
def test_the_networks_are_those_of_the_papers(depth: int, parameters: int) -> None:
    net = CifarResNet(depth=depth)
    assert sum(p.numel() for p in net.parameters()) == parameters
    convolutions = [m for m in net.modules() if isinstance(m, torch.nn.Conv2d) and m.kernel_size == (3, 3)]
    assert len(convolutions) + 1 == depth  # and the last layer
    with pytest.raises(ValueError, match="6n"):
        CifarResNet(depth=depth + 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """600 invented images in CIFAR-100's files, in the order of their classes."""
    place = tmp_path_factory.mktemp("cifar") / "cifar-100-python"
    place.mkdir()
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 600), ("test", 100)):
        pixels = torch.randint(256, (count, 3072), generator=generator, dtype=torch.uint8).numpy()
        content = {b"data": pixels, b"fine_labels": [i % 100 for i in range(count)]}
        (place / split).write_bytes(pickle.dumps(content))
    return place.parent


def test_cifars_files_are_read_and_split(folder: Path) -> None:
    data = CIFAR100(folder=str(folder), validation=100, labels=None, augment=False, workers=0)
    data.setup()
    assert [len(part) for part in (data.train, data.validation, data.test)] == [500, 100, 100]
    content = pickle.loads((folder / "cifar-100-python" / "train").read_bytes())
    whole = sorted(map(bytes, content[b"data"]))
    parts = [bytes(row) for part in (data.train, data.validation) for row in part.image.flatten(1).numpy()]
    assert sorted(parts) == whole
    batch = next(iter(data.train_dataloader()))
    expected = (
        data.train.image[batch["index"]].double() / 255
        - torch.tensor([0.5071, 0.4867, 0.4408])[:, None, None]
    ) / (torch.tensor([0.2675, 0.2565, 0.2761])[:, None, None])
    torch.testing.assert_close(batch["image"].double(), expected, rtol=1e-5, atol=1e-5)
    assert {k: v.shape for k, v in data.example_batch().items()} == {k: v.shape for k, v in batch.items()}


def test_a_batch_that_is_looked_at_may_be_the_whole_pool_and_no_more() -> None:
    assert len(CIFAR100(validation=49_970, batch_size=30).example_batch()["image"]) == 30
    with pytest.raises(Refusal, match="not one batch"):
        CIFAR100(validation=49_970, batch_size=31).example_batch()


def test_augmented_images_are_moved_or_mirrored(folder: Path) -> None:
    plain, changed = (
        CIFAR100(folder=str(folder), validation=0, augment=augment, workers=0) for augment in (False, True)
    )
    plain.setup()
    changed.setup()
    torch.manual_seed(0)
    before, after = (data.train.__getitems__(range(50))["image"] for data in (plain, changed))
    padded = torch.nn.functional.pad(before, (4, 4, 4, 4))
    for image, found in zip(padded, after, strict=True):
        views = (found, found.flip(2))
        assert any(
            torch.equal(image[:, i : i + 32, j : j + 32], view)
            for i in range(9)
            for j in range(9)
            for view in views
        )
    assert plain.val_dataloader() == []


def test_cifars_judge_and_refusals(folder: Path, tmp_path: Path) -> None:
    data = CIFAR100(folder=str(folder), validation=0, workers=0, size=16)
    data.setup()
    torch.manual_seed(0)
    net = CifarResNet(widths=(4, 4, 4, 4)).eval()
    with torch.no_grad():
        guess = net(data.test.__getitems__(range(100))["image"]).argmax(1)
    expected = 100 * (guess == torch.arange(100)).double().mean().item()
    assert accuracy(net, data=data, teacher=net) == pytest.approx(expected)
    with pytest.raises(Refusal, match=r"CIFAR-100 is not there.*cifar-100-python\.tar\.gz"):
        CIFAR100(folder=str(tmp_path)).setup()
    with pytest.raises(Refusal, match="a class has only 6"):
        CIFAR100(folder=str(folder), validation=0, labels=700).setup()
    with pytest.raises(ValueError, match="labels=50"):
        CIFAR100(labels=50)


def test_pretrained_weights_are_read_when_training_begins(tmp_path: Path) -> None:
    config = {
        "model_type": "vit",
        "num_labels": 100,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 32,
        "patch_size": 16,
    }
    torch.manual_seed(0)
    kept = ImageClassifier(config=config)
    kept.model.save_pretrained(tmp_path / "kept")
    torch.manual_seed(1)
    module = ImageClassifier(config=config, pretrained=str(tmp_path / "kept"))
    weight = "model.vit.layernorm.weight", "model.classifier.weight"
    assert not torch.equal(module.state_dict()[weight[1]], kept.state_dict()[weight[1]])
    module.configure_model()
    assert all(torch.equal(tensor, module.state_dict()[name]) for name, tensor in kept.state_dict().items())
    with torch.no_grad():
        module.model.classifier.weight.zero_()
    module.configure_model()  # again, as for a second fit: what was learned stays
    assert not module.model.classifier.weight.any()
