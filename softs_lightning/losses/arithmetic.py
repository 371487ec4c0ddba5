"""What every loss here shares: precision, shapes, rows and masks.

A loss is a number per *row* (a sample, or a token of a sample) and a mean over the rows that count.
This file owns the mean, so that no loss divides by anything of its own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn

__all__ = [
    "DistillationLoss",
    "Normalizer",
    "bounded_logits",
    "by_position",
    "check_maps",
    "check_same_shape",
    "check_sides",
    "check_width",
    "divisor",
    "eager",
    "full_precision",
    "keep_valid",
    "mean_over_rows",
    "mean_over_tokens",
    "named",
    "non_negative",
    "one_of",
    "pick",
    "positive",
    "raised",
    "run_raised",
    "unit_interval",
    "unit_rows",
    "valid_rows",
    "weight",
    "whole",
]

Normalizer = Tensor | float | int | None

Function = TypeVar("Function", bound=Callable[..., Tensor])
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


class DistillationLoss(nn.Module):
    """Base of the losses here. The class attributes say what ``check_loss`` may expect.

    - ``same_shape``: student and teacher must have one shape; anything else is a ``ValueError``.
    - ``together``: is given all activations of a pair at once, as a tuple a side.
    - ``divergence``: never negative, and zero with a zero gradient where the student equals the teacher.
    - ``logits``: reads logits over the last dimension: shifting a row changes nothing, infinite entries
      are allowed.
    - ``row_mean``: a mean over independent rows (all dimensions but the last), so that a batch may be
      split.
    - ``sample_mean``: under a mask, too, a row is a whole sample, however many of its positions count.
    """

    same_shape: ClassVar[bool] = True
    together: ClassVar[bool] = False
    divergence: ClassVar[bool] = True
    logits: ClassVar[bool] = False
    row_mean: ClassVar[bool] = True
    sample_mean: ClassVar[bool] = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The loss; what it refuses, it refuses by its name."""
        try:
            _check_mask(kwargs.get("mask"))
            return super().__call__(*args, **kwargs)
        except (TypeError, ValueError) as error:
            _name(error, type(self).__name__)
            raise

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name}={value!r}"
            for name, value in vars(self).items()
            if not name.startswith("_") and name != "training"
        )


def _name(error: Exception, name: str) -> None:
    """Put the loss's name before what the error says, unless it is said already."""
    text = str(error)
    if name not in text:
        error.args = (f"{name}: {text}",)


def _check_mask(mask: Any) -> None:
    if mask is not None and not isinstance(mask, Tensor):
        raise TypeError(f"a mask is a tensor, nonzero where a row counts, got {type(mask).__name__}")


def _number(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}")


def weight(name: str, value: float) -> float:
    """``value``, or an error that names it where it is not a finite number of 0 at least."""
    _number(name, value)
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a finite number, 0 at least, got {value!r}")
    return value


def positive(name: str, value: float) -> float:
    """``value``, or an error that names it where it is not a finite number above zero."""
    _number(name, value)
    if not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a finite number above 0, got {value!r}")
    return value


def unit_interval(name: str, value: float) -> float:
    """``value``, or an error that names it where it is no number in [0, 1]."""
    _number(name, value)
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must lie in [0, 1], got {value!r}")
    return value


def whole(name: str, value: int) -> int:
    """``value``, or an error that names it where it is no whole number of 1 at least."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be a whole number, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be 1 at least, got {value!r}")
    return value


def one_of(name: str, value: str, choices: Sequence[str]) -> str:
    """``value``, or an error that names it and the choices where it is none of them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
    return value


