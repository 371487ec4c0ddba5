"""From a command line to a composed recipe, with Hydra; what goes wrong becomes one message."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from softs_lightning import catalog
from softs_lightning.config import Refusal, fits_braces, in_braces, nearest

__all__ = ["WRITE_NOTHING", "compose", "folders_given", "for_the_user", "wants_traceback"]

Task = Callable[[Any], None]

FULL_ERROR = "HYDRA_FULL_ERROR"

DEFAULT_RECIPE = "digits"  # as conf/distill.yaml says

CHOICE = re.compile(r"\+?[\w/]+(@[\w.]+)?=")
"""An argument that chooses from a group; options of the top level look alike, and do no harm."""

CLOSE = 0.6
"""How alike two names are, of 1, when the one may be meant by the other; as in `nearest`."""

# A command that only looks writes no folder and no log.
WRITE_NOTHING = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)


def compose(arguments: list[str], task: Task) -> None:
    """Compose the config as `arguments` say and hand it to `task`; what goes wrong becomes a `Refusal`."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    chosen, full = os.environ.get(FULL_ERROR), wants_traceback()
    _find_recipes(arguments)
    arguments = _scaled(arguments)
    refusals: list[Refusal] = []

    def guarded(recipe: Any) -> None:
        # Hydra adds lines of its own to what a task raises, and ends a sweep at the first of them.
        try:
            with _full_error(chosen):  # the processes that a run starts see what the user set
                task(recipe)
        except Exception as error:
            said = for_the_user(error)
            if (said is not error and full) or not isinstance(said, Refusal):
                raise
            refusals.append(said)

    try:
        _call_hydra(arguments, guarded)
    except (HydraException, OmegaConfBaseException, YAMLError) as error:
        if full:
            raise
        raise Refusal(_plainly(error, arguments)) from error
    if refusals:
        raise refusals[0]


def wants_traceback() -> bool:
    """Whether the user asked for Python's account of an error (Hydra's own switch)."""
    return bool(os.environ.get(FULL_ERROR))


def for_the_user(error: Exception) -> Exception:
    """The `Refusal` that says all about an error of a setting; an error of other kinds itself."""
    from hydra.errors import HydraException

    if isinstance(error, Refusal):
        return error
    if isinstance(error, HydraException):
        return Refusal(str(error))
    return Refusal(_message(error)) if _is_for_the_user(error) else error


LIBRARIES = ("lightning.", "torch.optim.", "hydra.", "omegaconf.", "pathlib")
"""What raises it for a value of the config that it cannot use: a text for a number, a folder that cannot be made."""


def _message(error: Exception) -> str:
    said = str(error.args[0] if error.args else error)
    if isinstance(error, OSError):
        return str(error)
    if _origin(error).startswith(LIBRARIES) and type(error).__name__ != "MisconfigurationException":
        return f"{_origin(error)} raised {type(error).__name__}: {said}. {FULL_ERROR}=1 shows where."
    return said


