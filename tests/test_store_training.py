"""Training from the store against training with the live teacher: the same weights, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertModel

from softs_lightning import DistillationCallback, Pair, Teacher
from softs_lightning.product import ProductSpec
from softs_lightning.store import Numbered, ProductStore, StoredTeacher

COUNT, BATCH, WIDTH = 22, 4, 12
PRODUCTS = ["outputs[encoder.layer.0]", "outputs[encoder.layer.1]"]


class Sentences(Dataset[Any]):
    """Token sequences of unlike lengths, with a label."""

    def __init__(self, count: int = COUNT) -> None:
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(2, 9, (count,), generator=generator).tolist()
        self.items = [
            {
                "input_ids": torch.randint(1, 50, (length,), generator=generator),
                "labels": torch.randint(3, (), generator=generator),
            }
            for length in lengths
        ]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def pad(items: list[Any]) -> dict[str, Tensor]:
    """To the longest of the batch, as a tokenizer's collator does."""
    ids = nn.utils.rnn.pad_sequence([item["input_ids"] for item in items], batch_first=True)
    return {
        "input_ids": ids,
        "attention_mask": (ids != 0).long(),
        "labels": torch.stack([item["labels"] for item in items]),
    }


def pad_to_nine(items: list[Any]) -> dict[str, Tensor]:
    batch = pad(items)
    short = 9 - batch["input_ids"].shape[1]
    return {k: F.pad(v, (0, short)) if v.ndim == 2 else v for k, v in batch.items()}


def make_teacher() -> nn.Module:
    torch.manual_seed(1)
    sizes = {"hidden_size": WIDTH, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 3}
    config = BertConfig(vocab_size=50, max_position_embeddings=16, **sizes, attn_implementation="eager")
    return BertModel(config, add_pooling_layer=False)


class Student(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.mix = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.mix(self.embed(batch["input_ids"]))
        return F.cross_entropy(self.head(self.drop(hidden.mean(1))), batch["labels"])

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def masked_mse(student: Tensor, teacher: Tensor, *, mask: Tensor) -> Tensor:
    keep = mask.bool()
    return F.mse_loss(student[keep], teacher[keep])


def pairs() -> list[Pair]:
    return [
        Pair(PRODUCTS[0], "outputs[embed]", masked_mse, name="low", projector="linear"),
        Pair(PRODUCTS[1], "outputs[mix]", masked_mse, name="high", weight=0.5),
    ]


def loader(
    *, collate: Any = pad_to_nine, shuffle: bool = True, numbered: bool = False, **options: Any
) -> DataLoader[Any]:
    data: Any = Numbered(Sentences(), collate_fn=collate) if numbered else Sentences()
    generator = torch.Generator().manual_seed(7)
    own = data.collate if numbered else collate
    return DataLoader(data, batch_size=BATCH, shuffle=shuffle, generator=generator, collate_fn=own, **options)


def train(teacher: Any, batches: DataLoader[Any], *, epochs: int = 2, **options: Any) -> dict[str, Tensor]:
    """The student's and the projectors' weights after training."""
    torch.manual_seed(2)
    student = Student()
    callback = DistillationCallback(teacher, pairs())
    resume = options.pop("resume", None)
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback, *options.pop("callbacks", [])],
        **{"enable_checkpointing": False, **options},
    )
    trainer.fit(student, batches, ckpt_path=resume)
    return {**student.state_dict(), **callback.state_dict()["projectors"]}


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), f"{name}: {(value - theirs[name]).abs().max()}"


WORKERS: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}


@pytest.fixture(scope="module")
def live() -> dict[str, Tensor]:
    return train(make_teacher(), loader())


def fill(path: Path, **options: Any) -> None:
    """A store built in the dataset's order."""
    numbered = options.get("ids") == "index"
    ProductStore.build(
        path, make_teacher(), PRODUCTS, loader(shuffle=False, numbered=numbered), progress=False, **options
    )


def test_the_run_that_writes_equals_the_live_teacher(tmp_path: Path, live: dict[str, Tensor]) -> None:
    teacher = StoredTeacher(make_teacher(), tmp_path)
    assert_equal(train(teacher, loader()), live)
    assert teacher.computed == BATCH + COUNT  # the dry run and the first epoch


@pytest.mark.parametrize("ids", ["content", "index"])
def test_a_run_without_the_teacher_equals_the_live_one(
    tmp_path: Path, live: dict[str, Tensor], ids: str
) -> None:
    """Built in order, read shuffled."""
    fill(tmp_path, ids=ids)
    assert_equal(train(StoredTeacher(None, tmp_path, ids=ids), loader(numbered=ids == "index")), live)


def test_workers_change_nothing(tmp_path: Path) -> None:
    fill(tmp_path, ids="index")
    reading = train(StoredTeacher(None, tmp_path, ids="index"), loader(numbered=True, **WORKERS))
    # Persistent workers shuffle in another order than none, with and without a store.
    assert_equal(reading, train(make_teacher(), loader(**WORKERS)))


