"""Projectors: from the student's activation to the shape of the teacher's.

Each class is a recipe that is given both shapes, found by a dry run, and returns the module to
train: ``Linear()(student_shape, teacher_shape)``. Shapes include the batch as dimension 0.

================  ======================================  =====================================
name              student → teacher                        module
================  ======================================  =====================================
``"linear"``      ``[..., d] → [..., D]``                  a linear map of each token or sample
``"mlp"``         ``[..., d] → [..., D]``                  linear, GELU, linear
``"conv"``        ``[B, c, h, w] → [B, C, H, W]``          1×1 convolution, resized if need be
``"conv_norm"``   ``[B, c, h, w] → [B, C, H, W]``          the same with batch normalisation
``"to_map"``      ``[B, t, d] → [B, C, H, W]``             tokens laid out as a map (ViT → CNN)
``"to_tokens"``   ``[B, c, h, w] → [B, T, D]``             a map read as tokens (CNN → ViT)
``"heads"``       ``[B, h, t, d] → [B, H, t, D]``          all heads mixed linearly, then split
``"head_mean"``   ``[B, h, t, t] → [B, H, t, t]``          heads averaged or repeated in groups
================  ======================================  =====================================

The names are short for the class with its defaults; ``Pair(projector=Conv(norm=True, bias=False))``
sets its options, and in YAML so does ``_target_: softs_lightning.projectors.Conv``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = [
    "MLP",
    "PROJECTORS",
    "Conv",
    "HeadMean",
    "Heads",
    "Linear",
    "ProjectorFactory",
    "ToMap",
    "ToTokens",
]

ProjectorFactory = Callable[[torch.Size, torch.Size], nn.Module]


def _refuse(name: str, student: Sequence[int], teacher: Sequence[int], why: str) -> ValueError:
    return ValueError(
        f"projector {name!r}: {why}; the student's shape is {list(student)}, the teacher's {list(teacher)}"
    )


class Linear:
    """A linear map over the last dimension: the hint regressor of TinyBERT and MiniLM-like methods.

    Args:
        bias: add a bias.

    Raises:
        ValueError: when the shapes differ elsewhere than in the last dimension.

    >>> Linear()(torch.Size([2, 7, 3]), torch.Size([2, 7, 5]))
    Linear(in_features=3, out_features=5, bias=True)
    """

    name = "linear"

    def __init__(self, *, bias: bool = True) -> None:
        self.bias = bias

    def __call__(self, student: torch.Size, teacher: torch.Size) -> nn.Module:
        _require_same_leading(self.name, student, teacher)
        return nn.Linear(student[-1], teacher[-1], bias=self.bias)


class MLP:
    """Two linear maps with a GELU between them, over the last dimension.

    Args:
        hidden: width between the two; the teacher's width by default.

    >>> MLP(hidden=4)(torch.Size([2, 3]), torch.Size([2, 5]))[2]
    Linear(in_features=4, out_features=5, bias=True)
    """

    name = "mlp"

    def __init__(self, *, hidden: int | None = None) -> None:
        if hidden is not None and hidden < 1:
            raise ValueError(f"hidden must be at least 1, got {hidden}")
        self.hidden = hidden

    def __call__(self, student: torch.Size, teacher: torch.Size) -> nn.Module:
        _require_same_leading(self.name, student, teacher)
        hidden = self.hidden or teacher[-1]
        return nn.Sequential(nn.Linear(student[-1], hidden), nn.GELU(), nn.Linear(hidden, teacher[-1]))


class Conv:
    """A 1×1 convolution to the teacher's channels (FitNets, arXiv:1412.6550), resized to its height and width.

    Args:
        norm: batch normalisation after the convolution, without its bias then.
        resize: interpolate bilinearly where height or width differ; otherwise that is an error.

    >>> Conv()(torch.Size([2, 3, 8, 8]), torch.Size([2, 6, 4, 4]))(torch.ones(5, 3, 8, 8)).shape
    torch.Size([5, 6, 4, 4])
    """

    name = "conv"

    def __init__(self, *, norm: bool = False, resize: bool = True) -> None:
        self.norm = norm
        self.resize = resize

    def __call__(self, student: torch.Size, teacher: torch.Size) -> nn.Module:
        if len(student) != 4 or len(teacher) != 4:
            raise _refuse(self.name, student, teacher, "both sides must be feature maps [B, C, H, W]")
        layers: list[nn.Module] = [nn.Conv2d(student[1], teacher[1], 1, bias=not self.norm)]
        if self.norm:
            layers.append(nn.BatchNorm2d(teacher[1]))
        if student[2:] != teacher[2:]:
            if not self.resize:
                raise _refuse(self.name, student, teacher, "height and width differ and resize=False")
            # Fewer numbers go through the convolution if the map shrinks before it.
            shrinks = student[2] * student[3] > teacher[2] * teacher[3]
            layers.insert(0 if shrinks else len(layers), _Resize(teacher[2], teacher[3]))
        return nn.Sequential(*layers) if len(layers) > 1 else layers[0]


class ToMap:
    """Tokens ``[B, t, d]`` laid out as a feature map ``[B, C, H, W]``: a transformer learns from a CNN.

    Args:
        prefix: leading tokens that belong to no place, such as a class token; left out.
        grid: rows and columns of the remaining tokens; a square by default.

    >>> ToMap(prefix=1)(torch.Size([2, 17, 3]), torch.Size([2, 6, 8, 8]))(torch.ones(2, 17, 3)).shape
    torch.Size([2, 6, 8, 8])
    """

    name = "to_map"

    def __init__(self, *, prefix: int = 0, grid: tuple[int, int] | None = None) -> None:
        self.prefix = prefix
        self.grid = grid

    def __call__(self, student: torch.Size, teacher: torch.Size) -> nn.Module:
        if len(student) != 3 or len(teacher) != 4:
            raise _refuse(
                self.name, student, teacher, "it maps tokens [B, T, D] to a feature map [B, C, H, W]"
            )
        rows, columns = _grid(self.name, student[1] - self.prefix, self.grid, student, teacher)
        return nn.Sequential(
            nn.Linear(student[2], teacher[1]),
            _Lay(self.prefix, rows, columns),
            _Resize(teacher[2], teacher[3]) if (rows, columns) != tuple(teacher[2:]) else nn.Identity(),
        )


class ToTokens:
    """A feature map ``[B, c, h, w]`` read as tokens ``[B, T, D]``: a CNN learns from a transformer.

    Args:
        prefix: leading tokens of the teacher that belong to no place, such as a class token; they are
            compared with a projection of the map's average.
        grid: rows and columns of the teacher's other tokens; a square by default.

    >>> ToTokens(prefix=1)(torch.Size([2, 3, 8, 8]), torch.Size([2, 17, 6]))(torch.ones(2, 3, 8, 8)).shape
    torch.Size([2, 17, 6])
    """

    name = "to_tokens"

    def __init__(self, *, prefix: int = 0, grid: tuple[int, int] | None = None) -> None:
        self.prefix = prefix
        self.grid = grid

    def __call__(self, student: torch.Size, teacher: torch.Size) -> nn.Module:
        if len(student) != 4 or len(teacher) != 3:
            raise _refuse(
                self.name, student, teacher, "it maps a feature map [B, C, H, W] to tokens [B, T, D]"
            )
        rows, columns = _grid(self.name, teacher[1] - self.prefix, self.grid, student, teacher)
        return _Read(student[1], teacher[2], self.prefix, rows, columns)


class Heads:
    """All heads of ``[B, h, t, d]`` mixed by one linear map and split anew into the teacher's ``[B, H, t, D]``.

    >>> Heads()(torch.Size([2, 2, 5, 4]), torch.Size([2, 3, 5, 6]))(torch.ones(2, 2, 5, 4)).shape
    torch.Size([2, 3, 5, 6])
    """

    name = "heads"

    def __call__(self, student: torch.Size, teacher: torch.Size) -> nn.Module:
        if len(student) != 4 or len(teacher) != 4 or student[2] != teacher[2]:
            raise _refuse(self.name, student, teacher, "both sides must be [B, heads, T, D] with one T")
        return _Split(student[1] * student[3], teacher[1], teacher[3])


class HeadMean:
    """Heads of attention maps ``[B, h, t, t]`` averaged, or repeated, in groups to the teacher's number.

    Rows stay distributions; nothing is trained.

    >>> HeadMean()(torch.Size([1, 4, 2, 2]), torch.Size([1, 2, 2, 2]))(torch.arange(4.0).view(1, 4, 1, 1)).flatten()
    tensor([0.5000, 2.5000])
    """

    name = "head_mean"

    def __call__(self, student: torch.Size, teacher: torch.Size) -> nn.Module:
        if len(student) != 4 or len(teacher) != 4 or student[2:] != teacher[2:]:
            raise _refuse(
                self.name, student, teacher, "both sides must be attention maps [B, heads, T, T] of one T"
            )
        if student[1] % teacher[1] and teacher[1] % student[1]:
            raise _refuse(self.name, student, teacher, "one number of heads must divide the other")
        return _Regroup(student[1], teacher[1])


PROJECTORS: dict[str, ProjectorFactory] = {
    "linear": Linear(),
    "mlp": MLP(),
    "conv": Conv(),
    "conv_norm": Conv(norm=True),
    "to_map": ToMap(),
    "to_tokens": ToTokens(),
    "heads": Heads(),
    "head_mean": HeadMean(),
}
"""The projectors that a pair can name."""


def _require_same_leading(name: str, student: torch.Size, teacher: torch.Size) -> None:
    if len(student) == 4 and len(teacher) == 4 and student[1] != teacher[1]:
        raise _refuse(
            name,
            student,
            teacher,
            "it maps the last dimension, and these look like maps or heads: use 'conv' or 'heads'",
        )
    if len(student) < 2 or student[:-1] != teacher[:-1]:
        raise _refuse(name, student, teacher, "it maps the last dimension, and the shapes differ elsewhere")


def _grid(
    name: str, tokens: int, grid: tuple[int, int] | None, student: torch.Size, teacher: torch.Size
) -> tuple[int, int]:
    side = math.isqrt(max(tokens, 0))
    rows, columns = grid or (side, side)
    if rows * columns != tokens or tokens < 1:
        raise _refuse(
            name, student, teacher, f"{tokens} tokens are no {rows}×{columns} grid: set prefix= or grid="
        )
    return rows, columns


class _Resize(nn.Module):
    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.size = (height, width)

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, self.size, mode="bilinear", align_corners=False, antialias=True)


class _Lay(nn.Module):
    def __init__(self, prefix: int, rows: int, columns: int) -> None:
        super().__init__()
        self.prefix = prefix
        self.size = (rows, columns)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.unflatten(tokens[:, self.prefix :].transpose(1, 2), 2, self.size)


class _Read(nn.Module):
    def __init__(self, channels: int, width: int, prefix: int, rows: int, columns: int) -> None:
        super().__init__()
        self.resize = _Resize(rows, columns)
        self.places = nn.Linear(channels, width)
        self.leading = nn.Linear(channels, prefix * width) if prefix else None

    def forward(self, x: Tensor) -> Tensor:
        shown = x if x.shape[2:] == self.resize.size else self.resize(x)
        tokens: Tensor = self.places(shown.flatten(2).transpose(1, 2))
        if self.leading is None:
            return tokens
        first = torch.unflatten(self.leading(x.mean((2, 3))), 1, (-1, tokens.shape[2]))
        return torch.cat([first, tokens], 1)


class _Split(nn.Module):
    def __init__(self, width: int, heads: int, each: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, heads * each)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mix(x.transpose(1, 2).flatten(2))
        return torch.unflatten(mixed, 2, (self.heads, -1)).transpose(1, 2)


class _Regroup(nn.Module):
    def __init__(self, student: int, teacher: int) -> None:
        super().__init__()
        self.student = student
        self.teacher = teacher

    def forward(self, x: Tensor) -> Tensor:
        if self.student >= self.teacher:
            return torch.unflatten(x, 1, (self.teacher, -1)).mean(2)
        return x.repeat_interleave(self.teacher // self.student, 1)
