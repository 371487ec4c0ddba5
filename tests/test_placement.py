"""Where a teacher may lie, on one process; what several do is compared in tests/ddp/test_sharded.py."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from softs_lightning import DistillationCallback, Teacher
from softs_lightning.explain import explain_recipe
from softs_lightning.placement import PLACEMENTS, after_forward, prove_equal_batches, shard
from softs_lightning.product import ProductSpec
from softs_lightning.store import StoredTeacher
from tests.architectures import ARCHITECTURES
from tests.test_config import composed
from tests.training import hidden, loader, make_student, make_teacher, trainer

SPEC = ProductSpec.parse("outputs[1]")


@pytest.fixture
def _group(tmp_path: Path) -> Iterator[None]:
    """One process that is a group of its own."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.gain * self.inner(x)
        return out


class Model(nn.Module):
    """Blocks in a list, two of which are one, and a head tied to the input's layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 4)
        first = Block()
        self.blocks = nn.ModuleList([first, Block(), first])
        self.heads = nn.ModuleList([nn.Linear(4, 4)])
        self.heads[0].weight = self.embed.weight
        self.register_buffer("shift", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.shift
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.heads[0](x)
        return out


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("placement", ["gpu", "", None, 1])
def test_an_unknown_placement_is_refused_with_those_there_are(placement: Any) -> None:
    for make in (Teacher, lambda net, **options: DistillationCallback(net, [hidden()], **options)):
        with pytest.raises(ValueError, match="there are 'replicated', 'sharded', 'cpu'"):
            make(make_teacher(), placement=placement)


@pytest.mark.situation("teacher sharded over the ranks", proves="refused with message")
def test_what_a_sharded_teacher_cannot_do_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="compiled graph cannot gather"):
        Teacher(make_teacher(), placement="sharded", compile=True)
    with pytest.raises(ValueError, match="a program may read any part"):
        Teacher(make_teacher(), placement="sharded", program=lambda model: None)
    with pytest.raises(ValueError, match="with a store each rank runs it for what it lacks"):
        StoredTeacher(make_teacher(), tmp_path, placement="sharded")
    with pytest.raises(ValueError, match="with a store each rank runs it for what it lacks"):
        DistillationCallback(make_teacher(), [hidden()], placement="sharded", store=tmp_path)
    with pytest.raises(ValueError, match="goes to the Teacher that you pass"):
        DistillationCallback(Teacher(make_teacher()), [hidden()], placement="cpu")


# -- on the CPU ------------------------------------------------------------------------------------


def placed(device: str, **options: Any) -> Teacher:
    teacher = Teacher(make_teacher(), placement="cpu", **options)
    teacher.place(device)
    return teacher


@pytest.mark.parametrize(
    "options", [{}, {"compile": "eager"}, {"dtype": torch.float64}, {"early_exit": False}]
)
def test_a_teacher_on_the_cpu_runs_there_and_its_products_are_moved(options: dict[str, Any]) -> None:
    """The meta device stands for an accelerator: what is there has a device, and nothing can run there by mistake."""
    x = torch.ones(2, 4)
    teacher = placed("meta", **options)
    assert teacher.module is not None
    assert {p.device.type for p in teacher.module.parameters()} == {"cpu"}
    (found,) = teacher.supply(x, SPEC).select()
    assert (found.device.type, list(found.shape)) == ("meta", [2, 8])
    teacher.release()
    (value,) = placed("cpu", **options).supply(x, SPEC).select()
    expected = make_teacher().to(value.dtype)[:2](x.to(value.dtype))
    torch.testing.assert_close(value, expected, rtol=0, atol=0)


def test_what_a_program_saves_on_the_cpu_is_moved() -> None:
    teacher = placed("meta", program=lambda model: {"mid": model[1].output})
    found = teacher.supply(torch.ones(2, 4), ProductSpec.parse("saved[mid]")).select()[0]
    assert (found.device.type, list(found.shape)) == ("meta", [2, 8])


def test_the_cost_of_a_teacher_on_the_cpu_is_the_same() -> None:
    plain = Teacher(make_teacher())
    plain.place()
    x = torch.ones(2, 4)
    assert placed("meta").cost(x, SPEC) == plain.cost(x, SPEC)


# -- sharded ---------------------------------------------------------------------------------------


def fitted(**options: Any) -> list[Tensor]:
    student = make_student()
    callback = DistillationCallback(make_teacher(), [hidden()], **options)
    trainer(callback).fit(student, loader())
    return list(student.state_dict().values())


@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_on_one_process_every_placement_trains_alike(placement: str) -> None:
    assert all(map(torch.equal, fitted(placement=placement), fitted()))


@pytest.mark.usefixtures("_group")
def test_layers_are_units_unless_their_parameters_are_used_elsewhere() -> None:
    model = Model().requires_grad_(False).eval()
    expected, x = copy.deepcopy(model), torch.randn(3, 4)
    shard(model, torch.device("cpu"))
    units = [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    assert units == ["", "blocks.0", "blocks.0.inner.0", "blocks.1", "blocks.1.inner.0"]
    scalars = {name for name, p in model.named_parameters() if not isinstance(p, DTensor)}
    assert scalars == {"blocks.0.gain", "blocks.1.gain"}
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(x), expected(x))
            after_forward(model)
    with pytest.raises(ValueError, match="sharded already"):
        shard(model, torch.device("cpu"))


@pytest.mark.usefixtures("_group")
def test_a_forward_that_ended_in_the_middle_leaves_nothing_whole() -> None:
    model = Model().requires_grad_(False).eval()
    expected, x = copy.deepcopy(model), torch.randn(3, 4)
    shard(model, torch.device("cpu"))

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    for _ in range(2):
        handle = model.blocks[1].inner[0].register_forward_hook(stop)
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            model(x)
        assert not isinstance(model.embed.weight, DTensor)  # the root was gathered, and is still
        after_forward(model)
        assert all(isinstance(p, DTensor) for p in model.parameters() if p.ndim)
        handle.remove()
        with torch.no_grad():
            assert torch.equal(model(x), expected(x))


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "t5"])
def test_models_of_transformers_compute_the_same_when_sharded(name: str) -> None:
    model = ARCHITECTURES[name].build().requires_grad_(False)
    expected, inputs = copy.deepcopy(model), ARCHITECTURES[name].batch()
    shard(model, torch.device("cpu"))
    with torch.no_grad():
        ours, theirs = model(**inputs), expected(**inputs)
    assert torch.equal(ours[0], theirs[0])
    assert sum(isinstance(module, FSDPModule) for module in model.modules()) > 2


class Peeking(Model):
    """Reads a layer's parameters from outside."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.blocks[1].inner[0].weight.sum()  # type: ignore[union-attr,operator,index]


