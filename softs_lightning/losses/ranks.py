"""What the ranks of a distributed run hold, put together: for memories that must be one on all of them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch import distributed as dist

from softs_lightning.losses.arithmetic import eager

__all__ = ["last_of_each", "log_sum_over_ranks", "rows_of_ranks"]


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@eager
def rows_of_ranks(values: Tensor) -> Tensor:
    """``[rows, ...]`` of all ranks, one after the other, the same on each; without gradients.

    Ranks may have unlike numbers of rows, also none. All of them must call it, as often as each other.

    >>> rows_of_ranks(torch.tensor([[1.0], [2.0]]))
    tensor([[1.],
            [2.]])
    """
    values = values.detach()
    ranks = _ranks()
    if ranks == 1:
        return values
    counts = [values.new_zeros(1, dtype=torch.long) for _ in range(ranks)]
    dist.all_gather(counts, values.new_full((1,), len(values), dtype=torch.long))
    sizes = [int(count) for count in counts]
    if not max(sizes):
        return values
    # Gathered in equal blocks: collectives take no unlike ones.
    block = values.new_zeros(max(sizes), *values.shape[1:])
    block[: len(values)] = values
    blocks = [torch.empty_like(block) for _ in range(ranks)]
    dist.all_gather(blocks, block)
    return torch.cat([rows[:size] for rows, size in zip(blocks, sizes, strict=True)])


@eager
def log_sum_over_ranks(value: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The log of the sum of what ``value`` is the log of, and the sum of the counts, over all ranks."""
    own = torch.stack([value.detach().double(), value.new_tensor(count, dtype=torch.float64)])
    ranks = _ranks()
    everyone = [torch.empty_like(own) for _ in range(ranks)] if ranks > 1 else [own]
    if ranks > 1:
        dist.all_gather(everyone, own)
    values, counts = torch.stack(everyone).unbind(1)
    return values.logsumexp(0).to(value), counts.sum()


@eager
def last_of_each(index: Tensor) -> Tensor:
    """Where each number stands last: of several writes to one place, which one stays is undefined on a device.

    >>> last_of_each(torch.tensor([4, 7, 4])).tolist()
    [2, 1]
    """
    order = index.argsort(stable=True)
    return order[index[order].diff(append=index.new_full((1,), -1)) != 0]
