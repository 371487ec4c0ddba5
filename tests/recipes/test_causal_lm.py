"""The recipe of causal language models: its text, its judge, and who writes what the student reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

from softs_lightning.recipes.causal_lm import (
    Documentation,
    LanguageModel,
    OnPolicy,
    nats,
    next_token_loss,
    paragraphs,
    written_text,
)
from softs_lightning.recipes.text import percent

pytestmark = pytest.mark.slow

SHAPE = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def data() -> Documentation:
    return Documentation(batch_size=4, length=32)


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(shape=SHAPE)


def test_rows_hold_the_paragraphs_of_their_part_and_nothing_else(data: Documentation) -> None:
    from softs_lightning.recipes.causal_lm import byte_pairs

    parts = {"test": range(20), "validation": range(20, 30), "train": range(30, 100)}
    tokenizer = byte_pairs(tuple(t for t in paragraphs() if percent(t) >= 30))
    for name, share in parts.items():
        rows: torch.Tensor = getattr(data, name)
        texts = [t for t in paragraphs() if percent(t) in share]
        written = tokenizer.decode(rows.flatten().tolist(), skip_special_tokens=False)
        assert "<end>".join(texts).startswith(written[:-40])
        assert len(rows) > 500
    assert int(data.train.max()) < 512


def test_the_judge_is_the_mean_of_all_predicted_tokens(data: Documentation, model: LanguageModel) -> None:
    few = Documentation(batch_size=4, length=32)
    few.test = data.test[:70]  # one whole batch of the judge, and a part of one
    torch.manual_seed(1)
    teacher = LanguageModel(shape=SHAPE)
    found = nats(model.eval(), data=few, teacher=teacher.eval())
    with torch.no_grad():
        logs = model(few.test).double().log_softmax(-1)
        same = model(few.test).argmax(-1) == teacher(few.test).argmax(-1)
    terms = [-logs[i, t, few.test[i, t + 1]] for i in range(70) for t in range(31)]
    assert found["nats per token"] == pytest.approx(float(torch.stack(terms).mean()), abs=1e-6)
    assert found["as the teacher"] == pytest.approx(100 * float(same[:, :-1].double().mean()))


def test_the_students_loss_is_that_of_transformers(data: Documentation, model: LanguageModel) -> None:
    model.log = lambda *args, **kwargs: None  # type: ignore[method-assign,assignment]
    rows = data.train[:3]
    expected = model.model(input_ids=rows, labels=rows).loss
    assert model.training_step({"input_ids": rows, "labels": rows}, 0).item() == pytest.approx(
        expected.item(), abs=1e-5
    )


def test_every_second_batch_is_written_by_the_student_before_the_teacher_sees_it(
    data: Documentation, model: LanguageModel
) -> None:
    callback = OnPolicy(fraction=0.5, prompt=6)
    for index in range(4):
        ids = data.train[:4].clone()
        batch = {"input_ids": ids, "labels": ids.clone()}
        callback.on_train_batch_start(
            L.Trainer(logger=False, enable_checkpointing=False), model, batch, index
        )
        assert torch.equal(batch["input_ids"], batch["labels"])
        assert batch["input_ids"].shape == ids.shape
        assert torch.equal(batch["input_ids"][:, :6], ids[:, :6])
        assert torch.equal(batch["input_ids"], ids) is (index % 2 == 0)
    assert model.model.training
    with pytest.raises(ValueError, match="fraction"):
        OnPolicy(fraction=0.0)


def test_the_student_writes_nothing_before_it_has_learned_for_a_while(
    data: Documentation, model: LanguageModel
) -> None:
    callback = OnPolicy(fraction=1.0, prompt=6, start=3)
    for step in range(5):
        trainer = SimpleNamespace(global_step=step)
        batch = {"input_ids": data.train[:2].clone(), "labels": data.train[:2].clone()}
        callback.on_train_batch_start(trainer, model, batch, step)  # type: ignore[arg-type]
        assert torch.equal(batch["input_ids"], data.train[:2]) is (step < 3)
    with pytest.raises(ValueError, match="start must be a number of steps, 0 or more, got -1"):
        OnPolicy(start=-1)


def test_the_judge_asks_the_teacher_once(data: Documentation, model: LanguageModel) -> None:
    few = Documentation(batch_size=4, length=32)
    few.test = data.test[:20]
    torch.manual_seed(1)
    teacher = LanguageModel(shape=SHAPE).eval()
    seen: list[int] = []
    teacher.register_forward_hook(lambda *_: seen.append(1))
    first = nats(model.eval(), data=few, teacher=teacher)
    asked = len(seen)
    assert asked == 3
    assert nats(model, data=few, teacher=teacher) == first
    assert len(seen) == asked
    assert nats(teacher, data=few, teacher=teacher)["as the teacher"] == 100
    assert (
        nats(model.model, data=few, teacher=teacher) == first
    )  # transformers' own model, without ours around it
    few.test = data.test[20:40]
    assert nats(model, data=few, teacher=teacher) != first


def test_frozen_embeddings_are_left_as_they_are(data: Documentation) -> None:
    torch.manual_seed(0)
    tied = LanguageModel(shape={**SHAPE, "tie_word_embeddings": True}, freeze_embeddings=True)
    still = {name for name, value in tied.named_parameters() if not value.requires_grad}
    assert still == {"model.model.embed_tokens.weight"}
    assert tied.model.lm_head.weight is tied.model.model.embed_tokens.weight
    next_token_loss(tied(data.train[:2]), data.train[:2]).backward()
    assert tied.model.lm_head.weight.grad is None


def test_what_a_teacher_wrote_is_kept_by_its_weights(
    data: Documentation, model: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOFTS_LIGHTNING_CACHE", str(tmp_path))
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    first = written_text(lambda: model, data.train[:3], prompt=8)
    assert torch.equal(torch.rand(2), expected)  # whether it was kept or not does not show in what is drawn
    assert torch.equal(first[:, :8], data.train[:3, :8])
    assert not torch.equal(first, data.train[:3])
    assert torch.equal(written_text(lambda: model, data.train[:3], prompt=8), first)
    assert len(list(tmp_path.iterdir())) == 1
    with torch.no_grad():
        model.model.lm_head.weight.add_(1.0)
    written_text(lambda: model, data.train[:3], prompt=8)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("given", [{}, {"shape": SHAPE, "pretrained": "gpt2"}])
def test_a_model_is_given_in_one_way(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="give one of shape, pretrained and model"):
        LanguageModel(**given)
