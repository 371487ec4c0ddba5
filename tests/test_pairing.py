"""Pairs: validation, projectors, masks, what a loss is given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softs_lightning import Pair
from softs_lightning.losses import FSP
from softs_lightning.pairing import BoundPair

MSE = nn.MSELoss()


def bind(student: Any = None, teacher: Any = None, **options: Any) -> BoundPair:
    pair = Pair("outputs[t]", "outputs[s]", **{"loss": MSE, **options})
    return BoundPair(pair, student, teacher)


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        (
            ("outputs[a|b]", "outputs[c]", MSE),
            ValueError,
            "selects 2 activations, the student's 'outputs.c.' 1",
        ),
        (("outputs[]", "outputs[c]", MSE), ValueError, "the teacher's product_id of a pair selects nothing"),
        (("output[a]", "outputs[c]", MSE), ValueError, "not understood from character 1"),
        (("outputs[a]", "outputs[c]", nn.MSELoss), TypeError, "a class: make an instance"),
        (("outputs[a]", "outputs[c]", "mse"), TypeError, "loss must be callable"),
        (("outputs[a]", "outputs[c]", MSE, float("nan")), ValueError, "weight must be finite"),
        (
            ("outputs[a]", "outputs[c]", MSE, 1.0, "mpl"),
            ValueError,
            "no projector 'mpl'; there are 'linear', 'mlp'",
        ),
        (("outputs[a]", "outputs[c]", MSE, 1.0, 3), TypeError, "projector must be None, one of 'linear'"),
        (("outputs[a]", "outputs[c]", MSE, 1.0, nn.Linear), TypeError, "a class: make an instance"),
        (("outputs[a]", "outputs[c]", MSE, 1.0, None, None, 3), TypeError, "mask must be"),
    ],
)
def test_bad_pairs_are_refused_when_they_are_written(
    arguments: Any, kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match):
        Pair(*arguments)


def test_several_activations_meet_in_order_and_sum() -> None:
    pair = Pair("outputs[a|b]", "outputs[c|d]", MSE)
    ours, theirs = [torch.randn(2, 3) for _ in range(2)], [torch.randn(2, 3) for _ in range(2)]
    expected = sum(((s - t) ** 2).mean() for s, t in zip(ours, theirs, strict=True))
    torch.testing.assert_close(BoundPair(pair)(ours, theirs, None), expected)


def test_a_projector_of_the_wrong_size_is_named_with_its_pair() -> None:
    bound = BoundPair(Pair("outputs[a]", "outputs[c]", MSE, projector=nn.Linear(5, 4), name="hidden"))
    with pytest.raises(
        RuntimeError,
        match=r"pair 'hidden': its projector Linear\(in_features=5.* of shape \[2, 3\]: mat1 and mat2",
    ):
        bound([torch.randn(2, 3)], [torch.randn(2, 4)], None)


def test_a_linear_projector_for_each_activation() -> None:
    pair = Pair("outputs[a|b]", "outputs[c|d]", MSE, projector="linear")
    bound = BoundPair(
        pair, [torch.Size([2, 3]), torch.Size([2, 5])], [torch.Size([2, 4]), torch.Size([2, 6])]
    )
    assert [(p.in_features, p.out_features) for p in bound.projectors] == [(3, 4), (5, 6)]
    ours, theirs = [torch.randn(2, 3), torch.randn(2, 5)], [torch.randn(2, 4), torch.randn(2, 6)]
    expected = sum(
        ((s @ p.weight.T + p.bias - t) ** 2).mean()
        for s, t, p in zip(ours, theirs, bound.projectors, strict=True)
    )
    torch.testing.assert_close(bound(ours, theirs, None), expected)


def test_projectors_by_name_or_function_are_made_for_both_shapes() -> None:
    shapes = [torch.Size([2, 3, 8, 8])], [torch.Size([2, 6, 4, 4])]
    assert bind(*shapes, projector="conv").project([torch.ones(2, 3, 8, 8)])[0].shape == (2, 6, 4, 4)
    asked: list[Any] = []

    def make(student: torch.Size, teacher: torch.Size) -> nn.Module:
        asked.append((student, teacher))
        return nn.Linear(8, 4)

    assert isinstance(bind(*shapes, projector=make).projectors[0], nn.Linear)
    assert asked == [(shapes[0][0], shapes[1][0])]
    with pytest.raises(TypeError, match="function returned a int, not a module"):
        bind(*shapes, projector=lambda s, t: 3)


def test_a_module_projector_is_copied_and_serves_all() -> None:
    given = nn.Linear(3, 4)
    pair = Pair("outputs[a|b]", "outputs[c|d]", MSE, projector=given)
    bound = BoundPair(pair)
    assert bound.projectors[0] is not given
    assert len(bound.projectors) == 1
    x = torch.randn(2, 3)
    torch.testing.assert_close(bound.project([x, x])[1], given(x))


@pytest.mark.parametrize(
    ("student", "teacher", "match"),
    [
        ([2, 3, 4, 4], [2, 8, 4, 4], "pair 's': .* use 'conv' or 'heads'"),
        ([2, 5, 3], [2, 6, 4], "the shapes differ elsewhere"),
        ([3], [4], "the shapes differ elsewhere"),
    ],
)
def test_linear_refuses_what_it_cannot_map(student: list[int], teacher: list[int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        bind([torch.Size(student)], [torch.Size(teacher)], projector="linear")


def test_unlike_shapes_are_never_broadcast() -> None:
    with pytest.raises(ValueError, match=r"shape \[2, 1\], the teacher's outputs\[t\] \[2, 3\]"):
        bind()([torch.ones(2, 1)], [torch.ones(2, 3)], None)
    with pytest.raises(ValueError, match="after the projector"):
        bind(projector=nn.Linear(1, 2))([torch.ones(2, 1)], [torch.ones(2, 3)], None)


def test_a_loss_may_say_that_it_compares_unlike_shapes() -> None:
    class Means(nn.Module):
        same_shape = False

        def forward(self, s: Tensor, t: Tensor) -> Tensor:
            return (s.mean() - t.mean()) ** 2

    assert bind(loss=Means())([torch.ones(2, 1)], [torch.zeros(2, 3)], None) == 1


def test_losses_see_float32_at_least_outside_autocast() -> None:
    seen: list[Any] = []

    def loss(s: Tensor, t: Tensor) -> Tensor:
        seen.append((s.dtype, t.dtype, torch.is_autocast_enabled("cpu"), (s @ t.T).dtype))
        return s.sum()

    half, double = torch.ones(2, 2, dtype=torch.bfloat16), torch.ones(2, 2, dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        bind(loss=loss)([half], [half], None)
    bind(loss=loss)([half], [double], None)
    assert seen == [
        (torch.float32, torch.float32, False, torch.float32),
        (torch.float64, torch.float64, False, torch.float64),
    ]


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (None, "attn_implementation='eager'"),
        ((torch.ones(1), None), r"a tuple of 2 \(Tensor, None\), not a tensor: pick one with '#'"),
    ],
)
def test_what_is_no_tensor_says_how_to_pick(value: Any, match: str) -> None:
    with pytest.raises(TypeError, match=match):
        bind()([value], [torch.ones(1)], None)
    with pytest.raises(TypeError, match=match):
        bind()([torch.ones(1)], [value], None)


def masked(s: Tensor, t: Tensor, *, mask: Tensor | None = None) -> Tensor:
    return torch.tensor(-1.0) if mask is None else mask.sum()


MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])
TOKENS = [torch.ones(2, 3, 5)]


@pytest.mark.parametrize(
    ("batch", "options", "values", "expected"),
    [
        ({"attention_mask": MASK}, {}, TOKENS, 3),
        ({"attention_mask": MASK}, {"mask": False}, TOKENS, -1),
        ({"attention_mask": MASK}, {}, [torch.ones(2, 3)], -1),  # pooled: one row a sample
        ({"attention_mask": MASK}, {}, [torch.ones(2, 4, 3, 3)], -1),  # attention maps
        ({"valid": MASK}, {"mask": "valid"}, TOKENS, 3),
        ([None, MASK], {"mask": lambda batch: batch[1]}, TOKENS, 3),
        ([None, MASK], {}, TOKENS, -1),
        ({"attention_mask": MASK}, {"loss": lambda s, t: s.mean()}, TOKENS, 1),
    ],
)
def test_masks(batch: Any, options: dict[str, Any], values: list[Tensor], expected: float) -> None:
    assert bind(**{"loss": masked, **options})(values, values, batch) == expected


def test_a_mask_that_is_not_there_is_an_error() -> None:
    with pytest.raises(KeyError, match="has no mask 'valid'"):
        bind(loss=masked, mask="valid")(TOKENS, TOKENS, {"x": 1})
    with pytest.raises(TypeError, match="the mask is"):
        bind(loss=masked, mask=lambda batch: 3)(TOKENS, TOKENS, None)


def test_a_loss_may_take_the_batch() -> None:
    def loss(s: Tensor, t: Tensor, batch: Any) -> Tensor:
        return torch.tensor(float(batch["k"]))

    assert bind(loss=loss)([torch.ones(1, 1)], [torch.ones(1, 1)], {"k": 5}) == 5


def test_trainable_losses_become_part_of_what_is_trained() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, s: Tensor, t: Tensor) -> Tensor:
            return self.scale * ((s - t) ** 2).mean()

    given = Scaled()
    bound = bind(loss=given)
    assert [name for name, _ in bound.named_parameters()] == ["loss.scale"]
    assert bound.loss is not given


def test_the_default_name_is_the_students_product() -> None:
    assert Pair("outputs[a]|inputs[b]", "inputs[c#0]|outputs[d]", MSE).name == "c#0+d"


def test_a_loss_that_takes_all_activations_together() -> None:
    maps = [torch.randn(2, 3, 4, 4), torch.randn(2, 5, 4, 4)]
    theirs = [torch.randn(2, 3, 4, 4), torch.randn(2, 5, 4, 4)]
    bound = BoundPair(Pair("outputs[a|b]", "outputs[c|d]", FSP()))
    flow = [torch.einsum("bchw,bdhw->bcd", *side) / 16 for side in (maps, theirs)]
    torch.testing.assert_close(bound(maps, theirs, None), ((flow[0] - flow[1]) ** 2).mean())


def test_what_counts_is_nonzero_not_added_up() -> None:
    bound = bind(loss=masked, mask="segments", over_window=True)
    assert bound.count({"segments": torch.tensor([[1, 2, 3, 0]])}).item() == 3
    many = torch.ones(1, 301, dtype=torch.bfloat16)  # whose sum in its own type is 300 or 302
    assert bound.count({"segments": many}).item() == 301


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mask": "valid"}, "MSELoss has no argument 'mask'"),
        ({"schedules": 3}, "schedules maps attributes"),
        ({"metrics": "cka"}, "metrics must be a list of names"),
        ({"name": 3}, "name must be a string"),
    ],
)
def test_options_that_would_do_nothing_or_fail_late_are_refused(options: dict[str, Any], match: str) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        Pair("outputs[a]", "outputs[b]", nn.MSELoss(), **options)
