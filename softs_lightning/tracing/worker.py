"""A block on a thread of its own, which asks the model's thread for locations (no torch here).

Exactly one of the threads of a run is running at any time: whoever gives the baton away waits for its own.
"""

import contextvars
import ctypes
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from softs_lightning.tracing.baton import Baton
from softs_lightning.tracing.capture import Body, own_frames_removed
from softs_lightning.tracing.errors import Cancelled, OutsideTraceError
from softs_lightning.tracing.reads import STOP, Reads

if TYPE_CHECKING:
    from softs_lightning.tracing.interleave import Run

__all__ = [
    "ACTIVE",
    "ENTRY",
    "OUTPUT",
    "PATIENCE",
    "RESULT",
    "Event",
    "Place",
    "Rows",
    "Step",
    "Worker",
    "current_worker",
]

ENTRY, OUTPUT = "input", "output"
RESULT = 0  # in place of a module's id: what the traced call returned

Place = tuple[int, str, int]  # (id of the module, ENTRY or OUTPUT, number of the visit)

_MONITORING = getattr(sys, "monitoring", None)  # from Python 3.12 on

PATIENCE = 10.0  # seconds that a block has to end in when it is told to


class Rows(Protocol):
    """A block's part of a batch."""

    def narrow(self, value: Any) -> Any:
        """This part of ``value``."""

    def check(self, value: Any, whole: Any) -> None:
        """Raise ValueError unless ``value`` fits in this part of ``whole``."""

    def widen(self, whole: Any, value: Any) -> Any:
        """``whole`` with ``value`` in place of this part."""

    def check_part(self, value: Any) -> None:
        """Raise ValueError unless ``value`` is as long as this part."""

    def gather(self, parts: list[Any]) -> Any:
        """The whole that is made of the ``parts``."""


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
    worker = ACTIVE.worker
    if worker is None:
        if ACTIVE.collecting is not None:
            raise OutsideTraceError(
                f"{what} cannot be reached here: this trace got no input, so its body only collects invokes; "
                "give trace() an input, or write `with tracer.invoke(...):` around this"
            )
        raise OutsideTraceError(f"{what} can only be used in a block while it is being traced")
    return worker


@dataclass(eq=False, slots=True)
class Event:
    """The model, paused at a place, and the value there."""

    place: Place
    value: Any
    views: dict["Worker", Any] = field(default_factory=dict)
    writes: list[tuple["Worker", Any]] = field(default_factory=list)
    skips: list[tuple["Worker", Any]] = field(default_factory=list)
    skippers: list["Worker"] = field(default_factory=list)  # wait to hear whether all rows skip

    def settle(self) -> None:
        """Put what blocks wrote to their rows into the whole; on the model's thread, under its modes."""
        for worker, value in self.writes:
            assert worker.rows is not None
            self.value = worker.rows.widen(self.value, value)
        self.writes.clear()


