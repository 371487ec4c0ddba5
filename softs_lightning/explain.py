"""What a recipe's product_ids select, and what stopping early saves: a dry run on one batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from omegaconf import DictConfig
from torch import Tensor, nn

from softs_lightning.apart import explaining, prepare, trainer_of
from softs_lightning.callback import DistillationCallback
from softs_lightning.config import ALONE, Refusal, arms, build
from softs_lightning.names import called
from softs_lightning.outline import outline
from softs_lightning.pairing import Pair
from softs_lightning.pretrained import Pretrained, without_weights
from softs_lightning.product import ProductSpec, describe
from softs_lightning.selectors import resolve_module
from softs_lightning.sketch import Sketch
from softs_lightning.stages import Stage, stages, turns
from softs_lightning.teacher import Cost, Teacher
from softs_lightning.trained import TrainedTeacher, leaving_untrained
from softs_lightning.trial import try_loss

__all__ = [
    "Examination",
    "Plan",
    "Selected",
    "build_callbacks",
    "distils",
    "examine",
    "explain_recipe",
    "leave_untrained",
    "parameters",
]


@dataclass(frozen=True)
class Selected:
    """One activation: how it was asked for, the class of its module, and what it is for this batch."""

    product: str
    module: str
    value: str


@dataclass(frozen=True)
class Plan:
    """What one distillation callback will do in every step."""

    name: str
    teacher: str
    teacher_parameters: int
    cost: Cost
    ran: str | None  # why the teacher ran for real, None where a scan was enough
    pairs: tuple[tuple[Pair, tuple[Selected, ...], tuple[Selected, ...]], ...]
    placement: str = "replicated"
    stages: tuple[Stage, ...] = ()  # where pairs take turns; `cost` is that of all together
    untried: tuple[tuple[str, str], ...] = ()  # the pairs whose loss could not be tried, and why

    @property
    def costs(self) -> tuple[Cost, ...]:
        """The teacher's cost in each stage in which it runs; of several that stop alike, one."""
        found = [stage.cost for stage in self.stages if stage.cost is not None]
        return tuple(dict.fromkeys(found)) or (self.cost,)


@dataclass(frozen=True)
class Examination:
    """A recipe after its dry run.

    Attributes:
        made: why the student's weights were made although nothing of it was to be computed.
        ran: why its step ran for real although nothing was to be computed.
    """

    student: str
    student_parameters: int
    plans: tuple[Plan, ...]
    made: str | None = None
    ran: str | None = None


def parameters(module: nn.Module) -> int:
    """How many numbers a module learns, shared ones counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def examine(recipe: DictConfig, *, computing: bool = True) -> Examination:
    """Run teacher and student once on a batch of the recipe's data; nothing is trained or written.

    A teacher that has yet to be trained takes part with random weights: names, shapes and costs are the same.
    Data with a method `example_batch()` need not be there either: the batch is what that returns.

    Args:
        recipe: as composed and checked.
        computing: whether the student's step runs for real. Otherwise it does only where a sketch of it fails, see
            :class:`softs_lightning.sketch.Sketch`.

    Raises:
        NeedsFitError: for what the student's own code raises, which has its trainer here and no fit.
        Refusal: for whatever in the recipe does not fit teacher, student or data.
    """
    data: L.LightningDataModule = build(recipe.data, "data")
    trainer = trainer_of(recipe, data)
    batch = _batch(data)
    with explaining("student, as it is made"), leaving_untrained():
        student = Sketch(
            lambda: prepare(build(recipe.student, "student"), trainer), computing=computing, trainer=trainer
        )
    callbacks = build_callbacks(recipe)
    distilling = [callback for callback in callbacks if isinstance(callback, DistillationCallback)]
    if not distilling:
        raise Refusal("None of the recipe's callbacks distils; callbacks=distill adds the one that does.")
    plans = tuple(_plan(callback, student, batch) for callback in distilling)
    name, size = type(student.module).__name__, parameters(student.module)
    return Examination(name, size, plans, student.made, student.ran)


def build_callbacks(recipe: DictConfig) -> list[L.Callback]:
    """The recipe's callbacks, those set to null left out."""
    try:
        return [build(node, f"callbacks.{key}") for key, node in recipe.callbacks.items() if node is not None]
    except Refusal:
        # Callbacks are built with what they refer to: say which part of that it is.
        for name, loss in (recipe.get("losses") or {}).items():
            build(loss, f"losses.{name}")
        for number, pair in enumerate(recipe.pairs):
            build(pair, f"pairs.{number}")
        raise


