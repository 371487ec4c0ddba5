"""ModelIOCatcher: capture what named modules take and return, and stop the forward once it is complete.

In the order of reading: :class:`Capture` is the buffer a session fills, ``_Session`` what is asked
in one ``with`` block, ``_InputTap`` and ``_OutputTap`` the hooks, :class:`ModelIOCatcher` the
public object that arms them.

Where hooks go: on first arming, on the modules that the session names, and there they stay
until ``detach_hooks()``; an idle hook is one attribute check. Hooks always return ``None``: with
capture on, the model's output is bit-identical.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from softs_lightning.product import Item, Kind, ProductSpec, describe, parse_io_spec, take
from softs_lightning.selectors import Target, resolve_module, resolve_spec
from softs_lightning.transfer import iter_tensors, map_tensors, transfer_to_device

__all__ = ["Capture", "ModelIOCatcher", "OverwrittenWarning", "parse_io_spec", "transfer_to_device"]

Key = tuple[str, Kind]


class OverwrittenWarning(UserWarning):
    """A captured tensor was changed in place by the model afterwards, so the buffer holds the later value."""


class _StopForward(BaseException):
    """Everything asked for is captured. A BaseException: a model's ``except Exception`` must not swallow it."""

    def __init__(self, session: _Session) -> None:
        super().__init__("the forward stops here: everything requested is captured")
        self.session = session


class Capture(dict[str, dict[str, list[Any]]]):
    """The buffer of one session: ``buf[name]["inputs"]`` and ``buf[name]["outputs"]`` are lists.

    One entry a call of the module: ``{"args": tuple, "kwargs": dict}`` for inputs, the return value
    for outputs. Only the kinds that were asked for are there; a module that did not run has an empty list.

    Attributes:
        spec: what the session was armed with.
        stopped_at: the module at which the last forward was cut short, ``None`` if it ran to its end.
    """

    def __init__(self, spec: ProductSpec, modules: dict[str, nn.Module]) -> None:
        super().__init__()
        self.spec = spec
        self.modules = modules
        self.stopped_at: str | None = None
        for kind, item in spec:
            self.setdefault(item.name, {})[kind] = []

    def select(self, product_id: str | ProductSpec | None = None) -> list[Any]:
        """The values that a product_id names, after exactly one forward: inputs first, each section in order.

        Args:
            product_id: by default what the session was armed with.

        Raises:
            LookupError: when a module did not run, ran several times and the product_id does not say
                which call (``name!0`` is the first), or when a pick (``name#0``) finds nothing.

        >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        >>> with ModelIOCatcher(net).for_product("outputs[0]", early_exit=False) as buf:
        ...     _ = net(torch.ones(1, 2))
        >>> buf.select()[0] is buf["0"]["outputs"][0]
        True
        """
        spec = self.spec if product_id is None else ProductSpec.parse(product_id)
        return [self._value(kind, item) for kind, item in spec]

    def _value(self, kind: Kind, item: Item) -> Any:
        what = f"{kind}[{item}]"
        entries = self.get(item.name, {}).get(kind)
        if entries is None:
            raise LookupError(f"{what} was not asked of this session, which captured {self.spec}")
        if not entries:
            raise LookupError(f"{what} was not captured: the module {item.name!r} never ran in this forward")
        if item.call is None and len(entries) > 1:
            raise LookupError(
                f"{what} is ambiguous: {item.name!r} ran {len(entries)} times. "
                f"Say which call: {item.name}!0 is the first, {item.name}!{len(entries) - 1} the last"
            )
        if (item.call or 0) >= len(entries):
            raise LookupError(f"{what} was not captured: {item.name!r} ran only {len(entries)} times")
        entry = entries[item.call or 0]
        try:
            return self._input(item, entry) if kind == "inputs" else take(entry, item.pick)
        except LookupError as error:
            raise LookupError(f"{what}: {error.args[0]}") from None

    def _input(self, item: Item, entry: dict[str, Any]) -> Any:
        args, kwargs = entry["args"], entry["kwargs"]
        if item.pick:
            first, rest = item.pick[0], item.pick[1:]
            if isinstance(first, str) and first not in kwargs:
                first = _position(self.modules[item.name], first)
            try:
                return take(kwargs[first] if isinstance(first, str) else args[first], rest)
            except (IndexError, KeyError):
                pass
        elif len(args) + len(kwargs) == 1:
            return next(iter([*args, *kwargs.values()]))
        given = [f"#{i} is {describe(v)}" for i, v in enumerate(args)]
        given += [f"#{k} is {describe(v)}" for k, v in kwargs.items()]
        raise LookupError(f"choose one of its arguments: {'; '.join(given) or 'it was called with none'}")


