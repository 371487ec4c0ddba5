"""Recipes by name."""

from __future__ import annotations

from pathlib import Path

import pytest

from softs_lightning import catalog
from softs_lightning.config import Refusal

HERE = Path(__file__).parent.parent / "recipes" / "recipe"


def test_every_file_of_the_repository_is_a_recipe() -> None:
    assert (
        set(catalog.recipes())
        == {file.stem for file in HERE.glob("*.yaml")}
        >= {
            "digits",
            "sentence-embeddings",
        }
    )


def test_a_users_folder_adds_and_replaces(tmp_path: Path) -> None:
    own = catalog.copy("digits", tmp_path / "recipe" / "own.yaml")
    same = catalog.copy("digits", tmp_path)
    known = catalog.recipes([tmp_path])
    assert known["own"] == own
    assert known["digits"] == same
    assert set(known) == {*catalog.recipes(), "own"}


def test_find_says_which_names_are_near() -> None:
    with pytest.raises(Refusal, match=r"no recipe 'digit'\. Did you mean digits\?"):
        catalog.find("digit")


def test_a_copy_is_the_file_and_overwrites_nothing(tmp_path: Path) -> None:
    file = catalog.copy("digits", tmp_path)
    assert file == tmp_path / "recipe" / "digits.yaml"
    assert file.read_bytes() == (HERE / "digits.yaml").read_bytes()
    file.write_text("mine")
    with pytest.raises(Refusal, match="already there"):
        catalog.copy("digits", tmp_path)
    assert file.read_text() == "mine"


def test_the_summary_is_the_first_comment(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("# @package _global_\n#\n# What it is.\n# more\na: 1\n")
    assert catalog.summary(file) == "What it is."
    file.write_text("a: 1\n# late\n")
    assert catalog.summary(file) == ""
    assert all(catalog.summary(recipe) for recipe in catalog.recipes().values())
