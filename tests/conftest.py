"""What holds for every test."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.situations import pytest_addoption, pytest_configure, pytest_itemcollected
from tests.workers import pytest_collection_modifyitems, pytest_sessionstart

__all__ = [
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_itemcollected",
    "pytest_sessionstart",
]

# How long an example takes depends on what else the machine does.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """What was imported by now stays: no later garbage collection need walk through it."""
    gc.collect()
    gc.freeze()


RANKS = ("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def torch_computes_as_before() -> Iterator[None]:
    """A test that leaves torch in another state changes what later ones compute."""

    def state() -> tuple[object, ...]:
        return (
            torch.get_default_dtype(),
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_device(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.nn.Linear.reset_parameters,
            torch.nn.init.kaiming_uniform_,
            torch.nn.init.uniform_,
        )

    before = state()
    yield
    after = state()
    torch.set_default_dtype(torch.float32)
    assert after == before


@pytest.fixture(autouse=True)
def no_rank_is_left_behind() -> Iterator[None]:
    """A test that leaves a rank in the environment changes what later ones compute."""
    before = {name: os.environ.get(name) for name in RANKS}
    yield
    left = {name: os.environ.get(name) for name in RANKS if os.environ.get(name) != before[name]}
    for name in left:
        os.environ.pop(name, None)
    assert not left, f"left in the environment: {left}"


@pytest.fixture
def alone() -> Iterator[None]:
    """One process that may become a group of its own, and is none afterwards, in its environment neither."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(autouse=True)
def no_seed_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning's ``seed_everything`` leaves its seed in the environment, where later DDP runs would follow it."""
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)  # and what was there before, or nothing, comes back after the test
