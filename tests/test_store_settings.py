"""A store under the settings of a fit: each run equals the one with the live teacher, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from softs_lightning import DistillationCallback, Pair, Teacher
from softs_lightning.store import (
    MissingSampleError,
    Numbered,
    ProductStore,
    SampleChangedError,
    StoredTeacher,
    StoreMismatchError,
)
from softs_lightning.store.upkeep import verify
from tests.test_store_training import (
    BATCH,
    COUNT,
    PRODUCTS,
    Student,
    assert_equal,
    fill,
    loader,
    make_teacher,
    pairs,
    train,
)

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def fitted(callbacks: list[DistillationCallback], batches: Any = None, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(2)
    student = Student()
    trainer = L.Trainer(max_epochs=2, callbacks=[*callbacks], **{**QUIET, **options})
    trainer.fit(student, loader() if batches is None else batches)
    return {
        **student.state_dict(),
        **{k: v for c in callbacks for k, v in c.state_dict().get("projectors", {}).items()},
    }


@pytest.mark.parametrize("steps", [2, 3])
def test_distilling_in_some_steps_only(tmp_path: Path, steps: int) -> None:
    live = fitted([DistillationCallback(make_teacher(), pairs(), every_n_steps=steps)])
    teacher = StoredTeacher(make_teacher(), tmp_path)
    assert_equal(fitted([DistillationCallback(teacher, pairs(), every_n_steps=steps)]), live)
    done = 12 // steps
    assert teacher.seen <= (done + 1) * BATCH  # the dry run, then no other step has looked anything up
    reader = StoredTeacher(None, tmp_path)
    assert_equal(fitted([DistillationCallback(reader, pairs(), every_n_steps=steps)]), live)


def test_accumulated_gradients(tmp_path: Path) -> None:
    live = train(make_teacher(), loader(), accumulate_grad_batches=2)
    assert_equal(train(StoredTeacher(make_teacher(), tmp_path), loader(), accumulate_grad_batches=2), live)
    assert_equal(
        train(StoredTeacher(None, tmp_path), loader(), accumulate_grad_batches=4),
        train(make_teacher(), loader(), accumulate_grad_batches=4),
    )


# -- several callbacks -----------------------------------------------------------------------------


def other_teacher() -> nn.Module:
    module = make_teacher()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1.5)
    return module


def two(first: Any, second: Any) -> list[DistillationCallback]:
    return [
        DistillationCallback(teacher, [pair], name=pair.name)
        for teacher, pair in zip((first, second), pairs(), strict=True)
    ]


def test_two_callbacks_fill_one_store_with_one_teacher(tmp_path: Path) -> None:
    live = fitted(two(make_teacher(), make_teacher()))
    stored = [StoredTeacher(make_teacher(), tmp_path) for _ in range(2)]
    assert_equal(fitted(two(*stored)), live)
    assert sorted((c.key.product, len(c)) for c in ProductStore(tmp_path).columns()) == [
        (product, COUNT) for product in PRODUCTS
    ]
    assert_equal(fitted(two(StoredTeacher(None, tmp_path), StoredTeacher(None, tmp_path))), live)


def test_two_callbacks_that_want_the_same_product_keep_it_once(tmp_path: Path) -> None:
    stored = [StoredTeacher(make_teacher(), tmp_path, commit_seconds=0.0) for _ in range(2)]
    callbacks = [
        DistillationCallback(teacher, [pairs()[0]], name=name)
        for teacher, name in zip(stored, ("a", "b"), strict=True)
    ]
    fitted(callbacks)
    (column,) = ProductStore(tmp_path).columns()
    assert sum(map(len, column.shards)) == len(column) == COUNT
    assert stored[0].computed + stored[1].computed <= COUNT + 2 * BATCH  # what one has kept the other reads


def test_two_teachers_share_a_store_only_where_that_is_said(tmp_path: Path) -> None:
    live = fitted(two(make_teacher(), other_teacher()))
    refused = [
        StoredTeacher(make_teacher(), tmp_path / "no"),
        StoredTeacher(other_teacher(), tmp_path / "no"),
    ]
    with pytest.raises(StoreMismatchError, match="another origin"):
        fitted(two(*refused))
    added = [StoredTeacher(make(), tmp_path / "yes", mode="add") for make in (make_teacher, other_teacher)]
    assert_equal(fitted(two(*added)), live)
    assert verify(tmp_path / "yes") == []


# -- validation without the teacher ----------------------------------------------------------------


class Validating(Student):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.training_step(batch, batch_idx)


class Others(Dataset[Any]):
    """Sentences that nobody trained on."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return {"input_ids": torch.tensor([40 + index, 3, 2]), "labels": torch.tensor(1)}


def validated(path: Path, *, validate: bool) -> None:
    from tests.test_store_training import pad_to_nine

    callback = DistillationCallback(None, pairs(), store=path, validate=validate)
    held_out = DataLoader(Others(), batch_size=2, collate_fn=pad_to_nine)
    L.Trainer(max_epochs=1, callbacks=[callback], **QUIET).fit(Validating(), loader(), held_out)


def test_validation_batches_are_not_looked_up_unless_they_are_asked_for(tmp_path: Path) -> None:
    fill(tmp_path)
    validated(tmp_path, validate=False)
    with pytest.raises(MissingSampleError, match=r"lacks 2 of the samples .* Precompute them"):
        validated(tmp_path, validate=True)


