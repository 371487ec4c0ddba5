"""One run: a call of the model on this thread, and the blocks that read and change it on theirs.

No torch here. The model's side calls `Run.visit` whenever a module is called, and holds there for as long as a
block has something to do at that location.
"""

import functools
import itertools
import warnings
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from softs_lightning.tracing.baton import Baton
from softs_lightning.tracing.errors import Cancelled, OutOfOrderError, Unwind
from softs_lightning.tracing.saving import Saves, save
from softs_lightning.tracing.worker import ACTIVE, ENTRY, OUTPUT, PATIENCE, RESULT, Event, Place, Step, Worker

__all__ = ["Observer", "Run"]


class Observer(Protocol):
    """Sees what every visit of a module came in with and went out with, after all changes."""

    def entered(self, module: int, value: Any) -> Any: ...

    def left(self, module: int, value: Any, token: Any) -> None: ...


_NEVER = "its module was never called (on this thread, and not by fused or scripted code, which calls none)"


@dataclass(eq=False, slots=True)
class Entry:
    """What was kept from the beginning of a visit for its end."""

    event: Event
    tokens: list[Any]


class Run:
    """A call of the model, interleaved with blocks.

    Args:
        workers: the blocks, in the order in which they are served where several wait for the same thing.
        members: ids of the modules that report their visits, to 0 visits each.
        saves: the values to keep.
        name_of: the name of a location, for messages.
        ambient: a context manager to run each block in.
    """

    def __init__(
        self,
        workers: list[Worker],
        members: dict[int, int],
        saves: Saves,
        name_of: Callable[[int, str], str],
        ambient: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.workers = workers
        self.saves = saves
        self.name_of = name_of
        self.ambient = ambient
        self.waiting: dict[Place, list[Worker]] = {}
        self.wanted: dict[int, int] = {}
        self.ready: deque[Worker] = deque()
        self.observers: list[Observer] = []
        self.event: Event | None = None
        self.begun = members
        self.ended = dict(members)
        self.last = 0  # the module reached last: positive at its beginning, negative at its end
        self.attentive = False  # whether every visit is looked at, not only those a block waits for
        self.unwind: Unwind | None = None
        self.stopper: Worker | None = None
        self.failure: BaseException | None = None
        self.finished = False  # the call has returned: no module will be visited any more
        self.over = False
        self.cancelled = False

    @functools.cached_property
    def baton(self) -> Baton:
        """This thread's, to take back from the block that was given its own."""
        return Baton()

    # On the model's thread.

    def drive(self, call: Callable[[], Any]) -> None:
        """Run the blocks and the call to their ends.

        Raises:
            BaseException: what the call or a block raised, as it was raised.
        """
        outer, ACTIVE.run = ACTIVE.run, self
        try:
            try:
                self._start()
                value = call()
                self._go_on()
                self.finished = True
                self._end_loops()
                if RESULT in self.wanted:
                    self._pause((RESULT, OUTPUT, 0), value)
                    self._go_on()
                value = None
            except BaseException as error:
                if self.unwind is None or not _arose_from(error, self.unwind):
                    raise
            self.finished = self.over = True
            if self.failure is None:
                self._end_loops()
                self._unreached()
        finally:
            ACTIVE.run = outer
            self.over = True
            self._cancel()
            self._release()
        if self.failure is not None:
            failure, self.failure = self.failure, None
            context = failure.__context__
            try:
                raise failure
            finally:
                failure.__context__ = context  # raising it here took the exception that is handled here
                del failure, context

    def visit(
        self, module: int, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call ``forward`` for a module, with the blocks that wait for it served before and after."""
        number = self.begun[module]
        self.begun[module] = number + 1
        self.last = module
        entry = None
        if self.attentive or (module in self.wanted and (module, ENTRY, number) in self.waiting):
            entry = self._enter(module, number, (args, kwargs))
            args, kwargs = entry.event.value
        if entry is None or not entry.event.skips:
            value = forward(*args, **kwargs)
        else:
            value = self._skipped(entry.event.skips)
        self.last = -module
        if self.attentive or (module in self.wanted and (module, OUTPUT, number) in self.waiting):
            value = self._leave(module, number, value, entry)
        self.ended[module] = number + 1
        return value

    def _enter(self, module: int, number: int, inputs: Any) -> Entry:
        if self.unwind is not None:
            raise self.unwind
        event = self._pause((module, ENTRY, number), inputs)
        tokens = [each.entered(module, event.value) for each in self.observers]
        if self.unwind is not None:
            raise self.unwind
        return Entry(event, tokens)

    def _leave(self, module: int, number: int, value: Any, entry: Entry | None) -> Any:
        if self.unwind is not None:
            raise self.unwind
        value = self._pause((module, OUTPUT, number), value).value
        if self.observers:
            tokens = entry.tokens if entry is not None else []
            for observer, token in itertools.zip_longest(self.observers, tokens):
                observer.left(module, value, token)
        if self.unwind is not None:
            raise self.unwind
        return value

    def _start(self) -> None:
        for worker in self.workers:
            worker.begin(self, save)
            self._resume(worker)
            self._go_on()

    def _pause(self, place: Place, value: Any) -> Event:
        """Hold the model at ``place`` until no block has anything left to do there."""
        event = self.event = Event(place, value)
        try:
            while True:
                if self.ready:
                    self._resume(self.ready.popleft())
                elif waiting := self.waiting.get(place):
                    worker = waiting[0] if len(waiting) == 1 else min(waiting, key=self.workers.index)
                    self._forget(worker)
                    if worker.rows is not None and worker not in event.views:
                        event.views[worker] = worker.rows.narrow(event.value)
                    self._resume(worker)
                elif event.skippers:
                    self._settle_skips(event)
                else:
                    break
                event.settle()
                if self.failure is not None:
                    break
        finally:
            self.event = None
        if self.failure is not None:
            assert self.unwind is not None
            raise self.unwind
        return event

    def _settle_skips(self, event: Event) -> None:
        """Let the blocks go on that skip the module for their rows, if together they skip it for all."""
        skippers, event.skippers = event.skippers, []
        whole = any(worker.rows is None for worker, _ in event.skips)
        others = [
            worker
            for worker in self.workers
            if worker.rows is not None and all(worker is not skipper for skipper, _ in event.skips)
        ]
        if others and not whole:
            event.skips.clear()
        for worker in skippers:
            if others and not whole:
                worker.thrown = ValueError(
                    f"{worker.waits} was skipped for some rows of the batch only; a module runs for all rows or "
                    f"for none, and {len(others)} block(s) did not skip it"
                )
            self._resume(worker)

    def _skipped(self, skips: list[tuple[Worker, Any]]) -> Any:
        for worker, value in skips:
            if worker.rows is None:
                return value
        skips.sort(key=lambda skip: self.workers.index(skip[0]))
        rows = skips[0][0].rows
        assert rows is not None
        return rows.gather([value for _, value in skips])

    def _resume(self, worker: Worker) -> None:
        """Let a block run until it waits for something or ends."""
        try:
            if worker.thread is not None:
                worker.baton.give()
                self.baton.take()
            elif not worker.serve():
                worker.start()
                self.baton.take()
        except BaseException as interruption:  # Ctrl-C while the block had the baton
            if worker.thread is None or worker.waits is not None:
                raise  # or just before it was given the baton, or after it had given it back
            worker.interrupt(type(interruption))
            if not self.baton.take(PATIENCE):
                warnings.warn("a traced block goes on after an interruption", stacklevel=2)
            worker.error = None
            raise
        if worker.error is not None:
            failure, worker.error = worker.error, None
            if self.failure is None:
                self.failure = failure
                self.unwind = Unwind()
                self.attentive = True
            del failure
        elif worker.alive and worker.waits_for is not None:
            for place in worker.waits_for:
                self.waiting.setdefault(place, []).append(worker)
                self.wanted[place[0]] = self.wanted.get(place[0], 0) + 1

    def _forget(self, worker: Worker) -> None:
        for place in worker.waits_for or ():
            waiting = self.waiting[place]
            waiting.remove(worker)
            if not waiting:
                del self.waiting[place]
            if self.wanted[place[0]] == 1:
                del self.wanted[place[0]]
            else:
                self.wanted[place[0]] -= 1

    def _go_on(self) -> None:
        """Run the blocks that wait for nothing any more; leave the model if one of them said so."""
        while self.ready and self.failure is None:
            self._resume(self.ready.popleft())
        if self.unwind is not None:
            raise self.unwind

    def _end_loops(self) -> None:
        """Tell the loops that wait for another step that there is none."""
        for worker in self.workers:
            if worker.alive and isinstance(worker.waits, Step):
                self._forget(worker)
                worker.waits.reached = False
                self._resume(worker)
                while self.ready and self.failure is None:
                    self._resume(self.ready.popleft())
                if self.failure is not None:
                    return

    def _unreached(self) -> None:
        """Tell the blocks that still wait that what they wait for will not come."""
        for worker in self.workers:
            if not worker.alive:
                continue
            if self.stopper is not None:
                return  # stopping ends every block, and is no error
            self._forget(worker)
            if worker.thread is not None:
                worker.thrown = self._explain(worker)
            self._resume(worker)
            if self.failure is not None:
                return

    def _explain(self, worker: Worker) -> Exception:
        if worker.waits_for is None:
            return ValueError(str(worker.waits))
        return self._missed(worker.waits_for[0], worker.waits)

    def _cancel(self) -> None:
        self.cancelled = True
        for worker in self.workers:
            tries = 0
            worker.alive = worker.alive and worker.thread is not None
            while worker.alive:
                worker.waits_for = None
                worker.thrown = Cancelled()
                worker.baton.give()
                tries += 1
                if tries > 100 or not self.baton.take(PATIENCE):
                    break
            if worker.error is not None:
                error, worker.error = worker.error, None
                if not isinstance(error, KeyboardInterrupt):  # which this thread has met as well
                    warnings.warn(f"a traced block raised {error!r} while it was being ended", stacklevel=2)
                del error

    def _release(self) -> None:
        ended = [worker.close() for worker in self.workers]
        if all(ended) and "baton" in self.__dict__:
            self.baton.close()  # else a thread that was left behind might give it, to whatever came after
        self.workers, self.observers = [], []
        self.waiting.clear()
        self.ready.clear()
        self.event = self.stopper = self.unwind = None  # whose traceback leads back here

    # On a block's thread.

    def check(self, worker: Worker, place: Place, name: str) -> None:
        """Raise unless ``place`` can still be reached."""
        module, kind, number = place
        if self.cancelled or (self.over and self.stopper not in (None, worker)):
            raise Cancelled
        if module != RESULT and module not in self.begun:
            raise ValueError(f"{name} belongs to no module of the model that is being traced")
        if self.over or (self.finished and module != RESULT):
            raise self._missed(place, name)
        if module != RESULT and number < (self.begun if kind == ENTRY else self.ended)[module]:
            raise self._missed(place, name)

    def around(self, place: Place) -> tuple[int, ...]:
        """The module of ``place``, and those running around it that have been visited as often."""
        inside = [each for each, begun in self.begun.items() if begun == place[2] + 1 > self.ended[each]]
        return (*inside, place[0])

    def another(self, worker: Worker, modules: tuple[int, ...], step: int, name: str) -> bool:
        """Wait for visit number ``step`` of any of ``modules``; whether there is one."""
        if any(step < self.begun[module] for module in modules):
            return True
        if self.finished or self.over:
            return False
        question = Step(name)
        worker.park(tuple((module, ENTRY, step) for module in dict.fromkeys(modules)), question)
        return question.reached

    def observe(self, observer: Observer) -> None:
        """Show ``observer`` every visit from now on."""
        self.observers.append(observer)
        self.attentive = True

    def stop(self, worker: Worker) -> None:
        """Leave the model as soon as everybody at this location is served."""
        self.stopper = worker
        self.unwind = Unwind()
        self.attentive = True
        self.over = True

    def release(self, workers: list[Worker]) -> None:
        """Let blocks that wait for no place go on, in their order, when this one waits."""
        self.ready.extend(sorted(workers, key=self.workers.index))

    def _missed(self, place: Place, name: str) -> OutOfOrderError:
        module, _, number = place
        visits = self.begun.get(module, 0)
        which = f"{name} (visit {number})" if number else name
        last = "no module was reached"
        if self.last:
            where = self.name_of(abs(self.last), ENTRY if self.last > 0 else OUTPUT)
            last = f"the last location reached is {where}"
        if self.stopper is not None:
            return OutOfOrderError(f"{which} was asked for after tracer.stop(): {last}")
        if module == RESULT:
            return OutOfOrderError(f"{which} was asked for, but the traced call has not returned: {last}")
        if number < visits:
            hint = "ask for locations in the order in which the model reaches them, and keep what you read"
            more = (
                f"; it has been visited {visits} times, `tracer.iter[n]` selects a visit"
                if visits > 1
                else ""
            )
            return OutOfOrderError(f"{which} was asked for after the run had passed it: {last}; {hint}{more}")
        reached = f"its module was visited {visits} times" if visits else _NEVER
        return OutOfOrderError(f"{which} was not reached: {reached}; {last}")


def _arose_from(error: BaseException, signal: BaseException) -> bool:
    link: BaseException | None = error
    while link is not None and link is not signal:
        link = link.__cause__ or link.__context__
    return link is signal
