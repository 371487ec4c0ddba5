"""Patterns over module names: globs, ranges, positions from the end.

=====================  =====================================================================
``layers.*``           ``*`` stands for any text within one component
``**.mlp``             ``**`` stands for any number of components, also none
``layers.{0..5}``      entries 0 to 5 of a numbered family, both ends included; all must exist
``layers.{1..-1..2}``  every second one, from 1 to the last
``layer{1..4}.conv1``  the number may be part of a component
``layers.-1``          the last entry of a numbered family
=====================  =====================================================================

A numbered family is what stands beside each other under names that differ in a number only.
A component that is the exact name of a module there is that module, however it looks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from softs_lightning.names import UnknownModuleError, quoted

__all__ = ["expand", "is_pattern", "positions"]

_FROM_END = re.compile("-[1-9][0-9]{0,8}")
_NUMBER = re.compile("[0-9]{1,9}|-[1-9][0-9]{0,8}")
_RANGE = re.compile(r"(?P<before>[^{}]*)\{(?P<range>[^{}]*)\}(?P<after>[^{}]*)")
_BOUNDS = re.compile(rf"({_NUMBER.pattern})\.\.({_NUMBER.pattern})(?:\.\.([1-9][0-9]{{0,8}}))?")


def is_pattern(name: str) -> bool:
    """Whether a name that is no module's own can be read as a pattern.

    >>> is_pattern("layers.-1"), is_pattern("layers.1")
    (True, False)
    """
    return any(set("*{}") & set(part) or _FROM_END.fullmatch(part) for part in _components(name))


def expand(pattern: str, names: Iterable[str]) -> list[str]:
    """The entries of `names` that the pattern means, in their order.

    Raises:
        ValueError: for a range that is not written as one.
        UnknownModuleError: (a ``KeyError``) for a number that a numbered family does not have.

    >>> expand("layers.{0..-2}", ["layers", "layers.0", "layers.1", "layers.2"])
    ['layers.0', 'layers.1']
    """
    names = list(dict.fromkeys(names))
    children: dict[str, dict[str, str]] = {"": {}}
    for name in names:
        parent, _, last = name.rpartition(".")
        children.setdefault(parent, {})[last] = name
    parts = _components(pattern)
    waiting = [("", 0)]
    reached = set(waiting)
    while waiting:
        name, at = waiting.pop()
        if at < len(parts):
            for state in _step(name, children.get(name, {}), parts[at], at):
                if state not in reached:
                    reached.add(state)
                    waiting.append(state)
    return [name for name in names if (name, len(parts)) in reached]


def _components(pattern: str) -> list[str]:
    """Split at dots, but for those within braces."""
    return re.findall(r"(?:\{[^{}]*\}|[^.])+|(?<=\.)(?=\.|$)|^(?=\.)", pattern)


def _step(name: str, children: dict[str, str], part: str, at: int) -> Iterator[tuple[str, int]]:
    if part in children:
        yield children[part], at + 1
    elif part == "**":
        yield name, at + 1
        yield from ((child, at) for child in children.values())
    elif "*" in part and not set("{}") & set(part):
        yield from ((child, at + 1) for last, child in children.items() if _globs(part, last))
    elif _FROM_END.fullmatch(part):
        family = _family(children, "", "")
        for number in positions(part, family, f"{name}.{part}".lstrip(".")) if family else ():
            yield children[family[number]], at + 1
    elif "{" in part or "}" in part:
        match = _RANGE.fullmatch(part)
        if match is None or "*" in part:
            raise ValueError(
                f"in {part!r}, a range is written {{first..last}} or {{first..last..step}}, as in {{0..5}}"
            )
        family = _family(children, match["before"], match["after"])
        for number in positions(match["range"], family, f"{name}.{part}".lstrip(".")) if family else ():
            yield children[family[number]], at + 1


def _globs(pattern: str, text: str) -> bool:
    first, *middle, last = pattern.split("*")
    at, end = len(first), len(text) - len(last)
    if at > end or not (text.startswith(first) and text.endswith(last)):
        return False
    for piece in middle:
        found = text.find(piece, at, end)
        if found < 0:
            return False
        at = found + len(piece)
    return True


def _family(children: Iterable[str], before: str, after: str) -> dict[int, str]:
    """The numbers of the children whose names differ in a number only, each with its name."""
    found: dict[int, str] = {}
    for last in children:
        number = last[len(before) : len(last) - len(after)]
        if last.startswith(before) and last.endswith(after) and re.fullmatch("[0-9]{1,9}", number):
            found.setdefault(int(number), last)
    return found


def positions(text: str, numbers: Iterable[int], what: str) -> list[int]:
    """Those of `numbers` that ``"-1"``, ``"3"``, ``"0..5"`` or ``"0..-1..2"`` mean.

    Raises:
        ValueError: for text that is none of those, or a range whose end comes before its beginning.
        UnknownModuleError: for a number that is not there.

    >>> positions("1..-1..2", range(6), "layers")
    [1, 3, 5]
    """
    there = sorted(numbers)
    bounds = _BOUNDS.fullmatch(text)
    if bounds is None and not _NUMBER.fullmatch(text):
        raise ValueError(
            f"in {what!r}, {text!r} is neither a number nor a range such as 0..5, 0..-1 or 0..-1..2"
        )

    def number(bound: str) -> int:
        value = int(bound)
        if bound.startswith("-") and -len(there) <= value < 0:
            return there[value]
        if value in there:
            return value
        raise UnknownModuleError(f"{what!r} asks for {bound}, and there are {quoted(_runs(there))}")

    if bounds is None:
        return [number(text)]
    first, last, step = number(bounds[1]), number(bounds[2]), int(bounds[3] or 1)
    if first > last:
        raise ValueError(
            f"{what!r} ends before it begins: from {first} to {last}. Write the lower number first"
        )
    return [n for n in there if first <= n <= last and (n - first) % step == 0]


def _runs(numbers: list[int]) -> list[str]:
    """Numbers for a message: runs of neighbours are given by their ends."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][-1] + 1:
            runs[-1].append(n)
        else:
            runs.append([n])
    return [str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