def raised(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in one dtype, float32 at least: half precision is raised, float64 is kept."""
    for tensor in tensors:
        if tensor is None:
            raise TypeError(
                "a loss compares tensors, got None: nothing was returned there (transformers' attention maps "
                'need attn_implementation="eager")'
            )
        if not isinstance(tensor, Tensor):
            raise TypeError(
                f"a loss compares tensors, got {type(tensor).__name__}; "
                "name the element in the product_id, as in outputs[layer#0] or outputs[layer#hidden_states]"
            )
        if not tensor.is_floating_point():
            raise TypeError(f"a loss compares floating-point tensors, got {tensor.dtype}")
        if tensor.ndim and tensor.shape[0] and not tensor.shape[-1]:
            raise ValueError(f"a loss compares features, got none in {tuple(tensor.shape)}")
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    return tuple(tensor.to(dtype) for tensor in tensors)


def run_raised(network: Callable[..., Tensor], values: Tensor) -> Tensor:
    """A loss's own network on ``values``: in its own dtype where that is a half one, the result raised.

    A module held in half precision (bf16-true) stays so; what is compared is not.
    """
    held = [] if not isinstance(network, nn.Module) else [*network.parameters(), *network.buffers()]
    half = [x.dtype for x in held if x.is_floating_point() and x.dtype.itemsize < 4]
    result = network(values.to(half[0]) if half else values)
    return result.to(torch.promote_types(result.dtype, torch.float32))


def eager(function: AnyFunction) -> AnyFunction:
    """Keep ``function`` out of ``torch.compile``: a loop over blocks would be unrolled into the graph."""
    kept: AnyFunction = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
    return kept


def named(function: Function) -> Function:
    """Have ``function`` refuse what it refuses by its name."""

    @functools.wraps(function)
    def computed(*args: Any, **kwargs: Any) -> Tensor:
        try:
            _check_mask(kwargs.get("mask"))
            return function(*args, **kwargs)
        except (TypeError, ValueError) as error:
            _name(error, function.__name__)
            raise

    return cast(Function, computed)


def full_precision(function: Function) -> Function:
    """Give ``function(student, teacher, ...)`` both operands raised, and switch autocast off inside it.

    What it refuses, it refuses by its name.
    """

    @functools.wraps(function)
    def computed(student: Any, teacher: Any, *args: Any, **kwargs: Any) -> Tensor:
        many = isinstance(student, list | tuple) and isinstance(teacher, list | tuple)
        tensors = raised(*student, *teacher) if many else raised(student, teacher)
        with torch.autocast(tensors[0].device.type, enabled=False):
            if many:
                return function(tensors[: len(student)], tensors[len(student) :], *args, **kwargs)
            return function(*tensors, *args, **kwargs)

    return named(cast(Function, computed))


def check_same_shape(student: Tensor, teacher: Tensor, what: str) -> None:
    """Refuse to broadcast: a ``ValueError`` that names ``what`` and both shapes, also where nothing is in them."""
    if not student.ndim or not student.shape[-1]:
        raise ValueError(f"{what} compares rows of features, [..., features], got {tuple(student.shape)}")
    if student.shape != teacher.shape:
        raise ValueError(
            f"{what} compares tensors of one shape, got student {tuple(student.shape)} "
            f"and teacher {tuple(teacher.shape)}; add a projector, or choose a loss that takes unlike shapes"
        )


def check_width(values: Tensor, width: int, dim: int, what: str) -> None:
    """A ``ValueError`` that names ``what`` where dimension ``dim`` is not ``width`` long."""
    if values.ndim < 2 or not -values.ndim <= dim < values.ndim or values.shape[dim] != width:
        raise ValueError(f"{what} must have {width} features at dimension {dim}, got {tuple(values.shape)}")


def check_sides(student: Any, teacher: Any, number: int) -> None:
    """A ``ValueError`` where either side is not a list or tuple of ``number`` maps."""
    got = [len(x) if isinstance(x, list | tuple) else type(x).__name__ for x in (student, teacher)]
    if got != [number, number]:
        raise ValueError(f"{number} maps a side are wanted, as lists or tuples, got {got[0]} and {got[1]}")


def check_maps(values: Tensor, channels: int, what: str) -> None:
    """A ``ValueError`` that names ``what`` where it is not ``[batch, channels, height, width]``."""
    if values.ndim != 4 or values.shape[1] != channels:
        raise ValueError(f"{what} must be [batch, {channels}, height, width], got {tuple(values.shape)}")


def by_position(values: Tensor, channel_dim: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """``[batch, channels, positions]``, zero where masked, and the mask as ``[batch, positions]`` booleans.

    Args:
        values: ``[batch, channels, *positions]``, or with the channels at ``channel_dim``.
        channel_dim: 1 for feature maps, -1 for tokens ``[batch, tokens, features]``.
        mask: ``[batch, *positions]``, nonzero where a position counts.
    """
    dims = values.ndim
    if dims < 3 or channel_dim % dims == 0 or not -dims <= channel_dim < dims:
        raise ValueError(
            f"maps are [batch, channels, *positions] with the channels at {channel_dim}, got {tuple(values.shape)}"
        )
    values = values.movedim(channel_dim, 1)
    if mask is None:
        return values.flatten(2), None
    if mask.shape != values[:, 0].shape:
        raise ValueError(
            f"mask {tuple(mask.shape)} does not match the positions {tuple(values[:, 0].shape)} beside the channels "
            f"at {channel_dim} (1 for feature maps, -1 for tokens)"
        )
    valid = mask != 0
    return values.masked_fill(~valid.unsqueeze(1), 0).flatten(2), valid.flatten(1)


def _valid(mask: Tensor, shape: torch.Size) -> Tensor:
    """The mask as booleans with as many dimensions as ``shape``; it covers the leading ones."""
    if mask.ndim > len(shape) or mask.shape != shape[: mask.ndim]:
        raise ValueError(f"mask {tuple(mask.shape)} does not cover the leading dimensions of {tuple(shape)}")
    return (mask != 0).reshape(mask.shape + (1,) * (len(shape) - mask.ndim))


def keep_valid(values: Tensor, mask: Tensor | None) -> Tensor:
    """Zero what the mask leaves out, *before* the maths: padding may hold NaN, and 0 · NaN is NaN."""
    return values if mask is None else values.masked_fill(~_valid(mask, values.shape), 0)


def valid_rows(values: Tensor, mask: Tensor | None, *, tokens: bool = True) -> Tensor:
    """``values`` as ``[rows, features]``, the valid rows only; for losses that relate rows to each other.

    With ``tokens`` each position of the leading dimensions is a row. Otherwise each sample is one row with
    all the rest flattened: masked tokens are zero in it, and a sample without a valid token is left out.
    """
    if values.ndim < 2:
        raise ValueError(f"rows to relate are [batch, ..., features], got {tuple(values.shape)}")
    if mask is None:
        return values.flatten(0, -2) if tokens else values.flatten(1)
    if tokens:
        _valid(mask, values.shape)
        return (
            values.flatten(mask.ndim)[mask != 0]
            if mask.ndim < values.ndim
            else values[mask != 0].unsqueeze(-1)
        )
    return keep_valid(values, mask).flatten(1)[(mask != 0).flatten(1).any(1) if mask.ndim > 1 else mask != 0]


def mean_over_rows(rows: Tensor, mask: Tensor | None = None, normalizer: Normalizer = None) -> Tensor:
    """Sum of the valid rows over their number, or over ``normalizer``; zero, and in the graph, for none.

    Args:
        rows: one value a row, any shape.
        mask: nonzero where a row counts; covers the leading dimensions of ``rows``.
        normalizer: what to divide by instead of the number of valid rows. To weigh every token alike over
            an accumulation window and over ranks, pass the window's valid rows of all ranks, divided by
            ``accumulate_grad_batches * world_size`` (Lightning and DDP divide by these again).
    """
    if mask is None:
        return rows.sum() / divisor(rows.numel(), normalizer)
    valid = _valid(mask, rows.shape).expand(rows.shape)
    return rows.masked_fill(~valid, 0).sum() / divisor(valid.sum(), normalizer)


def divisor(count: Tensor | int, normalizer: Normalizer = None) -> Tensor | float:
    """The normalizer where there is one, else the count; 1 for a 0: of no row at all the sum is 0."""
    value = count if normalizer is None else normalizer
    if not isinstance(value, Tensor) and not 0 <= value < math.inf:
        raise ValueError(f"normalizer must be a number of rows, or a tensor of one, got {value}")
    if isinstance(value, Tensor):
        return value.where(value != 0, torch.ones_like(value))
    return value or 1


def mean_over_tokens(values: Tensor, mask: Tensor | None = None, normalizer: Normalizer = None) -> Tensor:
    """Mean of elementwise values: over the features of each row, then over the valid rows.

    A row is one entry of the mask, or the last dimension where there is no mask.
    """
    leading = values.ndim - 1 if mask is None else mask.ndim
    if mask is not None:
        _valid(mask, values.shape)
    if leading < values.ndim:
        values = values.flatten(max(leading, 0)).mean(-1)
    return mean_over_rows(values, mask, normalizer)


def non_negative(rows: Tensor) -> Tensor:
    """Clip to zero what rounding left below it, in the value only: the gradient is the unclipped one."""
    return rows + (rows.clamp_min(0) - rows).detach()


def bounded_logits(logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Logits over the temperature, infinities read as ±√max: 0 · (−∞ − −∞) would be NaN."""
    bound = torch.finfo(logits.dtype).max ** 0.5
    logits = logits.clamp(-bound, bound)
    return logits if temperature == 1 else logits / temperature


def unit_rows(values: Tensor, dim: int = -1) -> Tensor:
    """Vectors over their L2 norm; zero stays zero, and neither the norm nor its gradient overflows."""
    # The result does not depend on the scale, so no gradient is owed to it.
    scale = values.detach().abs().amax(dim, keepdim=True)
    values = values / scale.where(scale > 0, torch.ones_like(scale))
    # Scaled norms are 1 at least; the floor is for zero rows alone.
    norms: Tensor = torch.linalg.vector_norm(values, dim=dim, keepdim=True)
    return values / norms.clamp_min(0.5)


def pick(batch: Any, key: str | int | Callable[[Any], Tensor], what: str) -> Tensor:
    """The tensor that ``key`` names in a batch: a key, a position, or a function of the batch."""
    try:
        found = key(batch) if callable(key) else batch[key]
    except (KeyError, IndexError, TypeError) as error:
        if callable(key):
            raise
        there = sorted(map(str, batch)) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(f"{what} wants {key!r} of the batch, which has {there}") from error
    if not isinstance(found, Tensor):
        name = getattr(key, "__name__", repr(key))
        raise TypeError(f"{what} wants a tensor for its {name} of the batch, got {type(found).__name__}")
    return found
