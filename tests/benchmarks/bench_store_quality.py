"""What each encoding of the product store costs in quality: the digits recipe over five seeds.

Students learn from the teacher's early scores of 10 classes at temperature 4; the judge is the recipe's own, on
images that nobody trained on. A ratio is a student's accuracy over that of the same seed with the live teacher.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
from hydra import compose, initialize_config_module
from torch import nn

from softs_lightning.callback import DistillationCallback
from softs_lightning.config import build
from softs_lightning.store import ProductStore, StoredTeacher
from tests.benchmarks import Row

SEEDS = range(5)
ENCODINGS = ["exact", "bf16", "fp16", "int8", "top5-fp16", "top3-fp16", "top1-fp16"]
SETTING = "digits with 50 labels, scores of 10 classes"


def recipe(seed: int) -> Any:
    with initialize_config_module("softs_lightning.conf", version_base=None):
        return compose("distill", overrides=["recipe=digits", f"seed={seed}"])


def score(seed: int, teacher: Any) -> float:
    own = recipe(seed)
    L.seed_everything(seed, verbose=False)
    student, data = build(own.student, "student"), build(own.data, "data")
    callback = DistillationCallback(
        teacher, [build(pair, "pair") for pair in own.pairs], task_weight=own.callbacks.distill.task_weight
    )
    trainer = build(
        own.trainer,
        "trainer",
        callbacks=[callback],
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(student, datamodule=data)
    return float(
        build(own.judge.score, "judge.score")(student.eval(), data=data, teacher=callback.teacher.module)
    )


def account(scores: list[float]) -> str:
    return f"{statistics.fmean(scores):.1f} ± {statistics.stdev(scores):.1f} %"


def rows() -> Iterator[Row]:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    made = build(recipe(0).teacher, "teacher")
    module = made if isinstance(made, nn.Module) else made()
    live = [score(seed, module) for seed in SEEDS]
    with tempfile.TemporaryDirectory() as folder:
        for encoding in ENCODINGS:
            path = Path(folder) / encoding
            ours = [score(seed, StoredTeacher(module, path, encoding=encoding)) for seed in SEEDS]
            (column,) = ProductStore(path).columns()
            ratios = [a / b for a, b in zip(ours, live, strict=True)]
            lost = ", ".join(f"{key} {value:.2g}" for key, value in column.error.items())
            size = column.values_nbytes / len(column)
            yield Row(
                SETTING,
                f"{encoding}: {size:.0f} bytes a sample of 40, {lost}: {account(ours)} / live {account(live)}",
                statistics.fmean(ratios),
                min(ratios),
                max(ratios),
            )