def _position(module: nn.Module, name: str) -> int | str:
    """Where `name` stands among the positional parameters of ``module.forward``, or `name` itself."""
    code = getattr(getattr(module.forward, "__func__", module.forward), "__code__", None)
    names = code.co_varnames[1 : code.co_argcount] if code is not None else ()
    return names.index(name) if name in names else name


class _Session:
    """What one ``with`` block asks for, and the forward that is running under it."""

    def __init__(
        self,
        spec: ProductSpec,
        targets: dict[str, Target],
        device: torch.device | None,
        early_exit: bool,
        copy: bool,
    ) -> None:
        self.buffer = Capture(spec, {name: target.module for name, target in targets.items()})
        self.targets = targets
        self.device = device
        self.early_exit = early_exit
        self.copy = copy
        self.thread = threading.get_ident()
        self.running = False
        self.stopped = False
        self.budget: dict[Key, int] = {}
        self._versions: list[tuple[Key, Tensor, int]] = []
        self._needed: dict[Key, int] = {}
        for kind, item in spec:
            key = (item.name, kind)
            self._needed[key] = max(self._needed.get(key, 1), (item.call or 0) + 1)

    def begin(self) -> None:
        self.running, self.stopped, self.budget = True, False, dict(self._needed)
        self.buffer.stopped_at = None

    def deliver(self, keys: Sequence[Key], value: Any) -> None:
        """Record one call of a module, and stop the forward if it was the last that was waited for."""
        if threading.get_ident() != self.thread or torch._C._current_graph_task_id() != -1:
            return  # another thread's forward, or activation checkpointing recomputing in backward
        if self.early_exit and not self.running:
            raise RuntimeError(
                "this session exits early, so the forward must be driven by catcher.run(...); "
                "to call the model itself, open the session with early_exit=False"
            )
        kept = map_tensors(Tensor.clone, value) if self.copy else value
        kept = transfer_to_device(kept, self.device)
        own = {id(tensor) for tensor in iter_tensors(value)}
        in_place = [t for t in iter_tensors(kept) if id(t) in own and not t.is_inference()]
        for name, kind in keys:
            self.buffer[name][kind].append(kept)
            self._versions += [((name, kind), tensor, tensor._version) for tensor in in_place]
            if self.running:
                self._count((name, kind))
        if self.running and self.early_exit and not self.budget:
            self.stopped = True
            self.buffer.stopped_at = keys[-1][0]
            raise _StopForward(self)

    def _count(self, key: Key) -> None:
        if self.budget.get(key, 0) > 1:
            self.budget[key] -= 1
        else:
            self.budget.pop(key, None)

    def overwritten(self) -> list[str]:
        """What the model changed in place after it was captured; each is named once."""
        changed = [key for key, tensor, version in self._versions if tensor._version != version]
        self._versions = [(k, t, v) for k, t, v in self._versions if k not in changed]
        return [f"{kind}[{name}]" for name, kind in dict.fromkeys(changed)]

    def warn_overwritten(self) -> None:
        if changed := self.overwritten():
            warnings.warn(
                f"{', '.join(changed)} changed after capture: the model wrote into it in place (an in-place ReLU, "
                "an in-place addition), so the buffer holds the later value. Pass copy=True to keep the value at "
                "capture, or capture the module that does the writing.",
                OverwrittenWarning,
                stacklevel=3,
            )


class _Tap:
    """A hook on one module. Copies of a hooked model get taps of their own, which nobody arms."""

    def __init__(self) -> None:
        self.armed = False
        self.session: _Session | None = None
        self.keys: list[Key] = []

    def arm(self, session: _Session, key: Key) -> None:
        if _dynamo_loaded() and "deliver" not in self.__dict__:
            # Compiled code may check whether to deliver, but must not trace into the buffer.
            disable: Callable[..., Any] = torch.compiler.disable
            self.__dict__["deliver"] = disable(self._deliver)
        if self.session is not session:
            self.session, self.keys = session, []
        self.keys.append(key)
        self.armed = True

    def disarm(self) -> None:
        self.armed, self.session, self.keys = False, None, []

    def _deliver(self, value: Any) -> None:
        if self.session is not None:
            self.session.deliver(self.keys, value)

    deliver: Callable[..., None] = _deliver

    def __deepcopy__(self, memo: dict[int, Any]) -> _Tap:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class _InputTap(_Tap):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.armed:
            self.deliver({"args": args, "kwargs": dict(kwargs)})


