"""From a running frame to the compiled body of the with statement it is in (no torch here).

The body is found in the source by the position of the running instruction, compiled on its own under the
original file name and line numbers, and kept for as long as the code object of the frame lives.
"""

import __future__

import ast
import contextlib
import dis
import functools
import itertools
import linecache
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from softs_lightning.tracing.errors import WithBlockNotFoundError
from softs_lightning.tracing.reads import SAVE, Read, leading_reads

__all__ = ["Site", "site_of"]

_FUTURE = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


@dataclass(frozen=True)
class Site:
    """One with statement in the source: its body, as code and as what can be read without it, and where it lies."""

    code: CodeType
    reads: tuple[Read, ...]
    rest: int | None  # the number of the first statement that is not one of them; None: there is none
    code_from: Callable[[int], CodeType]  # the body without its first statements
    names: frozenset[str]
    inner: frozenset[str] | None  # those that functions and classes of the body use; None: it has neither
    own: frozenset[str]  # the variables of the function around it
    lines: range  # empty: nothing but `pass`, so there is nothing to keep from running
    guarded: frozenset[int]  # the instructions from which an exception gets to the statement's exit


# By (id of the frame's code, instruction). Entries leave with their code object, so that a redefined
# function or notebook cell never meets an older body; code objects are too slow to hash for each trace.
_sites: dict[tuple[int, int], tuple["weakref.ref[CodeType]", Site]] = {}
_parsing = threading.Lock()  # ast.parse in two threads at once can raise SystemError on Python 3.11


def site_of(frame: FrameType) -> Site:
    """The with statement that ``frame`` is entering.

    Raises:
        WithBlockNotFoundError: there is no source, or it is not the source of the running code.
        ValueError: the body is on the line of the ``with``, starts with ``try:``, or another item follows.
        SyntaxError: the body returns, breaks, continues, yields or awaits out of itself.
    """
    key = (id(frame.f_code), frame.f_lasti)
    found = _sites.get(key)
    if found is not None and found[0]() is frame.f_code:
        return found[1]
    with _parsing:
        site = _read(frame)
    # Bound now: code objects may die when the interpreter has taken this module apart.
    forget = functools.partial(_sites.pop, key, None)
    _sites[key] = (weakref.ref(frame.f_code, lambda _: forget()), site)
    return site


def _read(frame: FrameType) -> Site:
    code = frame.f_code
    source = _source_of(frame)
    try:
        tree = ast.parse(source)
    except SyntaxError:
        raise _not_found(frame, "its source does not parse, so it is not what is running") from None
    statement, owner = _statement(frame, tree)
    where = f"{code.co_filename}:{statement.lineno}"
    header = [each for item in statement.items for each in (item.context_expr, item.optional_vars) if each]
    body = list(itertools.dropwhile(_does_nothing, statement.body))
    if statement.body[0].lineno <= max(node.end_lineno or 0 for node in header):
        raise ValueError(f"{where}: put the body of the trace on lines of its own, below the with line")
    if body and isinstance(body[0], ast.Try | ast.TryStar):
        raise ValueError(
            f"{where}: the body of a trace cannot start with try:; put any other statement before it"
        )
    module = _module(statement, owner, frame)
    code_from = functools.cache(_compiler(module.body, code))
    compiled = code_from(0)
    reads, rest = leading_reads(module.body)
    names = _names(compiled)
    inner = [each for each in compiled.co_consts if isinstance(each, CodeType)]
    if not names - {SAVE, "save"} <= _names(code):
        raise _not_found(frame, "the source has changed since it was compiled")
    end = (statement.end_lineno or statement.lineno) + 1
    lines = [node.lineno for each in body[:1] for node in (each, *getattr(each, "decorator_list", ()))]
    return Site(
        code=compiled,
        reads=reads,
        rest=rest,
        code_from=code_from,
        names=frozenset(names),
        inner=frozenset().union(*map(_names, inner)) if inner else None,
        own=frozenset((*code.co_varnames, *code.co_cellvars, *code.co_freevars)),
        lines=range(min(lines, default=end), end),
        guarded=_guarded(frame),
    )


def _source_of(frame: FrameType) -> str:
    code = frame.f_code
    lines = linecache.getlines(code.co_filename, frame.f_globals)
    if lines:
        return "".join(lines)
    if code.co_filename == "<string>" and "-c" in sys.orig_argv[:-1]:
        source = sys.orig_argv[sys.orig_argv.index("-c") + 1]
        # Text given to exec() is called "<string>" too: only the very same code counts.
        with contextlib.suppress(SyntaxError):
            if code in _codes(compile(source, "<string>", "exec", dont_inherit=True)):
                return source
    raise _not_found(frame, "its source is not available")


def _not_found(frame: FrameType, why: str) -> WithBlockNotFoundError:
    return WithBlockNotFoundError(
        f"the with block at {frame.f_code.co_filename}:{frame.f_lineno} cannot be captured: {why}. "
        "Write the block as a function instead, which needs no source: "
        "`@model.trace(...)` over `def block(tracer): ...`"
    )


