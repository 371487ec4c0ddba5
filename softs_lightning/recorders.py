"""Declarations: which submodules of a model record which of its outputs.

A model's class says under ``_can_record_outputs`` what can be recorded while it runs::

    _can_record_outputs = {
        "hidden_states": MyDecoderBlock,                                   # a class
        "attentions": OutputRecorder(MyAttention, index=1, layer_name="self_attn"),
        "router_logits": ["MyRouter", SharedRouter],                       # a name; a list of any of these
    }

transformers' models carry the same attribute and are read in the same way, without importing
transformers. :func:`find_recorded` answers which modules a declaration means;
``softs_lightning.recording`` collects from them and ``softs_lightning.selectors`` names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from softs_lightning.names import class_names, has_fragment, strip_wrappers
from softs_lightning.product import describe

__all__ = [
    "DECLARATION",
    "OutputRecorder",
    "Recorded",
    "configured",
    "declared",
    "find_recorded",
    "own_modules",
    "ties_last_hidden_state",
]

DECLARATION = "_can_record_outputs"


@dataclass(frozen=True)
class OutputRecorder:
    """Which submodules to record, and which part of what they return.

    Args:
        target_class: a module class (its subclasses count), or a string. A string names a class,
            a base class included; where no module has such a class it is the end of a module's
            name, in whole components (``"self_attn"``, ``"encoder.block"``).
        index: the element to take from a tuple or a list that the module returns. A module that
            returns one tensor gives that tensor.
        layer_name: keep only modules whose name has this dotted fragment, in whole components:
            ``"crossattention"`` is not ``"my_crossattention"``.
        class_name: another way to give a string; used where `target_class` is ``None``.
        capture_initial_hidden_state: whether ``hidden_states`` begins with the first module's input.

    Raises:
        TypeError: for a target that is neither a module class nor a string.

    >>> OutputRecorder(nn.MultiheadAttention, index=1, layer_name="crossattention").index
    1
    """

    target_class: type[nn.Module] | str | None
    index: int = 0
    layer_name: str | None = None
    class_name: str | None = None
    capture_initial_hidden_state: bool = True

    def __post_init__(self) -> None:
        target = self.target
        named = isinstance(target, str) and bool(target.strip("."))
        if not named and not (isinstance(target, type) and issubclass(target, nn.Module)):
            raise TypeError(
                f"a recorder's target_class must be a torch.nn.Module class or its name, got {target!r}"
            )
        if not isinstance(self.index, int) or isinstance(self.index, bool):
            raise TypeError(f"a recorder's index must be an int, got {self.index!r}")
        if self.layer_name is not None and not (
            isinstance(self.layer_name, str) and self.layer_name.strip(".")
        ):
            raise TypeError(
                f"a recorder's layer_name must be a part of a module's name, got {self.layer_name!r}"
            )

    @property
    def target(self) -> type[nn.Module] | str | None:
        return self.class_name if self.target_class is None else self.target_class

    def __str__(self) -> str:
        name = self.target.__name__ if isinstance(self.target, type) else repr(self.target)
        return name if self.layer_name is None else f"{name} within {self.layer_name!r}"


@dataclass(frozen=True)
class Recorded:
    """One module that a declaration means: `path` is its name below the model that declares."""

    key: str
    path: str
    module: nn.Module
    recorder: OutputRecorder


def declares(module: nn.Module) -> bool:
    """Whether the module is a model with declarations of its own, perhaps empty ones."""
    return hasattr(module, DECLARATION)


def declared(model: nn.Module) -> dict[str, tuple[OutputRecorder, ...]]:
    """What a model declares: for each key its recorders, every accepted form read into :class:`OutputRecorder`.

    Raises:
        TypeError: for a declaration that is none of the accepted forms.

    >>> class Net(nn.Sequential):
    ...     _can_record_outputs = {"attentions": ["Attention", [nn.MultiheadAttention]]}
    >>> [recorder.index for recorder in declared(Net())["attentions"]]
    [1, 1]
    """
    declaration = getattr(model, DECLARATION, None)
    if declaration is None:
        return {}
    if not isinstance(declaration, Mapping):
        raise TypeError(
            f"{type(model).__name__}.{DECLARATION} must map the name of an output to module classes, "
            f"got {describe(declaration)}"
        )
    return {key: tuple(_recorders(model, key, value)) for key, value in declaration.items()}


def _recorders(model: nn.Module, key: str, value: Any) -> Iterator[OutputRecorder]:
    if isinstance(value, OutputRecorder):
        yield value
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from _recorders(model, key, one)
    elif hasattr(value, "target_class") and hasattr(value, "index"):  # transformers' own OutputRecorder
        options = ("class_name", "capture_initial_hidden_state")
        given = {name: getattr(value, name) for name in options if hasattr(value, name)}
        yield OutputRecorder(value.target_class, value.index, value.layer_name, **given)
    else:
        try:
            yield OutputRecorder(value, index=0 if "hidden_states" in key else 1)
        except TypeError:
            raise TypeError(
                f"{type(model).__name__}.{DECLARATION}[{key!r}] must be a module class, the name of one, an "
                f"OutputRecorder or a list of those, got {value!r}"
            ) from None


def find_recorded(model: nn.Module, keys: Iterable[str] | None = None) -> list[Recorded]:
    """The modules that `model` declares to record, in the order of its modules.

    A submodel with declarations of its own keeps its modules to itself.

    Args:
        keys: which outputs; by default all that are declared.

    >>> class Net(nn.Sequential):
    ...     _can_record_outputs = {"hidden_states": "ReLU"}
    >>> [found.path for found in find_recorded(Net(nn.Linear(2, 2), nn.ReLU(), nn.ReLU()))]
    ['1', '2']
    """
    wanted = None if keys is None else set(keys)
    recorders = [
        (key, one)
        for key, several in declared(model).items()
        if wanted is None or key in wanted
        for one in several
    ]
    modules = list(own_modules(model))
    by_name = any(isinstance(recorder.target, str) for _, recorder in recorders)
    known = {name for _, module in modules for name in class_names(module)} if by_name else set()
    found: dict[tuple[str, int, int], Recorded] = {}
    for path, module in modules:
        for key, recorder in recorders:
            if _matches(recorder, path, module, known):
                # Two recorders of one key that mean the same value record it once.
                found.setdefault((key, id(module), recorder.index), Recorded(key, path, module, recorder))
    return list(found.values())


def own_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The model and what is below it, with their names, down to submodels with declarations of their own."""
    seen: set[nn.Module] = set()
    waiting = [("", model)]
    while waiting:
        path, module = waiting.pop()
        if module in seen or (module is not model and declares(module)):
            continue
        seen.add(module)
        yield path, module
        children = [(f"{path}.{name}".lstrip("."), child) for name, child in module.named_children()]
        waiting += reversed(children)


