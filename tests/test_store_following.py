"""Numbers of samples that reach the store whatever is done to a batch on its way to the training step."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from softs_lightning import DistillationCallback, Pair
from softs_lightning.store import Numbered, ProductStore, StoredTeacher
from softs_lightning.store.following import follow

Named = namedtuple("Named", ["x", "y"])


@dataclasses.dataclass
class Record:
    x: Tensor
    y: Tensor


class Movable:
    """A container of a library's own, which moves itself."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def to(self, *args: Any, **options: Any) -> Movable:
        return Movable(self.x.to(*args), self.y.to(*args))


def as_default(x: Tensor, y: Tensor) -> Any:
    found: Any = defaultdict(list)
    found.update(x=x, y=y, extra={"of": "its own"})
    return found


KINDS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict": lambda x, y: {"x": x, "y": y},
    "mixed dict": lambda x, y: {"x": x, "y": y, "name": "text", "more": {"x": x}},
    "list": lambda x, y: [x, y],
    "tuple": lambda x, y: (x, y),
    "named tuple": Named,
    "ordered": lambda x, y: OrderedDict(x=x, y=y),
    "default": as_default,
    "user's": lambda x, y: UserDict(x=x, y=y),
    "dataclass": Record,
    "object": Movable,
}


def read(batch: Any, name: str) -> Tensor:
    if isinstance(batch, (list, tuple)):
        return batch[0 if name == "x" else 1]
    return batch[name] if hasattr(batch, "keys") else getattr(batch, name)


def take(batch: Any) -> Tensor:
    return read(batch, "x")


class Student(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.kinds: set[type] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kinds.add(type(batch))
        return F.mse_loss(self.net(read(batch, "x")), read(batch, "y"))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(L.LightningDataModule):
    def __init__(self, kind: str, numbered: bool) -> None:
        super().__init__()
        x, y = torch.randn(2, 10, 3, generator=torch.Generator().manual_seed(1))
        self.items, self.kind, self.numbered = list(zip(x, y[:, :2], strict=True)), kind, numbered

    def train_dataloader(self) -> Any:
        def collate(items: list[Any]) -> Any:
            return KINDS[self.kind](*(torch.stack(column) for column in zip(*items, strict=True)))

        data: Any = Numbered(self.items, collate_fn=collate) if self.numbered else self.items
        own = data.collate if self.numbered else collate
        generator = torch.Generator().manual_seed(7)
        return DataLoader(data, batch_size=4, shuffle=True, generator=generator, collate_fn=own)


def trained(data: L.LightningDataModule, teacher: Any, **options: Any) -> Student:
    torch.manual_seed(2)
    student = Student()
    pair = Pair("outputs[.]", "outputs[net]", nn.MSELoss())
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[DistillationCallback(teacher, [pair], teacher_inputs=None)],
        **options,
    )
    trainer.fit(student, datamodule=data)
    return student


def make_teacher() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2)


def assert_numbered(path: Path, make: Callable[[bool], L.LightningDataModule], **options: Any) -> Student:
    """A run that writes by number equals the live teacher's, and each sample's number is its own."""
    from softs_lightning import Teacher

    live = trained(make(False), Teacher(make_teacher(), inputs=take), **options)
    teacher = StoredTeacher(make_teacher(), path, ids="index", inputs=take)
    stored = trained(make(True), teacher, **options)
    assert all(torch.equal(value, stored.state_dict()[name]) for name, value in live.state_dict().items())
    (column,) = ProductStore(path).columns()
    assert sorted(column.ids(), key=int) == [str(i) for i in range(10)]
    return stored


@pytest.mark.parametrize("kind", KINDS)
def test_containers_of_every_kind_keep_their_numbers(tmp_path: Path, kind: str) -> None:
    stored = assert_numbered(tmp_path, lambda numbered: Data(kind, numbered))
    (seen,) = stored.kinds  # one type, so that what is compiled for it is compiled once
    assert issubclass(seen, type(KINDS[kind](torch.ones(1), torch.ones(1))))


@pytest.mark.parametrize("kind", ["dict", "mixed dict", "list", "tuple", "named tuple", "default", "user's"])
@pytest.mark.parametrize("precision", ["bf16-true", "64-true"])
def test_a_precision_that_converts_batches_keeps_them(tmp_path: Path, precision: Any, kind: str) -> None:
    assert_numbered(tmp_path, lambda numbered: Data(kind, numbered), precision=precision)


class Before(Data):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return {"x": read(batch, "x") * 2, "y": read(batch, "y")}


class Transferring(Data):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return [read(batch, "x").to(device), read(batch, "y").to(device)]


class After(Data):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return read(batch, "x") * 2, read(batch, "y")


@pytest.mark.parametrize("hooked", [Before, Transferring, After])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_transfer_hooks_that_build_batches_anew_keep_them(
    tmp_path: Path, hooked: type[Data], precision: Any
) -> None:
    assert_numbered(tmp_path, lambda numbered: hooked("dict", numbered), precision=precision)


def test_nothing_stays_behind(tmp_path: Path) -> None:
    teacher = StoredTeacher(make_teacher(), tmp_path, ids="index", inputs=take)
    student = trained(After("dict", True), teacher)
    for name in ("_on_before_batch_transfer", "_apply_batch_transfer_handler"):
        assert name not in student.__dict__
    assert "convert_input" not in student.trainer.precision_plugin.__dict__


def test_a_copy_made_while_it_is_followed_has_its_own_methods() -> None:
    student = Student()
    student._trainer = L.Trainer(logger=False, accelerator="cpu", enable_checkpointing=False)
    leave = follow(student)
    followed = student.__dict__["_on_before_batch_transfer"]
    other = Student()
    assert copy.deepcopy(followed, {id(student): other}).__self__ is other
    leave()
    assert "_on_before_batch_transfer" not in student.__dict__


def test_several_teachers_may_follow_one_student_and_leave_in_any_order(tmp_path: Path) -> None:
    class Both(Student):
        pass

    torch.manual_seed(2)
    student = Both()
    teachers = [
        StoredTeacher(make_teacher(), tmp_path / name, ids="index", inputs=take) for name in ("a", "b")
    ]
    callbacks: list[Any] = [
        DistillationCallback(teacher, [Pair("outputs[.]", "outputs[net]", nn.MSELoss())], name=name)
        for teacher, name in zip(teachers, ("a", "b"), strict=True)
    ]
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        precision="bf16-true",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=callbacks,
    )
    trainer.fit(student, datamodule=After("dict", True))
    assert [len(ProductStore(tmp_path / name).columns()[0]) for name in ("a", "b")] == [10, 10]
    assert "_apply_batch_transfer_handler" not in student.__dict__


def test_a_hook_that_leaves_a_lone_tensor_is_told_of(tmp_path: Path) -> None:
    class Lone(Data):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return read(batch, "x")

    teacher = StoredTeacher(make_teacher(), tmp_path, ids="index")
    with pytest.raises(KeyError, match="carries no sample ids"):
        trained(Lone("dict", True), teacher)
