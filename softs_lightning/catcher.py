"""ModelIOCatcher: capture what named modules take and return, and stop the forward once it is complete.

In the order of reading: ``_Session`` is what one ``with`` block asks for, ``_InputTap`` and
``_OutputTap`` are the hooks, :class:`ModelIOCatcher` is the public object that arms them.

Where hooks go: on first arming, on the modules that the session names, and there they stay
until ``detach_hooks()``; an idle hook is one attribute check. Hooks always return ``None``: with
capture on, the model's output is bit-identical.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Literal
from weakref import WeakKeyDictionary, finalize, ref

import torch
from torch import Tensor, nn

from softs_lightning.caches import without_caches
from softs_lightning.capture import Capture
from softs_lightning.product import Item, Kind, ProductSpec, parse_io_spec
from softs_lightning.selectors import Target, resolve_module, resolve_spec
from softs_lightning.taps import Tap, has_compiled
from softs_lightning.transfer import iter_tensors, map_tensors, transfer_to_device

__all__ = ["Capture", "ModelIOCatcher", "OverwrittenWarning", "parse_io_spec", "transfer_to_device"]

Key = tuple[str, Kind]

_OPENING = threading.Lock()  # threads may share a catcher by mistake, and must then be told


class OverwrittenWarning(UserWarning):
    """A captured tensor was changed in place by the model afterwards, so the buffer holds the later value."""


class _StopForward(BaseException):
    """Everything asked for is captured. A BaseException: a model's ``except Exception`` must not swallow it."""

    def __init__(self, session: _Session) -> None:
        super().__init__("the forward stops here: everything requested is captured")
        self.session = session


class _Session:
    """What one ``with`` block asks for, and the forward that is running under it."""

    def __init__(
        self,
        spec: ProductSpec,
        buffer: Capture,
        device: torch.device | None,
        early_exit: bool,
        copy: bool,
    ) -> None:
        self.buffer = buffer
        self.device = device
        self.early_exit = early_exit
        self.copy = copy
        self.thread = threading.get_ident()
        self.taps: list[_Tap] = []
        self.running = False
        self.stopped = False
        self.budget: dict[Key, int] = {}
        # Weak: whoever empties the buffer's lists while the session lasts wants the memory back.
        self._versions: list[tuple[Key, ref[Tensor], int]] = []
        self.seen = 0
        self.needed: dict[Key, int] = {}
        for kind, item in spec:
            key = (item.name, kind)
            self.needed[key] = max(self.needed.get(key, 1), (item.call or 0) + 1)

    def begin(self) -> None:
        self.running, self.stopped, self.budget = True, False, dict(self.needed)
        self.seen = len(self._versions)
        self.buffer.stopped_at = None

    def deliver(self, keys: Sequence[Key], value: Any) -> None:
        """Record one call of a module, and stop the forward if it was the last that was waited for."""
        if threading.get_ident() != self.thread or torch._C._current_graph_task_id() != -1:
            return  # another thread's forward, or activation checkpointing recomputing in backward
        if self.early_exit and not self.running:
            raise RuntimeError(
                "this session exits early, so the forward must be driven by run() of the catcher that opened it; "
                "to call the model itself, open the session with early_exit=False"
            )
        kept = self._keep(value)
        watched: list[tuple[ref[Tensor], int]] = []
        if not self.copy:
            own = None if kept is value else {id(tensor) for tensor in iter_tensors(value)}
            for tensor in iter_tensors(kept):
                if (own is None or id(tensor) in own) and not tensor.is_inference():
                    watched.append((ref(tensor), tensor._version))
        for key in keys:
            self.buffer[key[0]][key[1]].append(kept)
            self._versions += [(key, tensor, version) for tensor, version in watched]
            self._count(key)
        if self.running and self.early_exit and not self.budget:
            self.stopped = True
            self.buffer.stopped_at = keys[-1][0]
            raise _StopForward(self)

    def _keep(self, value: Any) -> Any:
        kept = transfer_to_device(value, self.device)
        if not self.copy:
            return kept
        own = {id(tensor) for tensor in iter_tensors(value)}
        return map_tensors(lambda tensor: tensor.clone() if id(tensor) in own else tensor, kept)

    def _count(self, key: Key) -> None:
        if self.budget.get(key, 0) > 1:
            self.budget[key] -= 1
        else:
            self.budget.pop(key, None)

    def warn_overwritten(self, *, since: int = 0) -> None:
        """Warn of what the model changed in place after it was captured; each is named once."""
        held = [(key, tensor(), version) for key, tensor, version in self._versions[since:]]
        changed = {key for key, tensor, version in held if tensor is not None and tensor._version != version}
        if not changed:
            return
        self._versions = [entry for entry in self._versions if entry[0] not in changed]
        warnings.warn(
            f"{', '.join(f'{kind}[{name}]' for name, kind in self.needed if (name, kind) in changed)} changed after "
            "capture: the model wrote into it in place (an in-place ReLU, an in-place addition), so the buffer holds "
            "the later value. Pass copy=True to keep the value at capture, or capture the module that does the writing.",
            OverwrittenWarning,
            stacklevel=3,
        )


