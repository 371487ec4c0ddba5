"""A pair's loss is tried before there is a training: what the first step would refuse is refused here."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from softs_lightning import Pair
from softs_lightning.losses import LinearKL
from softs_lightning.trial import try_loss

MODEL = nn.Linear(1, 1)


def tried(pair: Pair, ours: Tensor, theirs: Tensor, batch: object = None) -> str | None:
    return try_loss(pair, [ours], [theirs], batch, MODEL, MODEL)


def pair(loss: object, **options: object) -> Pair:
    return Pair("outputs[a]", "outputs[b]", loss, **options)  # type: ignore[arg-type]


def test_the_loss_gets_the_students_values_and_the_teachers_shape_and_type() -> None:
    seen: list[Tensor] = []

    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        seen.extend((student, teacher))
        return student.new_ones(())

    ours = torch.arange(6.0).view(2, 3)
    theirs = torch.empty(2, 3, device="meta", dtype=torch.float64)
    assert tried(pair(loss), ours, theirs) is None
    assert torch.equal(seen[0], ours.double())
    assert (seen[1].device.type, seen[1].shape, seen[1].dtype) == ("cpu", (2, 3), torch.float64)


@pytest.mark.parametrize("width", [3, 1_000_000])
def test_unlike_shapes_are_refused_small_and_large(width: int) -> None:
    ours, theirs = torch.ones(12, width), torch.empty(12, width + 1, device="meta")
    with pytest.raises(ValueError, match="projector='linear' maps the last dimension"):
        tried(pair(nn.MSELoss()), ours, theirs)


def test_a_projector_is_made_for_the_sizes_without_memory_where_they_are_large() -> None:
    ours = torch.empty(1).expand(64, 300_000)
    theirs = torch.empty(64, 400_000, device="meta")  # a projector of 480 GB
    assert tried(pair(nn.MSELoss(), projector="linear"), ours, theirs) is None


def test_a_users_loss_that_fails_on_these_shapes_fails_here() -> None:
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        tried(pair(lambda s, t: (s @ t).mean()), torch.ones(2, 3), torch.ones(2, 3))


def test_what_looks_at_values_is_tried_on_small_activations_and_named_on_large_ones() -> None:
    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        return student.new_tensor(student.sum().item())

    assert tried(pair(loss), torch.ones(2, 3), torch.ones(2, 3)) is None
    why = tried(pair(loss), torch.ones(1).expand(5000, 5000), torch.ones(1).expand(5000, 5000))
    assert why is not None
    assert why.startswith("DataDependentOutputException")


def test_a_mask_that_the_batch_lacks_is_found_out() -> None:
    def loss(student: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
        return student.mean()

    with pytest.raises(KeyError, match="has no mask 'valid'"):
        tried(pair(loss, mask="valid"), torch.ones(2, 3), torch.ones(2, 3), {"x": torch.ones(2)})


def test_a_loss_that_reads_weights_waits_for_them() -> None:
    loss = LinearKL(student_head="head", teacher_head="head")
    here = nn.ModuleDict({"head": nn.Linear(4, 9, bias=False)})
    there = nn.ModuleDict({"head": nn.Linear(4, 9, bias=False, device="meta")})
    values = [torch.ones(2, 4)], [torch.ones(2, 4)]
    assert try_loss(pair(loss), *values, None, here, here) is None
    why = try_loss(pair(loss), *values, None, here, there)
    assert why == "it reads the teacher's weights, which were not made"


def test_nothing_is_drawn_from_the_random_state() -> None:
    before = torch.get_rng_state()
    tried(pair(nn.MSELoss(), projector="linear"), torch.ones(2, 3), torch.empty(2, 5, device="meta"))
    assert torch.equal(torch.get_rng_state(), before)
