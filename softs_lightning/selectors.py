"""From what a product_id names to the modules of a real model.

==============================  ====================================================================
``model.layers.0``              the module of that name in ``model.named_modules()``; wins over every
                                other reading
``.``                           the model itself
``model.layers.*``              globs, ranges, positions from the end: ``model.layers.{0..5}``,
``model.layers.-1``             ``model.layers.{1..-1..2}``, ``**.mlp`` (``softs_lightning.patterns``)
``@LlamaMLP``                   every module of the class, of its subclasses and of the class that is
                                registered to replace it; the full name,
                                ``@torch.nn.modules.linear.Linear``, tells namesakes apart
``@Attention:crossattention``   those whose name has that dotted fragment
``%attentions``                 what the model records under that key, as ``_can_record_outputs`` says
``%hidden_states.-1``           one of them, or a range: ``%hidden_states.{0..-2}``
``encoder@Block``               only below ``encoder``, which may be a pattern
``decoder%attentions``          only of the model ``decoder``, or of one below it
``...#0``, ``...#0?``           then a part of the value: an element; an element if it is a tuple
``...!3``                       then the call: the fourth in one forward
==============================  ====================================================================

``outputs[%hidden_states]`` is exactly what the model returns for ``output_hidden_states=True``: what
the first layer is given, what each layer returns, and for the last layer, where the model ties it,
``last_hidden_state``, *after* the final norm. ``outputs[model.layers.-1#0?]`` is the last layer's own
output, *before* it. ``inputs[%attentions]`` is what the recording modules are called with.

A module that runs several times in one forward (ALBERT's one layer) is meant once; ``!`` says which
call. Under an early exit the first call ends the forward.

Selectors mean modules in the order of the model, each once, under its first name, and leave out
modules that are never called (``ModuleList``, the ``out_proj`` of ``nn.MultiheadAttention``). What
selects nothing is a ``KeyError``. Names in which other signs stand (a ``ModuleDict`` takes any key)
are found as written, unless ``| [ ] # !`` are in them. In YAML and on Hydra's command line the whole
product_id goes in quotes: ``'pair.teacher="outputs[%hidden_states.{0..3}]"'``.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from softs_lightning.names import (
    UnknownModuleError,
    class_names,
    has_fragment,
    nearest,
    quoted,
    strip_wrappers,
)
from softs_lightning.patching import find_replacement
from softs_lightning.patterns import expand, is_pattern, positions
from softs_lightning.product import Item, Kind, ProductSpec
from softs_lightning.recorders import Recorded, declared, find_recorded, ties_last_hidden_state

__all__ = [
    "ROOT",
    "Target",
    "UnknownModuleError",
    "all_names",
    "has_selector",
    "nearest",
    "never_called",
    "resolve_module",
    "resolve_spec",
    "strip_wrappers",
]

ROOT = "."
_BY_CLASS = re.compile(r"(?P<scope>[^@%]*)@(?P<class>[^@%:]*)(?::(?P<layer>[^@%]*))?")
_RECORDED = re.compile(r"(?P<scope>[^@%]*)%(?P<key>[^@%.]*)(?:\.(?P<at>[^@%]*))?")


@dataclass(frozen=True)
class Target:
    """A module found under a name: `path` is its place in the model as it stands, wrappers included."""

    path: str
    module: nn.Module


def resolve_module(model: nn.Module, name: str) -> Target:
    """The module that `name` means in `model`. Selectors are not names; see :func:`resolve_spec`.

    A name of ``model.named_modules()`` means that module; ``"."`` and ``""`` mean the model. Any
    other name is compared with wrappers left out on both sides.

    Raises:
        UnknownModuleError: (a ``KeyError``) with the nearest names.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> resolve_module(net, "1").module is net[1]
    True
    """
    if name in (ROOT, ""):
        return Target("", model)
    modules = all_names(model)
    found = _find(modules, name)
    if found is None:
        raise UnknownModuleError(_unknown(model, name, list(modules)))
    return found


def all_names(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of `model` under each of its names, as ``named_modules(remove_duplicate=False)`` has them.

    A module is not looked for inside of itself, where a model holds one that leads back to it.

    >>> net = nn.Sequential(nn.ReLU(), nn.Sequential())
    >>> net[1].add_module("up", net)
    >>> list(all_names(net))
    ['', '0', '1']
    """
    return dict(_walk("", model, ()))


def _walk(path: str, module: nn.Module, around: tuple[nn.Module, ...]) -> Iterator[tuple[str, nn.Module]]:
    yield path, module
    around = (*around, module)
    for name, child in module._modules.items():
        if child is not None and all(child is not each for each in around):
            yield from _walk(f"{path}.{name}" if path else name, child, around)


def _find(modules: dict[str, nn.Module], name: str) -> Target | None:
    if name in modules:
        return Target(name, modules[name])
    bare = strip_wrappers(name)
    found = sorted((path for path in modules if path and strip_wrappers(path) == bare), key=len)
    if not found or not bare:
        return None
    outermost = found[0]
    if any(not _inside(path, outermost) for path in found):
        raise UnknownModuleError(f"{name!r} could mean any of {quoted(found)}: write one of these")
    return Target(outermost, modules[outermost])


