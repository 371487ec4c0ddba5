"""Activations of many modules at once, recorded as a run passes them."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from softs_lightning.tracing.batching import RowRange, map_tensors

__all__ = ["CacheEntry", "CacheView", "Recorder"]


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


class Recorder:
    """Fills a cache during a run.

    Args:
        targets: id of the module to its path, for what is recorded.
        paths: every path that leads to a module, to the one it is recorded under.
        root: the name of the model.
        rows: the part of the batch to record; None for all of it.
        device: where tensors are moved to; None leaves them.
        dtype: what floating-point tensors are cast to; None leaves them.
        detach: whether they leave the autograd graph.
        include_output: whether to record what modules return.
        include_inputs: whether to record what they are called with.
        non_blocking: whether the move to ``device`` may go on in the background.
    """

    def __init__(
        self,
        targets: dict[int, str],
        paths: dict[str, str],
        root: str,
        *,
        rows: RowRange | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        detach: bool,
        include_output: bool,
        include_inputs: bool,
        non_blocking: bool,
    ) -> None:
        self._targets = targets
        self._store = _Store(root, paths)
        self._rows = rows
        self._device = device
        self._dtype = dtype
        self._detach = detach
        self._include = include_output, include_inputs
        self._non_blocking = non_blocking
        self._versions: list[tuple[torch.Tensor, int, str]] = []

    @property
    def view(self) -> CacheView:
        return CacheView(self._store)

    def entered(self, module: int, value: Any) -> CacheEntry | None:
        path = self._targets.get(module)
        if path is None or not self._include[1]:
            return None
        entry = CacheEntry(inputs=self._taken(value, f"{path}.inputs"))
        self._store.entries.setdefault(path, []).append(entry)
        return entry

    def left(self, module: int, value: Any, token: CacheEntry | None) -> None:
        path = self._targets.get(module)
        if path is None or not self._include[0]:
            return
        entry = token
        if entry is None:
            entry = CacheEntry()
            self._store.entries.setdefault(path, []).append(entry)
        entry.output = self._taken(value, f"{path}.output")

    def _taken(self, value: Any, name: str) -> Any:
        def take(tensor: torch.Tensor) -> torch.Tensor:
            taken = tensor.detach() if self._detach else tensor
            dtype = self._dtype if tensor.is_floating_point() or tensor.is_complex() else None
            taken = taken.to(device=self._device, dtype=dtype, non_blocking=self._non_blocking)
            if self._rows is not None and taken.untyped_storage().nbytes() != taken.nbytes:
                taken = taken.clone()  # or a few rows would keep the whole batch
            if not taken.is_inference():
                self._versions.append((taken, taken._version, name))
            return taken

        whole = value if self._rows is None else self._rows.narrow(value)
        return map_tensors(take, whole)

    def finish(self) -> None:
        """Say so if the model later wrote into something that was recorded."""
        changed = dict.fromkeys(
            name for tensor, version, name in self._versions if tensor._version != version
        )
        self._versions.clear()
        self._targets = {}
        if changed:
            warnings.warn(
                f"{', '.join(changed)} changed in place after it was recorded (by an in-place activation, for "
                "example), so the cache holds the changed values",
                stacklevel=2,
            )
