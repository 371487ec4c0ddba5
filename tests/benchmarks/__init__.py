"""Benchmarks: ``python -m tests.benchmarks`` runs every ``bench_*.py`` here and prints markdown tables.

A benchmark is a file ``bench_NAME.py`` with a function ``rows()`` that yields :class:`Row`, most
easily by :func:`compare`. Only ratios are reported: absolute times belong to one machine.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Row", "compare", "table"]


@dataclass(frozen=True)
class Row:
    """One comparison: the median ratio over the repeats, its range, and what it may be at most."""

    setting: str
    compared: str
    ratio: float
    low: float
    high: float
    limit: float | None = None

    @property
    def verdict(self) -> str:
        if self.limit is None:
            return "for comparison"
        return f"{'within' if self.ratio <= self.limit else 'OVER'} {self.limit:.2f}"


def compare(
    setting: str,
    compared: str,
    candidate: Callable[[], Any],
    baseline: Callable[[], Any],
    *,
    limit: float | None = None,
    repeats: int = 7,
    seconds: float = 1.0,
    clock: Callable[[], float] = time.process_time,
) -> Row:
    """Time `candidate` over `baseline`, paired and interleaved.

    One pair is a call of each, right after one another, and the order turns with every pair. A
    repeat is as many pairs as fit in `seconds`; its ratio is the median over its pairs, so that an
    interruption spoils one pair only. The row gives the median and the range over the repeats.

    Args:
        setting: the model and the batch.
        compared: what stands over what.
        clock: by default the processor time of this process, which other processes disturb least.
    """
    for _ in range(3):
        baseline(), candidate()
    ratios = []
    gc.collect()
    gc.disable()
    try:
        for _ in range(repeats):
            pairs: list[float] = []
            end = time.perf_counter() + seconds
            while time.perf_counter() < end or len(pairs) < 10:
                first, second = (baseline, candidate) if len(pairs) % 2 else (candidate, baseline)
                start = clock()
                first()
                middle = clock()
                second()
                stop = clock()
                one, other = middle - start, stop - middle
                pairs.append(other / one if first is baseline else one / other)
            ratios.append(statistics.median(pairs))
            gc.collect()
    finally:
        gc.enable()
    return Row(setting, compared, statistics.median(ratios), min(ratios), max(ratios), limit)


def table(rows: Iterable[Row]) -> str:
    """The rows as a markdown table."""
    lines = ["| setting | compared | ratio (range) | limit |", "|---|---|---|---|"]
    lines += [
        f"| {r.setting} | {r.compared} | ×{r.ratio:.3f} ({r.low:.3f}–{r.high:.3f}) | {r.verdict} |"
        for r in rows
    ]
    return "\n".join(lines)
