"""Trainings with a sharded student or a teacher in another place, for one process or several.

Usage: torchrun ... -m tests.ddp.run_sharded OUT SCENARIO[,SCENARIO...]
Each rank writes OUT/SCENARIO.rankN.pt: the whole weights, the projectors, what was logged, or the error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader

from softs_lightning import DistillationCallback, Pair
from softs_lightning.balancing import GradientBalance, UncertaintyBalance
from softs_lightning.losses import VID, LinearCEKL, LinearJSD, LinearKL
from softs_lightning.schedules import Between
from tests.ddp.run import Data

SHARDED = {"layers", "each", "nested", "root", "hybrid"}


class Student(L.LightningModule):
    """Shards itself where the strategy leaves that to it, in one of the ways that users choose."""

    def __init__(self, shards: str) -> None:
        super().__init__()
        self.shards = shards
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def configure_model(self) -> None:
        if self.shards not in SHARDED:
            return
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        if self.shards == "hybrid":  # whole on each of two nodes, were there any
            mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
        if self.shards != "root":
            for layer in self.layers():
                fully_shard(layer, mesh=mesh)
        if self.shards != "each":
            fully_shard(self.net if self.shards in ("layers", "hybrid") else self, mesh=mesh)

    def layers(self) -> list[nn.Module]:
        return [self.net[0], self.net[2]]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Aside(Student):
    """Has a block that only a distillation term reaches, by an activation from inside of it."""

    def __init__(self, shards: str) -> None:
        super().__init__(shards)
        self.side = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2).requires_grad_(False))

    def layers(self) -> list[nn.Module]:
        return [*super().layers(), self.side]

    def forward(self, x: Tensor) -> Tensor:
        h = self.net[1](self.net[0](x))
        self.side(h)
        out: Tensor = self.net[2](h)
        return out


class Tokens(Student):
    """A head on two tokens."""

    def __init__(self, shards: str) -> None:
        super().__init__(shards)
        self.net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 11))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x.unflatten(-1, (2, 2)))
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]).flatten(0, 1), labels(batch).flatten())


def labels(batch: Any) -> Tensor:
    found: Tensor = batch[1].unsqueeze(1).expand(-1, 2)
    return found


def two_tokens(batch: Any) -> Tensor:
    x: Tensor = batch[0]
    return x.unflatten(-1, (2, 2))


class Unlike(Data):
    """One rank has more to validate on than the other."""

    def val_dataloader(self) -> Any:
        loader = super().val_dataloader()
        rank = self.trainer.global_rank  # type: ignore[union-attr]
        return DataLoader(loader.dataset, batch_size=4, sampler=range(4 * (1 + rank)))


class Watch(L.Callback):
    """Looks after each step whether the teacher's parameters are whole, and how many numbers lie on this rank."""

    def __init__(self, distillation: DistillationCallback) -> None:
        self.distillation = distillation
        self.whole: set[bool] = set()
        self.share = 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        module = self.distillation.teacher.module
        assert module is not None
        parameters = list(module.parameters())
        self.whole |= {not isinstance(p, DTensor) for p in parameters}
        here = [p.to_local() if isinstance(p, DTensor) else p for p in parameters]
        self.share = sum(p.numel() for p in here) / sum(p.numel() for p in parameters)


class Fail(L.Callback):
    """One rank fails in mid-run."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 8 and trainer.global_rank == 1:
            raise ZeroDivisionError("on one rank only")


class Scalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 2)) * self.scale


def make_teacher() -> nn.Module:
    """Of five layers, of which the last two are never needed."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.Tanh(), nn.Linear(3, 3))


def make_head_teacher() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 7), nn.Tanh(), nn.Linear(7, 11))


def pairs(weight: Any = 0.5, projector: Any = "linear") -> list[Pair]:
    return [
        Pair("outputs[1]", "outputs[net.1]", nn.MSELoss(), weight=weight, projector=projector, name="hidden"),
        Pair("outputs[2]", "outputs[net.2]", nn.MSELoss(), name="logits"),
    ]


def side_pairs() -> list[Pair]:
    return [*pairs(), Pair("outputs[1]", "outputs[side.1]", nn.MSELoss(), name="side")]


def trained_pairs() -> list[Pair]:
    """A loss with layers of its own."""
    return [Pair("outputs[1]", "outputs[net.1]", VID(6, 8), name="vid")]


def head_pairs() -> list[Pair]:
    heads: dict[str, Any] = {"student_head": "net.2", "teacher_head": "2", "chunk_size": 3}
    losses = [
        LinearKL(2.0, **heads),
        LinearJSD(0.3, **heads),
        LinearCEKL(0.5, labels=labels, shift=False, **heads),
    ]
    return [Pair("inputs[2#0]", "inputs[net.2#0]", loss, name=type(loss).__name__) for loss in losses]


@dataclass(frozen=True)
class Scenario:
    shards: str = "layers"  # or how the student is wrapped: "ddp", "tensor", "nothing"
    student: type[Student] = Student
    teacher: Callable[[], nn.Module] = make_teacher
    pairs: Callable[[], list[Pair]] = pairs
    data: type[Data] = Data
    distributed: bool = False  # the checkpoint
    resumes: str | None = None  # the checkpoint of another scenario
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)

    def alone(self) -> Scenario:
        """The same on one process, uninterrupted, with the teacher beside the student."""
        options = {**self.options, "placement": "replicated"}
        return replace(self, shards="auto", resumes=None, options=options)


