"""The benchmarks' arithmetic, by a clock that only the compared functions move."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.benchmarks import Row, compare, table


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, cost: float) -> None:
        self.calls.append(name)
        self.now += cost


def test_a_ratio_is_the_candidates_time_over_the_baselines() -> None:
    clock = Clock()
    row = compare(
        "s",
        "c",
        lambda: clock.work("candidate", 3.0),
        lambda: clock.work("baseline", 2.0),
        limit=1.05,
        repeats=3,
        seconds=0,
        clock=clock,
    )
    assert (row.ratio, row.low, row.high) == (1.5, 1.5, 1.5)
    assert clock.calls.count("candidate") == clock.calls.count("baseline") == 3 + 3 * 10


def test_who_goes_first_changes_with_every_pair() -> None:
    clock = Clock()
    compare(
        "s", "c", lambda: clock.work("c", 1), lambda: clock.work("b", 1), repeats=1, seconds=0, clock=clock
    )
    assert "".join(clock.calls[6:]) == "cbbc" * 5


def test_one_interrupted_pair_does_not_move_the_median() -> None:
    clock = Clock()
    row = compare(
        "s",
        "c",
        lambda: clock.work("c", 500.0 if len(clock.calls) == 11 else 2.0),
        lambda: clock.work("b", 2.0),
        repeats=1,
        seconds=0,
        clock=clock,
    )
    assert row.ratio == 1.0


def test_the_table_tells_what_is_over_its_limit() -> None:
    rows = [Row("a net", "x / y", 1.0121, 1.0, 1.03, 1.02), Row("a net", "y / y", 1.2, 1.1, 1.3, 1.1)]
    assert table([*rows, Row("b", "z", 1.5, 1.4, 1.6)]).splitlines() == [
        "| setting | compared | ratio (range) | limit |",
        "|---|---|---|---|",
        "| a net | x / y | ×1.012 (1.000–1.030) | within 1.02 |",
        "| a net | y / y | ×1.200 (1.100–1.300) | OVER 1.10 |",
        "| b | z | ×1.500 (1.400–1.600) | for comparison |",
    ]


def test_an_unknown_benchmark_is_named_with_those_there_are() -> None:
    command = [sys.executable, "-m", "tests.benchmarks", "nothing"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=root)
    assert done.returncode == 2
    assert "no benchmark named nothing: there are" in done.stderr
    assert "catcher" in done.stderr
