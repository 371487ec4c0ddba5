"""The training step of a student under distillation.

:class:`Distillation` is one teacher's share in a step. :class:`DistilledStep` stands in for the
student's ``training_step`` while a fit runs and holds the shares of all callbacks; the last to
leave puts back exactly what was there.

The order in a step: every teacher runs first, up to its last product, and drops what it does not
hand over; then the user's step runs with the student's products captured; then come the losses.
All of it happens inside the module call of the strategy and inside autocast, so gradients are
synchronised, the loss is scaled, and accumulation divides it, as for the user's own loss.
"""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from softs_lightning.catcher import Capture, ModelIOCatcher
from softs_lightning.pairing import BoundPair
from softs_lightning.product import ProductSpec
from softs_lightning.teacher import Teacher

__all__ = ["Distillation", "DistilledStep"]

Products = tuple[Capture, Capture]


class Distillation:
    """One teacher's share in a training step.

    Args:
        name: prefix of what is logged.
        teacher: placed and frozen.
        student: the module whose training is distilled.
        pairs: with their projectors made.
        task_weight: multiplies the student's own loss.
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
        copy: bool = False,
        prog_bar: bool = False,
    ) -> None:
        self.name = name
        self.prog_bar = prog_bar
        self.teacher = teacher
        self.student = student
        self.pairs = list(pairs)
        self.task_weight = task_weight
        self.wanted = ProductSpec.union(bound.pair.teacher for bound in self.pairs)
        self.watched = ProductSpec.union(bound.pair.student for bound in self.pairs)
        self.catcher = ModelIOCatcher(student, copy=copy)
        self.proven = False

    @contextmanager
    def watch(self, batch: Any) -> Iterator[Products]:
        """Run the teacher on `batch`, then capture the student's products inside the block."""
        supplied = self.teacher.supply(batch, self.wanted)
        with self.catcher.for_product(self.watched, early_exit=False) as captured:
            yield supplied, captured

    def terms(self, products: Products, batch: Any) -> dict[str, Tensor]:
        """The unweighted terms by name. The first call proves that each of them can train the student."""
        supplied, captured = products
        terms: dict[str, Tensor] = {}
        for bound in self.pairs:
            theirs = _select(
                supplied, bound.pair.teacher, f"pair {bound.pair.name!r}, teacher", self.teacher.module
            )
            ours = _select(captured, bound.pair.student, f"pair {bound.pair.name!r}, student", self.student)
            if not self.proven:
                self._prove_trainable(bound, ours)
            term = bound(ours, theirs, batch)
            if not self.proven:
                _prove_loss(bound, term)
            terms[bound.pair.name] = term
        self.proven = True
        return terms

    def total(self, terms: Mapping[str, Tensor]) -> Tensor:
        """The weighted sum of the terms: what is added to the student's own loss."""
        weighted = [bound.pair.weight * terms[bound.pair.name] for bound in self.pairs]
        return sum(weighted[1:], start=weighted[0])

    def log(self, values: Mapping[str, Tensor]) -> None:
        """Log values under this share's name through the LightningModule."""
        log: Callable[..., None] | None = getattr(self.student, "log", None)
        if log is not None:
            for name, value in values.items():
                log(f"{self.name}/{name}", value.detach(), prog_bar=self.prog_bar and name == "total")

    def close(self) -> None:
        """Remove the hooks from the student."""
        self.catcher.detach_hooks()

    def _prove_trainable(self, bound: BoundPair, values: Sequence[Any]) -> None:
        own = {id(p) for p in bound.parameters()}
        trained = {id(p) for p in self.student.parameters() if p.requires_grad} - own
        for (kind, item), value in zip(bound.pair.student, values, strict=True):
            if not isinstance(value, Tensor):
                continue  # the pair itself says what is wrong with it
            what = f"pair {bound.pair.name!r}: the student's {kind}[{item}]"
            if not value.requires_grad:
                raise RuntimeError(
                    f"{what} has no gradient, so this term could not train anything: it is detached, computed under "
                    "no_grad, belongs to a frozen part, or lies inside re-entrant activation checkpointing "
                    "(use_reentrant=False keeps gradients)"
                )
            if not _reaches(value, trained):
                raise RuntimeError(
                    f"{what} reaches no trainable parameter of {type(self.student).__name__}, so this term could not "
                    "train it: choose a module behind the parameters that are to learn"
                )


