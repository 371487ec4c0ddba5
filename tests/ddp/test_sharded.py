"""Students that FSDP2 shards and teachers in other places, on two processes against one."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.ddp import run_sharded
from tests.ddp.run_sharded import ALIKE, FAILING, SCENARIOS, train
from tests.ddp.test_ddp import assert_equal, launch, output_of

pytestmark = [
    pytest.mark.ddp,
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
]

Single = Callable[[str], dict[str, Any]]
PLAIN = ["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, int]:
    """All trainings on two processes, in one launch that a failing one ends: the folder of what they wrote."""
    out = tmp_path_factory.mktemp("two")
    agent = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    root = Path(run_sharded.__file__).parents[2]
    names = ",".join([*SCENARIOS, *FAILING])
    process = launch(*agent, "-m", run_sharded.__name__, str(out), names, cwd=root)
    return out, output_of(process), process.returncode


@pytest.fixture(scope="module")
def two(launched: tuple[Path, str, int]) -> Path:
    """The folder of what two processes wrote, when all that should have ended has."""
    out, output, _ = launched
    expected = [out / f"{name}.rank{rank}.pt" for name in SCENARIOS for rank in (0, 1)]
    assert all(file.exists() for file in expected), output
    return out


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Single:
    """A scenario on one process, uninterrupted, with the teacher whole beside the student."""
    out = tmp_path_factory.mktemp("single")
    return cache(lambda name: train(name, ALIKE[name].alone(), out))


def read(out: Path, name: str) -> list[dict[str, Any]]:
    return [torch.load(out / f"{name}.rank{rank}.pt", weights_only=True) for rank in (0, 1)]


def placed(name: str) -> str:
    """The row of the table of situations that a scenario belongs to."""
    if "sharded" in name:
        return "teacher sharded over the ranks"
    return "teacher on the CPU" if "cpu" in name else "FSDP2"


def proven(name: str) -> tuple[str, ...]:
    return ("equal to a reference", "resumed equal") if "resumed" in name else ("equal to a reference",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.situation(placed(name), proves=proven(name))) for name in ALIKE],
)
def test_two_processes_equal_one_on_the_union_batch(name: str, single: Single, two: Path) -> None:
    expected = {"projectors": {}, **single(name)}
    for found in read(two, name):
        assert_equal({"projectors": {}, **found}, expected, 1e-12)
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-6)
        assert found["given back"]
        assert found["left"] == expected["left"]


@pytest.mark.parametrize(("name", "whole", "most"), [("ddp-sharded", [False], 0.7), ("ddp-cpu", [True], 1.0)])
def test_between_steps_each_rank_holds_its_share_of_the_teacher(
    name: str, whole: list[bool], most: float, two: Path
) -> None:
    """Also where each forward stopped in the middle, with layers gathered and not yet freed."""
    for found in read(two, name):
        assert found["teacher"]["whole"] == whole
        assert found["teacher"]["share"] <= most


@pytest.mark.situation("FSDP2", proves="resumed equal")
def test_a_rank_that_fails_ends_the_others_and_its_checkpoint_resumes(
    single: Single, launched: tuple[Path, str, int], tmp_path: Path
) -> None:
    out, output, code = launched
    assert code != 0
    assert "on one rank only" in output
    saved = out / "failing" / "epoch=0.ckpt"
    assert_equal(train("resumed", ALIKE["fsdp"].alone(), tmp_path, saved), single("fsdp"), 1e-12)


def test_the_trainings_that_are_compared_differ_from_each_other(single: Single) -> None:
    """Equal results would say nothing if terms, schedules or balances did nothing."""
    names = ["fsdp", "fsdp-root", "fsdp-scheduled", "fsdp-balanced", "fsdp-uncertain", "fsdp-side"]
    weights = [single(name)["student"]["net.0.weight"] for name in names]
    torch.manual_seed(0)
    weights.append(run_sharded.Student("auto").net[0].weight.detach().double())
    apart = torch.cdist(*[torch.stack([w.flatten() for w in weights])] * 2)
    assert (apart + torch.eye(len(weights)) > 1e-4).all()


@pytest.mark.situation("FSDP2", proves="checkpoint clean")
@pytest.mark.parametrize("name", ["fsdp/epoch=0.ckpt", "after.ckpt"])
def test_a_checkpoint_in_one_file_is_one_of_the_plain_student(name: str, two: Path) -> None:
    written = torch.load(two / name, weights_only=True)
    assert sorted(written["state_dict"]) == PLAIN
    run_sharded.Student("auto").load_state_dict(written["state_dict"], strict=True)


@pytest.mark.situation("FSDP2", proves="checkpoint clean")
def test_a_checkpoint_in_a_folder_is_one_of_the_plain_student(two: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(two / "fsdp-folder" / "epoch=1.ckpt", tmp_path / "whole.pt")
    written = torch.load(tmp_path / "whole.pt", weights_only=True)
    assert sorted(written["state_dict"]) == PLAIN
    expected = read(two, "fsdp-folder")[0]["student"]
    assert all(torch.equal(written["state_dict"][key], expected[key]) for key in PLAIN)


def test_what_is_saved_after_the_fit_is_what_is_saved_at_its_end(two: Path) -> None:
    last, after = (torch.load(two / name, weights_only=True) for name in ("fsdp/epoch=1.ckpt", "after.ckpt"))
    key = "DistillationCallback{'name': 'distill'}"
    for one, other in zip(
        (last["state_dict"], last["callbacks"][key]["projectors"]),
        (after["state_dict"], after["callbacks"][key]["projectors"]),
        strict=True,
    ):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)
    moments = [written["optimizer_states"][0]["state"] for written in (last, after)]
    assert moments[0].keys() == moments[1].keys() == set(range(6))
    assert all(torch.equal(moments[0][i]["exp_avg"], moments[1][i]["exp_avg"]) for i in moments[0])


REASONS = {
    "tensor": "tensor_parallel_size=2 .* Pass data_parallel_size=2, tensor_parallel_size=1",
    "nothing": "no parameter of Student is sharded after configure_model",
    "scalar": "pair 'hidden': the projector has the scalar parameter 'scale', and FSDP2 shards none",
    "unlike": r"unlike numbers of validation batches, \[1\], \[2\]: .* set limit_val_batches",
}


@pytest.mark.situation("FSDP2", proves="refused with message")
@pytest.mark.parametrize("name", REASONS)
def test_what_cannot_work_is_refused_on_every_rank(name: str, two: Path) -> None:
    for found in read(two, name):
        with pytest.raises(RuntimeError, match=REASONS[name]):
            raise RuntimeError(found["error"])
