"""Several processes against one, launched as users launch them: few launches, many trainings in each."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ddp import run

SCRIPT = Path(run.__file__)
ALIKE = [
    "plain",
    "static",
    "scheduled",
    "manual",
    "side",
    "balanced",
    "uncertain",
    "tokens",
    "window",
    "averaged",
]
SCENARIOS = [*ALIKE, "uneven", "idle", "statistics"]

pytestmark = [
    pytest.mark.ddp,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]


def launch(*command: str, cwd: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=cwd,
        env={**_clean_environment(), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # with the processes that it starts it can be ended as one
    )


def _clean_environment() -> dict[str, str]:
    # A seed that another test left for Lightning would be set again by each rank, and not by one process.
    ours = ("MASTER_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "PL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def output_of(process: subprocess.Popen[str]) -> str:
    """What it said; a collective that waits for the dead would do so for 30 minutes."""
    try:
        return process.communicate(timeout=600)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError(f"it did not end: {process.communicate()[0]}") from None


def finish(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        output = output_of(process)
        assert process.returncode == 0, output


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def read(out: Path, scenario: str) -> list[dict[str, Any]]:
    return [torch.load(out / f"{scenario}.rank{rank}.pt", weights_only=True) for rank in (0, 1)]


def assert_equal(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float) -> None:
    for part in ("student", "projectors", *(["average"] if "average" in ours else [])):
        assert ours[part].keys() == theirs[part].keys()
        for name, value in ours[part].items():
            if name.endswith("bits"):  # of float64 numbers
                value, theirs[part][name] = (t.view(torch.float64) for t in (value, theirs[part][name]))
            torch.testing.assert_close(value, theirs[part][name], rtol=0, atol=tolerance)


@contextmanager
def one_thread() -> Iterator[None]:
    """As each rank computes."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Each training on one process, this one; its checkpoints lie under "path"."""
    out = tmp_path_factory.mktemp("single")
    with one_thread():
        return {**{scenario: run.train(scenario, out) for scenario in ALIKE}, "path": out}


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory, single: dict[str, Any]) -> tuple[Path, str, int]:
    """By Lightning's launcher: one that goes on where a single process was, then one of which a rank dies."""
    out = tmp_path_factory.mktemp("launched")
    saved = single["path"] / "plain" / "epoch=0.ckpt"
    process = launch(
        str(SCRIPT), str(out), "plain,killed", "2", "1", "ddp_find_unused_parameters_true", str(saved)
    )
    return out, output_of(process), process.returncode


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All trainings under two torchrun agents, one process each."""
    out = tmp_path_factory.mktemp("nodes")
    port = free_port()
    agents = [
        launch(
            "-m",
            "torch.distributed.run",
            "--nnodes=2",
            "--nproc-per-node=1",
            f"--node-rank={rank}",
            "--master-addr=127.0.0.1",
            f"--master-port={port}",
            str(SCRIPT),
            str(out),
            ",".join(SCENARIOS),
            "1",
            "2",
            "ddp",
        )
        for rank in (0, 1)
    ]
    finish(*agents)
    return out


@pytest.mark.parametrize("scenario", ALIKE)
@pytest.mark.situation("DDP, two nodes", proves="equal to a reference")
def test_two_nodes_equal_one_process_on_the_union_batch(
    scenario: str, single: dict[str, Any], two_nodes: Path
) -> None:
    first, second = read(two_nodes, scenario)
    assert_equal(first, second, 0.0)
    assert_equal(first, single[scenario], 1e-12)


def test_an_average_has_the_first_ranks_statistics(two_nodes: Path) -> None:
    first, second = read(two_nodes, "statistics")
    assert not torch.equal(first["student"]["net.1.running_mean"], second["student"]["net.1.running_mean"])
    assert all(torch.equal(value, second["average"][name]) for name, value in first["average"].items())


@pytest.mark.situation("DDP, two nodes", proves="equal to a reference")
def test_an_uneven_last_batch_counts_each_rank_alike(two_nodes: Path) -> None:
    """As DistributedDataParallel counts the user's own loss: the mean of the ranks' means."""
    torch.manual_seed(0)
    student, teacher = run.Student().double(), run.make_teacher()
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(48, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (48,), generator=generator)
    for _ in range(2):
        for start in range(0, 46, 8):
            shares = [range(start, start + 4), range(start + 4, min(start + 8, 46))]
            losses = []
            for share in map(list, shares):
                out = student.net(x[share])
                task = torch.nn.functional.cross_entropy(out, y[share])
                losses.append(task + (out - teacher(x[share]).detach()).square().mean())
            optimizer.zero_grad()
            (sum(losses) / 2).backward()  # type: ignore[union-attr]
            optimizer.step()
    for found in read(two_nodes, "uneven"):
        for name, value in student.state_dict().items():
            torch.testing.assert_close(found["student"][name], value, rtol=0, atol=1e-12)


def test_validation_metrics_are_those_of_all_ranks(single: dict[str, Any], two_nodes: Path) -> None:
    expected = single["plain"]["metrics"]
    assert {"distill/val/hidden", "distill/val/hidden/cka", "distill/val/logits/cosine"} <= expected.keys()
    for found in read(two_nodes, "plain"):
        assert found["metrics"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.situation("DDP, two nodes", proves=("refused with message", "left as it was"))
def test_parameters_that_no_loss_reaches_are_named_at_the_first_step(two_nodes: Path) -> None:
    for found in read(two_nodes, "idle"):
        assert (
            "'idle.weight', 'idle.bias' got none from the task loss or any distillation term"
            in found["error"]
        )
        assert found["left"] == ["idle", "net"]


@pytest.mark.situation("DDP, launched by Lightning", proves=("resumed equal", "checkpoint clean"))
def test_the_launcher_of_lightning_resumes_what_one_process_began(
    launched: tuple[Path, str, int], single: dict[str, Any]
) -> None:
    out, output, _ = launched
    assert (out / "plain.rank1.pt").exists(), output
    for found in read(out, "plain"):
        assert_equal(found, single["plain"], 1e-12)
    written = torch.load(out / "plain" / "epoch=1.ckpt", weights_only=True)
    assert not (out / "plain" / "epoch=0.ckpt").exists()  # the first epoch was not trained again
    assert sorted(written["state_dict"]) == ["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"]


@pytest.mark.situation("DDP, spawned", proves=("equal to a reference", "refused with message"))
def test_spawned_processes_train_alike(tmp_path: Path, single: dict[str, Any], alone: None) -> None:
    with one_thread():
        found = run.train("scheduled", tmp_path, 2, 1, "ddp_spawn")
    for name, value in found["student"].items():
        torch.testing.assert_close(value, single["scheduled"]["student"][name], rtol=0, atol=1e-12)
    # The projectors stayed with the processes that have ended, and a checkpoint without them says so.
    assert "were trained in processes that have ended, and this one has never seen them" in found["late"]
    assert not (tmp_path / "late.ckpt").exists()


@pytest.mark.situation("fault: killed rank", proves="resumed equal")
def test_a_killed_rank_ends_the_others_and_its_checkpoint_resumes(
    launched: tuple[Path, str, int], single: dict[str, Any], tmp_path: Path
) -> None:
    out, output, code = launched
    assert code != 0, output
    assert not list(out.glob("killed.*"))
    with one_thread():
        resumed = run.train("plain", tmp_path, resume=str(out / "killed" / "epoch=0.ckpt"))
    assert_equal(resumed, single["plain"], 1e-12)