class _Tap(Tap):
    """A hook that delivers to the session it is armed for."""

    session: _Session | None = None
    keys: Sequence[Key] = ()

    def watch(self, session: _Session, key: Key) -> None:
        if self.session is not session:
            self.session, self.keys = session, []
            session.taps.append(self)
        self.keys = [*self.keys, key]
        self.arm()

    def disarm(self) -> None:
        super().disarm()
        self.session, self.keys = None, ()

    def _deliver(self, *what: Any) -> None:
        if self.session is not None:
            self.session.deliver(self.keys, *what)


class _InputTap(_Tap):
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.armed:
            self.deliver(args, kwargs)

    def _deliver(self, *what: Any) -> None:
        args, kwargs = without_caches(*what)
        super()._deliver({"args": args, "kwargs": kwargs})


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
        copy: keep copies of the tensors captured, safe from later in-place writes of the model.

    A session belongs to the thread that opened it, and records every call of its modules there, also
    in a forward that another catcher drives. Forwards of other threads, and what runs while autograd
    goes backward (activation checkpointing computes again there), are not captured. One catcher has
    one session at a time; two catchers may watch one model at once.

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
        if any(isinstance(m, nn.DataParallel) and len(m.device_ids) > 1 for m in model.modules()):
            raise RuntimeError(
                "DataParallel runs its replicas in threads, and each would deliver a part of the batch: "
                "use DistributedDataParallel, or give the catcher the module inside"
            )
        self.model = model
        self.device = None if device is None else torch.device(device)
        self.copy = copy
        self.attached = False
        self._everywhere = attach == "all"
        self._taps: WeakKeyDictionary[nn.Module, dict[Kind, tuple[_Tap, Any]]] = WeakKeyDictionary()
        self._targets: dict[str, Target] = {}
        self._resolved: dict[ProductSpec, ProductSpec] = {}
        self._pending: tuple[ProductSpec, bool, int] | None = None
        self._session: _Session | None = None
        # Nobody could detach the hooks of a catcher that is gone.
        finalize(self, _remove_hooks, self._taps).atexit = False
        self.attach_hooks()

    def __getstate__(self) -> dict[str, Any]:
        # Hooks stand on modules: a copy of a catcher places its own, on the model copied with it.
        return {
            **self.__dict__,
            "_taps": None,
            "_targets": {},
            "_resolved": {},
            "_pending": None,
            "_session": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _taps=WeakKeyDictionary())

    # -- hooks ---------------------------------------------------------------------------------

    def attach_hooks(self) -> None:
        """Let sessions place hooks (the state after construction). Calling it again changes nothing."""
        self.attached = True
        if self._everywhere or has_compiled(self.model):
            for module in self.model.modules():
                for kind in ("inputs", "outputs"):
                    self._tap(module, kind)

    def detach_hooks(self) -> None:
        """Remove every hook of this catcher. Calling it again changes nothing."""
        if self._session is not None:
            raise RuntimeError("a session is open: leave its with block before detaching the hooks")
        _remove_hooks(self._taps)
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
        if spec.saved:
            raise ValueError(
                f"{ProductSpec(saved=spec.saved)} names what a program saves, which is no module: "
                "it needs a Teacher(program=...)"
            )
        self._pending = self._resolve(spec), early_exit, threading.get_ident()
        return self

    def _resolve(self, spec: ProductSpec) -> ProductSpec:
        """`spec` in names of modules; selectors are looked up again when a module they found was replaced."""
        known = self._resolved.get(spec)
        if known is None or not all(self._is_current(item.name) for _, item in known):
            known = self._resolved[spec] = resolve_spec(self.model, spec)
            for _, item in known:
                self._target(item.name)
        return known

    def _is_current(self, name: str) -> bool:
        target = self._targets.get(name)
        return target is not None and _still_there(self.model, target)

    def _target(self, name: str) -> Target:
        """The module under `name` now: a layer that was replaced since is found again."""
        if not self._is_current(name):
            self._targets[name] = resolve_module(self.model, name)
        return self._targets[name]

    def __enter__(self) -> Capture:
        pending, self._pending = self._pending, None
        if pending is None or pending[2] != threading.get_ident():
            raise RuntimeError(
                "nothing is armed in this thread: write `with catcher.for_product(...)` or `with catcher(...)`, "
                "and give each thread a catcher of its own"
            )
        if not self.attached:
            raise RuntimeError("the hooks were detached: call attach_hooks() first")
        if not self._taps:
            self.attach_hooks()  # the model may have been compiled, or this catcher copied, since
        spec, early_exit, _ = pending
        targets = {item.name: self._target(item.name) for _, item in spec}
        buffer = Capture(spec, {name: target.module for name, target in targets.items()}, _weakly(self))
        session = _Session(spec, buffer, self.device, early_exit, self.copy)
        with _OPENING:
            if self._session is not None:
                where = "around this one" if self._session.thread == session.thread else "in another thread"
                raise RuntimeError(
                    f"this catcher has a session open {where}, and one at a time is what a catcher has: "
                    "make a second ModelIOCatcher on the model"
                )
            self._session = session
        try:
            for name, kind in session.needed:
                self._tap(targets[name].module, kind).watch(session, (name, kind))
        except BaseException:
            self._close()
            raise
        return session.buffer

    def _close(self) -> None:
        session, self._session = self._session, None
        for tap in session.taps if session is not None else ():
            tap.disarm()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        session = self._session
        self._close()
        if session is not None and error is None:
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
        if session.budget and has_compiled(self.model):
            missed = ", ".join(f"{kind}[{name}]" for name, kind in session.budget)
            raise RuntimeError(
                f"{missed} never fired in a compiled model: compiled code does not see hooks that are added after its "
                "first call. Make the catcher before that call, or call torch.compiler.reset() and run again"
            )
        session.warn_overwritten(since=session.seen)
        return output


def _item(name: str) -> Item:
    if not isinstance(name, str):
        raise TypeError(
            f"a module is given by its name, got {type(name).__name__}: dict(model.named_modules()) has the names"
        )
    return Item.parse(name or ".")


def _weakly(catcher: ModelIOCatcher) -> Callable[[ProductSpec], ProductSpec]:
    """How a buffer reads selectors: through its catcher, which it must not keep alive."""
    weak = ref(catcher)

    def resolve(spec: ProductSpec) -> ProductSpec:
        alive = weak()
        return spec if alive is None else alive._resolve(spec)

    return resolve


def _still_there(model: nn.Module, target: Target) -> bool:
    module: nn.Module | None = model
    for part in target.path.split(".") if target.path else ():
        if module is None or part not in module._modules:
            return False
        module = module._modules[part]
    return module is target.module


def _remove_hooks(placed: WeakKeyDictionary[nn.Module, dict[Kind, tuple[_Tap, Any]]]) -> None:
    for taps in list(placed.values()):
        for _, handle in taps.values():
            handle.remove()
    placed.clear()
