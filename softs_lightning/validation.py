"""What a distillation reports on validation batches: each term, and how alike student and teacher are.

The teacher runs on each validation batch beside the student, whose own ``validation_step`` makes
the activations; nothing is added to any loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from softs_lightning.capture import Capture
from softs_lightning.metrics import FIDELITY, row_count
from softs_lightning.pairing import BoundPair
from softs_lightning.proof import selected
from softs_lightning.step import Distillation

__all__ = ["Validation"]


class Validation:
    """Metrics of one distillation over the validation batches of an epoch.

    Args:
        share: the distillation in training.
    """

    def __init__(self, share: Distillation) -> None:
        self.share = share
        self.metrics: dict[str, dict[str, Metric]] = {}
        self._open = ExitStack()
        self._products: tuple[Capture, Capture] | None = None

    def begin(self, trainer: Trainer, batch: Any) -> None:
        """Run the teacher, and capture the student's products until :meth:`end`."""
        self.close()
        wanted, watched = self.share.specs(self.share.pairs)
        # Not in inference mode: what a model caches in its first forward must serve in training too.
        with torch.inference_mode(False), trainer.precision_plugin.forward_context():
            theirs = self.share.teacher.supply(batch, wanted)
        ours = self._open.enter_context(self.share.catcher.for_product(watched, early_exit=False))
        self._products = theirs, ours

    def end(self, trainer: Trainer, batch: Any) -> None:
        """Add what the batch gave to the metrics."""
        products, self._products = self._products, None
        self.close()
        if products is None:
            return
        step, epoch = self.share.clock()
        for bound in self.share.pairs:
            bound.set_to(step, epoch)
            what = f"pair {bound.pair.name!r} in validation"
            theirs = selected(products[0], bound.pair.teacher, f"{what}, teacher", self.share.teacher.module)
            ours = selected(products[1], bound.pair.student, f"{what}, student", self.share.student)
            with torch.no_grad(), trainer.precision_plugin.forward_context():
                self._update(bound, ours, theirs, batch)

    def _update(self, bound: BoundPair, ours: list[Any], theirs: list[Any], batch: Any) -> None:
        term = bound(ours, theirs, batch)
        compared = list(zip(bound.project(ours), theirs, strict=True))
        metrics = self.metrics.get(bound.pair.name)
        if metrics is None:
            metrics = self.metrics[bound.pair.name] = _chosen(bound, compared, term.device)
        metrics["loss"].update(term, weight=float(len(theirs[0])))
        for student, teacher in compared:
            mask = bound.mask(student, batch)
            for name, metric in metrics.items():
                if name != "loss":
                    metric.update(student, teacher, mask)

    def report(self, pl_module: LightningModule) -> None:
        """Log ``<name>/val/<pair>`` and ``<name>/val/<pair>/<metric>``, and begin anew."""
        for pair, metrics in self.metrics.items():
            for name, metric in metrics.items():
                key = f"{self.share.name}/val/{pair}" + ("" if name == "loss" else f"/{name}")
                pl_module.log(key, metric.compute().float(), sync_dist=True)
                metric.reset()

    def close(self) -> None:
        """Stop capturing. Calling it again changes nothing."""
        self._open.close()


def _chosen(
    bound: BoundPair, compared: list[tuple[Tensor, Tensor]], device: torch.device
) -> dict[str, Metric]:
    """The metrics that suit a pair: those it names, or all that its shapes and its loss allow."""
    asked = bound.pair.metrics
    if asked is None:
        alike = all(s.shape == t.shape for s, t in compared)
        paired = len(compared) == 1 and row_count(compared[0][0]) == row_count(compared[0][1])
        suits: Mapping[str, bool] = {
            "agreement": alike and hasattr(bound.loss, "temperature"),
            "kl": alike and hasattr(bound.loss, "temperature"),
            "cosine": alike,
            "cka": paired,
        }
        asked = [name for name, fits in suits.items() if fits]
        left_out = [name for name, fits in suits.items() if not fits]
        if left_out:
            rank_zero_info(f"validation of pair {bound.pair.name!r}: {', '.join(left_out)} left out")
    metrics: dict[str, Metric] = {"loss": MeanMetric(), **{name: FIDELITY[name]() for name in asked}}
    return {name: metric.to(device) for name, metric in metrics.items()}
