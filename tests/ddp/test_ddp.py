"""Two processes against one, launched as users launch them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("run.py")

pytestmark = pytest.mark.ddp


def train(out: Path, devices: int, strategy: str, resume: Path | None = None) -> list[dict[str, Any]]:
    out.mkdir()
    command = [sys.executable, str(SCRIPT), str(out), str(devices), strategy]
    done = subprocess.run(
        command + ([str(resume)] if resume else []),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(out / f"rank{rank}.pt", weights_only=True) for rank in range(devices)]


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    for part in ("student", "projectors"):
        assert ours[part].keys() == theirs[part].keys()
        for name, value in ours[part].items():
            torch.testing.assert_close(value, theirs[part][name], rtol=0, atol=tolerance)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("single") / "run"
    return out, train(out, 1, "auto")[0]


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_find_unused_parameters_true"])
def test_two_processes_equal_one_on_the_union_batch(
    tmp_path: Path, single: tuple[Path, dict[str, Any]], strategy: str
) -> None:
    first, second = train(tmp_path / "two", 2, strategy)
    assert_equal(first, second, 0.0)
    assert_equal(first, single[1], 1e-12)


def test_a_run_resumed_on_two_processes_equals_the_uninterrupted_one(
    tmp_path: Path, single: tuple[Path, dict[str, Any]]
) -> None:
    """The checkpoint of one process continues on two."""
    resumed, _ = train(tmp_path / "resumed", 2, "ddp", single[0] / "epoch=0.ckpt")
    assert_equal(resumed, single[1], 1e-12)
    saved = torch.load(tmp_path / "resumed" / "epoch=1.ckpt", weights_only=True)
    assert sorted(saved["state_dict"]) == ["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"]
