"""A with block that is captured instead of run: kept from running, run later, its names handed back.

No torch here. `Capturing` is the context manager; a `Body` is what there is to run: the code of a with block
(`WithBody`) or a plain function (`FunctionBody`).
"""

import contextlib
import ctypes
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, Self

from softs_lightning.tracing.errors import Skip
from softs_lightning.tracing.reads import SAVE, Read
from softs_lightning.tracing.source import Site, site_of

__all__ = ["Body", "Capturing", "FunctionBody", "Scope", "WithBody", "own_frames_removed", "without_context"]

_HERE = str(Path(__file__).parent)
if sys.version_info < (3, 13):
    _locals_to_fast = ctypes.pythonapi.PyFrame_LocalsToFast
    _locals_to_fast.argtypes = [ctypes.py_object, ctypes.c_int]
    _locals_to_fast.restype = None
_COPIED = ("__name__", "__package__", "__spec__", "__file__")  # read by import and warnings past __missing__


def _alone() -> int:
    probe = object()
    return sys.getrefcount(probe)


_ALONE = _alone()  # the count of an object that one local variable refers to
_UNSET = object()


class _Outside(dict[str, Any]):
    """What is around a block, and behind it the builtins, in whose place it stands in the block.

    Where code reads a name by itself, as the body of a class does, it asks the globals without `__missing__`, then
    the builtins.
    """

    def __init__(self, builtins: dict[str, Any], around: dict[str, Any], local: dict[str, Any]) -> None:
        super().__init__(builtins)
        self.around, self.local = around, local

    def __getitem__(self, name: str) -> Any:
        for names in self.local, self.around:
            with contextlib.suppress(KeyError):
                return names[name]
        return super().__getitem__(name)


class Scope(dict[str, Any]):
    """The names of one block: a snapshot of the variables that it uses, then whatever it assigns.

    It serves as the globals of the block's code, so that functions and comprehensions in the block see its
    names; what is not in it comes from the globals around the block, as they are then. Blocks of one run that
    stand in the same frame are siblings: what one assigns, the others see, unless they assigned that name
    themselves.
    """

    def __init__(self, frame: FrameType, site: Site, save: Callable[[Any], Any]) -> None:
        self.around, self.local = around, local = frame.f_globals, frame.f_locals
        names, builtins = site.names, frame.f_builtins
        module = local is around and not isinstance(around, Scope)  # its functions assign to it, too
        self.given = given = {} if module else {name: local[name] for name in names if name in local}
        if not frame.f_code.co_flags & inspect.CO_OPTIMIZED and frame.f_back is not None:
            # A class body does not list what it takes from the function around it.
            outer = frame.f_back.f_locals
            for name in names.intersection(frame.f_code.co_freevars).difference(local):
                given[name] = outer[name]
            drop_locals(frame.f_back, outer)
        for name in _COPIED:
            if name in around:
                given[name] = around[name]
        self.outside = None if site.inner is None else _Outside(builtins, around, local)
        given["__builtins__"] = builtins if self.outside is None else self.outside
        given[SAVE] = save
        super().__init__(given)
        self.assigned: set[str] = set()
        self.siblings: list[Scope] = []

    def __missing__(self, name: str) -> Any:
        if name in self.local:  # only names that the code does not spell out get here: eval, exec
            return self.local[name]
        return self.around[name]

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        self.assigned.add(name)
        for sibling in self.siblings:
            if name not in sibling.assigned:
                dict.__setitem__(sibling, name, value)
                sibling.given[name] = value

    def __delitem__(self, name: str) -> None:
        if name in self:
            super().__delitem__(name)
        else:
            self.__missing__(name)  # the name of a script: from now on it is as if this had not assigned it

    def new(self) -> Iterator[tuple[str, Any]]:
        """What the block assigned; also by a function with a ``global`` statement, which gets past `__setitem__`."""
        given = self.given
        return ((name, value) for name, value in self.items() if given.get(name, _UNSET) is not value)

    def functions(self) -> int:
        """How many functions of the block are referred to by its own names and by nothing else."""
        count = 0
        for value in self.values():
            if isinstance(value, FunctionType) and value.__globals__ is self:
                count += sys.getrefcount(value) == _ALONE + 1
        return count