def _matches(recorder: OutputRecorder, path: str, module: nn.Module, known: set[str]) -> bool:
    bare = strip_wrappers(path)
    if recorder.layer_name is not None and not has_fragment(bare, recorder.layer_name):
        return False
    target = recorder.target
    if isinstance(target, type):
        return isinstance(module, target)
    if target in known:
        return target in class_names(module)
    return f".{bare}".endswith(f".{str(target).strip('.')}")


def configured(model: nn.Module, name: str) -> Any:
    """``model.config.<name>``, or ``None`` where there is no config or no such setting.

    >>> configured(nn.Linear(2, 2), "output_attentions") is None
    True
    """
    config = getattr(model, "config", None)
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def ties_last_hidden_state(model: nn.Module) -> bool:
    """Whether the last of the model's ``hidden_states`` is its ``last_hidden_state``, after a final norm.

    ``config.tie_last_hidden_states`` says so, or else the ``tie_last_hidden_states=`` of the
    ``capture_outputs`` around the model's ``forward``, this package's or transformers'. A forward
    without the decorator ties nothing.

    >>> ties_last_hidden_state(nn.Linear(2, 2))
    False
    """
    setting = configured(model, "tie_last_hidden_states")
    if setting is not None:
        return bool(setting)
    function: Any = getattr(model.forward, "__func__", model.forward)
    while function is not None:
        if hasattr(function, "_ties_last_hidden_state"):
            return bool(function._ties_last_hidden_state)
        # transformers keeps the setting nowhere but in the closure of its decorator.
        code = getattr(function, "__code__", None)
        if code is not None and "tie_last_hidden_states" in code.co_freevars:
            cell = function.__closure__[code.co_freevars.index("tie_last_hidden_states")]
            return bool(cell.cell_contents)
        function = getattr(function, "__wrapped__", None)
    return False
