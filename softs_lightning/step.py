"""The training step of a student under distillation.

:class:`Distillation` is one teacher's share in a step. :class:`DistilledStep` stands in for the
student's ``training_step`` while a fit runs and holds the shares of all callbacks; the last to
leave puts back exactly what was there.

The order in a step: every teacher runs first, up to its last product, and drops what it does not
hand over; then the user's step runs with the student's products captured; then come the losses.
All of it happens inside the module call of the strategy and inside autocast, so gradients are
synchronised, the loss is scaled, and accumulation divides it, as for the user's own loss.

Where the user optimizes by hand, :class:`ManualDistillation` waits to be asked for its loss.
"""

from __future__ import annotations

import copy
import inspect
import math
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from softs_lightning.auxiliary import local
from softs_lightning.balancing import Balance
from softs_lightning.capture import Capture
from softs_lightning.catcher import ModelIOCatcher
from softs_lightning.gathering import Gathering
from softs_lightning.noticing import Noticing
from softs_lightning.pairing import BoundPair
from softs_lightning.product import ProductSpec
from softs_lightning.proof import prove_loss, prove_reached, prove_trainable, selected
from softs_lightning.teacher import Teacher

if TYPE_CHECKING:
    from softs_lightning.windows import Window

__all__ = ["Active", "Distillation", "DistilledStep", "ManualDistillation", "Products"]

Active = list[tuple[BoundPair, float]]
Clock = Callable[[], tuple[int, int]]


@dataclass
class Products:
    """What one forward of both models gave: the terms that are on with their weights, and both captures."""

    active: Active
    theirs: Capture
    ours: Capture


