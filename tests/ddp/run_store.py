"""A training script with a stored teacher: launched by the tests with one process or two.

Usage: python run_store.py OUT STORE
On two ranks, with the live teacher, with a store that fills as it trains, and from that store without a teacher; the
first and the last also resumed in the middle of the second epoch. Each rank writes OUT/rankN.pt: the student's weights
after each run, and how many samples were computed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from softs_lightning import DistillationCallback, Pair
from softs_lightning.store import Numbered, StoredTeacher


class Student(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(3)
        x, y = torch.randn(48, 4, generator=generator), torch.randint(3, (48,), generator=generator)
        data = Numbered(TensorDataset(x, y), name="train")
        # Lightning gives each rank its share, in another order each epoch.
        return DataLoader(data, batch_size=4, shuffle=True, collate_fn=data.collate, num_workers=1)


def make_teacher() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


STEP = 9  # of 18, in epochs of 6


def resumed(teacher: Any, folder: Path) -> dict[str, Any]:
    """As if a run had been stopped in mid-epoch: from the checkpoint that one left there."""
    checkpoint = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=STEP, save_top_k=-1)
    train(teacher, checkpoint)
    return train(teacher, resume=folder / f"step={STEP}.ckpt")


def train(teacher: Any, *callbacks: L.Callback, resume: Path | None = None) -> dict[str, Any]:
    torch.manual_seed(2)
    student = Student()
    pairs = [
        Pair("outputs[1]", "outputs[net.1]", nn.MSELoss(), weight=0.5),
        Pair("outputs[2]", "outputs[net.2]", nn.MSELoss(), name="logits"),
    ]
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=3,
        logger=False,
        enable_checkpointing=bool(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[DistillationCallback(teacher, pairs), *callbacks],
    )
    trainer.fit(student, ckpt_path=resume)
    return {
        "student": student.state_dict(),
        "computed": getattr(teacher, "computed", -1),
        "rank": trainer.global_rank,
    }


def main(out: Path, store: str) -> None:
    options: dict[str, Any] = {"ids": "index", "commit_seconds": 0.0}
    runs = {
        "live": train(make_teacher()),
        "write": train(StoredTeacher(make_teacher(), store, **options)),
        "read": train(StoredTeacher(None, store, **options)),
        "live resumed": resumed(make_teacher(), out / "live"),
        "read resumed": resumed(StoredTeacher(None, store, **options), out / "read"),
    }
    torch.save(runs, out / f"rank{runs['live']['rank']}.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2])
    torch.distributed.destroy_process_group()