def _select(capture: Capture, spec: ProductSpec, what: str, model: nn.Module | None) -> list[Any]:
    try:
        return capture.select(spec)
    except LookupError as error:
        never = any(not capture[item.name][kind] for kind, item in spec)
        hint = _COMPILED if never and _has_compiled(model) else ""
        raise LookupError(f"{what}: {error.args[0]}{hint}") from None


_COMPILED = (
    ". The model is compiled, and compiled code does not see hooks that are added after its first call: "
    "fit before that call, or call torch.compiler.reset() first"
)


def _has_compiled(model: nn.Module | None) -> bool:
    if (
        model is None or getattr(model, "_compiler_ctx", None) is not None
    ):  # Lightning's note on a compiled module
        return model is not None
    return any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in model.modules())


def _prove_loss(bound: BoundPair, term: Tensor) -> None:
    if not bool(torch.isfinite(term)):
        raise FloatingPointError(
            f"pair {bound.pair.name!r}: the loss is {term.item()} on the first batch; look for infinite logits, an "
            "empty mask or a division by zero in it"
        )
    if not term.requires_grad:
        raise RuntimeError(
            f"pair {bound.pair.name!r}: the loss has no gradient with respect to the student's activation: it is "
            "constant or detaches its first argument"
        )


def _reaches(value: Tensor, parameters: set[int]) -> bool:
    """Whether the graph behind `value` leads to one of `parameters` (given by id)."""
    found, hidden = _leaves(value)
    return hidden or not parameters.isdisjoint(found)


def _leaves(value: Tensor) -> tuple[set[int], bool]:
    """The ids of the tensors that `value` would give gradients to, and whether some may be hidden."""
    if value.grad_fn is None:
        return {id(value)}, False
    waiting, seen = [value.grad_fn], {value.grad_fn}
    found, hidden = set(), False
    while waiting:
        node = waiting.pop()
        found.add(id(getattr(node, "variable", None)))
        # Re-entrant checkpointing hides the parameters inside.
        hidden = hidden or node.name().startswith("CheckpointFunction")
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found, hidden


def _prove_reached(student: nn.Module, total: Tensor) -> None:
    found, hidden = _leaves(total)
    idle = [name for name, p in student.named_parameters() if p.requires_grad and id(p) not in found]
    if idle and not hidden:
        listed = ", ".join(map(repr, idle[:8])) + (f" and {len(idle) - 8} more" if len(idle) > 8 else "")
        raise RuntimeError(
            f"under DDP every trainable parameter must get a gradient in every step, and {listed} got none from the "
            "task loss or any distillation term. Freeze what is not to learn with requires_grad_(False), or use "
            "strategy='ddp_find_unused_parameters_true'"
        )


def _in_training(student: nn.Module) -> bool:
    trainer = getattr(student, "_trainer", None)
    return trainer is None or bool(trainer.training)


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
        if not isinstance(loss, Tensor):
            return output  # None skips the step; anything else is Lightning's to refuse
        total = loss
        for share in self.shares:
            if share.task_weight != 1.0:
                total = total * share.task_weight
        for share, caught in zip(self.shares, products, strict=True):
            terms = share.terms(caught, batch)
            added = share.total(terms).to(loss.device)
            share.log({**terms, "total": added})
            total = total + added
        if self.needs_every_gradient:
            self.needs_every_gradient = False
            _prove_reached(self.student, total)
        return {**output, "loss": total} if isinstance(output, Mapping) else total

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        # A copy of the student made during the fit gets its own plain step, not this one.
        return types.MethodType(_plain_step(self.student), memo.get(id(self.student), self.student))

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.student, "training_step")


def _plain_step(student: nn.Module) -> Callable[..., Any]:
    step: Callable[..., Any] = getattr(type(student), "training_step")  # noqa: B009
    return step
