"""Two processes of one group, as `torch.distributed` has them, for what a test does on each."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

__all__ = ["on_two_ranks"]


def on_two_ranks(work: Callable[[int, str], None], folder: Path) -> None:
    """Do `work(rank, folder)` on both, and raise what one raises.

    They wait to be ended together: Gloo aborts where its peer is gone first, a barrier's own last message included.
    """
    ranks = spawn(_rank, (work, str(folder)), nprocs=2, join=False)  # type: ignore[no-untyped-call]
    while not all((folder / f"done{rank}").exists() for rank in (0, 1)):
        assert not ranks.join(timeout=0.2)
    for process in ranks.processes:
        process.kill()
    for process in ranks.processes:
        process.join()


def _rank(rank: int, work: Callable[[int, str], None], folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    work(rank, folder)
    Path(folder, f"done{rank}").touch()
    signal.pause()
