"""One run: a call of the model on this thread, and the blocks that read and change it on theirs.

No torch here. The model's side calls `Run.visit` whenever a module is called, and holds there for as long as a
block has something to do at that location.
"""

import itertools
import os
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from softs_lightning.tracing.baton import Baton
from softs_lightning.tracing.errors import Cancelled, LastStep, OutOfOrderError, Unwind
from softs_lightning.tracing.saving import Saves, save
from softs_lightning.tracing.worker import ACTIVE, ENTRY, OUTPUT, RESULT, Event, Place, Worker

if TYPE_CHECKING:
    from softs_lightning.tracing.cache import Recorder

__all__ = ["Run"]

_NEVER = "its module was never called (on this thread, and not by fused or scripted code, which calls none)"


class Run:
    """A call of the model, interleaved with blocks. It has to be closed, also if it failed.

    Args:
        workers: the blocks, in the order in which they are served where several wait for the same thing.
        members: ids of the modules that report their visits, to 0 visits each: how many have begun.
        saves: the values to keep.
        name_of: the name of a location, for messages.
        ambient: a context manager to run each block in.
    """

    event: Event | None = None  # where the model is held
    last = 0  # the module reached last: positive at its beginning, negative at its end
    attentive = False  # whether every visit is looked at, not only those a block waits for
    unwind: Unwind | None = None
    stopper: Worker | None = None
    failure: BaseException | None = None
    finished = False  # the call has returned: no module will be visited any more
    over = False
    closed = False

    def __init__(
        self,
        workers: list[Worker],
        members: dict[int, int],
        saves: Saves,
        name_of: Callable[[int, str], str],
        ambient: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.workers = workers
        self.begun, self.ended = (
            members,
            dict(members),
        )  # of the visits numbered from `ended` on, one is running
        self.within: set[tuple[int, int]] = (
            set()
        )  # (module, number) of those that ended within another of theirs
        self.failed: dict[tuple[int, int], str] = {}  # such visits, to the error that they raised
        self.saves = saves
        self.name_of = name_of
        self.ambient = ambient
        self.waiting: dict[Place, list[Worker]] = {}
        self.wanted: dict[int, int] = {}  # for how many of those places, by module
        self.ready: deque[Worker] = deque()  # go on wherever the model is
        self.observers: list[Recorder] = []
        self.baton = Baton()  # this thread's, to take back from the block that was given its own
        self.outer = ACTIVE.run
        self.process = os.getpid()

    # On the model's thread.

    def drive(self, call: Callable[[], Any]) -> None:
        """Run the blocks and the call to their ends.

        Raises:
            BaseException: what the call or a block raised, as it was raised.
        """
        ACTIVE.run = self
        try:
            for worker in self.workers:
                worker.begin(self)
                self._resume(worker)
                self._go_on()
            value = call()
            self._go_on()
            self.finished = True
            self._end_loops()
            if RESULT in self.wanted:
                self._pause((RESULT, OUTPUT, 0), value)
                self._go_on()
            value = None
        except BaseException as error:
            if self.unwind is None or not (error is self.unwind or isinstance(error, Exception)):
                raise
            # The model may have caught what left it, and raise something else in its place.
            if self.failure is None and not _arose_from(error, self.unwind):
                warnings.warn(f"the model raised {error!r} after it was left by tracer.stop()", stacklevel=2)
        self.finished = self.over = True
        self._end_loops()
        self._unreached()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            context = failure.__context__
            try:
                raise failure
            finally:
                failure.__context__ = context  # raising it here took the exception that is handled here
                del failure, context

    def close(self) -> None:
        """End the blocks that have not ended, and let go of everything. May be repeated."""
        if ACTIVE.run is self:
            ACTIVE.run = self.outer
        self.over = self.closed = True
        ended = [worker.close() for worker in self.workers]
        if all(ended):  # else a thread that was left behind might give it, to whatever came after
            self.baton.close()
        self.workers, self.observers = [], []
        self.waiting.clear()
        self.ready.clear()
        self.event = self.stopper = self.unwind = self.failure = None  # whose traceback leads back here

    def visit(
        self, module: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call ``forward`` for a module, with the blocks that wait for it served before and after."""
        number = self.begun[module]
        self.begun[module] = number + 1
        self.last = module
        event: Event | None = None
        tokens: Sequence[Any] = ()
        models = False  # whether it is the model that may raise something
        try:
            if self.attentive or (module in self.wanted and (module, ENTRY, number) in self.waiting):
                event = self._pause((module, ENTRY, number), (args, kwargs))
                args, kwargs = event.value
                tokens = [each.entered(module, event.value) for each in self.observers]
                self._leave()
            if event is not None and event.skips:
                value = self._skipped(event.skips)
            else:
                models = True
                value = forward(*args, **kwargs)
                models = False
            self.last = -module
            if self.attentive or (module in self.wanted and (module, OUTPUT, number) in self.waiting):
                value = self._pause((module, OUTPUT, number), value).value
                for observer, token in itertools.zip_longest(self.observers, tokens):
                    observer.left(module, value, token)
                self._leave()
            return value
        except BaseException as error:
            left = isinstance(error, Unwind)
            self.failed[module, number] = "was left" if left else f"raised {type(error).__name__}"
            if not (models or left) and self.failure is None:
                self.failure = error  # Ctrl-C: whether or not the model catches it, this trace was cut short
                self._unwind()
            raise
        finally:
            if self.ended[module] != number:
                self.within.add((module, number))
            else:
                self.ended[module] = number + 1
                if self.within:
                    self._close_up(module)

    def _close_up(self, module: int) -> None:
        while (module, self.ended[module]) in self.within:
            self.within.remove((module, self.ended[module]))
            self.ended[module] += 1

    def _leave(self) -> None:
        """Leave the model, if a block said so."""
        if self.unwind is not None:
            raise self.unwind

    def _pause(self, place: Place, value: Any) -> Event:
        """Hold the model at ``place`` until no block has anything left to do there."""
        self._leave()
        event = self.event = Event(place, value)
        try:
            while self.failure is None:
                if self.ready:
                    self._resume(self.ready.popleft())
                elif waiting := self.waiting.get(place):
                    worker = waiting[0] if len(waiting) == 1 else min(waiting, key=self.workers.index)
                    self._forget(worker)
                    if worker.rows is not None:
                        event.view(worker)
                    self._resume(worker)
                elif event.skippers:
                    self._settle_skips(event)
                else:
                    event.settle()
                    return event
        finally:
            self.event = None
        assert self.unwind is not None
        raise self.unwind

    def _settle_skips(self, event: Event) -> None:
        """Let the blocks go on that skip the module for their rows, if together they skip it for all."""
        skippers, event.skippers = event.skippers, []
        others = [each for each in self.workers if each.rows is not None and each not in event.skips]
        partly = bool(others) and all(worker.rows is not None for worker in event.skips)
        if partly:
            event.skips.clear()
        for worker in skippers:
            if partly:
                worker.thrown = ValueError(
                    f"{worker.waits} was skipped for some rows of the batch only; a module runs for all rows or "
                    f"for none, and {len(others)} block(s) did not skip it"
                )
            self._resume(worker)

    def _skipped(self, skips: dict[Worker, Any]) -> Any:
        skippers = sorted(skips, key=self.workers.index)
        for worker in skippers:
            if worker.rows is None:
                return skips[worker]
        assert skippers[0].rows is not None
        return skippers[0].rows.gather([skips[worker] for worker in skippers])

    def _resume(self, worker: Worker) -> None:
        """Let a block run until it waits for something or ends."""
        if worker.rows is None and self.event is not None:
            self.event.settle()  # it sees what blocks with rows of their own wrote up to now
        try:
            if worker.thread is not None:
                self.refuse_fork()
                worker.baton.give()
                self.baton.take()
            elif not worker.serve(save):
                worker.start()
                self.baton.take()
        except BaseException as interruption:  # Ctrl-C, perhaps while the block had the baton
            worker.end(type(interruption))
            raise
        if worker.error is not None:
            failure, worker.error = worker.error, None
            if self.failure is None:
                self.failure = failure
                self._unwind()
            del failure
        elif worker.alive and worker.waits_for is not None:
            for place in worker.waits_for:
                self.waiting.setdefault(place, []).append(worker)
                self.wanted[place[0]] = self.wanted.get(place[0], 0) + 1

    def _unwind(self) -> None:
        self.unwind = Unwind()
        self.attentive = True

    def _forget(self, worker: Worker) -> None:
        for place in worker.waits_for or ():
            waiting = self.waiting[place]
            waiting.remove(worker)
            if not waiting:
                del self.waiting[place]
            self.wanted[place[0]] -= 1
            if not self.wanted[place[0]]:
                del self.wanted[place[0]]

    def _go_on(self) -> None:
        """Run the blocks that wait for nothing any more; leave the model if one of them said so."""
        while self.ready and self.failure is None:
            self._resume(self.ready.popleft())
        self._leave()

    def _end_loops(self) -> None:
        """Tell the loops that wait for another step that there is none."""
        for worker in self.workers:
            if worker.alive and worker.in_loop and self.failure is None:
                self._forget(worker)
                worker.thrown = LastStep()
                self._resume(worker)
                while self.ready and self.failure is None:
                    self._resume(self.ready.popleft())

    def _unreached(self) -> None:
        """Tell the blocks that still wait that what they wait for will not come."""
        for worker in self.workers:
            if worker.alive and self.failure is None and self.stopper is None:  # stopping ends every block
                self._forget(worker)
                if worker.waits_for is None:
                    worker.thrown = ValueError(str(worker.waits))
                elif worker.thread is not None:
                    worker.thrown = self._missed(worker.waits_for[0], worker.waits)
                self._resume(worker)

    def refuse_fork(self) -> None:
        """Raise RuntimeError in a process that was forked meanwhile, where the other threads are not."""
        if os.getpid() != self.process:
            raise RuntimeError(
                "the process was forked during a trace, and a block and its model can only wait for each other in the "
                "first: start processes by spawn, or before the trace"
            )

    # On a block's thread.

    def check(self, worker: Worker, place: Place, name: str) -> None:
        """Raise unless ``place`` can still be reached."""
        module, kind, number = place
        if self.closed or (self.over and self.stopper not in (None, worker)):
            raise Cancelled
        if module != RESULT and module not in self.begun:
            raise ValueError(f"{name} belongs to no module of the model that is being traced")
        if self.over or (self.finished and module != RESULT):
            raise self._missed(place, name)
        begun = module != RESULT and number < self.begun[module]
        if begun and (kind == ENTRY or not self._runs(module, number)):
            raise self._missed(place, name)

    def around(self, place: Place) -> tuple[int, ...]:
        """The modules running around ``place`` that have been visited as often, and its own."""
        return (*(module for module in self.begun if self._runs(module, place[2])), place[0])

    def _runs(self, module: int, number: int) -> bool:
        return self.ended[module] <= number < self.begun[module] and (module, number) not in self.within

    def observe(self, observer: "Recorder") -> None:
        """Show ``observer`` every visit from now on."""
        self.observers.append(observer)
        self.attentive = True

    def stop(self, worker: Worker) -> None:
        """Leave the model as soon as everybody at this location is served."""
        self.stopper = worker
        self.over = True
        self._unwind()

    def _missed(self, place: Place, name: str) -> OutOfOrderError:
        module, kind, number = place
        visits = self.begun.get(module, 0)
        last, hint = "no module was reached", ""
        if self.last:
            where = self.name_of(abs(self.last), ENTRY if self.last > 0 else OUTPUT)
            last = f"the last location reached is {where}"
        if self.stopper is not None:
            how = "asked for after tracer.stop()"
        elif module == RESULT:
            how = "asked for, but the traced call has not returned"
        elif kind == OUTPUT and (module, number) in self.failed:
            how = f"not reached, because that visit {self.failed[module, number]}"
        elif number < visits:
            how = "asked for after the run had passed it"
            hint = "; ask for locations in the order in which the model reaches them, and keep what you read"
            if visits > 1:
                hint += f"; it has been visited {visits} times, `tracer.iter[n]` selects a visit"
        else:
            how, hint = "not reached", f"; {last}"
            last = f"its module was visited {visits} times" if visits else _NEVER
        return OutOfOrderError(f"{name}{f' (visit {number})' if number else ''} was {how}: {last}{hint}")


def _arose_from(error: BaseException, signal: BaseException) -> bool:
    links: list[BaseException | None] = [error]
    seen: set[int] = set()  # a model may raise exceptions that arose from each other
    while links:
        link = links.pop()
        if link is signal:
            return True
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            links += link.__cause__, link.__context__
    return False
