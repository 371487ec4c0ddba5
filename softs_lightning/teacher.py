"""The frozen teacher: built late, placed like the student, fed a batch, asked for products.

:class:`Teacher` owns the module for the length of one fit. What the user handed over is given
back as it was: modes, ``requires_grad`` flags, device and dtype.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from softs_lightning.catcher import Capture, ModelIOCatcher
from softs_lightning.feeding import Takes, feed
from softs_lightning.lending import borrow
from softs_lightning.placement import after_forward, checked, is_spread, shard
from softs_lightning.product import ProductSpec
from softs_lightning.selectors import has_selector, resolve_spec
from softs_lightning.transfer import map_tensors, transfer_to_device

if TYPE_CHECKING:
    from softs_lightning.compiled import CompiledPrefix

__all__ = ["Cost", "Teacher", "add_saved", "arguments", "flop_counter"]


@dataclass(frozen=True)
class Cost:
    """What a product costs: floating point operations of one forward, whole and up to the early exit.

    Attributes:
        full: operations of the whole forward (matrix products, convolutions and attention are counted).
        used: operations of the forward that stops when the product is complete.
        stop: the name of the module at which it stops; ``None`` when it runs to its end.
    """

    full: int
    used: int
    stop: str | None

    @property
    def saved(self) -> float:
        """The share of the operations that the early exit saves, between 0 and 1."""
        return 1 - self.used / self.full if self.full else 0.0


def flop_counter() -> FlopCounterMode:
    """Torch's counter, with the attention kernel of the CPU that it leaves out."""

    count: Callable[..., int] = sdpa_flop_count

    def attention(q: torch.Size, k: torch.Size, v: torch.Size, *_: Any, **__: Any) -> int:
        return count(q, k, v)

    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return FlopCounterMode(display=False, custom_mapping={kernel: attention})


