"""The product_id grammar: parse, print, validate, unite.

A *product* is a set of activations named by a string::

    inputs[model.layers.0]|outputs[model.layers.0|model.layers.5]

=====================  ==================================================================
``inputs[...]``        what the named modules are called with (positional and keyword)
``outputs[...]``       what the named modules return
``saved[...]``         what a teacher's program saves under these names
``a|b``                several modules, in this order; blanks and empty items are dropped
``a!2``                the third call of ``a`` within one forward (counted from 0)
``a#0``, ``a#0.key``   one element of a tuple, mapping, dataclass or argument list
``a#0?``               the element of a tuple, list or ``ModelOutput``, any other value whole
``.``                  the model itself
=====================  ==================================================================

Between the two sections blanks and any of ``| , ; & +`` may stand. Several modules at once are named
by selectors, see ``softs_lightning.selectors``. A string becomes a :class:`ProductSpec` here, at the
edge; nothing further in reads product_ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, cast

__all__ = ["Item", "Kind", "ProductSpec", "describe", "element", "parse_io_spec", "take"]

Kind = Literal["inputs", "outputs", "saved"]

_ELEMENT = re.compile(r"-?[0-9]{1,9}\?")
_SECTION = re.compile(r"\b(inputs|outputs|saved)\s*\[([^\[\]]*)\]")
_SEPARATORS = re.compile(r"[\s|,;&+]*")
_ITEM = re.compile(r"(?P<name>[^#!]*)(?:!(?P<call>[^#]*))?(?:#(?P<pick>.*))?", re.DOTALL)


def parse_io_spec(product_id: str) -> tuple[list[str], list[str]]:
    """Split a product_id into the module names of its two sections.

    Items stay as written, picks included. A missing section is an empty list, a section
    that stands twice is joined.

    Raises:
        ValueError: for text that is neither a section nor a separator; the message points at it.

    >>> parse_io_spec("inputs[model.layers.0]|outputs[model.layers.0 | model.layers.5|]")
    (['model.layers.0'], ['model.layers.0', 'model.layers.5'])
    >>> parse_io_spec("outputs[model.layers.0]")
    ([], ['model.layers.0'])
    """
    found = _sections(product_id)
    if found["saved"]:
        raise ValueError(
            f"saved[{'|'.join(found['saved'])}] names what the program of a teacher saves, and no modules"
        )
    return found["inputs"], found["outputs"]


def _sections(product_id: str) -> dict[Kind, list[str]]:
    if not isinstance(product_id, str):
        raise TypeError(f"a product_id is a string, got {type(product_id).__name__}: {product_id!r}")
    found: dict[Kind, list[str]] = {"inputs": [], "outputs": [], "saved": []}
    end = 0
    for section in _SECTION.finditer(product_id):
        _refuse_leftover(product_id, end, section.start())
        items = (item.strip() for item in section[2].split("|"))
        found[cast(Kind, section[1])] += [item for item in items if item]
        end = section.end()
    _refuse_leftover(product_id, end, len(product_id))
    return found


def _refuse_leftover(text: str, start: int, stop: int) -> None:
    blank = _SEPARATORS.match(text, start, stop)
    at = blank.end() if blank else start
    if at == stop:
        return
    line = re.sub(r"\s", " ", text)
    raise ValueError(
        f"this product_id is not understood from character {at + 1} on:\n"
        f"    {line}\n    {' ' * at}^\n"
        "write inputs[name|name] and/or outputs[name|name], with both brackets closed"
    )


@dataclass(frozen=True)
class Item:
    """One activation inside a section: a module, perhaps one of its calls, perhaps a part of the value.

    >>> Item.parse("h.3!1#0.key")
    Item(name='h.3', call=1, pick=(0, 'key'))
    >>> str(Item("h.3", pick=("hidden_states",)))
    'h.3#hidden_states'
    """

    name: str
    call: int | None = None
    pick: tuple[int | str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Item:
        match = _ITEM.fullmatch(text.strip())
        if match is None or not match["name"].strip():
            raise ValueError(
                f"{text!r} names no module; write name, name!call or name#pick ('.' is the model)"
            )
        call: int | None = None
        if match["call"] is not None:
            if not re.fullmatch(r"[0-9]+", match["call"].strip()):
                raise ValueError(
                    f"in {text!r}, '!' must be followed by the number of a call, 0 for the first"
                )
            call = int(match["call"])
        pick: tuple[int | str, ...] = ()
        if match["pick"] is not None:
            parts = [part.strip() for part in match["pick"].split(".")]
            if "" in parts or "#" in match["pick"] or "!" in match["pick"]:
                raise ValueError(
                    f"in {text!r}, '#' must be followed by an index or a key, or several joined by '.'"
                )
            pick = tuple(int(p) if re.fullmatch(r"-?[0-9]+", p) else p for p in parts)
        return cls(match["name"].strip(), call, pick)

    def __str__(self) -> str:
        call = "" if self.call is None else f"!{self.call}"
        pick = "#" + ".".join(map(str, self.pick)) if self.pick else ""
        return f"{self.name}{call}{pick}"


@dataclass(frozen=True)
class ProductSpec:
    """A parsed product_id: what to capture, inputs first, each section in the order written.

    ``saved`` names what the program of a teacher saves; see :class:`softs_lightning.Teacher`.

    >>> spec = ProductSpec.parse("outputs[b#0]  inputs[a]")
    >>> str(spec), len(spec)
    ('inputs[a]|outputs[b#0]', 2)
    >>> str(ProductSpec.union([spec, ProductSpec.parse("outputs[b#0|c]")]))
    'inputs[a]|outputs[b#0|c]'
    """

    inputs: tuple[Item, ...] = ()
    outputs: tuple[Item, ...] = ()
    saved: tuple[Item, ...] = ()

    @classmethod
    def parse(cls, product_id: str | ProductSpec) -> ProductSpec:
        """Parse a product_id; a spec is returned as it is. Raises ``ValueError`` as :func:`parse_io_spec`."""
        if isinstance(product_id, ProductSpec):
            return product_id
        return _parse(product_id) if isinstance(product_id, str) else _parse.__wrapped__(product_id)

    @classmethod
    def union(cls, specs: Iterable[ProductSpec]) -> ProductSpec:
        """One spec that asks once for everything that any of `specs` asks for."""
        specs = list(specs)
        return cls(
            tuple(dict.fromkeys(item for spec in specs for item in spec.inputs)),
            tuple(dict.fromkeys(item for spec in specs for item in spec.outputs)),
            tuple(dict.fromkeys(item for spec in specs for item in spec.saved)),
        )

    def __iter__(self) -> Iterator[tuple[Kind, Item]]:
        for item in self.inputs:
            yield "inputs", item
        for item in self.outputs:
            yield "outputs", item
        for item in self.saved:
            yield "saved", item

    def __len__(self) -> int:
        return len(self.inputs) + len(self.outputs) + len(self.saved)

    def __str__(self) -> str:
        sections = {"inputs": self.inputs, "outputs": self.outputs, "saved": self.saved}
        return "|".join(f"{kind}[{'|'.join(map(str, items))}]" for kind, items in sections.items() if items)


@lru_cache(maxsize=256)  # a session is armed from the same few product_ids at every step
def _parse(product_id: str) -> ProductSpec:
    return ProductSpec(*(tuple(map(Item.parse, items)) for items in _sections(product_id).values()))


def take(value: Any, pick: Sequence[int | str]) -> Any:
    """Follow a pick into a nested value.

    An index picks from tuples and lists (and from outputs that convert to one by ``to_tuple``),
    a key from mappings, named tuples, torch's return types and dataclasses. In a mapping without
    the number 0, ``0`` is the key ``"0"``. ``0?`` is :func:`element` 0.

    Raises:
        LookupError: when a step cannot be taken; the message says what stood there.

    >>> take((1, {"a": [2, 3]}), (1, "a", -1))
    3
    """
    for depth, step in enumerate(pick):
        here = "#" + ".".join(map(str, pick[:depth])) if depth else "the value"
        try:
            value = _step(value, step)
        except (LookupError, AttributeError, TypeError):
            raise LookupError(f"{step!r} is not in {here}, which is {describe(value)}") from None
    return value


def _step(value: Any, step: int | str) -> Any:
    if isinstance(step, int):
        if hasattr(value, "to_tuple"):
            return value.to_tuple()[step]
        if isinstance(value, Mapping):
            return value[step if step in value else str(step)]
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise TypeError
        return value[step]
    if isinstance(value, Mapping) and step in value:
        return value[step]
    if _ELEMENT.fullmatch(step):
        return element(value, int(step[:-1]))
    fields = getattr(value, "__match_args__", ()) if isinstance(value, tuple) else ()
    if step in fields or step in getattr(value, "__dataclass_fields__", ()):
        return getattr(value, step)
    raise AttributeError(step)


def element(value: Any, index: int) -> Any:
    """The element of what a module returned: of a tuple, a list or a ``ModelOutput``; other values are whole.

    Raises:
        IndexError: when there is no such element; the message says what is there.

    >>> element(("hidden", "weights"), 1), element("hidden", 1)
    ('weights', 'hidden')
    """
    sequence = value.to_tuple() if hasattr(value, "to_tuple") else value
    if not isinstance(sequence, (tuple, list)):
        return value
    try:
        return sequence[index]
    except IndexError:
        raise IndexError(f"there is no element {index} in {describe(sequence)}") from None


def describe(value: Any) -> str:
    """A short account of a value for error messages: type, sizes, keys.

    >>> describe((1, None))
    'a tuple of 2 (int, None)'
    """
    if value is None:
        return "None"
    shape = getattr(value, "shape", None)
    if shape is not None and not callable(shape):
        return f"a {_kind(value)} of shape {list(shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} with keys {', '.join(map(repr, value))}"
    if isinstance(value, (tuple, list)):
        inside = ", ".join("None" if v is None else _kind(v) for v in value)
        return f"a {type(value).__name__} of {len(value)} ({inside})"
    return f"a {type(value).__name__}"


def _kind(value: object) -> str:
    """What to call a value; a scan's tensor is one as any other."""
    name = type(value).__name__
    return "Tensor" if name == "FakeTensor" else name
