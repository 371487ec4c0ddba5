"""The callback beside what else a Trainer does: tuners, averaging, fine-tuning, loops cut short, copies."""

from __future__ import annotations

import copy
import io
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from softs_lightning import DistillationCallback, Pair
from softs_lightning.auxiliary import CONTAINER
from tests.training import (
    Look,
    Student,
    assert_untouched,
    data,
    hidden,
    loader,
    logits,
    make_student,
    make_teacher,
    trainer,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:`weights_only` was not set"),
]


class WithNorm(Student):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


def seeded(kind: type[Student]) -> Student:
    torch.manual_seed(2)
    return kind()


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name


def assert_same_projectors(ours: DistillationCallback, theirs: DistillationCallback) -> None:
    mine, its = ours.state_dict()["projectors"], theirs.state_dict()["projectors"]
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[key], its[key]) for key in mine)


# -- resumed equals uninterrupted, beside other callbacks ------------------------------------------


def run(
    path: Path,
    distillations: list[DistillationCallback],
    others: list[L.Callback],
    kind: type[Student] = Student,
    resume: Path | None = None,
    epochs: int = 4,
) -> Student:
    student = seeded(kind)
    save = ModelCheckpoint(path, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
    torch.manual_seed(11)
    trainer(*distillations, *others, save, enable_checkpointing=True, max_epochs=epochs).fit(
        student, loader(), loader(), ckpt_path=resume, weights_only=False if resume else None
    )
    assert_untouched(student)
    return student


def in_row(row: str, value: Any) -> Any:
    return pytest.param(value, marks=pytest.mark.situation(row, proves="resumed equal"))


@pytest.mark.parametrize("kind", [Student, WithNorm])
@pytest.mark.parametrize(
    "other",
    [
        in_row("WeightAveraging", WeightAveraging),
        in_row("EMAWeightAveraging", lambda: EMAWeightAveraging(decay=0.5)),
        in_row(
            "StochasticWeightAveraging", lambda: StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1)
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model that overrides")
@pytest.mark.filterwarnings("ignore:.*swap")
def test_resumed_equals_uninterrupted_beside_averaging(
    tmp_path: Path, kind: type[Student], other: Callable[[], L.Callback]
) -> None:
    whole, resumed = (DistillationCallback(make_teacher(), [hidden()]) for _ in range(2))
    ours = run(tmp_path / "whole", [whole], [other()], kind)
    theirs = run(tmp_path / "resumed", [resumed], [other()], kind, tmp_path / "whole" / "epoch=1.ckpt")
    assert_same(ours, theirs)
    assert_same_projectors(whole, resumed)


def several() -> list[DistillationCallback]:
    return [
        DistillationCallback(make_teacher(), [hidden()], name="a"),
        DistillationCallback(make_teacher(10), [hidden(), logits(weight=0.1)], name="b", task_weight=0.5),
        DistillationCallback(make_teacher(), [logits()], name="keys"),
    ]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.situation("several callbacks", proves="resumed equal")
def test_several_distillations_resume_in_any_order(tmp_path: Path, order: int) -> None:
    whole, resumed = several(), several()
    ours = run(tmp_path / "whole", whole, [], epochs=3)
    start = tmp_path / "whole" / "epoch=0.ckpt"
    theirs = run(tmp_path / "resumed", resumed[::order], [], resume=start, epochs=3)
    assert_same(ours, theirs)
    assert_same_projectors(whole[0], resumed[0])
    assert_same_projectors(whole[1], resumed[1])


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(
        self, pl_module: L.LightningModule, epoch: int, optimizer: torch.optim.Optimizer
    ) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01)


class Unfrozen(Student):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.situation("BaseFinetuning", proves="resumed equal")
def test_fine_tuning_resumes(tmp_path: Path, first: bool) -> None:
    """From before the unfreezing: Lightning itself resumes otherwise than uninterrupted after it."""

    def once(path: Path, resume: Path | None = None) -> tuple[Student, DistillationCallback]:
        pair = logits(projector=nn.Linear(3, 3, bias=False))
        assert isinstance(pair.projector, nn.Linear)
        nn.init.eye_(pair.projector.weight)
        callback = DistillationCallback(make_teacher(), [pair])
        student = seeded(Unfrozen)
        save = ModelCheckpoint(path, filename="{epoch}", every_n_epochs=1, save_top_k=-1)
        others = [callback, Unfreeze()] if first else [Unfreeze(), callback]
        trainer(*others, save, enable_checkpointing=True, max_epochs=3).fit(
            student, loader(), ckpt_path=resume, weights_only=False if resume else None
        )
        return student, callback

    whole, callback = once(tmp_path / "whole")
    resumed, again = once(tmp_path / "resumed", tmp_path / "whole" / "epoch=0.ckpt")
    assert not torch.equal(whole.net[0].weight, seeded(Unfrozen).net[0].weight)
    assert_same(whole, resumed)
    assert_same_projectors(callback, again)


def test_pairs_in_another_order_are_refused_on_resuming(tmp_path: Path) -> None:
    pairs = [logits(projector=nn.Linear(3, 3)), hidden()]
    run(tmp_path / "a", [DistillationCallback(make_teacher(), pairs)], [], epochs=1)
    swapped = DistillationCallback(make_teacher(), pairs[::-1])
    with pytest.raises(
        Exception, match=r"has the pairs \['logits', 'hidden'\], and here they are \['hidden', "
    ):
        run(tmp_path / "b", [swapped], [], resume=tmp_path / "a" / "epoch=0.ckpt", epochs=2)


# -- tuners ----------------------------------------------------------------------------------------


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
        return torch.optim.Adam(self.net.parameters(), lr=self.lr)


def counting_teacher() -> tuple[nn.Module, list[int]]:
    teacher, calls = make_teacher(), []
    teacher[0].register_forward_hook(lambda module, args, out: calls.append(len(out)))
    return teacher, calls


@pytest.mark.filterwarnings("ignore:.*not enough points")
@pytest.mark.situation("learning rate finder", "batch size finder", proves="left as it was")
def test_tuners_tune_the_distilled_training_and_leave_the_student_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    teacher, calls = counting_teacher()
    callback = DistillationCallback(teacher, [hidden()])
    student = seeded(Tunable)
    fit = trainer(callback)
    Tuner(fit).lr_find(student, num_training=10)
    assert calls == [2] * 11  # the dry run, and ten steps
    assert_same(student, seeded(Tunable))
    assert_untouched(student)
    calls.clear()
    Tuner(fit).scale_batch_size(student, max_trials=2, steps_per_trial=1, init_val=4)
    assert calls == [2, 2, 8]
    assert_same(student, seeded(Tunable))
    assert_untouched(student)
    calls.clear()
    fit.fit(student)
    assert calls == [8] * 9  # the dry run, and the epoch
    assert_untouched(student)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "make", [lambda: LearningRateFinder(num_training_steps=12), lambda: BatchSizeFinder(max_trials=2)]
)
@pytest.mark.filterwarnings("ignore:.*not enough points")
def test_finders_as_callbacks_see_the_teacher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], L.Callback], first: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    teacher, calls = counting_teacher()
    pair = [DistillationCallback(teacher, [logits()]), make()]
    student = seeded(Tunable)
    trainer(*(pair if first else pair[::-1]), max_steps=1).fit(student)
    assert len(calls) > 5
    assert_untouched(student)


