"""Small models for tests and benchmarks, each with an independent forward that ends at a given layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CASES", "MLP", "Case", "ResNet", "mlp", "resnet", "seeded"]


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """The module that `build` makes, with the same random weights each time, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build().eval()


class MLP(nn.Module):
    """Linear layers with an activation between them."""

    def __init__(self, width: int = 8, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.act = nn.Tanh()
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x))
        return self.head(x)


class Block(nn.Module):
    """A residual block whose ReLUs write in place, as torchvision's do."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x
        return self.relu(out)


class ResNet(nn.Module):
    """A stem, blocks and a head."""

    def __init__(self, channels: int = 6, depth: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, channels, 3, padding=1), nn.BatchNorm2d(channels))
        self.blocks = nn.Sequential(*(Block(channels) for _ in range(depth)))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.blocks(self.stem(x)))
        return self.head(torch.flatten(x, 1))


def mlp() -> nn.Module:
    return seeded(MLP)


def resnet() -> nn.Module:
    return seeded(ResNet)


def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=24
    )
    return seeded(lambda: BertModel(config))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=4, n_head=2, n_positions=16)
    return seeded(lambda: GPT2Model(config))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
    )
    return seeded(lambda: LlamaModel(config))


@dataclass(frozen=True)
class Case:
    """A model, a batch, the names of its layers, and what it computes when it ends before layer `k`."""

    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Any]]
    layer: str
    depth: int
    before: Callable[[nn.Module, int, dict[str, Any]], Tensor]


def _vectors() -> dict[str, Any]:
    return {"x": torch.randn(5, 8, generator=torch.Generator().manual_seed(1))}


def _images() -> dict[str, Any]:
    return {"x": torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(1))}


def _tokens() -> dict[str, Any]:
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, 4:] = 0
    ids = torch.randint(0, 50, (3, 7), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": mask}


def _mlp_before(model: nn.Module, k: int, batch: dict[str, Any]) -> Tensor:
    x = batch["x"]
    for layer in list(model.layers)[:k]:
        x = torch.tanh(nn.functional.linear(x, layer.weight, layer.bias))
    return x


def _resnet_before(model: nn.Module, k: int, batch: dict[str, Any]) -> Tensor:
    return copy.deepcopy(nn.Sequential(model.stem, *list(model.blocks)[:k]))(batch["x"])


def _bert_before(model: nn.Module, k: int, batch: dict[str, Any]) -> Tensor:
    cut = copy.deepcopy(model)
    cut.encoder.layer, cut.pooler = cut.encoder.layer[:k], None
    return cut(**batch).last_hidden_state


def _gpt2_before(model: nn.Module, k: int, batch: dict[str, Any]) -> Tensor:
    cut = copy.deepcopy(model)
    cut.h, cut.ln_f = cut.h[:k], nn.Identity()
    return cut(**batch).last_hidden_state


def _llama_before(model: nn.Module, k: int, batch: dict[str, Any]) -> Tensor:
    cut = copy.deepcopy(model)
    cut.layers, cut.norm = cut.layers[:k], nn.Identity()
    return cut(**batch).last_hidden_state


CASES = {
    "mlp": Case(mlp, _vectors, "layers.{}", 4, _mlp_before),
    "resnet": Case(resnet, _images, "blocks.{}", 4, _resnet_before),
    "bert": Case(bert, _tokens, "encoder.layer.{}", 4, _bert_before),
    "gpt2": Case(gpt2, _tokens, "h.{}", 4, _gpt2_before),
    "llama": Case(llama, _tokens, "layers.{}", 4, _llama_before),
}
