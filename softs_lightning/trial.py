"""Whether a pair's projector and loss take the activations that it names, tried before there are weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from softs_lightning.dryrun import twin_of
from softs_lightning.forgetting import faking
from softs_lightning.pairing import BoundPair, Pair
from softs_lightning.transfer import iter_tensors, map_tensors

__all__ = ["try_loss"]

_SMALL = 2**24  # numbers in all that a trial takes; more are tried without computing anything


def try_loss(
    pair: Pair,
    ours: Sequence[Any],
    theirs: Sequence[Any],
    batch: Any,
    student: nn.Module,
    teacher: nn.Module,
) -> str | None:
    """Compute the pair's term once, from stand-ins of what is not there.

    What is small is real: the student's own activations where it has computed them, and random numbers for the
    teacher's and for weights that were not made. What is large is a fake tensor, on which a loss that looks at values
    cannot be tried.

    Args:
        pair: resolved.
        ours: the student's activations, as a dry run captured them: real, fake or meta tensors.
        theirs: the teacher's, of which the shapes and types count.
        batch: as a training step gets it.
        student: for losses that read its weights, of which the shapes and types count as well.
        teacher: likewise.

    Returns:
        why nothing was tried, or ``None``: the term can be computed.

    Raises:
        TypeError, ValueError, LookupError, RuntimeError: what the first training step would raise.

    >>> pair = Pair("outputs[0]", "outputs[net]", nn.MSELoss(), projector="linear")
    >>> model = nn.Linear(4, 4)
    >>> try_loss(pair, [torch.ones(2, 4)], [torch.ones(2, 8, device="meta")], None, model, model)
    """
    models = (student, teacher) if hasattr(pair.loss, "bind") else ()
    weights = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
    small = sum(math.prod(t.shape) for t in (*iter_tensors([ours, theirs]), *weights)) <= _SMALL
    with ExitStack() as stack:
        stack.enter_context(isolate_rng(include_cuda=False))
        stack.enter_context(torch.no_grad())
        mode = nullcontext() if small else stack.enter_context(faking())
        try:
            bound_to = [_with_weights(model, mode) if _lacks_weights(model) else model for model in models]
        except Exception as error:
            return f"it reads weights that were not made, of a model that cannot be copied ({error})"
        stack.enter_context(mode)
        mine = map_tensors(lambda t: t if small and not _is_empty(t) else _stand_in(t), list(ours))
        its = map_tensors(_stand_in, list(theirs))
        try:
            bound = BoundPair(pair, *(_sizes(pair, side) for side in (mine, its)))
            bound.set_to(0, 0)
            bound.bind(*(bound_to or (student, teacher)))
            bound(mine, its, batch)
        except (TypeError, ValueError, LookupError):
            raise
        except Exception as error:
            if small:
                raise
            return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return None


def _is_empty(tensor: Tensor) -> bool:
    """Whether it has a shape and a type only."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _lacks_weights(model: nn.Module) -> bool:
    return any(_is_empty(tensor) for tensor in (*model.parameters(), *model.buffers()))


def _with_weights(model: nn.Module, mode: AbstractContextManager[Any]) -> nn.Module:
    """A copy of a model with stand-ins for its weights."""

    def made(tensor: Tensor) -> Tensor:
        with mode:
            return _stand_in(tensor)

    return twin_of(model, made)


def _stand_in(tensor: Tensor) -> Tensor:
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, dtype=tensor.dtype)
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _sizes(pair: Pair, values: Sequence[Any]) -> list[torch.Size] | None:
    if not pair.needs_sizes:
        return None
    return [value.shape if isinstance(value, Tensor) else torch.Size() for value in values]