def _statement(frame: FrameType, tree: ast.Module) -> tuple[ast.With, str | None]:
    """The with statement whose item ``frame`` is entering, and the class that mangles its names."""
    positions = list(frame.f_code.co_positions())[frame.f_lasti // 2]
    exact = None not in positions
    found: list[tuple[ast.With, str | None, int]] = []
    for node, owner in _withs(tree):
        nodes: list[Any] = [node, *(item.context_expr for item in node.items)]
        for number, each in enumerate(nodes, -1):
            position = each.lineno, each.end_lineno, each.col_offset, each.end_col_offset
            if position == positions if exact else each.lineno == frame.f_lineno:
                found.append((node, owner, number))
                break
    if len(found) != 1:
        raise _not_found(frame, "no with statement of its source is where the code says it is")
    node, owner, item = found[0]
    if item < 0:  # up to Python 3.12 the instruction carries the position of the whole statement
        item += sum(
            each.opname == "BEFORE_WITH" and each.positions == positions and each.offset <= frame.f_lasti
            for each in dis.get_instructions(frame.f_code)
        )
    if exact and item != len(node.items) - 1:
        raise ValueError(
            f"{frame.f_code.co_filename}:{node.lineno}: the trace has to be the last item of its with "
            "statement, because what follows it would be left before the body runs"
        )
    return node, owner


def _does_nothing(node: ast.stmt) -> bool:
    constant = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return constant or isinstance(node, ast.Pass | ast.Global | ast.Nonlocal)


def _guarded(frame: FrameType) -> frozenset[int]:
    """Instructions that do nothing may lie outside, and an exception from there would pass the exit by."""
    entries = [
        each
        for each in dis.Bytecode(frame.f_code).exception_entries  # type: ignore[attr-defined]
        if each.start >= frame.f_lasti
    ]
    target = min(entries, key=lambda each: each.start).target
    return frozenset(at for each in entries if each.target == target for at in range(each.start, each.end))


def _withs(tree: ast.AST) -> Iterator[tuple[ast.With, str | None]]:
    stack: list[tuple[ast.AST, str | None]] = [(tree, None)]
    while stack:
        node, owner = stack.pop()
        if isinstance(node, ast.With):
            yield node, owner
        if isinstance(node, ast.ClassDef):
            owner = node.name
        stack.extend((child, owner) for child in ast.iter_child_nodes(node))


def _module(statement: ast.With, owner: str | None, frame: FrameType) -> ast.Module:
    code = frame.f_code
    arguments = code.co_varnames[: code.co_argcount]
    rewrite = _Rewrite(owner, arguments[0] if arguments else None)
    start = ast.copy_location(ast.Pass(), statement.body[0])
    module = ast.Module([start, *(rewrite.visit(node) for node in statement.body)], type_ignores=[])
    ast.fix_missing_locations(module)
    if "@pytest_ar" in frame.f_globals:  # pytest has rewritten the assertions around: those of the body too
        sys.modules["_pytest.assertion.rewrite"].rewrite_asserts(module, b"", code.co_filename)
        # Without its two imports, which the globals around have.
        module.body = [each for each in module.body if not _is_pytests(each)]
    return module


def _compiler(body: list[ast.stmt], code: CodeType) -> Callable[[int], CodeType]:
    """What compiles ``body`` from a statement on, as part of ``code``; it must not keep that alive."""
    file, name, qualified, flags = code.co_filename, code.co_name, code.co_qualname, code.co_flags & _FUTURE

    def compiled_from(start: int) -> CodeType:
        # The first statement does nothing, but keeps a text that comes next from becoming a docstring.
        module = ast.Module([*body[:1], *body[max(start, 1) :]], type_ignores=[])
        try:
            compiled = compile(module, file, "exec", flags=flags, dont_inherit=True)
        except SyntaxError as error:
            error.msg += (
                " (the body of a trace runs apart from the code around it: return, break, continue, yield, "
                "await and nonlocal cannot reach across its edge)"
            )
            raise error.with_traceback(None) from None
        renamed: CodeType = compiled.replace(co_name=name, co_qualname=qualified)
        return renamed

    return compiled_from


def _is_pytests(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import) and (node.names[0].asname or "").startswith("@py")


class _Rewrite(ast.NodeTransformer):
    """What a body needs to mean the same once it is compiled apart from its function."""

    def __init__(self, owner: str | None, self_name: str | None) -> None:
        self.prefix = f"_{owner.lstrip('_')}" if owner and owner.strip("_") else None
        self.self_name = self_name
        self.nested = 0

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Private names are mangled by the class around the body; those in a class of the body by that one."""
        if self.prefix and not isinstance(node, ast.keyword):
            for field in ("asname",) if isinstance(node, ast.alias) else ("id", "attr", "arg", "name"):
                name = getattr(node, field, None)
                if isinstance(name, str) and name.startswith("__") and not name.endswith("__"):
                    setattr(node, field, self.prefix + name)
        prefix = self.prefix
        inner = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef)
        self.nested += inner
        self.prefix = None if isinstance(node, ast.ClassDef) else prefix
        super().generic_visit(node)
        self.nested -= inner
        self.prefix = prefix
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if node.args or node.keywords:
            return node
        if isinstance(node.func, ast.Attribute) and node.func.attr == "save":
            save = ast.copy_location(ast.Name(SAVE, ast.Load()), node.func)
            return ast.copy_location(ast.Call(save, [node.func.value], []), node)
        if isinstance(node.func, ast.Name) and node.func.id == "super" and not self.nested and self.self_name:
            node.args = [ast.Name("__class__", ast.Load()), ast.Name(self.self_name, ast.Load())]
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if self.nested:
            return node
        # Local annotations are never evaluated; in a module they would be.
        bare = ast.Pass() if node.value is None else ast.Assign([node.target], node.value)
        return ast.copy_location(bare, node)

    def visit_Global(self, node: ast.Global | ast.Nonlocal) -> ast.AST:
        # Names go back to where the frame keeps them, whichever kind they are.
        return node if self.nested else ast.copy_location(ast.Pass(), node)

    visit_Nonlocal = visit_Global


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _names(code: CodeType) -> set[str]:
    """Every name that ``code`` and the functions in it use, hidden ones aside."""
    return {
        name
        for part in _codes(code)
        for name in (*part.co_names, *part.co_varnames, *part.co_cellvars, *part.co_freevars)
        if not name.startswith((".", "@py"))
    }