# -- loops of every kind ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({"overfit_batches": 2}, 2),
        ({"fast_dev_run": True}, 1),
        ({"limit_train_batches": 0.5}, 3),
        ({"max_steps": 2}, 2),
        ({"max_epochs": 0}, 0),
        ({"limit_train_batches": 0}, 0),
        ({"detect_anomaly": True}, 6),
        ({"val_check_interval": 2}, 6),
        ({"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}, 12),
        ({"inference_mode": False}, 6),
        ({"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, 6),
    ],
)
@pytest.mark.filterwarnings("ignore:You have turned on `Trainer\\(detect_anomaly=True\\)`")
def test_every_training_batch_is_distilled_and_no_other(options: dict[str, Any], batches: int) -> None:
    teacher, calls = counting_teacher()
    student = make_student()
    trainer(DistillationCallback(teacher, [logits()]), **options).fit(student, loader(), loader())
    assert len(calls) == batches
    assert_untouched(student)


@pytest.mark.situation("LBFGS", proves="equal to a reference")
def test_lbfgs_distils_each_evaluation_of_its_closure() -> None:
    class Second(Student):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.net.parameters(), lr=0.1, max_iter=3)

    student = seeded(Second)
    teacher, calls = counting_teacher()
    trainer(DistillationCallback(teacher, [logits()]), max_steps=2).fit(student, loader())

    by_hand, frozen = seeded(Second), make_teacher().eval()
    optimizer = torch.optim.LBFGS(by_hand.net.parameters(), lr=0.1, max_iter=3)
    evaluations = []
    for x, y in list(loader())[:2]:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            evaluations.append(1)
            optimizer.zero_grad()
            out = by_hand.net(x)
            loss = F.cross_entropy(out, y) + F.mse_loss(out, frozen(x).detach())
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        optimizer.step(closure)  # type: ignore[no-untyped-call]
    assert len(calls) == len(evaluations)
    for mine, its in zip(student.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)


def test_a_validation_step_that_calls_the_training_step_is_not_distilled(tmp_path: Path) -> None:
    class Short(Student):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val", self.training_step(batch, batch_idx))

    student = seeded(Short)
    teacher, calls = counting_teacher()
    fit = trainer(DistillationCallback(teacher, [logits()]))
    fit.fit(student, loader(), loader())
    assert len(calls) == 6
    with torch.no_grad():
        plain = sum(F.cross_entropy(student.net(x), y) for x, y in loader()) / 6
    assert fit.callback_metrics["val"].item() == pytest.approx(float(plain), rel=1e-5)


def test_the_mask_and_the_loss_see_the_batch_before_the_users_step_pops_from_it() -> None:
    class Pops(Student):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            labels = batch.pop("labels")
            return F.cross_entropy(self(batch.pop("input")), labels)

    seen: list[set[str]] = []

    def loss(s: Tensor, t: Tensor, *, batch: Any) -> Tensor:
        seen.append(set(batch))
        return F.mse_loss(s, t)

    rows: Any = [{"input": x, "labels": y} for x, y in data(8)]  # type: ignore[attr-defined]
    pair = Pair("outputs[3]", "outputs[net]", loss)
    trainer(DistillationCallback(make_teacher(), [pair])).fit(Pops(), DataLoader(rows, batch_size=4))
    assert seen == [{"input", "labels"}] * 2


@pytest.mark.situation(
    "EarlyStopping on a distillation metric",
    "ModelCheckpoint on a distillation metric",
    proves="equal to a reference",
)
def test_early_stopping_and_checkpoints_follow_a_distillation_metric(tmp_path: Path) -> None:
    stop = EarlyStopping("distill/total", patience=1, min_delta=100.0, check_on_train_epoch_end=True)
    best = ModelCheckpoint(tmp_path, monitor="distill/total")
    fit = trainer(
        DistillationCallback(make_teacher(), [logits()]), stop, best, enable_checkpointing=True, max_epochs=9
    )
    fit.fit(make_student(), loader())
    assert fit.current_epoch == 2
    assert best.best_model_score == fit.callback_metrics["distill/total"]


def test_callbacks_that_the_module_configures() -> None:
    class Own(Student):
        def configure_callbacks(self) -> Any:
            return [DistillationCallback(make_teacher(), [hidden()])]

    student = seeded(Own)
    fit = trainer()
    fit.fit(student, loader())
    assert "distill/total" in fit.callback_metrics
    assert_untouched(student)
    fit.validate(student, loader(), verbose=False)


# -- interruptions ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
@pytest.mark.situation("fault: Ctrl-C", proves=("resumed equal", "left as it was"))
def test_a_keyboard_interrupt_puts_everything_back_and_its_checkpoint_resumes(tmp_path: Path) -> None:
    class Interrupt(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            if trainer.global_step == 3:
                raise KeyboardInterrupt

    student, callback = make_student(), DistillationCallback(make_teacher(), [hidden()])
    save = ModelCheckpoint(tmp_path, filename="{step}", save_on_exception=True)
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit):
        trainer(callback, Interrupt(), save, enable_checkpointing=True).fit(student, loader())
    signal.signal(signal.SIGINT, handler)
    assert_untouched(student)
    resumed = DistillationCallback(make_teacher(), [hidden()])
    look = Look(resumed)
    trainer(resumed, look).fit(
        make_student(), loader(), ckpt_path=tmp_path / "step=3.ckpt", weights_only=True
    )
    learned = callback.state_dict()["projectors"]["0.projectors.0.weight"]
    assert torch.equal(look.seen[0].weight, learned)
    trainer(callback, look := Look(callback)).fit(student, loader())
    assert torch.equal(look.seen[0].weight, learned)


class Hijack(L.Callback):
    """Fails while Lightning tells the callbacks of a failure, so the later ones are never told."""

    def on_train_start(self, *_: Any) -> None:
        raise RuntimeError("first")

    def on_exception(self, *_: Any) -> None:
        raise RuntimeError("second")


@pytest.mark.parametrize("same", [True, False])
def test_what_a_fit_left_behind_is_cleared_away_by_the_next(same: bool) -> None:
    student, callback = make_student(), DistillationCallback(make_teacher(), [hidden(), logits()], name="old")
    with pytest.raises(RuntimeError, match="second"):
        trainer(Hijack(), callback).fit(student, loader())
    assert hasattr(student, CONTAINER)
    student.load_state_dict(make_student().state_dict())
    then = callback if same else DistillationCallback(make_teacher(), [logits()], name="new")
    fit = trainer(then)
    fit.fit(student, loader())
    assert_untouched(student)
    assert {name.split("/")[0] for name in fit.callback_metrics} == {then.name}


@pytest.mark.situation(
    "fault: exception in the logger", "fault: exception in another callback", proves="left as it was"
)
def test_a_failing_logger_or_setup_leaves_the_student_untouched() -> None:
    class Full(L.pytorch.loggers.logger.Logger):
        name = "full"
        version = 0

        def log_metrics(self, *args: Any, **kwargs: Any) -> None:
            raise OSError("No space left on device")

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            """Nothing to write."""

    class Fails(L.Callback):
        def setup(self, *_: Any, **__: Any) -> None:
            raise OSError("not ready")

    student = make_student()
    with pytest.raises(OSError, match="No space left"):
        trainer(DistillationCallback(make_teacher(), [hidden()]), logger=Full()).fit(student, loader())
    assert_untouched(student)
    with pytest.raises(OSError, match="not ready"):
        trainer(DistillationCallback(make_teacher(), [hidden()]), Fails()).fit(student, loader())
    assert_untouched(student)


@pytest.mark.parametrize(
    ("source", "error"),
    [(lambda: 3, "returned int, not a module"), (lambda: 1 / 0, "division by zero")],
)
def test_a_teacher_that_cannot_be_made_leaves_the_student_untouched(source: Any, error: str) -> None:
    student = make_student()
    with pytest.raises(Exception, match=error):
        trainer(DistillationCallback(source, [hidden()])).fit(student, loader())
    assert_untouched(student)


# -- copies ----------------------------------------------------------------------------------------


def saved_and_loaded(student: Student) -> Any:
    file = io.BytesIO()
    torch.save(student, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s)), saved_and_loaded])
