"""``DistillationCallback(store=...)`` and the commands of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from softs_lightning import DistillationCallback, Pair, ProductStore
from softs_lightning.cli import main
from softs_lightning.store import SampleChangedError
from tests.test_store_training import BATCH, COUNT, Student, assert_equal, loader, make_teacher, pairs

OPTIONS: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "log_every_n_steps": 1,
}


def trained(callback: DistillationCallback) -> dict[str, Tensor]:
    torch.manual_seed(2)
    student = Student()
    L.Trainer(max_epochs=2, callbacks=[callback], **OPTIONS).fit(student, loader())
    return student.state_dict()


def test_the_first_epoch_writes_later_ones_read_and_the_teacher_may_go(tmp_path: Path) -> None:
    live = trained(DistillationCallback(make_teacher(), pairs()))
    writing: Any = DistillationCallback(make_teacher(), pairs(), store=tmp_path)
    assert_equal(trained(writing), live)
    assert writing.teacher.computed == BATCH + COUNT  # the dry run's batch, then each sample once
    assert_equal(trained(DistillationCallback(None, pairs(), store=tmp_path)), live)


def test_random_augmentation_is_refused(tmp_path: Path) -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            x, y = super().__getitem__(index)
            return x + torch.randn(3), y

    class Plain(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(3, 2)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    data = DataLoader(Noisy(torch.randn(8, 3), torch.zeros(8, dtype=torch.long)), batch_size=4)
    pair = Pair("outputs[.]", "outputs[net]", nn.MSELoss())
    callback = DistillationCallback(nn.Linear(3, 2), [pair], store=tmp_path)
    with pytest.raises(SampleChangedError):
        L.Trainer(max_epochs=1, callbacks=[callback], **OPTIONS).fit(Plain(), data)


def test_neither_teacher_nor_store_is_refused() -> None:
    with pytest.raises(TypeError, match="without a teacher, store= must say"):
        DistillationCallback(None, pairs())


def test_a_recipe_is_precomputed_listed_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTS_LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    store = tmp_path / "store"
    short = [
        "data.passes=1",
        "teacher.data.passes=1",
        "+teacher.trainer.logger=false",
        "+teacher.trainer.enable_checkpointing=false",
    ]
    assert main(["precompute", f"store={store}", *short]) == 0
    (column,) = ProductStore(store).columns()
    assert len(column) == 1000
    capsys.readouterr()
    assert main(["store", "ls", str(store)]) == 0
    assert "outputs[early]" in capsys.readouterr().out
    assert main(["store", "verify", str(store)]) == 0


@pytest.mark.parametrize("words", [["store", "lss", "x"], ["store", "ls"], ["precompute"]])
def test_wrong_words_end_with_one_message(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.count("softs-distill:") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trainer.max_epochs=abc"], "lightning"),
        (["recipes", "copy", "digits", "own.yml"], "name it own.yaml"),
        (["recipes", "copy", "digits", "/proc/nowhere"], "cannot be written"),
    ],
)
def test_settings_that_cannot_be_used_end_with_one_message(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SOFTS_LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    short = ["data.passes=1", "teacher.data.passes=1", "seeds=[0]"]
    assert main([*words, *([] if words[0] == "recipes" else short)]) != 0
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_a_refused_run_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOFTS_LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert main(["pairs.0.teacher='outputs[haed]'"]) != 0
    assert not list((tmp_path / "outputs").rglob("*/*"))


def test_config_dir_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipe=digits", "--config-dir"]) == 2
    assert "is followed by a folder" in capsys.readouterr().err
