"""The callback on transformers, under activation checkpointing and under torch.compile."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from softs_lightning import DistillationCallback, Pair
from tests.training import (
    Student,
    assert_untouched,
    hidden,
    loader,
    logits,
    make_student,
    make_teacher,
    trainer,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    # torch.compile looks at the .grad of every tensor that it traces, and torch warns itself.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]


class Wrapped(L.LightningModule):
    """How a user trains a transformers model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def bert(layers: int, width: int, seed: int, **options: Any) -> Any:
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * width,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=3,
    )
    return transformers.BertForSequenceClassification._from_config(config, **options)


def llama(layers: int, width: int, seed: int) -> Any:
    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        intermediate_size=2 * width,
        max_position_embeddings=16,
    )
    return transformers.LlamaForCausalLM(config)


def tokens(labels: str) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for i in range(8):
        ids = torch.randint(1, 50, (6,), generator=generator)
        mask = (torch.arange(6) < 6 - i % 3).long()
        label = torch.tensor(i % 3) if labels == "class" else ids.masked_fill(mask == 0, -100)
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": label})
    return rows


def batch_encoding(rows: list[dict[str, Tensor]]) -> Any:
    return transformers.BatchEncoding({key: torch.stack([row[key] for row in rows]) for key in rows[0]})


def masked_mse(student: Tensor, teacher: Tensor, *, mask: Tensor | None = None) -> Tensor:
    assert mask is not None
    return ((student - teacher).square().mean(-1) * mask).sum() / mask.sum()


@pytest.mark.parametrize("collate", [None, batch_encoding])
def test_a_bert_learns_from_another_as_in_a_hand_written_loop(collate: Any) -> None:
    data: Any = tokens("class")
    student = Wrapped(bert(2, 8, seed=3)).double()
    model = copy.deepcopy(student.model)
    projector = nn.Linear(8, 16)
    made = copy.deepcopy(projector).double()
    callback = DistillationCallback(
        partial(bert, 3, 16, seed=4),
        [
            Pair(
                "outputs[bert.encoder.layer.1]",
                "outputs[model.bert.encoder.layer.0]",
                masked_mse,
                projector=projector,
                name="hidden",
            ),
            Pair("outputs[.#logits]", "outputs[model#logits]", nn.MSELoss(), weight=0.5, name="logits"),
        ],
    )
    trainer(callback, precision="64-true").fit(student, DataLoader(data, batch_size=4, collate_fn=collate))
    assert_untouched(student)

    teacher = bert(3, 16, seed=4).double().eval()
    optimizer = torch.optim.AdamW([*model.parameters(), *made.parameters()], lr=1e-2)
    for batch in DataLoader(data, batch_size=4):
        asked = {key: batch[key] for key in ("input_ids", "attention_mask")}
        with torch.no_grad():
            theirs = teacher(**asked, output_hidden_states=True)
        ours = model(**batch, output_hidden_states=True)
        loss = ours.loss + 0.5 * F.mse_loss(ours.logits, theirs.logits)
        projected = made(ours.hidden_states[1])
        loss = loss + masked_mse(projected, theirs.hidden_states[2], mask=batch["attention_mask"].double())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for mine, its in zip(student.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=1e-10)


def test_attention_weights_need_eager_attention() -> None:
    item = "bert.encoder.layer.0.attention.self#1"
    pair = Pair(f"outputs[{item}]", f"outputs[model.{item}]", nn.MSELoss())
    batches: Any = DataLoader(tokens("class"), batch_size=4)  # type: ignore[arg-type]
    student = Wrapped(bert(2, 8, seed=3))
    with pytest.raises(LookupError, match=r"is None: the .sdpa. attention computes no weights"):
        trainer(DistillationCallback(partial(bert, 3, 16, seed=4), [pair])).fit(student, batches)
    assert_untouched(student)
    eager = {"attn_implementation": "eager"}
    callback = DistillationCallback(partial(bert, 3, 16, seed=4, **eager), [pair])
    fit = trainer(callback)
    fit.fit(Wrapped(bert(2, 8, seed=3, **eager)), batches)
    assert fit.callback_metrics["distill/total"] > 0


# -- activation checkpointing ----------------------------------------------------------------------


def in_row(how: str, value: bool) -> Any:
    mark = pytest.mark.situation(f"gradient checkpointing, {how}", proves="equal to a reference")
    return pytest.param(value, marks=mark)


def checkpointed(reentrant: bool | None, student: str, teacher: str) -> Wrapped:
    module = Wrapped(llama(2, 8, seed=3))
    if reentrant is not None:
        module.model.activation_checkpointing_enable({"use_reentrant": reentrant})
    torch.manual_seed(5)
    linear = None if student.endswith("lm_head]") else nn.Linear(8, 16)
    pair = Pair(teacher, student, nn.MSELoss(), projector=linear)
    callback = DistillationCallback(partial(llama, 3, 16, seed=4), [pair])
    data: Any = tokens("all")
    trainer(callback).fit(module, DataLoader(data, batch_size=4))
    return module


