"""What losses and projectors are called in messages."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial, update_wrapper, wraps
from typing import Any

import pytest
from torch import Tensor, nn
from torch.nn import functional as F

from softs_lightning import Pair
from softs_lightning.losses import CosineDistance
from softs_lightning.names import called


def huber(student: Tensor, teacher: Tensor, delta: float = 1.0) -> Tensor:
    return F.huber_loss(student, teacher, delta=delta)


class Wrapper:
    """As update_wrapper leaves it, and without a name of its own if it is not `named`."""

    def __init__(self, function: Callable[..., Any], *, named: bool) -> None:
        update_wrapper(self, function)
        if not named:
            del self.__dict__["__name__"]

    def __call__(self, *args: Any) -> Any:
        return self.__wrapped__(*args)  # type: ignore[attr-defined]


class Distance:
    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        return huber(student, teacher)

    def measured(self, student: Tensor, teacher: Tensor) -> Tensor:
        return huber(student, teacher)


@wraps(huber)
def renamed(*args: Any) -> Tensor:
    return huber(*args)


renamed.__name__ = "inner"

named = partial(huber, delta=3.0)
named.__name__ = "my_huber"  # type: ignore[attr-defined]

circle = Wrapper(huber, named=False)
circle.__wrapped__ = partial(circle)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("made", "name"),
    [
        (huber, "huber"),
        (partial(huber, delta=2.0), "huber"),
        (partial(partial(huber, delta=2.0), delta=3.0), "huber"),
        (partial(Wrapper(huber, named=False), 2.0), "huber"),
        (Wrapper(Wrapper(huber, named=True), named=False), "huber"),
        (lru_cache(huber), "huber"),
        (renamed, "huber"),
        (named, "my_huber"),
        (partial(partial, huber), "partial"),
        (Distance(), "Distance"),
        (partial(Distance()), "Distance"),
        (Distance().measured, "measured"),
        (partial(nn.Linear, 3), "Linear"),
        (nn.MSELoss(), "MSELoss"),
        (partial(CosineDistance()), "CosineDistance"),
        (circle, "Wrapper"),
    ],
)
def test_what_is_called_goes_by_the_function_inside(made: Any, name: str) -> None:
    assert called(made) == name


def test_a_pair_shows_the_function_inside_its_loss() -> None:
    pair = Pair("outputs[a]", "outputs[b]", partial(huber, delta=2.0))
    assert ", huber, weight=1)" in repr(pair)
    with pytest.raises(ValueError, match="the loss huber has no argument 'mask'"):
        Pair("outputs[a]", "outputs[b]", partial(huber, delta=2.0), mask="valid")
