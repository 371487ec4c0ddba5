"""The reads that a block begins with, which need no thread (no torch here).

A block has a thread because any function that it calls may wait for the model. ``a = model.layer.output.save()``
calls none: where the statements at the beginning of a block look like that, they are not run but carried out, on
the model's thread. At the first that is anything else, or that turns out to be something else when its turn comes,
the block goes on with a thread, from that statement on. So a block that only reads and saves never starts one.
"""

import ast
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["SAVE", "STOP", "Locator", "Read", "Reads", "Where", "leading_reads"]

# The hidden name that `value.save()` is compiled to inside a block; no identifier can collide with it.
SAVE = "@save"
STOP = "stop"  # in place of a location's kind: the model is left here

_PLAIN = "builtins", "torch", "torch.nn.parameter"  # whose classes have no `save` of their own

Where = tuple[int, str, str]  # (id of the module, kind of the location, its name)
Step = tuple[type[ast.expr], str | int]  # an attribute, a constant index, or an index by a variable


@dataclass(frozen=True, slots=True)
class Read:
    """The statement ``target = save(name.step[step]. ... .kind)``, or ``name.stop()``."""

    at: int  # the statement's number
    name: str
    steps: tuple[Step, ...]
    kind: str
    save: str | None
    target: str | None


class Locator(Protocol):
    """What may stand at the beginning of a read, once looked up: its class has a `_locate` of its own."""

    def _locate(self, run: Any, steps: list[tuple[bool, Any]], kind: str) -> Where | None:
        """The location of ``kind``; each step is (whether it is an index, which). None for what is no plain read."""


def leading_reads(statements: Sequence[ast.stmt]) -> tuple[tuple[Read, ...], int | None]:
    """The statements at the beginning that look like reads, and the number of the first that does not, if any."""
    reads: list[Read] = []
    for number, statement in enumerate(statements):
        if isinstance(statement, ast.Pass):
            continue
        read = _read(number, statement)
        if read is None:
            return tuple(reads), number
        reads.append(read)
    return tuple(reads), None


def _read(number: int, statement: ast.stmt) -> Read | None:
    target: str | None = None
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "stop"), [], [])):
            return Read(number, name, (), STOP, None, None)
        case ast.Assign([ast.Name(variable)], value):
            target = variable
        case ast.Expr(value):
            pass
        case _:
            return None
    by = None
    match value:
        case ast.Call(ast.Name(function), [argument], []) if function in (SAVE, "save"):
            by, value = function, argument
    if not isinstance(value, ast.Attribute):
        return None
    kind, node, steps = value.attr, value.value, list[Step]()
    while not isinstance(node, ast.Name):
        match node:
            case ast.Attribute(inner, str(key)):
                steps.append((ast.Attribute, key))
            case ast.Subscript(inner, ast.Name(key)):
                steps.append((ast.Name, key))
            case ast.Subscript(inner, ast.Constant(int() | str() as key)):
                steps.append((ast.Constant, key))
            case ast.Subscript(inner, ast.UnaryOp(ast.USub(), ast.Constant(int(key)))):
                steps.append((ast.Constant, -key))
            case _:
                return None
        node = inner
    return Read(number, node.id, tuple(reversed(steps)), kind, by, target)


class Reads:
    """The leading reads of one block, as they are carried out: ``next`` is the one to come.

    Args:
        reads: what they are.
        scope: the names of the block.
        save: the function of that name.
    """

    def __init__(self, reads: tuple[Read, ...], scope: dict[str, Any], save: Callable[[Any], Any]) -> None:
        self._reads = iter(reads)
        self._scope = scope
        self._save = save
        self.next = next(self._reads, None)

    def ask(self, run: Any) -> Where | None:
        """What the next one waits for; None if it is not what it looks like."""
        read, scope = self.next, self._scope
        assert read is not None
        try:
            first: Locator = scope[read.name]
            if read.save == "save" and scope["save"] is not self._save:
                return None
            if "_locate" not in type(first).__dict__:
                return None  # a subclass may mean anything by its attributes
            steps = []
            for how, key in read.steps:
                step = scope[str(key)] if how is ast.Name else key
                if type(step) is not int and type(step) is not str:
                    return None
                steps.append((how is not ast.Attribute, step))
        except KeyError:
            return None
        return first._locate(run, steps, read.kind)

    def take(self, value: Any, saves: Any) -> bool:
        """Hand the next one its value; False if that takes more than this."""
        read = self.next
        assert read is not None
        if read.kind == "input":
            args, kwargs = value
            if not args and not kwargs:
                return False
            value = args[0] if args else next(iter(kwargs.values()))
        if read.save is not None:
            own = getattr(type(value), "save", None)
            plain = own is self._save or (own is None and type(value).__module__ in _PLAIN)
            if read.save != "save" and not plain:
                return False  # it may have a method of that name, which is called then
            saves.add(value)
        if read.target is not None:
            self._scope[read.target] = value
        return True

    def go_on(self) -> None:
        """Turn to the one after."""
        self.next = next(self._reads, None)
