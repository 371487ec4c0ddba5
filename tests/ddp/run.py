"""Trainings as users write them, for one process or several.

Usage: python run.py OUT SCENARIO[,SCENARIO...] [DEVICES [NODES [STRATEGY [RESUME_FROM]]]]
RESUME_FROM is a checkpoint of the first scenario. Each rank writes OUT/SCENARIO.rankN.pt: the weights, the projectors,
the metrics, or the error.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

from softs_lightning import DistillationCallback, EMATeacher, Pair
from softs_lightning.balancing import GradientBalance, UncertaintyBalance
from softs_lightning.schedules import Between


class Student(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class ByHand(Student):
    """Optimizes manually."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        distillation = next(c for c in self.trainer.callbacks if isinstance(c, DistillationCallback))  # type: ignore[attr-defined]
        loss = super().training_step(batch, batch_idx) + distillation.distillation_loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


class Idle(Student):
    """Has a layer that no loss reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(2, 2)


class OnlyDistilled(Student):
    """Has a layer that only a distillation term reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(6, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        h = self.net[1](self.net[0](batch[0]))
        self.side(h)
        return F.cross_entropy(self.net[2](h), batch[1])


class Normed(Student):
    """Keeps statistics of its batches, which differ on the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


class Share(Sampler[int]):
    """The rank's part of each global batch of eight, in order."""

    def __init__(self, n: int, rank: int, world: int) -> None:
        self.indices = [i for i in range(n) if (i // (8 // world)) % world == rank]

    def __iter__(self) -> Any:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class Data(L.LightningDataModule):
    def __init__(self, rows: int = 48) -> None:
        super().__init__()
        self.rows = rows

    def _loader(self, n: int) -> Any:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(48, 4, generator=generator, dtype=torch.float64)[:n]
        y = torch.randint(3, (48,), generator=generator)[:n]
        assert self.trainer is not None
        world, rank = self.trainer.world_size, self.trainer.global_rank
        return DataLoader(TensorDataset(x, y), batch_size=8 // world, sampler=Share(n, rank, world))

    def train_dataloader(self) -> Any:
        return self._loader(self.rows)

    def val_dataloader(self) -> Any:
        return self._loader(24)


def make_teacher() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def masked(student: Tensor, teacher: Tensor, *, mask: Tensor) -> Tensor:
    """The mean over the rows that count; none may count on a rank."""
    counts = (mask != 0).double()
    return ((student - teacher).square().mean(-1) * counts).sum() / counts.sum().clamp_min(1)


def some_rows(batch: Any) -> Tensor:
    """Unlike numbers of rows on the ranks; what is not zero counts, and counts once."""
    return (batch[0][:, 0] > 0.2).double() * (1 + 2 * (batch[0][:, 1] > 0))


def pairs(scenario: str) -> list[Pair]:
    if scenario in ("tokens", "window"):
        return [
            Pair(
                "outputs[2]",
                "outputs[net.2]",
                masked,
                mask=some_rows,
                over_ranks=True,
                over_window=scenario == "window",
                projector=nn.Linear(3, 3),
            )
        ]
    window: Any = Between(2, 5) if scenario == "scheduled" else 0.5
    hidden = Pair(
        "outputs[1]", "outputs[net.1]", nn.MSELoss(), weight=window, projector="linear", name="hidden"
    )
    logits = Pair("outputs[2]", "outputs[net.2]", nn.MSELoss(), name="logits")
    side = Pair("outputs[1]", "outputs[side]", nn.MSELoss(), name="side")
    if scenario == "uneven":
        return [logits]
    return [hidden, logits, side] if scenario == "side" else [hidden, logits]


class Kill(L.Callback):
    """One rank dies in mid-run, as by the machine's hand."""

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 8 and trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)


STUDENTS: dict[str, type[Student]] = {
    "manual": ByHand,
    "idle": Idle,
    "side": OnlyDistilled,
    "statistics": Normed,
}


def train(
    scenario: str,
    out: Path,
    devices: int = 1,
    nodes: int = 1,
    strategy: Any = "auto",
    resume: str | None = None,
) -> dict[str, Any]:
    torch.manual_seed(0)
    student = STUDENTS.get(
        scenario, Student
    )().double()  # Lightning restores weights before it converts the module
    if scenario == "static":
        strategy = DDPStrategy(static_graph=True) if devices * nodes > 1 else "auto"
    mean = EMATeacher(0.8, part="net") if scenario in ("averaged", "statistics") else None
    callback = DistillationCallback(
        make_teacher() if mean is None else lambda: copy.deepcopy(student.net),
        pairs(scenario),
        manual=scenario == "manual",
        validate=scenario == "plain",
        balance={"balanced": GradientBalance(momentum=0.5), "uncertain": UncertaintyBalance()}.get(scenario),
    )
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(out / scenario, filename="{epoch}", save_top_k=-1)
    torch.manual_seed(
        5 + 100 * int(os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")))
    )  # rank 0's must win
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        strategy=strategy,
        max_epochs=2,
        accumulate_grad_batches=4 if scenario == "window" else 1,  # of six: the last window is short
        precision="64-true",
        use_distributed_sampler=False,
        limit_val_batches=1.0 if scenario == "plain" else 0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[
            callback,
            checkpoint,
            *([Kill()] if scenario == "killed" else []),
            *([mean] if mean else []),
        ],
    )
    try:
        trainer.fit(
            student,
            datamodule=Data(46 if scenario == "uneven" else 48),
            ckpt_path=resume,
            weights_only=True if resume else None,
        )
    except RuntimeError as error:
        if scenario != "idle":
            raise
        return {"error": str(error), "left": sorted(student.__dict__.get("_modules", {}))}
    late = ""
    if strategy == "ddp_spawn":
        try:
            trainer.save_checkpoint(out / "late.ckpt")
        except MisconfigurationException as error:
            late = str(error)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "/val/" in name}
    return {
        "student": student.state_dict(),
        **callback.state_dict(),
        "metrics": metrics,
        **({"average": dict(mean.weights)} if mean else {}),
        "rank": trainer.global_rank,
        "late": late,
    }


def main(
    out: str, scenarios: str, devices: str = "1", nodes: str = "1", strategy: str = "auto", *resume: str
) -> None:
    torch.set_num_threads(1)
    for scenario in scenarios.split(","):
        result = train(scenario, Path(out), int(devices), int(nodes), strategy, *resume)
        resume = ()
        rank = os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0"))
        torch.save(result, Path(out) / f"{scenario}.rank{rank}.pt")


if __name__ == "__main__":
    main(*sys.argv[1:])
    if torch.distributed.is_initialized():  # one process, or several
        torch.distributed.destroy_process_group()