class Teacher:
    """A frozen model that supplies products.

    Args:
        source: the module, or a function without required arguments that returns it. A function is
            called only when a fit begins, so that validating, testing and predicting never load the teacher.
        inputs: ``inputs(batch)`` gives what the teacher is called with: a mapping is passed by
            keyword, a tuple by position, anything else as the only argument. Without it the batch
            is fed by the teacher's own signature, see :func:`softs_lightning.feeding.feed`.
        early_exit: stop each forward when the last product is captured.
        copy: capture copies, for teachers that write into their activations in place.
        program: a function of an :class:`softs_lightning.tracing.Envoy` (and, if it takes two arguments,
            of the tracer) that runs as the block of a trace in each step. It may change the forward;
            what it saves by ``save(value, "name")`` or returns in a mapping, pairs name as
            ``saved[name]``. It decides where the forward stops, with ``tracer.stop()``.
        method: the method that the program's trace calls in place of the forward, such as ``"generate"``.
        dtype: run in this floating point type (``torch.bfloat16`` or ``"bfloat16"``), inputs included
            and outside autocast, whatever the precision of the training is.
        compile: compile the part before the exit as one graph (:mod:`softs_lightning.compiled`), by
            ``torch.compile``'s default backend or the one named.
        placement: where it lies, see :mod:`softs_lightning.placement`: ``"replicated"``, whole on the device of each
            rank; ``"sharded"``, spread over all ranks by FSDP2 and gathered layer by layer as it runs; ``"cpu"``,
            where it runs too. A module that is handed over is copied to be sharded; what a factory returns is
            sharded itself.

    Raises:
        ValueError: for an unknown placement, and for options that cannot be combined.
        TypeError: when `source` is neither a module nor a function, or returns no module.

    >>> teacher = Teacher(nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1)))
    >>> teacher.place()
    >>> spec = ProductSpec.parse("outputs[0]")
    >>> teacher.supply(torch.ones(4, 2), spec).select()[0].shape
    torch.Size([4, 3])
    >>> teacher.cost(torch.ones(4, 2), spec).stop
    '0'
    """

    def __init__(
        self,
        source: Callable[[], nn.Module] | nn.Module,
        *,
        inputs: Callable[[Any], Any] | None = None,
        early_exit: bool = True,
        copy: bool = False,
        program: Callable[..., Any] | None = None,
        method: str | None = None,
        dtype: torch.dtype | str | None = None,
        compile: bool | str = False,
        placement: str = "replicated",
    ) -> None:
        self.placement = checked(placement)
        if not isinstance(compile, (bool, str)):
            raise TypeError(
                f"a teacher is compiled with True or the name of a backend of torch.compile, got {compile!r}"
            )
        if placement == "sharded" and compile:
            raise ValueError(
                "a compiled graph cannot gather the layers of a sharded teacher: leave compile out"
            )
        if placement == "sharded" and program is not None:
            raise ValueError(
                "a program may read any part of a model at any time, and a sharded teacher is never whole: use "
                "placement='cpu', or leave the program out"
            )
        if compile and copy:
            raise ValueError("a compiled teacher keeps no copies: leave copy out, or compile")
        if compile and program is not None:
            raise ValueError(
                "a program runs beside the forward, which is not compiled then: leave compile out"
            )
        if not isinstance(source, nn.Module) and not callable(source):
            raise TypeError(f"a teacher is a torch.nn.Module or a function that returns one, got {source!r}")
        if not isinstance(source, nn.Module):
            _refuse_required_arguments(source)
        if inputs is not None and not callable(inputs):
            raise TypeError(f"teacher inputs must be a function of the batch, got {inputs!r}")
        if program is not None and not callable(program):
            raise TypeError(f"a program is a function of an envoy, got {program!r}")
        if method is not None and program is None:
            raise ValueError("method is what the program's trace calls: give program too")
        self.source = source
        self.inputs = inputs
        self.early_exit = early_exit
        self.copy = copy
        self.program = program
        self.method = method
        self.dtype = _floating(dtype)
        self.compile = compile
        self.module: nn.Module | None = None
        self._catcher: ModelIOCatcher | None = None
        self._modules: list[nn.Module] = []
        self._takes: Takes | None = None
        self._prefixes: dict[ProductSpec, CompiledPrefix] = {}
        self._give_back: Callable[[], None] | None = None
        self._sharded = False

    def build(self) -> nn.Module:
        """The teacher's module, made by the factory if there is one; neither frozen nor placed yet."""
        if isinstance(self.source, nn.Module):
            return self.source
        module = self.source()
        if not isinstance(module, nn.Module):
            raise TypeError(
                f"the teacher factory {self.source!r} returned {type(module).__name__}, not a module"
            )
        return module

    def place(
        self,
        device: torch.device | str | None = None,
        convert: Callable[[nn.Module], nn.Module] | None = None,
        *,
        student: nn.Module | None = None,
    ) -> None:
        """Build the teacher if need be, freeze it, and move it.

        Args:
            device: where it runs and where its products end up; ``None`` leaves it where it is.
            convert: a precision plugin's ``convert_module``. A module that the user handed over is
                copied first if this would change its dtype or its layers, which could not be undone.
            student: refused if it shares a parameter with the teacher, since freezing would stop
                its training.

        Raises:
            ValueError: when teacher and student share parameters, and for a backend that torch.compile lacks.
        """
        self.release()
        if isinstance(self.compile, str):
            from softs_lightning.compiled import check_backend  # its compiler takes seconds to import

            check_backend(self.compile)
        if self.dtype is not None:
            convert = partial(_to_dtype, dtype=self.dtype)
        module = self.build()
        if student is not None:
            _refuse_shared(module, student)
        _refuse_meta(module)
        if convert is not None:
            _refuse_packed(module, convert)
        ours = module is not self.source
        self._sharded = self.placement == "sharded" and is_spread()
        if not ours and (self._sharded or (convert is not None and _changes(module, convert))):
            module, ours = copy.deepcopy(module), True
        if not self._sharded:  # what was noted of it would keep the whole of a sharded one in memory
            # A factory may return a module that is used elsewhere too; that it stays on the device is its affair.
            self._give_back = borrow(module, move=not ours)
        try:
            module.requires_grad_(False).eval()
            if device is not None and not self._sharded:
                module.to("cpu" if self.placement == "cpu" else device)
            if convert is not None:
                module = convert(module)
            if self._sharded:
                shard(module, _device_of(module) if device is None else torch.device(device))
            self._catcher = ModelIOCatcher(module, device, copy=self.copy)
        except BaseException:
            self.release()
            raise
        self.module = module
        self._modules = list(module.modules())

    def release(self) -> None:
        """Remove the hooks and give the user's module back as it was. Calling it again changes nothing."""
        if self._catcher is not None:
            self._catcher.detach_hooks()
        for prefix in self._prefixes.values():
            prefix.close()
        self._prefixes = {}
        if self._give_back is not None:
            self._give_back()
        self.module = self._catcher = self._give_back = self._takes = None
        self._modules = []
        self._sharded = False

    @property
    def device(self) -> torch.device | None:
        """Where its products end up; ``None`` for where it happens to run."""
        return self._require()[1].device

    def resolve(self, spec: ProductSpec) -> ProductSpec:
        """`spec` with what its selectors mean in this model.

        Names without selectors stay as they are where :meth:`check` accepts what the module does not
        have: a teacher's products need not come from a live model.

        Raises:
            KeyError: for a selector that selects nothing.
        """
        try:
            return resolve_spec(self._require()[0], spec)
        except KeyError:
            if has_selector(spec):
                raise
            self.check(spec)
            return spec

    def check(self, spec: ProductSpec) -> None:
        """Raise ``KeyError`` for a name that is not in the teacher, ``ValueError`` for what only a program saves.

        The names that a program saves are known when it has run.
        """
        _, catcher = self._require()
        if spec.saved and self.program is not None:
            spec = replace(spec, saved=())
        if spec or self.program is None:
            catcher.for_product(spec)

    def supply(self, batch: Any, spec: ProductSpec) -> Capture:
        """Run one forward on `batch` without gradients, up to the last activation of `spec`.

        Returns:
            the filled buffer; ``buffer.select(spec)`` gives the values.

        Raises:
            TypeError: when the batch lacks what the teacher's forward requires.
        """
        module, catcher = self._require()
        if any(m.training for m in self._modules):
            module.eval()
        args, kwargs = self._brought(self.arguments(batch))
        if self.program is not None:
            return self._supply_by_program(self.program, args, kwargs, spec)
        # no_grad and not inference_mode: its tensors could not enter a graph that trains.
        with torch.no_grad(), self._in_order(module):
            if self.compile:
                found: Capture = self._in_own_dtype(self._prefix(module, spec), args, kwargs)
                for kinds in found.values():
                    kinds.update(transfer_to_device(dict(kinds), catcher.device))
                return found
            with catcher.for_product(spec, early_exit=self.early_exit) as buffer:
                self._in_own_dtype(catcher.run, args, kwargs)
        return buffer

    def _brought(
        self, call: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the teacher is called with, where it runs."""
        return transfer_to_device(call, "cpu") if self.placement == "cpu" else call

    @contextmanager
    def _in_order(self, module: nn.Module) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            if self._sharded and "mixed torch.Tensor and DTensor" in str(error):
                raise RuntimeError(
                    f"{type(module).__name__} uses parameters of a layer outside of that layer's forward, where those of "
                    "a sharded teacher are not whole: use placement='cpu' or 'replicated'"
                ) from error
            raise
        finally:
            if self._sharded:
                after_forward(module)

    def _prefix(self, module: nn.Module, spec: ProductSpec) -> CompiledPrefix:
        if spec not in self._prefixes:
            from softs_lightning.compiled import CompiledPrefix  # its compiler takes seconds to import

            backend = self.compile if isinstance(self.compile, str) else "inductor"
            self._prefixes[spec] = CompiledPrefix(module, spec, backend=backend, early_exit=self.early_exit)
        return self._prefixes[spec]

    @property
    def compilations(self) -> int:
        """How many graphs were compiled for this teacher since it was placed."""
        return sum(prefix.compilations for prefix in self._prefixes.values())

    def _supply_by_program(
        self, program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], spec: ProductSpec
    ) -> Capture:
        from softs_lightning.tracing import Envoy

        module, catcher = self._require()
        hooked = replace(spec, saved=())
        run = partial(Envoy(module, name="teacher").run, program, method=self.method)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            buffer = Capture(spec, {})
            if hooked:
                buffer = stack.enter_context(catcher.for_product(hooked, early_exit=False))
            saved = self._in_own_dtype(run, args, kwargs)
        add_saved(buffer, spec, transfer_to_device(saved, catcher.device))
        return buffer

    def _in_own_dtype(self, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        dtype = self.dtype
        if dtype is None:
            return run(*args, **kwargs)
        args, kwargs = map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, (args, kwargs))
        device = torch.device("cpu") if self.placement == "cpu" else self._require()[1].device
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # "true" precisions of the student change it
        try:
            with torch.autocast("cpu" if device is None else device.type, enabled=False):
                return run(*args, **kwargs)
        finally:
            torch.set_default_dtype(default)

    def arguments(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the teacher is called with for `batch`, as (args, kwargs)."""
        module = self._require()[0]
        if self.inputs is None:
            if self._takes is None and not isinstance(batch, torch.Tensor):
                self._takes = Takes.of(module)
            return feed(module, batch, self._takes)
        return arguments(module, batch, self.inputs)

    def inspect(self, dataset: Any) -> None:
        """See the training data before the first step; a stored teacher refuses random augmentations."""

    def commit(self) -> int:
        """Make lasting what waits to be kept, at the end of an epoch; a live teacher keeps nothing."""
        return 0

    def cost(self, batch: Any, spec: ProductSpec) -> Cost:
        """Count the operations of a whole forward and of one that stops when `spec` is complete."""
        module, _ = self._require()
        args, kwargs = self._brought(self.arguments(batch))
        with torch.no_grad(), self._in_order(module), flop_counter() as whole:
            module(*args, **kwargs)
        with flop_counter() as part:
            buffer = self.supply(batch, spec)
        return Cost(whole.get_total_flops(), part.get_total_flops(), buffer.stopped_at)

    def _require(self) -> tuple[nn.Module, ModelIOCatcher]:
        if self.module is None or self._catcher is None:
            raise RuntimeError("the teacher is not placed: call place() first, or let a fit do it")
        return self.module, self._catcher


def _device_of(module: nn.Module) -> torch.device:
    return next((tensor.device for tensor in module.parameters()), torch.device("cpu"))


def _floating(dtype: torch.dtype | str | None) -> torch.dtype | None:
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(
            f"the teacher's dtype must be a floating point type such as 'bfloat16', got {dtype!r}"
        )
    return found


def _to_dtype(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    return module.to(dtype)


def add_saved(buffer: Capture, spec: ProductSpec, saved: Mapping[str, Any]) -> None:
    """Put what a program saved into a buffer, under the names that `spec` asks for.

    Raises:
        LookupError: for a name that was not saved.
    """
    buffer.spec = spec
    for item in spec.saved:
        if item.name not in saved:
            there = ", ".join(map(repr, saved)) or "nothing at all"
            raise LookupError(f"saved[{item}]: the program saved nothing under {item.name!r}, only {there}")
        buffer.setdefault(item.name, {})["saved"] = [saved[item.name]]


def arguments(
    module: nn.Module, batch: Any, inputs: Callable[[Any], Any] | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a teacher is called with for a batch, as (args, kwargs): what `inputs` says, or its own signature."""
    if inputs is None:
        return feed(module, batch)
    given = inputs(batch)
    if given is None:
        raise TypeError(
            f"teacher_inputs, {getattr(inputs, '__name__', inputs)!r}, returned None: return what the teacher is called "
            "with, a mapping by keyword, a tuple by position, or its only argument"
        )
    if isinstance(given, Mapping):
        return (), dict(given)
    if isinstance(given, tuple):
        return given, {}
    return (given,), {}


def _refuse_required_arguments(factory: Callable[..., Any]) -> None:
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some builtins have none
        return
    try:
        signature.bind()
    except TypeError as error:
        name = getattr(factory, "__name__", repr(factory))
        raise TypeError(
            f"the teacher factory {name}{signature} is called without arguments, and {error}: wrap it, as in "
            f"functools.partial({name}, ...)"
        ) from None


def _refuse_shared(teacher: nn.Module, student: nn.Module) -> None:
    own = {id(p): name for name, p in student.named_parameters(remove_duplicate=False)}
    for name, parameter in teacher.named_parameters(remove_duplicate=False):
        if id(parameter) in own:
            raise ValueError(
                f"teacher and student share the parameter {own[id(parameter)]!r} (the teacher's {name!r}): freezing "
                "the teacher would stop the student's training. Pass a copy: copy.deepcopy(module), or a factory"
            )


def _changes(module: nn.Module, convert: Callable[[nn.Module], nn.Module]) -> bool:
    """Whether a precision plugin gives a module like this one other types of numbers, or of layers."""
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    probe = nn.Sequential(nn.Linear(1, 1, dtype=dtype))
    before = [(type(m), [p.dtype for p in m.parameters()]) for m in probe.modules()]
    return before != [(type(m), [p.dtype for p in m.parameters()]) for m in convert(probe).modules()]


def _refuse_packed(module: nn.Module, convert: Callable[[nn.Module], nn.Module]) -> None:
    """Layers of ``torch.ao`` keep packed weights, which follow no conversion, and take float32 alone."""
    for name, layer in module.named_modules():
        kind = type(layer)
        if kind.__module__.startswith("torch.ao.nn.") and ".quantized." in kind.__module__:
            if _changes(module, convert):
                raise ValueError(
                    f"the teacher's {name!r} is quantised ({kind.__name__}) and computes in float32, and the precision asked "
                    "for is another one: teacher_dtype='float32' runs it so, whatever the precision of the training is"
                )
            return


def _refuse_meta(module: nn.Module) -> None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.is_meta:
            raise ValueError(
                f"the teacher's {name!r} is on the meta device, so it has no values: load the weights first, or "
                "give a factory that does"
            )