def _origin(error: Exception) -> str:
    """The module that raised it."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return str(trace.tb_frame.f_globals.get("__name__", "")) if trace else ""


def _is_for_the_user(error: Exception) -> bool:
    """Whether this package, or a library of a setting, raised it: then the message says all."""
    if type(error).__name__ == "MisconfigurationException":
        return True
    raised_in = _origin(error)
    if raised_in.startswith(LIBRARIES):
        return True
    ours = raised_in.startswith("softs_lightning.") and not raised_in.startswith("softs_lightning.recipes.")
    return ours and not isinstance(error, AssertionError)


def _call_hydra(arguments: list[str], task: Task) -> None:
    import hydra

    with _command_line(arguments), _full_error("1"):
        hydra.main(version_base="1.3", config_path="pkg://softs_lightning.conf", config_name="distill")(
            task
        )()


@contextmanager
def _command_line(arguments: list[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = [before[0], *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _full_error(value: str | None) -> Iterator[None]:
    """Set or unset the variable under which Hydra raises errors instead of printing them and leaving the process."""
    before = os.environ.get(FULL_ERROR)
    _set(value)
    try:
        yield
    finally:
        _set(before)


def _set(value: str | None) -> None:
    if value is None:
        os.environ.pop(FULL_ERROR, None)
    else:
        os.environ[FULL_ERROR] = value


def _find_recipes(arguments: list[str]) -> None:
    """Refuse a recipe that does not exist, before Hydra is imported."""
    folders = _folders(arguments)
    for folder in folders:
        if not folder.is_dir():
            raise Refusal(f"--config-dir {folder}: there is no such folder.")
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name.lstrip("+") == catalog.GROUP:
            for choice in value.split(","):
                catalog.find(choice.strip("'\" "), folders)


def _scaled(arguments: list[str]) -> list[str]:
    """`+scale=NAME` as Hydra finds it: every recipe has sizes of its own, in the folder scale/RECIPE."""
    chosen = [argument for argument in arguments if argument.startswith(("+scale=", "scale="))]
    if not chosen:
        return arguments
    recipe = DEFAULT_RECIPE
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if equals and name.lstrip("+") == catalog.GROUP:
            recipe = value.strip("'\" ").removesuffix(".yaml")
    known = catalog.scales(recipe, _folders(arguments))
    for argument in chosen:
        scale = argument.partition("=")[2]
        if not known:
            raise Refusal(f"{argument}: the recipe {recipe} has no settings at another scale.")
        if scale not in known:
            raise Refusal(f"The recipe {recipe} has no scale {scale!r}. {nearest(scale, known)}")
    moved = {argument: f"+scale/{recipe}={argument.partition('=')[2]}" for argument in chosen}
    return [moved.get(argument, argument) for argument in arguments]


def _folders(arguments: Sequence[str]) -> list[Path]:
    text = "\n".join(arguments)
    return [Path(folder) for folder in re.findall(r"^(?:--config-dir|-cd)[=\n](.+)$", text, re.MULTILINE)]


def folders_given(arguments: Sequence[str]) -> list[str]:
    """Those of the arguments that say where recipes are."""
    return [f"--config-dir={folder}" for folder in _folders(arguments)]


def _plainly(error: Exception, arguments: list[str]) -> str:
    """Hydra's message, with the nearest names and without advice for its developers."""
    text = str(error).strip()
    if (arm := _arm_named(text, arguments)) is not None:
        return arm
    if (option := re.search(r"Could not override '([^']+)'", text)) is not None:
        name = option[1]
        options = _options(arguments, name)
        if name in options:
            return f"What is given for {name!r} has an option that this recipe has not there. To add it: ++{name}=..."
        return (
            f"This recipe has no option {name!r}. {_nearest_option(name, options)} "
            f"(To hand on one that the recipe does not mention: +{name}=...)"
        )
    if (
        group := re.search(r"Could not override '?([^'\s]+)'?\.\s*No match in the defaults", text)
    ) is not None:
        return f"This recipe has no group {group[1]!r}. {_nearest_option(group[1], _options(arguments, group[1]))}"
    if (
        "LexerNoViableAlt" in text
        or "mismatched input" in text
        or "no viable alternative" in text
        or "token recognition" in text
    ):
        return (
            f"{text.splitlines()[0]}\n"
            "Values with brackets, commas or signs are quoted twice: \"pairs.0.teacher='outputs[name]'\""
        )
    return text.partition("\nConfig search path:")[0]


PLAIN = r"[\w-]+"
"""The arms' names that are keys as they are."""

ARM = re.compile(
    r"""['"]?(?P<sign>\+{0,2}|~)['"]?(?P<where>arms[.\[](?P<path>[^=]*))(?:=(?P<value>.*))?""", re.DOTALL
)


def _arm_named(error: str, arguments: list[str]) -> str | None:
    """What to write instead, where an error is about an arm that is misspelt, or cannot be spelt like that."""
    for argument in arguments:
        found = ARM.fullmatch(re.sub(r"""^(['"])(.*)\1$""", r"\2", argument, flags=re.DOTALL))
        if found is None or found["where"] not in error:
            continue
        sign, path, value = found.group("sign", "path", "value")
        names = _arms(arguments)
        first = path.partition(".")[0]
        if first in names and re.fullmatch(PLAIN, first):
            continue  # Hydra takes this name as it is: something behind it is wrong
        if (spelt := _arm_spelt(path, names)) is not None:
            return _in_its_place(*spelt, sign, value)
        said, name, keys = _nearest_arm(path, names)
        if name is not None:
            return f"{said} {_in_its_place(name, keys, sign, value)}"
        if names and not re.fullmatch(r"[\w.-]*", path, re.ASCII):
            return f"{said} A new arm, or one with such a name, is written {in_braces('NAME', '{...: ...}')}"
    return None


