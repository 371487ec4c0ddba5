"""Schedules: weights and temperatures as functions of the step or the epoch.

A schedule is any function of ``step`` (optimizer steps done so far), ``epoch`` (epochs done), or
both, by these argument names; a single argument of another name is the step. Those below are plain
values, easy to compare, print and write in YAML (``_target_: softs_lightning.schedules.Cosine``).

=============  ===========================================================================
``Constant``   one value
``Linear``     from ``start`` to ``end``, evenly
``Cosine``     from ``start`` to ``end``, slowly at both ends
``WarmUp``     from 0 to ``value``, evenly
``Until``      ``value``, and 0 from ``stop`` on
``Between``    ``value`` from ``start`` on and before ``stop``; 0 outside
``Piecewise``  one value after another, as from given steps or epochs
=============  ===========================================================================

They depend on Lightning's own counters only, which checkpoints restore, so a resumed run follows
them as an uninterrupted one does. A weight of 0 turns a term off for that step: neither its loss
nor, if nothing else needs it, the teacher is run.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

__all__ = [
    "Between",
    "Constant",
    "Cosine",
    "Linear",
    "Piecewise",
    "Schedule",
    "Unit",
    "Until",
    "WarmUp",
    "as_schedule",
]

Schedule = Callable[..., float]
Unit = Literal["step", "epoch"]


def as_schedule(value: float | Schedule, what: str) -> Callable[[int, int], float]:
    """Read a number or a schedule as a function of (step, epoch).

    Args:
        value: a number, or a function of ``step``, ``epoch``, both, or one argument: the step.
        what: what it is for, named in errors.

    Raises:
        TypeError: when it is neither, or requires other arguments.
        ValueError: for a number that is not finite, at once; for a value of a schedule, when it is met.

    >>> as_schedule(lambda epoch: 1.0 if epoch < 3 else 0.0, "weight")(100, 3)
    0.0
    >>> as_schedule(2, "weight")(0, 0)
    2.0
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return Constant(_finite(float(value), what))
    if not callable(value) or isinstance(value, type):
        hint = ", a class: make an instance of it" if isinstance(value, type) else ""
        raise TypeError(f"{what} must be a number or a function of step or epoch, got {value!r}{hint}")
    return _Checked(value, what, _arguments(value, what))


def _finite(value: float, what: str) -> float:
    if not math.isfinite(value):
        raise ValueError(f"{what} must be finite, got {value}")
    return value


def _arguments(schedule: Schedule, what: str) -> tuple[str, ...]:
    """Which of step and epoch it takes by name; empty if it takes the step as its only argument."""
    parameters = inspect.signature(schedule).parameters
    names = tuple(name for name in ("step", "epoch") if name in parameters)
    required = {
        name
        for name, p in parameters.items()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    }
    if names and required <= set(names):
        return names
    if not names and len(required) == 1:
        return ()
    raise TypeError(
        f"{what} must be a function of step, epoch or both, and this one takes {', '.join(parameters) or 'nothing'}"
    )


@dataclass(frozen=True)
class _Checked:
    """A user's schedule, called by what it takes; its values are checked."""

    schedule: Schedule
    what: str
    arguments: tuple[str, ...]

    def __call__(self, step: int, epoch: int) -> float:
        now = {"step": step, "epoch": epoch}
        named = {name: now[name] for name in self.arguments}
        value = self.schedule(**named) if named else self.schedule(step)
        return _finite(float(value), f"{self.what} at step {step} of epoch {epoch}")


@dataclass(frozen=True)
class Constant:
    """One value.

    >>> Constant(0.5)(step=9, epoch=1)
    0.5
    """

    value: float

    def __call__(self, step: int, epoch: int = 0) -> float:
        return self.value


@dataclass(frozen=True)
class _Ramp:
    start: float
    end: float
    over: int
    begin: int = 0
    by: Unit = "step"

    def __post_init__(self) -> None:
        _check_unit(self.by)
        if self.over < 1 or self.begin < 0:
            raise ValueError(f"a ramp goes over at least 1 {self.by} and begins at 0 or later, got {self!r}")

    def _share(self, step: int, epoch: int) -> float:
        return min(max(((step if self.by == "step" else epoch) - self.begin) / self.over, 0.0), 1.0)


