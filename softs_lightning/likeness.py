"""How alike trained students and their teacher are on held-out samples, layer by layer and at the output.

The similarity is linear CKA of a few hundred samples (Kornblith et al. 2019, arXiv:1905.00414), through
their Gram matrices, so that layers of any width can be compared. What cannot be measured (a student whose
forward cannot be called with a batch, data without a held-out part) is noted with the reason: a run that has
trained for hours does not end because of its pictures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch.nn import functional as F

from softs_lightning.catcher import ModelIOCatcher
from softs_lightning.metrics import FIDELITY
from softs_lightning.report import LayerMap, Similarity
from softs_lightning.teacher import arguments, flop_counter
from softs_lightning.transfer import iter_tensors, transfer_to_device

__all__ = ["Likeness", "gram", "layers", "linear_cka"]

SAMPLES = 256
MOST_LAYERS = 32
MOST_FEATURES = 16_384  # of one sample in one layer
MOST_OUTPUTS = 2**26  # numbers: a language model's scores are large
IDLE = (nn.Flatten, nn.Unflatten, nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class Likeness:
    """Compares one student after the other with a teacher.

    Args:
        teacher: in eval mode.
        data: after a fit; its validation samples are used, or its test samples where it has no others.
        seed: of the students.
        inputs: what of a batch the teacher is called with, as in :class:`softs_lightning.Teacher`.
        logits: whether outputs are the scores of classes, so that top classes and KL mean something.
        samples: how many are used at most.
    """

    def __init__(
        self,
        teacher: nn.Module,
        data: L.LightningDataModule,
        *,
        seed: int = 0,
        inputs: Callable[[Any], Any] | None = None,
        logits: bool = False,
        samples: int = SAMPLES,
    ) -> None:
        self.logits = logits
        self.flops: int | None = None
        self._batches: list[Any] = []
        self._teacher: _Seen | None = None
        self.found = Similarity(0, "", seed, ())
        with isolate_rng(include_cuda=False):
            try:
                part, self._batches, count = _held_out(data, samples)
                self._teacher = _look(teacher, self._batches, count, inputs)
            except Exception as error:
                self._note("layers and outputs", error)
            else:
                self.flops = self._teacher.flops
                names = tuple(self._teacher.grams)
                self.found = replace(self.found, samples=count, part=part, teacher=names)
                self._note_if_blind("the teacher's layers", self._teacher)

    def add(self, arm: str, student: nn.Module) -> int | None:
        """Compare a student; the operations of its forward for one sample are returned, if they can be counted."""
        if self._teacher is None:
            return None
        with isolate_rng(include_cuda=False):
            try:
                seen = _look(student.eval(), self._batches, self.found.samples)
                agreement = self._agreement(seen)
            except Exception as error:
                self._note(f"student {arm}", error)
                return None
        self._note_if_blind(f"the layers of student {arm}", seen)
        cka = tuple(
            tuple(linear_cka(theirs, ours) for ours in seen.grams.values())
            for theirs in self._teacher.grams.values()
        )
        self.found = replace(
            self.found,
            students={**self.found.students, arm: LayerMap(tuple(seen.grams), cka)},
            agreement={**self.found.agreement, arm: agreement},
        )
        return seen.flops

    def _note_if_blind(self, what: str, seen: _Seen) -> None:
        if not seen.grams:
            said = "none of them gave a tensor with a row for each sample, or they ran in compiled code"
            self.found = replace(self.found, missing={**self.found.missing, what: said})

    def _note(self, what: str, error: Exception) -> None:
        said = f"{error}" if isinstance(error, _NothingHeldOutError) else f"{type(error).__name__}: {error}"
        self.found = replace(self.found, missing={**self.found.missing, what: said})

    def _agreement(self, seen: _Seen) -> dict[str, float]:
        assert self._teacher is not None
        compared = list(zip(seen.outputs, self._teacher.outputs, seen.masks, strict=True))
        if any(s is None or t is None or s.shape != t.shape or s.dim() < 2 for s, t, _ in compared):
            return {}
        logits = self.logits or (seen.logits and self._teacher.logits)
        metrics = {name: FIDELITY[name]() for name in (("agreement", "kl") if logits else ()) + ("cosine",)}
        for student, teacher, mask in compared:
            for metric in metrics.values():
                metric.update(student, teacher, mask)
        return {name: float(metric.compute()) for name, metric in metrics.items()}


class _NothingHeldOutError(Exception):
    """The data have neither validation nor test samples."""


def _held_out(data: L.LightningDataModule, samples: int) -> tuple[str, list[Any], int]:
    for part, method in (("validation", "val_dataloader"), ("test", "test_dataloader")):
        if not is_overridden(method, data, L.LightningDataModule):
            continue
        batches, count = [], 0
        for batch, _, _ in CombinedLoader(getattr(data, method)(), mode="sequential"):
            batches.append(batch)
            count += _size(batch)
            if count >= samples:
                break
        if count > 1:
            return part, batches, min(count, samples)
    raise _NothingHeldOutError(f"{type(data).__name__} gives neither validation nor test samples")


def _size(batch: Any) -> int:
    """How many samples a batch holds."""
    return next((len(tensor) for tensor in iter_tensors(batch) if tensor.dim()), 0)


def layers(model: nn.Module) -> list[str]:
    """The names of a model's layers: the blocks of its repeated families, and what stands beside them.

    What has a family of blocks inside is opened (a ``ModuleList`` of blocks, a ``Sequential`` of several
    blocks of one class), and so is a ``Sequential`` that is no block itself; a block stays whole.

    >>> block = lambda: nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> layers(nn.Sequential(nn.Sequential(block(), block()), nn.Flatten(), nn.Linear(2, 2)))
    ['0.0', '0.1', '2']
    """
    return list(_opened(model, "", False))


def _opened(module: nn.Module, prefix: str, in_family: bool) -> Iterator[str]:
    family = _is_family(module)
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        opens = _has_family(child) or (
            isinstance(child, nn.Sequential) and not family and not in_family and len(child) > 0
        )
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)) or opens:
            yield from _opened(child, f"{path}.", in_family or family)
        elif not isinstance(child, IDLE):
            yield path


def _is_family(module: nn.Module) -> bool:
    blocks = [type(child) for child in module.children() if any(True for _ in child.children())]
    if isinstance(module, nn.ModuleList):
        return bool(blocks)
    return isinstance(module, nn.Sequential) and len(blocks) > len(set(blocks))


def _has_family(module: nn.Module) -> bool:
    return any(_is_family(inner) for inner in module.modules())


def gram(features: Tensor) -> Tensor:
    """The centred Gram matrix of ``[samples, features]``, in double precision."""
    features = features.double()
    features = features - features.mean(0)
    return features @ features.T


def linear_cka(one: Tensor, other: Tensor) -> float:
    """Linear CKA of two centred Gram matrices; not a number where one of them is zero.

    >>> x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    >>> round(linear_cka(gram(x), gram(2 * x.flip(1) + 1)), 6)
    1.0
    """
    return float((one * other).sum() / (one.norm() * other.norm()))


@dataclass
class _Seen:
    """What a model made of the batches."""

    grams: dict[str, Tensor]
    outputs: list[Tensor | None]
    masks: list[Tensor | None]
    logits: bool
    flops: int | None
    room: int = MOST_OUTPUTS

    def keep(self, value: Tensor | None, mask: Tensor | None) -> None:
        """Hold on to an output, or to as many samples of it as there is room for."""
        if value is not None and value.dim():
            count = min(len(value), self.room // max(1, value[:1].numel()))
            self.room -= value[:count].numel()
            value, mask = value[:count].float().cpu(), None if mask is None else mask[:count].cpu()
        self.outputs.append(value)
        self.masks.append(mask)


def _look(
    model: nn.Module, batches: list[Any], count: int, inputs: Callable[[Any], Any] | None = None
) -> _Seen:
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    chosen = _thinned(layers(model))
    seen = _Seen({}, [], [], False, None)
    parts: list[dict[str, Tensor]] = []
    catcher = ModelIOCatcher(model, copy=True)
    with ExitStack() as stack:
        stack.callback(catcher.detach_hooks)
        stack.enter_context(torch.no_grad())
        for number, batch in enumerate(batches):
            batch = transfer_to_device(batch, device)
            buffer: Mapping[str, Any] = {}
            with ExitStack() as step:
                counter = step.enter_context(flop_counter()) if number == 0 else None
                if chosen:
                    product = f"outputs[{'|'.join(chosen)}]"
                    buffer = step.enter_context(catcher.for_product(product, early_exit=False))
                output = _called(model, batch, inputs)
            if counter is not None:
                seen.flops = round(counter.get_total_flops() / max(_size(batch), 1)) or None
            mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
            parts.append(dict(_features(buffer, _size(batch), mask)))
            value = _output(output)
            seen.logits = seen.logits or getattr(output, "logits", None) is not None
            fits = isinstance(mask, Tensor) and value is not None and mask.shape == value.shape[:-1]
            seen.keep(value, mask if fits else None)
    for name in parts[0]:
        pieces = [part[name] for part in parts if name in part]
        if len(pieces) == len(parts) and len({piece.shape[1] for piece in pieces}) == 1:
            seen.grams[name] = gram(torch.cat(pieces)[:count])
    return seen


def _thinned(names: list[str]) -> list[str]:
    """At most :data:`MOST_LAYERS` of the names, evenly chosen, the first and the last among them."""
    if len(names) <= MOST_LAYERS:
        return names
    return [names[round(i * (len(names) - 1) / (MOST_LAYERS - 1))] for i in range(MOST_LAYERS)]


def _called(model: nn.Module, batch: Any, inputs: Callable[[Any], Any] | None) -> Any:
    """The model's own output for a batch; a module without a forward does its validation step."""
    if isinstance(model, L.LightningModule) and not is_overridden("forward", model, L.LightningModule):
        return _validated(model, batch)
    args, kwargs = arguments(model, batch, inputs)
    return model(*args, **kwargs)


