"""The stages of a distillation whose pairs take turns: which are on from which step, and what the teacher then costs.

A schedule that says when it may turn a term on or off has a property ``changes`` (:class:`~softs_lightning.schedules.Between`,
``Until`` and ``Piecewise`` do); of a function of the user's own nothing is known before it is called.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from softs_lightning.pairing import Pair
from softs_lightning.schedules import as_schedule
from softs_lightning.teacher import Cost

__all__ = ["Stage", "stages", "turns"]


@dataclass(frozen=True)
class Stage:
    """From `start` on, in steps or epochs as `unit` says, the pairs called `pairs` are on.

    `cost` is the teacher's with these; ``None`` where no pair is on and the teacher does not run.
    """

    start: int
    unit: str
    pairs: tuple[str, ...]
    cost: Cost | None

    def __str__(self) -> str:
        when = f"From {self.unit} {self.start} ({', '.join(self.pairs) or 'no pair'})"
        if self.cost is None:
            return f"{when} the teacher does not run."
        where = "runs to its end" if self.cost.stop is None else f"stops at {self.cost.stop}"
        return f"{when} the teacher {where}: {100 * self.cost.saved:.1f} % saved."


def turns(pairs: Sequence[Pair]) -> list[tuple[int, str, list[Pair]]]:
    """Start, unit and pairs of every stretch in which the same pairs are on; empty where they do not change.

    >>> from torch import nn
    >>> from softs_lightning.schedules import Between, Until
    >>> first, then = (Pair("outputs[a]", "outputs[a]", nn.MSELoss(), weight=w, name=n)
    ...     for n, w in (("first", Until(2)), ("then", Between(2, 4))))
    >>> [(start, [pair.name for pair in on]) for start, _, on in turns([first, then])]
    [(0, ['first']), (2, ['then']), (4, [])]
    """
    changing = [pair.weight for pair in pairs if getattr(pair.weight, "changes", ())]
    units = {getattr(weight, "by", "step") for weight in changing}
    if (
        len(units) != 1
    ):  # none change, or some by steps and some by epochs: how they interleave is not known here
        return []
    (unit,) = units
    points = sorted({0, *(point for weight in changing for point in getattr(weight, "changes", ()))})
    found: list[tuple[int, str, list[Pair]]] = []
    for point in points:
        on = [pair for pair in pairs if _on(pair, point, unit)]
        if not found or found[-1][2] != on:
            found.append((point, unit, on))
    return found if len(found) > 1 else []


def _on(pair: Pair, point: int, unit: str) -> bool:
    if not getattr(pair.weight, "changes", ()):
        return True
    weight = as_schedule(pair.weight, f"pair {pair.name!r}: weight")
    return weight(point if unit == "step" else 0, point if unit == "epoch" else 0) != 0


def stages(pairs: Sequence[Pair], costs: Sequence[Cost | None]) -> Iterator[Stage]:
    """The :func:`turns` of `pairs` with the teacher's cost in each."""
    for (start, unit, on), cost in zip(turns(pairs), costs, strict=True):
        yield Stage(start, unit, tuple(pair.name for pair in on), cost)
