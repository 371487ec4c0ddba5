"""What is reported on validation batches, against both models evaluated by hand."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from softs_lightning import DistillationCallback, Pair
from tests.training import assert_untouched, data, hidden, loader, logits, make_student, make_teacher, trainer


class Soft(nn.Module):
    temperature = 1.0

    def forward(self, s: Tensor, t: Tensor) -> Tensor:
        return F.kl_div(s.log_softmax(-1), t.log_softmax(-1), log_target=True, reduction="batchmean")


def soft(**options: Any) -> Pair:
    return Pair("outputs[3]", "outputs[net]", Soft(), name="soft", **options)


def test_terms_and_fidelity_equal_those_of_the_whole_set(recwarn: pytest.WarningsRecorder) -> None:
    student = make_student()
    callback = DistillationCallback(make_teacher(), [hidden(), soft()], validate=True)
    kept: list[nn.Module] = []

    class Keep(L.Callback):
        def on_validation_end(self, *_: Any) -> None:
            kept.append(copy.deepcopy(callback.projectors["hidden"][0]))

    fit = trainer(callback, Keep())
    fit.fit(student, loader(), loader(22))  # the last batch is smaller
    assert_untouched(student)
    found = {
        k.removeprefix("distill/val/"): v.item() for k, v in fit.callback_metrics.items() if "/val/" in k
    }

    x = torch.stack([row for row, _ in [data(22)[i] for i in range(22)]])  # type: ignore[index]
    teacher = make_teacher().eval()
    with torch.no_grad():
        ours, theirs = kept[-1](student.net[1](student.net[0](x))), teacher[1](teacher[0](x))
        s, t = student.net(x), teacher(x)
        expected = {
            "hidden": F.mse_loss(ours, theirs),
            "hidden/cosine": F.cosine_similarity(ours, theirs, dim=-1).mean(),
            "hidden/cka": cka(ours, theirs),
            "soft": Soft()(s, t),
            "soft/kl": Soft()(s, t),
            "soft/agreement": (s.argmax(-1) == t.argmax(-1)).float().mean(),
            "soft/cosine": F.cosine_similarity(s, t, dim=-1).mean(),
            "soft/cka": cka(s, t),
        }
    assert found == pytest.approx({k: v.item() for k, v in expected.items()}, rel=1e-4)


def cka(s: Tensor, t: Tensor) -> Tensor:
    s, t = s.double() - s.double().mean(0), t.double() - t.double().mean(0)
    k, m = s @ s.T, t @ t.T
    return (k * m).sum() / (k.norm() * m.norm())


@pytest.mark.parametrize(
    "options", [{"precision": "bf16-mixed"}, {"precision": "bf16-true"}, {"inference_mode": False}]
)
def test_validating_changes_nothing_of_the_training(options: dict[str, Any]) -> None:
    with_it, without = make_student(), make_student()
    for student, validate in ((with_it, True), (without, False)):
        torch.manual_seed(0)
        callback = DistillationCallback(make_teacher_quietly(), [hidden(), soft()], validate=validate)
        trainer(callback, max_epochs=2, val_check_interval=3, **options).fit(student, loader(), loader())
    assert all(map(torch.equal, with_it.parameters(), without.parameters()))


def make_teacher_quietly() -> nn.Module:
    with torch.random.fork_rng():
        return make_teacher()


def test_a_pair_chooses_its_metrics() -> None:
    fit = trainer(DistillationCallback(make_teacher(), [logits(metrics=["agreement"])], validate=True))
    fit.fit(make_student(), loader(), loader())
    assert {k for k in fit.callback_metrics if "/val/" in k} == {
        "distill/val/logits",
        "distill/val/logits/agreement",
    }
    with pytest.raises(ValueError, match="there is no metric 'ckaa'; there are 'agreement'"):
        logits(metrics=["ckaa"])
    with pytest.raises(ValueError, match="write a pair for each layer"):
        Pair("outputs[1|3]", "outputs[net.1|net]", nn.MSELoss(), metrics=["cka"])


def test_an_exception_in_validation_leaves_no_hook() -> None:
    class Fails(L.Callback):
        def on_validation_batch_end(self, *_: Any) -> None:
            raise OSError("no")

    student = make_student()
    with pytest.raises(OSError, match="no"):
        trainer(Fails(), DistillationCallback(make_teacher(), [hidden()], validate=True)).fit(
            student, loader(), loader()
        )
    assert_untouched(student)
