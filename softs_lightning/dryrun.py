"""One forward of a student without a trace: what its products look like, before training begins.

A copy of the LightningModule runs its own ``training_step`` on one batch. Its statistics, counters
and logs, the random state, and the order in which a loader shuffles stay as they were.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import FSDPModule
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, IterableDataset

from softs_lightning.catcher import Capture, ModelIOCatcher
from softs_lightning.forgetting import faking
from softs_lightning.pairing import Pair
from softs_lightning.product import ProductSpec, describe
from softs_lightning.sharding import is_sharded
from softs_lightning.teacher import Teacher
from softs_lightning.transfer import iter_tensors, map_tensors

__all__ = ["first_batch", "measure", "rehearse", "sizes", "twin_of"]

M = TypeVar("M", bound=nn.Module)

NO_TRAINER = "is not attached to a `Trainer`"  # Lightning says it to a step that reads its trainer


def measure(
    pairs: Sequence[Pair],
    teacher: Teacher,
    trainer: Trainer,
    pl_module: LightningModule,
    *,
    example_batch: Any = None,
) -> tuple[dict[str, list[torch.Size]], dict[str, list[torch.Size]]]:
    """The sizes of both sides' activations for the pairs whose projectors need them, by the pairs' names.

    Args:
        pairs: all of them; those that need no sizes are left out of the answer.
        teacher: placed.
        trainer: whose training data gives the first batch, and whose precision applies.
        pl_module: the student.
        example_batch: instead of the first batch.

    Raises:
        MisconfigurationException: when the dry run of either model fails.
    """
    measured = [pair for pair in pairs if pair.needs_sizes]
    if not measured:
        return {}, {}
    batch = first_batch(trainer) if example_batch is None else example_batch
    side, way_out = (
        "student",
        "Pass a module as the projector, or example_batch= if it is the batch that does not fit",
    )
    try:
        ours = rehearse(
            pl_module, batch, ProductSpec.union(pair.student for pair in measured), trainer=trainer
        )
        own = {pair.name: sizes(ours, pair.student) for pair in measured}
        side, way_out = "teacher", "teacher_inputs= says what of a batch it is called with"
        with trainer.precision_plugin.forward_context():
            theirs = teacher.supply(
                _prepared(batch, pl_module, trainer), ProductSpec.union(pair.teacher for pair in measured)
            )
        return own, {pair.name: sizes(theirs, pair.teacher) for pair in measured}
    except Exception as error:
        named = ", ".join(repr(pair.name) for pair in measured)
        raise MisconfigurationException(
            f"the dry run of the {side} that finds the sizes of the projectors of {named} failed: {error}. {way_out}"
        ) from error


def _prepared(batch: Any, pl_module: LightningModule, trainer: Trainer) -> Any:
    """A batch as the training step gets it: converted, through the batch hooks, on the device."""
    with isolate_rng(include_cuda=torch.cuda.is_available()):
        batch = pl_module._on_before_batch_transfer(trainer.precision_plugin.convert_input(batch))
        return trainer.strategy.batch_to_device(batch, trainer.strategy.root_device)


def rehearse(
    student: LightningModule,
    batch: Any,
    spec: ProductSpec,
    *,
    trainer: Trainer | None = None,
    computing: bool = True,
) -> Capture:
    """Run the training step of a copy of `student` on `batch` and capture `spec`.

    An exception that comes after everything was captured (a scheduler that does not exist yet,
    say) does not matter here; if it is real, the first training step will meet it.

    Args:
        student: left as it is. What cannot be copied (a lock, an open file) its copy shares.
        batch: as a dataloader gives it.
        spec: product_ids named from the student.
        trainer: the trainer whose precision, device and batch hooks apply; without one the batch
            is used as it is, in full precision.
        computing: run for real. Otherwise everything is a fake tensor, of a shape and a type only, on a copy of
            the batch; the student's weights may be on the meta device. Each exception counts then, but for that of
            a step without a trainer: one that comes of there being no values may hide that a module would have run
            once more.

    Returns:
        the filled buffer; its tensors hang on the graph of the copy, so drop it when it has been read.

    Raises:
        ValueError: without computing, for an activation whose size depends on values.
    """
    shared = [] if trainer is None else [trainer, *trainer.callbacks]  # type: ignore[attr-defined]
    with ExitStack() as stack:
        stack.enter_context(isolate_rng(include_cuda=torch.cuda.is_available()))
        stack.enter_context(torch.enable_grad())
        if trainer is not None:
            batch = _prepared(batch, student, trainer)
        if not computing:
            from torch.fx.experimental.symbolic_shapes import (
                ShapeEnv,
            )  # imports sympy, which no training needs

            # With an environment of shapes, a number that is read off a tensor for a log is no error.
            mode = stack.enter_context(faking(shape_env=ShapeEnv(assume_static_by_default=True)))
            twin = _fake_twin(student, shared, mode, trainer).train()
            batch = map_tensors(functools.partial(mode.from_tensor, static_shapes=True), copy.deepcopy(batch))
            stack.enter_context(mode)
        elif trainer is not None and is_sharded(student):
            # Too large to be gathered, and its own forward would leave traces: sizes are all that is wanted.
            mode = stack.enter_context(faking())
            twin = _fake_twin(student, shared, mode, trainer).train()
            batch = map_tensors(mode.from_tensor, batch)
            stack.enter_context(mode)
        else:
            twin = _twin(student, shared).train()
            if trainer is not None:
                trainer.precision_plugin.convert_module(twin.to(trainer.strategy.root_device))  # in place
        twin._trainer = trainer
        _silence(twin)
        if trainer is not None:
            stack.enter_context(trainer.precision_plugin.forward_context())
        with ModelIOCatcher(twin).for_product(spec, early_exit=False) as captured:
            try:
                twin.training_step(*_step_arguments(student, batch))
            except Exception as error:
                counts = not computing and NO_TRAINER not in str(error)
                if counts or not all(captured[item.name][kind] for kind, item in spec):
                    raise
    if not computing:
        _refuse_unknown_sizes(captured, spec)
    return captured


def _refuse_unknown_sizes(captured: Capture, spec: ProductSpec) -> None:
    for kind, item in spec:
        for tensor in iter_tensors(captured[item.name][kind]):
            if not all(type(size) is int for size in tensor.shape):
                raise ValueError(f"the size of {kind}[{item}] depends on values")


def _twin(student: LightningModule, shared: Sequence[Any]) -> LightningModule:
    """A copy of `student`. The objects of `shared`, which it may refer to, are not copied."""
    memo = {id(thing): thing for thing in shared}
    try:
        return copy.deepcopy(student, dict(memo))
    except Exception:
        _note_uncopyables(student, memo)
        return copy.deepcopy(student, memo)


def _fake_twin(
    student: LightningModule, shared: Sequence[Any], mode: FakeTensorMode, trainer: Trainer | None
) -> LightningModule:
    """A copy of a student without memory, whole where FSDP2 shards it, for a forward in `mode`.

    Its own parameters may be on the meta device; the copy is as the trainer will have placed and converted them, and
    on the CPU without one.
    """
    device = torch.device("cpu") if trainer is None else trainer.strategy.root_device

    def fake(tensor: Tensor) -> Tensor:
        dtype = tensor.dtype
        if trainer is not None and dtype.is_floating_point:
            convert = trainer.precision_plugin.convert_module
            dtype = next(convert(nn.Linear(1, 1, dtype=dtype)).parameters()).dtype
        with mode:
            return torch.empty(tensor.shape, dtype=dtype, device=device)

    twin = twin_of(student, fake, shared)
    for module in twin.modules():
        # Lightning notes where a module was made, for self.device.
        if vars(module).get("_device") == torch.device("meta"):
            vars(module)["_device"] = device
    return twin


def twin_of(module: M, make: Callable[[Tensor], Tensor], shared: Sequence[Any] = ()) -> M:
    """A copy of `module` with what `make` gives for each of its parameters and buffers, and for other meta tensors.

    The objects of `shared`, which it may refer to, are not copied, nor is what cannot be. Layers that FSDP2 shards are
    plain ones in the copy.
    """
    memo: dict[int, Any] = {id(thing): thing for thing in shared}
    for tensor in [*module.parameters(), *module.buffers()]:
        made, trained = make(tensor), isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if trained else made
    for part in module.modules():
        for tensor in iter_tensors(list(vars(part).values())):
            if tensor.is_meta and id(tensor) not in memo:
                memo[id(tensor)] = make(tensor)
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    for part in sharded:
        plain: Any = next(base for base in type(part).__bases__ if base is not FSDPModule)
        memo[id(part)] = plain.__new__(plain)
    _note_uncopyables(module, memo)
    for part in sharded:
        state = {
            name: _without_sharding(value) if name.endswith("hooks") else value
            for name, value in vars(part).items()
        }
        vars(memo[id(part)]).update(copy.deepcopy(state, memo))
    return copy.deepcopy(module, memo)


def _without_sharding(hooks: dict[int, Any]) -> dict[int, Any]:
    """A module's hooks but for those of FSDP2, which would look for shards."""
    kept = [key for key, hook in hooks.items() if "torch.distributed.fsdp" not in _origin(hook)]
    return type(hooks)((key, hooks[key]) for key in kept)


