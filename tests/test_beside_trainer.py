"""The callback in each situation of a Trainer, beside the same distillation written into the module.

:class:`Written` is what a user would write without the package: the teacher in a list, the projector
a submodule, the terms in ``training_step``. Both are trained by the same Trainer with the same other
callbacks, so whatever Lightning does, it does to both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from softs_lightning import DistillationCallback, Pair
from tests.training import Student, assert_untouched, data, loader, make_teacher, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings(
        "ignore:You're using the WeightAveraging callback with a model that overrides"
    ),
    pytest.mark.filterwarnings("ignore:.*swap"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

DOUBLE = torch.float64


class Plain(Student):
    """The user's module; kinds of it override how it is built, read or optimized."""

    def __init__(self) -> None:
        super().__init__()
        self.extend()

    def extend(self) -> None:
        """What a kind adds."""

    def parts(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        return x, y

    def task(self, batch: Any) -> Tensor:
        x, y = self.parts(batch)
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.task(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.task(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Second(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


class Combined(Plain):
    def parts(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch["a"]
        return x + batch["b"][0].mean(), y


class BornLate(Plain):
    def extend(self) -> None:
        self.pieces = list(self.net)
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            self.net = nn.Sequential(*self.pieces)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[2])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.net[2], optimizer, lr=0.01)


class Scaled(MixedPrecision):
    """Loss scaling around a training in full precision, so that it can be compared closely."""

    def __init__(self) -> None:
        super().__init__(
            "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
        )

    def forward_context(self) -> Any:
        return nullcontext()

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.double()


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        rows: Any = data(22, DOUBLE)
        return (rows[i] for i in range(22))


def combined() -> Any:
    return CombinedLoader({"a": loader(24, dtype=DOUBLE), "b": loader(12, dtype=DOUBLE)}, "max_size_cycle")


def plain_loader() -> Any:
    return loader(22, dtype=DOUBLE)


@dataclass(frozen=True)
class Case:
    """A row of the table of situations, and how a training gets into it."""

    row: str
    others: Callable[[], list[L.Callback]] = list
    options: dict[str, Any] = field(default_factory=dict)
    kind: type[Plain] = Plain
    data: Callable[[], Any] = plain_loader
    precision: str | None = "64-true"
    tolerance: float = 1e-10
    resumes: bool = True


CASES = [
    Case("one device"),
    Case("precision 32-true", precision="32-true", tolerance=1e-6, data=lambda: loader(22)),
    Case("precision 64-true"),
    Case("precision bf16-mixed", precision="bf16-mixed", tolerance=1e-6, data=lambda: loader(22)),
    Case("precision bf16-true", precision="bf16-true", tolerance=0.0, data=lambda: loader(22)),
    Case("precision 16-mixed", precision=None, options={"plugins": lambda: [Scaled()]}),
    Case("gradient accumulation", options={"accumulate_grad_batches": 4}),
    Case("gradient accumulation", others=lambda: [GradientAccumulationScheduler({0: 2, 2: 3})]),
    Case("gradient clipping", options={"gradient_clip_val": 0.3}),
    Case("gradient clipping", options={"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
    # Lightning keeps this average in float32.
    Case("EMAWeightAveraging", others=lambda: [EMAWeightAveraging(decay=0.5)], tolerance=1e-6),
    Case("WeightAveraging", others=lambda: [WeightAveraging()]),
    Case(
        "StochasticWeightAveraging",
        others=lambda: [StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)],
    ),
    # Lightning itself resumes otherwise than uninterrupted once a group is added.
    Case("BaseFinetuning", others=lambda: [Unfreeze()]),
    Case("LBFGS", kind=Second, tolerance=1e-8),
    Case("CombinedLoader", kind=Combined, data=combined),
    Case("loader of unknown length", data=lambda: DataLoader(Stream(), batch_size=4)),
    Case("overfit_batches", options={"overfit_batches": 2}),
    Case("fast_dev_run", options={"fast_dev_run": 3}, resumes=False),
    Case("limit_train_batches", options={"limit_train_batches": 3, "limit_val_batches": 1}),
    Case("configure_model", kind=BornLate, precision="32-true", tolerance=1e-6, data=lambda: loader(22)),
]


def cases(proves: str, **wanted: Any) -> list[Any]:
    return [
        pytest.param(case, id=f"{case.row} {i}", marks=pytest.mark.situation(case.row, proves=proves))
        for i, case in enumerate(CASES)
        if all(getattr(case, name) == value for name, value in wanted.items())
    ]


def projector() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Linear(6, 8)


def seeded(kind: type[Any]) -> Any:
    torch.manual_seed(2)
    return kind()


def written(kind: type[Plain]) -> Any:
    """The distillation written into a module of this kind."""

    class Written(kind):  # type: ignore[misc, valid-type]
        def extend(self) -> None:
            super().extend()
            self.projector = projector()
            with torch.random.fork_rng():
                self.teacher = [make_teacher().eval().requires_grad_(False)]

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = self.parts(batch)
            teacher = self.teacher[0].to(next(self.net.parameters()).dtype)
            with torch.no_grad():
                theirs = teacher[1](teacher[0](x))
                target = teacher[3](theirs)
            h = self.net[1](self.net[0](x))
            out = self.net[2](h)
            precise = torch.promote_types(out.dtype, torch.float32)
            projected = self.projector(h).to(precise)
            term = F.mse_loss(projected, theirs.to(precise))
            total = 0.5 * term + F.mse_loss(out.to(precise), target.to(precise))
            self.log("total", total)
            return F.cross_entropy(out, y) + total

    return seeded(Written)


def distillation(case: Case) -> DistillationCallback:
    to_teacher = projector().double() if case.precision is None else projector()
    hidden = Pair("outputs[1]", "outputs[net.1]", nn.MSELoss(), 0.5, to_teacher, "hidden")
    pairs = [hidden, Pair("outputs[3]", "outputs[net]", nn.MSELoss(), name="logits")]
    student = seeded(case.kind)
    with torch.random.fork_rng():
        return DistillationCallback(
            make_teacher(), pairs, teacher_inputs=lambda batch: student.parts(batch)[0]
        )


def fit(module: Any, case: Case, *callbacks: L.Callback, **options: Any) -> L.Trainer:
    """Train for three epochs in the case's situation."""
    made = {name: value() if callable(value) else value for name, value in case.options.items()}
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    torch.manual_seed(3)
    run = trainer(
        *callbacks,
        *case.others(),
        **{"max_epochs": 3, "precision": case.precision, "enable_checkpointing": saves, **made},
    )
    run.fit(module, case.data(), case.data(), **options)
    return run


def close(ours: nn.Module, theirs: nn.Module, tolerance: float) -> None:
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=0, atol=tolerance, msg=name)


@pytest.mark.parametrize("case", cases("equal to a reference"))
def test_training_equals_the_distillation_written_into_the_module(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    student, by_hand = seeded(case.kind), written(case.kind)
    callback = distillation(case)
    ran = fit(student, case, callback)
    expected = fit(by_hand, case)
    assert ran.global_step == expected.global_step > 0
    close(student, by_hand, case.tolerance)
    assert_untouched(student)
    found = ran.callback_metrics["distill/total"], expected.callback_metrics["total"]
    torch.testing.assert_close(*found, rtol=0, atol=max(case.tolerance, 1e-6))


@pytest.mark.parametrize("case", cases("resumed equal", resumes=True))
def test_resumed_equals_uninterrupted(case: Case, tmp_path: Path) -> None:
    def run(name: str, resume: Path | None = None) -> tuple[Any, DistillationCallback]:
        student, callback = seeded(case.kind), distillation(case)
        if case.precision in ("64-true", None):
            student.double()  # Lightning restores weights before it converts the module
        save = ModelCheckpoint(tmp_path / name, filename="{epoch}", save_top_k=-1)
        fit(student, case, callback, save, ckpt_path=resume, weights_only=False if resume else None)
        return student, callback

    whole, first = run("whole")
    resumed, second = run("resumed", tmp_path / "whole" / "epoch=0.ckpt")
    close(whole, resumed, 0.0)
    for name, value in first.state_dict()["projectors"].items():
        assert torch.equal(value, second.state_dict()["projectors"][name]), name


@pytest.mark.parametrize("case", cases("checkpoint clean", resumes=True))
def test_checkpoints_hold_the_module_and_nothing_else(case: Case, tmp_path: Path) -> None:
    def keys(module: Any, name: str, *callbacks: L.Callback) -> Any:
        save = ModelCheckpoint(tmp_path / name, filename="{epoch}", save_top_k=-1)
        fit(module, case, *callbacks, save)
        return torch.load(tmp_path / name / "epoch=2.ckpt", weights_only=False)

    ours = keys(seeded(case.kind), "distilled", distillation(case))
    plain = keys(seeded(case.kind), "plain")
    assert ours["state_dict"].keys() == plain["state_dict"].keys()
    assert ours.keys() - {"callbacks"} == plain.keys() - {"callbacks"}
    theirs = {key for key in plain["callbacks"] if "ModelCheckpoint" not in key}
    assert {key for key in ours["callbacks"] if "ModelCheckpoint" not in key} - theirs == {
        "DistillationCallback{'name': 'distill'}"
    }
    fresh = seeded(case.kind)
    fresh.configure_model()
    fresh.load_state_dict(ours["state_dict"], strict=True)


@pytest.mark.situation("validate, test and predict", proves=("equal to a reference", "left as it was"))
def test_evaluation_is_that_of_a_trainer_without_the_callback() -> None:
    def evaluated(run: L.Trainer, module: Any) -> list[Any]:
        found = [
            run.validate(module, plain_loader(), verbose=False),
            run.test(module, plain_loader(), verbose=False),
        ]
        predicted: Any = run.predict(module, plain_loader())
        assert_untouched(module)
        return [*found, torch.cat(predicted)]

    case = CASES[0]
    student = seeded(Plain)
    options: Any = {"precision": "64-true", "max_epochs": 1}
    run = trainer(distillation(case), **options)
    for _ in range(2):
        *ours, predicted = evaluated(run, student)
        *theirs, expected = evaluated(trainer(**options), student)
        assert ours == theirs
        assert torch.equal(predicted, expected)
        run.fit(student, plain_loader(), plain_loader())
