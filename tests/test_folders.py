"""Folders of models that are not there: said before a hub is asked, with what is there, under the recipe's key."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from softs_lightning import Pretrained, from_teacher
from softs_lightning.config import Refusal, build
from softs_lightning.explain import explain_recipe
from softs_lightning.folders import MissingFolderError, folder
from softs_lightning.pretrained import without_weights
from tests.architectures import built
from tests.test_config import composed


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place with models, and no way to a hub."""

    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a hub was asked")

    monkeypatch.setattr(socket.socket, "connect", refused)
    (tmp_path / "models" / "bert-mine").mkdir(parents=True)
    (tmp_path / "models" / "notes.txt").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.setenv("SOFTS_LIGHTNING_CACHE", str(tmp_path / "cache"))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("{}/models/bert-mne", "there is no folder {}/models/bert-mne; the nearest in {}/models: bert-mine"),
        ("./models/bert-mne", "there is no folder ./models/bert-mne; the nearest in {}/models: bert-mine"),
        ("~/modls/a/b", "there is no folder ~/modls/a/b, nor {}/modls; the nearest in {}: models"),
        ("./models/x", "there is no folder ./models/x; in {}/models there is bert-mine, notes.txt"),
        ("./models/bert-mine/x", "there is no folder ./models/bert-mine/x; in {}/models/bert-mine there is nothing"),
        ("./models/../modes", "there is no folder ./models/../modes; the nearest in {}: models"),
        (Path("models/none"), "there is no folder models/none; in {}/models there is bert-mine, notes.txt"),
        ("~/models/notes.txt", "{}/models/notes.txt is a file, not a folder: give {}/models"),
        ("./models/notes.txt/x", "there is no folder ./models/notes.txt/x, nor {}/models/notes.txt; the nearest in {}/models: notes.txt"),
        ("~nobody-of-this-name/x", "there is no folder ~nobody-of-this-name/x: Could not determine home directory."),
    ],
)  # fmt: skip
def test_a_missing_folder_is_said_to_be_missing(name: Any, said: str, place: Path) -> None:
    named = name.format(place) if isinstance(name, str) else name
    for use in (folder, lambda given: from_teacher(given, layers=[0])):
        with pytest.raises(
            MissingFolderError, match=f"^{re.escape(said.replace('{}', str(place)))}$"
        ) as raised:
            use(named)
        assert raised.value.given == str(named)


def test_of_many_names_that_are_all_unlike_none_is_listed(place: Path) -> None:
    for number in range(12):
        (place / "models" / f"{number}").mkdir()
    with pytest.raises(MissingFolderError, match=r"; in .* nothing has a name like it$"):
        folder("./models/wanted")


def test_names_stay_and_folders_are_written_out(place: Path) -> None:
    assert folder("bert-base-uncased") == "bert-base-uncased"
    assert folder("org/bert") == "org/bert"
    assert folder("~/models/bert-mine") == f"{place}/models/bert-mine"
    built("roberta").save_pretrained(place / "models" / "bert-mine")
    assert Pretrained("~/models/bert-mine")().config.model_type == "roberta"
    with without_weights():
        assert Pretrained("~/models/bert-mine")().config.model_type == "roberta"


def test_a_folder_that_is_only_looked_at_may_be_elsewhere() -> None:
    teacher = Pretrained("/elsewhere/bert", config={"model_type": "bert", "num_hidden_layers": 1})
    assert len(teacher.untrained().encoder.layer) == 1
    with pytest.raises(MissingFolderError, match="there is no folder /elsewhere/bert"):
        teacher()


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        (("recipe=causal-lm-pretrained", "teacher.source.name=./nothere"), "teacher.source.name"),
        (("recipe=causal-lm-pretrained", "+scale=paper", "teacher.name=./nothere"), "teacher.name"),
        (("recipe=causal-lm", "+scale=paper", "teacher.name=./nothere"), "teacher.name"),
        (("recipe=causal-lm", "+scale=paper", "student.pretrained=./nothere"), "student.pretrained"),
        (("recipe=causal-lm", "+scale=paper", "data.tokenizer=./nothere"), "data.tokenizer"),
    ],
)
def test_it_is_said_under_the_key_where_it_was_given(arguments: tuple[str, ...], key: str) -> None:
    with pytest.raises(Refusal, match=rf"^{re.escape(key)}: there is no folder \./nothere; in .*\.$"):
        explain_recipe(composed(*arguments))


def test_a_name_that_nobody_knows_is_said_under_its_key_as_well() -> None:
    recipe = composed("recipe=causal-lm-pretrained", "+scale=paper", "teacher.name=nothere")
    with pytest.raises(Refusal, match=r"^teacher\.name: the shape of 'nothere' is not known here"):
        explain_recipe(recipe)


def test_transformers_own_classes_are_given_no_folder_that_is_not_there() -> None:
    teacher = {
        "_target_": "transformers.AutoModel.from_pretrained",
        "_partial_": True,
        "pretrained_model_name_or_path": "${place}/bert-mne",
    }
    recipe = OmegaConf.create({"place": "./models", "teacher": teacher, "callbacks": {"one": {"_target_": "builtins.dict", "teacher": "${teacher}"}}})  # fmt: skip
    said = "teacher.pretrained_model_name_or_path: there is no folder ./models/bert-mne; the nearest in "
    with pytest.raises(Refusal, match=f"^{re.escape(said)}"):
        build(recipe.callbacks.one, "callbacks.one")
    teacher["pretrained_model_name_or_path"] = "./models/bert-mne"
    with pytest.raises(Refusal, match=r"^teacher: there is no folder \./models/bert-mne;"):
        build(teacher, "teacher")
    inside = OmegaConf.create({"_target_": "builtins.dict", "models": [teacher]})
    with pytest.raises(
        Refusal, match=r"^thing\.models\.0\.pretrained_model_name_or_path: there is no folder"
    ):
        build(inside, "thing")
