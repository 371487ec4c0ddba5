"""The reads that a block begins with, which need no thread (no torch here).

A block has a thread because any function that it calls may wait for the model. ``a = model.layer.output.save()``
calls none: where the statements at the beginning of a block look like that, they are not run but carried out, on
the model's thread. At the first that is anything else, or that turns out to be something else when its turn comes,
the block goes on with a thread, from that statement on. So a block that only reads and saves never starts one.
"""

import ast
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

__all__ = ["SAVE", "STOP", "Read", "Where", "leading_reads", "locate", "take"]

# The hidden name that `value.save()` is compiled to inside a block; no identifier can collide with it.
SAVE = "@save"
STOP = "stop"  # in place of a location's kind: the model is left here

_PLAIN = "builtins", "torch", "torch.nn.parameter"  # whose classes have no `save` of their own

Where = tuple[int, str, str]  # (id of the module, kind of the location, its name)


@dataclass(frozen=True, slots=True)
class Read:
    """The statement ``target = save(name.step[step]. ... .kind)``, or ``name.stop()``."""

    at: int  # the statement's number
    name: str
    steps: tuple[tuple[bool, str | int], ...]  # (whether it is an index, which attribute or index)
    variables: tuple[tuple[int, str], ...]  # (which of the steps, the variable that is its index)
    kind: str
    save: str | None
    target: str | None


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
    by: str | None = None
    match statement:
        case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), "stop"), [], [])):
            return Read(number, name, (), (), STOP, None, None)
        case ast.Assign([ast.Name(variable)], value):
            target = variable
        case ast.Expr(value):
            pass
        case _:
            return None
    match value:
        case ast.Call(ast.Name("@save" | "save" as function), [value], []):
            by = function
    if not isinstance(value, ast.Attribute):
        return None
    kind, node = value.attr, value.value
    steps, variables = deque[tuple[bool, str | int]](), list[tuple[int, str]]()
    while not isinstance(node, ast.Name):
        match node:
            case ast.Attribute(node, str(key)):
                steps.appendleft((False, key))
            case ast.Subscript(node, ast.Name(key)):
                steps.appendleft((True, key))
                variables.append((-len(steps), key))
            case ast.Subscript(node, ast.Constant(int() | str() as key)):
                steps.appendleft((True, key))
            case ast.Subscript(node, ast.UnaryOp(ast.USub(), ast.Constant(int(key)))):
                steps.appendleft((True, -key))
            case _:
                return None
    return Read(number, node.id, tuple(steps), tuple(variables), kind, by, target)


def locate(read: Read, scope: dict[str, Any], run: Any, save: Callable[[Any], Any]) -> Where | None:
    """What a read waits for; None if it is not what it looks like."""
    try:
        first = scope[read.name]
        if read.save == "save" and scope["save"] is not save:
            return None
        steps: Sequence[tuple[bool, Any]] = read.steps
        if read.variables:
            steps = list(steps)
            for at, name in read.variables:
                steps[at] = True, scope[name]
                if type(scope[name]) not in (int, str):
                    return None
    except KeyError:
        return None
    # `_locate` takes steps, of which each is (whether it is an index, which), and returns None for what is no plain
    # read. It has to be of this very class: a subclass may mean anything by its attributes.
    own = type(first).__dict__.get("_locate")
    where: Where | None = own and own(first, run, steps, read.kind)
    return where


def take(read: Read, value: Any, scope: dict[str, Any], saves: Any, save: Callable[[Any], Any]) -> bool:
    """Hand a read its value; False if that takes more than this."""
    if read.kind == "input":
        args, kwargs = value
        if not args and not kwargs:
            return False
        value = args[0] if args else next(iter(kwargs.values()))
    if read.save is not None:
        if read.save == SAVE and not _is_plain(type(value), save):  # type: ignore[arg-type]
            return False  # it may have a method of that name, which is called then
        saves.add(value)
    if read.target is not None:
        scope[read.target] = value
    return True


@lru_cache(256)  # to look for what a class does not have takes long
def _is_plain(kind: type, save: Callable[[Any], Any]) -> bool:
    own = getattr(kind, "save", None)
    return own is save or (own is None and kind.__module__ in _PLAIN)
