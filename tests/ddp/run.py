"""A training script as a user writes it: launched by the tests with one process or two.

Usage: python run.py OUT DEVICES STRATEGY [RESUME_FROM]
Each rank writes OUT/rankN.pt with the student's weights and the projectors' after training.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Sampler, TensorDataset

from softs_lightning import DistillationCallback, Pair


class Student(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Share(Sampler[int]):
    """The rank's part of each global batch of eight, in order."""

    def __init__(self, n: int, rank: int, world: int) -> None:
        self.indices = [i for i in range(n) if (i // (8 // world)) % world == rank]

    def __iter__(self) -> Any:
        return iter(self.indices)

    def __len__(self) -> int:
        return len(self.indices)


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(48, 4, generator=generator, dtype=torch.float64)
        y = torch.randint(3, (48,), generator=generator)
        assert self.trainer is not None
        world, rank = self.trainer.world_size, self.trainer.global_rank
        return DataLoader(TensorDataset(x, y), batch_size=8 // world, sampler=Share(48, rank, world))


class Save(L.Callback):
    def __init__(self, out: Path, callback: DistillationCallback) -> None:
        self.out = out
        self.callback = callback

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        state = {"student": pl_module.state_dict(), **self.callback.state_dict()}
        torch.save(state, self.out / f"rank{trainer.global_rank}.pt")


def main(out: Path, devices: int, strategy: str, resume: str | None) -> None:
    torch.manual_seed(1)
    teacher = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    student = Student().double()  # Lightning restores weights before it converts the module
    callback = DistillationCallback(
        teacher,
        [
            Pair("outputs[1]", "outputs[net.1]", nn.MSELoss(), weight=0.5, projector="linear", name="hidden"),
            Pair("outputs[2]", "outputs[net.2]", nn.MSELoss(), name="logits"),
        ],
    )
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(out, filename="{epoch}", save_top_k=-1)
    torch.manual_seed(5 + 100 * int(os.environ.get("LOCAL_RANK", "0")))  # rank 0's projectors must win
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=2,
        precision="64-true",
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, checkpoint, Save(out, callback)],
    )
    trainer.fit(student, datamodule=Data(), ckpt_path=resume, weights_only=True if resume else None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] if len(sys.argv) > 4 else None)
