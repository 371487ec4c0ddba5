"""The engine of recording: one tap on each declared module, one call that collects from them.

A tap belongs to one model and asks the context it runs in which forward of that model is recording:
threads, async tasks and nested models do not see each other. Declared modules are looked up anew by
every call that records, so a layer that was replaced, or a model that was copied, records as before.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointFunction

from softs_lightning.names import quoted
from softs_lightning.product import element
from softs_lightning.recorders import (
    DECLARATION,
    OutputRecorder,
    Recorded,
    configured,
    declared,
    find_recorded,
    own_modules,
)
from softs_lightning.taps import Tap, has_compiled

__all__ = ["Wanted", "record", "records_now"]


@dataclass(frozen=True)
class Wanted:
    """What a call wants of one output: all of it, or some positions; `follows` if another key brought it in."""

    positions: tuple[int, ...] | None = None
    follows: bool = False


class _Record:
    """One output as it is collected: its values so far, ``None`` at positions that are not wanted."""

    def __init__(self, name: str, asked: Wanted, modules: int, initial: bool) -> None:
        positions = asked.positions
        self.name = name
        self.follows = asked.follows
        self.modules = modules
        self.expected = expected = modules + initial
        self.exact = positions is not None and min(positions) < 0
        self.kept: set[int] | None = None
        if positions is not None:
            beyond = [at for at in positions if not -expected <= at < expected]
            if beyond:
                raise IndexError(f"{name}={beyond[0]} is out of range: {expected} values will be recorded")
            self.kept = {at % expected for at in positions}
        self.values: list[Any] = []
        self.ran: set[str] = set()
        self.something = False
        self.nothing: list[str] = []  # modules that gave None

    def add(self, value: Any) -> None:
        wanted = self.kept is None or len(self.values) in self.kept
        self.values.append(value if wanted else None)


class _Call:
    """One running forward that records, and the one around it."""

    def __init__(self, recording: _Recording, records: dict[str, _Record]) -> None:
        self.recording = recording
        self.records = records
        self.outer = _current.get()
        self.grad = torch.is_grad_enabled()

    def deliver(
        self,
        keys: Sequence[_Key],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        for key, path, recorder in keys:
            record = self.records.get(key)
            if record is None:
                continue
            record.ran.add(path)
            try:
                value = element(output, recorder.index)
            except IndexError as error:
                raise IndexError(
                    f"{DECLARATION}[{key!r}] takes element {recorder.index} of what {path or 'the model'!r} "
                    f"({type(module).__name__}) returns: {error.args[0]}"
                ) from None
            if key == "hidden_states" and recorder.capture_initial_hidden_state and not record.values:
                record.add(_first_input(module, args, kwargs))
            if value is None:
                record.nothing.append(path)
                continue
            self._check_gradient(key, path, value)
            record.add(value)
            record.something = True

    def _check_gradient(self, key: str, path: str, value: Any) -> None:
        # Under no_grad in a forward that is not: a re-entrant checkpoint, or a part of the model frozen on purpose.
        if (
            self.grad
            and not torch.is_grad_enabled()
            and isinstance(value, Tensor)
            and _in_reentrant_checkpoint()
        ):
            raise RuntimeError(
                f"{key} of {path!r} would have no gradient: it is recorded inside a re-entrant checkpoint, which runs "
                "its part of the model under no_grad. Use checkpoint(..., use_reentrant=False), or record under no_grad"
            )

    def results(self, model: nn.Module) -> dict[str, tuple[Any, ...]]:
        for record in self.records.values():
            if not record.something and record.follows:
                continue  # nobody asked for it by name
            if not record.something:
                raise RuntimeError(_why_nothing(model, record))
            if len(record.ran) < record.modules and has_compiled(model):
                raise RuntimeError(_why_nothing(model, record))
            if record.exact and len(record.values) != record.expected:
                raise RuntimeError(
                    f"{record.name} asks for positions from the end, and {len(record.values)} values were recorded "
                    f"where {record.expected} were expected: ask for positions from the start, or for True"
                )
        return {key: tuple(record.values) for key, record in self.records.items() if record.something}


_current: ContextVar[_Call | None] = ContextVar("softs_lightning_recording", default=None)


def _first_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if args:
        return args[0]
    first = next(iter(inspect.signature(module.forward).parameters), None)
    if first in kwargs:
        return kwargs[first]
    if not kwargs:
        raise RuntimeError(
            f"hidden_states begin with the first layer's input, and {type(module).__name__} was given none"
        )
    return next(iter(kwargs.values()))


def _in_reentrant_checkpoint() -> bool:
    frame = inspect.currentframe()
    code = CheckpointFunction.forward.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None


def _why_nothing(model: nn.Module, record: _Record) -> str:
    if record.nothing:
        implementation = configured(model, "_attn_implementation")
        how = f"this model has {implementation!r}" if implementation else "others do not compute them"
        return (
            f"{record.name}: {quoted(record.nothing[:3])} gave None. If these are attention weights, build the model "
            f'with attn_implementation="eager": {how}; nn.MultiheadAttention wants need_weights=True'
        )
    return (
        f"{record.name}: {len(record.ran) or 'none'} of the {record.modules} modules that {type(model).__name__} "
        "declares for it ran. If the model was compiled, record once before its first compiled call, or call torch.compiler.reset(); "
        "a fused kernel that replaces the layers, or layers that run in threads of their own, are not seen either"
    )


_Key = tuple[str, str, OutputRecorder]


class _RecorderTap(Tap):
    """The hook on a module that some model declares. Holds no reference to the module."""

    recording: ref[_Recording] | None = None
    keys: Sequence[_Key] = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if self.armed:
            self.deliver(module, args, kwargs, output)

    def _deliver(self, *what: Any) -> None:
        if torch._C._current_graph_task_id() != -1:
            return  # activation checkpointing recomputing in backward
        recording = None if self.recording is None else self.recording()
        call = _current.get()
        while call is not None and call.recording is not recording:
            call = call.outer
        if call is not None:
            call.deliver(self.keys, *what)


class _Recording:
    """The taps of one model that declares, and how many of its forwards are recording now."""

    def __init__(self) -> None:
        self.taps: WeakKeyDictionary[nn.Module, _RecorderTap] = WeakKeyDictionary()
        self.own: dict[str, tuple[int, OutputRecorder]] = {}  # how many modules a key has, its first recorder
        self.seen: Any = None
        self.running = 0
        self.lock = threading.Lock()

    def open(self, model: nn.Module, wanted: Mapping[str, Wanted]) -> _Call:
        """Find the declared modules as they are now, and arm them."""
        with self.lock:
            now = _structure(model)
            if now != self.seen:
                self._place(find_recorded(model))
                self.seen = now
            call = _Call(self, self._records(model, wanted))
            self.running += 1
            for tap in self.taps.values():
                tap.arm()
        return call

    def _records(self, model: nn.Module, wanted: Mapping[str, Wanted]) -> dict[str, _Record]:
        records = {}
        for key, asked in wanted.items():
            if key in self.own:
                modules, first = self.own[key]
                initial = key == "hidden_states" and first.capture_initial_hidden_state
                records[key] = _Record(f"output_{key}", asked, modules, initial)
            elif not asked.follows:
                raise ValueError(_no_match(model, key))
        return records

    def close(self) -> None:
        with self.lock:
            self.running -= 1
            if not self.running:
                for tap in self.taps.values():
                    tap.disarm()

    def _place(self, found: Sequence[Recorded]) -> None:
        keys: dict[nn.Module, list[_Key]] = {tap_of: [] for tap_of in self.taps}
        self.own = {}
        for one in found:
            keys.setdefault(one.module, []).append((one.key, one.path, one.recorder))
            modules, first = self.own.get(one.key, (0, one.recorder))
            self.own[one.key] = modules + 1, first
        for module, own in keys.items():
            if module not in self.taps:
                tap = self.taps[module] = _RecorderTap()
                tap.recording = ref(self)
                module.register_forward_hook(tap, with_kwargs=True)
            self.taps[module].keys = own


def _structure(model: nn.Module) -> tuple[Any, ...]:
    """What decides which modules are declared: the declaration, the modules below the model, their classes."""
    below: dict[nn.Module, type[nn.Module]] = {}
    waiting = [model]
    while waiting:
        for child in waiting.pop()._modules.values():
            if child is not None and child not in below and child is not model:
                below[child] = type(child)
                waiting.append(child)
    return declared(model), list(below), list(below.values())


_recordings: WeakKeyDictionary[nn.Module, _Recording] = WeakKeyDictionary()
_recordings_lock = threading.Lock()


def record(
    forward: Callable[..., Any],
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    wanted: Mapping[str, Wanted],
) -> tuple[Any, dict[str, tuple[Any, ...]]]:
    """Run one forward of `model` and collect what is wanted: its output, and the values by key.

    Raises:
        ValueError, IndexError, RuntimeError: as :func:`softs_lightning.recording.capture_outputs` says.
    """
    if getattr(model, "_is_replica", False):
        raise RuntimeError("nothing can be recorded in a DataParallel replica: use DistributedDataParallel")
    with _recordings_lock:
        recording = _recordings.setdefault(model, _Recording())
    call = recording.open(model, wanted)
    token = _current.set(call)
    try:
        output = forward(model, *args, **kwargs)
    finally:
        _current.reset(token)
        recording.close()
    return output, call.results(model)


def records_now(model: nn.Module) -> bool:
    """Whether this context is inside a recorded forward of `model`, which a further call must not add to."""
    call = _current.get()
    recording = None if call is None else _recordings.get(model)
    while call is not None and call.recording is not recording:
        call = call.outer
    return call is not None


def _no_match(model: nn.Module, key: str) -> str:
    recorders = ", ".join(map(str, declared(model)[key]))
    classes = sorted({type(module).__name__ for _, module in own_modules(model)})
    return (
        f"output_{key}: {type(model).__name__} declares {recorders} for it, which matches none of its modules; their "
        f"classes are {', '.join(classes)}. If layers were replaced, register_patch_mapping their classes and call "
        "patch_output_recorders(model)"
    )
