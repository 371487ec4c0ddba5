"""The teacher's part before the exit compiled as one graph, over the eager forward that exits there."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import torch

from softs_lightning.catcher import ModelIOCatcher
from softs_lightning.compiled import CompiledPrefix
from softs_lightning.product import ProductSpec
from tests.benchmarks import Row, compare
from tests.models import CASES

SETTINGS = {
    "BERT-shaped, 12 × 64, 2 × 16 tokens": ("bert", 64, {"rows": 2, "length": 16}, 0.60),
    "Llama-shaped, 12 × 64, 2 × 16 tokens": ("llama", 64, {"rows": 2, "length": 16}, 0.60),
    "BERT-shaped, 12 × 64, 8 × 48 tokens": ("bert", 64, {"rows": 8, "length": 48}, None),
}


def rows() -> Iterator[Row]:
    warnings.filterwarnings("ignore", category=DeprecationWarning)  # torch's own, on importing its compiler
    for setting, (name, width, size, limit) in SETTINGS.items():
        case = CASES[name]
        model, batch = case.build(width, 12).requires_grad_(False), case.batch(**size)
        spec = ProductSpec.parse(f"outputs[{case.layer.format(5)}]")
        catcher = ModelIOCatcher(case.build(width, 12).requires_grad_(False))
        prefix = CompiledPrefix(model, spec)

        def eager(catcher: ModelIOCatcher = catcher, spec: ProductSpec = spec, batch: dict = batch) -> None:  # type: ignore[type-arg]
            with catcher.for_product(spec):
                catcher.run(**batch)

        def compiled(prefix: CompiledPrefix = prefix, batch: dict = batch) -> None:  # type: ignore[type-arg]
            prefix(**batch)

        cut = torch.compile(case.cut(case.build(width, 12).requires_grad_(False), 6), fullgraph=True)

        def ends_there(cut: Any = cut, batch: dict = batch) -> None:  # type: ignore[type-arg]
            cut(**batch)

        with torch.no_grad():
            yield compare(
                setting, "compiled prefix / eager exit at layer 6 of 12", compiled, eager, limit=limit
            )
            what = "compiled prefix / a model of 6 layers, compiled without hooks"
            yield compare(setting, what, compiled, ends_there)