class Distillation:
    """One teacher's share in a training step.

    Args:
        name: prefix of what is logged.
        teacher: placed and frozen.
        student: the module whose training is distilled.
        pairs: with their projectors made.
        task_weight: multiplies the student's own loss.
        every_n_steps: distil in each n-th optimizer step only.
        clock: gives the optimizer steps and the epochs done.
        balance: factors for the terms, made for these pairs.
        window: what a batch weighs in its accumulation window, for pairs that are averaged over it.
        copy: capture copies of the student's activations.
        prog_bar: show the total in the progress bar.
    """

    def __init__(
        self,
        name: str,
        teacher: Teacher,
        student: nn.Module,
        pairs: Sequence[BoundPair],
        *,
        task_weight: float = 1.0,
        every_n_steps: int = 1,
        clock: Clock = lambda: (0, 0),
        balance: Balance | None = None,
        window: Window | None = None,
        copy: bool = False,
        prog_bar: bool = False,
    ) -> None:
        self.name = name
        self.prog_bar = prog_bar
        self.teacher = teacher
        self.student = student
        self.pairs = list(pairs)
        self.task_weight = task_weight
        self.every_n_steps = every_n_steps
        self.clock = clock
        self.balance = balance
        self.window = window
        self.catcher = ModelIOCatcher(student, copy=copy)
        self.gathering = Gathering(student)
        self._specs: dict[tuple[str, ...], tuple[ProductSpec, ProductSpec]] = {}
        self._proven: set[str] = set()
        self._step = 0
        self._numbers = Noticing()
        self._failed: set[str] = set()

    def active(self) -> Active:
        """The pairs that are on in this step, with their weights; their losses' settings are brought up to date."""
        step, epoch = self.clock()
        self._step = step
        if step % self.every_n_steps:
            return []
        weighted = [(bound, bound.set_to(step, epoch)) for bound in self.pairs]
        return [(bound, weight) for bound, weight in weighted if weight is not None]

    def specs(self, pairs: Sequence[BoundPair]) -> tuple[ProductSpec, ProductSpec]:
        """What the teacher and the student must give for `pairs`."""
        key = tuple(bound.pair.name for bound in pairs)
        if key not in self._specs:
            self._specs[key] = (
                ProductSpec.union(bound.pair.teacher for bound in pairs),
                ProductSpec.union(bound.pair.student for bound in pairs),
            )
        return self._specs[key]

    @contextmanager
    def watch(self, batch: Any) -> Iterator[Products | None]:
        """Run the teacher on `batch`, then capture the student's products inside the block."""
        active = self.active()
        if not active:
            yield None
            return
        if self.window is not None:
            self.window.begin(batch)
        wanted, watched = self.specs([bound for bound, _ in active])
        theirs = self.teacher.supply(batch, wanted)
        with self.catcher.for_product(watched, early_exit=False) as ours:
            yield Products(active, theirs, ours)

    def loss(self, products: Products | None, batch: Any, task: Tensor | None = None) -> Tensor | None:
        """The weighted sum of the terms that are on, each of which is logged; ``None`` for none.

        The first time a term is on, it is proven that it can train the student.

        Args:
            products: of one forward; ``None`` where no term is on.
            batch: for masks and losses that want it.
            task: the student's own loss, for balancing.
        """
        terms: dict[str, Tensor] = {}
        total: Tensor | None = None
        if products is not None:
            terms, activations = self._terms(products, batch)
            balanced: Mapping[str, Tensor] = dict(terms)
            if self.balance is not None:
                balanced = self.balance(terms, activations, task, self._step)
            for bound, weight in products.active:
                name = bound.pair.name
                weighted = weight * balanced[name]
                if bound.pair.over_window and self.window is not None:
                    share = self.window.factor(bound, batch)
                    weighted, terms[name] = weighted * share.to(weighted), terms[name] * share.to(weighted)
                total = weighted if total is None else total + weighted
            assert total is not None
            self._log({**terms, "total": total})
        return self._with_idle_parameters(total, terms)

    def _terms(self, products: Products, batch: Any) -> tuple[dict[str, Tensor], dict[str, list[Tensor]]]:
        terms: dict[str, Tensor] = {}
        activations: dict[str, list[Tensor]] = {}
        for bound, _ in products.active:
            name = bound.pair.name
            theirs = selected(
                products.theirs, bound.pair.teacher, f"pair {name!r}, teacher", self.teacher.module
            )
            ours = selected(products.ours, bound.pair.student, f"pair {name!r}, student", self.student)
            self.gathering.before_backward(bound.pair.student, ours)
            if name not in self._proven:
                prove_trainable(bound, ours, self.student)
            terms[name] = bound(ours, theirs, batch)
            if name not in self._proven:
                prove_loss(bound, terms[name])
                self._proven.add(name)
            activations[name] = ours
            self._numbers.put((name, self._step), terms[name])
        self.tell_failures()
        return terms, activations

    def tell_failures(self, *, epoch_ends: bool = False) -> None:
        """Warn of terms that are infinite or no number, each once an epoch, as soon as the device has said so."""
        # A warning only: under 16-bit precision the gradient scaler skips such steps.
        for (name, step), term in self._numbers.known(wait=epoch_ends):
            value = term.item()
            if not math.isfinite(value) and name not in self._failed:
                self._failed.add(name)
                warnings.warn(
                    f"distillation {self.name!r}: the loss of {name!r} is {value} in step {step}, and perhaps after it. "
                    f"EarlyStopping('{self.name}/{name}', check_on_train_epoch_end=True) would end such a training",
                    stacklevel=2,
                )
        if epoch_ends:
            self._failed.clear()

    def _with_idle_parameters(self, total: Tensor | None, terms: Mapping[str, Tensor]) -> Tensor | None:
        """DDP waits for the gradient of every parameter, also of a projector whose term is off: it gets zeros."""
        idle: list[nn.Module] = [bound for bound in self.pairs if bound.pair.name not in terms]
        if idle and not terms and self.balance is not None:
            idle.append(self.balance)
        for parameter in (p for module in idle for p in module.parameters() if p.requires_grad):
            nothing = (local(parameter) * 0).sum()
            total = nothing if total is None else total + nothing
        return total

    def _log(self, values: Mapping[str, Tensor]) -> None:
        log: Callable[..., None] | None = getattr(self.student, "log", None)
        if log is not None:
            for name, value in values.items():
                log(f"{self.name}/{name}", value.detach(), prog_bar=self.prog_bar and name == "total")

    def close(self) -> None:
        """Remove the hooks from the student."""
        self.catcher.detach_hooks()