class Worker:
    """One block on a thread of its own.

    Args:
        body: what to run.
        rows: the block's part of the batch; None for all of it.
    """

    def __init__(self, body: Body, rows: Rows | None = None) -> None:
        self.body = body
        self.rows = rows
        self.step = 0  # which visit of a location is meant: a loop over `tracer.iter` moves it
        self.asked = False
        # In a loop: the modules whose next visit could begin another step; None before anything was asked for.
        self.first: tuple[int, ...] | None = ()
        self.waits_for: tuple[Place, ...] | None = None
        self.waits: Any = None  # said in messages: what it waits for
        self.thrown: BaseException | None = None
        self.error: BaseException | None = None
        self.alive = False
        self.entered = False  # whether an exception that is raised in its thread would be met
        self.reads: Reads | None = None  # what it begins with, until it has its thread
        self.at = 0  # the statement that its thread begins with
        self.baton: Baton
        self.back: Baton  # the model's thread's
        self.thread: threading.Thread | None = None
        self.run: Run

    # On the block's own thread.

    def _main(self) -> None:
        try:
            self.entered = True
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
            self.back.give()

    def _body(self) -> None:
        with self.run.ambient():
            self.body.run(self.at)

    def park(self, places: tuple[Place, ...] | None, waits: Any) -> None:
        """Let the model run on until it reaches one of ``places``."""
        self.waits_for, self.waits = places, waits
        self.back.give()
        self.baton.take()
        self.waits_for = self.waits = None
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
        event = run.event
        if event is None or event.place != place:
            run.check(self, place, name)
            self.park((place,), name)
            event = run.event
            assert event is not None
            assert event.place == place
        if self.first is None and module != RESULT:
            self.first = run.around(place)
        return event

    def read(self, module: int, kind: str, name: str) -> Any:
        """The value at a location."""
        event = self.reach(module, kind, name)
        if self not in event.views:
            if self.rows is None:
                event.views[self] = event.value
            else:
                self.park((event.place,), name)  # its rows are taken on the model's thread
        return event.views[self]

    def write(self, module: int, kind: str, name: str, value: Any) -> None:
        """Replace the value at a location."""
        event = self.reach(module, kind, name)
        if self.rows is None:
            event.value = value
        else:
            self.rows.check(value, event.value)
            event.writes.append((self, value))
        event.views[self] = value

    def skip(self, module: int, name: str, value: Any) -> None:
        """Have ``value`` in place of what the module would return, and keep it from running."""
        event = self.reach(module, ENTRY, name)
        if self.rows is not None:
            self.rows.check_part(value)
            event.skips.append((self, value))
            event.skippers.append(self)
            self.park(None, name)
        else:
            event.skips[:] = [(self, value)]

    # On the model's thread.

    def begin(self, run: "Run", save: Callable[[Any], Any]) -> None:
        """Take part in a run, with the state of this thread as it is now."""
        self.run = run
        self.alive = True
        self.context = contextvars.copy_context()
        self.tracer = sys.gettrace()
        if self.body.reads and not _watched():
            self.reads = Reads(self.body.reads, self.body.scope, save)

    def serve(self) -> bool:
        """Read what the block begins with, as far as the model has come; False if its thread has to go on."""
        run, reads, event = self.run, self.reads, self.run.event
        if reads is None:
            return False
        reached = self.waits_for is not None and event is not None and event.place == self.waits_for[0]
        self.waits_for = self.waits = None
        while (read := reads.next) is not None:
            self.at = read.at
            if not reached:
                wanted = reads.ask(run)
                if wanted is None:
                    return False
                place = wanted[0], wanted[1], 0
                if wanted[1] == STOP:
                    run.stop(self)
                    reads.go_on()
                    continue
                if event is None or event.place != place:
                    try:
                        run.check(self, place, wanted[2])
                    except (Cancelled, RuntimeError, ValueError):
                        return False  # it is raised again on the line that asks
                    self.waits_for, self.waits = (place,), wanted[2]
                    return True
            assert event is not None
            reached = False
            self.asked = True
            if self not in event.views:
                event.views[self] = event.value if self.rows is None else self.rows.narrow(event.value)
            if not reads.take(event.views[self], run.saves):
                return False
            reads.go_on()
        if self.body.rest is None:
            self.alive = False
            return True
        self.at = self.body.rest
        return False

    def start(self) -> None:
        """Start the thread, with the baton."""
        self.baton, self.back = Baton(), self.run.baton
        # It begins with the baton: another hand-over would cost as much as the start itself.
        self.thread = threading.Thread(target=self._main, name="traced block", daemon=True)
        try:
            self.thread.start()
        except Exception:
            self.thread = None
            self.baton.close()
            raise

    def interrupt(self, kind: type[BaseException]) -> None:
        """Raise ``kind`` in the block while it is running."""
        patience = time.monotonic() + PATIENCE
        while self.thread is not None and not self.entered and time.monotonic() < patience:
            time.sleep(0.001)  # it was interrupted while the thread was being started
        if self.thread is not None and self.thread.ident is not None and self.alive:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(self.thread.ident), ctypes.py_object(kind)
            )

    def close(self) -> bool:
        """Wait for the thread; whether it has ended."""
        ended = True
        if self.thread is not None:
            self.thread.join(PATIENCE)
            ended = not self.thread.is_alive()
            if ended:
                self.baton.close()
            else:
                warnings.warn("a traced block did not end and its thread was left behind", stacklevel=2)
        self.thread = self.rows = None
        for name in ("body", "reads", "run", "tracer", "context", "back"):
            self.__dict__.pop(name, None)
        return ended


def _watched() -> bool:
    """Whether something wants to see every line that runs."""
    tools = _MONITORING is not None and any(_MONITORING.get_tool(number) for number in range(6))
    return bool(tools or sys.gettrace() or threading.gettrace())


class Step:
    """A loop's question whether there is another step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.reached = True

    def __str__(self) -> str:
        return self.name
