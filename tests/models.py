"""Small models for tests and benchmarks, each with an independent forward that ends at a given layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CASES", "MLP", "Case", "ResNet", "mlp", "resnet", "seeded"]


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> Any:
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

    def forward(self, x: Tensor) -> Any:
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

    def forward(self, x: Tensor) -> Any:
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

    def forward(self, x: Tensor) -> Any:
        x = self.pool(self.blocks(self.stem(x)))
        return self.head(torch.flatten(x, 1))


def mlp(width: int = 8, depth: int = 4) -> Any:
    return seeded(lambda: MLP(width, depth))


def resnet(width: int = 6, depth: int = 4) -> Any:
    return seeded(lambda: ResNet(width, depth))


def bert(width: int = 16, depth: int = 4) -> Any:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=50,
        hidden_size=width,
        num_hidden_layers=depth,
        num_attention_heads=2,
        intermediate_size=2 * width,
    )
    return seeded(lambda: BertModel(config))


def gpt2(width: int = 16, depth: int = 4) -> Any:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        vocab_size=50, n_embd=width, n_layer=depth, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    return seeded(lambda: GPT2Model(config))


def llama(width: int = 16, depth: int = 4) -> Any:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return seeded(lambda: LlamaModel(config))


def vectors(rows: int = 5, width: int = 8) -> dict[str, Any]:
    return {"x": torch.randn(rows, width, generator=torch.Generator().manual_seed(1))}


def images(rows: int = 2, size: int = 6) -> dict[str, Any]:
    return {"x": torch.randn(rows, 3, size, size, generator=torch.Generator().manual_seed(1))}


def tokens(rows: int = 3, length: int = 7) -> dict[str, Any]:
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    ids = torch.randint(0, 50, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": mask}


class _Start(nn.Module):
    """The stem of a ResNet and some of its blocks."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Any:
        return self.parts(x)


def _mlp_cut(model: Any, k: int) -> Any:
    model.layers, model.head = model.layers[:k], nn.Identity()
    return model


def _resnet_cut(model: Any, k: int) -> Any:
    return _Start(model.stem, *list(model.blocks)[:k])


def _bert_cut(model: Any, k: int) -> Any:
    model.encoder.layer, model.pooler = model.encoder.layer[:k], None
    return model


def _gpt2_cut(model: Any, k: int) -> Any:
    model.h, model.ln_f = model.h[:k], nn.Identity()
    return model


def _llama_cut(model: Any, k: int) -> Any:
    model.layers, model.norm = model.layers[:k], nn.Identity()
    return model


@dataclass(frozen=True)
class Case:
    """A model, a batch for it, how its layers are called, and how it is cut before layer `k`.

    ``build`` takes the width and the number of layers, ``batch`` the number of rows.
    """

    build: Callable[..., Any]
    batch: Callable[..., dict[str, Any]]
    layer: str
    _cut: Callable[[Any, int], Any]
    depth: int = 4

    def cut(self, model: nn.Module, k: int) -> Any:
        """A copy of `model` that ends before layer `k`, made without hooks."""
        return self._cut(copy.deepcopy(model), k).eval()

    def before(self, model: nn.Module, k: int, batch: dict[str, Any]) -> Tensor:
        """What reaches layer `k`."""
        out = self.cut(model, k)(**batch)
        hidden: Tensor = out if isinstance(out, Tensor) else out.last_hidden_state
        return hidden


CASES = {
    "mlp": Case(mlp, vectors, "layers.{}", _mlp_cut),
    "resnet": Case(resnet, images, "blocks.{}", _resnet_cut),
    "bert": Case(bert, tokens, "encoder.layer.{}", _bert_cut),
    "gpt2": Case(gpt2, tokens, "h.{}", _gpt2_cut),
    "llama": Case(llama, tokens, "layers.{}", _llama_cut),
}