@pytest.mark.parametrize("reentrant", [in_row("re-entrant", True), in_row("not re-entrant", False)])
@pytest.mark.parametrize("item", ["model.layers.1", "lm_head"])
def test_checkpointed_students_train_as_others(reentrant: bool, item: str) -> None:
    products = f"outputs[model.{item}]", f"outputs[{item}]"
    ours, plain = checkpointed(reentrant, *products), checkpointed(None, *products)
    for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.situation("gradient checkpointing, re-entrant", proves="refused with message")
@pytest.mark.situation("gradient checkpointing, not re-entrant", proves="equal to a reference")
def test_products_inside_checkpointed_parts() -> None:
    products = "outputs[model.model.layers.1.mlp]", "outputs[model.layers.1.mlp]"
    ours, plain = checkpointed(False, *products), checkpointed(None, *products)
    for mine, its in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, its)
    with pytest.raises(RuntimeError, match="lies inside re-entrant activation checkpointing"):
        checkpointed(True, *products)


# -- torch.compile ---------------------------------------------------------------------------------


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="aot_eager")


def outer(student: Student) -> Any:
    student.net = compiled(student.net)
    return student


def inner(student: Student) -> Any:
    student.net[1] = compiled(student.net[1])
    return student


def in_place(student: Student) -> Any:
    student.net.compile(backend="aot_eager")
    return student


def used(student: Student) -> Any:
    student.net[0] = compiled(student.net[0])
    student(torch.ones(4, 4)).sum().backward()
    student.zero_grad()
    return student


def teacher_in_place(teacher: nn.Module) -> nn.Module:
    teacher.compile(backend="aot_eager")
    return teacher


def same(module: Any) -> Any:
    return module


def pairs() -> list[Pair]:
    torch.manual_seed(5)
    return [hidden(projector=nn.Linear(6, 8)), logits()]


def trained(
    student_change: Callable[[Student], Any], teacher_change: Callable[[nn.Module], nn.Module]
) -> list[Tensor]:
    torch._dynamo.reset()
    student = make_student()
    callback = DistillationCallback(teacher_change(make_teacher()), pairs())
    trainer(callback, max_steps=3).fit(student_change(student), loader())
    return [p.detach().clone() for p in student.parameters()]


@pytest.mark.parametrize(
    ("student", "teacher"),
    [
        (outer, same),
        (inner, same),
        (in_place, same),
        (used, same),
        (compiled, same),
        (same, compiled),
        (same, teacher_in_place),
        (outer, compiled),
        (compiled, compiled),
    ],
)
@pytest.mark.situation("compiled before the fit", proves="equal to a reference")
def test_compiled_models_train_as_eager_ones(student: Any, teacher: Any) -> None:
    for mine, its in zip(trained(student, teacher), trained(same, same), strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.situation("compiled and run before the fit", proves="refused with message")
def test_compiled_models_that_ran_before_the_fit_are_refused() -> None:
    def run_first(student: Student) -> Any:
        step = compiled(student.net)
        student.net = step
        student(torch.ones(4, 4)).sum().backward()
        student.zero_grad()
        return student

    def run_teacher(teacher: nn.Module) -> Any:
        step = compiled(teacher.eval().requires_grad_(False))
        with torch.no_grad():
            step(torch.ones(4, 4))
        return step

    with pytest.raises(
        LookupError, match="compiled code does not see hooks that are added after its first call"
    ):
        trained(run_first, same)
    with pytest.raises(
        RuntimeError, match="compiled code does not see hooks that are added after its first call"
    ):
        trained(same, run_teacher)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.situation("compiled by the callback", proves="equal to a reference")
def test_a_teacher_compiled_up_to_its_exit_trains_the_student_alike(precision: Any) -> None:
    torch._dynamo.reset()
    found = []
    for compile_teacher in ("aot_eager", False):
        student = make_student()
        callback = DistillationCallback(make_teacher(), pairs(), compile_teacher=compile_teacher)
        compilations: list[int] = []

        class Count(L.Callback):
            def on_train_end(
                self, *_: Any, seen: list[int] = compilations, of: Any = callback.teacher
            ) -> None:
                seen.append(of.compilations)

        trainer(callback, Count(), precision=precision).fit(student, loader())
        assert compilations == [1 if compile_teacher else 0]
        found.append([p.detach().clone() for p in student.parameters()])
    for mine, its in zip(*found, strict=True):
        torch.testing.assert_close(mine, its)


def test_compiled_teachers_keep_no_copies() -> None:
    with pytest.raises(ValueError, match="a compiled teacher keeps no copies"):
        DistillationCallback(make_teacher(), pairs(), compile_teacher=True, copy=True)
