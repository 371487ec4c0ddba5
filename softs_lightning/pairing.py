"""Pairs: which student product meets which teacher product, through which projector, in which loss.

:class:`Pair` is what a user writes, :class:`BoundPair` what a fit trains and evaluates.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from softs_lightning.names import called
from softs_lightning.product import ProductSpec, describe
from softs_lightning.projectors import PROJECTORS, ProjectorFactory
from softs_lightning.schedules import Constant, Schedule, as_schedule
from softs_lightning.selectors import has_selector, resolve_spec

__all__ = ["BoundPair", "Loss", "Mask", "Pair"]

METRICS = ("agreement", "kl", "cosine", "cka")
"""What can be reported of a pair on validation batches, see :mod:`softs_lightning.metrics`."""

Loss = Callable[..., Tensor]
Mask = bool | str | Callable[[Any], Tensor | None]


class Resolves(Protocol):
    """Says what a product_id means in a model that may not be there."""

    def resolve(self, spec: ProductSpec) -> ProductSpec:
        """`spec` without selectors."""


class Pair:
    """A distillation term: a student product, a teacher product and the loss between them.

    Args:
        teacher: product_id of the teacher's activations, ``"outputs[encoder.layer.3]"``.
        student: product_id of the student's, named from the LightningModule. Both select the same
            number of activations, which meet in order (inputs first, then outputs); several sum up.
        loss: any ``loss(student, teacher) -> scalar``: an ``nn.Module`` such as ``nn.MSELoss()`` or a
            function. One that takes ``mask`` or ``batch`` gets them by keyword, one with a method
            ``bind(student, teacher)`` is shown both models before training. Both sides arrive in
            float32 at least, outside autocast.
        weight: multiplies the term: a number, or a function of the step or the epoch
            (:mod:`softs_lightning.schedules`). A schedule that gives 0 turns the term off for that step;
            the number 0 only reports it.
        projector: applied to the student's activation first: ``None``; a name of
            :mod:`softs_lightning.projectors`, such as ``"linear"``, or a function ``(student_shape,
            teacher_shape) -> module``, which make one for each pair of activations, their shapes
            found by a dry run; or a module, which is copied and serves all activations of the pair.
            It trains with the student and stays out of its checkpoints.
        name: what the term is logged as; by default the student's product_id without its brackets.
        mask: which tokens count, for losses that take a mask: ``True`` takes the batch's
            ``attention_mask`` where its shape is that of the activation but for the last dimension,
            a string another key, a function is given the batch, ``False`` masks nothing.
        schedules: attributes of the loss that follow a schedule, as in
            ``{"temperature": Linear(8, 1, over=1000)}``.
        metrics: what a callback with ``validate=True`` reports beside the term: any of
            ``"agreement"``, ``"kl"`` (for logits), ``"cosine"``, ``"cka"``. By default cosine and CKA
            where the shapes allow them, and for a loss with a temperature all four.
        over_ranks: for losses that average over the tokens of their mask: average over those of all
            ranks of this batch, so that ranks with fewer tokens do not count more. By default each
            rank's average counts alike, as it does for the user's own loss.
        over_window: likewise over the batches of an accumulation window: the gradient of the term is
            that of one big batch, however unlike the numbers of tokens are
            (:mod:`softs_lightning.windows`). The term that is logged has its weight in it, so that
            its average over the window is that over all tokens. With ``over_ranks`` over all tokens
            of all ranks.

    A loss may set ``same_shape = False`` to say that it compares activations of unlike shapes;
    otherwise a difference in shape is an error, never broadcast. One that sets ``together = True`` is
    given all activations of the pair at once, as a tuple a side (FSP, ReviewKD).

    Raises:
        ValueError: when a product_id is not understood or selects nothing, when the two select
            unlike numbers, or when the weight is not finite.
        TypeError: when loss, projector or mask are none of the above.

    >>> pair = Pair(teacher="outputs[h.3]", student="outputs[net.h.1]", loss=nn.MSELoss(), weight=0.5)
    >>> pair.name
    'net.h.1'
    """

    def __init__(
        self,
        teacher: str | ProductSpec,
        student: str | ProductSpec,
        loss: nn.Module | Loss,
        weight: float | Schedule = 1.0,
        projector: str | nn.Module | ProjectorFactory | None = None,
        name: str | None = None,
        mask: Mask = True,
        schedules: Mapping[str, float | Schedule] | None = None,
        metrics: Sequence[str] | None = None,
        over_ranks: bool = False,
        over_window: bool = False,
    ) -> None:
        self.teacher = ProductSpec.parse(teacher)
        self.student = ProductSpec.parse(student)
        self.loss = loss
        self.weight = weight
        self.projector = projector
        self.mask = mask
        if schedules is not None and not isinstance(schedules, Mapping):
            raise TypeError(
                f"schedules maps attributes of the loss to what they follow, as in {{'temperature': Linear(8, 1, "
                f"over=1000)}}, got {schedules!r}"
            )
        if metrics is not None and (isinstance(metrics, str) or not isinstance(metrics, Iterable)):
            raise TypeError(f"metrics must be a list of names, such as ['cosine'], got {metrics!r}")
        if name is not None and not isinstance(name, str):
            raise TypeError(f"a pair's name must be a string, got {name!r}")
        self.schedules = dict(schedules or {})
        self.over_ranks = over_ranks
        self.over_window = over_window
        self.metrics = None if metrics is None else list(metrics)
        self.name = name or "+".join(str(item) for _, item in self.student)
        self._validate()

    def _validate(self) -> None:
        for side, spec in (("teacher", self.teacher), ("student", self.student)):
            if not spec:
                raise ValueError(f"the {side}'s product_id of a pair selects nothing: write 'outputs[name]'")
        if not any(has_selector(spec) for spec in (self.teacher, self.student)):
            self._validate_count()  # what selectors mean is known when the models are
        if isinstance(self.loss, type) or not callable(self.loss):
            raise TypeError(
                f"pair {self.name!r}: loss must be callable as loss(student, teacher), got {self.loss!r}"
                + (", a class: make an instance of it" if isinstance(self.loss, type) else "")
            )
        as_schedule(self.weight, f"pair {self.name!r}: weight")
        for attribute, schedule in self.schedules.items():
            as_schedule(schedule, f"pair {self.name!r}: {attribute}")
            if not hasattr(self.loss, attribute):
                has = ", ".join(
                    sorted(
                        k for k, v in vars(self.loss).items() if isinstance(v, (int, float)) and k[0] != "_"
                    )
                )
                raise ValueError(
                    f"pair {self.name!r}: the loss {called(self.loss)} has no attribute {attribute!r} that could "
                    f"follow a schedule; it has {has or 'none'}"
                )
        self._validate_projector()
        self._validate_metrics()
        if not isinstance(self.mask, (bool, str)) and not callable(self.mask):
            raise TypeError(
                f"pair {self.name!r}: mask must be True, False, a key or a function, got {self.mask!r}"
            )
        if not isinstance(self.mask, bool) and "mask" not in _optional_arguments(self.loss):
            raise ValueError(
                f"pair {self.name!r}: mask={self.mask!r} was given, and the loss "
                f"{called(self.loss)} has no argument 'mask' that would get it: "
                "use one that has, such as those of softs_lightning.losses, or leave mask out"
            )
        self._validate_averages()

    def _validate_averages(self) -> None:
        for flag in ("over_ranks", "over_window"):
            if not isinstance(getattr(self, flag), bool):
                raise TypeError(
                    f"pair {self.name!r}: {flag} must be True or False, got {getattr(self, flag)!r}"
                )
        if self.over_window and (self.mask is False or "mask" not in _optional_arguments(self.loss)):
            raise ValueError(
                f"pair {self.name!r}: over_window=True counts the tokens of a mask before the student has run, so it is "
                "for losses that take mask=, and not for mask=False"
            )

    def _validate_metrics(self) -> None:
        for name in self.metrics or ():
            if name not in METRICS:
                raise ValueError(
                    f"pair {self.name!r}: there is no metric {name!r}; there are {', '.join(map(repr, METRICS))}"
                )
        if len(self.student) > 1 and "cka" in (self.metrics or ()):
            raise ValueError(
                f"pair {self.name!r}: 'cka' compares one activation with one: write a pair for each layer"
            )

    def _validate_count(self) -> None:
        if len(self.teacher) != len(self.student):
            raise ValueError(
                f"pair {self.name!r}: the teacher's {str(self.teacher)!r} selects {len(self.teacher)} activations, "
                f"the student's {str(self.student)!r} {len(self.student)}: they meet one to one, in order"
            )

    def resolve(self, student: nn.Module, teacher: nn.Module | Resolves) -> Pair:
        """This pair with what its selectors mean in two models; its name stays.

        Args:
            student: the student's module.
            teacher: the teacher's, or a :class:`softs_lightning.Teacher`.

        Raises:
            KeyError: for what selects nothing.
            ValueError: when the two product_ids select unlike numbers.

        >>> net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        >>> str(Pair("outputs[*]", "outputs[@Linear]", nn.MSELoss()).resolve(net, net).student)
        'outputs[0|1]'
        """
        resolved = copy.copy(self)
        asked = partial(resolve_spec, teacher) if isinstance(teacher, nn.Module) else teacher.resolve
        resolved.teacher = asked(self.teacher)
        resolved.student = resolve_spec(student, self.student)
        resolved._validate_count()
        resolved._validate_metrics()
        return resolved

    def _validate_projector(self) -> None:
        projector = self.projector
        names = ", ".join(map(repr, PROJECTORS))
        if isinstance(projector, str) and projector not in PROJECTORS:
            raise ValueError(f"pair {self.name!r}: there is no projector {projector!r}; there are {names}")
        if isinstance(projector, type) or not (
            projector is None or isinstance(projector, str) or callable(projector)
        ):
            raise TypeError(
                f"pair {self.name!r}: projector must be None, one of {names}, a torch.nn.Module, or a function of "
                f"both shapes that returns one, got {projector!r}"
                + (", a class: make an instance of it" if isinstance(projector, type) else "")
            )

    @property
    def needs_sizes(self) -> bool:
        """Whether activation sizes must be known before the projector can be made."""
        return self.projector is not None and not isinstance(self.projector, nn.Module)

    def __repr__(self) -> str:
        weight = f"{self.weight:g}" if isinstance(self.weight, (int, float)) else repr(self.weight)
        return f"Pair({self.name!r}: {self.student} → {self.teacher}, {called(self.loss)}, weight={weight})"


class BoundPair(nn.Module):
    """A pair with its projectors made: what a fit trains, beside the student.

    Args:
        pair: the pair; its projector and loss are copied if they are modules, so that every fit
            begins with what the user handed over.
        student: the sizes of the student's activations, needed where ``pair.needs_sizes`` only.
        teacher: the sizes of the teacher's.
    """

    def __init__(
        self,
        pair: Pair,
        student: Sequence[torch.Size] | None = None,
        teacher: Sequence[torch.Size] | None = None,
    ) -> None:
        super().__init__()
        self.pair = pair
        # A module loss becomes a child: what it trains is trained, what it buffers is moved.
        self.loss: Loss = copy.deepcopy(pair.loss)
        self._weight = as_schedule(pair.weight, f"pair {pair.name!r}: weight")
        self._settings = {
            name: as_schedule(schedule, f"pair {pair.name!r}: {name}")
            for name, schedule in pair.schedules.items()
        }
        self.same_shape = bool(getattr(pair.loss, "same_shape", True))
        self.together = bool(getattr(pair.loss, "together", False))
        self.wants = _optional_arguments(pair.loss)
        self.projectors = nn.ModuleList()
        if isinstance(pair.projector, nn.Module):
            self.projectors.append(copy.deepcopy(pair.projector))
        elif pair.projector is not None:
            if student is None or teacher is None:
                raise ValueError(f"pair {pair.name!r}: its projector needs the sizes of both sides")
            make = PROJECTORS[pair.projector] if isinstance(pair.projector, str) else pair.projector
            self.projectors.extend(_made(pair, make, s, t) for s, t in zip(student, teacher, strict=True))

    def set_to(self, step: int, epoch: int) -> float | None:
        """The weight of the term now, ``None`` when it is off; what else follows a schedule is set on the loss."""
        weight = self._weight(step, epoch)
        if weight == 0.0 and not isinstance(self._weight, Constant):
            return None
        for name, schedule in self._settings.items():
            setattr(self.loss, name, schedule(step, epoch))
        return weight

    def bind(self, student: nn.Module, teacher: nn.Module) -> None:
        """Show both models to a loss that asks for them with a ``bind`` method (a head's weights, say)."""
        bind = getattr(self.loss, "bind", None)
        if bind is not None:
            bind(student, teacher)

    def project(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The student's activations in the teacher's terms."""
        if not self.projectors:
            return list(values)
        shared = len(self.projectors) == 1
        return [self._projected(0 if shared else i, value) for i, value in enumerate(values)]

    def _projected(self, which: int, value: Tensor) -> Tensor:
        projector = self.projectors[which]
        try:
            projected: Tensor = projector(value)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise RuntimeError(
                f"pair {self.pair.name!r}: its projector {projector} does not take the student's activation of shape "
                f"{list(value.shape)}: {error}"
            ) from error
        return projected

    def forward(self, student: Sequence[Any], teacher: Sequence[Any], batch: Any) -> Tensor:
        """The unweighted term.

        Args:
            student: the student's activations, not projected yet.
            teacher: the teacher's, on the same device.
            batch: the training batch, for the mask and for losses that want it.

        Returns:
            a scalar in float32 at least, the sum over the pair's activations.
        """
        where = [f"{kind}[{item}]" for kind, item in self.pair.student]
        there = [f"{kind}[{item}]" for kind, item in self.pair.teacher]
        ours = self.project(
            [self._tensor(v, f"the student's {w}") for v, w in zip(student, where, strict=True)]
        )
        theirs = [self._tensor(v, f"the teacher's {w}") for v, w in zip(teacher, there, strict=True)]
        for i, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
            if self.same_shape and mine.shape != its.shape:
                raise ValueError(self._unlike(mine, its, where[i], there[i]))
        if self.together:
            return self._term(ours, theirs, batch)
        terms = [self._term([mine], [its], batch) for mine, its in zip(ours, theirs, strict=True)]
        return sum(terms[1:], start=terms[0])

    def _term(self, ours: Sequence[Tensor], theirs: Sequence[Tensor], batch: Any) -> Tensor:
        """The loss of one activation with one, or of all with all, in float32 at least."""
        device = ours[0].device
        dtype = reduce(torch.promote_types, (t.dtype for t in (*ours, *theirs)), torch.float32)
        with torch.autocast(device.type, enabled=False):
            mine, its = (tuple(t.to(device, dtype) for t in side) for side in (ours, theirs))
            extras = self._extras(ours[0], batch)
            term: Any = (
                self.loss(mine, its, **extras) if self.together else self.loss(mine[0], its[0], **extras)
            )
            if not isinstance(term, Tensor) or term.numel() != 1:
                raise TypeError(
                    f"pair {self.pair.name!r}: the loss returned {describe(term)}, not a scalar tensor"
                )
            if self.pair.over_ranks:
                term = term * _share_of_ranks(extras.get("mask"), ours[0])
        scalar: Tensor = term.reshape(())
        return scalar

    def _tensor(self, value: Any, what: str) -> Tensor:
        if isinstance(value, Tensor):
            return value
        if value is None:
            raise TypeError(
                f"pair {self.pair.name!r}: {what} is None. Attention weights are None under fused attention: build "
                "the model with attn_implementation='eager'"
            )
        raise TypeError(
            f"pair {self.pair.name!r}: {what} is {describe(value)}, not a tensor: pick one with '#', as in 'name#0'"
        )

    def _unlike(self, mine: Tensor, its: Tensor, where: str, there: str) -> str:
        after = " after the projector" if self.projectors else ""
        hint = "" if self.projectors else " (projector='linear' maps the last dimension)"
        return (
            f"pair {self.pair.name!r}: the student's {where} has shape {list(mine.shape)}{after}, the teacher's "
            f"{there} {list(its.shape)}. Add or change the projector{hint}, or use a loss that compares unlike shapes"
        )

    def _extras(self, value: Tensor, batch: Any) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if "batch" in self.wants:
            extras["batch"] = batch
        if "mask" in self.wants:
            extras["mask"] = self.mask(value, batch)
        return extras

    def mask(self, value: Tensor, batch: Any) -> Tensor | None:
        """Which entries of the student's activation `value` count: what the pair's ``mask`` finds in the batch."""
        choice = self.pair.mask
        if choice is False:
            return None
        if choice is True:
            mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
            fits = isinstance(mask, Tensor) and mask.shape == value.shape[:-1]
            if self.pair.over_window and not fits:
                raise ValueError(
                    f"pair {self.pair.name!r}: over_window=True counts the tokens of the batch's attention_mask, which "
                    f"does not fit the activation of shape {list(value.shape)}: give mask= a function of the batch"
                )
            return mask if fits else None
        return self._found_in(batch)

    def _found_in(self, batch: Any) -> Tensor | None:
        """The mask that a key or a function of the user finds."""
        choice = self.pair.mask
        if isinstance(choice, str):
            if not isinstance(batch, Mapping) or choice not in batch:
                raise KeyError(
                    f"pair {self.pair.name!r}: the batch, {describe(batch)}, has no mask {choice!r}"
                )
            mask = batch[choice]
        else:
            assert callable(choice)
            mask = choice(batch)
        if mask is not None and not isinstance(mask, Tensor):
            raise TypeError(f"pair {self.pair.name!r}: the mask is {describe(mask)}, not a tensor")
        return mask

    def count(self, batch: Any) -> Tensor:
        """How many entries count in `batch`, by its mask alone: before any model has run on it.

        Raises:
            ValueError: when there is no mask.
        """
        if self.pair.mask is True:
            mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
        else:
            mask = self._found_in(batch)
        if not isinstance(mask, Tensor):
            raise ValueError(
                f"pair {self.pair.name!r}: over_window=True counts the tokens of a mask, and the batch, "
                f"{describe(batch)}, has none: give mask=, a key of the batch or a function of it"
            )
        return (mask.detach() != 0).sum().double()


def _share_of_ranks(mask: Tensor | None, value: Tensor) -> Tensor | float:
    """This rank's tokens over the average of all ranks: what turns a mean of means into a mean over all."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1.0
    count = (
        value.new_tensor(value[..., 0].numel(), dtype=torch.float64)
        if mask is None
        else (mask != 0).sum().double()
    )
    everyone = count.clone()
    torch.distributed.all_reduce(everyone)
    return (count * torch.distributed.get_world_size() / everyone.clamp_min(1)).to(
        torch.promote_types(value.dtype, torch.float32)
    )


def _made(pair: Pair, make: ProjectorFactory, student: torch.Size, teacher: torch.Size) -> nn.Module:
    try:
        module = make(student, teacher)
    except ValueError as error:
        raise ValueError(f"pair {pair.name!r}: {error}") from error
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"pair {pair.name!r}: the projector's function returned {describe(module)}, not a module"
        )
    return module


def _optional_arguments(loss: Loss) -> frozenset[str]:
    call = loss.forward if isinstance(loss, nn.Module) else loss
    try:
        names = inspect.signature(call).parameters
    except (TypeError, ValueError):  # some builtins have no signature
        return frozenset()
    return frozenset(names) & {"mask", "batch"}
