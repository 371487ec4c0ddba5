"""The loss group of the configs: every loss, with the options and defaults of its class."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_module
from hydra.utils import instantiate
from omegaconf import OmegaConf

import softs_lightning.conf
from softs_lightning import losses

FOLDER = Path(next(iter(softs_lightning.conf.__path__))) / "loss"
SETTINGS = {"kd": {"temperature": 4.0}}
"""Configs that set something: they differ from the defaults of their class in this."""
FILES = sorted(file.stem for file in FOLDER.glob("*.yaml"))
CLASSES = {
    name
    for name in losses.__all__
    if isinstance(found := getattr(losses, name), type)
    and issubclass(found, losses.DistillationLoss)
    and found is not losses.DistillationLoss
}


def options(name: str) -> dict[str, Any]:
    return dict(OmegaConf.to_container(OmegaConf.load(FOLDER / f"{name}.yaml")))  # type: ignore[arg-type]


def test_every_loss_has_a_config() -> None:
    assert {options(file)["_target_"].rpartition(".")[2] for file in FILES} == CLASSES


@pytest.mark.parametrize("file", FILES)
def test_a_config_says_what_its_class_takes(file: str) -> None:
    given = options(file)
    parameters = inspect.signature(getattr(losses, given.pop("_target_").rpartition(".")[2])).parameters
    named = {
        name: "???" if p.default is p.empty else p.default
        for name, p in parameters.items()
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    }
    assert given == {**named, **SETTINGS.get(file, {})}


@pytest.mark.parametrize("file", [file for file in FILES if "???" not in options(file).values()])
def test_a_config_makes_the_loss(file: str) -> None:
    with initialize_config_module("softs_lightning.conf", version_base="1.3"):
        config = compose(overrides=[f"+loss@losses.hints={file}"])
    loss = instantiate(config.losses.hints, _convert_="all")
    assert type(loss) is getattr(losses, options(file)["_target_"].rpartition(".")[2])
