"""A distilled step through the callback over the same maths written into the user's own training_step.

Both run inside Lightning, log the same values, and train a projector on a hidden layer and the
last layer; the hand-written one has a teacher cut off by hand behind the last layer it needs, and
a forward written out to return the hidden states.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from softs_lightning import DistillationCallback, Pair
from tests.benchmarks import Row, compare


class Block(nn.Module):
    """A pre-norm transformer layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        out: Tensor = x + self.mlp(x)
        return out


class Net(nn.Module):
    """Layers and a head."""

    def __init__(self, make: Callable[[], nn.Module], depth: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(depth))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        out: Tensor = self.head(x)
        return out


class Plain(L.LightningModule):
    """The user's module."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]).flatten(0, -2), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Written(Plain):
    """The distillation written into the user's module."""

    def __init__(self, net: Any, teacher: Any, at: int, teacher_at: int, projector: nn.Module) -> None:
        super().__init__(net)
        self.at = at
        self.projector = projector
        self.teacher = [
            copy.deepcopy(layer).eval().requires_grad_(False) for layer in teacher.layers[: teacher_at + 1]
        ]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            target = x
            for layer in self.teacher:
                target = layer(target)
        net: Any = self.net
        for i, layer in enumerate(net.layers):
            x = layer(x)
            if i == self.at:
                hidden = x
        task = F.cross_entropy(net.head(x).flatten(0, -2), y)
        term = F.mse_loss(self.projector(hidden), target)
        self.log("distill/hidden", term)
        total = 0.5 * term
        self.log("distill/total", total)
        return task + total


class Endless(IterableDataset[Any]):
    """Gives the same batch, one for each permission, and says when the step on it is over."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.over = False

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.done.release()
            self.go.acquire()
            if self.over:
                return
            yield self.batch


class Steps:
    """A fit on a thread of its own that takes one step at each call."""

    def __init__(self, module: L.LightningModule, batch: Any, *callbacks: L.Callback, **options: Any) -> None:
        self.data = Endless(batch)
        self.error: BaseException | None = None
        trainer = L.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=list(callbacks),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        self.thread = threading.Thread(target=self._fit, args=(trainer, module), daemon=True)
        self.thread.start()
        for _ in range(4):  # the data fetcher is ahead by a batch; the first step proves the pairs
            self()

    def _fit(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        torch.set_num_threads(1)
        try:
            trainer.fit(module, DataLoader(self.data, batch_size=None))
        except BaseException as error:
            self.error = error
            self.data.done.release()

    def __call__(self) -> None:
        self.data.done.acquire()
        if self.error is not None:
            raise self.error
        self.data.go.release()
        self.data.done.acquire()
        self.data.done.release()

    def end(self) -> None:
        """Let the fit finish."""
        self.data.over = True
        self.data.go.release()
        self.thread.join()


SETTINGS: dict[str, tuple[Callable[[int], Callable[[], nn.Module]], int, int, int, tuple[int, ...]]] = {
    # layers, student and teacher width, depth, input
    "MLP, 12 × 256 from 12 × 384, 256 rows": (
        lambda w: lambda: nn.Sequential(nn.Linear(w, w), nn.Tanh()),
        256,
        384,
        12,
        (256,),
    ),
    "transformer, 4 × 128 from 4 × 192, 4 × 32 tokens": (lambda w: lambda: Block(w), 128, 192, 4, (4, 32)),
    "transformer, 4 × 192 from 4 × 256, 8 × 64 tokens": (lambda w: lambda: Block(w), 192, 256, 4, (8, 64)),
}


def rows() -> Iterator[Row]:
    for setting, (make, width, wide, depth, size) in SETTINGS.items():
        torch.manual_seed(0)
        student = Net(make(width), depth, width)
        student.layers.insert(0, nn.Linear(wide, width))  # both read the same input
        teacher = Net(make(wide), depth, wide)
        at, teacher_at = depth // 2, depth // 2 - 1
        batch = torch.randn(*size, wide), torch.randint(10, (torch.Size(size).numel(),))
        projector = nn.Linear(width, wide)
        pair = Pair(
            f"outputs[layers.{teacher_at}]",
            f"outputs[net.layers.{at}]",
            nn.MSELoss(),
            0.5,
            projector,
            "hidden",
        )
        callback = DistillationCallback(copy.deepcopy(teacher), [pair], teacher_inputs=lambda batch: batch[0])
        with_callback = Steps(Plain(copy.deepcopy(student)), batch, callback)
        by_hand = Steps(
            Written(copy.deepcopy(student), teacher, at, teacher_at, copy.deepcopy(projector)), batch
        )
        yield compare(setting, "through the callback / written by hand", with_callback, by_hand, limit=1.05)
        with_callback.end()
        by_hand.end()
