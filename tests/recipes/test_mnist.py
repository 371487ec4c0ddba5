"""The networks and images of the first paper's experiment, at a small size and without the real images."""

from __future__ import annotations

from pathlib import Path

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from softs_lightning.cli import main
from softs_lightning.config import Refusal
from softs_lightning.recipes.mnist import MNIST, Perceptron
from softs_lightning.recipes.self_distillation import moved
from tests.recipes.test_fashion import write_idx


def test_the_setting_is_explained_without_the_images(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "recipe=digits", "+scale=paper", "data.batch_size=4"]) == 0
    printed = capsys.readouterr().out
    # By hand: weights and biases of 784-800-800-10 and 784-1200-1200-10.
    assert f"student  Perceptron, {785 * 800 + 801 * 800 + 801 * 10:,} parameters" in printed
    assert f"teacher  Perceptron, {785 * 1200 + 1201 * 1200 + 1201 * 10:,} parameters" in printed
    assert "had to run for real" not in printed


def test_missing_images_are_refused_with_where_they_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOFTS_LIGHTNING_DATA", raising=False)
    with pytest.raises(Refusal, match=r"MNIST is not there \(looked in no folder.*datasets\.MNIST\(FOLDER"):
        MNIST().setup()


def test_every_image_is_moved_by_itself_and_as_a_whole() -> None:
    torch.manual_seed(0)
    image = torch.rand(64, 1, 6, 5)
    most = 2
    found: set[tuple[int, int]] = set()
    for one, out in zip(image, moved(image, pixels=most), strict=True):
        shifts = [(i, j) for i in range(-most, most + 1) for j in range(-most, most + 1)]
        (shift,) = [s for s in shifts if torch.equal(out, shifted(one, *s))]
        found.add(shift)
    assert len(found) > 15
    assert moved(image, pixels=0) is image


def shifted(image: Tensor, down: int, right: int) -> Tensor:
    """Moved one value at a time."""
    out = torch.zeros_like(image)
    _, height, width = image.shape
    for i in range(height):
        for j in range(width):
            if 0 <= i - down < height and 0 <= j - right < width:
                out[:, i, j] = image[:, i - down, j - right]
    return out


def test_weights_are_bounded_after_every_step(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 60), ("t10k", 10)):
        pixels = torch.randint(256, (count, 28, 28), generator=generator)
        write_idx(tmp_path / f"{split}-images-idx3-ubyte", pixels, packed=False)
        write_idx(tmp_path / f"{split}-labels-idx1-ubyte", torch.arange(count) % 10, packed=False)
    torch.manual_seed(0)
    net = Perceptron(width=16, dropout=0.5, norm=0.25, jitter=1, lr=0.1)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        net, datamodule=MNIST(folder=str(tmp_path), images=None, labels=None, validation=20, batch_size=10)
    )
    lengths = [m.weight.norm(dim=1) for m in net.modules() if isinstance(m, nn.Linear)]
    assert all((length <= 0.25 + 1e-6).all() for length in lengths)
    assert any((length > 0.2499).any() for length in lengths)  # the bound was met
