"""Plain modules that declare what they record, with an account of what each layer really did."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from softs_lightning.recording import OutputRecorder, capture_outputs

__all__ = ["Attention", "Block", "Decoder", "Inner", "Output", "config", "outer", "x"]


def x(rows: int = 2, *, seed: int = 0) -> Tensor:
    return torch.randn(rows, 3, 4, generator=torch.Generator().manual_seed(seed))


def config(**settings: Any) -> SimpleNamespace:
    return SimpleNamespace(**settings)


@dataclass
class Output:
    last_hidden_state: Tensor
    hidden_states: tuple[Any, ...] | None = None
    attentions: tuple[Any, ...] | None = None
    cross_attentions: tuple[Any, ...] | None = None


class Attention(nn.Module):
    """Returns what it computes and the weights, as a tuple; keeps the weights of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 4)
        self.seen: list[Tensor] = []

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        weights = (self.proj(hidden_states) @ hidden_states.mT).softmax(-1)
        self.seen.append(weights)
        return weights @ hidden_states, weights


class Block(nn.Module):
    """Self attention and cross attention of one class; keeps what goes in and out of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.crossattention = Attention()
        self.my_crossattention = nn.Identity()
        self.given: list[Tensor] = []
        self.gave: list[Tensor] = []

    def forward(self, hidden_states: Tensor) -> Tensor:
        self.given.append(hidden_states)
        hidden_states = hidden_states + self.self_attn(hidden_states)[0]
        hidden_states = hidden_states + self.crossattention(hidden_states)[0]
        self.gave.append(hidden_states)
        return hidden_states


class Decoder(nn.Module):
    """Blocks, then a norm."""

    config: Any
    layers: Any

    _can_record_outputs: Any = {  # noqa: RUF012
        "hidden_states": Block,
        "attentions": OutputRecorder(Attention, index=1, layer_name="self_attn"),
        "cross_attentions": OutputRecorder(Attention, index=1, layer_name="crossattention"),
    }

    def __init__(self, depth: int = 3, config: Any = None) -> None:
        super().__init__()
        if config is not None:
            self.config = config
        self.layers = nn.ModuleList(Block() for _ in range(depth))
        self.norm = nn.LayerNorm(4)

    @capture_outputs
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return Output(last_hidden_state=self.norm(hidden_states))


class Inner(Decoder):
    """The same, returning a dict."""

    @capture_outputs
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return {"last_hidden_state": self.norm(hidden_states)}


class Outer(nn.Module):
    """A model with layers of its own and a model inside, which declares for itself."""

    _can_record_outputs: Any = {"hidden_states": Block}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.inner = Inner(depth=1)

    @capture_outputs
    def forward(self, hidden_states: Tensor, inner: bool = False, **kwargs: Any) -> Any:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        below = self.inner(hidden_states, output_hidden_states=inner)
        return {"last_hidden_state": below["last_hidden_state"], "below": below}


def outer() -> Outer:
    return Outer()
