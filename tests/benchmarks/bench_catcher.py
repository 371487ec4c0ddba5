"""What the catcher costs: idle, in a session, and against a model that ends where it stops."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from softs_lightning.catcher import ModelIOCatcher
from tests.benchmarks import Row, compare
from tests.models import CASES, Case

SETTINGS: dict[str, tuple[str, int, int, dict[str, int]]] = {
    "MLP, 12 × 256, 64 rows": ("mlp", 256, 12, {"rows": 64, "width": 256}),
    "ResNet-like, 8 × 16, 4 images of 16²": ("resnet", 16, 8, {"rows": 4, "size": 16}),
    "BERT-shaped, 6 × 128, 4 × 32 tokens": ("bert", 128, 6, {"rows": 4, "length": 32}),
    "GPT-2-shaped, 6 × 128, 4 × 32 tokens": ("gpt2", 128, 6, {"rows": 4, "length": 32}),
    "Llama-shaped, 6 × 128, 4 × 32 tokens": ("llama", 128, 6, {"rows": 4, "length": 32}),
}


def rows() -> Iterator[Row]:
    for setting, (name, width, depth, size) in SETTINGS.items():
        case = CASES[name]
        with torch.no_grad():
            yield from _rows(setting, case, case.build(width, depth), case.batch(**size), depth)


def _rows(setting: str, case: Case, model: nn.Module, batch: dict[str, Any], depth: int) -> Iterator[Row]:
    k = depth // 2
    product = f"outputs[{case.layer.format(0)}|{case.layer.format(k)}]"

    def bare() -> Any:
        return model(**batch)

    def measure(what: str, make: Callable[[nn.Module], Callable[[], Any]], limit: float | None = None) -> Row:
        return compare(setting, what, make(copy.deepcopy(model)), bare, limit=limit)

    yield measure("no catcher again (the noise)", lambda m: lambda: m(**batch))
    yield measure("idle catcher, two layers hooked / no catcher", lambda m: _idle(m, product, batch), 1.02)
    yield measure('idle catcher, attach="all" / no catcher', lambda m: _idle(m, product, batch, attach="all"))
    yield measure("inert hooks by hand on every module / no hooks", lambda m: _by_hand(m, batch))
    yield measure(
        "a session a forward, two layers / no catcher", lambda m: _session(m, product, batch, False)
    )
    cut = case.cut(model, k + 1)
    stopping = _session(copy.deepcopy(model), f"outputs[{case.layer.format(k)}]", batch, True)
    what = f"stop at layer {k} of {depth} / a model that ends there"
    yield compare(setting, what, stopping, lambda: cut(**batch), limit=1.05)


def _idle(model: nn.Module, product: str, batch: dict[str, Any], **options: Any) -> Callable[[], Any]:
    catcher = ModelIOCatcher(model, **options)
    with catcher.for_product(product):
        catcher.run(**batch)

    def forward(keep: ModelIOCatcher = catcher) -> Any:
        return model(**batch)

    return forward


def _by_hand(model: nn.Module, batch: dict[str, Any]) -> Callable[[], Any]:
    """The plain design: two hooks on every module, each of which asks whether it is wanted."""
    armed: set[str] = set()

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if name in armed:
            raise AssertionError

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        if name in armed:
            raise AssertionError

    for name, module in model.named_modules():
        module.register_forward_pre_hook(partial(before, name), with_kwargs=True)
        module.register_forward_hook(partial(after, name))
    return lambda: model(**batch)


def _session(model: nn.Module, product: str, batch: dict[str, Any], early_exit: bool) -> Callable[[], Any]:
    catcher = ModelIOCatcher(model)

    def forward() -> Any:
        with catcher.for_product(product, early_exit=early_exit) as buf:
            catcher.run(**batch)
        return buf

    return forward