def _validated(model: L.LightningModule, batch: Any) -> None:
    if not is_overridden("validation_step", model, L.LightningModule):
        raise TypeError(f"{type(model).__name__} has neither a forward nor a validation_step")

    def ignore(*args: Any, **kwargs: Any) -> None:
        """No loop is running that could log."""

    with ExitStack() as stack:
        for name in ("log", "log_dict"):
            model.__dict__[name] = ignore
            stack.callback(model.__dict__.pop, name)
        model.validation_step(batch, 0)


def _features(buffer: Mapping[str, Any], size: int, mask: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """Layer → ``[samples, features]``, in the order in which the layers were asked for."""
    for name, kinds in buffer.items():
        calls = kinds["outputs"]
        for number, value in enumerate(calls):
            tensor = next((t for t in iter_tensors(value) if t.is_floating_point() and t.dim() > 1), None)
            if tensor is not None and len(tensor) == size:
                label = name if len(calls) == 1 else f"{name}!{number}"
                yield label, _by_sample(tensor, mask).float().cpu()


def _by_sample(value: Tensor, mask: Tensor | None) -> Tensor:
    """One row of features for each sample: the mean over the tokens that count, or everything in one row."""
    if value.dim() == 3 and isinstance(mask, Tensor) and mask.shape == value.shape[:2]:
        kept = mask.unsqueeze(-1).to(value.dtype)
        return (value * kept).sum(1) / kept.sum(1).clamp(min=1)
    if value[0].numel() > MOST_FEATURES and value.dim() > 2:
        if value.dim() == 4:  # a large map keeps its channels, in fewer places
            side = max(1, int((MOST_FEATURES / value.shape[1]) ** 0.5))
            return F.adaptive_avg_pool2d(value, side).flatten(1)
        return value.flatten(1, -2).mean(1)
    return value.flatten(1)


def _output(output: Any) -> Tensor | None:
    """The tensor that a model's output is, or that stands first in it."""
    named = getattr(output, "logits", None)
    if isinstance(named, Tensor):
        return named
    return next(islice((t for t in iter_tensors(output) if t.is_floating_point()), 1), None)