VALIDATED: dict[str, Any] = {"limit_val_batches": 1.0}
SPREAD: dict[str, Any] = {"placement": "sharded"}
HEADS = Scenario(
    student=Tokens, teacher=make_head_teacher, pairs=head_pairs, options={"teacher_inputs": two_tokens}
)
ALIKE = {
    "fsdp": Scenario(options={"validate": True}, trainer=VALIDATED),
    "fsdp-each": Scenario("each", options=SPREAD),
    "fsdp-root": Scenario("root", trainer={"gradient_clip_val": 0.5, "accumulate_grad_batches": 2}),
    "fsdp-folder": Scenario(distributed=True),
    "fsdp-scheduled": Scenario(pairs=lambda: pairs(Between(2, 5))),
    "fsdp-balanced": Scenario(options={"balance": GradientBalance(momentum=0.5)}),
    "fsdp-uncertain": Scenario(options={"balance": UncertaintyBalance()}),
    "fsdp-hybrid": Scenario("hybrid", trainer={"gradient_clip_val": 0.1}),
    "fsdp-trained": Scenario("root", pairs=trained_pairs),
    "fsdp-side": Scenario("nested", student=Aside, pairs=side_pairs),
    "fsdp-heads": replace(HEADS, shards="nested", options={**HEADS.options, **SPREAD}),
    "ddp-heads": replace(HEADS, shards="ddp", options={**HEADS.options, **SPREAD}),
    "ddp-sharded": Scenario("ddp", options={**SPREAD, "validate": True}, trainer=VALIDATED),
    "ddp-whole": Scenario("ddp", options={**SPREAD, "early_exit": False}),
    "ddp-cpu": Scenario("ddp", options={"placement": "cpu"}),
    "fsdp-resumed": Scenario(resumes="fsdp/epoch=0.ckpt"),
    "fsdp-folder-resumed": Scenario(distributed=True, resumes="fsdp-folder/epoch=0.ckpt"),
}
REFUSED = {
    "tensor": Scenario("tensor"),
    "nothing": Scenario("nothing"),
    "scalar": Scenario(pairs=lambda: pairs(projector=Scalar())),
    "unlike": Scenario("ddp", data=Unlike, options={**SPREAD, "validate": True}, trainer=VALIDATED),
}
SCENARIOS = {**ALIKE, **REFUSED}
"""What one launch trains."""
FAILING = {"failing": ALIKE["fsdp"]}


def strategy_of(scenario: Scenario) -> Any:
    if scenario.shards in ("auto", "ddp"):
        return scenario.shards
    sizes = (1, 2) if scenario.shards == "tensor" else (2, 1)
    return ModelParallelStrategy(*sizes, save_distributed_checkpoint=scenario.distributed)


@contextmanager
def in_double() -> Iterator[None]:
    """Everything in float64: ModelParallelStrategy knows no precision of that name."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def train(name: str, scenario: Scenario, out: Path, checkpoint: Any = None) -> dict[str, Any]:
    rank = int(os.environ.get("RANK", "0"))
    with in_double():
        torch.manual_seed(0)
        student, teacher = scenario.student(scenario.shards), scenario.teacher()
        options: dict[str, Any] = {"limit_val_batches": 0, **scenario.trainer}
        callback = DistillationCallback(teacher, scenario.pairs(), **scenario.options)
        torch.manual_seed(5 + 100 * rank)  # rank 0's must win
        trainer = L.Trainer(
            accelerator="cpu",
            devices=1 if scenario.shards == "auto" else 2,
            strategy=strategy_of(scenario),
            max_epochs=2,
            use_distributed_sampler=False,
            num_sanity_val_steps=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[
                callback,
                watch := Watch(callback),
                L.pytorch.callbacks.ModelCheckpoint(out / name, filename="{epoch}", save_top_k=-1),
                *([Fail()] if name == "failing" else []),
            ],
            **options,
        )
        before = [(p, p.requires_grad, p.clone()) for p in teacher.parameters()]
        try:
            trainer.fit(
                student, datamodule=scenario.data(), ckpt_path=checkpoint, weights_only=checkpoint and True
            )
        except (MisconfigurationException, RuntimeError) as error:
            return {"error": str(error)}
        after = list(teacher.parameters())
    if name == "fsdp":
        trainer.save_checkpoint(out / "after.ckpt")
    return {
        "student": {key: whole(value) for key, value in student.state_dict().items()},
        **callback.state_dict(),
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items() if "/val/" in key},
        "teacher": {"whole": sorted(watch.whole), "share": watch.share},
        "left": [key for key, _ in student.named_children()],
        "given back": all(
            one is now and one.requires_grad == flag and torch.equal(one, value)
            for (one, flag, value), now in zip(before, after, strict=True)
        ),
    }


def whole(value: Any) -> Tensor:
    found: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found


def main(out: str, names: str) -> None:
    torch.set_num_threads(1)
    for name in names.split(","):
        scenario = {**SCENARIOS, **FAILING}[name]
        resumed = None if scenario.resumes is None else Path(out) / scenario.resumes
        result = train(name, scenario, Path(out), resumed)
        torch.save(result, Path(out) / f"{name}.rank{os.environ['RANK']}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
    torch.distributed.destroy_process_group()
