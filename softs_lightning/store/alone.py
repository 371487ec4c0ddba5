"""Whether a sample's products depend on the other samples of its batch, which cannot be kept by sample.

A similarity matrix over the batch, statistics of the batch, or experts with a shared capacity give a sample
another product in every batch. One sample is run alone and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from softs_lightning.transfer import map_tensors

__all__ = ["prove_independent", "refuse_dependent", "single"]


def single(value: Any, count: int, index: int) -> Any:
    """A call's arguments with one sample left of each tensor and list that holds `count`.

    >>> single({"x": torch.arange(6).reshape(3, 2), "scale": torch.ones(())}, 3, 1)
    {'x': tensor([[2, 3]]), 'scale': tensor(1.)}
    """

    def one(tensor: Tensor) -> Tensor:
        return tensor[index : index + 1] if tensor.ndim and len(tensor) == count else tensor

    if isinstance(value, Mapping):
        return {key: single(entry, count, index) for key, entry in value.items()}
    if type(value) in (list, tuple):
        if len(value) == count and not any(
            isinstance(entry, (Tensor, Mapping, list, tuple)) for entry in value
        ):
            return value[index : index + 1]
        return type(value)(single(entry, count, index) for entry in value)
    return map_tensors(one, value)


def prove_independent(
    together: Mapping[str, Any], alone: Callable[[int], Mapping[str, Any]], count: int, *, lowered: bool
) -> None:
    """Run one sample alone, and see that its products are what they are in the batch.

    Args:
        together: the products of the batch, by name.
        alone: gives the products of the sample of a number, by name.
        count: samples of the batch.
        lowered: whether autocast is on.

    Raises:
        ValueError: when a product differs, or the teacher does not run on one sample.
    """
    index = count // 2
    try:
        values = alone(index)
    except Exception as error:
        raise ValueError(
            f"the teacher cannot be run on one sample of the batch ({error}), which would show whether its products "
            "depend on the others: check='none' leaves this out"
        ) from error
    for name, ours in together.items():
        if isinstance(ours, Tensor) and ours.ndim and len(ours) == count:
            refuse_dependent(name, ours, values[name], index, lowered=lowered)


def refuse_dependent(product: str, together: Tensor, alone: Tensor, index: int, *, lowered: bool) -> None:
    """Compare a sample's product in its batch with what it is alone.

    Args:
        product: for the message.
        together: [samples, ...].
        alone: [1, ...].
        index: of the sample in the batch.
        lowered: whether autocast was on, which makes kernels differ more.

    Raises:
        ValueError: when they differ by more than kernels for other batch sizes do.
    """
    where = f"{product} of a sample depends on the other samples of its batch"
    way_out = "so it cannot be kept by sample (check='none' leaves this comparison out)"
    if alone.shape[1:] != together.shape[1:]:
        raise ValueError(
            f"{where}: it is {list(together.shape)} for the batch and {list(alone.shape)} alone, {way_out}"
        )
    ours, theirs = alone[0].detach().double().cpu(), together[index].detach().double().cpu()
    if not together.is_floating_point():
        if not torch.equal(ours, theirs):
            raise ValueError(f"{where}, {way_out}")
        return
    dtype = torch.bfloat16 if lowered else together.dtype
    both = torch.isfinite(ours) & torch.isfinite(theirs)
    difference = float((ours - theirs)[both].abs().max()) if bool(both.any()) else 0.0
    largest = float(theirs[both].abs().max()) if bool(both.any()) else 0.0
    # Half of a type's digits: what rounding in another order leaves right through many layers.
    if difference > torch.finfo(dtype).eps ** 0.5 * largest:
        raise ValueError(
            f"{where}: it changes by {difference:.2g} (largest value: {largest:.2g}) when it is alone, {way_out}"
        )
