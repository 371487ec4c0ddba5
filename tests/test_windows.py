"""Terms averaged over an accumulation window, against loops in float64 over the union of its batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from softs_lightning import DistillationCallback, Pair
from softs_lightning.balancing import GradientBalance
from tests.training import (
    Look,
    Student,
    assert_untouched,
    data,
    loader,
    make_student,
    make_teacher,
    trainer,
)

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")

DOUBLE = torch.float64


def masked(student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """The mean over the rows that count; zero where none does."""
    assert mask is not None
    return ((student - teacher).square().mean(-1) * mask).sum() / mask.sum().clamp_min(1)


def some(batch: Any) -> Tensor:
    """Unlike numbers of rows: none at all in one of the batches."""
    return (batch[0][:, 0] > 0.4).double()


def pairs(**options: Any) -> list[Pair]:
    options = {"loss": masked, "mask": some, "over_window": True, **options}
    return [
        Pair("outputs[1]", "outputs[net.1]", weight=0.5, projector="linear", name="hidden", **options),
        Pair("outputs[3]", "outputs[net]", weight=2.0, name="logits", **options),
    ]


class Stream(IterableDataset[Any]):
    """Data of unknown length, of which a loader must be ahead by a batch to know its end."""

    def __iter__(self) -> Iterator[Any]:
        rows: Any = data(26, DOUBLE)
        return (rows[i] for i in range(26))


def by_hand(
    student: Student, projector: nn.Module, sizes: list[int], batches: list[Any], clip: float | None
) -> None:
    """Each window is one batch for the terms; the task's loss is Lightning's mean of means."""
    frozen = make_teacher().double().eval()
    parameters = [*student.parameters(), *projector.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    for size in sizes:
        for start in range(0, len(batches), size):
            window = batches[start : start + size]
            x, rows = torch.cat([x for x, _ in window]), torch.cat([some(batch) for batch in window])
            h = student.net[1](student.net[0](x))
            out = student.net[2](h)
            with torch.no_grad():
                theirs, target = frozen[1](frozen[0](x)), frozen(x)
            task: Any = sum(F.cross_entropy(student(x), y) for x, y in window)
            loss = task / size
            loss = loss + 0.5 * (projector(h) - theirs)[rows > 0].square().mean()
            loss = loss + 2.0 * (out - target)[rows > 0].square().mean()
            optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(parameters, clip)
            optimizer.step()
        scheduler.step()


def trained(batches: Any, *others: Any, **options: Any) -> tuple[Student, Student, nn.Module]:
    """The student as the callback trained it, as it began, and the projector as it began."""
    student = make_student()
    start = copy.deepcopy(student).double()
    callback = DistillationCallback(make_teacher(), pairs())
    look = Look(callback)
    options = {"precision": "64-true", "max_epochs": 2, **options}
    trainer(callback, look, *others, **options).fit(student.double(), batches)
    return student, start, look.seen[0]


def assert_equal(ours: nn.Module, theirs: nn.Module, tolerance: float = 1e-10) -> None:
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=tolerance)


@pytest.mark.parametrize("size", [1, 3, 4, 9])  # seven batches: the last window is short
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.situation(
    "gradient accumulation, all tokens of the window", "gradient clipping", proves="equal to a reference"
)
def test_a_window_counts_as_one_batch(size: int, clip: float | None) -> None:
    batches = loader(26, dtype=DOUBLE)
    ours, theirs, projector = trained(batches, accumulate_grad_batches=size, gradient_clip_val=clip)
    by_hand(theirs, projector, [size] * 2, list(batches), clip)
    assert_equal(ours, theirs)


def test_without_it_a_window_is_a_mean_of_means() -> None:
    """The data are such that the other weighting shows."""
    found = []
    for over_window in (True, False):
        student = make_student()
        callback = DistillationCallback(make_teacher(), pairs(over_window=over_window)[1:])
        trainer(callback, accumulate_grad_batches=4).fit(student, loader(26))
        found.append(student.net[2].bias.detach())
    assert (found[0] - found[1]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("make", "options", "count"),
    [
        (lambda: DataLoader(Stream(), batch_size=4), {}, 7),
        (lambda: DataLoader(Stream(), batch_size=4), {"limit_train_batches": 5}, 5),
        (lambda: loader(26, dtype=DOUBLE), {"limit_train_batches": 5}, 5),
    ],
)
@pytest.mark.situation(
    "gradient accumulation, all tokens of the window",
    "loader of unknown length",
    proves="equal to a reference",
)
def test_windows_of_streams_and_of_epochs_cut_short(
    make: Callable[[], Any], options: dict[str, Any], count: int
) -> None:
    ours, theirs, projector = trained(make(), accumulate_grad_batches=3, **options)
    by_hand(theirs, projector, [3] * 2, list(make())[:count], None)
    assert_equal(ours, theirs)


def test_windows_follow_a_scheduler_of_accumulation() -> None:
    ours, theirs, projector = trained(
        loader(26, dtype=DOUBLE), GradientAccumulationScheduler({0: 2, 1: 3}), max_epochs=2
    )
    by_hand(theirs, projector, [2, 3], list(loader(26, dtype=DOUBLE)), None)
    assert_equal(ours, theirs)


class Scaled(MixedPrecision):
    """The loss scaling of 16-bit training around a training in full precision: what scaling does shows alone."""

    def __init__(self) -> None:
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**20))

    def forward_context(self) -> Any:
        return nullcontext()

    def convert_module(self, module: nn.Module) -> nn.Module:
        return module.double()


@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.situation(
    "gradient accumulation, all tokens of the window", "precision 16-mixed", proves="equal to a reference"
)
def test_loss_scaling_and_clipping_change_nothing(clip: float | None) -> None:
    batches = loader(26, dtype=DOUBLE)
    ours, theirs, projector = trained(
        batches, accumulate_grad_batches=3, gradient_clip_val=clip, precision=None, plugins=[Scaled()]
    )
    by_hand(theirs, projector, [3] * 2, list(batches), clip)
    assert_equal(ours, theirs)


def test_what_is_logged_averages_to_the_mean_over_the_window() -> None:
    student = make_student()
    start = copy.deepcopy(student)
    callback = DistillationCallback(make_teacher(), pairs()[1:])
    logged: list[float] = []

    class Keep(Look):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            logged.append(trainer.callback_metrics["distill/logits"].item())

        def on_train_start(self, *_: Any) -> None:
            """Nothing to keep yet."""

    trainer(callback, Keep(callback), accumulate_grad_batches=4, max_steps=1).fit(student, loader())
    window = list(loader())[:4]
    x, rows = torch.cat([x for x, _ in window]), torch.cat([some(batch) for batch in window])
    expected = (start(x) - make_teacher().eval()(x))[rows > 0].square().mean()
    assert sum(logged) / 4 == pytest.approx(expected.item(), rel=1e-5)


def test_the_attention_mask_of_a_batch_is_counted() -> None:
    class Dicts(Student):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self(batch["input"]), batch["y"])

    rows: Any = data(24, DOUBLE)
    batch = [{"input": x, "y": y, "attention_mask": (x[0] > 0.4).double()} for x, y in rows]
    found = []
    for options in ({"mask": True}, {"mask": "attention_mask"}, {"mask": lambda b: b["attention_mask"]}):
        torch.manual_seed(2)
        student = Dicts()
        callback = DistillationCallback(make_teacher(), pairs(**options)[1:])
        batches: Any = DataLoader(batch, batch_size=4)  # type: ignore[arg-type]
        trainer(callback, accumulate_grad_batches=3, precision="64-true").fit(student, batches)
        found.append(student)
    torch.manual_seed(2)
    plain = Student()
    tuples = trainer(
        DistillationCallback(make_teacher(), pairs()[1:]), accumulate_grad_batches=3, precision="64-true"
    )
    tuples.fit(plain, loader(dtype=DOUBLE))
    for student in found:
        assert_equal(student, plain)


def test_balancing_does_not_undo_the_weights_of_a_window() -> None:
    """Each batch's factor equals the norms' ratio, and the batch's share comes on top."""
    student = make_student().double()
    start = copy.deepcopy(student)
    callback = DistillationCallback(make_teacher(), pairs()[1:], balance=GradientBalance(momentum=0.0))
    trainer(callback, accumulate_grad_batches=3, precision="64-true", max_steps=1).fit(
        student, loader(dtype=DOUBLE)
    )
    frozen, optimizer = (
        make_teacher().double().eval(),
        torch.optim.Adam(start.parameters(), lr=0.01),
    )
    torch.optim.lr_scheduler.LinearLR(optimizer)
    window = list(loader(dtype=DOUBLE))[:3]
    tokens = sum(some(batch).sum() for batch in window)
    for x, y in window:
        out, rows = start(x), some((x, y))
        task, term = F.cross_entropy(out, y), masked(out, frozen(x).detach(), mask=rows)
        norms = [float(torch.autograd.grad(of, out, retain_graph=True)[0].norm()) for of in (task, term)]
        factor = min(norms[0] / max(norms[1], 1e-30), 1e4)
        (task / 3 + 2.0 * factor * term * rows.sum() / tokens).backward()
    optimizer.step()
    assert_equal(student, start)


