"""A block on a thread of its own, which asks the model's thread for locations (no torch here).

Exactly one of the threads of a run is running at any time: whoever gives the baton away waits for its own.
"""

import contextvars
import ctypes
import os
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from softs_lightning.tracing.baton import Baton
from softs_lightning.tracing.capture import Body, own_frames_removed
from softs_lightning.tracing.errors import Cancelled, OutsideTraceError
from softs_lightning.tracing.reads import STOP, Read, locate, take

if TYPE_CHECKING:
    from softs_lightning.tracing.batching import RowRange
    from softs_lightning.tracing.interleave import Run

__all__ = ["ACTIVE", "ENTRY", "OUTPUT", "RESULT", "Event", "Place", "Worker", "current_worker"]

ENTRY, OUTPUT = "input", "output"
RESULT = 0  # in place of a module's id: what the traced call returned

Place = tuple[int, str, int]  # (id of the module, ENTRY or OUTPUT, number of the visit)

_MONITORING = getattr(sys, "monitoring", None)  # from Python 3.12 on
_REFUSALS = 100  # how often a block may go on when it is told to end


class _Active(threading.local):
    run: "Run | None" = None  # whose model runs on this thread
    worker: "Worker | None" = None  # which block runs on this thread
    collecting: Any = None  # what a trace keeps whose block is running here to collect its invokes


ACTIVE = _Active()


def current_worker(what: str) -> "Worker":
    """The block that runs on this thread.

    Raises:
        OutsideTraceError: there is none.
    """
    if ACTIVE.worker is not None:
        return ACTIVE.worker
    if ACTIVE.collecting is None:
        raise OutsideTraceError(f"{what} can only be used in a block while it is being traced")
    raise OutsideTraceError(
        f"{what} cannot be reached here: this trace got no input, so its body only collects invokes; "
        "give trace() an input, or write `with tracer.invoke(...):` around this"
    )


class Event:
    """The model, paused at a place, and the value there."""

    __slots__ = ("given", "place", "skippers", "skips", "stale", "value", "views", "writes")

    def __init__(self, place: Place, value: Any) -> None:
        self.place, self.value = place, value
        self.views: dict[Worker, Any] = {}  # what blocks see that have rows of their own
        self.given: dict[Worker, list[tuple[Any, int]]] = {}  # what was in such a view at first
        self.writes: list[tuple[Worker, Any]] = []  # to such rows
        self.stale: list[tuple[RowRange, Any, list[tuple[Any, int]]]] = []  # views that are no part any more
        self.skips: dict[Worker, Any] = {}
        self.skippers: list[Worker] = []  # wait to hear whether all rows skip

    def view(self, worker: "Worker") -> Any:
        """The rows that a block sees; on the model's thread, under its modes."""
        assert worker.rows is not None
        if worker not in self.views:
            self.views[worker] = worker.rows.narrow(self.value)
            self.given[worker] = worker.rows.state(self.views[worker])
        return self.views[worker]

    def settle(self) -> None:
        """Put what blocks wrote to their rows into the whole; on the model's thread, under its modes.

        Not before somebody has to see the whole: until then, what a block holds of its rows is part of it, and
        what the block changes there in place counts.
        """
        if not (self.given or self.writes or self.stale):
            return
        if any(rows.changed(view, before, in_place=True) for rows, view, before in self.stale):
            raise ValueError(
                "a block changed its rows in place that it had read or assigned before a block of all "
                "rows saw them put together, so the change would be lost; read them again, or assign them"
            )
        for worker, before in self.given.items():
            assert worker.rows is not None
            # Something else was put in a container, which is a copy.
            if worker.rows.changed(self.views[worker], before, in_place=False):
                self.writes.append((worker, self.views[worker]))
        if not self.writes:
            return
        for worker, value in self.writes:
            assert worker.rows is not None
            worker.rows.check(value, self.value)
            self.value = worker.rows.widen(self.value, value)
        for worker, view in self.views.items():  # they are of what the whole was made from
            assert worker.rows is not None
            self.stale.append((worker.rows, view, worker.rows.state(view)))
        for each in self.writes, self.given, self.views:
            each.clear()


