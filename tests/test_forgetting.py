"""What a scan leaves in functions, classes and modules, against what was there before it."""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, ClassVar

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from softs_lightning import Pair, ProductSpec, Teacher
from softs_lightning.forgetting import faking, forgetting
from softs_lightning.outline import outline
from softs_lightning.sketch import Sketch
from softs_lightning.trial import try_loss
from tests.test_sketch import ROWS

NET = ProductSpec.parse("outputs[net]")
MASK: Tensor | None = None
MASKS: dict[str, dict[int, Tensor]] = {"lower": {}}
SEEN: list[Tensor] = []
LAST: deque[Tensor] = deque(maxlen=2)


class Kept:
    """An object of a module, with a place for a mask."""

    mask: Tensor | None = None


class Caching(L.LightningModule):
    """Keeps a mask that it makes in its first step, in the way that a subclass says."""

    MASK: ClassVar[Tensor | None] = None
    READY: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        with torch.device(x.device):
            scores: Tensor = self.net(x) * self.mask()
        return scores

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def mask(self) -> Tensor:
        if not Caching.READY:
            Caching.MASK, Caching.READY = torch.ones(2), True
        assert Caching.MASK is not None
        return Caching.MASK


class Variable(Caching):
    def mask(self) -> Tensor:
        global MASK
        MASK = torch.ones(2) if MASK is None else MASK
        return MASK


class Nested(Caching):
    def mask(self) -> Tensor:
        return MASKS["lower"].setdefault(2, torch.ones(2))


class Lists(Caching):
    def mask(self) -> Tensor:
        if not SEEN:
            SEEN.append(torch.ones(2))
            LAST.append(SEEN[0])
        return SEEN[0] * LAST[0]


class Making(Caching):
    """Makes it as it is made."""

    def __init__(self) -> None:
        super().__init__()
        super().mask()


KINDS = [Caching, Variable, Nested, Lists, Making]


@pytest.fixture(autouse=True)
def fresh() -> None:
    nothing_is_kept()


def nothing_is_kept() -> None:
    global MASK
    MASK = None
    Caching.MASK, Caching.READY = None, False
    for container in (MASKS["lower"], SEEN, LAST):
        container.clear()


def trained(kind: type[Caching]) -> dict[str, Tensor]:
    torch.manual_seed(0)
    student = kind()
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = L.Trainer(max_steps=2, accelerator="cpu", enable_model_summary=False, **quiet)
    trainer.fit(student, DataLoader(ROWS[:4], batch_size=2))  # type: ignore[arg-type]
    return student.state_dict()


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_after_a_sketch_is_that_without_one(kind: type[Caching]) -> None:
    student = Sketch(kind)
    student.rehearse(ROWS, NET)
    assert (student.made, student.ran) == (None, None)
    found = trained(kind)
    nothing_is_kept()
    assert all(torch.equal(value, found[name]) for name, value in trained(kind).items())
    torch.manual_seed(0)
    assert not torch.equal(kind().net.weight, found["net.weight"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_forward_after_an_outline_of_a_teacher_has_values(kind: type[Caching]) -> None:
    with outline(Teacher(kind), ROWS, NET) as seen:
        assert seen.ran is None
    model = kind()
    assert torch.equal(model(ROWS), model.net(ROWS))


def test_a_class_that_is_in_no_module_is_set_back() -> None:
    class Local(Caching):
        OWN: ClassVar[list[Tensor]] = []

        def mask(self) -> Tensor:
            self.OWN.append(torch.ones(2))
            type(self).LAST = self.OWN[-1]  # type: ignore[attr-defined]
            return self.OWN[0]

    Sketch(Local).rehearse(ROWS, NET)
    assert Local.OWN == []
    assert not hasattr(Local, "LAST")


def test_variables_of_code_without_a_module_are_set_back() -> None:
    code = "import torch\nMASKS = {}\nclass Model(torch.nn.Module):\n    def mask(self):\n"
    names: dict[str, Any] = {"__name__": "nowhere_to_be_found"}
    exec(code + "        MASKS[0] = torch.ones(2)", names)
    with faking() as mode, mode:
        names["Model"]().mask()
    assert names["MASKS"] == {}


def test_what_holds_no_such_tensor_stays_and_so_do_imports() -> None:
    real = torch.ones(2)
    with faking() as mode, mode:
        MASKS["lower"][1] = real
    assert MASKS["lower"][1] is real
    with faking() as mode, mode:
        globals()["imported"] = sys
        SEEN.append(torch.ones(2))
    assert globals().pop("imported") is sys
    assert (SEEN, list(MASKS["lower"])) == ([], [1])


def test_a_loss_that_remembers_is_tried_without_a_trace() -> None:
    class Remembering(nn.Module):
        KEPT: ClassVar[dict[int, Tensor]] = {}

        def forward(self, student: Tensor, teacher: Tensor) -> Tensor:
            scale = self.KEPT.setdefault(0, torch.ones(2**12))
            return (scale * (student - teacher)).mean()

    large = torch.empty(2**13, 2**12, device="meta")
    pair = Pair("outputs[0]", "outputs[net]", Remembering())
    assert try_loss(pair, [large], [large], None, nn.Linear(1, 1), nn.Linear(1, 1)) is None
    assert Remembering.KEPT == {}


def test_what_is_being_made_around_it_is_let_go_of() -> None:
    def each() -> Iterator[int]:
        for number in range(20):
            with forgetting():
                yield number

    assert tuple(each()) == tuple(range(20))  # which Python makes larger on its way, if nobody else holds it


GONE = weakref.proxy(Kept())


def test_objects_that_answer_for_others_are_not_asked() -> None:
    with pytest.raises(ReferenceError):
        isinstance(GONE, Kept)
    with faking() as mode, mode:
        MASKS["lower"][0] = torch.ones(2)
    assert MASKS["lower"] == {}