def test_copies_made_in_mid_fit_are_students_of_their_own(how: Callable[[Student], Student]) -> None:
    copies: list[Student] = []

    class Copy(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, *_: Any) -> None:
            copies.append(how(pl_module))

    student = make_student()
    trainer(DistillationCallback(make_teacher(), [hidden()]), Copy(), max_steps=1).fit(student, loader())
    twin = copies[0]
    assert_same(student, twin)
    x, y = next(iter(loader()))
    loss = twin.training_step((x, y), 0)
    torch.testing.assert_close(loss, F.cross_entropy(twin.net(x), y))
    left = [p.grad.clone() for p in student.parameters() if p.grad is not None]
    loss.backward()
    assert all(map(torch.equal, left, (p.grad for p in student.parameters())))
    twin.zero_grad()
    fit = trainer(DistillationCallback(make_teacher(), [logits()], name="new"))
    fit.fit(twin, loader())
    assert not hasattr(twin, CONTAINER)
    assert set(fit.callback_metrics) == {"new/logits", "new/total"}


def test_the_callback_can_be_copied_and_pickled_after_a_fit() -> None:
    callback = DistillationCallback(make_teacher(), [logits(projector=nn.Linear(3, 3))])
    trainer(callback).fit(make_student(), loader())
    for twin in (copy.deepcopy(callback), pickle.loads(pickle.dumps(callback))):
        assert_same_projectors(callback, twin)
        trainer(twin).fit(make_student(), loader())


