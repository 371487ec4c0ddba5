"""Padding: taken away and put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from softs_lightning.store import Kept
from softs_lightning.store.tokens import restore, token_dims, trim

MASKS = {
    "right": [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
    "left": [[1, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 0, 0, 0, 1]],
    "holes": [[1, 0, 1, 1, 1], [0, 1, 0, 1, 0], [0, 0, 0, 0, 0]],
    "none": [[1, 1, 1, 1, 1]] * 3,
}


def together(rows: list[Tensor], *arguments: Any) -> Tensor:
    return restore(iter(rows), [row.shape for row in rows], *arguments)


@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize("shape", [(3, 5, 2), (3, 5), (3, 2, 5, 5), (3, 2, 5, 7), (3, 5, 2, 7)])
def test_tokens_come_back_where_they_were(masks: str, shape: tuple[int, ...]) -> None:
    mask = torch.tensor(MASKS[masks]) == 1
    value = torch.randn(shape)
    dims = token_dims(shape, mask.shape)
    rows = [trim(own, keep, dims) for own, keep in zip(value, mask, strict=True)]
    back = together(rows, [keep.nonzero().squeeze(1) for keep in mask], 5, dims, torch.float32, float("nan"))
    expected = value.clone()
    for sample, keep in enumerate(mask):
        for dim in dims:
            expected[sample].index_fill_(dim, (~keep).nonzero().squeeze(1), float("nan"))
    torch.testing.assert_close(back, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("shape", "mask", "dims"),
    [
        ((3, 5, 2), (3, 5), (0,)),
        ((3, 5), (3, 5), (0,)),
        ((3, 2, 5, 5), (3, 5), (1, 2)),
        ((3, 5, 5, 5), (3, 5), (1, 2)),
        ((3, 2, 5, 7), (3, 5), (1,)),
        ((3, 2), (3, 5), ()),
        ((3,), (3, 5), ()),
        ((3, 5, 2), None, ()),
    ],
)
def test_the_dimensions_of_tokens_are_told_from_the_shapes(
    shape: Any, mask: Any, dims: tuple[int, ...]
) -> None:
    assert token_dims(shape, mask) == dims


def test_rows_may_have_a_wider_type_than_they_were_kept_in() -> None:
    row = torch.randn(2, 3).half()
    back = together([row], [torch.tensor([0, 1])], 3, (0,), torch.float32, 0.0)
    assert torch.equal(back[0, :2], row.float())
    assert torch.equal(back[0, 2], torch.zeros(3))


def test_integers_are_padded_with_zero() -> None:
    back = together([torch.tensor([7])], [torch.tensor([1])], 2, (0,), torch.int64, float("nan"))
    assert back.tolist() == [[0, 7]]


@pytest.mark.parametrize(
    ("rows", "places", "dims", "shapes"),
    [
        ([torch.ones(2), torch.ones(3)], None, (), r"\(2,\), \(3,\)"),
        (
            [torch.ones(2, 1), torch.ones(1, 5)],
            [torch.tensor([0, 1]), torch.tensor([2])],
            (0,),
            r"\(4, 1\), \(4, 5\)",
        ),
    ],
)
def test_activations_must_agree_but_for_their_tokens(rows: Any, places: Any, dims: Any, shapes: str) -> None:
    with pytest.raises(ValueError, match=f"differ in shape: {shapes}"):
        together(rows, places, 4, dims, torch.float32, 0.0)


# -- a share of the tokens -------------------------------------------------------------------------


def drawn(kept: Kept, count: int = 400, length: int = 12) -> list[Tensor]:
    return [kept.positions(length, i.to_bytes(4, "little")) for i in range(count)]


def test_a_share_is_drawn_from_the_sample_alone() -> None:
    assert all(torch.equal(a, b) for a, b in zip(drawn(Kept(0.25)), drawn(Kept(0.25)), strict=True))
    assert any(
        not torch.equal(a, b) for a, b in zip(drawn(Kept(0.25)), drawn(Kept(0.25, seed=1)), strict=True)
    )


def test_every_token_is_drawn_as_often() -> None:
    counts = torch.bincount(torch.cat(drawn(Kept(0.25))), minlength=12)
    assert counts.sum() == 400 * 3
    assert ((counts - 100).abs() < 5 * 100**0.5).all()


@pytest.mark.parametrize(("length", "count"), [(0, 0), (1, 1), (4, 1), (5, 2)])
def test_the_share_is_rounded_up(length: int, count: int) -> None:
    positions = Kept(0.25).positions(length, b"x")
    assert len(positions) == count
    assert positions.tolist() == sorted(set(positions.tolist()))


@pytest.mark.parametrize("share", [0, 1, -0.5, 2])
def test_a_share_lies_between_nothing_and_all(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        Kept(share)
