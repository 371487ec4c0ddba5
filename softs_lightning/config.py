"""What a recipe must say, checked before anything heavy is imported.

A recipe is an ordinary Hydra config (`conf/distill.yaml` lists its nodes). This module reads the composed
config as plain data: it imports neither torch nor lightning, so a wrong name costs no waiting.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from softs_lightning.product import ProductSpec

__all__ = ["PAIR_OPTIONS", "SECTIONS", "Failure", "Refusal", "build", "check", "nearest"]

SECTIONS = (
    "seeds",
    "seed",
    "threads",
    "data",
    "teacher",
    "student",
    "pairs",
    "callbacks",
    "trainer",
    "judge",
)
"""The nodes of a recipe; every one of them must be filled in."""

NAMED = ("losses",)
"""Nodes that a recipe may add, for its other nodes to refer to: ``loss: ${losses.scores}``."""

PAIR_TARGET = "softs_lightning.Pair"
PAIR_OPTIONS = (
    "teacher",
    "student",
    "loss",
    "weight",
    "projector",
    "name",
    "mask",
    "schedules",
    "metrics",
    "over_ranks",
    "over_window",
)
"""What a pair in a recipe may say."""


class Refusal(Exception):
    """A request that cannot be met; its message is all that the user needs to see."""

    code = 2


class Failure(Refusal):
    """A run that came to its end without a result worth having."""

    code = 1


def nearest(name: str, known: Iterable[str], *, count: int = 3) -> str:
    """A sentence that names the closest of the `known` names, or all of them when none is close.

    >>> nearest("digit", ["digits", "sentence-embeddings"])
    'Did you mean digits?'
    >>> nearest("x", ["digits", "sentence-embeddings"])
    'There are: digits, sentence-embeddings.'
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=count, cutoff=0.6)
    return f"Did you mean {', '.join(close)}?" if close else f"There are: {', '.join(known)}."


def build(node: Any, where: str, **extra: Any) -> Any:
    """Make what a config node describes, with plain lists and dicts for its arguments.

    Raises:
        Refusal: when its `_target_` cannot be found or does not take these arguments; says `where`.

    >>> build({"_target_": "builtins.complex", "imag": 2.0}, "number", real=1.0)
    (1+2j)
    """
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate

    try:
        return instantiate(node, _convert_="all", **extra)
    except InstantiationException as error:
        cause = error.__cause__
        said = str(error).splitlines()[0] if cause is None else f"{type(cause).__name__}: {cause}"
        raise Refusal(f"{where} ({node.get('_target_', 'no _target_')}): {said}") from error


def check(recipe: DictConfig) -> None:
    """Refuse a recipe that says too little, says something twice or names what does not exist.

    Raises:
        Refusal: with what was said, where, and what could stand there.

    >>> check(OmegaConf.create({"seeds": [0], "studnet": None}))
    Traceback (most recent call last):
    softs_lightning.config.Refusal: The recipe has a node 'studnet', which nothing reads. Did you mean student?
    """
    for key in recipe:
        if key not in (*SECTIONS, *NAMED):
            raise Refusal(
                f"The recipe has a node {key!r}, which nothing reads. {nearest(str(key), SECTIONS)}"
            )
    for key in SECTIONS:
        if key not in recipe or OmegaConf.is_missing(recipe, key):
            raise Refusal(f"The recipe does not say {key!r}. A recipe has: {', '.join(SECTIONS)}.")
    _check_seeds(OmegaConf.to_container(recipe)["seeds"])  # type: ignore[index,call-overload]
    try:
        plain: Any = OmegaConf.to_container(recipe, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise Refusal(f"The recipe is not complete: {error}") from None
    _check_pairs(plain["pairs"])
    _check_judge(plain["judge"])
    threads = plain["threads"]
    if threads is not None and (type(threads) is not int or threads < 1):
        raise Refusal(f"'threads' must be a whole number from 1 on, or null, but is {threads!r}.")
    for key in ("data", "teacher", "student", "trainer"):
        if not isinstance(plain[key], Mapping) or "_target_" not in plain[key]:
            raise Refusal(f"{key!r} must name what to build in _target_, but is {plain[key]!r}.")
    if not isinstance(plain["callbacks"], Mapping):
        raise Refusal(f"'callbacks' must be named callbacks, but is {plain['callbacks']!r}.")


def _check_seeds(seeds: Any) -> None:
    whole = isinstance(seeds, list) and all(type(seed) is int and seed >= 0 for seed in seeds)
    if not whole or not seeds or len(set(seeds)) < len(seeds):
        raise Refusal(f"'seeds' must be different whole numbers, at least one, but is {seeds!r}.")


def _check_pairs(pairs: Any) -> None:
    if not isinstance(pairs, list) or not pairs:
        raise Refusal(f"'pairs' must be a list of at least one pair, but is {pairs!r}.")
    for index, pair in enumerate(pairs):
        where = f"pairs.{index}"
        if not isinstance(pair, Mapping):
            raise Refusal(f"{where} must be a pair, but is {pair!r}.")
        if pair.get("_target_") == PAIR_TARGET:
            _check_options(where, pair)
        widths = {
            side: _selected(f"{where}.{side}", pair[side]) for side in ("teacher", "student") if side in pair
        }
        if None not in widths.values() and len(set(widths.values())) > 1:
            raise Refusal(
                f"{where} selects {widths['teacher']} of the teacher's activations ({pair['teacher']}) and "
                f"{widths['student']} of the student's ({pair['student']}); they meet one to one."
            )


def _check_options(where: str, pair: Mapping[Any, Any]) -> None:
    for option in pair:
        if option != "_target_" and option not in PAIR_OPTIONS:
            raise Refusal(f"{where} has an option {option!r}. {nearest(str(option), PAIR_OPTIONS)}")
    for option in ("teacher", "student", "loss"):
        if option not in pair:
            raise Refusal(f"{where} does not say {option!r}.")


def _selected(where: str, product_id: Any) -> int | None:
    """How many activations a product_id selects; None where that depends on the model."""
    try:
        spec = ProductSpec.parse(product_id)
    except (TypeError, ValueError) as error:
        raise Refusal(f"{where}: {error}") from None
    if not len(spec):
        raise Refusal(f"{where} selects nothing: {product_id!r}. Write for example outputs[name].")
    selectors = any(set("*{}@%") & set(item.name) or "-" in item.name for _, item in spec)
    return None if selectors else len(spec)


def _check_judge(judge: Any) -> None:
    if not isinstance(judge, Mapping) or not {"name", "score"} <= judge.keys():
        raise Refusal(f"'judge' must have a name, a score and perhaps a unit, but is {judge!r}.")
