"""Fills a store from two processes: launched by the tests.

Usage: python run_store_precompute.py STORE TIMES [RANK]
Fills it TIMES times. The process of RANK dies in its third batch, as by the machine's hand; each says on its standard
output each batch that the teacher ran on.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from softs_lightning import Pair
from softs_lightning.store import Numbered
from softs_lightning.store.commands import precompute

COUNT = 51


def say(what: str) -> None:
    """A line as a whole, whatever the other process writes."""
    sys.stdout.flush()
    os.write(1, f"\n{os.getpid()} {what}\n".encode())


class Mortal(nn.Module):
    def __init__(self, rank: str | None = None) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.rank = rank
        self.batches = 0
        self.hidden = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.batches += 1
        if self.batches == 3 and self.rank is not None and self.rank == os.environ.get("LOCAL_RANK"):
            os.kill(os.getpid(), signal.SIGKILL)
        say(f"ran on {len(x)}")
        return self.hidden(x)


def data() -> DataLoader[Any]:
    x = torch.randn(COUNT, 4, generator=torch.Generator().manual_seed(3))
    numbered = Numbered(TensorDataset(x), name="train")
    return DataLoader(numbered, batch_size=4, shuffle=True, drop_last=True, collate_fn=numbered.collate)


def fill(store: str, teacher: nn.Module) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        inference_mode=False,
    )
    pair = Pair("outputs[hidden]", "outputs[x]", nn.MSELoss())
    options: dict[str, Any] = {"ids": "index", "commit_seconds": 0.0, "check": "none"}
    precompute(store, teacher, [pair], data(), trainer=trainer, **options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    for _ in range(int(sys.argv[2])):
        fill(sys.argv[1], Mortal(*sys.argv[3:]))
    torch.distributed.destroy_process_group()
