"""Ids and digests of samples, and datasets that number them."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import BatchEncoding

from softs_lightning.store import Numbered, SampleChangedError, refuse_random
from softs_lightning.store.samples import digests, identify, named

TOKENS = [[5, 6, 7], [5, 6], [8, 9, 1, 2]]


def batch(rows: list[list[int]], length: int = 0, left: bool = False) -> dict[str, Tensor]:
    length = length or max(map(len, rows))
    padded = [([0] * (length - len(r)) + r) if left else (r + [0] * (length - len(r))) for r in rows]
    mask = [
        ([0] * (length - len(r)) + [1] * len(r)) if left else ([1] * len(r) + [0] * (length - len(r)))
        for r in rows
    ]
    return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(mask)}


def digest(given: dict[str, Any], mask: str | None = "attention_mask") -> list[bytes]:
    return identify(given, given, "content", mask=mask).digests


# -- digests ---------------------------------------------------------------------------------------


def test_a_digest_does_not_depend_on_the_batch() -> None:
    together = digest(batch(TOKENS))
    assert together == [digest(batch([row]))[0] for row in TOKENS]
    assert together == digest(batch(TOKENS, length=9))
    assert together[::-1] == digest(batch(TOKENS[::-1]))
    assert len(set(together)) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"input_ids": torch.tensor([[5, 6, 8]])},
        {"input_ids": torch.tensor([[5, 6, 7]], dtype=torch.int32)},
        {"attention_mask": torch.tensor([[1, 1, 0]])},
        {"token_type_ids": torch.tensor([[0, 0, 0]])},
        {"output_attentions": True},
    ],
)
def test_a_digest_changes_with_whatever_the_teacher_is_given(change: dict[str, Any]) -> None:
    given = batch([[5, 6, 7]])
    assert digest({**given, **change}) != digest(given)


def test_position_in_the_batch_counts_unless_positions_are_given() -> None:
    """Without position_ids a model with absolute positions sees another input when it is padded on the left."""
    right, left = batch(TOKENS[1:2], length=4), batch(TOKENS[1:2], length=4, left=True)
    assert digest(right) != digest(left)
    positions = {"right": torch.tensor([[0, 1, 9, 9]]), "left": torch.tensor([[9, 9, 0, 1]])}
    assert digest({**right, "position_ids": positions["right"]}) == digest(
        {**left, "position_ids": positions["left"]}
    )


def test_masks_with_holes_are_followed() -> None:
    given = {"x": torch.tensor([[1, 2, 3, 4]]), "attention_mask": torch.tensor([[1, 0, 0, 1]])}
    other = {**given, "x": torch.tensor([[1, 7, 7, 4]])}
    assert digest(given) == digest(other)
    assert digest(given) != digest({**given, "x": torch.tensor([[1, 2, 3, 5]])})


def test_nested_arguments_and_bfloat16_count() -> None:
    x = torch.ones(2, 3, dtype=torch.bfloat16)
    one = digests({"a": {"b": [x, 1.0]}}, 2)
    assert one != digests({"a": {"b": [x + 1, 1.0]}}, 2)
    assert one != digests({"a": {"b": [x, 2.0]}}, 2)
    assert one[0] == one[1]


def test_an_object_whose_content_cannot_be_told_is_refused() -> None:
    with pytest.raises(
        TypeError, match="the teacher's argument 'cache' is a Linear, whose content cannot be told"
    ):
        digests({"x": torch.ones(2), "cache": nn.Linear(1, 1)}, 2)


# -- ids -------------------------------------------------------------------------------------------


def test_content_ids_are_the_digests() -> None:
    samples = identify(None, batch(TOKENS), "content", mask="attention_mask")
    assert samples.ids == [own.hex() for own in samples.digests]


@pytest.mark.parametrize("values", [torch.tensor([4, 5]), [4, 5], ["4", "5"], np.array([4, 5])])
def test_ids_are_read_from_a_field(values: Any) -> None:
    given = {"x": torch.ones(2, 1), "uid": values}
    assert identify(given, {"x": given["x"]}, "uid", mask=None).ids == ["4", "5"]
    assert identify(given, {"x": given["x"]}, lambda b: b["uid"], mask=None).ids == ["4", "5"]


def test_a_seed_becomes_part_of_the_id() -> None:
    given = {"x": torch.ones(2, 1), "uid": [4, 5], "seed": torch.tensor([0, 9])}
    assert identify(given, {"x": given["x"]}, "uid", mask=None, seed="seed").ids == ["4@0", "5@9"]


@pytest.mark.parametrize(
    ("given", "ids", "error", "message"),
    [
        ({"x": torch.ones(2)}, "uid", KeyError, "has no field 'uid'"),
        ([torch.ones(2)], "uid", KeyError, "a list of 1"),
        ({"x": torch.ones(2)}, "index", KeyError, "wrap the dataset in Numbered"),
        ({"x": torch.ones(2), "uid": [1]}, "uid", ValueError, "1 ids for a batch of 2 samples"),
        ({"x": torch.ones(2), "uid": [1.5, 2.5]}, "uid", TypeError, "a string or a whole number, got 1.5"),
        (
            {"x": torch.tensor([1.0, 2.0]), "uid": [3, 3]},
            "uid",
            ValueError,
            "two unlike samples of one batch",
        ),
    ],
)
def test_ids_that_cannot_be_right_are_refused(
    given: Any, ids: str, error: type[Exception], message: str
) -> None:
    x = given["x"] if isinstance(given, dict) else given[0]
    with pytest.raises(error, match=message):
        identify(given, {"x": x}, ids, mask=None)


def test_one_sample_twice_in_a_batch_is_one_sample() -> None:
    given = {"x": torch.ones(2), "uid": [3, 3]}
    assert identify(given, {"x": given["x"]}, "uid", mask=None).ids == ["3", "3"]


def test_a_call_without_tensors_is_refused() -> None:
    with pytest.raises(TypeError, match="without a tensor"):
        identify(None, named((1,), {}), "content", mask=None)


# -- Numbered --------------------------------------------------------------------------------------


class Things(Dataset[Any]):
    def __init__(self, make: Any) -> None:
        self.make = make

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.make(float(index))


def as_dict(i: float) -> Any:
    return {"x": torch.tensor([i])}


def as_tuple(i: float) -> Any:
    return torch.tensor([i]), 1


def to_encoding(items: list[Any]) -> Any:
    return BatchEncoding({"x": torch.stack([item["x"] for item in items])})


def to_tuple(items: list[Any]) -> Any:
    return (torch.stack([item["x"] for item in items]), "text")


@pytest.mark.parametrize(
    ("make", "collate", "kind"),
    [
        (as_dict, None, dict),
        (as_tuple, None, list),
        (as_dict, to_encoding, BatchEncoding),
        (as_dict, to_tuple, tuple),
    ],
)
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_carry_the_index_and_are_otherwise_unchanged(
    make: Any, collate: Any, kind: type, workers: int
) -> None:
    options = {"collate_fn": collate} if collate else {}
    data = Numbered(Things(make), **options)
    plain = DataLoader(Things(make), batch_size=4, **options)
    seen: list[str] = []
    ours = DataLoader(data, batch_size=4, collate_fn=data.collate, num_workers=workers)
    for batch, expected in zip(ours, plain, strict=True):
        assert isinstance(batch, kind)
        moved = batch.to("cpu")
        assert moved.sample_ids == batch.sample_ids
        assert type(moved) is type(batch)
        seen += pickle.loads(pickle.dumps(batch)).sample_ids
        x, y = (batch["x"], expected["x"]) if hasattr(batch, "keys") else (batch[0], expected[0])
        assert torch.equal(x, y)
        assert len(batch) == len(expected)
    assert seen == [str(i) for i in range(6)]


class Whole(Things):
    """Gives a batch at once, as a dict of stacked tensors."""

    def __getitems__(self, indices: list[int]) -> Any:
        return {"x": torch.tensor(indices, dtype=torch.float32)}


@pytest.mark.parametrize("workers", [0, 1])
def test_datasets_that_give_whole_batches_are_asked_for_them(workers: int) -> None:
    data = Numbered(Whole(as_dict), collate_fn=lambda batch: batch)
    batches = list(DataLoader(data, batch_size=4, collate_fn=data.collate, num_workers=workers))
    assert [batch["x"].tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5]]
    assert [batch.sample_ids for batch in batches] == [["0", "1", "2", "3"], ["4", "5"]]
    seeded = Numbered(Whole(as_dict), seed=0)  # whose samples are drawn one by one
    (batch,) = DataLoader(seeded, batch_size=6, collate_fn=seeded.collate)
    assert (batch["x"].shape, batch.sample_ids[5]) == ((6, 1), "5@0")


def test_names_keep_datasets_apart_and_negative_indices_are_the_same_samples() -> None:
    data = Numbered(Things(as_dict), name="val")
    assert (data[2].id, data[-1].id, len(data)) == ("val:2", "val:5", 6)


def test_a_batch_that_cannot_carry_ids_is_refused() -> None:
    data = Numbered([torch.ones(1)] * 4)
    with pytest.raises(TypeError, match=r"a Tensor of shape .* cannot carry ids"):
        data.collate([data[0], data[1]])


def test_a_dataset_without_indices_is_refused() -> None:
    with pytest.raises(TypeError, match="generator has no index"):
        Numbered(i for i in range(3))


def test_a_loader_without_its_collate_does_not_pass_unnoticed() -> None:
    with pytest.raises(TypeError, match="Sample"):
        next(iter(DataLoader(Numbered(Things(as_dict)))))


# -- random augmentation ---------------------------------------------------------------------------

SOURCES = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),
    "python": random.random,
}


@pytest.mark.parametrize("source", SOURCES)
def test_a_random_augmentation_is_found(source: str) -> None:
    with pytest.raises(
        SampleChangedError, match=r"sample 0 of Things differs .* Numbered\(dataset, seed=0\)"
    ):
        refuse_random(Things(lambda i: {"x": [i, SOURCES[source]()]}))


@pytest.mark.parametrize("source", SOURCES)
def test_a_seed_replays_it(source: str) -> None:
    data = Numbered(Things(lambda i: {"x": SOURCES[source]()}), seed=3)
    refuse_random(data)
    values = [data[i].item["x"] for i in range(6)]
    assert values == [data[i].item["x"] for i in range(6)]
    assert len(set(values)) == 6
    assert data[0].id == "0@3"
    assert values[0] != Numbered(Things(lambda i: {"x": SOURCES[source]()}), seed=4)[0].item["x"]


def test_the_random_state_stays_as_it_was() -> None:
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()  # type: ignore[index, union-attr]
    Numbered(Things(lambda i: torch.rand(()) + np.random.rand() + random.random()), seed=0)[1]
    refuse_random(Things(as_dict))
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])  # type: ignore[index]
    assert torch.equal(torch.get_rng_state(), states[2])


@pytest.mark.parametrize(
    "item", [1.5, "text", b"bytes", np.ones(3), [{"a": (torch.ones(1), None)}], object()]
)
def test_what_does_not_change_passes(item: Any) -> None:
    refuse_random([item])
    refuse_random(copy.copy([item]))


@pytest.mark.parametrize("data", [[], None, iter([1]), TensorDataset(torch.ones(3))])
def test_what_cannot_be_read_by_index_passes_unseen(data: Any) -> None:
    refuse_random(data)
