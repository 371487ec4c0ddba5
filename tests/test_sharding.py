"""Students that FSDP2 shards, on one process: sizes, precision, checkpoints; more than one in tests/ddp/test_sharded.py."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F

from softs_lightning import DistillationCallback, Pair
from softs_lightning.sharding import mesh_of
from tests.training import hidden, loader, logits, make_teacher, trainer

pytestmark = [
    pytest.mark.usefixtures("alone"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have complete support on cpu"),
]


class Sharded(L.LightningModule):
    def __init__(
        self, width: int = 6, *, meta: bool = False, policy: MixedPrecisionPolicy | None = None
    ) -> None:
        super().__init__()
        self.width, self.meta, self.policy = width, meta, policy or MixedPrecisionPolicy()
        self.seen: list[Tensor] = []

    def configure_model(self) -> None:
        torch.manual_seed(2)
        with torch.device("meta" if self.meta else "cpu"):
            self.net = nn.Sequential(nn.Linear(4, self.width), self.middle(), nn.Linear(self.width, 3))
        mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
        for part in (self.net[0], self.net[2], self.net):
            fully_shard(part, mesh=mesh, mp_policy=self.policy)

    def middle(self) -> nn.Module:
        return nn.BatchNorm1d(self.width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.net(x)
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]).float(), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Smooth(Sharded):
    def middle(self) -> nn.Module:
        return nn.Tanh()


class Picky(Sharded):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert float(batch[0].sum()) == float(batch[0].sum()), "a value, which a dry run does not have"
        return super().training_step(batch, batch_idx)


class Remembering(Smooth):
    """Makes a mask once for all steps, by a function that keeps it."""

    def __init__(self) -> None:
        super().__init__()

        @functools.lru_cache
        def mask(size: int) -> Tensor:
            return torch.ones(size)

        self.mask = mask

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self(batch[0]) * self.mask(3), batch[1])


def fit(student: L.LightningModule, *callbacks: L.Callback, resume: Any = None, **options: Any) -> L.Trainer:
    options["use_distributed_sampler"] = False
    options["enable_checkpointing"] = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    made = trainer(
        *callbacks, strategy=ModelParallelStrategy(1, 1, save_distributed_checkpoint=False), **options
    )
    made.fit(student, loader(), ckpt_path=resume)
    return made


class AtStart(L.Callback):
    """Calls a function when everything is in place and nothing is trained yet."""

    def __init__(self, look: Callable[[Any], None]) -> None:
        self.look = look

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.look(pl_module)


def pair(**options: Any) -> Pair:
    return Pair("outputs[1]", "outputs[net.1]", nn.MSELoss(), projector="linear", name="hidden", **options)


@pytest.mark.parametrize("meta", [False, True])
def test_a_dry_run_sizes_projectors_and_leaves_no_trace(meta: bool) -> None:
    callback = DistillationCallback(make_teacher(width=7), [pair()])
    found: dict[str, Any] = {}

    def look(student: Any) -> None:
        found["batches"] = student.net[1].num_batches_tracked.item()
        found["sizes"] = [tuple(p.shape) for p in callback.projectors["hidden"].parameters()]

    fit(Sharded(width=5, meta=meta), callback, AtStart(look))
    assert found == {"batches": 0, "sizes": [(7, 5), (7,)]}


def test_a_dry_run_that_fails_on_shapes_alone_says_what_to_do() -> None:
    callback = DistillationCallback(make_teacher(), [pair()])
    with pytest.raises(MisconfigurationException, match="Pass a module as the projector"):
        fit(Picky(), callback)
    given = Pair("outputs[1]", "outputs[net.1]", nn.MSELoss(), projector=nn.Linear(6, 8))
    fit(Picky(), DistillationCallback(make_teacher(), [given]))


def test_what_a_function_remembers_of_a_dry_run_is_not_trained_with() -> None:
    weights = []
    for student in (Smooth(), Remembering()):
        callback = DistillationCallback(make_teacher(), [pair()])
        fit(student, callback, max_steps=2)
        weights.append([parameter.full_tensor() for parameter in student.net.parameters()])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*weights, strict=True))


def test_a_projector_takes_what_a_student_in_half_precision_gives() -> None:
    """FSDP2's own policy computes the student in bfloat16; the projector is float32, and so is the term."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    callback = DistillationCallback(
        make_teacher(), [Pair("outputs[1]", "outputs[net.0]", nn.MSELoss(), projector="linear")]
    )
    expected: list[Tensor] = []

    def look(student: Any) -> None:
        (projector,) = callback.projectors["net.0"]
        x = next(iter(loader()))[0]
        layer = [p.full_tensor().bfloat16() for p in student.net[0].parameters()]
        mine = F.linear(x.bfloat16(), *layer).float()
        projected = F.linear(mine, *(p.full_tensor() for p in projector.parameters()))
        expected.append((projected - make_teacher()[:2](x)).square().mean().detach())

    made = fit(Smooth(policy=policy), callback, AtStart(look), max_steps=1)
    torch.testing.assert_close(made.callback_metrics["distill/net.0"], expected[0], rtol=1e-5, atol=0)