def distils(recipe: DictConfig) -> bool:
    """Whether one of the recipe's callbacks is a distillation."""
    return any(isinstance(callback, DistillationCallback) for callback in build_callbacks(recipe))


def leave_untrained(callback: DistillationCallback) -> None:
    """Let a teacher that has yet to be trained take part with random weights, of which no store keeps anything."""
    teacher = callback.teacher
    if not isinstance(teacher.source, (TrainedTeacher, Pretrained)):
        return
    if type(teacher) is not Teacher:  # one with a store, which is for what the trained teacher says
        options = list(inspect.signature(Teacher.__init__).parameters)[2:]  # behind self and source
        callback.teacher = Teacher(teacher.source, **{name: getattr(teacher, name) for name in options})
    callback.teacher.source = teacher.source.untrained


def _batch(data: L.LightningDataModule) -> Any:
    if callable(example := getattr(data, "example_batch", None)):
        return example()  # of data that may not be on this machine
    data.prepare_data()
    data.setup("fit")
    loaders = CombinedLoader(data.train_dataloader(), mode="max_size_cycle")
    for batch, _, _ in loaders:
        return batch
    raise Refusal("data: the training data holds not one batch; a smaller batch_size may help.")


def _plan(callback: DistillationCallback, student: Sketch, batch: Any) -> Plan:
    leave_untrained(callback)
    wanted = ProductSpec.union(pair.teacher for pair in callback.pairs)
    with ExitStack() as stack:
        with _refusing(f"{callback.name}, teacher"):
            seen = stack.enter_context(outline(callback.teacher, batch, wanted))
        with _refusing(f"{callback.name}, student"):
            pairs = [pair.resolve(student.module, seen.module) for pair in callback.pairs]
        with _refusing(f"{callback.name}, teacher"):
            its = [seen.products.select(pair.teacher) for pair in pairs]
            theirs = [
                _selected(pair.teacher, values, seen.module) for pair, values in zip(pairs, its, strict=True)
            ]
        name, size = type(seen.module).__name__, parameters(seen.module)
        with explaining(f"{callback.name}, student's training step"), leaving_untrained():
            captured = student.rehearse(batch, ProductSpec.union(pair.student for pair in pairs))
        with _refusing(f"{callback.name}, student"):
            mine = [captured.select(pair.student) for pair in pairs]
            ours = [
                _selected(pair.student, values, student.module)
                for pair, values in zip(pairs, mine, strict=True)
            ]
        tried = [
            (pair.name, _try(callback.name, pair, ours_of, theirs_of, batch, (student.module, seen.module)))
            for pair, ours_of, theirs_of in zip(pairs, mine, its, strict=True)
        ]
    return Plan(
        callback.name,
        name,
        size,
        seen.cost,
        seen.ran,
        tuple(zip(pairs, theirs, ours, strict=True)),
        callback.teacher.placement,
        tuple(stages(callback.pairs, [_cost(callback, batch, on) for _, _, on in turns(callback.pairs)])),
        tuple((pair, why) for pair, why in tried if why),
    )


def _try(
    where: str, pair: Pair, ours: Any, theirs: Any, batch: Any, models: tuple[nn.Module, nn.Module]
) -> str | None:
    try:
        return try_loss(pair, ours, theirs, batch, *models)
    except Exception as error:  # a loss may be anybody's, and so may what it raises
        text = error.args[0] if error.args else error
        named = "" if f"pair {pair.name!r}" in str(text) else f"pair {pair.name!r}: "
        raise Refusal(f"{where}: {named}{text}") from error