def _inside(path: str, outer: str) -> bool:
    """Whether `path` is `outer` or a chain of wrappers within it."""
    rest = path[len(outer) :]
    return path.startswith(outer) and not strip_wrappers(rest.lstrip("."))


def _unknown(model: nn.Module, name: str, names: list[str]) -> str:
    close = nearest(name, [n for n in names if n])
    hint = f"the nearest names are {quoted(close)}" if close else "no name is near it"
    children = quoted([n for n, _ in model.named_children()])
    return (
        f"{type(model).__name__} has no module named {name!r}: {hint}. "
        f"Its direct children are {children}; list(dict(model.named_modules())) shows all {len(names) - 1} names."
    )


def resolve_spec(model: nn.Module, spec: ProductSpec) -> ProductSpec:
    """`spec` with every item standing for one existing module of `model`.

    A name stays as it is written, a selector becomes the names it selects. Resolving again changes nothing.

    Raises:
        UnknownModuleError: (a ``KeyError``) for an item that selects nothing, with the nearest names.
        ValueError: for a selector that is not written as one.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    >>> str(resolve_spec(net, ProductSpec.parse("inputs[-1]|outputs[@Linear|.]")))
    'inputs[2]|outputs[0|2|.]'
    """
    resolver = _Resolver(model)
    sections: dict[Kind, list[Item]] = {"inputs": [], "outputs": []}
    for kind, item in (entry for entry in spec if entry[0] != "saved"):
        for section, resolved in resolver(kind, item):
            sections[section].append(resolved)
    return ProductSpec(tuple(sections["inputs"]), tuple(sections["outputs"]), spec.saved)


def has_selector(spec: ProductSpec) -> bool:
    """Whether some item may mean several modules, so that only a model can tell how many are asked for.

    >>> has_selector(ProductSpec.parse("outputs[layers.*]")), has_selector(ProductSpec.parse("outputs[layers.0]"))
    (True, False)
    """
    names = [item.name for kind, item in spec if kind != "saved"]
    return any("@" in name or "%" in name or is_pattern(name) for name in names)


