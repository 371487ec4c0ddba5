"""Activations of many modules at once, recorded as a run passes them."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from softs_lightning.names import nearest, quoted
from softs_lightning.tracing.batching import RowRange
from softs_lightning.transfer import map_tensors

__all__ = ["CacheEntry", "CacheView", "Recorder", "selected"]


@dataclass(slots=True)
class CacheEntry:
    """One visit of a module: ``output``, and ``inputs`` as (args, kwargs); None where not recorded."""

    output: Any = None
    inputs: tuple[tuple[Any, ...], dict[str, Any]] | None = None

    @property
    def input(self) -> Any:
        """The first positional argument, else the first keyword argument, else None."""
        args, kwargs = self.inputs or ((), {})
        return next(iter((*args, *kwargs.values())), None)


@dataclass(slots=True)
class _Store:
    """What all the views of one cache look at; it knows paths only, so that it keeps no model alive."""

    root: str
    paths: dict[str, str]  # every path that leads to a module to the one it is recorded under
    entries: dict[str, list[CacheEntry]] = field(default_factory=dict)


class CacheView:
    """What ``tracer.cache()`` recorded: a module is selected by its path, or by attributes and indices.

    ``cache["model.h.0"].output``, ``cache.model.h[0].output`` and ``cache.h[0].output`` are the same. ``len()``
    is the number of visits; with more than one, ``output``, ``inputs`` and ``input`` are lists with a value for
    each, and ``cache["model.h.0"].visits[1].output`` is that of the second.
    """

    def __init__(self, store: _Store, path: str | None = None) -> None:
        self._store = store
        self._path = path

    @property
    def visits(self) -> list[CacheEntry]:
        """An entry for each visit of the selected module, in order.

        Raises:
            KeyError: it was not recorded.
        """
        path = self._path or self._store.root
        if path not in self._store.entries:
            recorded = ", ".join(self._store.entries) or "nothing"
            raise KeyError(f"{path} was not recorded; recorded: {recorded}")
        return self._store.entries[path]

    def _values(self, kind: str) -> Any:
        values = [getattr(entry, kind) for entry in self.visits]
        return values[0] if len(values) == 1 else values

    @property
    def output(self) -> Any:
        """What the module returned; a list with more than one visit."""
        return self._values("output")

    @property
    def inputs(self) -> Any:
        """Its (args, kwargs); a list with more than one visit."""
        return self._values("inputs")

    @property
    def input(self) -> Any:
        """Its first argument; a list with more than one visit."""
        return self._values("input")

    def keys(self) -> list[str]:
        """The paths of the modules recorded at or below the selected one."""
        if self._path is None:
            return list(self._store.entries)
        below = self._path + "."
        return [path for path in self._store.entries if f"{path}.".startswith(below)]

    def __getitem__(self, key: str | int) -> "CacheView":
        store = self._store
        # From the top, the name of the model may be left out.
        candidates = [str(key), f"{store.root}.{key}"] if self._path is None else [f"{self._path}.{key}"]
        for path in candidates:
            if path in store.paths:
                return CacheView(store, store.paths[path])
        raise KeyError(f"{candidates[-1]} is no module of the traced model")

    def __getattr__(self, name: str) -> "CacheView":
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __contains__(self, key: str) -> bool:
        try:
            return self[key]._path in self._store.entries
        except KeyError:
            return False

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        """The number of visits of the selected module; of modules, where none is selected."""
        return len(self._store.entries) if self._path is None else len(self.visits)

    def __repr__(self) -> str:
        return f"CacheView({self._path or self._store.root}: {self.keys()})"


@dataclass(eq=False)
class Recorder:
    """Fills a cache during a run.

    Args:
        root: the name of the model.
        paths: every path that leads to a module, to the one it is recorded under.
        targets: id of the module to its path, for what is recorded.
        rows: the part of the batch to record; None for all of it.
        device, dtype, detach, include_output, include_inputs, non_blocking: as of `InterleavingTracer.cache`.
    """

    root: str
    paths: dict[str, str]
    targets: dict[int, str]
    rows: RowRange | None
    device: torch.device | str | None
    dtype: torch.dtype | None
    detach: bool
    include_output: bool
    include_inputs: bool
    non_blocking: bool

    def __post_init__(self) -> None:
        self._store = _Store(self.root, self.paths)
        self._versions: list[tuple[torch.Tensor, int, str]] = []

    @property
    def view(self) -> CacheView:
        return CacheView(self._store)

    def entered(self, module: int, value: Any) -> CacheEntry | None:
        """At the beginning of a visit; `left` is given what this returns."""
        path = self.targets.get(module)
        if path is None or not self.include_inputs:
            return None
        return self._entry(path, CacheEntry(inputs=self._taken(value, f"{path}.inputs")))

    def left(self, module: int, value: Any, entry: CacheEntry | None) -> None:
        path = self.targets.get(module)
        if path is not None and self.include_output:
            taken = self._taken(value, f"{path}.output")
            (entry or self._entry(path, CacheEntry())).output = taken

    def _entry(self, path: str, entry: CacheEntry) -> CacheEntry:
        self._store.entries.setdefault(path, []).append(entry)
        return entry

    def _taken(self, value: Any, name: str) -> Any:
        def take(tensor: torch.Tensor) -> torch.Tensor:
            taken = tensor.detach() if self.detach else tensor
            dtype = self.dtype if tensor.is_floating_point() or tensor.is_complex() else None
            taken = taken.to(device=self.device, dtype=dtype, non_blocking=self.non_blocking)
            if self.rows is not None and taken.untyped_storage().nbytes() != taken.nbytes:
                taken = taken.clone()  # or a few rows would keep the whole batch
            if not taken.is_inference():
                self._versions.append((taken, taken._version, name))
            return taken

        return map_tensors(take, value if self.rows is None else self.rows.narrow(value))

    def finish(self) -> None:
        """Say so if the model later wrote into something that was recorded."""
        changed = {name: None for tensor, version, name in self._versions if tensor._version != version}
        self._versions.clear()
        self.targets = {}
        if changed:
            warnings.warn(
                f"{', '.join(changed)} changed in place after it was recorded (by an in-place activation, for "
                "example), so the cache holds the changed values",
                stacklevel=2,
            )


def selected(
    root: str, model: nn.Module, modules: Sequence[Any] | None
) -> tuple[dict[str, str], dict[int, str]]:
    """The path of every module, by each of the paths that lead to it; and which modules are meant, by id.

    Args:
        root: what the paths start with.
        model: the traced model.
        modules: envoys or paths; None for every module.

    Raises:
        KeyError: one of them is no module of the model.
    """
    from softs_lightning.selectors import all_names  # not for a trace without a cache: it loads much

    by_path = {f"{root}.{name}" if name else root: module for name, module in all_names(model).items()}
    first: dict[int, str] = {}
    paths = {path: first.setdefault(id(module), path) for path, module in by_path.items()}
    if modules is None:
        return paths, first
    if isinstance(modules, str):
        raise TypeError(f"cache(modules=...) takes a list, got the string {modules!r}")
    targets: dict[int, str] = {}
    for each in modules:
        wanted = each if isinstance(each, str) else each.path
        found = next((path for path in (wanted, f"{root}.{wanted}") if path in by_path), None)
        if found is None or (not isinstance(each, str) and by_path[found] is not each.module):
            near = quoted(nearest(wanted, [path.removeprefix(f"{root}.") for path in by_path], 3))
            raise KeyError(f"{wanted} is no module of the traced model; the nearest are {near}")
        targets[id(by_path[found])] = paths[found]
    return paths, targets