class ManualDistillation(Distillation):
    """The share of a teacher where the user's step calls backward itself, and asks for the loss: :meth:`now`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.asked = False
        self._ours: Capture | None = None

    @contextmanager
    def watch(self, batch: Any) -> Iterator[Products | None]:
        """Capture the student's products inside the block; the teacher runs when the loss is asked for."""
        with self.catcher.for_product(self.specs(self.pairs)[1], early_exit=False) as ours:
            self._ours = ours
            try:
                yield None
            finally:
                self._ours = None

    def now(self, batch: Any) -> Tensor:
        """The loss on what the student did since the step began, or since the last call."""
        ours = self._ours
        if ours is None:
            raise RuntimeError("distillation_loss(batch) is for the training_step of the module in training")
        self.asked = True
        active = self.active()
        products = None
        if active:
            theirs = self.teacher.supply(batch, self.specs([bound for bound, _ in active])[0])
            products = Products(active, theirs, ours)
        total = self.loss(products, batch)
        for kinds in ours.values():
            for entries in kinds.values():
                entries.clear()
        return torch.zeros((), device=self.teacher.device) if total is None else total


class DistilledStep:
    """Stands in for ``student.training_step`` on the instance while distillations take part in it."""

    def __init__(self, student: nn.Module, inner: Callable[..., Any], own: Callable[..., Any] | None) -> None:
        self.student = student
        self.inner = inner
        self.own = own  # what stood in the instance's __dict__: nothing, or a compiled step
        self.shares: list[Distillation] = []
        self.needs_every_gradient = False  # prove it in the next step, once
        # Lightning reads the step's signature through one level of __wrapped__.
        self.__wrapped__ = inspect.unwrap(inner)
        self.__name__ = "training_step"
        self.__doc__ = self.__wrapped__.__doc__

    @classmethod
    def join(cls, student: nn.Module, share: Distillation, *, needs_every_gradient: bool = False) -> None:
        """Let `share` take part in the student's training step.

        Args:
            student: whose ``training_step`` is replaced on the instance.
            share: what to add to it.
            needs_every_gradient: prove in the next step that each trainable parameter gets a gradient.
        """
        own = student.__dict__.get("training_step")
        step = own if isinstance(own, cls) else cls(student, student.training_step, own)  # type: ignore[arg-type]
        step.shares.append(share)
        step.needs_every_gradient = needs_every_gradient
        student.__dict__["training_step"] = step

    @classmethod
    def leave(cls, student: nn.Module, share: Distillation) -> None:
        """Undo :meth:`join`, in any order. The last to leave puts back what was there."""
        step = student.__dict__.get("training_step")
        if not isinstance(step, cls) or share not in step.shares:
            return
        step.shares.remove(share)
        if step.shares:
            return
        if step.own is None:
            del student.__dict__["training_step"]
        else:
            student.__dict__["training_step"] = step.own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _in_training(self.student):
            return self.inner(*args, **kwargs)  # a validation_step that calls training_step
        batch = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(batch, Mapping):
            batch = copy.copy(batch)  # the user's step may pop from it, and losses come after it
        with ExitStack() as stack:
            products = [stack.enter_context(share.watch(batch)) for share in self.shares]
            output = self.inner(*args, **kwargs)
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor) or any(
            isinstance(share, ManualDistillation) for share in self.shares
        ):
            return output  # None skips the step; what is no loss at all is Lightning's to refuse
        total = loss
        for share in self.shares:
            if share.task_weight != 1.0:
                total = total * share.task_weight
        for share, caught in zip(self.shares, products, strict=True):
            added = share.loss(caught, batch, loss)
            if added is not None:
                total = total + added.to(loss.device)
        if self.needs_every_gradient:
            self.needs_every_gradient = False
            prove_reached(self.student, total)
        return {**output, "loss": total} if isinstance(output, Mapping) else total

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the student made during the fit gets its own plain step, not this one.
        return types.MethodType(_plain_step(self.student), memo.get(id(self.student), self.student))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.student, "training_step")


def _in_training(student: nn.Module) -> bool:
    trainer = getattr(student, "_trainer", None)
    return trainer is None or bool(trainer.training)


def _plain_step(student: nn.Module) -> Callable[..., Any]:
    step: Callable[..., Any] = getattr(type(student), "training_step")  # noqa: B009
    return step