class Worker:
    """One block on a thread of its own, once it needs one.

    Args:
        body: what to run.
        rows: the block's part of the batch; None for all of it.
    """

    step = 0  # which visit of a location is meant: a loop over `tracer.iter` moves it
    asked = False  # for any location
    # In a loop: the modules whose next visit could begin another step; None before anything was asked for.
    first: tuple[int, ...] | None = ()
    waits_for: tuple[Place, ...] | None = None
    waits: Any = None  # what it waits for, as said in messages; None while it is running
    in_loop = False  # whether that is another step of a loop
    thrown: BaseException | None = None
    error: BaseException | None = None
    alive = False
    entered = False  # whether an exception that is raised in its thread would be met
    ended = False  # whether it was told to end
    refusals = 0  # how often it went on nevertheless
    patience = 10.0  # seconds that it has to end in
    at = 0  # the statement that its thread begins with
    reads: deque[Read] | None = None  # what it begins with, until it has its thread
    thread: threading.Thread | None = None
    baton: Baton
    back: Baton  # the model's thread's
    run: "Run"

    def __init__(self, body: Body, rows: "RowRange | None" = None) -> None:
        self.body = body
        self.rows = rows

    # On the block's own thread.

    def _main(self) -> None:
        try:
            try:
                self.entered = True
                if not self.ended:
                    ACTIVE.worker = self
                    if self.tracer is not None and threading.gettrace() is None:
                        sys.settrace(self.tracer)  # a debugger's, which would not see the block otherwise
                    self.context.run(self._body)
            except Cancelled:
                pass
            except BaseException as error:
                self.error = error.with_traceback(own_frames_removed(error.__traceback__))
            finally:
                self.alive = False
                if os.getpid() == self.run.process:  # not a process that the block forked
                    self.back.give()
        except BaseException:  # Ctrl-C, which came when there was nothing left to end
            pass

    def _body(self) -> None:
        with self.run.ambient():
            self.body.run(self.at)

    def park(self, places: tuple[Place, ...] | None, waits: Any) -> None:
        """Let the model run on until it reaches one of ``places``."""
        self.run.refuse_fork()
        self.waits_for, self.waits = places, waits
        if not self.ended or self.refusals >= _REFUSALS:
            self.back.give()
            self.baton.take()
        self.waits_for = self.waits = None
        if self.ended:
            self.refusals += 1
            raise Cancelled
        if self.thrown is not None:
            thrown, self.thrown = self.thrown, None
            try:
                raise thrown
            finally:
                del thrown  # or its traceback would keep this frame, and this frame the error

    def reach(self, module: int, kind: str, name: str) -> Event:
        """Wait until the model is at a location, in the visit that this block is at.

        Raises:
            OutOfOrderError: the run has passed it, or ended without reaching it.
        """
        run = self.run
        place = (module, kind, 0 if module == RESULT else self.step)
        self.asked = True
        if run.event is None or run.event.place != place:
            run.check(self, place, name)
            self.park((place,), name)
        assert run.event is not None
        assert run.event.place == place
        if self.first is None and module != RESULT:
            self.first = run.around(place)
        return run.event

    def read(self, module: int, kind: str, name: str) -> Any:
        """The value at a location."""
        event = self.reach(module, kind, name)
        if self.rows is None:
            return event.value
        if self not in event.views:
            self.park((event.place,), name)  # its rows are taken on the model's thread
        return event.views[self]

    def write(self, module: int, kind: str, name: str, value: Any) -> None:
        """Replace the value at a location."""
        event = self.reach(module, kind, name)
        if self.rows is None:
            event.value = value
            event.views.clear()
            event.given.clear()
        else:
            self.rows.check(value, event.value)
            event.writes.append((self, value))
            event.views[self] = value
            event.given.pop(self, None)

    def skip(self, module: int, name: str, value: Any) -> None:
        """Have ``value`` in place of what the module would return, and keep it from running."""
        event = self.reach(module, ENTRY, name)
        if self.rows is None:
            event.skips = {self: value}
        else:
            self.rows.check_part(value)
            event.skips[self] = value
            event.skippers.append(self)
            self.park(None, name)

    # On the model's thread.

    def begin(self, run: "Run") -> None:
        """Take part in a run, with the state of this thread as it is now."""
        self.run = run
        self.alive = True
        self.context = contextvars.copy_context()
        self.tracer = sys.gettrace()
        if self.body.reads and not _watched():
            self.reads = deque(self.body.reads)

    def serve(self, save: Callable[[Any], Any]) -> bool:
        """Read what the block begins with, as far as the model has come; False if its thread has to go on."""
        run, event, reads = self.run, self.run.event, self.reads
        if reads is None:
            return False
        scope = self.body.scope
        while reads:
            read = reads[0]
            self.at = read.at
            if self.waits_for is None:
                where = locate(read, scope, run, save)
                if where is None:
                    return False
                module, kind, name = where
                if kind == STOP:
                    run.stop(self)
                    reads.popleft()
                    continue
                if event is None or event.place != (module, kind, 0):
                    try:
                        run.check(self, (module, kind, 0), name)
                    except (Cancelled, RuntimeError, ValueError):
                        return False  # it is raised again on the line that asks
                    self.waits_for, self.waits = ((module, kind, 0),), name
                    return True
            elif event is None or event.place != self.waits_for[0]:
                return False  # the run is over: that is an error on this line
            self.waits_for = self.waits = None
            self.asked = True
            assert event is not None
            value = event.value if self.rows is None else event.view(self)
            if not take(read, value, scope, run.saves, save):
                return False
            reads.popleft()
        if self.body.rest is None:
            self.alive = False
            return True
        self.at = self.body.rest
        return False

    def start(self) -> None:
        """Start the thread, with the baton: another hand-over would cost as much as the start itself."""
        self.waits_for = self.waits = None
        self.baton, self.back = Baton(), self.run.baton
        self.baton.open()
        self.back.open()
        self.thread = threading.Thread(target=self._main, name="traced block", daemon=True)
        try:
            self.thread.start()
        except Exception as error:
            if isinstance(
                error.__context__, KeyboardInterrupt
            ):  # which broke the lock that it was waiting with
                raise error.__context__ from None
            self.thread = None
            raise

    def end(self, interruption: type[BaseException] | None = None) -> bool:
        """End the block; one that is running meets ``interruption``. Whether its thread has ended."""
        self.ended = True
        if self.thread is None:
            return True
        until = time.monotonic() + 0.5
        while not self.entered:  # Ctrl-C came while the thread was being started, or before
            if time.monotonic() > until:
                getattr(threading, "_limbo", {}).pop(self.thread, None)  # where Ctrl-C in its `start` left it
                self.thread = None  # it never was; if it was, it finds that it is to end
                return True
            time.sleep(0.001)
        if self.alive and self.waits is None and interruption is not None:
            self.interrupt(interruption)
        elif (
            self.alive and self.thread.is_alive()
        ):  # not in a forked process, which would give it to the first
            self.baton.give()
        self.thread.join(self.patience)
        if self.thread.is_alive():
            if self.patience:
                warnings.warn("a traced block did not end and its thread was left behind", stacklevel=2)
            self.patience = 0.0
            return False
        error, self.error = self.error, None
        if error is not None and not isinstance(error, interruption or KeyboardInterrupt):
            warnings.warn(f"a traced block raised {error!r} while it was being ended", stacklevel=2)
        return True

    def interrupt(self, kind: type[BaseException]) -> None:
        """Raise ``kind`` in the block's thread."""
        assert self.thread is not None
        ident = ctypes.c_ulong(self.thread.ident or 0)
        until = time.monotonic() + 0.5
        # Up to Python 3.11, a thread that is being started goes by the number of the one that starts it, and would
        # meet the exception in its place.
        while True:
            with threading._active_limbo_lock:  # type: ignore[attr-defined]
                if not threading._limbo or time.monotonic() > until:  # type: ignore[attr-defined]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(kind))
                    return
            time.sleep(0.001)

    def close(self) -> bool:
        """End it and let go of everything; whether its thread has ended. May be repeated."""
        if not self.end():
            return False
        if "baton" in self.__dict__:
            self.baton.close()
        self.thread = None
        return True


def _watched() -> bool:
    """Whether something wants to see every line that runs."""
    tools = _MONITORING is not None and any(_MONITORING.get_tool(number) for number in range(6))
    return bool(tools or sys.gettrace() or threading.gettrace())
