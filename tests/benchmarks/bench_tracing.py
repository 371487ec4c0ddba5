"""The cost of a trace, beside nnsight's on the same nets, and the time to import the subpackage.

    python tests/benchmarks/bench_tracing.py --peer-python ENV/bin/python

The peer lives in an environment of its own (torch and nnsight), named by ``--peer-python`` or
``SOFTS_PEER_PYTHON``. Two processes, one for each side, take turns, many times; a round is one turn of each and
gives one ratio. Printed are medians over the rounds with the quartiles of the ratios. Without a peer only this
side is measured.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

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
plain = {name: net for name, net in nets.items()}
envoys = {name: Envoy(net) for name, net in nets.items()}


def raw(name):
    plain[name](inputs[name])


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


for line in sys.stdin:
    case, name, calls = json.loads(line)
    function, times = {"raw": raw, "one": one, "six": six}[case], []
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

    def measure(self, case: str, net: str, calls: int) -> float:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([case, net, calls]), file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def quartiles(values: list[float]) -> str:
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} (quartiles {low:.2f} to {high:.2f})"


def compare(peer_python: str | None, rounds: int, calls: int) -> None:
    ours = Side(sys.executable, "ours")
    peer = Side(peer_python, "peer") if peer_python else None
    cases = [(case, net) for net in ("small", "deep") for case in ("raw", "one", "six")]
    times: dict[tuple[str, str], list[tuple[float, float]]] = {case: [] for case in cases}
    for number in range(rounds + 1):
        for case in cases:
            pair = ours.measure(*case, calls), peer.measure(*case, calls) if peer else float("nan")
            if number:  # the first round warms up
                times[case].append(pair)
    for (case, net), pairs in times.items():
        here, there = (statistics.median(side) for side in zip(*pairs, strict=True))
        raw = statistics.median(pair[0] for pair in times["raw", net])
        line = f"{net:6}{case:4} {here:8.1f} us, {here / raw:5.2f} x raw"
        if peer:
            line += f"; peer {there:8.1f} us; ratio {quartiles([a / b for a, b in pairs])}"
        print(line)
    for side in (ours, peer):
        if side:
            side.close()


def imports(repeats: int) -> None:
    """How long the subpackage takes to import over torch alone, by turns in fresh processes."""

    def once(what: str) -> float:
        command = [sys.executable, "-c", IMPORTED.format(what)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)

    once("softs_lightning.tracing")
    pairs = [(once("softs_lightning.tracing"), once("torch")) for _ in range(repeats)]
    here, torch = (statistics.median(side) for side in zip(*pairs, strict=True))
    print(f"import {here:.2f} s, torch {torch:.2f} s; ratio {quartiles([a / b for a, b in pairs])}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer-python", default=os.environ.get("SOFTS_PEER_PYTHON"))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=200)
    options = parser.parse_args()
    compare(options.peer_python, options.rounds, options.calls)
    imports(max(options.rounds // 2, 4))
