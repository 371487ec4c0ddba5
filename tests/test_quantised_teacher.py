"""Quantised teachers, of torch and of torchao, against loops that call the same models by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from softs_lightning import DistillationCallback, Pair, Teacher
from softs_lightning.store.fingerprint import differences, teacher_fingerprint
from tests.training import Student, assert_untouched, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),
]


def teacher(seed: int = 1) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 3)).eval()


def quantised(seed: int = 1) -> Any:
    from torch.ao.quantization import quantize_dynamic

    return quantize_dynamic(teacher(seed), {nn.Linear}, dtype=torch.qint8)


def by_torchao(seed: int = 1) -> Any:
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    model = teacher(seed)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model


class Small(Student):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)


def batches(dtype: torch.dtype = torch.float32) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(24, 16, generator=generator).to(dtype)
    return DataLoader(TensorDataset(x, torch.randint(3, (24,), generator=generator)), batch_size=4)


def pairs() -> list[Pair]:
    hidden = Pair("outputs[2]", "outputs[net.1]", nn.MSELoss(), name="hidden")
    return [hidden, Pair("outputs[3]", "outputs[net]", nn.MSELoss(), name="logits")]


def by_hand(model: nn.Module, dtype: torch.dtype, own: torch.dtype) -> Small:
    """The teacher in its own type, the student in `dtype`."""
    student = Small().to(dtype)
    optimizer = student.configure_optimizers()
    for x, y in batches(dtype):
        with torch.no_grad():
            theirs, target = model[:3](x.to(own)).to(dtype), model(x.to(own)).to(dtype)  # type: ignore[index]
        h = student.net[1](student.net[0](x))
        out = student.net[2](h)
        loss = F.cross_entropy(out, y) + F.mse_loss(h, theirs) + F.mse_loss(out, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return student


def assert_close(ours: nn.Module, theirs: nn.Module, tolerance: float) -> None:
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=tolerance)


MAKERS = [quantised, by_torchao]


@pytest.mark.situation("quantised teacher", proves=("equal to a reference", "left as it was"))
@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("precision", "dtype", "tolerance"), [("32-true", torch.float32, 1e-6), ("64-true", torch.float64, 1e-12)]
)
def test_training_equals_a_loop_and_the_teacher_comes_back(
    make: Any, precision: Any, dtype: torch.dtype, tolerance: float
) -> None:
    model, untouched = make(), make()
    options = {"teacher_dtype": "float32"} if precision == "64-true" else {}
    student = Small()
    trainer(DistillationCallback(model, pairs(), **options), precision=precision).fit(student, batches(dtype))
    assert_untouched(student)
    assert_close(student, by_hand(untouched, dtype, torch.float32), tolerance)
    x = next(iter(batches()))[0]
    assert torch.equal(model(x), untouched(x))
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert [type(m) for m in model.modules()] == [type(m) for m in untouched.modules()]
    assert [p.dtype for p in model.parameters()] == [p.dtype for p in untouched.parameters()]
    flags = [p.requires_grad for p in model.parameters()]
    assert flags == [p.requires_grad for p in untouched.parameters()]


@pytest.mark.parametrize("make", MAKERS)
def test_factories_and_copies_of_the_callback_train_alike(make: Any) -> None:
    found = []
    callback = DistillationCallback(make(), pairs())
    for each in (callback, copy.deepcopy(callback), DistillationCallback(make, pairs())):
        student = Small()
        trainer(each).fit(student, batches())
        found.append(student)
    assert_close(found[0], found[1], 0.0)
    assert_close(found[0], found[2], 0.0)


@pytest.mark.situation("quantised teacher", proves=("refused with message", "left as it was"))
@pytest.mark.parametrize(
    ("options", "precision"), [({"teacher_dtype": "bfloat16"}, "32-true"), ({}, "bf16-true"), ({}, "64-true")]
)
def test_another_type_is_refused_with_the_way_out(options: dict[str, Any], precision: Any) -> None:
    student = Small()
    with pytest.raises(
        ValueError, match=r"'0' is quantised \(Linear\) and computes in float32.*teacher_dtype='float32'"
    ):
        trainer(DistillationCallback(quantised(), pairs(), **options), precision=precision).fit(
            student, batches()
        )
    assert_untouched(student)


def test_packed_weights_are_part_of_who_a_teacher_is() -> None:
    first, again, other = (teacher_fingerprint(quantised(seed)) for seed in (1, 1, 2))
    assert first == again
    layer_norm_is_alike = differences(first, other)
    assert len(layer_norm_is_alike) == 1
    assert layer_norm_is_alike[0].startswith("weights:")
    assert first["weights"] != teacher_fingerprint(teacher())["weights"]


def test_a_type_that_changes_nothing_is_accepted() -> None:
    placed = Teacher(quantised(), dtype=torch.float32)
    placed.place("cpu")
    assert placed.module is placed.source
    placed.release()
