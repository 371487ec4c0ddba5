"""Toy nets, and what hand-placed hooks see of them: the reference that traces are compared with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn


class Net(nn.Module):
    """Two layers that are visited once, and an activation that is visited twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return self.act(self.second(self.act(self.first(x)))) * scale

    def generate(self, x: torch.Tensor, steps: int = 3) -> torch.Tensor:
        """Feeds what comes out, padded by a one, back in."""
        for _ in range(steps):
            x = torch.cat([self(x), torch.ones(len(x), 1)], dim=1)
        return x


Recorded = dict[str, list[tuple[tuple[Any, ...], dict[str, Any], Any]]]


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def hooked() -> Callable[..., tuple[Recorded, Any]]:
    """Calls a model with a hook on every module; what they saw, and what it returned."""

    def call(module: nn.Module, *args: Any, method: str = "forward", **kwargs: Any) -> tuple[Recorded, Any]:
        seen: Recorded = {}
        handles = [
            each.register_forward_hook(
                lambda _, args, kwargs, out, name=name: seen.setdefault(name, []).append((args, kwargs, out)),
                with_kwargs=True,
            )
            for name, each in module.named_modules()
        ]
        try:
            result = (
                module(*args, **kwargs) if method == "forward" else getattr(module, method)(*args, **kwargs)
            )
        finally:
            for handle in handles:
                handle.remove()
        return seen, result

    return call