@pytest.mark.usefixtures("_group")
def test_a_model_that_needs_a_layer_whole_all_the_time_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("softs_lightning.teacher.is_spread", lambda: True)
    given = Peeking()
    teacher = Teacher(given, placement="sharded", early_exit=False)
    teacher.place("cpu")
    with pytest.raises(RuntimeError, match="uses parameters of a layer outside of that layer's forward"):
        teacher.supply(torch.ones(2, 4), ProductSpec.parse("outputs[.]"))
    teacher.release()
    assert not any(isinstance(p, DTensor) for p in given.parameters())


@pytest.mark.usefixtures("_group")
def test_unlike_numbers_of_batches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    prove_equal_batches([3], "training")

    def gather(found: list[Any], mine: Any) -> None:
        found[:] = [mine, [2]]

    monkeypatch.setattr(dist, "all_gather_object", gather)
    with pytest.raises(
        RuntimeError, match=r"unlike numbers of training batches, \[3\], \[2\].*limit_train_batches"
    ):
        prove_equal_batches([3], "training")


# -- explain ---------------------------------------------------------------------------------------


def test_explain_says_where_the_teacher_lies_unless_it_is_as_always(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTS_LIGHTNING_CACHE", str(tmp_path))
    assert "placement" not in explain_recipe(composed("data.batch_size=20"))
    said = explain_recipe(composed("data.batch_size=20", "callbacks.distill.placement=sharded"))
    assert "parameters, placement sharded" in said