def _arm_spelt(path: str, names: Sequence[str]) -> tuple[str, list[str]] | None:
    """The arm whose words a path begins with, and the keys behind it; none for what Hydra can take as it is."""
    for name in sorted(names, key=len, reverse=True):
        words = r"[\W_]+".join(re.findall(r"[^\W_]+", name))
        inside = re.fullmatch(rf"\W*{words}\W*?(?:\.(\w.*))?", path)
        if inside is not None and not re.fullmatch(PLAIN, name):
            return name, inside[1].split(".") if inside[1] else []
    return None


def _nearest_arm(path: str, names: Sequence[str]) -> tuple[str, str | None, list[str]]:
    """A sentence about a path that begins with no arm, the arm that it most likely means and the keys behind it."""

    def alike(start: str, name: str) -> float:
        one, other = (" ".join(re.findall(r"[^\W_]+", text)).lower() for text in (start, name))
        return difflib.SequenceMatcher(None, one, other).ratio()

    parts = path.split(".")
    starts = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    ratio, start, name = max(
        ((alike(start, name), start, name) for start in starts for name in names), default=(0.0, parts[0], "")
    )
    given = re.sub(r"^\W+|\W+$", "", start if ratio >= CLOSE else parts[0]) or path
    if ratio < CLOSE:
        return f"This recipe has no arm {given!r}. {nearest(given, names)}", None, []
    said = f"This recipe has no arm {given!r}. Did you mean {name}?"
    return said, name, [key for key in path[len(start) :].split(".") if key]


def _in_its_place(name: str, keys: Sequence[str], sign: str, value: str | None) -> str:
    """How an arm is written on the command line."""
    listed = any(key.isdigit() for key in keys)
    if re.fullmatch(PLAIN, name):
        argument = f"{sign if listed or sign == '~' else '++'}{'.'.join(('arms', name, *keys))}"
        return f"Write: {shlex.quote(argument if value is None else f'{argument}={value}')}"
    said = f"Hydra takes no key with the name of the arm {name!r} in it. "
    if not fits_braces(name):
        return f"{said}Copy the recipe: softs-distill recipes copy"
    if sign == "~" or not keys or listed:
        return (
            f"{said}Settings of it can be changed: {in_braces(name, '{...: ...}')}. To leave it out, or to change "
            "an element of a list, copy the recipe: softs-distill recipes copy"
        )
    inner = f"{keys[-1]}: {value}"
    for key in reversed(keys[:-1]):
        inner = f"{key}: {{{inner}}}"
    return f"{said}Write: {in_braces(name, f'{{{inner}}}')}"


def _arms(arguments: list[str]) -> list[str]:
    """The names of the arms of the recipe that `arguments` choose."""
    from hydra.errors import HydraException

    found: list[str] = []
    with suppress(HydraException):  # another argument is wrong as well, and will be said to be
        kept = [*_choices(arguments, "arms"), *WRITE_NOTHING]
        _call_hydra(kept, lambda recipe: found.extend(map(str, recipe.get("arms") or ())))
    return found


def _nearest_option(name: str, options: list[str]) -> str:
    """The closest of all options; else those that stand beside it, not all hundred."""
    parent = name.rpartition(".")[0]
    while parent and parent not in options:
        parent = parent.rpartition(".")[0]
    beside = [option for option in options if option.rpartition(".")[0] == parent and "._" not in option]
    close = nearest(name, options)
    return close if close.startswith("Did") else nearest(name, beside)


def _options(arguments: list[str], wrong: str) -> list[str]:
    """Every option of the recipe and the groups that `arguments` choose, but for the `wrong` one."""
    from omegaconf import OmegaConf

    found: list[str] = []

    def collect(node: Any, path: str) -> None:
        inside: Iterable[tuple[Any, Any]] = ()
        if isinstance(node, dict):
            inside = node.items()
        elif isinstance(node, list):
            inside = enumerate(node)
        for key, value in inside:
            name = f"{path}.{key}" if path else str(key)
            found.append(name)
            collect(value, name)

    kept = _choices(arguments, wrong)
    _call_hydra([*kept, *WRITE_NOTHING], lambda recipe: collect(OmegaConf.to_container(recipe), ""))
    return found


def _choices(arguments: list[str], wrong: str = "") -> list[str]:
    """Those of the arguments that choose from groups, and say where these are, but for the `wrong` one."""
    chosen = [
        argument
        for argument in arguments
        if CHOICE.match(argument) and argument.partition("=")[0].lstrip("+") != wrong.lstrip("+")
    ]
    return [*folders_given(arguments), *chosen]