# -- refusals --------------------------------------------------------------------------------------


@pytest.mark.situation(
    "gradient accumulation, all tokens of the window", proves=("refused with message", "left as it was")
)
def test_a_mask_that_a_hook_changes_is_refused() -> None:
    class Crops(Student):
        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            return [batch[0] + 1, batch[1]]

    torch.manual_seed(2)
    student = Crops()
    with pytest.raises(
        RuntimeError, match=r"pair 'logits': the mask of a batch counts 3 entries .* and 4 in"
    ):
        trainer(DistillationCallback(make_teacher(), pairs()[1:]), accumulate_grad_batches=2).fit(
            student, loader()
        )
    assert_untouched(student)


def test_what_has_no_mask_to_count_is_refused() -> None:
    with pytest.raises(ValueError, match="it is for losses that take mask="):
        Pair("outputs[3]", "outputs[net]", nn.MSELoss(), over_window=True)
    with pytest.raises(ValueError, match="and not for mask=False"):
        Pair("outputs[3]", "outputs[net]", masked, mask=False, over_window=True)
    with pytest.raises(TypeError, match="over_window must be True or False, got 'yes'"):
        Pair("outputs[3]", "outputs[net]", masked, over_window="yes")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave over_window out"):
        DistillationCallback(make_teacher(), pairs(), manual=True)
    for mask in (True, lambda batch: None):
        student = make_student()
        with pytest.raises(ValueError, match=r"counts the tokens of a mask, and the batch, .* has none"):
            trainer(DistillationCallback(make_teacher(), pairs(mask=mask)[1:])).fit(student, loader())
        assert_untouched(student)
