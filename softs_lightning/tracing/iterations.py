"""What a block can wait for besides a location: another step of a repeated run, and other blocks."""

import itertools
import warnings
from collections.abc import Iterator, Sequence

from softs_lightning.tracing.errors import LastStep
from softs_lightning.tracing.worker import ENTRY, Worker, current_worker

__all__ = ["Barrier", "Iterations"]


class Iterations:
    """Which visits of a location a loop is about: ``for step in tracer.iter[...]``.

    In the body of the loop, every read and write means visit number ``step`` of its location, counting from 0
    over the whole run. After the loop it means the first visit again, as it does outside of one.

    A loop without an end runs for as long as the model reaches another step, and what follows it runs then. A
    loop with an end that the run does not reach stops there as well, with a warning.
    """

    def __init__(self, steps: range | Sequence[int] | int = 0, *, root: int = 0) -> None:
        self._steps = steps  # an int: all from there on
        self._root = root

    def __getitem__(self, key: int | slice | Sequence[int]) -> "Iterations":
        steps: range | Sequence[int] | int
        what = f"tracer.iter[{key}]"
        if isinstance(key, slice):
            start, stop, stride = key.start or 0, key.stop, 1 if key.step is None else key.step
            what = f"tracer.iter[{start}:{stop}:{stride}]"
            if stop is None and stride != 1:
                raise ValueError(f"{what} has a stride, so it needs an end: tracer.iter[start:stop:stride]")
            negative = min(start, stop or 0) < 0 or stride < 1
            steps = start if stop is None or negative else range(start, stop, stride)
        else:
            steps = [key] if isinstance(key, int) else list(key)
            negative = min(steps, default=0) < 0
            if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
                raise ValueError(f"{what}: the steps have to be in the order in which they come")
        if negative:
            raise ValueError(f"{what}: steps count up from 0; none is negative")
        return Iterations(steps, root=self._root)

    def __iter__(self) -> Iterator[int]:
        worker = current_worker("tracer.iter")
        outer = worker.step, worker.first
        worker.first = None
        asked: tuple[int, ...] | None = None
        try:
            steps = itertools.count(self._steps) if isinstance(self._steps, int) else self._steps
            for number, step in enumerate(steps):
                asked = (worker.first or asked) if number else None
                if number and not self._another(worker, asked, step):
                    break
                worker.step, worker.first = step, None
                yield step
        finally:
            worker.step, worker.first = outer

    def _another(self, worker: Worker, asked: tuple[int, ...] | None, step: int) -> bool:
        """Wait until the model begins the step; False if it never does."""
        endless, run = isinstance(self._steps, int), worker.run
        if asked is None and not endless:
            return True
        modules = asked or (self._root,)
        if any(step < run.begun[module] for module in modules):
            return True
        if not run.finished and not run.over:
            worker.in_loop = True
            try:
                places = tuple((module, ENTRY, step) for module in dict.fromkeys(modules))
                worker.park(places, f"step {step}")
                return True
            except LastStep:
                pass
            finally:
                worker.in_loop = False
        if not endless:
            warnings.warn(
                f"a loop over tracer.iter was to go on with step {step}, but the run ended before it; what it saved "
                "is kept",
                stacklevel=3,
            )
        elif asked is None:
            warnings.warn(
                f"a loop over tracer.iter that has no end asked for no location, so its steps were the calls of the "
                f"traced model; it ended before step {step}",
                stacklevel=3,
            )
        return False


class Barrier:
    """A meeting point for ``n`` blocks, which can be used again once they have all met.

    Args:
        n: how many blocks call it.
    """

    def __init__(self, n: int) -> None:
        if not isinstance(n, int) or n < 1:
            raise ValueError(f"a barrier is for a number of blocks, got {n!r}")
        self._n = n
        self._waiting: list[Worker] = []

    def __call__(self) -> None:
        worker = current_worker("a barrier")
        self._waiting = [
            each for each in self._waiting if each.run is worker.run
        ]  # not of a trace that failed
        if len(self._waiting) + 1 == self._n:
            others, self._waiting = self._waiting, []
            workers = worker.run.workers  # they go on in their order, when this one waits
            worker.run.ready.extend(sorted(others, key=workers.index))
        else:
            self._waiting.append(worker)
            worker.park(None, self)

    def __str__(self) -> str:
        return (
            f"a barrier for {self._n} blocks was reached by {len(self._waiting)} of them by the end of the run; "
            "check the number it was made with"
        )