class _Resolver:
    """One model's names, looked up once for all items of a spec."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = all_names(model)
        self.places: dict[str, list[str]] = {}
        for path in self.modules:
            self.places.setdefault(strip_wrappers(path), []).append(path)

    def __call__(self, kind: Kind, item: Item) -> Iterator[tuple[Kind, Item]]:
        if str(item) in self.modules:  # a module whose own name holds '#' or '!'
            yield kind, Item(str(item))
        elif item.name == ROOT or _find(self.modules, item.name) is not None:
            yield kind, item
        elif "%" in item.name:
            yield from self._recorded(kind, item)
        else:
            found = self._by_class(item.name) if "@" in item.name else self._by_pattern(item.name)
            for name in found:
                yield kind, replace(item, name=name)

    # -- names and classes ---------------------------------------------------------------------

    def _by_pattern(self, name: str) -> list[str]:
        found = self._expand(name)
        # Where a wrapper and what it wraps share a bare name, the wrapper stands first.
        called = self._called(self.places[bare][0] for bare in found)
        if found and not called:
            raise UnknownModuleError(f"{name!r} selects only {quoted(found[:5])}, which no forward calls")
        return called

    def _expand(self, name: str) -> list[str]:
        """The bare names that a pattern means."""
        found = expand(name, filter(None, self.places)) if is_pattern(name) else []
        if not found:
            raise UnknownModuleError(_unknown(self.model, name, list(self.modules)))
        return found

    def _called(self, paths: Iterable[str]) -> list[str]:
        """The names of what can be called, each module once, in the order given."""
        once: dict[int, str] = {}
        for path in paths:
            if never_called(self.modules[path]) is None:
                once.setdefault(id(self.modules[path]), self._name(path))
        return list(once.values())

    def _name(self, path: str) -> str:
        """What to call the module at `path`: by its bare name, if that finds it."""
        module, bare = self.modules[path], strip_wrappers(path)
        if module is self.model:
            return ROOT
        if self.modules.get(bare, module) is module and self.modules[self.places[bare][0]] is module:
            return bare if all(_inside(place, self.places[bare][0]) for place in self.places[bare]) else path
        return path

    def _by_class(self, name: str) -> list[str]:
        match = _BY_CLASS.fullmatch(name)
        if match is None or not match["class"] or match["layer"] == "":
            raise ValueError(f"{name!r}: a class is selected by @Class, @Class:layer_name or scope@Class")
        wanted, layer = match["class"], match["layer"]
        replacement = find_replacement(wanted.rpartition(".")[2])
        inside = self._scope(match["scope"])
        of_class = [
            path
            for path, module in self.modules.items()
            if wanted in class_names(module) or (replacement is not None and isinstance(module, replacement))
        ]
        found = self._called(
            path
            for path in of_class
            if inside(path) and (layer is None or has_fragment(strip_wrappers(path), layer))
        )
        if not found:
            raise UnknownModuleError(self._no_class(name, wanted, of_class))
        return found

    def _no_class(self, name: str, wanted: str, of_class: list[str]) -> str:
        if of_class:
            return f"{name!r} selects nothing: the modules of class {wanted!r} are {quoted(of_class[:5])}"
        classes = sorted({type(module).__name__ for module in self.modules.values()})
        return (
            f"{name!r} selects nothing: {type(self.model).__name__} has no module of a class {wanted!r}; the nearest "
            f"are {quoted(nearest(wanted, classes) or classes[:8])}"
        )

    def _scope(self, scope: str) -> Callable[[str], bool]:
        """Whether a path is at or below what a scope names."""
        if scope in ("", ROOT, "**"):
            return lambda path: True
        known = _find(self.modules, scope)
        tops = [strip_wrappers(known.path)] if known is not None else self._expand(scope)
        return lambda path: any(f"{strip_wrappers(path)}.".startswith(f"{top}.") for top in tops)

    # -- recorded keys -------------------------------------------------------------------------

    def _recorded(self, kind: Kind, item: Item) -> Iterator[tuple[Kind, Item]]:
        match = _RECORDED.fullmatch(item.name)
        if match is None or not match["key"] or match["at"] == "":
            raise ValueError(f"{item.name!r}: what a model records is selected by %key, %key.0 or scope%key")
        key, scope = match["key"], match["scope"]
        for path, owner, found in self._owners(item.name, key, scope):
            entries = self._entries(kind, item, path, owner, found)
            at = match["at"]
            if at is not None:
                numbers = at[1:-1] if at.startswith("{") and at.endswith("}") else at
                entries = [entries[n] for n in positions(numbers, range(len(entries)), item.name)]
            yield from entries

    def _owners(self, name: str, key: str, scope: str) -> list[tuple[str, nn.Module, list[Recorded]]]:
        """The models that record `key`, and from which modules."""
        inside = self._scope(scope)
        declaring = [(path, module) for path, module in self.model.named_modules() if declared(module)]
        owners = [(path, m, find_recorded(m, [key])) for path, m in declaring if inside(path)]
        owners = [(path, m, found) for path, m, found in owners if found]
        top = None if scope == "" else _find(self.modules, "" if scope == ROOT else scope)
        if top is not None:  # the model of that name, if it records, and not what is inside it
            owners = [one for one in owners if one[1] is top.module] or owners
        if not owners:
            keys = sorted({one.key for _, module in declaring for one in find_recorded(module)})
            raise UnknownModuleError(
                f"{name!r} selects nothing: no part of {type(self.model).__name__}{f' below {scope!r}' if scope else ''} "
                f"records {key!r}; recorded are {quoted(keys, 'no outputs at all (_can_record_outputs)')}"
            )
        if len(owners) > 1 and not is_pattern(scope):
            scoped = [f"{self._name(path)}%{key}" for path, _, _ in owners]
            raise UnknownModuleError(f"{name!r} could mean any of {quoted(scoped)}: write one of these")
        return owners

    def _entries(
        self, kind: Kind, item: Item, path: str, owner: nn.Module, found: list[Recorded]
    ) -> list[tuple[Kind, Item]]:
        names = [self._name(f"{path}.{one.path}".strip(".")) for one in found]
        if kind == "inputs":
            return [(kind, replace(item, name=name)) for name in names]
        entries: list[tuple[Kind, Item]] = [
            ("outputs", Item(name, item.call, (f"{one.recorder.index}?", *item.pick)))
            for name, one in zip(names, found, strict=True)
        ]
        if found[0].key != "hidden_states":
            return entries
        if ties_last_hidden_state(owner):
            entries[-1] = "outputs", Item(self._name(path), item.call, ("last_hidden_state", *item.pick))
        if found[0].recorder.capture_initial_hidden_state:
            given = _first_parameter(found[0].module)
            entries.insert(0, ("inputs", Item(names[0], item.call, (given, *item.pick))))
        return entries


def _first_parameter(module: nn.Module) -> int | str:
    first = next(iter(inspect.signature(module.forward).parameters.values()), None)
    return 0 if first is None or first.kind in (first.VAR_POSITIONAL, first.POSITIONAL_ONLY) else first.name


def never_called(module: nn.Module) -> str | None:
    """Why a module's hooks never fire, whatever the model does; ``None`` if they may.

    >>> never_called(nn.ModuleList())
    'a ModuleList is a container, which no forward calls: name what is in it'
    """
    if getattr(module.forward, "__func__", None) is nn.Module.forward:
        return f"a {type(module).__name__} is a container, which no forward calls: name what is in it"
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return (
            "nn.MultiheadAttention reads the weights of its out_proj and never calls it: "
            "capture what the attention module returns, its element 0"
        )
    return None