def test_other_batch_sizes_read_the_same_products(tmp_path: Path) -> None:
    """Batches of three from a store that was written in batches of four."""
    fill(tmp_path)
    spec = ProductSpec.parse(PRODUCTS[1])
    stored, teacher = StoredTeacher(None, tmp_path), Teacher(make_teacher())
    stored.place()
    teacher.place()
    for start in range(0, COUNT - 2, 3):
        batch = pad([Sentences()[i] for i in range(start, start + 3)])
        (ours,), (theirs,) = stored.supply(batch, spec).select(), teacher.supply(batch, spec).select()
        keep = batch["attention_mask"].bool()
        assert ours.shape == theirs.shape
        torch.testing.assert_close(
            ours[keep], theirs[keep], rtol=0, atol=1e-6
        )  # kernels differ with the padding
        assert ours[~keep].isnan().all()


def interrupted(make: Callable[[], Any], path: Path) -> dict[str, Tensor]:
    """A run that goes on from the fourth of its twelve steps, in the middle of the first epoch."""

    def run(**options: Any) -> dict[str, Tensor]:
        checkpoint = ModelCheckpoint(path, filename="{step}", every_n_train_steps=4, save_top_k=-1)
        return train(make(), loader(), callbacks=[checkpoint], enable_checkpointing=True, **options)

    run()
    return run(resume=path / "step=4.ckpt")


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.filterwarnings("ignore:You.re resuming from a checkpoint that ended before the epoch ended")
def test_resuming_in_mid_epoch_equals_the_live_teacher_resumed_there(tmp_path: Path) -> None:
    fill(tmp_path / "store")
    live = interrupted(make_teacher, tmp_path / "live")
    assert_equal(interrupted(lambda: StoredTeacher(None, tmp_path / "store"), tmp_path / "stored"), live)


def test_a_run_that_is_interrupted_while_it_writes_is_resumed_from_what_it_wrote(
    tmp_path: Path, live: dict[str, Tensor]
) -> None:
    class Stop(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.global_step == 3:
                raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        train(StoredTeacher(make_teacher(), tmp_path), loader(), callbacks=[Stop()])
    teacher = StoredTeacher(make_teacher(), tmp_path)
    assert_equal(train(teacher, loader()), live)
    assert (
        teacher.computed <= COUNT - 3 * BATCH + BATCH
    )  # its batches, and what the dry run shares with others


@pytest.mark.parametrize("encoding", ["fp16", "int8"])
def test_a_lossy_store_gives_the_same_run_in_every_epoch(tmp_path: Path, encoding: str) -> None:
    """The run that writes trains on what later runs will read."""
    writing = train(StoredTeacher(make_teacher(), tmp_path, encoding=encoding), loader())
    assert_equal(train(StoredTeacher(None, tmp_path), loader()), writing)


def test_autocast_products_are_kept_apart(tmp_path: Path) -> None:
    options: dict[str, Any] = {"precision": "bf16-mixed", "epochs": 1}
    live = train(make_teacher(), loader(), **options)
    fill(tmp_path)  # in fp32
    assert_equal(train(StoredTeacher(make_teacher(), tmp_path), loader(), **options), live)
    kinds = {(column.key.product, column.key.autocast) for column in ProductStore(tmp_path).columns()}
    assert kinds == {(product, autocast) for product in PRODUCTS for autocast in (None, "bfloat16")}


def test_a_loss_that_ignores_the_mask_is_stopped_at_the_padding(tmp_path: Path) -> None:
    fill(tmp_path)
    student, pair = Student(), Pair(PRODUCTS[1], "outputs[mix]", nn.MSELoss())
    callback = DistillationCallback(StoredTeacher(None, tmp_path), [pair])
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    with pytest.raises(FloatingPointError, match="nan on the first batch"):
        trainer.fit(student, loader())
    assert callback.teacher.module is None  # released all the same


def test_validation_batches_are_kept_and_read_too(tmp_path: Path) -> None:
    """They come first, in Lightning's sanity check and its inference mode."""

    class Validating(Student):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.training_step(batch, batch_idx)

    def run(teacher: Any) -> dict[str, Tensor]:
        torch.manual_seed(2)
        student, callback = Validating(), DistillationCallback(teacher, pairs(), validate=True)
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[callback],
        )
        trainer.fit(student, loader(), loader(shuffle=False))
        reported = {name: value for name, value in trainer.callback_metrics.items() if "/val/" in name}
        assert len(reported) >= 2
        return {**student.state_dict(), **reported}

    live = run(make_teacher())
    writer = StoredTeacher(make_teacher(), tmp_path)
    assert_equal(run(writer), live)
    assert_equal(run(StoredTeacher(None, tmp_path)), live)


def test_the_callback_with_a_stored_teacher_survives_a_copy(tmp_path: Path) -> None:
    teacher = copy.deepcopy(StoredTeacher(make_teacher(), tmp_path))
    train(teacher, loader(), epochs=1)
    assert len(ProductStore(tmp_path).columns()[0]) == COUNT
