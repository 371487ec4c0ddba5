"""The recipes on labelled docstrings: their data, their students and what their pairs do."""

from __future__ import annotations

import math
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

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
    AttentionScores,
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
    fresh = TextClassifier(shape={"num_hidden_layers": 2}).encoder.state_dict()
    assert not any(torch.equal(p, theirs[n]) for n, p in fresh.items() if p.ndim > 1 and "embed" not in n)
    assert not torch.equal(
        fresh["embeddings.word_embeddings.weight"], theirs["embeddings.word_embeddings.weight"]
    )
    small = TextClassifier(shape={"num_hidden_layers": 2, "hidden_size": 192, "intermediate_size": 768})
    assert (small.encoder.config.num_attention_heads, small.head.in_features) == (12, 192)
    with pytest.raises(ValueError, match="leave layers out"):
        TextClassifier(shape={}, layers=[0])


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


SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 24,
    "intermediate_size": 24,
    "attention_probs_dropout_prob": 0.0,
}


def test_attention_scores_are_what_the_model_takes_the_softmax_of(data: Topics) -> None:
    torch.manual_seed(0)
    student, teacher = (TextClassifier(shape={**SMALL, "hidden_size": width}).eval() for width in (24, 48))
    batch = data.encode(data.test[:6])
    mask = batch["attention_mask"]
    assert int((mask == 0).sum()) > 0
    seen: list[list[torch.Tensor]] = []
    expected: list[torch.Tensor] = []
    for model in (student, teacher):
        attention = model.encoder.encoder.layer[0].attention.self
        parts: list[torch.Tensor] = []
        for module in (attention.query, attention.key, attention):
            module.register_forward_hook(lambda m, i, o, parts=parts: parts.append(o))
        with torch.no_grad():
            model(batch["input_ids"], mask)
        query, key, (_, probabilities) = parts
        seen.append([query, key])
        # In each row the logarithms of probabilities are the scores, less what makes them sum to 1.
        scores = AttentionScores(heads=12).scores(query, key).double()
        rows = scores.masked_fill(mask[:, None, None, :] == 0, -torch.inf)
        assert torch.allclose(rows.softmax(-1), probabilities.double(), atol=1e-6)
        expected.append(scores)
    terms = []
    for i in range(len(mask)):
        count = int(mask[i].sum())
        gap = (expected[0] - expected[1])[i, :, :count, :count].square()
        terms.append((gap.sum(), gap.numel()))
    mean = sum(float(total) for total, _ in terms) / sum(count for _, count in terms)
    loss = AttentionScores(heads=12)
    assert loss(seen[0], seen[1], mask=mask).item() == pytest.approx(mean, rel=1e-5)
    twice = loss(seen[0] * 2, seen[1] * 2, mask=mask)
    assert twice.item() == pytest.approx(2 * mean, rel=1e-5)
    with pytest.raises(ValueError, match="come in pairs, got 3"):
        loss(seen[0] + seen[0][:1], seen[1] + seen[1][:1])
    with pytest.raises(ValueError, match="width 24 do not divide into 7 heads"):
        AttentionScores(heads=7)(seen[0], seen[1])


def rates(steps: int, **options: Any) -> list[float]:
    model = TextClassifier(shape=SMALL, lr=0.5, **options)
    model.trainer = SimpleNamespace(  # type: ignore[assignment]
        estimated_stepping_batches=steps, num_training_batches=39, accumulate_grad_batches=2
    )
    made = model.configure_optimizers()
    found = []
    for _ in range(steps):
        found.append(made["optimizer"].param_groups[0]["lr"])
        made["optimizer"].step()
        made["lr_scheduler"]["scheduler"].step()
    return found


def one_cycle(steps: int) -> list[float]:
    """Up along half a cosine in a tenth of the steps, and down in the rest, from 1/25 and to 1/250,000."""

    def between(start: float, end: float, share: float) -> float:
        return 0.5 * (end + (start - end) * (1 + math.cos(math.pi * share)) / 2)

    top = steps / 10 - 1
    return [
        between(1 / 25, 1, step / top)
        if step <= top and top
        else between(1, 4e-6, (step - top) / (steps - 1 - top))
        for step in range(steps)
    ]


def test_the_cycle_of_the_learning_rate_begins_anew_where_a_stage_does() -> None:
    assert rates(40) == pytest.approx(one_cycle(40))
    assert rates(40, restarts=[30]) == pytest.approx(one_cycle(30) + rates(10))
    assert rates(80, restarts=[1, 3], restarts_by="epoch") == pytest.approx(
        one_cycle(20) + one_cycle(40) + one_cycle(20)
    )
    assert rates(40, restarts=[30])[30:32] == pytest.approx(
        [0.02, 0.25 * (1 + math.cos(math.pi / 9))], abs=1e-4
    )
    assert rates(1, restarts=[30]) == pytest.approx(one_cycle(1))
    assert rates(20, restarts=[20, 30]) == rates(20)
    for wrong in ({"restarts": [0]}, {"restarts": [3, 3]}, {"restarts": [3], "restarts_by": "batch"}):
        with pytest.raises(ValueError, match="must rise from 1, by step or epoch"):
            TextClassifier(shape=SMALL, **wrong)  # type: ignore[arg-type]


def test_tinybert_learns_what_is_inside_first_and_the_scores_afterwards() -> None:
    two = arms(composed("recipe=tinybert-two-stage"))["two stages"]
    (callback,) = [c for c in build_callbacks(two) if isinstance(c, DistillationCallback)]
    found = [(start, [pair.name for pair in on]) for start, _, on in turns(callback.pairs)]
    stop = two.pairs[0].weight.stop
    assert found == [(0, ["embeddings", "states", "attention"]), (stop, ["scores"])]
    assert two.student.restarts == [stop]  # the scores get a cycle of the learning rate of their own
    assert two.trainer.max_steps > stop


@pytest.mark.parametrize("scale", [(), ("+scale=paper",)])
def test_tinybert_compares_queries_and_keys_of_one_layer_in_turn(scale: tuple[str, ...]) -> None:
    recipe = composed("recipe=tinybert-two-stage", *scale)
    attention = next(pair for pair in recipe.pairs if pair.name == "attention")
    for side in (attention.teacher, attention.student):
        items = side.removeprefix("outputs[").removesuffix("]").split("|")
        layers = [item.rpartition(".")[0] for item in items]
        assert layers[::2] == layers[1::2]
        assert [item.rpartition(".")[2] for item in items] == ["query", "key"] * (len(items) // 2)
    ours, theirs = (
        [int(n) for n in re.findall(r"layer\.(\d+)\.attention\.self\.query", side)]
        for side in (attention.student, attention.teacher)
    )
    last = 12 if scale else 6
    step = last // len(ours)
    assert (ours, theirs) == (list(range(len(ours))), list(range(step - 1, last, step)))
