"""Memory that must be free again, disks that are full, and strategies that are refused."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import (
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch import Tensor, nn

from softs_lightning import DistillationCallback
from softs_lightning.refusals import refuse
from tests.training import (
    Student,
    assert_untouched,
    hidden,
    loader,
    logits,
    make_student,
    make_teacher,
    trainer,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]


class Watched(Student):
    """Looks at what is alive when its own forward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[str, weakref.ref[Tensor]] = {}
        self.at_forward: set[str] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        gc.collect()
        self.at_forward = {name for name, ref in self.alive.items() if ref() is not None}
        return super().training_step(batch, batch_idx)


def watched() -> tuple[Watched, nn.Module]:
    student, teacher = Watched(), make_teacher()
    for name, module in teacher.named_children():
        module.register_forward_hook(
            lambda module, args, out, name=name: student.alive.__setitem__(name, weakref.ref(out))
        )
    return student, teacher


def test_only_what_the_teacher_hands_over_is_alive_when_the_student_begins() -> None:
    student, teacher = watched()
    trainer(DistillationCallback(teacher, [hidden(projector=nn.Linear(6, 8)), logits()]), max_steps=1).fit(
        student, loader()
    )
    assert set(student.alive) == {"0", "1", "2", "3"}
    assert student.at_forward == {"1", "2", "3"}  # 2 is dropout, which hands on the tensor of 1


def test_nothing_of_a_step_is_held_after_it() -> None:
    student, teacher = watched()
    left: list[set[str]] = []
    ours: list[weakref.ref[Tensor]] = []
    student.net[1].register_forward_hook(lambda module, args, out: ours.append(weakref.ref(out)))

    class After(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            gc.collect()
            left.append({name for name, ref in student.alive.items() if ref() is not None})
            assert ours[-1]() is None

    callback = DistillationCallback(teacher, [hidden(projector=nn.Linear(6, 8)), logits()], validate=True)
    trainer(callback, After(), max_steps=2, limit_val_batches=1).fit(student, loader(), loader())
    assert left == [set()] * 2


@pytest.mark.parametrize("where", ["student", "loss"])
def test_nothing_of_a_step_is_held_after_an_exception(where: str) -> None:
    student, teacher = watched()

    def fails(*_: Any) -> Tensor:
        raise OSError("no")

    if where == "student":
        student.net[2].register_forward_hook(fails)
    pair = hidden(projector=nn.Linear(6, 8), **({"loss": fails} if where == "loss" else {}))
    with pytest.raises(OSError, match="no") as caught:
        trainer(DistillationCallback(teacher, [pair])).fit(student, loader())
    caught.value.__traceback__ = None
    del caught
    gc.collect()
    assert student.alive
    assert all(ref() is None for ref in student.alive.values())


# -- a full disk -----------------------------------------------------------------------------------


@pytest.mark.situation("fault: full disk at a checkpoint", proves="resumed equal")
def test_a_disk_that_is_full_at_a_checkpoint_costs_that_checkpoint_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    save = SingleDeviceStrategy.save_checkpoint

    def full_at_the_second(self: Any, checkpoint: Any, path: Any, **options: Any) -> None:
        if written:
            raise OSError(28, "No space left on device")
        save(self, checkpoint, path, **options)
        written.append(Path(path))

    def fit(*others: L.Callback, resume: Path | None = None) -> Student:
        student = make_student()
        torch.manual_seed(0)
        callback = DistillationCallback(make_teacher(), [hidden()])
        trainer(callback, *others, enable_checkpointing=bool(others), max_epochs=2).fit(
            student, loader(), ckpt_path=resume, weights_only=True if resume else None
        )
        return student

    monkeypatch.setattr(SingleDeviceStrategy, "save_checkpoint", full_at_the_second)
    with pytest.raises(OSError, match="No space left"):
        fit(ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1))
    monkeypatch.undo()
    whole, resumed = fit(), fit(resume=written[0])
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))


# -- strategies ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("alone")
@pytest.mark.situation("FSDP2", proves=("refused with message", "left as it was"))
def test_a_student_that_nothing_shards_is_refused_under_model_parallel() -> None:
    student = make_student()
    student.configure_model = lambda: None  # type: ignore[method-assign]
    callback = DistillationCallback(make_teacher(), [hidden()])
    strategy = ModelParallelStrategy(data_parallel_size=1, tensor_parallel_size=1)
    with pytest.raises(
        MisconfigurationException, match=r"no parameter of Student is sharded .*fully_shard in it"
    ):
        trainer(callback, strategy=strategy, devices=1).fit(student, loader())
    del student.__dict__["configure_model"]
    assert_untouched(student)


@pytest.mark.situation("other sharding strategies", proves="refused with message")
@pytest.mark.parametrize("strategy", [FSDPStrategy, DeepSpeedStrategy])
def test_other_ways_of_sharding_are_refused_with_the_way_out(strategy: type[Strategy]) -> None:
    callback = DistillationCallback(make_teacher(), [hidden()])
    made = trainer(callback)
    # Neither can be made on a machine without a GPU, or without a package of its own.
    made._accelerator_connector.strategy = strategy.__new__(strategy)
    with pytest.raises(MisconfigurationException) as refused:
        refuse(callback, [], made, make_student())
    assert str(refused.value).startswith(strategy.__name__)
    assert "fully_shard" in str(refused.value)
    assert "strategy=ModelParallelStrategy(data_parallel_size=N" in str(refused.value)