def test_a_checkpoint_that_lacks_something_of_the_student_is_refused_by_name(tmp_path: Path) -> None:
    fit(
        Sharded(), DistillationCallback(make_teacher(), [pair()]), ModelCheckpoint(tmp_path, filename="whole")
    )
    written = torch.load(tmp_path / "whole.ckpt", weights_only=True)
    del written["state_dict"]["net.2.bias"]
    torch.save(written, tmp_path / "part.ckpt")
    student = Sharded()
    with pytest.raises(KeyError, match=r"part.ckpt lacks 'net.2.bias' of Sharded"):
        fit(
            student,
            DistillationCallback(make_teacher(), [pair()]),
            resume=tmp_path / "part.ckpt",
            max_epochs=2,
        )
    assert student._strict_loading is None


def test_resuming_from_a_checkpoint_without_projectors_is_refused(tmp_path: Path) -> None:
    fit(Sharded(), ModelCheckpoint(tmp_path, filename="plain"))
    with pytest.raises(MisconfigurationException, match="holds no projectors of the distillation 'distill'"):
        fit(
            Sharded(),
            DistillationCallback(make_teacher(), [pair()]),
            resume=tmp_path / "plain.ckpt",
            max_epochs=2,
        )


def test_two_distillations_share_a_student_and_its_checkpoints(tmp_path: Path) -> None:
    def callbacks(folder: str) -> list[L.Callback]:
        first = DistillationCallback(make_teacher(), [pair()], name="a")
        second = DistillationCallback(make_teacher(5), [pair()], name="b")
        return [first, second, ModelCheckpoint(tmp_path / folder, filename="{epoch}", save_top_k=-1)]

    def whole(student: Any) -> list[Tensor]:
        return [p.full_tensor() for p in student.parameters()]

    through, resumed = Sharded(), Sharded()
    fit(through, *callbacks("through"), max_epochs=2)
    made = fit(resumed, *callbacks("resumed"), max_epochs=2, resume=tmp_path / "through" / "epoch=0.ckpt")
    assert all(map(torch.equal, whole(through), whole(resumed)))
    assert "load_checkpoint" not in vars(made.strategy)
    assert sorted(name for name, _ in resumed.named_children()) == ["net"]


def test_a_student_over_two_meshes_is_refused() -> None:
    class Twice(Sharded):
        def configure_model(self) -> None:
            self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
            fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])  # type: ignore[index]
            fully_shard(self.net[2], mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("other",)))

    with pytest.raises(MisconfigurationException, match="sharded over 2 meshes"):
        fit(Twice(), DistillationCallback(make_teacher(), [hidden(), logits()]))
    with pytest.raises(MisconfigurationException, match="no parameter of LightningModule is sharded"):
        mesh_of(L.LightningModule())
