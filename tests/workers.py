"""A run on several workers, `pytest -n`: one thread each, and an order of the files in which they end together."""

from __future__ import annotations

import os
from collections import Counter

import pytest
import torch

__all__ = ["pytest_collection_modifyitems", "pytest_sessionstart"]

LONG = ("slow", "ddp")
"""The marks of tests that take more than seconds."""


def pytest_sessionstart(session: pytest.Session) -> None:
    if is_worker(session.config):
        # The workers are as many as the cores; threads that wait for each other's cores only cost time.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
    elif hasattr(session.config.option, "loadscopereorder"):
        session.config.option.loadscopereorder = False  # hand out the files in the order below


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files with tests that start processes or train go first, so that no worker is left with one at the end."""
    if not is_worker(config):
        return
    sizes = Counter(item.path for item in items)
    long = {item.path for item in items if any(item.get_closest_marker(mark) for mark in LONG)}
    items.sort(key=lambda item: (item.path not in long, -sizes[item.path], str(item.path)))


def is_worker(config: pytest.Config) -> bool:
    """Of pytest-xdist's; the process that hands out the tests is none."""
    return hasattr(config, "workerinput")
