"""The recipe of masked words: its text, what is masked in it, students cut from the teacher, the losses, the judge."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from sklearn.metrics import accuracy_score
from torch import Tensor
from transformers import BertConfig, BertForMaskedLM, BertModel

from softs_lightning.callback import DistillationCallback
from softs_lightning.config import Refusal, arms, build, check
from softs_lightning.experiment import run_recipe
from softs_lightning.explain import build_callbacks
from softs_lightning.recipes.masked_lm import MaskedLanguageModel, MaskedText, guesses, minilm_with_a_head
from softs_lightning.recipes.text import load_tokenizer, minilm, minilm_folder
from softs_lightning.recipes.wikipedia import articles, plain
from softs_lightning.surgery import from_teacher
from tests.test_config import composed

pytestmark = pytest.mark.slow

VOCABULARY = 30522
HEAD = "cls.predictions.decoder.weight"
NATS = "nats per masked word"
EMBEDDINGS = "bert.embeddings.word_embeddings.weight"


def tiny(layers: int = 6, seed: int = 0) -> BertForMaskedLM:
    """A BERT with BERT's vocabulary that costs next to nothing, without dropout."""
    torch.manual_seed(seed)
    model = BertForMaskedLM(
        BertConfig(
            num_hidden_layers=layers, hidden_size=16, intermediate_size=16, num_attention_heads=2,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, initializer_range=0.3,
        )
    )  # fmt: skip
    model.train(False)
    return model


@pytest.fixture(scope="module")
def data() -> MaskedText:
    return MaskedText(batch_size=8, max_length=24)


def fit(
    model: L.LightningModule, data: L.LightningDataModule, *callbacks: L.Callback, steps: int = 3
) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        max_steps=steps,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=list(callbacks),
    )
    trainer.fit(model, datamodule=data)
    return trainer


def words(rows: Tensor) -> list[int]:
    """The tokens of passages one after another, without what begins, ends and fills them."""
    return [token for token in rows.flatten().tolist() if token not in (0, 101, 102)]


# -- the text --------------------------------------------------------------------------------------


def test_no_article_is_in_two_parts(data: MaskedText) -> None:
    tokenizer = load_tokenizer(minilm_folder())
    parts: dict[str, list[int]] = {"train": [], "validation": [], "test": []}
    titles = [title for title, _ in articles()]
    assert len(set(titles)) == len(titles) > 90
    for title, paragraphs in articles():
        place = hashlib.sha256(title.encode()).digest()[0] * 100 // 256
        name = "test" if place < 20 else "validation" if place < 30 else "train"
        for paragraph in paragraphs:
            parts[name] += tokenizer(paragraph)["input_ids"][1:-1]
    whole = MaskedText(max_length=24, judged=None)
    assert words(whole.train) == parts["train"]
    for name in ("validation", "test"):
        batch = getattr(whole, name)
        assert words(original(batch)) == parts[name]
    judged = {tuple(row) for row in original(data.test).tolist()}
    assert len(data.test["labels"]) == 1000
    assert judged <= {tuple(row) for row in original(whole.test).tolist()}
    assert not judged & {tuple(row) for row in data.train.tolist()}


def original(batch: dict[str, Tensor]) -> Tensor:
    return torch.where(batch["labels"] == -100, batch["input_ids"], batch["labels"])


def test_markup_is_left_out() -> None:
    prose = "This is a sentence of more than ten words that has to stay."
    source = (
        "{{Infobox|name={{lang|en|x}}}}\n== Title ==\n* a list\n{| class=x\n| a table\n|}\nToo short.\n"
        "[[File:x.jpg|thumb|A picture of more than ten words that has to go away.]]\n<!-- hidden -->\n"
        "This is a '''sentence''' of [[much|more]]<ref name=a>{{cite|b=c}}</ref> than [[ten]]<ref name=b/> words "
        "that has [http://x.org to]&nbsp;<small>stay</small>.\n"
        f"'''{prose}'''\n{prose} {{{{broken\n"
    )
    assert plain(source) == (prose, prose)


