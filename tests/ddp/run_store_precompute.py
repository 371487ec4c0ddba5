"""Fills a store from two processes: launched by the tests.

Usage: python run_store_precompute.py STORE SECONDS [TIMES]
Fills it TIMES times, once if not given. The teacher takes SECONDS for a batch; each process says on its standard output what it is, and each batch it ran on.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from softs_lightning import Pair
from softs_lightning.store import Numbered
from softs_lightning.store.commands import precompute

COUNT = 99


def say(what: str) -> None:
    """A line as a whole, whatever the other process writes."""
    sys.stdout.flush()
    os.write(1, f"\n{os.getpid()} {what}\n".encode())


class Slow(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.seconds = seconds
        self.hidden = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(self.seconds)
        say(f"ran on {len(x)}")
        return self.hidden(x)


def data() -> DataLoader[Any]:
    x = torch.randn(COUNT, 4, generator=torch.Generator().manual_seed(3))
    numbered = Numbered(TensorDataset(x), name="train")
    return DataLoader(numbered, batch_size=4, shuffle=True, drop_last=True, collate_fn=numbered.collate)


def fill(store: str, seconds: float, devices: int = 2) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        inference_mode=False,
    )
    pair = Pair("outputs[hidden]", "outputs[x]", nn.MSELoss())
    options: dict[str, Any] = {"ids": "index", "commit_seconds": 0.0, "check": "none"}
    precompute(store, Slow(seconds), [pair], data(), trainer=trainer, **options)


if __name__ == "__main__":
    torch.set_num_threads(1)
    say(f"is process {os.environ.get('LOCAL_RANK', 0)}")
    for _ in range(int(sys.argv[3]) if sys.argv[3:] else 1):
        fill(sys.argv[1], float(sys.argv[2]))
