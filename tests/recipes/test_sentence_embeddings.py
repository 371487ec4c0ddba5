"""The second recipe: a real pretrained teacher, stopped before its last layers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr, spearmanr

from softs_lightning.config import Refusal, arms, build
from softs_lightning.explain import distils
from softs_lightning.losses import RKD
from softs_lightning.recipes import sentence_embeddings as recipe
from softs_lightning.recipes import text
from softs_lightning.report import Result
from tests.recipes.command import run_folder, softs_distill
from tests.test_config import composed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data() -> recipe.Prose:
    return recipe.Prose(batch_size=4)


@pytest.fixture(scope="module")
def teacher() -> torch.nn.Module:
    return recipe.minilm().eval()


def test_a_short_run_ends_with_the_table(tmp_path: Path) -> None:
    done = softs_distill(
        "recipe=sentence-embeddings",
        "seeds=[0]",
        "arms=null",
        "judge.score._target_=softs_lightning.recipes.sentence_embeddings.agreement",  # the quickest
        "judge.others=null",
        "pairs.0.teacher='outputs[encoder.layer.1|encoder.layer.3]'",
        "pairs.1.teacher='outputs[encoder.layer.3]'",
        "trainer.limit_train_batches=3",
        "trainer.log_every_n_steps=1",
        "trainer.enable_progress_bar=false",
        folder=tmp_path,
        cache=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "The teacher stops at encoder.layer.3 (33.4 % of its FLOPs saved)." in done.stdout
    folder = run_folder(tmp_path, "sentence-embeddings")
    found = Result.from_json((folder / "results.json").read_text())
    assert [arm.name for arm in found.arms] == ["alone", "distilled"]
    student = recipe.SentenceEncoder.load_from_checkpoint(folder / "student.ckpt", weights_only=True)
    data = recipe.Prose(max_length=24, news=True)  # as the recipe says
    score = recipe.agreement(student.cpu().eval(), data=data, teacher=recipe.minilm().eval())
    assert found.arms[1].of(found.headline) == (pytest.approx(score, abs=1e-6),)
    # The report is whole: layers and outputs were compared on the validation sentences.
    assert "Not measured" not in done.stdout
    alike = json.loads((folder / "similarity.json").read_text())
    assert (alike["part"], alike["samples"], alike["missing"]) == ("validation", 256, {})
    assert {name: len(one["layers"]) for name, one in alike["students"].items()} == {
        "alone": 3,
        "distilled": 3,
    }


def test_people_are_asked_as_scipy_would(data: recipe.Prose, teacher: torch.nn.Module) -> None:
    student = recipe.SentenceEncoder(layers=(0,)).eval()
    found = recipe.judge(student, data=data, teacher=teacher)
    asked = composed("recipe=sentence-embeddings").judge
    assert list(found) == [asked.name, *asked.others]

    def vector(text: str, length: int) -> torch.Tensor:
        encoded = data.tokenizer(text, truncation=True, max_length=length, return_tensors="pt")
        with torch.no_grad():
            hidden = student(encoded["input_ids"], encoded["attention_mask"]).last_hidden_state[0]
        return torch.nn.functional.normalize(hidden.double().mean(dim=0), dim=0)

    rows = [line.split("\t") for line in text.gensim_file("wordsim353.tsv").splitlines()[2:]]
    assert len(rows) == 353
    words = {word: vector(word, 32) for row in rows for word in row[:2]}
    ours = [float(words[a] @ words[b]) for a, b, _ in rows]
    assert found["WordSim-353"] == pytest.approx(
        spearmanr(ours, [float(r[2]) for r in rows]).statistic, abs=1e-4
    )
    documents = torch.stack([vector(d, 128) for d in text.gensim_file("lee.cor").splitlines()])
    people = np.loadtxt(text.gensim_file("similarities0-1.txt").splitlines())
    above = np.triu_indices(50, 1)
    expected = pearsonr((documents @ documents.T).numpy()[above], people[above]).statistic
    assert found["Lee documents"] == pytest.approx(expected, abs=1e-4)


def entry(number: int, word: str, gloss: str) -> str:
    return f"{number:08d} 03 n 02 {word} 0 other_word 0 001 @ 00001930 n 0000 | {gloss}  "


@pytest.fixture
def wordnet(tmp_path: Path) -> Path:
    lines = [
        "  1 This software and database is being provided to you under a | licence of many words",
        entry(1, "dog", 'an animal that barks; "a dog barked"'),
        entry(2, "cat", "an animal that mews at night; not a lion"),
        entry(3, "cat", "a woman who gossips about others"),
        entry(4, "Paris", "the capital of France since long"),
        entry(5, "living_thing", "a thing that is alive now"),
        entry(6, "run", "to be running very fast"),
        entry(7, "few", "not so many"),
    ]
    for part in ("noun", "verb", "adj", "adv"):
        (tmp_path / f"data.{part}").write_text(
            "\n".join(lines if part == "noun" else lines[:1]), encoding="utf-8"
        )
    return tmp_path


def test_a_definition_is_read_with_its_word_and_no_word_twice(wordnet: Path) -> None:
    found = dict(reversed(pair) for pair in text.wordnet_definitions(str(wordnet), count=2))
    assert found.pop("dog") == "an animal that barks"
    assert found in ({"cat": "an animal that mews at night"}, {"cat": "a woman who gossips about others"})
    with pytest.raises(ValueError, match="3 definitions are wanted, there are 2"):
        text.wordnet_definitions(str(wordnet), count=3)


def test_without_wordnet_retrieval_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    asked = composed("recipe=sentence-embeddings", "+scale=wordnet", f"data.wordnet={tmp_path}/none")
    assert list(asked.judge.others)[-1] == recipe.RETRIEVAL
    with pytest.raises(
        Refusal, match=r"data.noun: give the folder of WordNet's database.*apt install wordnet-base"
    ):
        build(asked.data, "data")
    assert recipe.RETRIEVAL not in composed("recipe=sentence-embeddings").judge.others


def test_recall_counts_the_words_that_are_nearer_than_the_right_one(teacher: torch.nn.Module) -> None:
    data = recipe.Prose(batch_size=4)
    words = ["dog", "cat", "river", "mountain", "bread", "king", "doctor", "music", "winter", "hammer"]
    meant = ["an animal that barks", "an animal that mews", "water that flows to the sea", "a very high hill"]
    meant += ["baked food made of flour", "he rules a country", "she heals the sick", "sounds that please"]
    meant += ["the cold part of a year", "a tool to hit nails with"]
    data.definitions = tuple(zip(meant[::-1], words, strict=True))  # most are wrong
    with torch.no_grad():
        ours = [
            [
                torch.nn.functional.normalize(
                    teacher(**data.tokenizer(one, return_tensors="pt")).last_hidden_state[0].double().mean(0),
                    dim=0,
                )
                for one in side
            ]
            for side in (meant[::-1], words)
        ]
    likeness = np.array([[float(q @ w) for w in ours[1]] for q in ours[0]])
    ranks = [int((row > row[i]).sum()) for i, row in enumerate(likeness)]
    for count in (1, 3, 10):
        expected = 100 * sum(rank < count for rank in ranks) / len(ranks)
        assert recipe.recall(teacher, data=data, count=count) == pytest.approx(expected)
    assert 0 < recipe.recall(teacher, data=data, count=3) < 100
    with pytest.raises(ValueError, match="wordnet=FOLDER"):
        recipe.recall(teacher, data=recipe.Prose(batch_size=4))


def test_three_layers_are_compared_with_three_layers_alone() -> None:
    trained = arms(composed("recipe=sentence-embeddings"))
    alone, distilled = trained["three layers alone"], trained["three layers"]
    assert alone.student == distilled.student
    assert (distils(alone), distils(distilled)) == (False, True)


def test_neighbours_found_are_counted() -> None:
    generator = torch.Generator().manual_seed(0)
    meant, alike = (torch.rand(30, 30, generator=generator) for _ in range(2))
    assert recipe._neighbours_found(meant, meant) == 100.0
    for matrix in (meant, alike):
        matrix.fill_diagonal_(-1)
    shared = [
        len(set(a.argsort(descending=True)[:10].tolist()) & set(b.argsort(descending=True)[:10].tolist()))
        for a, b in zip(alike, meant, strict=True)
    ]
    assert recipe._neighbours_found(alike, meant) == pytest.approx(10 * sum(shared) / 30)


def test_what_people_judged_is_not_in_the_text_to_train_on() -> None:
    trained = recipe.Prose(batch_size=4, news=True)
    seen = " ".join(trained.train)
    documents = text.gensim_file("lee.cor").splitlines()
    assert len(documents) == 50
    assert not any(document[:80] in seen or document[-80:] in seen for document in documents)
    assert len(trained.train) > len(recipe.Prose(batch_size=4).train) + 500


def test_relations_are_those_of_the_means_without_padding() -> None:
    student, theirs = torch.randn(4, 5, 6), torch.randn(4, 5, 8)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    means = [torch.stack([x[i, : int(mask[i].sum())].mean(0) for i in range(4)]) for x in (student, theirs)]
    found = recipe.Pooled(RKD())(student, theirs, mask=mask)
    assert found.item() == pytest.approx(RKD()(*means).item(), abs=1e-6)


def test_agreement_is_the_rank_correlation_of_similarities(
    data: recipe.Prose, teacher: torch.nn.Module
) -> None:
    torch.manual_seed(0)
    student = recipe.SentenceEncoder(layers=(0,)).eval()

    def similarities(model: torch.nn.Module) -> torch.Tensor:
        vectors = []
        for sentence in sorted(data.test[: recipe.JUDGED], key=len)[:40]:
            encoded = data.tokenizer(
                sentence, truncation=True, max_length=data.max_length, return_tensors="pt"
            )
            with torch.no_grad():
                hidden = model(encoded["input_ids"], encoded["attention_mask"]).last_hidden_state[0]
            vectors.append(hidden.double().mean(dim=0))
        unit = torch.stack(vectors) / torch.stack(vectors).norm(dim=1, keepdim=True)
        return torch.stack([unit[i] @ unit[j] for i in range(40) for j in range(i + 1, 40)])

    expected = spearmanr(similarities(student), similarities(teacher)).statistic
    fewer = recipe.Prose(batch_size=4)
    fewer.test = sorted(fewer.test[: recipe.JUDGED], key=len)[:40]
    assert recipe.agreement(student, data=fewer, teacher=teacher) == pytest.approx(expected, abs=1e-4)
    assert recipe.agreement(teacher, data=fewer, teacher=teacher) == pytest.approx(1.0, abs=1e-6)


def test_the_student_starts_as_the_teachers_layers(teacher: torch.nn.Module) -> None:
    own = recipe.SentenceEncoder(layers=(0, 3)).encoder.state_dict()
    theirs = teacher.state_dict()
    place = {"encoder.layer.0.": "encoder.layer.0.", "encoder.layer.1.": "encoder.layer.3."}
    for name, value in own.items():
        prefix = next((p for p in place if name.startswith(p)), "")
        assert torch.equal(value, theirs[name.replace(prefix, place.get(prefix, ""), 1)]), name
    assert sum(name.startswith("encoder.layer.") for name in own) == 32


def test_the_contrast_is_that_of_two_different_dropouts(data: recipe.Prose) -> None:
    student = recipe.SentenceEncoder(layers=(0,))
    batch = data.encode(data.train[:4])
    torch.manual_seed(0)
    loss = student.contrast(batch)
    torch.manual_seed(0)
    once, again = (recipe.embed(student, batch).double() for _ in range(2))
    assert not torch.allclose(once, again, atol=1e-3)
    terms = (once @ again.T / 0.05).softmax(dim=1).diagonal().log()
    assert loss.item() == pytest.approx(-terms.mean().item(), abs=1e-5)


def test_the_parts_of_the_text_are_disjoint_and_complete(data: recipe.Prose) -> None:
    parts = [set(data.train), set(data.validation), set(data.test)]
    assert sum(map(len, parts)) == len(set().union(*parts)) == len(recipe.docstring_sentences())
    assert min(map(len, parts)) > 200
    rows = sum(len(batch["input_ids"]) for batch in data.val_dataloader())
    assert rows == len(data.validation)


def test_sentences_are_sentences() -> None:
    for sentence in recipe.docstring_sentences():
        assert sentence[0].isupper()
        assert sentence[-1] in ".!?"
        assert 6 <= len(sentence.split()) <= 30
        assert "\n" not in sentence
        assert ">>>" not in sentence
