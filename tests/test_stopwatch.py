"""Where the time of a step goes, under a clock that only the parts of a step move on."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.profilers import Profiler
from torch import Tensor, nn
from torch.utils.data import DataLoader

from softs_lightning import DistillationCallback, Pair, stopwatch
from softs_lightning.report.timing import Timing, percentages
from softs_lightning.stopwatch import Stopwatch

SPENT = {"data": 7, "teacher": 5, "student": 3, "losses": 2, "backward": 11, "optimizer": 13, "other": 1}


class Clock:
    """Reads zero, and later what the parts of a step have spent."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, phase: str) -> None:
        self.now += SPENT[phase]


class Data(torch.utils.data.IterableDataset[Tensor]):
    def __init__(self, clock: Clock, count: int) -> None:
        self.clock, self.count = clock, count

    def __iter__(self) -> Iterator[Tensor]:
        for _ in range(self.count):
            self.clock.spend("data")
            yield torch.ones(2, 3)


class Teacher(nn.Linear):
    def __init__(self, clock: Clock) -> None:
        super().__init__(3, 4)
        self.clock = clock

    def forward(self, x: Tensor) -> Tensor:
        self.clock.spend("teacher")
        return super().forward(x)


class Student(L.LightningModule):
    def __init__(self, clock: Clock, *, manual: bool = False) -> None:
        super().__init__()
        self.net, self.clock = nn.Linear(3, 4), clock

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.clock.spend("student")
        return self.net(batch).square().mean()

    def on_after_backward(self) -> None:
        self.clock.spend("backward")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.clock.spend("other")

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.clock.now += 1000

    def configure_optimizers(self) -> Any:
        clock = self.clock

        class Slow(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                found = super().step(closure)
                clock.spend("optimizer")
                return found

        return Slow(self.parameters(), lr=0.1)


class Listening(Profiler):
    """A user's own profiler."""

    def __init__(self) -> None:
        super().__init__()
        self.heard: list[str] = []

    def start(self, action_name: str) -> None:
        self.heard.append(action_name)

    def stop(self, action_name: str) -> None:
        pass

    def summary(self) -> str:
        return ""


def fit(clock: Clock, watch: Stopwatch, *, batches: int = 12, **options: Any) -> tuple[Any, Any, Any]:
    def loss(ours: Tensor, theirs: Tensor) -> Tensor:
        clock.spend("losses")
        return nn.functional.mse_loss(ours, theirs)

    distil = DistillationCallback(Teacher(clock), [Pair("outputs[.]", "outputs[net]", loss)])
    student = Student(clock)
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[distil, watch],
        **options,
    )
    data = DataLoader(Data(clock, batches), batch_size=None)
    trainer.fit(student, data, DataLoader(Data(Clock(), 1), batch_size=None))
    return trainer, student, distil


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(stopwatch, "perf_counter", made)
    return made


def test_every_phase_gets_what_it_spent(clock: Clock) -> None:
    watch = Stopwatch(skip=2, steps=4)
    fit(clock, watch)
    found = watch.timing("distilled", 3)
    assert found is not None
    assert (found.arm, found.seed, found.steps) == ("distilled", 3, 4)
    assert found.seconds == sum(SPENT.values())
    assert {name: share * found.seconds for name, share in found.shares.items()} == pytest.approx(SPENT)


def test_validation_between_steps_is_not_counted(clock: Clock) -> None:
    watch = Stopwatch(skip=1, steps=8)
    fit(clock, watch, val_check_interval=3)
    found = watch.timing("distilled", 0)
    assert found is not None
    assert (found.steps, found.seconds) == (8, sum(SPENT.values()))


@pytest.mark.parametrize(("batches", "steps"), [(2, None), (3, None), (4, 1), (6, 3)])
def test_only_whole_steps_count(clock: Clock, batches: int, steps: int | None) -> None:
    watch = Stopwatch(skip=2, steps=20)
    fit(clock, watch, batches=batches)
    found = watch.timing("distilled", 0)
    assert (found.steps if found else None) == steps
    # Lightning fetches one batch ahead, so the last step of all has none to wait for.
    assert found is None or found.seconds * found.steps == steps * sum(SPENT.values()) - SPENT["data"]


@pytest.mark.parametrize("steps", [3, 100])
def test_nothing_is_left_behind(clock: Clock, steps: int) -> None:
    own = Listening()
    trainer, student, distil = fit(clock, Stopwatch(skip=1, steps=steps), profiler=own)
    assert trainer.profiler is own
    assert "training_step" not in student.__dict__
    assert "supply" not in vars(distil.teacher)
    assert sum(action.endswith(".training_step") for action in own.heard) == 12  # timed steps too


def test_an_error_in_a_timed_step_leaves_nothing_behind(clock: Clock) -> None:
    own = Listening()

    class Failing(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 4:
                trainer.profiler_then = trainer.profiler  # type: ignore[attr-defined]
                raise RuntimeError("in the middle")

    watch = Stopwatch(skip=1, steps=50)
    teacher, student = Teacher(clock), Student(clock)
    distil = DistillationCallback(teacher, [Pair("outputs[.]", "outputs[net]", nn.MSELoss())])
    trainer = L.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        profiler=own,  # type: ignore[arg-type]
        callbacks=[distil, watch, Failing()],
    )
    loaders = [DataLoader(Data(one, 12), batch_size=None) for one in (clock, Clock())]
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.fit(student, *loaders)
    assert trainer.profiler_then is not own  # type: ignore[attr-defined]
    assert trainer.profiler is own  # type: ignore[attr-defined]
    assert "supply" not in vars(distil.teacher)


def test_it_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(Stopwatch(skip=3, steps=7))).steps == 7


def test_percentages_add_up_and_the_largest_remainders_are_rounded_up() -> None:
    shares = {"a": 0.12345, "b": 0.33338, "c": 0.54317}
    found = percentages(shares)
    assert sum(round(10 * value) for value in found.values()) == 1000
    assert all(abs(found[name] - 100 * share) < 0.1 for name, share in shares.items())
    assert found == {"a": 12.4, "b": 33.3, "c": 54.3}


def test_timing_comes_back_from_its_file() -> None:
    found = Timing("distilled", 0, 20, 0.1, {"data": 0.25, "teacher": 0.75})
    assert Timing.from_json(found.to_json()) == found
    assert [row[2] for row in found.rows()] == ["share (%)", "25.0", "75.0"]