class _OutputTap(_Tap):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.armed:
            self.deliver(output)


class ModelIOCatcher(AbstractContextManager[Capture]):
    """Capture inputs and outputs of named submodules during forward passes.

    Args:
        model: the module to instrument; ``dict(model.named_modules())`` are the names. It is never
            changed but for its hooks.
        device: where captured tensors are moved; ``None`` leaves them in place.
        attach: ``"armed"`` puts a hook on a module when a session first asks for it, ``"all"`` puts
            both hooks on every submodule at once. A model that contains a compiled module gets
            ``"all"``: compiled code does not see hooks that are added later.
        copy: keep copies of what is captured, safe from later in-place writes of the model.

    A session belongs to the thread that opened it: forwards of other threads are not captured.
    One catcher has one session at a time; two catchers may watch one model at once.

    Raises:
        KeyError: for an unknown module, with the nearest names, when a session is armed.
        RuntimeError: for a second session while one is open, and for a direct call of the model
            under a session that exits early.

    Example::

        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> catcher = ModelIOCatcher(net)
        >>> with catcher.for_product("outputs[1]") as buf:     # the last layer is never run
        ...     for batch in torch.ones(3, 5, 4):
        ...         assert catcher.run(batch) is None
        >>> len(buf["1"]["outputs"]), list(buf["1"]["outputs"][0].shape)
        (3, [5, 8])
        >>> with catcher(inputs=["2"], outputs=["."]) as buf:  # whole forwards
        ...     _ = net(torch.ones(5, 4))
        >>> buf["2"]["inputs"][0]["args"][0].shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device | str | int | None = None,
        *,
        attach: Literal["armed", "all"] = "armed",
        copy: bool = False,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
        if attach not in ("armed", "all"):
            raise ValueError(f"attach must be 'armed' or 'all', got {attach!r}")
        self.model = model
        self.device = None if device is None else torch.device(device)
        self.copy = copy
        self.attached = False
        self._everywhere = attach == "all"
        self._taps: WeakKeyDictionary[nn.Module, dict[Kind, tuple[_Tap, Any]]] = WeakKeyDictionary()
        self._targets: dict[str, Target] = {}
        self._pending: tuple[ProductSpec, bool] | None = None
        self._session: _Session | None = None
        self.attach_hooks()

    # -- hooks ---------------------------------------------------------------------------------

    def attach_hooks(self) -> None:
        """Let sessions place hooks (the state after construction). Calling it again changes nothing."""
        self.attached = True
        if self._everywhere or _has_compiled(self.model):
            for module in self.model.modules():
                for kind in ("inputs", "outputs"):
                    self._tap(module, kind)

    def detach_hooks(self) -> None:
        """Remove every hook of this catcher. Calling it again changes nothing."""
        if self._session is not None:
            raise RuntimeError("a session is open: leave its with block before detaching the hooks")
        for taps in self._taps.values():
            for _, handle in taps.values():
                handle.remove()
        self._taps.clear()
        self.attached = False

    def _tap(self, module: nn.Module, kind: Kind) -> _Tap:
        taps = self._taps.setdefault(module, {})
        if kind not in taps and kind == "inputs":
            before = _InputTap()
            taps[kind] = before, module.register_forward_pre_hook(before, with_kwargs=True)
        elif kind not in taps:
            after = _OutputTap()
            taps[kind] = after, module.register_forward_hook(after)
        return taps[kind][0]

    # -- sessions ------------------------------------------------------------------------------

    def __call__(
        self, inputs: Iterable[str] = (), outputs: Iterable[str] = (), early_exit: bool = False
    ) -> ModelIOCatcher:
        """Arm a session for named modules; use it as ``with catcher(outputs=["layer"]) as buf:``.

        Args:
            inputs: modules whose arguments are captured.
            outputs: modules whose return values are captured.
            early_exit: stop each forward once everything is captured; drive it with :meth:`run`.

        Raises:
            ValueError: when nothing is selected.
            KeyError: for an unknown module, with the nearest names.
        """
        for side in (inputs, outputs):
            if isinstance(side, (str, bytes)):
                raise TypeError(f"inputs and outputs are lists of module names, got the string {side!r}")
        return self._arm(ProductSpec(tuple(map(_item, inputs)), tuple(map(_item, outputs))), early_exit)

    def for_product(self, product_id: str | ProductSpec, early_exit: bool = True) -> ModelIOCatcher:
        """Arm a session from a product_id; use it as ``with catcher.for_product(pid) as buf:``.

        Args:
            product_id: such as ``"inputs[model.layers.0]|outputs[model.layers.0]"``.
            early_exit: stop each forward once everything is captured; drive it with :meth:`run`.

        Raises:
            ValueError: when the product_id selects nothing or is not understood.
            KeyError: for an unknown module, with the nearest names.
        """
        return self._arm(ProductSpec.parse(product_id), early_exit)

    def _arm(self, spec: ProductSpec, early_exit: bool) -> ModelIOCatcher:
        if not spec:
            raise ValueError(
                "this selects nothing to capture: name a module, as in 'outputs[model.layers.0]'"
            )
        spec = resolve_spec(self.model, spec) if self._is_new(spec) else spec
        for _, item in spec:
            self._target(item.name)
        self._pending = spec, early_exit
        return self

    def _is_new(self, spec: ProductSpec) -> bool:
        return any(item.name not in self._targets for _, item in spec)

    def _target(self, name: str) -> Target:
        """The module under `name` now: a layer that was replaced since is found again."""
        target = self._targets.get(name)
        if target is None or not _still_there(self.model, target):
            target = self._targets[name] = resolve_module(self.model, name)
        return target

    def __enter__(self) -> Capture:
        if self._session is not None:
            where = (
                "in another thread" if self._session.thread != threading.get_ident() else "around this one"
            )
            raise RuntimeError(
                f"this catcher has a session open {where}, and one at a time is what a catcher has: "
                "make a second ModelIOCatcher on the model"
            )
        if self._pending is None:
            raise RuntimeError(
                "nothing is armed: write `with catcher.for_product(...)` or `with catcher(...)`"
            )
        if not self.attached:
            raise RuntimeError("the hooks were detached: call attach_hooks() first")
        (spec, early_exit), self._pending = self._pending, None
        targets = {item.name: self._target(item.name) for _, item in spec}
        session = _Session(spec, targets, self.device, early_exit, self.copy)
        for key in dict.fromkeys((item.name, kind) for kind, item in spec):
            self._tap(targets[key[0]].module, key[1]).arm(session, key)
        self._session = session
        return session.buffer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session, self._session = self._session, None
        if session is None:
            return
        for target in session.targets.values():
            for tap, _ in self._taps.get(target.module, {}).values():
                tap.disarm()
        if error is None:
            session.warn_overwritten()

    # -- forwards ------------------------------------------------------------------------------

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run one forward of the model under the open session.

        Returns:
            ``None`` if an early exit cut the forward short; the model's output otherwise, also when
            a requested module never ran or when no session is open.

        Raises:
            RuntimeError: when called within itself, when the model swallowed the stop signal, and
                when compiled code skipped a hook.
        """
        session = self._session
        if session is None or session.thread != threading.get_ident():
            return self.model(*args, **kwargs)
        if session.running:
            raise RuntimeError(
                "run() was called inside run(): use a second ModelIOCatcher for the inner forward"
            )
        session.begin()
        try:
            output = self.model(*args, **kwargs)
        except _StopForward as stop:
            if stop.session is not session:
                raise
            return None
        finally:
            session.running = False
        if session.stopped:
            raise RuntimeError(
                "the model swallowed the signal that stops its forward (a bare `except:` or `except BaseException`), "
                "so its output is not to be trusted: open the session with early_exit=False"
            )
        if session.budget and _has_compiled(self.model):
            missed = ", ".join(f"{kind}[{name}]" for name, kind in session.budget)
            raise RuntimeError(
                f"{missed} never fired in a compiled model: compiled code does not see hooks that are added after its "
                "first call. Make the catcher before that call, or call torch.compiler.reset() and run again"
            )
        session.warn_overwritten()
        return output


def _item(name: str) -> Item:
    return Item.parse(name or ".")


def _still_there(model: nn.Module, target: Target) -> bool:
    try:
        return model.get_submodule(target.path) is target.module
    except AttributeError:
        return False


def _dynamo_loaded() -> bool:
    return "torch._dynamo" in sys.modules


def _has_compiled(model: nn.Module) -> bool:
    if not _dynamo_loaded():
        return False
    wrapped = sys.modules["torch._dynamo"].OptimizedModule
    return any(isinstance(m, wrapped) or m._compiled_call_impl is not None for m in model.modules())
