"""The recipes on labelled docstrings: their data, their students and what their pairs do."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from sklearn.metrics import accuracy_score

from softs_lightning.callback import DistillationCallback
from softs_lightning.config import arms
from softs_lightning.explain import build_callbacks
from softs_lightning.recipes.text import minilm
from softs_lightning.recipes.topics import (
    FAMILIES,
    UNLABELLED,
    TextClassifier,
    Topics,
    accuracy,
    labelled_sentences,
)
from softs_lightning.stages import turns
from tests.test_config import composed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data() -> Topics:
    return Topics(labels=8, seed=3)


def test_the_parts_are_disjoint_complete_and_have_one_label_each(data: Topics) -> None:
    whole = Topics()
    parts = [dict(part) for part in (whole.train, whole.validation, whole.test)]
    assert sum(map(len, parts)) == len(labelled_sentences()) == len(set().union(*parts))
    assert {label for part in parts for label in part.values()} == set(range(len(FAMILIES)))
    assert [text for text, _ in data.train] == [text for text, _ in whole.train]


def test_eight_sentences_of_each_family_keep_their_label(data: Topics) -> None:
    shown = {text: label for text, label in data.train if label != UNLABELLED}
    assert Counter(shown.values()) == dict.fromkeys(range(len(FAMILIES)), 8)
    assert shown.items() <= dict(Topics().train).items()
    assert shown != {t: c for t, c in Topics(labels=8, seed=4).train if c != UNLABELLED}
    with pytest.raises(ValueError, match="labels=0: give from 1 to"):
        Topics(labels=0)


def test_students_start_as_said() -> None:
    theirs = minilm().state_dict()
    cut = TextClassifier(layers=[0, 2, 4])
    for new, old in enumerate((0, 2, 4)):
        prefix = f"layer.{new}."
        own = {n: p for n, p in cut.encoder.state_dict().items() if prefix in n}
        assert len(own) == 16
        assert all(torch.equal(p, theirs[n.replace(prefix, f"layer.{old}.")]) for n, p in own.items())
    random = TextClassifier(layers=[0, 2, 4], random=True)
    assert {n: p.shape for n, p in random.named_parameters()} == {
        n: p.shape for n, p in cut.named_parameters()
    }
    same = [
        torch.equal(a, b)
        for a, b in zip(random.encoder.parameters(), cut.encoder.parameters(), strict=True)
        if a.ndim > 1
    ]
    assert not any(same)
    small = TextClassifier(shape={"num_hidden_layers": 2, "hidden_size": 192, "intermediate_size": 768})
    assert (small.encoder.config.num_attention_heads, small.head.in_features) == (12, 192)
    with pytest.raises(ValueError, match="leave layers and random out"):
        TextClassifier(shape={}, random=True)


def test_the_judge_counts_as_scikit_learn_does(data: Topics) -> None:
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 1, "hidden_size": 12, "intermediate_size": 12}
    student, teacher = (TextClassifier(shape=shape).eval() for _ in range(2))
    found = accuracy(student, data=data, teacher=teacher)
    guesses: list[list[int]] = [[], []]
    with torch.no_grad():
        for row in data.test:
            batch = data.encode([row])
            for model, guess in zip((student, teacher), guesses, strict=True):
                guess.append(int(model(batch["input_ids"], batch["attention_mask"]).argmax()))
    label = [label for _, label in data.test]
    assert found["test accuracy"] == pytest.approx(100 * accuracy_score(label, guesses[0]))
    assert found["as the teacher"] == pytest.approx(100 * accuracy_score(guesses[1], guesses[0]))


def test_tinybert_learns_what_is_inside_first_and_the_scores_afterwards() -> None:
    two = arms(composed("recipe=tinybert-two-stage"))["two stages"]
    (callback,) = [c for c in build_callbacks(two) if isinstance(c, DistillationCallback)]
    found = [(start, [pair.name for pair in on]) for start, _, on in turns(callback.pairs)]
    assert found == [(0, ["embeddings", "states", "maps"]), (100, ["scores"])]
    assert two.trainer.limit_train_batches > 100
