"""A trace beside nnsight's on the same nets, and the import of the subpackage.

The peer lives in an environment of its own (torch and nnsight), whose interpreter ``SOFTS_PEER_PYTHON`` names;
without it, traces are compared with plain calls only. Each side is a process of its own. They take turns, many
times, and the order turns too; a round is a turn of each, the median time of many calls, and gives one ratio.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.benchmarks import Row

ROOT = Path(__file__).parents[2]
ROUNDS, CALLS = 15, 200
NETS = {"small": "6 Linear(16, 16), batch 2", "deep": "12 MLP blocks of 64, 61 modules, batch 8"}
CASES = {
    "raw": "a plain call",
    "one": "one read",
    "six": "six reads",
    "changed": "an output doubled, another read",
}

SIDE = r"""
import json, sys, time, statistics
import torch
from torch import nn

torch.set_num_threads(1)
if sys.argv[1] == "peer":
    from nnsight import NNsight as Envoy
else:
    from softs_lightning.tracing import Envoy


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width)
        self.act, self.down = nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(self.norm(x))))


torch.manual_seed(0)
small, deep = nn.Sequential(*[nn.Linear(16, 16) for _ in range(6)]), nn.Sequential(*[Block(64) for _ in range(12)])
inputs = {"small": torch.randn(2, 16), "deep": torch.randn(8, 64)}
nets = {"small": small, "deep": deep}
envoys = {name: Envoy(net) for name, net in nets.items()}


def raw(name):
    nets[name](inputs[name])


def one(name):
    envoy = envoys[name]
    with envoy.trace(inputs[name]):
        a = envoy[2].output.save()
    return a


def six(name):
    envoy = envoys[name]
    with envoy.trace(inputs[name]):
        a = envoy[0].output.save()
        b = envoy[1].output.save()
        c = envoy[2].output.save()
        d = envoy[3].output.save()
        e = envoy[4].output.save()
        f = envoy[5].output.save()
    return a, b, c, d, e, f


def changed(name):
    envoy = envoys[name]
    with envoy.trace(inputs[name]):
        envoy[2].output = envoy[2].output * 2
        a = envoy[5].output.save()
    return a


for line in sys.stdin:
    case, name, calls = json.loads(line)
    function, times = {"raw": raw, "one": one, "six": six, "changed": changed}[case], []
    for _ in range(calls):
        start = time.perf_counter()
        function(name)
        times.append(time.perf_counter() - start)
    print(statistics.median(times) * 1e6, flush=True)
"""

IMPORTED = "import time; t=time.perf_counter(); import {}; print(time.perf_counter()-t)"


class Side:
    """A process that measures when it is told to."""

    def __init__(self, python: str, which: str) -> None:
        self.process = subprocess.Popen(
            [python, "-c", SIDE, which],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def measure(self, case: str, net: str) -> float:
        """The median time of a call in us."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([case, net, CALLS]), file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def rows() -> Iterator[Row]:
    peer = os.environ.get("SOFTS_PEER_PYTHON")
    sides = {"ours": Side(sys.executable, "ours")}
    if peer:
        sides["peer"] = Side(peer, "peer")
    cases = [(case, net) for net in NETS for case in CASES]
    times: dict[tuple[str, str, str], list[float]] = {(w, *case): [] for w in sides for case in cases}
    try:
        for number in range(ROUNDS + 1):
            for case in cases:
                for which in sorted(sides, reverse=bool(number % 2)):
                    measured = sides[which].measure(*case)
                    if number:  # the first round warms up
                        times[which, *case].append(measured)
    finally:
        for side in sides.values():
            side.close()
    for case, net in cases:
        ours = times["ours", case, net]
        if peer:
            limit = 1.0 if case in ("one", "six") else None
            yield _row(NETS[net], f"{CASES[case]} / nnsight's", ours, times["peer", case, net], limit)
        if case != "raw":
            yield _row(NETS[net], f"{CASES[case]} / a plain call", ours, times["ours", "raw", net])
    yield _imports()


def _row(
    setting: str, compared: str, ours: list[float], others: list[float], limit: float | None = None
) -> Row:
    ratios = [here / there for here, there in zip(ours, others, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(
        f"{setting}: {compared}: {statistics.median(ours):.1f} us to {statistics.median(others):.1f} us",
        file=sys.stderr,
    )
    return Row(setting, f"{compared}, quartiles", middle, low, high, limit)


def _imports() -> Row:
    """How long the subpackage takes to import over torch alone, by turns in fresh processes."""

    def once(what: str) -> float:
        command = [sys.executable, "-c", IMPORTED.format(what)]
        said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
        return float(said) * 1e6

    once("softs_lightning.tracing")
    pairs = [(once("softs_lightning.tracing"), once("torch")) for _ in range(7)]
    ours, torch = (list(side) for side in zip(*pairs, strict=True))
    return _row("import, fresh processes", "softs_lightning.tracing / torch", ours, torch, 1.05)