def test_what_cannot_be_copied_is_shared_with_the_dry_run() -> None:
    class Odd(Student):
        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()
            self.deep = {"locks": [threading.Lock()]}
            self.derived = torch.ones(2, requires_grad=True) * 2
            self.seen: list[int] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.seen.append(batch_idx)
            loss = super().training_step(batch, batch_idx)
            assert self.lr_schedulers().get_last_lr()  # none in the dry run, which has its sizes by now
            return loss

    student = seeded(Odd)
    callback = DistillationCallback(make_teacher(), [hidden()])
    trainer(callback, max_steps=2).fit(student, loader())
    assert student.seen == [0, 1]
    assert callback.state_dict()["projectors"]["0.projectors.0.weight"].shape == (8, 6)


# -- teachers --------------------------------------------------------------------------------------


def test_one_teacher_of_two_callbacks_is_given_back_once_both_are_done() -> None:
    teacher = make_teacher()
    teacher[0].weight.requires_grad_(False)
    callbacks = [DistillationCallback(teacher, [logits()], name=name) for name in "ab"]
    trainer(*callbacks).fit(make_student(), loader())
    assert teacher.training
    assert [p.requires_grad for p in teacher.parameters()] == [False, True, True, True]


def test_a_lightning_module_can_teach() -> None:
    torch.manual_seed(1)
    teacher = Student(8)
    pair = Pair("outputs[net.1]", "outputs[net.1]", nn.MSELoss(), projector="linear")
    student = make_student()
    trainer(DistillationCallback(teacher, [pair])).fit(student, loader())
    assert_untouched(teacher)
    assert teacher.training


def test_a_teacher_without_values_is_refused() -> None:
    with torch.device("meta"):
        teacher = make_teacher()
    with pytest.raises(ValueError, match=r"'0\.weight' is on the meta device, so it has no values"):
        trainer(DistillationCallback(teacher, [logits()])).fit(make_student(), loader())


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["keys", "training", "_modules", "a b", "ü", "state_dict"])
def test_names_that_collide_with_nothing(name: str) -> None:
    callback = DistillationCallback(make_teacher(), [hidden(name="x.{y}#0\n")], name=name)
    fit = trainer(callback, max_steps=1)
    fit.fit(make_student(), loader())
    assert set(fit.callback_metrics) == {f"{name}/x.{{y}}#0\n", f"{name}/total"}


@pytest.mark.parametrize("name", ["", " ", "a.b", 3])
def test_names_that_are_none(name: Any) -> None:
    with pytest.raises(ValueError, match="name must be a word without dots"):
        DistillationCallback(make_teacher(), [logits()], name=name)
