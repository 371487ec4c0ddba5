"""Exported students: plain files, complete or not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn

from softs_lightning import DistillationCallback, save_student
from tests.training import Student, hidden, loader, make_student, make_teacher, trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


class Export(DistillationCallback):
    """Saves in mid-fit."""

    def __init__(self, path: Path) -> None:
        super().__init__(make_teacher(), [hidden()])
        self.path = path

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        save_student(pl_module, self.path)


@pytest.mark.parametrize("suffix", [".pt", ".ckpt", ".safetensors"])
@pytest.mark.parametrize("when", ["during the fit", "after it", "compiled"])
def test_the_file_is_the_users_own_state(tmp_path: Path, suffix: str, when: str) -> None:
    student = make_student()
    path = tmp_path / "new" / f"student{suffix}"
    trainer(Export(path)).fit(student, loader())
    if when == "after it":
        save_student(student, path)
    if when == "compiled":
        student.net = torch.compile(student.net, backend="eager")  # type: ignore[assignment]
        save_student(torch.compile(student, backend="eager"), path)  # type: ignore[arg-type]
    read = (
        safetensors.torch.load_file(path) if suffix == ".safetensors" else torch.load(path, weights_only=True)
    )
    fresh = Student()
    fresh.load_state_dict(read, strict=True)
    for ours, theirs in zip(fresh.parameters(), student.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_transformers_students_go_to_a_directory(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    student = nn.Module()
    student.model = transformers.BertModel(config)
    assert save_student(student.model, tmp_path / "out") == tmp_path / "out"
    again = transformers.BertModel.from_pretrained(tmp_path / "out")
    for name, value in student.model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
    with pytest.raises(ValueError, match=r"Module has no save_pretrained \(its 'model' has\)"):
        save_student(student, tmp_path / "other")
    with pytest.raises(ValueError, match="no part of it has either"):
        save_student(nn.Linear(1, 1), tmp_path / "other")


PLAIN = """
import sys
sys.modules["softs_lightning"] = None  # not installed
import lightning as L, torch
from torch import nn

class Student(L.LightningModule):
    def __init__(self, width=6, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3))

folder = sys.argv[1]
fresh = Student()
fresh.load_state_dict(torch.load(folder + "/student.pt", weights_only=True), strict=True)
loaded = Student.load_from_checkpoint(folder + "/run.ckpt", strict=True, weights_only=True)
assert all(map(torch.equal, fresh.parameters(), loaded.parameters()))
torch.save([p.detach() for p in loaded.parameters()], folder + "/read.pt")
"""


@pytest.mark.slow
def test_files_are_read_where_this_package_is_not_installed(tmp_path: Path) -> None:
    student = make_student()
    fit = trainer(DistillationCallback(make_teacher(), [hidden()]))
    fit.fit(student, loader())
    fit.save_checkpoint(tmp_path / "run.ckpt")
    save_student(student, tmp_path / "student.pt")
    done = subprocess.run(
        [sys.executable, "-c", PLAIN, str(tmp_path)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    read = torch.load(tmp_path / "read.pt", weights_only=True)
    assert all(map(torch.equal, read, student.parameters()))


def test_what_is_no_module_is_refused(tmp_path: Path) -> None:
    fit = trainer()
    fit.fit(make_student(), loader())
    with pytest.raises(TypeError, match="was given Trainer: pass its lightning_module"):
        save_student(fit, tmp_path / "student.pt")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"was given NoneType$"):
        save_student(None, tmp_path / "student.pt")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_earlier_file_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_student(nn.Linear(2, 1), tmp_path / "student.pt")
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        save_student(nn.Linear(2, 1), path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_state_that_is_not_tensors_alone_is_refused_as_safetensors(tmp_path: Path) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"x": 1}

    with pytest.raises(ValueError, match=r"holds tensors alone, and '_extra_state'"):
        save_student(Extra(2, 2), tmp_path / "student.safetensors")
    assert list(tmp_path.iterdir()) == []
