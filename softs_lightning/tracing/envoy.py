"""A model seen from a block: its tree of modules, with what goes in and comes out of each."""

import functools
import inspect
from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from softs_lightning.names import nearest, quoted
from softs_lightning.tracing.capture import FunctionBody
from softs_lightning.tracing.interleave import Run
from softs_lightning.tracing.invoke import Outcome
from softs_lightning.tracing.reads import Where
from softs_lightning.tracing.scan import ScanningTracer
from softs_lightning.tracing.tracer import InterleavingTracer
from softs_lightning.tracing.worker import ACTIVE, ENTRY, OUTPUT, Worker, current_worker

__all__ = ["Envoy"]


class Envoy:
    """Wraps a model so that a with block can read and change its forward pass.

    It mirrors the tree of modules: attributes, indices and iteration lead to envoys of submodules, everything
    else comes from the module. A submodule whose name is taken by the envoy (``output``, as in BERT) is
    ``envoy["output"]``; so is one deeper down, ``envoy["encoder.layer.0"]``.

    Nothing is installed on the model until a trace runs, and nothing stays afterwards. What the forward of a
    module takes and returns is seen; forward hooks that somebody registered run around that.

    Args:
        module: any module. A compiled one is traced eagerly and stays compiled.
        tokenizer: turns text into the model's input, where a trace is given text.
        name: what paths start with.

    >>> import torch
    >>> from softs_lightning.tracing import Envoy
    >>> model = Envoy(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()))
    >>> with model.trace(torch.ones(1, 2)):
    ...     hidden = model[0].output.save()
    ...     model[1].input = torch.full((1, 3), 7.0)
    ...     result = model.output.save()
    >>> hidden.shape, result
    (torch.Size([1, 3]), tensor([[7., 7., 7.]]))
    """

    __slots__ = ("__weakref__", "_children", "_module", "_path", "_tokenizer")

    def __init__(self, module: nn.Module, *, tokenizer: Any = None, name: str = "model") -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"an envoy is for a torch.nn.Module, got {type(module).__name__}")
        compiled = module._modules.get("_orig_mod") if hasattr(module, "dynamo_ctx") else None
        self._module = compiled if compiled is not None else module
        self._path = name
        self._tokenizer = tokenizer
        self._children: dict[str, Envoy] = {}

    @property
    def module(self) -> nn.Module:
        """The module itself."""
        return self._module

    @property
    def path(self) -> str:
        """Where the module is, from the name of the model on: ``"model.encoder.layer.0"``."""
        return self._path

    # In a block: what goes in and comes out.

    @property
    def output(self) -> Any:
        """What the module returns. Reading waits for it; assigning replaces it; in-place changes count too."""
        return self._worker("output").read(id(self._module), OUTPUT, f"{self._path}.output")

    @output.setter
    def output(self, value: Any) -> None:
        self._worker("output").write(id(self._module), OUTPUT, f"{self._path}.output", value)

    @property
    def inputs(self) -> Any:
        """What the module is called with, as (args, kwargs); can be assigned."""
        return self._worker("inputs").read(id(self._module), ENTRY, f"{self._path}.input")

    @inputs.setter
    def inputs(self, value: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        pair = isinstance(value, tuple) and len(value) == 2
        if not pair or not isinstance(value[0], tuple) or not isinstance(value[1], dict):
            raise TypeError(
                f"{self._path}.inputs is a pair of (args, kwargs), a tuple and a dict; got {value!r}"
            )
        self._worker("inputs").write(id(self._module), ENTRY, f"{self._path}.input", value)

    @property
    def input(self) -> Any:
        """The first argument of the module: the first positional, else the first keyword; can be assigned."""
        args, kwargs = self._given()
        return args[0] if args else next(iter(kwargs.values()))

    @input.setter
    def input(self, value: Any) -> None:
        args, kwargs = self._given()
        self.inputs = ((value, *args[1:]), kwargs) if args else ((), {**kwargs, next(iter(kwargs)): value})

    def _given(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = self.inputs
        if not args and not kwargs:
            raise ValueError(f"{self._path} is called without arguments, so it has no input")
        return args, kwargs

    def skip(self, value: Any) -> None:
        """Keep the module from running, with ``value`` in place of what it would return.

        ``layer.skip(layer.input)`` takes a layer out. Modules inside of it are not reached then.
        """
        self._worker("skip").skip(id(self._module), f"{self._path}.input", value)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply the module to anything, in a block or not. It is not a visit: nobody sees its input or output."""
        return self._module(*args, **kwargs)

    def _locate(self, run: Run, steps: Sequence[tuple[bool, Any]], kind: str) -> Where | None:
        envoy = self
        for index, key in steps:
            module = envoy._module
            try:
                if index:
                    envoy = envoy[key]
                elif key in _NAMES or hasattr(type(module), key):
                    return None
                else:
                    envoy = envoy._child(key, module._modules[key])
            except (LookupError, TypeError):
                return None
        if kind not in _KINDS:
            return None
        return id(envoy._module), _KINDS[kind], f"{envoy._path}.{_KINDS[kind]}"

    def _worker(self, what: str) -> Worker:
        return current_worker(f"{self._path}.{what}")

    # From outside: traces.

    def trace(self, /, *args: Any, **kwargs: Any) -> InterleavingTracer:
        """Call the module with these arguments, and run the body of the with statement along with it.

        Without an input (no positional argument and no tensor), the body gives it with `InterleavingTracer.invoke`.
        Use it as a decorator where there is no source: ``@model.trace(x)`` over ``def block(tracer): ...`` runs
        the function as the body, and its name then stands for what it returned.
        """
        return InterleavingTracer(self, None, *args, **kwargs)

    def scan(self, /, *args: Any, **kwargs: Any) -> ScanningTracer:
        """The same as `trace`, with fake tensors: shapes, dtypes and devices without compute or weights.

        >>> import torch
        >>> from softs_lightning.tracing import Envoy
        >>> with torch.device("meta"):
        ...     model = Envoy(torch.nn.Sequential(torch.nn.Linear(9000, 8000), torch.nn.ReLU()))
        >>> with model.scan(torch.ones(2, 9000)):
        ...     shape = model[0].output.shape.save()
        >>> shape
        torch.Size([2, 8000])
        """
        return ScanningTracer(self, None, *args, **kwargs)

    def run(
        self,
        program: Callable[..., Any],
        /,
        *args: Any,
        method: str | None = None,
        scan: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Run a function as the block of a trace, and return what it saved.

        Args:
            program: called as ``program(envoy)`` or ``program(envoy, tracer)``.
            args: what the module is called with.
            method: the name of a method to call in place of the module, such as ``"generate"``.
            scan: whether to run under fake tensors, as `scan` does.
            kwargs: what the module is called with.

        Returns:
            What it saved by ``save(value, name)``, and the items of a mapping that it returned, with the values
            of functions decorated with ``@tracer.invoke(...)`` in place of their `Outcome`.

        Raises:
            TypeError: it returned something else.
            ValueError: a key of what it returned is the name of another saved value.

        >>> import torch
        >>> from softs_lightning.tracing import Envoy
        >>> model = Envoy(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()))
        >>> def program(model):
        ...     model[0].output[:] = -1
        ...     return {"activation": model[1].output}
        >>> with torch.no_grad():
        ...     model.run(program, torch.ones(1, 2))
        {'activation': tensor([[0., 0., 0.]])}
        """
        tracer = (ScanningTracer if scan else InterleavingTracer)(self, method, *args, **kwargs)
        body = FunctionBody(program, (self, tracer))
        try:
            named = tracer._execute(body)
            returned = {} if body.value is None else body.value
        finally:
            body.release()
        if not isinstance(returned, Mapping):
            raise TypeError(
                f"{program!r} returned a {type(returned).__name__}; return a mapping of names, or save(value, name)"
            )
        if both := named.keys() & returned.keys():
            raise ValueError(f"{program!r} both saved and returned {', '.join(sorted(both))}")
        values = {name: each.value if isinstance(each, Outcome) else each for name, each in returned.items()}
        return {**named, **values}

    # The tree.

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in self.__slots__:
            raise AttributeError(name)
        module = self._module
        try:
            value = getattr(module, name)
        except AttributeError:
            near = ", ".join(nearest(name, [*module._modules, *dir(type(self))], 2))
            hint = f"; did you mean {near}?" if near else ""
            raise AttributeError(f"{self._path} ({type(module).__name__}) has no {name!r}{hint}") from None
        if isinstance(value, nn.Module):
            return self._child(name, value)
        if ACTIVE.worker is None and ACTIVE.collecting is None and _is_own_method(module, name, value):
            return functools.partial(InterleavingTracer, self, name)
        return value

    def _child(self, name: str, module: nn.Module | None) -> "Envoy":
        if module is None:
            raise KeyError(f"{self._path}.{name} is None")
        child = self._children.get(name)
        if child is None or child._module is not module:  # the model may have replaced it
            child = Envoy(module, tokenizer=self._tokenizer, name=f"{self._path}.{name}")
            if name in self._module._modules:
                self._children[name] = child
        return child

    def __getitem__(self, key: Any) -> Any:
        """A child by its index, a list of them by a slice, a module below by its dotted path."""
        if isinstance(key, str):
            envoy = self
            for part in key.split("."):
                if envoy._module._modules.get(part) is None:
                    near = quoted(nearest(key, [name for name, _ in self._module.named_modules()], 3))
                    raise KeyError(f"{self._path} has no module {key!r}; the nearest are {near}")
                envoy = envoy._child(part, envoy._module._modules[part])
            return envoy
        if not isinstance(self._module, _INDEXED):
            raise TypeError(f"{self._path} is a {type(self._module).__name__}; its children go by name")
        children = self._module._modules
        if isinstance(key, slice):
            return [self._child(name, each) for name, each in list(children.items())[key] if each is not None]
        try:
            name = list(children)[key]
        except IndexError:
            raise IndexError(f"{self._path} has {len(children)} modules, there is no [{key}]") from None
        return self._child(name, children[name])

    def __iter__(self) -> Iterator[Any]:
        """The envoys of the children; of an ``nn.ModuleDict`` its keys, as for a mapping."""
        mapping = isinstance(self._module, nn.ModuleDict)
        return iter(list(self._module._modules) if mapping else [child for _, child in self.items()])

    def items(self) -> ItemsView[str, "Envoy"]:
        """The children by name."""
        return {name: self[name] for name, each in self._module._modules.items() if each is not None}.items()

    def __len__(self) -> int:
        return len(self._module._modules)

    def __bool__(self) -> bool:
        return True

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self._module)})

    def __repr__(self) -> str:
        return f"{self._path}: {self._module!r}"


_NAMES = frozenset(dir(Envoy))
_INDEXED = nn.Sequential, nn.ModuleList
_KINDS = {"output": OUTPUT, "inputs": ENTRY, "input": ENTRY}


def _is_own_method(module: nn.Module, name: str, value: Any) -> bool:
    """Whether it is a method of the model, such as ``generate``; those of torch's own classes are just called."""
    if not inspect.ismethod(value) or value.__self__ is not module:
        return False
    definer = next((each for each in type(module).__mro__ if name in each.__dict__), torch.nn.Module)
    return not hasattr(nn.Module, name) and not definer.__module__.startswith("torch.")
