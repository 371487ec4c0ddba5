"""What holds for every test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def no_rank_is_left_behind() -> Iterator[None]:
    """A test that leaves a rank in the environment changes what later ones compute."""
    before = {name: os.environ.get(name) for name in RANKS}
    yield
    left = {name: os.environ.get(name) for name in RANKS if os.environ.get(name) != before[name]}
    for name in left:
        os.environ.pop(name, None)
    assert not left, f"left in the environment: {left}"