class Body:
    """Something to run as a block."""

    scope: dict[str, Any]
    reads: tuple[Read, ...] = ()  # what it begins with
    rest: int | None = 0  # the number of its first statement that is no read; None: there is none

    def run(self, start: int = 0) -> Any:
        """Run it, without the first ``start`` statements."""
        raise NotImplementedError

    def push(self, keep: Callable[[Any], bool]) -> None:
        """Hand the names whose values are to ``keep`` back to where the block stands."""

    def join(self, others: list["Body"]) -> None:
        """Share names with those of ``others`` that stand in the same frame."""

    def release(self) -> None:
        """Let go of everything, so that no cycle keeps it."""


class WithBody(Body):
    """The code of a captured with block.

    Args:
        frame: the frame the block stands in.
        site: its code.
        save: what ``value.save()`` calls in the block.
    """

    def __init__(self, frame: FrameType, site: Site, save: Callable[[Any], Any]) -> None:
        self.frame: FrameType | None = frame
        self.code: CodeType = site.code
        self.code_from = site.code_from
        self.reads, self.rest, self.own = site.reads, site.rest, site.own
        self.inner = site.inner
        self.scope: Scope = Scope(frame, site, save)

    def run(self, start: int = 0) -> None:
        exec(self.code_from(start) if start else self.code, self.scope)

    def push(self, keep: Callable[[Any], bool]) -> None:
        if "scope" not in self.__dict__:  # it was done, and a Ctrl-C came afterwards
            return
        values = {name: value for name, value in self.scope.new() if keep(value)}
        if values:
            assert self.frame is not None
            write_names(self.frame, values, self.own)

    def join(self, others: list[Body]) -> None:
        for other in others:
            if isinstance(other, WithBody) and other is not self and other.frame is self.frame:
                self.scope.siblings.append(other.scope)

    def release(self) -> None:
        if "scope" not in self.__dict__:
            return
        frame, scope = self.frame, self.scope
        self.frame = None
        del self.scope
        local, scope.local, scope.siblings, scope.given = scope.local, {}, [], {}
        if scope.outside is not None:
            scope.outside.local = {}
        if frame is not None:
            drop_locals(frame, local)
        # A function defined in the block makes a cycle with the scope, its globals. One that is still in use
        # elsewhere, as a gradient hook is, goes on needing the names that it uses.
        if self.inner is not None:
            for name in [each for each in scope if each not in self.inner and not each.startswith("__")]:
                dict.pop(scope, name)
            inside = scope.functions()
            if inside and sys.getrefcount(scope) == _ALONE + inside:
                scope.clear()


class FunctionBody(Body):
    """A function run as a block, with as many of ``offered`` as it takes arguments.

    Raises:
        TypeError: it is a coroutine or a generator function, or needs more arguments.
    """

    def __init__(self, function: Callable[..., Any], offered: tuple[Any, ...]) -> None:
        name = getattr(function, "__qualname__", repr(function))
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(f"{name} is a coroutine or generator function; a block is a plain function")
        signature = inspect.signature(function)
        kinds = [each.kind for each in signature.parameters.values()]
        positional = sum(kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)
        arguments = offered if inspect.Parameter.VAR_POSITIONAL in kinds else offered[:positional]
        try:
            signature.bind(*arguments)
        except TypeError as error:
            raise TypeError(
                f"{name}{signature} cannot be a block, it is given {len(offered)}: {error}"
            ) from None
        self.function: Callable[..., Any] | None = function
        self.arguments = arguments
        self.value: Any = None

    def run(self, start: int = 0) -> None:
        assert self.function is not None
        self.value = self.function(*self.arguments)

    def release(self) -> None:
        self.function, self.arguments = None, ()


