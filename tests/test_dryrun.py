"""The dry run finds sizes and leaves no trace."""

from __future__ import annotations

import copy
import random
import threading
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from softs_lightning import DistillationCallback, Pair, ProductSpec
from softs_lightning.dryrun import _one, rehearse, sizes

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


class Student(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        loss = self.net(batch).square().mean() * random.random() * torch.rand(())
        self.log("loss", loss)
        self.log_dict({"a": loss})
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_sizes_are_found_and_nothing_changes() -> None:
    student = Student().eval()
    before = copy.deepcopy(student.state_dict())
    random.seed(0)
    torch.manual_seed(0)
    spec = ProductSpec.parse("inputs[net.3]|outputs[net.0|net]")
    captured = rehearse(student, torch.randn(5, 4, generator=torch.Generator().manual_seed(0)), spec)
    assert sizes(captured, spec) == [torch.Size([5, 6]), torch.Size([5, 6]), torch.Size([5, 2])]
    drawn = random.random(), torch.rand(1)
    random.seed(0)
    torch.manual_seed(0)
    assert drawn[0] == random.random()
    assert torch.equal(drawn[1], torch.rand(1))
    assert student.steps == 0
    assert not student.training
    assert "log" not in student.__dict__
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
    assert all(not m._forward_hooks for m in student.modules())


def test_what_cannot_be_copied_is_shared_and_the_layer_that_holds_it_is_not() -> None:
    student = Student().eval()
    student.net[1].lock = threading.Lock()  # type: ignore[assignment]
    before = copy.deepcopy(student.state_dict())
    spec = ProductSpec.parse("outputs[net]")
    assert sizes(rehearse(student, torch.ones(5, 4), spec), spec) == [torch.Size([5, 2])]
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
    assert not any(module.training for module in student.modules())


def test_sizes_of_what_is_no_tensor_say_how_to_pick() -> None:
    class Tuples(Student):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3)

        def training_step(self, batch: Any) -> Any:  # type: ignore[override]
            return self.lstm(batch)[0].mean()

    spec = ProductSpec.parse("outputs[lstm]")
    with pytest.raises(
        TypeError, match=r"outputs\[lstm\] is a tuple of 2 \(Tensor, tuple\).*pick one with '#'"
    ):
        sizes(rehearse(Tuples(), torch.ones(5, 4), spec), spec)
    spec = ProductSpec.parse("outputs[lstm#1.0]")
    assert sizes(rehearse(Tuples(), torch.ones(5, 4), spec), spec) == [torch.Size([1, 3])]


class Counting(Dataset[Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2,), float(index))


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter([torch.ones(2)] * 3)


def test_a_batch_is_taken_without_drawing_from_samplers() -> None:
    generator = torch.Generator().manual_seed(4)
    loader = DataLoader(Counting(), batch_size=4, shuffle=True, generator=generator)
    state = generator.get_state()
    assert _one(loader).shape == (4, 2)
    assert torch.equal(generator.get_state(), state)

    class Own(DataLoader[Tensor]):
        pass

    own = Own(Counting(), batch_size=4, shuffle=True, generator=generator)
    assert _one(own).shape == (4, 2)
    assert torch.equal(generator.get_state(), state)


def test_streams_lists_and_batch_samplers() -> None:
    assert _one(DataLoader(Stream(), batch_size=2)).shape == (2, 2)
    assert _one([torch.ones(3)]).shape == (3,)
    assert _one(DataLoader(Counting(), batch_sampler=[[1, 2, 3], [4]])).shape == (3, 2)
    with pytest.raises(ValueError, match="gave no batch"):
        _one([])


def make(**options: Any) -> DistillationCallback:
    pair = Pair("outputs[0]", "outputs[net.0]", nn.MSELoss(), projector="linear", name="h")
    return DistillationCallback(nn.Sequential(nn.Linear(4, 9), nn.ReLU()), [pair], **options)


def fit(student: L.LightningModule, callback: DistillationCallback, loaders: Any) -> None:
    L.Trainer(
        accelerator="cpu",
        max_steps=2,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    ).fit(student, loaders)


def test_combined_loaders() -> None:
    class Both(Student):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.net(batch["a"]).mean() + batch["b"].mean()

    callback = make(teacher_inputs=lambda batch: batch["a"])
    loaders = {
        "a": DataLoader(
            TensorDataset(torch.ones(8, 4)), batch_size=4, collate_fn=lambda rows: torch.ones(4, 4)
        ),
        "b": DataLoader(torch.ones(8, 2), batch_size=4),  # type: ignore[arg-type]
    }
    fit(Both(), callback, loaders)
    assert callback.state_dict()["projectors"]["0.projectors.0.weight"].shape == (9, 6)


def test_an_example_batch_is_used_instead_of_the_loader() -> None:
    callback = make(example_batch=torch.ones(3, 4))
    fit(Student(), callback, DataLoader(torch.ones(8, 4), batch_size=4))  # type: ignore[arg-type]
    assert callback.state_dict()["projectors"]["0.projectors.0.weight"].shape == (9, 6)


def test_a_batch_that_only_the_student_understands_needs_teacher_inputs() -> None:
    class Boxed(Student):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch[0][0], batch_idx)

    data: Any = DataLoader(torch.ones(8, 4), batch_size=4, collate_fn=lambda rows: ((torch.stack(rows),), 0))  # type: ignore[arg-type]
    with pytest.raises(Exception, match=r"dry run of the teacher .* teacher_inputs= says what of a batch"):
        fit(Boxed(), make(), data)
    fit(Boxed(), make(teacher_inputs=lambda batch: batch[0][0]), data)


def test_a_failing_dry_run_says_what_to_do() -> None:
    class Broken(Student):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise OSError("no such file")

    with pytest.raises(
        Exception, match=r"projectors of 'h' failed: no such file. Pass a module as the projector"
    ):
        fit(Broken(), make(), DataLoader(torch.ones(8, 4), batch_size=4))  # type: ignore[arg-type]


class Stored(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.rows = iter([torch.ones(4)] * 8)

    def __iter__(self) -> Any:
        return self.rows


@pytest.mark.parametrize(
    "loader", [lambda: DataLoader(Stored(), batch_size=2), lambda: (row for row in [torch.ones(2, 4)] * 3)]
)
def test_data_that_can_be_read_once_is_refused_not_eaten(loader: Any) -> None:
    data = loader()
    with pytest.raises(Exception, match=r"can be read only once.*pass example_batch="):
        fit(Student(), make(), data)
    assert len(list(data)) in (3, 4)


def test_an_argument_of_the_student_by_name_sizes_a_projector() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6)

        def forward(self, hidden: Tensor) -> Tensor:
            return self.linear(hidden)

    class Named(Student):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Layer()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.layer(self.net[0](batch)).mean()

    pair = Pair("outputs[0]", "inputs[layer#hidden]", nn.MSELoss(), projector="linear", name="h")
    callback = DistillationCallback(nn.Sequential(nn.Linear(4, 9), nn.ReLU()), [pair])
    fit(Named(), callback, DataLoader(torch.ones(8, 4), batch_size=4))  # type: ignore[arg-type]
    (weight,) = [v for k, v in callback.state_dict()["projectors"].items() if k.endswith("weight")]
    assert weight.shape == (9, 6)


def test_a_fault_of_the_student_is_said_to_be_the_students() -> None:
    class Nothing(Student):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return None

    with pytest.raises(Exception, match="the dry run of the student"):
        fit(Nothing(), make(), DataLoader(torch.ones(8, 4), batch_size=4))  # type: ignore[arg-type]
