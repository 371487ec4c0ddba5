"""What a recipe must say, checked before anything heavy is imported.

A recipe is an ordinary Hydra config (`conf/distill.yaml` lists its nodes). This module reads the composed
config as plain data: it imports neither torch nor lightning, so a wrong name costs no waiting.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from omegaconf import DictConfig, ListConfig, Node, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from softs_lightning.folders import MissingFolderError, folder
from softs_lightning.product import ProductSpec

__all__ = [
    "ALONE",
    "DISTILLED",
    "PAIR_OPTIONS",
    "SECTIONS",
    "Failure",
    "Refusal",
    "arms",
    "build",
    "check",
    "fits_braces",
    "in_braces",
    "nearest",
]

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
    "logger",
    "judge",
)
"""The nodes of a recipe; every one of them must be filled in."""

NAMED = ("losses", "arms")
"""Nodes that a recipe may add: losses, for its other nodes to refer to (``loss: ${losses.scores}``), and arms."""

ALONE, DISTILLED = "alone", "distilled"
"""The arms that a recipe has without naming any: the student without a teacher, and with."""

MEASURE_OPTIONS = ("unit", "lower")
"""What a judge may say of a measure: its unit, and whether less is better."""

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
    if close:
        return f"Did you mean {', '.join(close)}?"
    return f"There are: {', '.join(known)}." if known else "There are none."


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
        _refuse_missing_folders(node)
        return instantiate(node, _convert_="all", **extra)
    except MissingFolderError as error:
        raise Refusal(_under(error, node, where)) from None
    except InstantiationException as error:
        cause = error.__cause__
        if isinstance(getattr(cause, "given", None), str):
            raise Refusal(_under(cause, node, where)) from error
        said = str(error).splitlines()[0] if cause is None else f"{type(cause).__name__}: {cause}"
        hint = _nearest_argument(node.get("_target_"), said)
        raise Refusal(f"{where} ({node.get('_target_', 'no _target_')}): {said}{hint}") from error


def _refuse_missing_folders(node: Any) -> None:
    """Raise for what transformers itself would take for a name on the hub, though it can only be a folder."""
    if isinstance(node, (DictConfig, ListConfig)):
        try:
            node = OmegaConf.to_container(node, resolve=True)
        except OmegaConfBaseException:  # what has no value yet is refused when it is made
            return
    if isinstance(node, Mapping):
        if str(node.get("_target_")).endswith(".from_pretrained"):
            folder(str(node.get("pretrained_model_name_or_path") or ""))
        node = list(node.values())
    for inner in node if isinstance(node, list) else ():
        _refuse_missing_folders(inner)


def _under(error: Any, node: Any, where: str) -> str:
    """What an error says, under the key of the recipe where the model that it is about was given."""
    key = _key_of(error.given, node)
    if key is None:
        return f"{where}: {error}."
    if node._get_parent() is None:
        key = f"{where}.{key}"
    key = re.sub(r"\[(\d+)\]", r".\1", key)  # as on the command line
    return f"{key}: {error}."


def _key_of(text: str, node: Any) -> str | None:
    """The key of the recipe under which `text` was given, whatever refers to it from inside `node`."""
    if not isinstance(node, Node):
        return None
    if node._is_interpolation():
        node = node._dereference_node()
    if not isinstance(node, (DictConfig, ListConfig)):
        return node._get_full_key(None) if node._value() == text else None
    if node._is_none() or node._is_missing():
        return None
    keys: Iterable[Any] = node.keys() if isinstance(node, DictConfig) else range(len(node))
    return next(filter(None, (_key_of(text, node._get_node(key)) for key in keys)), None)


def _nearest_argument(target: Any, said: str) -> str:
    """What a target takes, where it was given something else."""
    from hydra.utils import get_object

    if (unexpected := re.search(r"unexpected keyword argument '(\w+)'", said)) is None:
        return ""
    try:
        parameters = inspect.signature(get_object(target)).parameters.values()
    except Exception:  # a target without a signature
        return ""
    named = [parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD]
    # Where it takes the argument after all, something that is built inside it was meant.
    return "" if unexpected[1] in named else f". {nearest(unexpected[1], named)}"


def arms(recipe: DictConfig) -> dict[str, DictConfig]:
    """The ways in which a recipe trains its student, each a whole recipe: those it lists under `arms`, or one.

    An arm says what it changes: ``arms: {hints: {pairs: [...]}, scores: {trainer: {max_epochs: 2}}}``; an arm
    called ``alone`` changes how the student without a teacher is trained.

    >>> recipe = OmegaConf.create({"pairs": [], "seeds": [0], "arms": {"longer": {"seeds": [0, 1]}}})
    >>> {name: arm.seeds for name, arm in arms(recipe).items()}
    {'alone': [0], 'longer': [0, 1]}
    """
    plain: Any = OmegaConf.to_container(recipe)
    given = plain.pop("arms", None) or {}
    found = {ALONE: given.get(ALONE), **{key: node for key, node in given.items() if key != ALONE}}
    if len(found) == 1:
        found[DISTILLED] = None
    return {str(name): _merged(plain, changes) for name, changes in found.items()}


def _merged(recipe: Any, changes: Any) -> DictConfig:
    merged = OmegaConf.merge(recipe, changes or {})
    assert isinstance(merged, DictConfig)
    return merged


def check(recipe: DictConfig) -> None:
    """Refuse a recipe that says too little, says something twice or names what does not exist.

    Raises:
        Refusal: with what was said, where, and what could stand there.

    >>> check(OmegaConf.create({"seeds": [0], "studnet": None}))
    Traceback (most recent call last):
    softs_lightning.config.Refusal: The recipe has a node 'studnet', which nothing reads. Did you mean student?
    """
    for key in recipe:
        if key == "recipe":
            raise Refusal(
                "What the recipe says stands under 'recipe', where nothing reads it: its file must begin with the "
                "line '# @package _global_'."
            )
        if key not in (*SECTIONS, *NAMED):
            raise Refusal(
                f"The recipe has a node {key!r}, which nothing reads. {nearest(str(key), SECTIONS)}"
            )
    for name, changes in _given_arms(recipe).items():
        for key in changes or {}:
            if key not in SECTIONS:
                raise Refusal(
                    f"arms.{name} has a node {key!r}, which nothing reads. {nearest(str(key), SECTIONS)}"
                )
            if key in ("seeds", "seed", "judge", "threads"):
                raise Refusal(f"arms.{name} changes {key!r}, in which the arms must be alike to be compared.")
    _refuse_lookalikes(recipe)
    for key in SECTIONS:
        if key not in recipe or OmegaConf.is_missing(recipe, key):
            raise Refusal(f"The recipe does not say {key!r}. A recipe has: {', '.join(SECTIONS)}.")
    given = _given_arms(recipe)
    for name, arm in arms(recipe).items():
        try:
            _check_one(arm)
        except Refusal as refusal:
            if name not in given:
                raise
            raise Refusal(f"arms.{name}: {refusal}") from None


def _given_arms(recipe: DictConfig) -> Mapping[str, Any]:
    given = recipe.get("arms")
    if given is not None and not isinstance(given, DictConfig):
        raise Refusal(f"'arms' must be named changes to the recipe, but is {given!r}.")
    return given or {}


def in_braces(arm: str, changes: str) -> str:
    r"""What changes an arm on the command line, where its name has more than letters and digits in it.

    >>> print(in_braces("alone, twice the steps", "{trainer: {max_steps: 9}}"))
    '++arms={alone\, twice the steps: {trainer: {max_steps: 9}}}'
    """
    escaped = re.sub(r"([\\()\[\]{}:=,])", r"\\\1", arm)
    return f"'++arms={{{escaped}: {changes}}}'"


def fits_braces(arm: str) -> bool:
    """Whether Hydra's grammar has all the characters of an arm's name.

    >>> fits_braces("alone, twice the steps"), fits_braces("größer"), fits_braces("the teacher's")
    (True, False, False)
    """
    return re.fullmatch(r"[A-Za-z0-9_ /\-\\+.$%*@?|()\[\]{}:=,]+", arm) is not None


def _refuse_lookalikes(recipe: DictConfig) -> None:
    """An arm that somebody meant to change is not to be a second one beside it."""
    given = _given_arms(recipe)
    for name in map(str, given):
        plain = "_".join(re.findall(r"[^\W_]+", name))
        if plain != name and plain in given:
            way = in_braces(name, "{...: ...}") if fits_braces(name) else "nothing: copy the recipe"
            raise Refusal(
                f"arms has both {name!r} and {plain!r}. If the one is meant in both places, write on the command line "
                f"{way}"
            )


def _check_one(recipe: DictConfig) -> None:
    _check_seeds(OmegaConf.to_container(recipe)["seeds"])  # type: ignore[index,call-overload]
    try:
        plain: Any = OmegaConf.to_container(recipe, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        key, said = getattr(error, "full_key", None), str(error).splitlines()[0]
        if isinstance(error, MissingMandatoryValue) and key:
            said = f"{key} has no value yet. Give it one: {key}=..."
        elif key:
            said = f"{key}: {said}"
        raise Refusal(f"The recipe is not complete: {said}") from None
    _check_pairs(plain["pairs"])
    _check_judge(plain["judge"])
    threads = plain["threads"]
    if threads is not None and (type(threads) is not int or threads < 1):
        raise Refusal(f"'threads' must be a whole number from 1 on, or null, but is {threads!r}.")
    for key in ("data", "teacher", "student", "trainer"):
        if not isinstance(plain[key], Mapping) or "_target_" not in plain[key]:
            raise Refusal(f"{key!r} must name what to build in _target_, but is {plain[key]!r}.")
    for key in ("callbacks", "logger"):
        if not isinstance(plain[key], Mapping):
            raise Refusal(f"{key!r} must be named {key.rstrip('s')}s, but is {plain[key]!r}.")


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
    known = ("name", "score", "others", *MEASURE_OPTIONS)
    others = judge.get("others") or {}
    if not isinstance(others, Mapping):
        raise Refusal(f"judge.others must be named measures, but is {others!r}.")
    for where, node, options in (
        ("judge", judge, known),
        *((f"judge.others.{name}", other or {}, MEASURE_OPTIONS) for name, other in others.items()),
    ):
        if not isinstance(node, Mapping):
            raise Refusal(f"{where} must say unit or lower, or nothing, but is {node!r}.")
        for option in node:
            if option not in options:
                raise Refusal(f"{where} has an option {option!r}. {nearest(str(option), options)}")
        if type(node.get("lower", False)) is not bool:
            raise Refusal(f"{where}.lower must be true or false, but is {node['lower']!r}.")