def test_a_text_of_ones_own_is_read_by_lines(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("\n".join(f"document {i} tells of cats and dogs" for i in range(40)))
    own = MaskedText(text=str(file), max_length=12)
    assert len(own.train) + len(own.validation["labels"]) + len(own.test["labels"]) == 40
    assert own.tokenizer.decode(own.train[0]).startswith("[CLS] document ")
    file.write_text("a single line")
    with pytest.raises(ValueError, match="1 documents are too few"):
        MaskedText(text=str(file), max_length=13)


def test_what_is_looked_at_is_a_batch_that_an_epoch_may_hold(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    file.write_text("\n".join(f"document {i} tells of cats and dogs" for i in range(40)))
    own = MaskedText(text=str(file), max_length=12)
    for size, rows in ((len(own.train), 2), (1, 1)):
        own.batch_size = size
        assert len(own.example_batch()["input_ids"]) == rows
    own.batch_size = len(own.train) + 1
    assert list(own.train_dataloader()) == []
    with pytest.raises(Refusal, match="the training data holds not one batch"):
        own.example_batch()


# -- what is masked --------------------------------------------------------------------------------


def test_fifteen_percent_of_the_words_are_asked_for_and_nothing_special(data: MaskedText) -> None:
    ids = data.train[:3000]
    batch = data.masked(ids, seed=5)
    labels, seen = batch["labels"], batch["input_ids"]
    asked = labels != -100
    special = torch.isin(ids, torch.tensor([0, 100, 101, 102, 103]))
    assert int((ids == 0).sum()) > 0
    assert int(asked.sum()) == math.ceil(0.15 * int((~special).sum()))
    assert not bool((asked & special).any())
    assert torch.equal(labels[asked], ids[asked])
    assert torch.equal(seen[~asked], ids[~asked])
    assert torch.equal(batch["attention_mask"], (ids != 0).long())
    count = int(asked.sum())
    hidden, stayed = (seen[asked] == 103), (seen[asked] == ids[asked])
    other = seen[asked][~hidden & ~stayed]
    for part, share in ((int(hidden.sum()), 0.8), (int(stayed.sum()), 0.1), (len(other), 0.1)):
        assert abs(part - share * count) < 4 * math.sqrt(count * share * (1 - share))
    assert not bool(torch.isin(other, torch.tensor([0, 100, 101, 102, 103])).any())
    assert other.unique().numel() > 0.9 * len(other)


def test_the_seed_alone_says_what_is_masked(data: MaskedText) -> None:
    def batches(seed: int) -> list[dict[str, Tensor]]:
        torch.manual_seed(torch.seed() % 2**31)
        loader = MaskedText(batch_size=8, max_length=24, seed=seed).train_dataloader()
        return [batch for _, batch in zip(range(3), loader, strict=False)]

    one, same, other = batches(1), batches(1), batches(2)
    for a, b, c in zip(one, same, other, strict=True):
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert not torch.equal(a["input_ids"], c["input_ids"])
    again = MaskedText(max_length=24, seed=2)
    for part in ("validation", "test"):
        assert all(torch.equal(getattr(again, part)[name], getattr(data, part)[name]) for name in data.test)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"share": 0.0}, "between 0 and 1"),
        ({"share": 1.0}, "between 0 and 1"),
        ({"max_length": 3}, "4 tokens at least"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MaskedText(**options)


# -- the models ------------------------------------------------------------------------------------


def test_the_teacher_starts_as_minilm_under_a_tied_head() -> None:
    model, theirs = minilm_with_a_head(), minilm().state_dict()
    own = model.bert.state_dict()
    assert set(theirs) - set(own) == {"pooler.dense.weight", "pooler.dense.bias"}
    assert all(torch.equal(value, theirs[name]) for name, value in own.items())
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight


def test_a_student_is_the_teachers_layers_embeddings_and_head() -> None:
    teacher = MaskedLanguageModel(source=tiny)
    theirs = teacher.model.state_dict()
    own = MaskedLanguageModel(source=lambda: teacher, layers=[0, 2, 4]).model.state_dict()
    old = {f"layer.{new}.": f"layer.{kept}." for new, kept in enumerate((0, 2, 4))}
    for name, value in own.items():
        place = next((new for new in old if new in name), None)
        assert torch.equal(value, theirs[name if place is None else name.replace(place, old[place])])
    assert sum("encoder.layer" in name for name in own) == 3 * 16
    random = MaskedLanguageModel(source=lambda: teacher, layers=[0, 2, 4], random=True).model.state_dict()
    assert {n: v.shape for n, v in random.items()} == {n: v.shape for n, v in own.items()}
    assert not any(torch.equal(random[n], own[n]) for n in own if own[n].ndim > 1)
    with pytest.raises(TypeError, match=r"a BertForMaskedLM is wanted, .* got BertModel"):
        MaskedLanguageModel(source=lambda: BertModel(tiny().config))


@pytest.mark.parametrize("frozen", [True, False])
def test_the_head_stays_tied_in_training_and_in_a_checkpoint(
    data: MaskedText, tmp_path: Path, frozen: bool
) -> None:
    source = partial(tiny, 4)
    student = MaskedLanguageModel(source=source, layers=[0, 2], freeze_embeddings=frozen, lr=0.1)
    trainer = fit(student, data)
    embeddings = student.model.bert.embeddings.word_embeddings.weight
    assert torch.equal(embeddings, tiny(4).get_parameter(EMBEDDINGS)) is frozen
    trainer.save_checkpoint(tmp_path / "student.ckpt")
    read = MaskedLanguageModel.load_from_checkpoint(tmp_path / "student.ckpt", source=source)
    for model in (student.model, read.model):
        assert model.get_parameter(HEAD) is model.get_parameter(EMBEDDINGS)
        assert model.cls.predictions.decoder.bias is model.cls.predictions.bias
        assert torch.equal(model.get_parameter(EMBEDDINGS), embeddings)
    assert all(torch.equal(value, student.state_dict()[name]) for name, value in read.state_dict().items())


def test_a_head_may_begin_with_the_frequencies_of_the_text(data: MaskedText) -> None:
    model = MaskedLanguageModel(source=partial(tiny, 1), frequencies=True, lr=0.0)
    fit(model, data, steps=1)
    counts = Counter(data.train.flatten().tolist())
    total = data.train.numel() + 0.1 * VOCABULARY
    expected = torch.tensor([math.log((counts[i] + 0.1) / total) for i in range(VOCABULARY)])
    assert torch.allclose(model.model.cls.predictions.bias, expected, atol=1e-5)


# -- the losses ------------------------------------------------------------------------------------


class Watch(L.Callback):
    """Keeps what each model is called with, and the loss of each step."""

    def __init__(self, *models: BertForMaskedLM) -> None:
        self.seen: list[list[Tensor]] = [[] for _ in models]
        self.batches: list[dict[str, Tensor]] = []
        self.losses: list[float] = []
        for model, kept in zip(models, self.seen, strict=True):
            model.bert.register_forward_pre_hook(partial(self._keep, kept), with_kwargs=True)

    @staticmethod
    def _keep(kept: list[Tensor], module: Any, args: Any, kwargs: Any) -> None:
        kept.append((args[0] if args else kwargs["input_ids"]).clone())

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.batches.append(batch)
        self.losses.append(float(outputs["loss"]))


Step = tuple["Watch", MaskedLanguageModel, MaskedLanguageModel, bool]


@pytest.fixture(scope="module", params=[False, True], ids=["masked places", "every token"])
def step(data: MaskedText, request: pytest.FixtureRequest) -> Step:
    """Two steps of the recipe's own distillation with a small teacher, at a rate of zero."""
    recipe = composed("recipe=distilbert-init")
    if request.param:
        recipe.pairs[0].mask = True
    teacher = MaskedLanguageModel(source=tiny)
    student = MaskedLanguageModel(source=lambda: teacher, layers=recipe.student.layers, lr=0.0)
    pairs = [build(pair, "pairs") for pair in recipe.pairs]
    callback = DistillationCallback(
        teacher=teacher, pairs=pairs, task_weight=recipe.callbacks.distill.task_weight
    )
    watch = Watch(teacher.model, student.model)
    fit(student, data, callback, watch, steps=2)
    return watch, student, teacher, request.param


def test_teacher_and_student_see_the_same_masked_words(step: Step) -> None:
    watch, *_ = step
    theirs, ours = watch.seen
    assert len(theirs) == len(ours) == len(watch.batches) == 2
    for a, b, batch in zip(theirs, ours, watch.batches, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, batch["input_ids"])
        assert int((a == 103).sum()) > 0


def test_the_loss_is_the_papers(step: Step) -> None:
    watch, student, teacher, everywhere = step
    for batch, loss in zip(watch.batches, watch.losses, strict=True):
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        with torch.no_grad():
            ours, theirs = (
                m.model.double().eval()(**inputs, output_hidden_states=True) for m in (student, teacher)
            )
        real, asked = batch["attention_mask"] == 1, batch["labels"] != -100
        words = -ours.logits.log_softmax(-1)[asked].gather(1, batch["labels"][asked][:, None]).mean()
        compared = real if everywhere else asked
        soft, softer = ((side.logits / 2).log_softmax(-1)[compared] for side in (ours, theirs))
        scores = 4 * (softer.exp() * (softer - soft)).sum(-1).mean()
        last, its = (side.hidden_states[-1][real] for side in (ours, theirs))
        cosine = (last * its).sum(-1) / (last.norm(dim=-1) * its.norm(dim=-1))
        assert float(scores) > 0.1
        assert float(cosine.mean()) < 0.99
        assert loss == pytest.approx(float(2 * words + 5 * scores + (1 - cosine).mean()), rel=1e-5)


def test_the_recipes_ways_differ_as_they_are_called() -> None:
    ways = arms(composed("recipe=distilbert-init"))

    def terms(name: str) -> dict[str, float]:
        (callback,) = (c for c in build_callbacks(ways[name]) if isinstance(c, DistillationCallback))
        return {"words": callback.task_weight, **{pair.name: pair.weight for pair in callback.pairs}}

    whole = {"words": 2.0, "scores": 5.0, "states": 1.0}  # the paper's weights
    assert terms("distilled") == terms("distilled from random") == whole
    assert terms("without masked words") == {**whole, "words": 0.0}
    assert terms("without states") == {"words": 2.0, "scores": 5.0}
    assert ways["without states"].pairs[0] == ways["distilled"].pairs[0]
    assert {name for name, way in ways.items() if way.student.random} == {"distilled from random", "random"}
    assert {name for name, way in ways.items() if way.callbacks.distill is None} == {"random"}


# -- the judge -------------------------------------------------------------------------------------


def test_the_judge_counts_as_an_independent_one_does(data: MaskedText) -> None:
    few = MaskedText(max_length=24, judged=70)  # two whole parts of the judge, and a part of one
    assert len(few.test["labels"]) == 70
    student, teacher = tiny(2, seed=1), tiny(3, seed=2)
    for model, seed in ((student, 3), (teacher, 4)):
        torch.manual_seed(seed)
        torch.nn.init.normal_(model.cls.predictions.bias, std=2.0)
    with torch.no_grad():
        module = MaskedLanguageModel(source=lambda: student).eval()
        found = guesses(module, data=few, teacher=teacher)
        nats, guess, its, labels = 0.0, [], [], []
        for ids, mask, row in zip(*few.test.values(), strict=True):
            ours, theirs = (
                m.double()(input_ids=ids[None], attention_mask=mask[None]).logits[0]
                for m in (student, teacher)
            )
            for place in (row != -100).nonzero().flatten().tolist():
                nats -= float(ours[place].log_softmax(0)[row[place]])
                guess.append(int(ours[place].argmax()))
                its.append(int(theirs[place].argmax()))
                labels.append(int(row[place]))
    assert found[NATS] == pytest.approx(nats / len(labels), rel=1e-6)
    assert found["guessed right"] == pytest.approx(100 * accuracy_score(labels, guess))
    assert found["as the teacher"] == pytest.approx(100 * accuracy_score(its, guess))
    assert guesses(teacher.to(torch.float32), data=few, teacher=teacher)["as the teacher"] == 100


# -- a run -----------------------------------------------------------------------------------------


def test_students_of_a_run_start_as_what_is_cut_from_its_teacher(tmp_path: Path) -> None:
    file = tmp_path / "own.txt"
    numbers = ["one", "two", "three", "four", "five", "six", "seven"]
    rows = [" ".join(numbers[(i * j + i) % 7] for j in range(12)) for i in range(7)]
    file.write_text("\n".join(f"{i} {row}" for i in range(20) for row in rows))
    text = ("data.text", "+teacher.data.text")
    recipe = composed(
        "recipe=distilbert-init",
        *(f"{name}={file}" for name in text),
        *("data.max_length=16", "teacher.data.max_length=16", "student.layers=[0]", "student.lr=0.0"),
        *(
            "teacher.module.source._target_=tests.recipes.test_masked_lm.tiny",
            "+teacher.module.source.layers=2",
        ),
        *("teacher.module.lr=1e-2", "teacher.trainer.max_steps=60", f"teacher.cache_dir={tmp_path}"),
        "pairs.1.teacher='outputs[model.bert.encoder.layer.1]'",
        "pairs.1.student='outputs[model.bert.encoder.layer.0]'",
        *("trainer.max_steps=1", "trainer.enable_progress_bar=false", "seeds=[0,1]"),
        "+teacher.trainer.enable_progress_bar=false",
    )
    check(recipe)
    found = run_recipe(recipe, name="distilbert-init", directory=tmp_path)
    teacher = build(recipe.teacher, "teacher")().model
    cut = from_teacher(teacher, layers=[0]).train(False)
    expected = guesses(cut, data=build(recipe.data, "data"), teacher=teacher)
    scores = {arm.name: arm.scores for arm in found.arms}
    assert scores["alone"] == scores["distilled"] == (pytest.approx(expected), pytest.approx(expected))
    assert scores["random"] == scores["distilled from random"]
    for name in ("alone", "random"):
        assert all(found.teacher[NATS] < one[NATS] for one in scores[name])
    assert scores["random"][0] != scores["random"][1]
