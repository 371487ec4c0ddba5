"""Fingerprints: alike for the same function, unlike for another."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from softs_lightning.store import feed_fingerprint, teacher_fingerprint
from softs_lightning.store.fingerprint import differences


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.GELU(), nn.Linear(3, 1))


def bert(**options: Any) -> BertModel:
    torch.manual_seed(1)
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 8, "num_hidden_layers": 2}
    return BertModel(BertConfig(vocab_size=20, **{**sizes, **options}))


def changed(change: Callable[[Any], Any], make: Callable[[], Any] = net) -> list[str]:
    module = make()
    other = change(module) or module
    return [
        line.split(":")[0] for line in differences(teacher_fingerprint(make()), teacher_fingerprint(other))
    ]


@pytest.mark.parametrize("make", [net, bert])
def test_two_of_a_kind_are_one_teacher(make: Callable[[], nn.Module]) -> None:
    assert teacher_fingerprint(make()) == teacher_fingerprint(copy.deepcopy(make()))


def test_what_does_not_change_the_function_does_not_change_it() -> None:
    module = net().eval().requires_grad_(False)
    module.register_forward_hook(lambda *_: None)
    assert teacher_fingerprint(module) == teacher_fingerprint(net())
    assert teacher_fingerprint(torch.compile(net(), backend="eager")) == teacher_fingerprint(net())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (lambda m: m[3].bias.data.add_(1e-6), {"weights"}),
        (lambda m: m[1].running_mean.add_(1), {"weights"}),
        (lambda m: m.double(), {"weights", "dtype", "architecture"}),
        (lambda m: m.__setitem__(2, nn.Tanh()), {"architecture"}),
        (lambda m: m.__setitem__(1, nn.BatchNorm1d(3, eps=1e-3)), {"architecture"}),
    ],
)
def test_another_function_is_another_teacher(change: Callable[[Any], Any], names: set[str]) -> None:
    def apply(module: Any) -> None:
        change(module)

    assert set(changed(apply)) <= names
    assert changed(apply)


def test_a_difference_in_the_configuration_is_named() -> None:
    stored, asked = teacher_fingerprint(bert()), teacher_fingerprint(bert(hidden_act="relu"))
    lines = differences(stored, asked)
    assert "config.hidden_act: the store has 'gelu', asked for is 'relu'" in lines


def test_where_a_model_came_from_does_not_matter() -> None:
    moved = bert()
    moved.config._name_or_path = "/somewhere/else"
    assert teacher_fingerprint(moved) == teacher_fingerprint(bert())


def test_weights_that_have_no_bytes_need_an_identity() -> None:
    with pytest.raises(TypeError, match=r"cannot be read as bytes .* identity="):
        teacher_fingerprint(nn.Linear(2, 2, device="meta"))


def tokenizer(words: str = "one two three") -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["[PAD]", "[UNK]", *words.split()])}
    own = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=own, pad_token="[PAD]", unk_token="[UNK]")


def test_a_tokenizer_is_its_vocabulary_not_how_it_was_last_called() -> None:
    used = tokenizer()
    used(["one two", "three"], padding=True, truncation=True, max_length=2)
    assert feed_fingerprint(used) == feed_fingerprint(tokenizer())
    assert feed_fingerprint(tokenizer("one three two")) != feed_fingerprint(tokenizer())


class Crop:
    def __init__(self, size: int) -> None:
        self.size = size

    def __repr__(self) -> str:
        return f"Crop({self.size})"


def test_a_transform_is_what_its_repr_shows() -> None:
    assert feed_fingerprint(Crop(2)) == feed_fingerprint(Crop(2)) != feed_fingerprint(Crop(3))


def test_a_transform_that_shows_nothing_is_refused() -> None:
    with pytest.raises(TypeError, match="pass a string that names it"):
        feed_fingerprint(object())


def test_no_feed_and_a_name_are_taken_as_they_are() -> None:
    assert (feed_fingerprint(None), feed_fingerprint("v2")) == ("", "v2")
