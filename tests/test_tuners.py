"""Lightning's tuners on a distilled training: what they find, and what they leave behind when a step fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from softs_lightning import DistillationCallback, Pair
from tests.training import Student, assert_untouched, data, hidden, loader, logits, make_teacher, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:.*not enough points"),
    # Lightning restores its own checkpoint after a failure, without the callbacks that it set aside.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used"),
]


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Tunable(Student):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(data(64), batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return loader()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def projector() -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Linear(6, 8)


class Written(Tunable):
    """The distillation in the user's own step."""

    def __init__(self) -> None:
        super().__init__()
        self.projector = projector()
        with torch.random.fork_rng():
            self.teacher = [make_teacher().eval()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            target = self.teacher[0][1](self.teacher[0][0](batch[0]))
        term = F.mse_loss(self.projector(self.net[1](self.net[0](batch[0]))), target)
        return super().training_step(batch, batch_idx) + 0.5 * term


def seeded(kind: Any) -> Any:
    torch.manual_seed(2)
    return kind()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name


@pytest.mark.situation("learning rate finder", proves="equal to a reference")
def test_the_learning_rate_that_is_found_is_that_of_the_module_written_by_hand() -> None:
    found = []
    for module, callbacks in (
        (seeded(Tunable), [DistillationCallback(make_teacher(), [hidden(projector=projector())])]),
        (seeded(Written), []),
    ):
        finder = Tuner(trainer(*callbacks)).lr_find(module, num_training=30)
        assert finder is not None
        found.append((finder.results, module.lr))
    torch.testing.assert_close(torch.tensor(found[0][0]["loss"]), torch.tensor(found[1][0]["loss"]))
    assert found[0][1] == found[1][1] != 0.01


class Full:
    """Runs out of memory for more than eight rows, until it is told not to."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def __call__(self, rows: int) -> None:
        self.seen.append(rows)
        if rows > 8:
            raise RuntimeError("CUDA out of memory. Tried to allocate more than there is")


PLACES = ("student", "teacher", "loss")


def fails_in(place: str, full: Full) -> tuple[Tunable, nn.Module, DistillationCallback]:
    student, teacher = seeded(Tunable), make_teacher()

    def loss(s: Tensor, t: Tensor) -> Tensor:
        if place == "loss":
            full(len(s))
        return F.mse_loss(s, t)

    class Fails(nn.Tanh):
        def forward(self, x: Tensor) -> Tensor:
            full(len(x))
            return super().forward(x)

    if place == "student":
        student.net[1] = Fails()
    if place == "teacher":
        teacher[1] = Fails()
    pairs = [hidden(loss=loss, projector=projector()), logits()]
    return student, teacher, DistillationCallback(teacher, pairs)


@pytest.mark.situation("fault: exception swallowed by a tuner", "batch size finder", proves="left as it was")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("mode", ["power", "binsearch"])
def test_a_tuner_that_swallows_a_failure_leaves_nothing_behind(place: str, mode: Any) -> None:
    full = Full()
    student, teacher, callback = fails_in(place, full)
    Tuner(trainer(callback)).scale_batch_size(student, mode=mode, steps_per_trial=1)
    assert student.batch_size == {"power": 8, "binsearch": 7}[mode]  # the latter keeps a margin
    assert max(full.seen) > 8
    assert_untouched(student)
    assert_same(student, seeded(Tunable))
    assert teacher.training
    assert all(p.requires_grad for p in teacher.parameters())
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in teacher.modules())
    assert not callback.projectors


@pytest.mark.situation(
    "fault: exception swallowed by a tuner", "batch size finder", proves="equal to a reference"
)
@pytest.mark.parametrize("place", PLACES)
def test_a_fit_that_goes_on_after_the_failure_equals_one_that_never_failed(place: str) -> None:
    student, _, callback = fails_in(place, Full())
    torch.manual_seed(0)
    trainer(callback, BatchSizeFinder(steps_per_trial=1)).fit(student)
    never, _, other = fails_in("nowhere", Full())
    never.batch_size = 8
    torch.manual_seed(0)
    trainer(other).fit(never)
    assert student.batch_size == 8
    assert_same(student, never)
    assert_untouched(student)
    ours, theirs = callback.state_dict()["projectors"], other.state_dict()["projectors"]
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)


@pytest.mark.situation("gradient accumulation, all tokens of the window", proves="equal to a reference")
def test_a_tuner_before_the_fit_leaves_no_window_of_its_own() -> None:
    """Tuners train from the first batch on in every trial, and without the hooks of other callbacks."""

    def masked(s: Tensor, t: Tensor, *, mask: Tensor) -> Tensor:
        return ((s - t).square().mean(-1) * mask).sum() / mask.sum().clamp_min(1)

    def some(batch: Any) -> Tensor:
        return (batch[0][:, 0] > 0.4).float()

    students = []
    for tuners in ([BatchSizeFinder(max_trials=2, init_val=4, steps_per_trial=5)], []):
        student = seeded(Tunable)
        student.batch_size = 2 if tuners else 8
        pair = Pair("outputs[3]", "outputs[net]", masked, mask=some, over_window=True)
        torch.manual_seed(0)
        trainer(DistillationCallback(make_teacher(), [pair]), *tuners, accumulate_grad_batches=3).fit(student)
        assert student.batch_size == 8
        students.append(student)
    assert_same(*students)


@pytest.mark.situation(
    "fault: exception swallowed by a tuner", "learning rate finder", proves="left as it was"
)
@pytest.mark.parametrize("place", PLACES)
def test_a_failure_that_a_user_swallows_leaves_nothing_behind(place: str) -> None:
    student, teacher, callback = fails_in(place, Full())
    student.batch_size = 16
    finder: L.Callback = LearningRateFinder(num_training_steps=5)
    for attempt in (
        lambda: Tuner(trainer(callback)).lr_find(student, num_training=5),
        lambda: trainer(callback, finder).fit(student),
    ):
        with pytest.raises(RuntimeError, match="out of memory"):
            attempt()
        assert_untouched(student)
        assert teacher.training
        assert not callback.projectors
    student.batch_size = 8
    trainer(callback).fit(student)
    assert_untouched(student)