class Capturing:
    """A context manager whose body does not run where it stands, but is given to `_execute` on the way out.

    Used as a decorator instead, it gives `_execute` the function; that way needs no source.
    """

    _frame: FrameType | None = None
    _save: Callable[[Any], Any]  # what `value.save()` calls in the body
    _keeps = False  # whether `_execute` only takes the body in, and it is released later

    def _execute(self, body: Body) -> Any:
        raise NotImplementedError

    def __enter__(self) -> Self:
        frame = sys._getframe(1)
        if self._frame is not None:
            raise RuntimeError("this tracer is already in use; make a new one for each with statement")
        self._frame, self._site = frame, site_of(frame)
        self._previous = sys.gettrace(), frame.f_trace
        self._met = not self._site.lines
        if self._site.lines:
            try:
                frame.f_trace = self._skip
                # The trace function that is displaced has seen this call and will see the return from __exit__;
                # one that counts calls and returns, as coverage's does, must not see this return as well.
                sys._getframe().f_trace = None
                sys.settrace(_nothing)
            except BaseException:  # Ctrl-C: the body is not entered, so it is not left either
                self._trace_again(frame)
                raise
        return self

    def _trace_again(self, frame: FrameType) -> None:
        if self._site.lines:
            frame.f_trace = self._previous[1]
            sys.settrace(self._previous[0])
        del self._previous

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        frame, site = self._frame, self._site
        assert frame is not None
        self._trace_again(frame)
        del self._frame, self._site
        if error is not None and kind is not Skip:
            return False
        if error is None and not self._met:
            raise RuntimeError(
                "the body of the trace ran where it stands, because no trace function can run here "
                "(in a debugger's prompt, or in another trace function); use the decorator form"
            )
        body = WithBody(frame, site, self._save)  # not before: now the target of the with is bound as well
        try:
            self._execute(body)
        except BaseException as raised:
            # Without this the user's own error would seem to come from handling the signal.
            without_context(raised, error)
            raised.__traceback__ = own_frames_removed(raised.__traceback__)
            raise
        finally:
            if not self._keeps:
                body.release()
            if error is not None:
                error.__traceback__ = None
            del frame, body, error, traceback
        return True

    def _skip(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_lineno in self._site.lines:
            self._met = True
            if frame.f_lasti in self._site.guarded:
                raise Skip
        return self._skip

    def __call__(self, function: Callable[..., Any]) -> Any:
        body = FunctionBody(function, (self,))
        try:
            self._execute(body)
            return body.value
        finally:
            body.release()


def _nothing(frame: FrameType, event: str, argument: Any) -> None:
    """A global trace function, which has to be set for a frame's own to be called."""


def write_names(frame: FrameType, values: dict[str, Any], own: frozenset[str]) -> None:
    """Assign ``values`` in ``frame``, which has the variables ``own``, the way its code would."""
    local = frame.f_locals
    for name, value in values.items():
        everywhere = name in own or not frame.f_code.co_flags & inspect.CO_OPTIMIZED
        (local if everywhere else frame.f_globals)[name] = value
    if sys.version_info < (3, 13):  # afterwards f_locals is no copy
        _locals_to_fast(frame, 0)


def drop_locals(frame: FrameType, local: dict[str, Any]) -> None:
    """Empty the copy that looking at ``f_locals`` leaves on a frame, which would keep what the frame deletes."""
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
        # Else somebody called locals(), which is the same object; the argument is one more on the caller's side.
        if sys.getrefcount(local) == _ALONE + 2:
            local.clear()


def own_frames_removed(traceback: TracebackType | None) -> TracebackType | None:
    """The same traceback without the frames of this package, so that it ends on the user's line."""
    kept: list[TracebackType] = []
    while traceback is not None:
        if not traceback.tb_frame.f_code.co_filename.startswith(_HERE):
            kept.append(traceback)
        traceback = traceback.tb_next
    result = None
    for each in reversed(kept):
        line: int | None = each.tb_lineno  # None for code that has no table of lines
        result = TracebackType(
            result,
            each.tb_frame,
            each.tb_lasti,
            each.tb_frame.f_code.co_firstlineno if line is None else line,
        )
    return result


def without_context(raised: BaseException, context: BaseException | None) -> None:
    """Take ``context`` out of the chain of exceptions that ``raised`` arose from."""
    link: BaseException | None = raised
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        if link.__context__ is context:
            link.__context__ = None
        link = link.__context__
