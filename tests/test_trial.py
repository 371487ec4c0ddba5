"""A pair's loss is tried before there is a training: what the first step would refuse is refused here."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from softs_lightning import Pair
from softs_lightning.losses import LinearKL
from softs_lightning.pairing import BoundPair
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


def headed(words: int, *, width: int = 4, on: str = "meta") -> nn.Module:
    """A model that has nothing but a head; by default without weights."""
    return nn.ModuleDict({"head": nn.Linear(width, words, bias=False, device=on)})


def by_heads(student: nn.Module, teacher: nn.Module, *, width: int = 4, **options: Any) -> str | None:
    loss = pair(LinearKL(student_head="head", teacher_head="head"), **options)
    ours, theirs = torch.ones(2, 4, device="meta"), torch.ones(2, width, device="meta")
    why = try_loss(loss, [ours], [theirs], {"valid": torch.tensor([1, 0])}, student, teacher)
    with pytest.raises(RuntimeError, match="does not know the heads yet"):
        loss.loss.heads()  # type: ignore[attr-defined]  # the pair's own is bound to nothing
    return why


@pytest.mark.parametrize("on", ["meta", "cpu"])
def test_a_loss_that_reads_weights_is_tried_with_stand_ins_for_them(on: str) -> None:
    student = headed(9, on=on)
    assert by_heads(student, headed(9)) is None
    assert by_heads(student, headed(9), mask="valid") is None
    assert all(p.device.type == on for p in student.parameters())


def test_weights_of_sixteen_terabytes_are_tried_without_values() -> None:
    assert by_heads(headed(2**40), headed(2**40)) is None
    why = by_heads(headed(2**40), headed(2**40), mask="valid")
    assert why is not None
    assert why.startswith("DynamicOutputShapeException")


@pytest.mark.parametrize("words", [8, 2**24])
def test_weights_that_do_not_fit_are_refused_as_the_first_step_refuses_them(words: int) -> None:
    bound = BoundPair(pair(LinearKL(student_head="head", teacher_head="head")))
    bound.bind(headed(9, on="cpu"), headed(8, on="cpu"))
    with pytest.raises(ValueError, match="teacher hidden states have 5 features, its head takes 4") as first:
        bound([torch.ones(2, 4)], [torch.ones(2, 5)], None)
    with pytest.raises(ValueError, match=f"^{re.escape(str(first.value))}$"):
        by_heads(headed(9), headed(words), width=5)


@pytest.mark.parametrize("words", [8, 2**24])
def test_of_unlike_vocabularies_the_same_is_said_as_by_the_first_step(words: int) -> None:
    """Most are padded unlike, so the shared part is compared, with a warning."""
    with pytest.warns(
        UserWarning, match=f"has 9 entries, the teacher's {words}: the first {min(9, words)} are"
    ):
        assert by_heads(headed(9), headed(words)) is None


def test_a_model_that_cannot_be_copied_is_named() -> None:
    class Single(nn.ModuleDict):
        def __deepcopy__(self, memo: object) -> Any:
            raise RuntimeError("there is one")

    why = by_heads(headed(9), Single({"head": nn.Linear(4, 9, device="meta")}))
    assert why == "it reads weights that were not made, of a model that cannot be copied (there is one)"


@pytest.mark.parametrize("pick", [False, True])
def test_fake_activations_are_tried_by_stand_ins(pick: bool) -> None:
    with FakeTensorMode():
        ours, theirs = torch.ones(2, 3), torch.ones(2, 3)
    seen: list[Tensor] = []

    def loss(student: Tensor, teacher: Tensor) -> Tensor:
        seen.extend((student, teacher))
        return student.mean()

    if pick:
        with pytest.raises(TypeError, match=r"is a tuple of 2 \(Tensor, int\), not a tensor"):
            try_loss(pair(loss), [(ours, 1)], [theirs], None, MODEL, MODEL)
        return
    assert tried(pair(loss), ours, theirs) is None
    assert [type(value) for value in seen] == [Tensor, Tensor]
    assert [value.shape for value in seen] == [(2, 3), (2, 3)]


def test_nothing_is_drawn_from_the_random_state() -> None:
    before = torch.get_rng_state()
    tried(pair(nn.MSELoss(), projector="linear"), torch.ones(2, 3), torch.empty(2, 5, device="meta"))
    assert torch.equal(torch.get_rng_state(), before)
