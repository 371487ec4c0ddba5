"""A teacher that is trained on first use and kept."""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, cast

import lightning as L
import torch
from hydra.utils import get_class

from softs_lightning.config import Refusal, build

__all__ = ["TrainedTeacher", "cache_folder", "leaving_untrained"]

log = logging.getLogger(__name__)

Node = Mapping[str, Any]

_untrained: ContextVar[bool] = ContextVar("untrained", default=False)


@contextmanager
def leaving_untrained() -> Iterator[None]:
    """Inside, a :class:`TrainedTeacher` trains and reads nothing: what is cut from it is looked at only.

    >>> module = {"_target_": "lightning.pytorch.demos.boring_classes.BoringModel"}
    >>> with leaving_untrained():
    ...     TrainedTeacher(module, data={}, trainer={})().layer
    Linear(in_features=32, out_features=2, bias=True)
    """
    before = _untrained.set(True)
    try:
        yield
    finally:
        _untrained.reset(before)


def cache_folder() -> Path:
    """Where trained teachers are kept: `$SOFTS_LIGHTNING_CACHE`, or a folder in the user's own cache."""
    if chosen := os.environ.get("SOFTS_LIGHTNING_CACHE"):
        return Path(chosen)
    home = Path.home()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    return base / "softs_lightning"


class TrainedTeacher:
    """Makes the teacher of a recipe: trained the first time it is wanted, read from the cache from then on.

    An instance is a factory, so a `DistillationCallback` takes it as its teacher. What decides whether a
    kept teacher is the right one: the three configs, the seed, the source of the module's class and the
    data's own `fingerprint()`.

    Args:
        module: config of the LightningModule to train.
        data: config of a LightningDataModule with a method `fingerprint() -> str`, a hash of its contents.
        trainer: config of the `lightning.Trainer` that trains it.
        seed: seeds the training.
        cache_dir: where to keep it; `None`: see `cache_folder`.

    >>> module = {"_target_": "lightning.pytorch.demos.boring_classes.BoringModel"}
    >>> TrainedTeacher(module, data={}, trainer={}).untrained().layer
    Linear(in_features=32, out_features=2, bias=True)
    """

    def __init__(
        self, module: Node, data: Node, trainer: Node, *, seed: int = 0, cache_dir: str | None = None
    ) -> None:
        self.module, self.data, self.trainer, self.seed = module, data, trainer, seed
        self.folder = cache_folder() if cache_dir is None else Path(cache_dir).expanduser()

    def untrained(self) -> L.LightningModule:
        """The same architecture with random weights: enough to look at names, shapes and costs."""
        return cast(L.LightningModule, build(self.module, "teacher.module"))

    def __call__(self) -> L.LightningModule:
        """The trained teacher; inside :func:`leaving_untrained` one with random weights."""
        if _untrained.get():
            with torch.random.fork_rng(devices=()):
                return self.untrained().eval()
        # Whether the teacher was there or not must not show in what is drawn after it.
        with torch.random.fork_rng(devices=()):
            data = build(self.data, "teacher.data")
            file = self.folder / f"{self._key(data)}.pt"
            with _first_process_first():
                if not file.exists():
                    self._train(data, file)
            teacher = self.untrained()
        try:
            teacher.load_state_dict(torch.load(file, map_location="cpu", weights_only=True))
        except Exception as error:
            raise Refusal(
                f"The teacher kept in {file} cannot be read ({error}). Delete it to train anew."
            ) from error
        return teacher.eval()

    def _key(self, data: Any) -> str:
        if not callable(getattr(data, "fingerprint", None)):
            raise TypeError(
                f"{type(data).__name__} needs a method fingerprint() -> str, a hash of the data it holds; "
                "without one a teacher trained on other data could be taken for the right one."
            )
        target = get_class(self.module["_target_"])
        parts = {
            "module": _plain(self.module),
            "source": inspect.getsource(inspect.getmodule(target) or target),
            "data": _plain(self.data),
            "contents": data.fingerprint(),
            "trainer": {
                name: value for name, value in _plain(self.trainer).items() if "progress_bar" not in name
            },
            "seed": self.seed,
        }
        digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return f"{target.__name__}-{digest[:16]}"

    def _train(self, data: L.LightningDataModule, file: Path) -> None:
        try:  # before the work, not after it
            file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refusal(
                f"The teacher cannot be kept in {file.parent} ({error}). Set teacher.cache_dir or "
                "SOFTS_LIGHTNING_CACHE to a folder that can be written."
            ) from error
        log.info("Training the teacher, once: it will be kept in %s", file)
        torch.manual_seed(self.seed)
        teacher = self.untrained()
        trainer: L.Trainer = build(
            self.trainer,
            "teacher.trainer",
            logger=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        trainer.fit(teacher, data)
        if not trainer.state.finished:
            raise RuntimeError("the teacher's training was stopped, so it was not kept")
        # Written beside its place and then renamed: nobody ever reads half a teacher.
        handle, beside = tempfile.mkstemp(dir=file.parent, prefix=file.stem, suffix=".part")
        try:
            with os.fdopen(handle, "wb") as part:
                torch.save(teacher.state_dict(), part)
            os.replace(beside, file)
        except BaseException:
            Path(beside).unlink(missing_ok=True)
            raise


@contextmanager
def _first_process_first() -> Iterator[None]:
    """Of several processes, the first goes through alone; the others follow and find what it made."""
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    first = not several or torch.distributed.get_rank() == 0
    if not first:
        torch.distributed.barrier()
    yield
    if several and first:
        torch.distributed.barrier()


def _plain(node: Node) -> dict[str, Any]:
    from omegaconf import OmegaConf

    return cast(
        dict[str, Any],
        OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else dict(node),
    )