def _cost(callback: DistillationCallback, batch: Any, on: Sequence[Pair]) -> Cost | None:
    if not on:
        return None
    with outline(callback.teacher, batch, ProductSpec.union(pair.teacher for pair in on)) as seen:
        return seen.cost


@contextmanager
def _refusing(where: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        text = error.args[0] if error.args else error
        raise Refusal(f"{where}: {text}") from error


def _selected(spec: ProductSpec, values: Sequence[Any], model: nn.Module) -> tuple[Selected, ...]:
    return tuple(
        Selected(f"{kind}[{item}]", type(resolve_module(model, item.name).module).__name__, _shape(value))
        for (kind, item), value in zip(spec, values, strict=True)
    )


def _shape(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return describe(value)


def explain_recipe(recipe: DictConfig) -> str:
    """The dry run's findings as text, for each way in which the recipe distils."""
    distilling = {name: arm for name, arm in arms(recipe).items() if name != ALONE and distils(arm)}
    if not distilling:
        raise Refusal("None of the recipe's callbacks distils; callbacks=distill adds the one that does.")
    lines = []
    for name, arm in distilling.items():
        if len(distilling) > 1:
            lines += [f"== {name}", ""]
        with without_weights():
            lines += [*_explained(arm), ""]
    return "\n".join(lines[:-1])


def _explained(recipe: DictConfig) -> Iterator[str]:
    torch.manual_seed(0)
    seen = examine(recipe, computing=False)
    yield f"student  {seen.student}, {seen.student_parameters:,} parameters"
    for plan in seen.plans:
        where = "" if plan.placement == "replicated" else f", placement {plan.placement}"
        yield from (f"teacher  {plan.teacher}, {plan.teacher_parameters:,} parameters{where}", "")
        for pair, theirs, ours in plan.pairs:
            yield from (_headline(pair), *_columns(theirs, ours), "")
        yield from (*map(str, plan.stages), _stop(plan.cost), _how(plan.ran))
        yield from (f"The loss of pair {pair} was not tried: {why}." for pair, why in plan.untried)
    yield _how_the_student(seen)


def _headline(pair: Pair) -> str:
    match pair.projector:
        case None:
            projector = "no projector"
        case str(kind):
            projector = f"projector {kind}"
        case module:
            projector = f"projector {called(module)}"
    weight = f"{pair.weight:g}" if isinstance(pair.weight, (int, float)) else repr(pair.weight)
    return f"pair {pair.name}: {called(pair.loss)}, weight {weight}, {projector}"


def _columns(theirs: Sequence[Selected], ours: Sequence[Selected]) -> list[str]:
    rows = [
        (side, one.product, one.module, one.value)
        for pair in zip(theirs, ours, strict=True)
        for side, one in zip(("teacher", "student"), pair, strict=True)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [f"  {a:{widths[0]}}  {b:{widths[1]}}  {c:{widths[2]}}  {d}" for a, b, c, d in rows]


def _how(ran: str | None) -> str:
    if ran is None:
        return "Found by a scan of the teacher: nothing of it was computed, and no weights of it were made."
    return f"The teacher had to run for real, a scan of it failed: {ran}"


def _how_the_student(seen: Examination) -> str:
    if seen.ran is not None:
        return f"The student's step had to run for real, a scan of it failed: {seen.ran}"
    if seen.made is not None:
        return f"Of the student's step nothing was computed, but its weights had to be made: {seen.made}"
    return "Of the student's step nothing was computed, and no weights of it were made."


def _stop(cost: Cost) -> str:
    counted = f"{cost.used / 1e6:,.1f} of {cost.full / 1e6:,.1f} MFLOP a batch"
    if cost.stop is None:
        return f"The teacher's forward runs to its end: {counted}, nothing saved."
    return f"The teacher's forward stops at {cost.stop}: {counted}, {100 * cost.saved:.1f} % saved."