def _origin(hook: Any) -> str:
    return str(getattr(getattr(hook, "hook", hook), "__module__", ""))


def _note_uncopyables(student: nn.Module, memo: dict[int, Any]) -> None:
    """Have deepcopy share what in a module, or in the modules and containers that it holds, cannot be copied."""
    seen: set[int] = set()

    def note(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, nn.Module):
            note(vars(value))
        elif isinstance(value, (dict, list, tuple)) and value:
            for inner in value.values() if isinstance(value, dict) else value:
                note(inner)
        elif isinstance(value, Tensor) and not value.is_leaf:
            memo[id(value)] = value.detach().clone()
        else:
            try:
                copy.deepcopy(value, dict(memo))
            except Exception:
                memo[id(value)] = value

    note(student)


def _silence(twin: LightningModule) -> None:
    """Nothing of the copy's step may reach the trainer: it has no loop that could log, nor optimizers."""

    def ignore(*args: Any, **kwargs: Any) -> None:
        """The dry run drops it."""

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]

    twin.__dict__.update(log=ignore, log_dict=ignore)
    if twin._trainer is not None:
        configured = functools.cache(lambda: _init_optimizers_and_lr_schedulers(twin))

        def schedulers() -> Any:
            plain = [config.scheduler for config in configured()[1]]
            return _one_or_all(plain) if plain else None

        twin.__dict__.update(
            optimizers=lambda use_pl_optimizer=True: _one_or_all(configured()[0]),
            lr_schedulers=schedulers,
            manual_backward=backward,
            toggle_optimizer=ignore,
            untoggle_optimizer=ignore,
            clip_gradients=ignore,
        )


