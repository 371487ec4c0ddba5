"""A teacher that is trained once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from softs_lightning.config import Refusal
from softs_lightning.trained import TrainedTeacher, cache_folder


class Net(L.LightningModule):
    fits = 0

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(3, width)

    def on_fit_start(self) -> None:
        Net.fits += 1

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Broken(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise ArithmeticError("training went wrong")


class Data(L.LightningDataModule):
    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.x = torch.full((4, 3), value)

    def fingerprint(self) -> str:
        return str(self.x.tolist())

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(self.x), batch_size=2)


class Nameless(Data):
    fingerprint = None  # type: ignore[assignment]


TRAINER = {
    "_target_": "lightning.Trainer",
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 2,
    "enable_progress_bar": False,
}


def teacher(
    folder: Path, *, net: Any = None, data: Any = None, trainer: Any = None, **other: Any
) -> TrainedTeacher:
    return TrainedTeacher(
        {"_target_": f"{__name__}.Net", **(net or {})},
        {"_target_": f"{__name__}.Data", **(data or {})},
        {**TRAINER, **(trainer or {})},
        cache_dir=str(folder),
        **other,
    )


@pytest.fixture(autouse=True)
def _count() -> None:
    Net.fits = 0


def test_it_is_what_a_trainer_makes_of_it(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = Net()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(expected, Data())
    made = teacher(tmp_path, seed=3)()
    assert all(torch.equal(made.state_dict()[k], v) for k, v in expected.state_dict().items())
    assert not made.training


def test_the_second_time_it_is_read_not_trained(tmp_path: Path) -> None:
    first = teacher(tmp_path)()
    again = teacher(tmp_path)()
    assert Net.fits == 1
    assert torch.equal(first.layer.weight, again.layer.weight)  # type: ignore[union-attr,arg-type]
    assert [file.suffix for file in tmp_path.iterdir()] == [".pt"]


@pytest.mark.parametrize(
    "change",
    [
        {"net": {"width": 5}},
        {"data": {"value": 2.0}},
        {"trainer": {"max_epochs": 3}},
        {"seed": 1},
    ],
)
def test_whatever_it_depends_on_makes_another_teacher(tmp_path: Path, change: Any) -> None:
    teacher(tmp_path)()
    teacher(tmp_path, **change)()
    assert Net.fits == 2
    assert len(list(tmp_path.iterdir())) == 2


def test_contents_count_even_under_the_same_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher(tmp_path)()
    monkeypatch.setattr(Data, "fingerprint", lambda self: "other contents")
    teacher(tmp_path)()
    assert Net.fits == 2


def test_the_progress_bar_does_not_count(tmp_path: Path) -> None:
    teacher(tmp_path)()
    file = next(tmp_path.iterdir())
    shown = teacher(tmp_path, trainer={"enable_progress_bar": True})
    assert shown._key(Data()) == file.stem


def test_data_without_a_fingerprint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="Nameless needs a method fingerprint"):
        teacher(tmp_path, data={"_target_": f"{__name__}.Nameless"})()


def test_a_training_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError, match="training went wrong"):
        teacher(tmp_path, net={"_target_": f"{__name__}.Broken"})()
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(state: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(OSError, match="disk full"):
        teacher(tmp_path)()
    assert list(tmp_path.iterdir()) == []


def test_training_leaves_the_random_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    teacher(tmp_path)()
    assert torch.equal(torch.rand(3), expected)


def test_untrained_is_the_architecture_only(tmp_path: Path) -> None:
    assert teacher(tmp_path, net={"width": 7}).untrained().layer.out_features == 7  # type: ignore[union-attr]
    assert (Net.fits, list(tmp_path.iterdir())) == (0, [])


def test_a_wrong_argument_says_whose_it_is(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"teacher.module .*'depth'"):
        teacher(tmp_path, net={"depth": 1}).untrained()


def test_the_cache_can_be_put_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.delenv("SOFTS_LIGHTNING_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "softs_lightning"
    monkeypatch.setenv("SOFTS_LIGHTNING_CACHE", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    assert TrainedTeacher({}, {}, {}).folder == tmp_path / "mine"


def test_a_damaged_file_is_not_taken_for_a_teacher(tmp_path: Path) -> None:
    teacher(tmp_path)()
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(Refusal, match=r"cannot be read .*Delete it to train anew"):
        teacher(tmp_path)()


def test_a_folder_that_cannot_be_made_is_refused_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refusal, match=r"cannot be kept in .*Set teacher\.cache_dir"):
        teacher(tmp_path / "file" / "inside")()
    assert Net.fits == 0