class Linear(_Ramp):
    """From `start` to `end` evenly.

    Args:
        start: the value up to `begin`.
        end: the value from ``begin + over`` on.
        over: how many steps (or epochs) the way takes.
        begin: the step (or epoch) at which it begins.
        by: ``"step"`` or ``"epoch"``.

    >>> [Linear(4, 1, over=3)(step) for step in range(5)]
    [4.0, 3.0, 2.0, 1.0, 1.0]
    """

    def __call__(self, step: int, epoch: int = 0) -> float:
        return self.start + (self.end - self.start) * self._share(step, epoch)


class Cosine(_Ramp):
    """From `start` to `end` along half a cosine; arguments as for :class:`Linear`.

    >>> [round(Cosine(1, 0, over=4)(step), 3) for step in range(5)]
    [1.0, 0.854, 0.5, 0.146, 0.0]
    """

    def __call__(self, step: int, epoch: int = 0) -> float:
        return self.end + (self.start - self.end) * (1 + math.cos(math.pi * self._share(step, epoch))) / 2


@dataclass(frozen=True)
class WarmUp:
    """From 0 to `value` evenly, over the first `over` steps (or epochs), then constant.

    The first step has ``value / over``, so that no step is lost.

    >>> [WarmUp(1.0, over=4)(step) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    value: float
    over: int
    by: Unit = "step"

    def __post_init__(self) -> None:
        _check_unit(self.by)
        if self.over < 1:
            raise ValueError(f"a warm-up goes over at least 1 {self.by}, got {self!r}")

    def __call__(self, step: int, epoch: int = 0) -> float:
        return self.value * min(((step if self.by == "step" else epoch) + 1) / self.over, 1.0)


@dataclass(frozen=True)
class Between:
    """`value` from `start` on and before `stop`; 0 outside, which turns the term off.

    >>> [Between(2, 4)(step) for step in range(5)]
    [0.0, 0.0, 1.0, 1.0, 0.0]
    """

    start: int
    stop: int
    value: float = 1.0
    by: Unit = "step"

    def __post_init__(self) -> None:
        _check_unit(self.by)
        if not 0 <= self.start < self.stop:
            raise ValueError(f"a window must begin at 0 or later and end after that, got {self!r}")

    @property
    def changes(self) -> tuple[int, ...]:
        """When it may turn the term on or off."""
        return self.start, self.stop

    def __call__(self, step: int, epoch: int = 0) -> float:
        at = step if self.by == "step" else epoch
        return self.value if self.start <= at < self.stop else 0.0


@dataclass(frozen=True)
class Until:
    """`value` before `stop`, and 0 from then on, which turns the term off.

    >>> [Until(1, by="epoch")(step=7, epoch=epoch) for epoch in range(3)]
    [1.0, 0.0, 0.0]
    """

    stop: int
    value: float = 1.0
    by: Unit = "step"

    def __post_init__(self) -> None:
        _check_unit(self.by)
        if self.stop < 1:
            raise ValueError(f"stop must be at least 1 {self.by}, got {self!r}")

    @property
    def changes(self) -> tuple[int, ...]:
        """When it may turn the term on or off."""
        return (self.stop,)

    def __call__(self, step: int, epoch: int = 0) -> float:
        return self.value if (step if self.by == "step" else epoch) < self.stop else 0.0


@dataclass(frozen=True)
class Piecewise:
    """One value after another: ``values[i]`` from ``since[i]`` on.

    >>> [Piecewise(since=[0, 2], values=[1.0, 0.1])(step) for step in range(4)]
    [1.0, 1.0, 0.1, 0.1]
    """

    since: Sequence[int]
    values: Sequence[float]
    by: Unit = "step"

    def __post_init__(self) -> None:
        _check_unit(self.by)
        rising = all(a < b for a, b in zip(self.since, self.since[1:], strict=False))
        if len(self.since) != len(self.values) or not self.since or self.since[0] != 0 or not rising:
            raise ValueError(
                f"since must begin at 0 and rise, with a value each; got since={list(self.since)}, "
                f"values={list(self.values)}"
            )

    @property
    def changes(self) -> tuple[int, ...]:
        """When it may turn the term on or off."""
        return tuple(self.since)

    def __call__(self, step: int, epoch: int = 0) -> float:
        at = step if self.by == "step" else epoch
        return next(v for s, v in zip(reversed(self.since), reversed(self.values), strict=True) if s <= at)


def _check_unit(by: str) -> None:
    if by not in ("step", "epoch"):
        raise ValueError(f"by must be 'step' or 'epoch', got {by!r}")
