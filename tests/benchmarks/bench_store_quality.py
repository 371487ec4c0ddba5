"""What each encoding of the product store costs in quality: two recipes, each judged by its own judge.

In `digits` students learn from the teacher's early scores of 10 classes at temperature 4, and are judged on images
that nobody trained on. In `sentence-embeddings` they learn from hidden states of two layers, and are judged by how
alike their similarities of held-out sentences are to the teacher's. A ratio is a student's score over that of the
same seed with the live teacher. ``python -m tests.benchmarks.bench_store_quality [RECIPE]`` runs this file alone.
"""

from __future__ import annotations

import logging
import math
import statistics
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
from hydra import compose, initialize_config_module

from softs_lightning.callback import DistillationCallback
from softs_lightning.config import build
from softs_lightning.store import ProductStore, StoredTeacher
from softs_lightning.teacher import Teacher
from tests.benchmarks import Row, table


@dataclass(frozen=True)
class Setting:
    """One recipe: what it is called in the table, its seeds, and the encodings that fit what it keeps."""

    what: str
    seeds: range
    encodings: tuple[str, ...]
    digits: int = 1


SETTINGS = {
    "digits": Setting(
        "digits with 50 labels, scores of 10 classes",
        range(5),
        ("exact", "bf16", "fp16", "int8", "top5-fp16", "top3-fp16", "top1-fp16"),
    ),
    "sentence-embeddings": Setting(
        "sentence-embeddings, hidden states of width 384", range(2), ("exact", "bf16", "fp16", "int8"), 4
    ),
}


def recipe(name: str, seed: int) -> Any:
    with initialize_config_module("softs_lightning.conf", version_base=None):
        return compose("distill", overrides=[f"recipe={name}", f"seed={seed}"])


def score(name: str, seed: int, teacher: Any) -> float:
    own = recipe(name, seed)
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
    data.setup("test")
    judge = build(own.judge.score, "judge.score")
    found = judge(student.eval(), data=data, teacher=callback.teacher.source.eval())
    return float(found[own.judge.name] if isinstance(found, dict) else found)


def account(scores: list[float], digits: int) -> str:
    return f"{statistics.fmean(scores):.{digits}f} ± {statistics.stdev(scores):.{digits}f}"


def rows(names: Iterable[str] = SETTINGS) -> Iterator[Row]:
    for logger in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    for name in names:
        yield from compared(name, SETTINGS[name])


def compared(name: str, setting: Setting) -> Iterator[Row]:
    made = build(recipe(name, 0).teacher, "teacher")
    given = made if isinstance(made, Teacher) else Teacher(made)
    module = given.build()
    live = [score(name, seed, module) for seed in setting.seeds]
    with tempfile.TemporaryDirectory() as folder:
        for encoding in setting.encodings:
            path = Path(folder) / encoding
            ours = [
                score(name, seed, StoredTeacher(module, path, encoding=encoding)) for seed in setting.seeds
            ]
            ratios = [a / b for a, b in zip(ours, live, strict=True)]
            sizes = f"{size_of(path)}: {account(ours, setting.digits)} / live {account(live, setting.digits)}"
            yield Row(
                setting.what, f"{encoding}: {sizes}", statistics.fmean(ratios), min(ratios), max(ratios)
            )


def size_of(path: Path) -> str:
    """Bytes a token (a sample, for what has no tokens) beside float32's, and the largest error."""
    columns = ProductStore(path).columns()
    rows = values = 0
    for column in columns:
        for id in column.ids():
            shape = column.row(id).shape
            rows += shape[0] if len(shape) > 1 else 1
            values += math.prod(shape)
    nbytes = sum(column.values_nbytes for column in columns)
    lost: dict[str, float] = {}
    for column in columns:
        lost.update({key: max(value, lost.get(key, value)) for key, value in column.error.items()})
    account = ", ".join(f"{key} {value:.2g}" for key, value in lost.items())
    return f"{nbytes / rows:,.0f} bytes a row of {4 * values / rows:,.0f} raw, {account}"


if __name__ == "__main__":
    for row in rows(sys.argv[1:] or SETTINGS):
        print(table([row]).splitlines()[-1], flush=True)
