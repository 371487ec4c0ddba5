"""Projectors against plain tensor arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from softs_lightning import projectors as P

DOUBLE = torch.float64


def made(factory: Any, student: list[int], teacher: list[int]) -> nn.Module:
    torch.manual_seed(0)
    return factory(torch.Size(student), torch.Size(teacher)).double()


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)


CASES = [
    ("linear", [2, 7, 3], [2, 7, 5]),
    ("mlp", [2, 3], [2, 5]),
    ("conv", [2, 3, 8, 8], [2, 6, 4, 4]),
    ("conv", [2, 3, 4, 4], [2, 6, 8, 6]),
    ("conv_norm", [2, 3, 4, 4], [2, 6, 4, 4]),
    ("to_map", [2, 16, 3], [2, 6, 5, 4]),
    ("to_tokens", [2, 3, 8, 6], [2, 16, 6]),
    ("heads", [2, 2, 5, 4], [2, 3, 5, 6]),
    ("head_mean", [2, 4, 5, 5], [2, 2, 5, 5]),
    ("head_mean", [2, 2, 5, 5], [2, 4, 5, 5]),
]


@pytest.mark.parametrize(("name", "student", "teacher"), CASES)
def test_every_name_gives_the_teachers_shape_for_any_batch_size(
    name: str, student: list[int], teacher: list[int]
) -> None:
    module = made(P.PROJECTORS[name], student, teacher)
    x = random(3, *student[1:]).requires_grad_()
    out = module(x)
    assert list(out.shape) == [3, *teacher[1:]]
    out.square().sum().backward()
    assert x.grad is not None
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in module.parameters())


def test_every_name_is_tested_and_documented() -> None:
    assert {name for name, *_ in CASES} == set(P.PROJECTORS)
    assert P.__doc__ is not None
    assert all(f'``"{name}"``' in P.__doc__ for name in P.PROJECTORS)


def test_conv_is_a_matrix_product_at_each_place() -> None:
    module: Any = made(P.Conv(), [2, 3, 4, 4], [2, 6, 4, 4])
    x = random(2, 3, 4, 4)
    expected = torch.einsum("oc,bchw->bohw", module.weight[:, :, 0, 0], x) + module.bias.view(1, -1, 1, 1)
    torch.testing.assert_close(module(x), expected)


def test_conv_commutes_with_resizing() -> None:
    """Channels and places are mixed by separate linear maps, so their order is a matter of cost alone."""
    module: Any = made(P.Conv(), [2, 3, 8, 8], [2, 6, 4, 4])
    conv = next(layer for layer in module if isinstance(layer, nn.Conv2d))
    x = random(2, 3, 8, 8)
    expected = F.interpolate(conv(x), (4, 4), mode="bilinear", align_corners=False, antialias=True)
    torch.testing.assert_close(module(x), expected)


def test_tokens_are_laid_out_row_by_row() -> None:
    module: Any = made(P.ToMap(prefix=1, grid=(2, 3)), [1, 7, 4], [1, 5, 2, 3])
    x = random(1, 7, 4)
    out = module(x)
    for token in range(6):
        torch.testing.assert_close(out[0, :, token // 3, token % 3], module[0](x[0, token + 1]))


def test_maps_are_read_row_by_row_after_their_average() -> None:
    module: Any = made(P.ToTokens(prefix=2), [1, 4, 3, 3], [1, 11, 5])
    x = random(1, 4, 3, 3)
    out = module(x)
    for place in range(9):
        torch.testing.assert_close(out[0, place + 2], module.places(x[0, :, place // 3, place % 3]))
    torch.testing.assert_close(out[0, :2].flatten(), module.leading(x.mean((2, 3)))[0])


def test_heads_are_concatenated_mapped_and_split() -> None:
    module: Any = made(P.Heads(), [2, 2, 5, 4], [2, 3, 5, 6])
    x = random(2, 2, 5, 4)
    joined = torch.cat([x[:, 0], x[:, 1]], -1)
    expected = module.mix(joined)
    out = module(x)
    for head in range(3):
        torch.testing.assert_close(out[:, head], expected[..., 6 * head : 6 * head + 6])


def test_head_means_keep_rows_that_are_distributions() -> None:
    maps = random(2, 4, 5, 5).softmax(-1)
    fewer = made(P.HeadMean(), [2, 4, 5, 5], [2, 2, 5, 5])(maps)
    torch.testing.assert_close(fewer[:, 1], (maps[:, 2] + maps[:, 3]) / 2)
    more = made(P.HeadMean(), [2, 4, 5, 5], [2, 8, 5, 5])(maps)
    torch.testing.assert_close(more[:, 5], maps[:, 2])
    torch.testing.assert_close(fewer.sum(-1), torch.ones_like(fewer.sum(-1)))


@pytest.mark.parametrize(
    ("factory", "student", "teacher", "match"),
    [
        (P.Linear(), [2, 3, 4, 4], [2, 6, 4, 4], "use 'conv' or 'heads'"),
        (P.Linear(), [2, 5, 3], [2, 6, 4], "the shapes differ elsewhere"),
        (P.Linear(), [3], [4], "the shapes differ elsewhere"),
        (P.MLP(), [2, 5, 3], [2, 6, 4], "the shapes differ elsewhere"),
        (P.Conv(), [2, 5, 3], [2, 6, 4, 4], "both sides must be feature maps"),
        (P.Conv(resize=False), [2, 3, 8, 8], [2, 6, 4, 4], "resize=False"),
        (P.ToMap(), [2, 17, 3], [2, 6, 4, 4], "17 tokens are no 4×4 grid: set prefix= or grid="),
        (P.ToMap(), [2, 3, 4, 4], [2, 6, 4, 4], "it maps tokens"),
        (P.ToTokens(), [2, 3, 4, 4], [2, 17, 6], "17 tokens are no 4×4 grid"),
        (P.ToTokens(), [2, 3, 4], [2, 17, 6], "it maps a feature map"),
        (P.Heads(), [2, 2, 5, 4], [2, 3, 6, 6], "with one T"),
        (P.HeadMean(), [2, 4, 5, 5], [2, 3, 5, 5], "must divide the other"),
        (P.HeadMean(), [2, 4, 5, 5], [2, 2, 6, 6], "attention maps"),
    ],
)
def test_what_does_not_fit_is_refused_with_both_shapes(
    factory: Any, student: list[int], teacher: list[int], match: str
) -> None:
    with pytest.raises(ValueError, match=match) as error:
        factory(torch.Size(student), torch.Size(teacher))
    assert str(student) in str(error.value)
    assert str(teacher) in str(error.value)


def test_hidden_must_be_positive() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        P.MLP(hidden=0)