def _one_or_all(things: list[Any]) -> Any:
    return things[0] if len(things) == 1 else things


def _step_arguments(student: LightningModule, batch: Any) -> tuple[Any, ...]:
    parameters = inspect.signature(student.training_step).parameters
    positional = [p for p in parameters.values() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters.values())
    return (batch, 0) if variadic or len(positional) > 1 else (batch,)


def sizes(capture: Capture, spec: ProductSpec) -> list[torch.Size]:
    """The shapes of the tensors that `spec` selects from a filled buffer.

    Raises:
        LookupError: for a module that did not run, or ran several times.
        TypeError: for a value that is no tensor.
    """
    found = []
    for (kind, item), value in zip(spec, capture.select(spec), strict=True):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{kind}[{item}] is {describe(value)}, not a tensor: pick one with '#', as in 'name#0'"
            )
        found.append(value.shape)
    return found


def first_batch(trainer: Trainer) -> Any:
    """A batch of the kind that the trainer's training loader gives, taken without touching its shuffling.

    Raises:
        ValueError: when the loader gives none.
    """
    loaders = trainer.fit_loop._data_source.dataloader()
    if isinstance(loaders, CombinedLoader):
        if loaders._mode == "sequential":
            return _one(loaders.flattened[0])
        loaders = loaders.iterables
    return tree_map(_one, loaders)


def _one(loader: Any) -> Any:
    with isolate_rng(include_cuda=False), _generators_kept(loader):
        if _is_plain(loader):
            # Straight from the dataset: no workers are started and no sampler is drawn from.
            count = min(loader.batch_size, len(loader.dataset))
            if count:
                return loader.collate_fn([loader.dataset[i] for i in range(count)])
        if _can_be_read_once(loader):
            raise ValueError(
                f"the training data, a {type(loader).__name__}, can be read only once, and a dry run would take its "
                "first batch away: pass example_batch="
            )
        for batch in loader:
            return batch
    raise ValueError("the training dataloader gave no batch, so the sizes of the projectors cannot be found")


def _can_be_read_once(loader: Any) -> bool:
    """Whether what is taken from the loader now is missing in the training."""
    source = getattr(loader, "dataset", None)
    source = source if isinstance(source, IterableDataset) else loader
    if isinstance(loader, DataLoader) and source is loader:
        return False
    return iter(source) is iter(source)


def _is_plain(loader: Any) -> bool:
    return (
        type(loader) is DataLoader
        and loader.batch_size is not None
        and not isinstance(loader.dataset, IterableDataset)
        and not hasattr(loader.dataset, "__getitems__")
    )


@contextmanager
def _generators_kept(loader: Any) -> Iterator[None]:
    """Put the generators of a loader and its samplers back to where they stood."""
    places: Sequence[Any] = (
        loader,
        getattr(loader, "sampler", None),
        getattr(loader, "batch_sampler", None),
        getattr(getattr(loader, "batch_sampler", None), "sampler", None),
    )
    generators = [
        g for place in places if isinstance(g := getattr(place, "generator", None), torch.Generator)
    ]
    states = [g.get_state() for g in generators]
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
