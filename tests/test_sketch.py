"""A student sketched against the student that runs its step; what cannot be sketched runs, and says why."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy
from transformers import BertConfig, BertModel

from softs_lightning import ProductSpec
from softs_lightning.dryrun import rehearse
from softs_lightning.sketch import Sketch
from tests.test_outline import llama


class Student(L.LightningModule):
    """Its classes are the signs of the rows' sums."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.5), nn.Linear(6, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores = self.net(batch)
        loss = nn.functional.cross_entropy(scores, (batch.sum(-1) > 0).long())
        self.log("loss", loss)
        self.log_dict({"loss again": loss}, prog_bar=True)
        return loss


class Logging(Student):
    """Reads a number off a tensor, as logs of one's own do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("number", loss.item())
        return loss


class Devices(Student):
    """Holds tensors that are no buffers, and makes more where it stands."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(4)
        self.lists = {"shift": [torch.zeros(4)]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        moved = batch * self.scale + self.lists["shift"][0] + torch.zeros(4, device=self.device)
        return super().training_step(moved, batch_idx)


class Recurrent(Student):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.lstm(batch)[0].mean() + super().training_step(batch, batch_idx)


class Measuring(Student):
    """A metric that checks its input's values."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.accuracy(self.net(batch).detach(), (batch.sum(-1) > 0).long())
        return super().training_step(batch, batch_idx)


class Loading(Student):
    """Begins with weights that were kept."""

    def __init__(self) -> None:
        super().__init__()
        self.load_state_dict(Student().state_dict())
        with torch.device("cpu"):
            self.load_state_dict(Student().state_dict())


class Language(L.LightningModule):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.model = make()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.as_tensor(self.model(**batch)[0].mean())


def bert() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    return BertModel(BertConfig(vocab_size=50, num_hidden_layers=2, **sizes))


ROWS = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
TOKENS = {
    "input_ids": torch.ones(2, 7, dtype=torch.long),
    "attention_mask": torch.tensor([[1] * 7, [1] * 5 + [0] * 2]),
}

CASES = [
    (Student, ROWS, "inputs[net.3]|outputs[net.0|net]"),
    (Logging, ROWS, "outputs[net.1]"),
    (Devices, ROWS, "outputs[net.0|net.3]"),
    (Loading, ROWS, "outputs[net.0]"),
    (Measuring, ROWS, "outputs[net!1]"),
    (Recurrent, ROWS, "outputs[lstm#0|lstm#1.0]"),
    (lambda: Language(bert), TOKENS, "outputs[model.encoder.layer.0|model.pooler]"),
    (lambda: Language(llama), TOKENS, "inputs[model.lm_head]|outputs[model.model.layers.0]"),
]  # fmt: skip


def run(student: L.LightningModule, batch: Any, product_id: str) -> list[tuple[torch.Size, torch.dtype]]:
    values = rehearse(student, batch, ProductSpec.parse(product_id)).select()
    return [(value.shape, value.dtype) for value in values]


def sketched(student: Sketch, batch: Any, product_id: str) -> list[tuple[torch.Size, torch.dtype]]:
    values = student.rehearse(batch, ProductSpec.parse(product_id)).select()
    return [(value.shape, value.dtype) for value in values]


@pytest.mark.parametrize(("make", "batch", "product_id"), CASES)
def test_a_sketch_finds_what_a_run_finds(make: Any, batch: Any, product_id: str) -> None:
    student = Sketch(make)
    assert sketched(student, batch, product_id) == run(make(), batch, product_id)
    assert (student.made, student.ran) == (None, None)
    assert all(parameter.is_meta for parameter in student.module.parameters())


def test_a_student_of_seven_billion_parameters_needs_no_memory() -> None:
    student = Sketch(lambda: Language(lambda: llama(4096, 32, 32, 11008, 32000)))
    found = sketched(student, TOKENS, "inputs[model.lm_head]|outputs[model.model.layers.7]")
    assert [shape for shape, _ in found] == [(2, 7, 4096), (2, 7, 4096)]
    assert sum(p.numel() for p in student.module.parameters()) == 6_738_415_616
    assert (student.made, student.ran) == (None, None)


class Branching(Student):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        wide = batch if batch.sum() > -1e9 else batch[:1]
        return super().training_step(wide, batch_idx)


class Numpy(Student):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(torch.from_numpy(np.tanh(batch.numpy())), batch_idx)


class Picking(Student):
    """How many rows a layer gets depends on the values."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.as_tensor(self.act(batch[batch[:, 0] > -1e9]).mean())


class Trainerless(Student):
    """Reads its trainer, which a dry run has none of, behind its layers."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * self.trainer.current_epoch


def test_a_trainer_that_is_missed_too_late_to_matter_is_no_reason_to_run() -> None:
    student = Sketch(Trainerless)
    assert sketched(student, ROWS, "outputs[net]") == run(Trainerless(), ROWS, "outputs[net]")
    assert (student.made, student.ran) == (None, None)


class Late(Student):
    """Runs a layer once more, behind what no fake tensor can do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.net(torch.from_numpy(loss.detach().numpy() * np.ones((2, 4), np.float32))).mean()


@pytest.mark.parametrize(
    ("make", "product_id", "why"),
    [
        (Branching, "outputs[net.0]", "GuardOnDataDependentSymNode: Could not guard on data-dependent"),
        (Numpy, "outputs[net.0]", "RuntimeError: .numpy() is not supported for tensor subclasses."),
        (Picking, "outputs[act]", "ValueError: the size of outputs[act] depends on values"),
        (Late, "outputs[net!1]", "RuntimeError: .numpy() is not supported for tensor subclasses."),
    ],
)
def test_what_cannot_be_sketched_runs_and_says_why(make: Any, product_id: str, why: str) -> None:
    student = Sketch(make)
    assert sketched(student, ROWS, product_id) == run(make(), ROWS, product_id)
    assert student.ran is not None
    assert student.ran.startswith(why)
    assert "\n" not in student.ran


class Counted(Student):
    """Reads numbers off tensors as it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [rate.item() for rate in torch.arange(3) / 4]


def test_a_student_that_cannot_be_made_without_memory_is_made_and_says_why() -> None:
    student = Sketch(Counted)
    assert student.made is not None
    assert student.made.startswith("RuntimeError: Tensor.item() cannot be called on meta tensors")
    assert sketched(student, ROWS, "outputs[net]") == run(Counted(), ROWS, "outputs[net]")
    assert student.ran is None
    assert not any(parameter.is_meta for parameter in student.module.parameters())


def test_what_is_wrong_with_a_student_is_said_as_its_own_step_says_it() -> None:
    class Broken(Student):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return batch["words"]

    with pytest.raises(KeyError, match="words") as raised:
        sketched(Sketch(Broken), {"word": ROWS}, "outputs[net]")
    assert raised.value.__context__ is None


def test_asked_to_compute_it_runs_the_step_on_weights() -> None:
    student = Sketch(Student, computing=True)
    (values,) = student.rehearse(ROWS, ProductSpec.parse("outputs[net.0]")).select()
    assert torch.equal(values, student.module.net[0](ROWS))  # type: ignore[index,operator]
    assert (student.made, student.ran) == (None, None)


def test_what_a_function_remembers_has_values_afterwards() -> None:
    @functools.lru_cache  # here: what is there before all tests is no longer seen by the garbage collector
    def mask(size: int) -> tuple[list[Tensor], str]:
        return [torch.ones(size, size).tril()], "lower"

    class Remembering(Student):
        """Makes a tensor once for all steps, and looks at values behind that."""

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            moved = torch.tanh(self.act(batch @ mask(4)[0][0]))
            return moved.mean() if moved.sum() > -1e9 else moved.sum()

        def __init__(self) -> None:
            super().__init__()
            self.act = nn.Identity()

    student = Sketch(Remembering)
    (values,) = student.rehearse(ROWS, ProductSpec.parse("outputs[act]")).select()
    assert student.ran is not None
    assert torch.equal(values, ROWS @ torch.ones(4, 4).tril())
    assert torch.equal(mask(4)[0][0], torch.ones(4, 4).tril())


class Batch:
    """A batch of a class of one's own, which the step writes into."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.seen: list[Tensor] = []


class Writing(Devices):
    def __init__(self) -> None:
        super().__init__()
        self.queue = torch.zeros(5, 4)
        self.steps = 0
        self.generator = torch.Generator().manual_seed(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.queue[:] = batch.rows + torch.rand(5, 4, generator=self.generator)
        self.lists["shift"].append(batch.rows)
        batch.rows = batch.rows * 2
        batch.seen.append(batch.rows)
        return super().training_step(batch.rows, batch_idx)


def test_nothing_of_the_student_the_batch_or_the_random_state_is_changed() -> None:
    student, batch = Writing().eval(), Batch(ROWS)
    student.net[1].train()
    before = copy.deepcopy(student.state_dict())
    attributes = {name: dict(vars(module)) for name, module in student.named_modules()}
    training = {name: module.training for name, module in student.named_modules()}
    random, drawn = torch.get_rng_state(), student.generator.get_state()
    captured = rehearse(student, batch, ProductSpec.parse("outputs[net]"), computing=False)
    assert captured.select()[0].shape == (5, 2)
    assert all(torch.equal(value, before[name]) for name, value in student.state_dict().items())
    assert {name: module.training for name, module in student.named_modules()} == training
    for name, module in student.named_modules():
        assert vars(module).keys() == attributes[name].keys()
        assert all(vars(module)[key] is value for key, value in attributes[name].items())
        assert not module._forward_hooks
    assert (student.steps, len(student.lists["shift"]), float(student.queue.sum())) == (0, 1, 0.0)
    assert batch.rows is ROWS
    assert batch.seen == []
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(student.generator.get_state(), drawn)
