"""Whether a pair's projector and loss take the activations that it names, tried before there are weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from softs_lightning.pairing import BoundPair, Pair

__all__ = ["try_loss"]

_SMALL = 2**24  # numbers in all activations of a pair; more are tried without computing anything


def try_loss(
    pair: Pair,
    ours: Sequence[Any],
    theirs: Sequence[Any],
    batch: Any,
    student: nn.Module,
    teacher: nn.Module,
) -> str | None:
    """Compute the pair's term once, from stand-ins of the teacher's activations.

    Small activations are real ones: the student's own, and random numbers for the teacher's. Large ones are fake
    tensors, on which a loss that looks at values cannot be tried.

    Args:
        pair: resolved.
        ours: the student's activations, as a dry run captured them.
        theirs: the teacher's, of which the shapes and types count: fake and meta tensors will do.
        batch: as a training step gets it.
        student: for losses that read its weights.
        teacher: likewise; its weights may not exist.

    Returns:
        why nothing was tried, or ``None``: the term can be computed.

    Raises:
        TypeError, ValueError, LookupError, RuntimeError: what the first training step would raise.

    >>> pair = Pair("outputs[0]", "outputs[net]", nn.MSELoss(), projector="linear")
    >>> model = nn.Linear(4, 4)
    >>> try_loss(pair, [torch.ones(2, 4)], [torch.ones(2, 8, device="meta")], None, model, model)
    """
    if hasattr(pair.loss, "bind") and any(p.is_meta for p in (*teacher.parameters(), *teacher.buffers())):
        return "it reads the teacher's weights, which were not made"
    tensors = [value for value in (*ours, *theirs) if isinstance(value, Tensor)]
    small = sum(math.prod(tensor.shape) for tensor in tensors) <= _SMALL
    with ExitStack() as stack:
        stack.enter_context(isolate_rng(include_cuda=False))
        stack.enter_context(torch.no_grad())
        if not small:
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        mine = list(ours) if small else [_stand_in(value) for value in ours]
        its = [_stand_in(value) for value in theirs]
        try:
            bound = BoundPair(pair, *(_sizes(pair, side) for side in (mine, its)))
            bound.set_to(0, 0)
            bound.bind(student, teacher)
            bound(mine, its, batch)
        except (TypeError, ValueError, LookupError):
            raise
        except Exception as error:
            if small:
                raise
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


def _stand_in(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, dtype=value.dtype)
    return torch.zeros(value.shape, dtype=value.dtype)


def _sizes(pair: Pair, values: Sequence[Any]) -> list[torch.Size] | None:
    if not pair.needs_sizes:
        return None
    return [value.shape if isinstance(value, Tensor) else torch.Size() for value in values]
