"""The callback against a hand-written PyTorch loop, and its whole lifecycle."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from softs_lightning import DistillationCallback, Pair, Teacher
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

DOUBLE = torch.float64

# The students can validate; most runs here only train.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


# -- the same maths, by hand -----------------------------------------------------------------------


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.3])
@pytest.mark.situation(
    "one device",
    "precision 64-true",
    "gradient accumulation",
    "gradient clipping",
    proves="equal to a reference",
)
def test_weights_equal_those_of_a_hand_written_loop(accumulate: int, clip: float | None) -> None:
    student, teacher = make_student(), make_teacher()
    batches = loader(dtype=DOUBLE)
    by_hand = copy.deepcopy(student).double()

    callback = DistillationCallback(teacher, [hidden(), logits(weight=2.0)], task_weight=0.7)
    look = Look(callback)
    trainer(
        callback,
        look,
        max_epochs=2,
        precision="64-true",
        accumulate_grad_batches=accumulate,
        gradient_clip_val=clip,
    ).fit(student, batches)

    frozen = make_teacher().double().eval()
    projector = look.seen[0]
    parameters = [*by_hand.parameters(), *projector.parameters()]
    optimizer = torch.optim.Adam(parameters, lr=0.01)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    for _ in range(2):
        for i, (x, y) in enumerate(batches):
            with torch.no_grad():
                teacher_hidden = frozen[1](frozen[0](x))
                teacher_logits = frozen(x)
            h = by_hand.net[1](by_hand.net[0](x))
            out = by_hand.net[2](h)
            loss = 0.7 * F.cross_entropy(out, y)
            loss = loss + 0.5 * ((projector(h) - teacher_hidden) ** 2).mean()
            loss = loss + 2.0 * ((out - teacher_logits) ** 2).mean()
            (loss / accumulate).backward()
            if (i + 1) % accumulate == 0:
                if clip is not None:
                    nn.utils.clip_grad_norm_(parameters, clip)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
    for mine, its in zip(student.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-10)
    learned = callback.state_dict()["projectors"]
    torch.testing.assert_close(learned["0.projectors.0.weight"], projector.weight.data, rtol=0, atol=1e-10)


@pytest.mark.situation("precision bf16-mixed", proves="equal to a reference")
def test_bf16_mixed_equals_the_loop_under_autocast() -> None:
    student, teacher = make_student(), make_teacher()
    by_hand = copy.deepcopy(student)
    callback = DistillationCallback(teacher, [logits()])
    trainer(callback, precision="bf16-mixed").fit(student, loader())

    frozen = make_teacher().eval()
    optimizer = torch.optim.Adam(by_hand.parameters(), lr=0.01)
    torch.optim.lr_scheduler.LinearLR(optimizer)
    for x, y in loader():
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                target = frozen(x)
            out = by_hand.net(x)
            loss = F.cross_entropy(out, y)
        loss = loss + F.mse_loss(out.float(), target.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for mine, its in zip(student.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-6)


def test_a_run_without_pairs_weight_equals_the_plain_run_bit_for_bit() -> None:
    """The plugin disturbs neither random state nor data order, dry run included."""
    plain, distilled = make_student(), make_student()
    generator = torch.Generator().manual_seed(5)

    def shuffled() -> DataLoader[Any]:
        return DataLoader(data(), batch_size=4, shuffle=True, generator=generator.manual_seed(5))

    torch.manual_seed(7)
    trainer(max_epochs=2).fit(plain, shuffled())
    torch.manual_seed(7)
    callback = DistillationCallback(make_teacher_after_seed(), [hidden(weight=0.0), logits(weight=0.0)])
    trainer(callback, max_epochs=2).fit(distilled, shuffled())
    for name, value in plain.state_dict().items():
        assert torch.equal(value, distilled.state_dict()[name]), name


def make_teacher_after_seed() -> nn.Module:
    with torch.random.fork_rng():
        return make_teacher()


# -- the teacher -----------------------------------------------------------------------------------


@pytest.mark.situation("validate, test and predict", proves="left as it was")
def test_a_factory_is_called_for_a_fit_only() -> None:
    made: list[nn.Module] = []

    def factory() -> nn.Module:
        made.append(make_teacher())
        return made[-1]

    callback = DistillationCallback(factory, [logits()])
    student = make_student()
    run = trainer(callback)
    run.validate(student, loader(), verbose=False)
    run.test(student, loader(), verbose=False)
    run.predict(student, loader())
    assert not made
    run.fit(student, loader())
    assert len(made) == 1


def test_the_teacher_runs_once_a_training_batch_stops_early_and_never_in_validation() -> None:
    teacher = make_teacher()
    calls = {"first": 0, "last": 0}
    teacher[0].register_forward_hook(lambda *_: calls.__setitem__("first", calls["first"] + 1))
    teacher[3].register_forward_hook(lambda *_: calls.__setitem__("last", calls["last"] + 1))
    callback = DistillationCallback(teacher, [hidden(projector=nn.Linear(6, 8))])
    trainer(callback, num_sanity_val_steps=2).fit(make_student(), loader(), loader())
    assert calls == {"first": 6, "last": 0}


def test_the_teacher_is_in_eval_mode_every_step_whatever_the_user_does() -> None:
    teacher = make_teacher()
    modes: list[bool] = []
    teacher[2].register_forward_pre_hook(lambda module, _: modes.append(module.training))

    class Meddler(L.Callback):
        def on_train_batch_start(self, *_: Any) -> None:
            teacher.train()

    trainer(Meddler(), DistillationCallback(teacher, [logits()])).fit(make_student(), loader())
    assert modes == [False] * 6


def test_the_users_teacher_is_given_back_as_it_was() -> None:
    teacher = make_teacher().train()
    teacher[0].weight.requires_grad_(False)
    teacher[1].eval()
    before = {name: value.clone() for name, value in teacher.state_dict().items()}
    trainer(DistillationCallback(teacher, [logits()]), precision="bf16-true").fit(
        make_student(), loader(dtype=torch.float32)
    )
    trainer(DistillationCallback(teacher, [logits()])).fit(make_student(), loader())
    assert [m.training for m in teacher] == [True, False, True, True]
    assert [p.requires_grad for p in teacher.parameters()] == [False, True, True, True]
    for name, value in teacher.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[name])
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in teacher.modules())


def test_a_teacher_that_shares_parameters_with_the_student_is_refused() -> None:
    student = make_student()
    callback = DistillationCallback(student.net, [Pair("outputs[0]", "outputs[net.0]", nn.MSELoss())])
    with pytest.raises(ValueError, match=r"share the parameter 'net\.0\.weight'"):
        trainer(callback).fit(student, loader())
    assert all(p.requires_grad for p in student.parameters())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed", "64-true"])
def test_precisions_train_the_student_and_its_projector(precision: Any) -> None:
    student = make_student()
    before = copy.deepcopy(student.net[0].weight.data)
    callback = DistillationCallback(make_teacher(), [hidden()])
    trainer(callback, precision=precision).fit(student, loader())
    assert not torch.equal(before, student.net[0].weight.data.float())
    dtypes = {"32-true": torch.float32, "bf16-true": torch.bfloat16, "bf16-mixed": torch.float32}
    assert callback.state_dict()["projectors"]["0.projectors.0.weight"].dtype == dtypes.get(precision, DOUBLE)


# -- checkpoints -----------------------------------------------------------------------------------


def fit_with_checkpoint(
    path: Path, pairs: list[Pair], epochs: int, ckpt: str | None = None
) -> tuple[Student, DistillationCallback]:
    student = make_student()
    callback = DistillationCallback(make_teacher(), pairs)
    checkpoint = L.pytorch.callbacks.ModelCheckpoint(path, every_n_epochs=1, save_top_k=-1)
    torch.manual_seed(11)
    trainer(callback, checkpoint, enable_checkpointing=True, max_epochs=epochs).fit(
        student, loader(), ckpt_path=ckpt, weights_only=True if ckpt else None
    )
    return student, callback


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.situation("one device", proves="resumed equal")
def test_resumed_equals_uninterrupted_bit_for_bit(tmp_path: Path) -> None:
    whole, whole_callback = fit_with_checkpoint(tmp_path / "a", [hidden()], 4)
    fit_with_checkpoint(tmp_path / "b", [hidden()], 2)
    saved = str(tmp_path / "b" / "epoch=1-step=12.ckpt")
    resumed, resumed_callback = fit_with_checkpoint(tmp_path / "c", [hidden()], 4, saved)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, resumed.state_dict()[name]), name
    ours, theirs = whole_callback.state_dict()["projectors"], resumed_callback.state_dict()["projectors"]
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.situation("one device", "validate, test and predict", proves="checkpoint clean")
def test_checkpoints_are_plain_and_load_strictly_without_the_callback(tmp_path: Path) -> None:
    student, _ = fit_with_checkpoint(tmp_path, [hidden()], 1)
    path = tmp_path / "epoch=0-step=6.ckpt"
    saved = torch.load(path, weights_only=True)
    assert sorted(saved["state_dict"]) == sorted(make_student().state_dict())
    loaded = Student.load_from_checkpoint(path, strict=True)
    for name, value in student.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
    expected = trainer().test(loaded, loader(), verbose=False)
    assert trainer().test(make_student(), loader(), ckpt_path=str(path), verbose=False) == expected


def test_saving_after_the_fit_still_resumes(tmp_path: Path) -> None:
    student, callback = make_student(), DistillationCallback(make_teacher(), [hidden()])
    run = trainer(callback)
    run.fit(student, loader())
    run.save_checkpoint(tmp_path / "late.ckpt")
    assert not hasattr(student, CONTAINER)
    again, resumed = make_student(), DistillationCallback(make_teacher(), [hidden()])
    look = Look(resumed)
    trainer(resumed, look, max_epochs=2).fit(
        again, loader(), ckpt_path=tmp_path / "late.ckpt", weights_only=True
    )
    assert torch.equal(look.seen[0].weight, callback.state_dict()["projectors"]["0.projectors.0.weight"])


@pytest.mark.situation("one device", proves="refused with message")
def test_resuming_without_the_projectors_is_refused(tmp_path: Path) -> None:
    plain = trainer()
    plain.fit(make_student(), loader())
    plain.save_checkpoint(tmp_path / "plain.ckpt")
    callback = DistillationCallback(make_teacher(), [hidden()])
    student = make_student()
    with pytest.raises(MisconfigurationException, match="holds no projectors of the distillation 'distill'"):
        trainer(callback, max_epochs=2).fit(
            student, loader(), ckpt_path=tmp_path / "plain.ckpt", weights_only=True
        )
    assert_untouched(student)


# -- putting things back ---------------------------------------------------------------------------


@pytest.mark.situation("one device", proves="left as it was")
def test_everything_is_put_back_after_a_fit_and_a_second_fit_continues() -> None:
    student, callback = make_student(), DistillationCallback(make_teacher(), [hidden()])
    trainer(callback).fit(student, loader())
    assert_untouched(student)
    first = callback.state_dict()["projectors"]["0.projectors.0.weight"]
    look = Look(callback)
    trainer(callback, look).fit(student, loader())
    assert_untouched(student)
    assert torch.equal(look.seen[0].weight, first)
    second = callback.state_dict()["projectors"]["0.projectors.0.weight"]
    assert not torch.equal(second, first)
    trainer(callback, look).fit(make_student(), loader())  # another student begins anew
    assert not torch.equal(look.seen[1].weight, second)


class Boom(Exception):
    pass


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(
            where, marks=pytest.mark.situation(f"fault: exception in {what}", proves="left as it was")
        )
        for where, what in {
            "student": "the student",
            "teacher": "the teacher",
            "loss": "the loss",
            "callback": "another callback",
        }.items()
    ],
)
def test_everything_is_put_back_after_an_exception_and_refit_works(where: str) -> None:
    armed = [True]

    def explode(*_: Any) -> None:
        if armed[0]:
            raise Boom

    class Late(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            if where == "callback":
                explode()

    def loss(s: Tensor, t: Tensor) -> Tensor:
        if where == "loss":
            explode()
        return F.mse_loss(s, t)

    student, teacher = make_student(), make_teacher()
    if where == "student":
        handle = student.net[2].register_forward_hook(lambda *_: explode())
    if where == "teacher":
        handle = teacher[0].register_forward_hook(lambda *_: explode())
    callback = DistillationCallback(teacher, [hidden(loss=loss, projector=nn.Linear(6, 8))])
    with pytest.raises(Boom):
        trainer(callback, Late()).fit(student, loader())
    armed[0] = False
    if where in ("student", "teacher"):
        handle.remove()
    assert_untouched(student)
    assert teacher.training
    assert all(p.requires_grad for p in teacher.parameters())
    trainer(callback, Late()).fit(student, loader())
    assert_untouched(student)


def test_teacher_and_captures_are_freed_after_a_fit() -> None:
    alive: list[weakref.ref[Any]] = []

    def factory() -> nn.Module:
        module = make_teacher()
        alive.append(weakref.ref(module))
        return module

    callback = DistillationCallback(factory, [hidden()])
    student = make_student()
    trainer(callback).fit(student, loader())
    gc.collect()
    assert alive[0]() is None


@pytest.mark.situation("several callbacks", proves=("equal to a reference", "left as it was"))
def test_two_callbacks_share_the_step_and_leave_in_any_order() -> None:
    def pairs(name: str) -> DistillationCallback:
        return DistillationCallback(make_teacher(), [logits()], name=name)

    both, once = make_student(), make_student()
    trainer(pairs("a"), pairs("b")).fit(both, loader())
    trainer(DistillationCallback(make_teacher(), [logits(weight=2.0)])).fit(once, loader())
    assert_untouched(both)
    for mine, its in zip(both.parameters(), once.parameters(), strict=True):
        torch.testing.assert_close(mine, its)


def test_a_step_of_the_instance_is_kept() -> None:
    student = make_student()
    original = student.training_step
    student.training_step = lambda batch, batch_idx: original(batch, batch_idx)  # type: ignore[method-assign]
    own = student.__dict__["training_step"]
    trainer(DistillationCallback(make_teacher(), [logits()])).fit(student, loader())
    assert student.__dict__["training_step"] is own


# -- forms of training_step ------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_dict_results_keep_their_entries_and_none_skips_the_step() -> None:
    seen: list[Any] = []

    class Dicts(Student):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 1:
                return None
            out = self(batch[0])
            return {"loss": F.cross_entropy(out, batch[1]), "extra": out.detach()}

    class Ends(L.Callback):
        def on_train_batch_end(
            self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            seen.append(outputs)

    torch.manual_seed(2)
    student = Dicts()
    start = copy.deepcopy(student)
    trainer(DistillationCallback(make_teacher(), [logits()]), Ends(), limit_train_batches=2).fit(
        student, loader()
    )
    x, y = next(iter(loader()))
    out = start(x)
    expected = F.cross_entropy(out, y) + F.mse_loss(out, make_teacher().eval()(x))
    torch.testing.assert_close(seen[0]["loss"], expected.detach())
    assert torch.equal(seen[0]["extra"], out.detach())
    assert not seen[1]


def test_a_step_without_batch_idx_works() -> None:
    class Short(Student):
        def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
            return F.cross_entropy(self(batch[0]), batch[1])

    student = Short()
    callback = DistillationCallback(make_teacher(), [hidden()])
    trainer(callback).fit(student, loader())
    assert_untouched(student)


@pytest.mark.situation("configure_model", proves="left as it was")
def test_layers_born_in_setup_and_configure_model_are_found() -> None:
    class Late(Student):
        def __init__(self) -> None:
            super().__init__()
            del self.net

        def setup(self, stage: str) -> None:
            self.first = nn.Sequential(nn.Linear(4, 6), nn.Tanh())

        def configure_model(self) -> None:
            if not hasattr(self, "net"):
                self.net = nn.Sequential(self.first, nn.Linear(6, 3))

    callback = DistillationCallback(
        make_teacher(), [Pair("outputs[1]", "outputs[net.0]", nn.MSELoss(), projector="linear", name="h")]
    )
    student = Late()
    trainer(callback).fit(student, loader())
    assert callback.state_dict()["projectors"]["0.projectors.0.weight"].shape == (8, 6)
    assert_untouched(student)


def test_terms_are_logged(tmp_path: Path) -> None:
    logger = L.pytorch.loggers.CSVLogger(tmp_path)
    student = make_student()
    start = copy.deepcopy(student)
    callback = DistillationCallback(make_teacher(), [logits(weight=3.0)], name="kd")
    trainer(callback, logger=logger, limit_train_batches=1).fit(student, loader())
    header, row = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    values = dict(zip(header.split(","), row.split(","), strict=True))
    x, _ = next(iter(loader()))
    expected = F.mse_loss(start(x), make_teacher().eval()(x)).item()
    assert float(values["kd/logits"]) == pytest.approx(expected, rel=1e-6)
    assert float(values["kd/total"]) == pytest.approx(3 * expected, rel=1e-6)


def test_projectors_train_and_are_in_one_optimizer_group_when_the_user_lists_parameters() -> None:
    class Listed(Student):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net.parameters(), lr=0.1)

    student = Listed()
    callback = DistillationCallback(make_teacher(), [hidden()])
    look = Look(callback)
    trainer(callback, look).fit(student, loader())
    after = callback.state_dict()["projectors"]["0.projectors.0.weight"]
    assert not torch.equal(look.seen[0].weight, after)


# -- refusals --------------------------------------------------------------------------------------


def refused(student: L.LightningModule, callback: DistillationCallback, match: str, **options: Any) -> None:
    with pytest.raises(Exception, match=match):
        trainer(callback, **options).fit(student, loader())
    assert_untouched(student)


@pytest.mark.situation("manual optimization, several optimizers", proves="refused with message")
def test_manual_optimization_is_refused() -> None:
    student = make_student()
    student.automatic_optimization = False
    refused(student, DistillationCallback(make_teacher(), [logits()]), "optimizes manually")


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.situation("dataloader_iter", proves=("refused with message", "left as it was"))
def test_dataloader_iter_steps_are_refused() -> None:
    class Iter(Student):
        def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
            raise AssertionError

    refused(Iter(), DistillationCallback(make_teacher(), [logits()]), "takes dataloader_iter")


@pytest.mark.situation("WeightAveraging", proves="refused with message")
def test_weight_averaging_before_the_callback_is_refused() -> None:
    student = make_student()
    callback = DistillationCallback(make_teacher(), [hidden()])
    with pytest.raises(MisconfigurationException, match="place it after"):
        trainer(L.pytorch.callbacks.WeightAveraging(), callback).fit(student, loader())
    assert_untouched(student)


@pytest.mark.parametrize("weight", [None, "x", True])
def test_a_task_weight_that_is_no_number_is_refused(weight: Any) -> None:
    with pytest.raises(TypeError, match=f"task_weight must be a number, got {weight!r}"):
        DistillationCallback(make_teacher(), [logits()], task_weight=weight)


def test_teacher_inputs_that_return_nothing_are_named() -> None:
    def forgets(batch: Any) -> Any:
        batch[0]

    callback = DistillationCallback(make_teacher(), [logits()], teacher_inputs=forgets)
    with pytest.raises(TypeError, match="teacher_inputs, 'forgets', returned None: return what the teacher"):
        trainer(callback).fit(make_student(), loader())


@pytest.mark.situation("several callbacks", proves="refused with message")
def test_two_callbacks_of_one_name_are_refused() -> None:
    callback = DistillationCallback(make_teacher(), [logits()])
    with pytest.raises((MisconfigurationException, RuntimeError), match=r"state_key|are named 'distill'"):
        trainer(callback, DistillationCallback(make_teacher(), [logits()])).fit(make_student(), loader())


@pytest.mark.parametrize(
    ("pair", "match"),
    [
        (Pair("outputs[9]", "outputs[net]", nn.MSELoss()), "no module named '9'"),
        (Pair("outputs[3]", "outputs[nett]", nn.MSELoss()), "the nearest names are 'net'"),
        (Pair("outputs[3]", "inputs[net]", nn.MSELoss()), "has no gradient"),
        (
            Pair("outputs[1]", "outputs[net.1]", nn.MSELoss()),
            r"shape \[4, 6\], the teacher's outputs\[1\] \[4, 8\]",
        ),
        (Pair("outputs[3]", "outputs[net]", lambda s, t: (s - t).mean() / 0), "the loss is (inf|-inf|nan)"),
        (Pair("outputs[3]", "outputs[net]", lambda s, t: (s.detach() - t).mean()), "loss has no gradient"),
        (Pair("outputs[3]", "outputs[net]", lambda s, t: s - t), "not a scalar"),
        (Pair("outputs[3]", "outputs[net#0]", nn.MSELoss()), "0 is not in|shape"),
    ],
)
def test_the_first_batch_proves_each_pair(pair: Pair, match: str) -> None:
    refused(make_student(), DistillationCallback(make_teacher(), [pair]), match)


def test_a_term_that_is_no_number_is_named_at_its_step_and_once_an_epoch() -> None:
    steps: list[int] = []

    def loss(s: Tensor, t: Tensor) -> Tensor:
        steps.append(1)
        return F.mse_loss(s, t) * (float("nan") if len(steps) % 4 in (3, 0) else 1.0)

    pair = Pair("outputs[3]", "outputs[net]", loss, name="late")
    with pytest.raises(
        UserWarning, match=r"the loss of 'late' is nan in step 2, and perhaps after it\. EarlySt"
    ):
        trainer(DistillationCallback(make_teacher(), [pair, hidden()])).fit(make_student(), loader(16))
    assert len(steps) == 3
    steps.clear()
    with pytest.warns(UserWarning, match="the loss of 'late'") as told:
        trainer(DistillationCallback(make_teacher(), [pair]), max_epochs=2).fit(make_student(), loader(16))
    said = [str(w.message).partition(", and")[0].split()[-1] for w in told if "'late'" in str(w.message)]
    assert said == ["2", "4"]  # of the second epoch the first: by now the weights are no numbers either


def test_a_frozen_student_part_is_refused() -> None:
    student = make_student()
    student.net[0].requires_grad_(False)
    refused(student, DistillationCallback(make_teacher(), [hidden()]), "has no gradient")


def test_a_module_that_never_runs_is_named() -> None:
    student = make_student()
    student.unused = nn.Linear(1, 1)
    callback = DistillationCallback(make_teacher(), [Pair("outputs[3]", "outputs[unused]", nn.MSELoss())])
    refused(student, callback, "'unused' never ran")


def test_a_module_that_runs_twice_needs_a_call_number() -> None:
    class Twice(Student):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.mse_loss(self(batch[0]), self(batch[0] + 1).detach())

    refused(Twice(), DistillationCallback(make_teacher(), [logits()]), r"ran 2 times. Say which call: net!0")
    pair = Pair("outputs[3]", "outputs[net!0]", nn.MSELoss())
    trainer(DistillationCallback(make_teacher(), [pair])).fit(Twice(), loader())


def test_a_batch_that_the_teacher_cannot_take_is_an_error_with_its_keys() -> None:
    class Dicts(Student):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return F.cross_entropy(self(batch["x"]), batch["y"])

    rows = [{"x": x, "y": y} for x, y in data()]  # type: ignore[attr-defined]
    batches = DataLoader(rows, batch_size=4)  # type: ignore[arg-type]
    student = Dicts()
    with pytest.raises(TypeError, match="requires 'input', but the batch has 'x', 'y': pass teacher_inputs"):
        trainer(DistillationCallback(make_teacher(), [logits()])).fit(student, batches)
    assert_untouched(student)
    callback = DistillationCallback(make_teacher(), [logits()], teacher_inputs=lambda batch: batch["x"])
    trainer(callback).fit(student, batches)


def test_a_teacher_object_is_used_as_it_is() -> None:
    teacher = Teacher(make_teacher(), early_exit=False)
    callback = DistillationCallback(teacher, [logits()])
    assert callback.teacher is teacher
    with pytest.raises(ValueError, match="goes to the Teacher that you pass"):
        DistillationCallback(teacher, [logits()], early_exit=False)


def test_pairs_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two terms would be logged as 'logits'"):
        DistillationCallback(make_teacher(), [logits(), logits()])
    with pytest.raises(ValueError, match="pairs is empty"):
        DistillationCallback(make_teacher(), [])
    with pytest.raises(TypeError, match="pairs must be a list of Pair objects, got Pair"):
        DistillationCallback(make_teacher(), logits())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="validate must be True or False, got 'yes'"):
        DistillationCallback(make_teacher(), [logits()], validate="yes")  # type: ignore[arg-type]


def test_a_loss_with_bind_is_shown_both_models() -> None:
    class Bound(nn.Module):
        models: tuple[Any, ...] = ()

        def bind(self, student: nn.Module, teacher: nn.Module) -> None:
            Bound.models = (student, teacher)

        def forward(self, s: Tensor, t: Tensor) -> Tensor:
            return F.mse_loss(s, t)

    student, teacher = make_student(), make_teacher()
    trainer(DistillationCallback(teacher, [logits_with(Bound())])).fit(student, loader())
    assert Bound.models[0] is student
    assert Bound.models[1] is teacher


def logits_with(loss: Any) -> Pair:
    return Pair(teacher="outputs[3]", student="outputs[net]", loss=loss, name="logits")