# -- resuming --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended")
@pytest.mark.parametrize("ids", ["content", "index"])
def test_resuming_in_mid_epoch_with_workers_and_shuffling(tmp_path: Path, ids: str) -> None:
    fill(tmp_path / "store", ids=ids)

    def interrupted(teacher: Any, path: Path, numbered: bool) -> dict[str, Tensor]:
        def run(**options: Any) -> dict[str, Tensor]:
            checkpoint = ModelCheckpoint(path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
            batches = loader(numbered=numbered, num_workers=1)
            return train(teacher, batches, callbacks=[checkpoint], enable_checkpointing=True, **options)

        run()
        return run(resume=path / "step=4.ckpt")

    live = interrupted(make_teacher(), tmp_path / "live", False)
    stored = StoredTeacher(None, tmp_path / "store", ids=ids)
    assert_equal(interrupted(stored, tmp_path / "stored", ids == "index"), live)


# -- an augmentation with seeds of the user's own --------------------------------------------------


class Augmented(Dataset[Any]):
    """Each sample in two variants, drawn by a seed that the item names; the epoch chooses which."""

    def __init__(self) -> None:
        self.x = torch.randn(8, 3, generator=torch.Generator().manual_seed(4))
        self.readings = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        seed = self.readings // 8 % 2
        self.readings += 1
        noise = torch.randn(3, generator=torch.Generator().manual_seed(100 * seed + index))
        return {"x": self.x[index] + noise, "uid": index, "seed": seed}


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.net(batch["x"]), batch["x"][:, :2])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def augmented(teacher: Any, data: Any, epochs: int = 4, **options: Any) -> dict[str, Tensor]:
    torch.manual_seed(2)
    student = Plain()
    example = {"x": torch.zeros(2, 3), "uid": [0, 1], "seed": ["dry", "dry"]}
    callback = DistillationCallback(
        teacher, [Pair("outputs[.]", "outputs[net]", nn.MSELoss())], example_batch=example
    )
    trainer = L.Trainer(max_epochs=epochs, callbacks=[callback], **QUIET)
    trainer.fit(student, DataLoader(data, batch_size=4, **options))
    return student.state_dict()


def simple() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(3, 2)


def take(batch: Any) -> Tensor:
    return batch["x"]


def test_variants_of_a_sample_are_told_apart_by_the_users_seed(tmp_path: Path) -> None:
    live = augmented(Teacher(simple(), inputs=take), Augmented())
    options: dict[str, Any] = {"ids": "uid", "seed": "seed", "inputs": take}
    teacher = StoredTeacher(simple(), tmp_path, **options)
    assert_equal(augmented(teacher, Augmented()), live)
    (column,) = ProductStore(tmp_path).columns()
    ids = {id for id in column.ids() if not id.endswith("@dry")}
    assert ids == {f"{index}@{seed}" for index in range(8) for seed in range(2)}
    assert teacher.computed <= 16 + 2  # in four epochs: each variant once, and what shows the sizes
    assert_equal(augmented(StoredTeacher(None, tmp_path, **options), Augmented()), live)


def test_a_seed_that_does_not_decide_what_is_drawn_is_found_out(tmp_path: Path) -> None:
    class Forgotten(Augmented):
        def __getitem__(self, index: int) -> Any:
            return {**super().__getitem__(index), "seed": 0}

    options: dict[str, Any] = {"ids": "uid", "seed": "seed", "inputs": take}
    with pytest.raises(SampleChangedError, match="is not what it was"):
        augmented(StoredTeacher(simple(), tmp_path, **options), Forgotten())


def test_an_augmentation_replayed_by_numbered_is_the_same_in_every_epoch(tmp_path: Path) -> None:
    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return {"x": torch.full((3,), float(index)) + torch.randn(3)}

    def run(teacher: Any) -> dict[str, Tensor]:
        data = Numbered(Noisy(), seed=5)
        return augmented(teacher, data, collate_fn=data.collate, shuffle=True)

    class Fixed(StoredTeacher):
        """The example for the dry run has no number."""

        def supply(self, batch: Any, spec: Any) -> Any:
            if not hasattr(batch, "sample_ids"):
                return Teacher.supply(self, batch, spec)
            return super().supply(batch, spec)

    live = run(Teacher(simple(), inputs=take))
    teacher = Fixed(simple(), tmp_path, ids="index", inputs=take)
    assert_equal(run(teacher), live)
    assert teacher.computed == 8


@pytest.mark.parametrize("options", [{"encoding": 3}, {"keep": "x"}, {"ids": 3.5}, {"seed": 3}])
def test_options_of_a_wrong_type_are_refused_at_once(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(options))}"):
        StoredTeacher(nn.Identity, tmp_path, **options)


def test_a_callback_refuses_what_it_would_drop(tmp_path: Path) -> None:
    pair = Pair("outputs[0]", "outputs[net]", nn.MSELoss())
    stored = StoredTeacher(nn.Identity, tmp_path, encoding="fp16")
    with pytest.raises(ValueError, match="leave store= out"):
        DistillationCallback(stored, [pair], store=tmp_path / "other")
    with pytest.raises(ValueError, match="without one"):
        DistillationCallback(None, [pair], store=tmp_path, teacher_dtype="bfloat16")
    with pytest.raises(TypeError, match="path of a folder"):
        DistillationCallback(None, [pair], store="")
    with pytest.raises(TypeError, match="name of a backend"):
        Teacher(nn.Identity, compile=3)  # type: ignore[arg-type]
