"""What two processes cost a distilled step, over what they cost the same step without the callback.

Each ratio is one of ratios: a step under DDP (two processes, gloo) over the same step in one process,
through the callback, over the same for the module that the row names. Under DDP the projector's
gradients are synchronised with the student's, and nothing else may wait. Both processes take the
steps in the same order; what is timed is that of rank 0, by the clock on the wall, waiting
included, and by the processor time of both.
"""

from __future__ import annotations

import copy
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from softs_lightning import DistillationCallback, Pair
from tests.benchmarks import Row
from tests.benchmarks.bench_step import Block, Net, Plain, Steps, Written

SETTING = "transformer, 4 × 128 from 4 × 192, 8 × 64 tokens a process"
REPEATS, ROUNDS = 7, 12
AGAINST = {"written": "the same written by hand", "plain": "no distillation"}

Times = dict[str, list[tuple[float, float]]]


class Arms:
    """The same student three times: through the callback, distilled by hand, and not distilled."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        width, wide, depth, size = 128, 192, 4, (8, 64)
        student = Net(lambda: Block(width), depth, width)
        student.layers.insert(0, nn.Linear(wide, width))
        teacher = Net(lambda: Block(wide), depth, wide)
        batch = torch.randn(*size, wide), torch.randint(10, (torch.Size(size).numel(),))
        projector = nn.Linear(width, wide)
        pair = Pair("outputs[layers.1]", "outputs[net.layers.2]", nn.MSELoss(), 0.5, projector, "hidden")
        callback = DistillationCallback(copy.deepcopy(teacher), [pair], teacher_inputs=lambda batch: batch[0])
        by_hand = Written(copy.deepcopy(student), teacher, 2, 1, copy.deepcopy(projector))
        # In hand-written modules under DDP every layer must be reached, as here.
        self.steps = {
            "callback": Steps(Plain(copy.deepcopy(student)), batch, callback, **options),
            "written": Steps(by_hand, batch, **options),
            "plain": Steps(Plain(copy.deepcopy(student)), batch, **options),
        }

    def times(self, rounds: int) -> Times:
        """For each arm the times of its steps, on the wall and of the processor; the order turns."""
        found: Times = {name: [] for name in self.steps}
        order = list(self.steps)
        for _ in range(rounds):
            for name in order:
                wall, own = time.perf_counter(), time.process_time()
                self.steps[name]()
                found[name].append((time.perf_counter() - wall, time.process_time() - own))
            order = [*order[1:], order[0]]
        return found

    def end(self) -> None:
        for steps in self.steps.values():
            steps.end()


def ratios(ranks: list[Times], against: str) -> tuple[float, float]:
    """The callback's step over another, medians over the rounds: wall of rank 0, processor of all ranks."""
    rounds = range(len(ranks[0]["callback"]))
    wall = [ranks[0]["callback"][i][0] / ranks[0][against][i][0] for i in rounds]
    own = [sum(r["callback"][i][1] for r in ranks) / sum(r[against][i][1] for r in ranks) for i in rounds]
    return statistics.median(wall), statistics.median(own)


class Processes:
    """Two processes of one DDP job, which take steps when they are told to."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        common = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-m", __name__],
                env={
                    **os.environ,
                    **common,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(port),
                },
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=Path(__file__).parents[2],
            )
            for rank in (0, 1)
        ]

    def times(self, rounds: int) -> list[Times]:
        for rank in self.ranks:
            assert rank.stdin is not None
            print(rounds, file=rank.stdin, flush=True)
        return [json.loads(self._answer(rank)) for rank in self.ranks]

    def _answer(self, rank: subprocess.Popen[str]) -> str:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if not line:
            raise RuntimeError(f"a process of the benchmark ended with {rank.wait()}")
        return line

    def end(self) -> None:
        for rank in self.ranks:  # both, before waiting for either
            assert rank.stdin is not None
            print(0, file=rank.stdin, flush=True)
        for rank in self.ranks:
            rank.communicate(timeout=120)


def rows() -> Iterator[Row]:
    processes, alone = Processes(), Arms()
    try:
        processes.times(3), alone.times(3)
        found: dict[tuple[str, int], list[float]] = {}
        for _ in range(REPEATS):
            several, one = processes.times(ROUNDS), [alone.times(ROUNDS)]
            for against in AGAINST:
                for clock in (0, 1):
                    ratio = ratios(several, against)[clock] / ratios(one, against)[clock]
                    found.setdefault((against, clock), []).append(ratio)
    finally:
        processes.end()
        alone.end()
    for (against, clock), values in found.items():
        what = f"2 processes / 1 through the callback / likewise {AGAINST[against]}"
        yield Row(
            f"{SETTING}, {('wall clock', 'processor time')[clock]}",
            what,
            statistics.median(values),
            min(values),
            max(values),
            1.05,
        )


def worker() -> None:
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a trainer prints is no answer
    arms = Arms(strategy="ddp", devices=2)
    for line in sys.stdin:
        if int(line) == 0:
            break
        print(json.dumps(arms.times(int(line))), file=answers, flush=True)
    arms.end()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    worker()
