"""EMATeacher: the average is what a loop by hand gives, goes on exactly, and what cannot work is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from softs_lightning import DistillationCallback, EMATeacher, Pair
from softs_lightning.schedules import Linear
from tests.training import Student, assert_untouched, loader, trainer

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

Weights = dict[str, Tensor]


class Normed(Student):
    """With statistics of batches, a counter of them, and dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))


def same_net() -> nn.Sequential:
    torch.manual_seed(9)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(0.2), nn.Linear(6, 3))


def distillation(
    teacher: Callable[[], nn.Module] | nn.Module = same_net, **options: Any
) -> DistillationCallback:
    product = "outputs[3]" if teacher is same_net else "outputs[net]"
    return DistillationCallback(
        teacher, [Pair(product, "outputs[net]", nn.MSELoss(), name="same")], **options
    )


def normed() -> Normed:
    torch.manual_seed(2)
    return Normed()


class Record(L.Callback):
    """The student's weights at the start, and after each batch with the number of optimizer steps."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Weights]] = []

    def _note(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        weights = {n: t.detach().clone() for n, t in pl_module.net.state_dict().items()}  # type: ignore[union-attr,operator]
        self.seen.append((trainer.global_step, weights))

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._note(trainer, pl_module)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:  # type: ignore[override]
        self._note(trainer, pl_module)


def by_hand(seen: list[tuple[int, Weights]], decay: Callable[[int], float]) -> Weights:
    """The average over the steps seen, in double precision."""
    step, average = seen[0][0], {n: t.double() for n, t in seen[0][1].items()}
    for now, weights in seen[1:]:
        if now == step:
            continue
        step, d = now, decay(now)
        for name, tensor in weights.items():
            counts = not tensor.is_floating_point()
            average[name] = tensor.double() if counts else d * average[name] + (1 - d) * tensor.double()
    return average


def assert_close(ours: Any, theirs: Weights) -> None:
    assert set(ours) == set(theirs)
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor.double(), theirs[name], rtol=1e-6, atol=1e-7)


@pytest.mark.situation("teacher that is the student's average", proves="equal to a reference")
@pytest.mark.parametrize(
    ("given", "decay"),
    [(0.8, lambda step: 0.8), (Linear(0.5, 0.9, over=4), lambda step: 0.5 + 0.1 * min(step, 4))],
)
def test_the_average_is_that_of_a_loop_by_hand(given: Any, decay: Callable[[int], float]) -> None:
    mean, record = EMATeacher(given, part="net"), Record()
    trainer(distillation(), mean, record).fit(normed(), loader())
    assert len(record.seen) == 7
    assert_close(mean.weights, by_hand(record.seen, decay))
    assert mean.weights["1.num_batches_tracked"] == 6


def test_it_follows_optimizer_steps_not_batches() -> None:
    mean, record = EMATeacher(0.5, part="net"), Record()
    trainer(distillation(), mean, record, accumulate_grad_batches=2).fit(normed(), loader())
    assert [step for step, _ in record.seen] == [0, 0, 1, 1, 2, 2, 3]
    assert_close(mean.weights, by_hand(record.seen, lambda step: 0.5))


def test_the_teacher_says_what_the_average_says() -> None:
    """The logged term of each step is the loss against the average of the step before, in eval mode."""
    mean, record, said = EMATeacher(0.7, part="net"), Record(), []

    class Expect(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:  # type: ignore[override]
            said.append(float(trainer.logged_metrics["distill/same"]))

    outputs: list[Tensor] = []
    student = normed()
    student.net.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    trainer(distillation(), mean, record, Expect()).fit(student, loader())
    batches = [batch[0] for batch in loader()]
    # The dry run calls the student too: the last six forwards are those of the training.
    for position, output in enumerate(outputs[-6:]):
        teacher = same_net().eval().double()
        teacher.load_state_dict(by_hand(record.seen[: position + 1], lambda step: 0.7))
        with torch.no_grad():
            expected = nn.functional.mse_loss(output.double(), teacher(batches[position].double()))
        assert said[position] == pytest.approx(float(expected), rel=1e-5)


def test_the_whole_student_is_followed_without_its_projectors() -> None:
    mean = EMATeacher(0.0)
    pair = Pair("outputs[net.0]", "outputs[net.1]", nn.MSELoss(), projector="linear", name="same")
    student = normed()
    trainer(DistillationCallback(Normed, [pair]), mean).fit(student, loader())
    assert_untouched(student)
    assert set(mean.weights) == set(student.state_dict())
    assert all(torch.equal(tensor, student.state_dict()[name]) for name, tensor in mean.weights.items())


class Reseed(L.Callback):
    """Dropout draws the same for each batch, whichever fit it is in."""

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(100 * trainer.current_epoch + batch_idx)


def run(
    folder: Path, epochs: int, resume: str | None = None, **options: Any
) -> tuple[Any, EMATeacher, L.Trainer]:
    mean = EMATeacher(0.9, part="net")
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
    # The average before the distillation: in this order too.
    callbacks = (mean, distillation(), checkpoint, Reseed())
    loop = trainer(*callbacks, max_epochs=epochs, enable_checkpointing=True, **options)
    student = normed()
    loop.fit(student, loader(20), ckpt_path=resume)
    return student, mean, loop


@pytest.mark.situation("teacher that is the student's average", proves="resumed equal")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_resuming_goes_on_exactly(tmp_path: Path, accumulate: int) -> None:
    # Five batches an epoch: accumulating two, the last step of an epoch is of one batch.
    options = {"accumulate_grad_batches": accumulate}
    student, mean, _ = run(tmp_path / "whole", 3, **options)
    run(tmp_path / "half", 1, **options)
    again, resumed, _ = run(tmp_path / "rest", 3, resume=str(tmp_path / "half" / "epoch=0.ckpt"), **options)
    for ours, theirs in ((again.state_dict(), student.state_dict()), (resumed.weights, mean.weights)):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert any(not torch.equal(mean.weights[name], student.net.state_dict()[name]) for name in mean.weights)


@pytest.mark.situation("teacher that is the student's average", proves=("checkpoint clean", "left as it was"))
def test_a_checkpoint_is_one_of_the_student(tmp_path: Path) -> None:
    student, mean, _ = run(tmp_path, 1)
    saved = torch.load(tmp_path / "epoch=0.ckpt", weights_only=True)
    assert set(saved["state_dict"]) == set(student.state_dict())
    (state,) = (s for key, s in saved["callbacks"].items() if "EMATeacher" in key)
    assert all(torch.equal(state["weights"][name], tensor) for name, tensor in mean.weights.items())
    assert_untouched(student)


@pytest.mark.situation("teacher that is the student's average", proves="refused with message")
def test_resuming_without_an_average_is_refused(tmp_path: Path) -> None:
    loop = trainer(distillation())
    student = normed()
    loop.fit(student, loader())
    loop.save_checkpoint(tmp_path / "plain.ckpt")
    with pytest.raises(
        MisconfigurationException, match="holds no moving average for the distillation 'distill'"
    ):
        trainer(distillation(), EMATeacher(part="net")).fit(
            student, loader(), ckpt_path=str(tmp_path / "plain.ckpt"), weights_only=True
        )
    trainer(distillation(), EMATeacher(part="net")).validate(
        student, loader(), ckpt_path=str(tmp_path / "plain.ckpt"), weights_only=True, verbose=False
    )


def test_a_second_fit_begins_with_the_student() -> None:
    mean, student = EMATeacher(1.0, part="net"), normed()
    distil = distillation()
    trainer(distil, mean).fit(student, loader())
    now = copy.deepcopy(student.net.state_dict())
    trainer(distil, mean).fit(student, loader())
    floats = {name: tensor for name, tensor in now.items() if tensor.is_floating_point()}
    assert all(torch.equal(mean.weights[name], tensor) for name, tensor in floats.items())


def test_two_distillations_have_an_average_each() -> None:
    slow, fast = EMATeacher(0.9, of="slow", part="net"), EMATeacher(0.1, of="fast", part="net")
    record = Record()
    trainer(distillation(name="slow"), distillation(name="fast"), slow, fast, record).fit(normed(), loader())
    assert_close(slow.weights, by_hand(record.seen, lambda step: 0.9))
    assert_close(fast.weights, by_hand(record.seen, lambda step: 0.1))
    assert slow.state_key != fast.state_key


def test_copies_are_of_a_callback_between_fits() -> None:
    mean = EMATeacher(0.5, part="net")
    trainer(distillation(), mean).fit(normed(), loader())
    for twin in (copy.deepcopy(mean), pickle.loads(pickle.dumps(mean))):
        assert all(torch.equal(twin.weights[name], tensor) for name, tensor in mean.weights.items())


@pytest.mark.parametrize("decay", [-0.1, 1.5, float("nan"), "0.9", True])
def test_a_decay_outside_zero_to_one_is_refused(decay: Any) -> None:
    with pytest.raises((ValueError, TypeError), match="decay"):
        EMATeacher(decay)


def test_a_scheduled_decay_outside_is_refused_when_it_is_met() -> None:
    with pytest.raises(ValueError, match="decay must lie between 0 and 1, got 2"):
        trainer(distillation(), EMATeacher(lambda step: float(step), part="net")).fit(normed(), loader())


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([EMATeacher()], "the trainer has none at all"),
        ([distillation(name="other"), EMATeacher()], "the trainer has 'other'"),
        ([distillation(Normed()), EMATeacher()], "is a module of yours"),
        ([distillation(), EMATeacher(part="nett")], "no such module; nearest: net"),
        ([distillation(), EMATeacher()], r"differ in 0\.bias, 0\.weight"),
        ([distillation(partial(Student, 7)), EMATeacher()], r"Student and Normed differ in net\.0\.bias"),
        ([distillation(teacher_dtype="bfloat16"), EMATeacher(part="net")], "'0.weight' is bfloat16"),
    ],
)
def test_what_cannot_work_is_refused_before_training(callbacks: list[L.Callback], message: str) -> None:
    student, record = normed(), Record()
    with pytest.raises(MisconfigurationException, match=message):
        trainer(*copy.deepcopy(callbacks), record).fit(student, loader())
    assert record.seen == []
    assert_untouched(student)


def test_a_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MisconfigurationException, match="reads from a store"):
        trainer(distillation(store=tmp_path / "store"), EMATeacher(part="net")).fit(normed(), loader())


def test_a_student_in_half_precision_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="in which a moving average stands still"):
        trainer(distillation(), EMATeacher(part="net"), precision="bf16-true").fit(normed(), loader())


def test_two_for_one_distillation_are_refused() -> None:
    with pytest.raises(RuntimeError, match="more than one stateful callback of type `EMATeacher`"):
        trainer(distillation(), EMATeacher(part="net"), EMATeacher(0.5, part="net"))
