"""From a command line to a composed recipe, with Hydra; what goes wrong becomes one message."""

from __future__ import annotations

import os
import re
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


ARM = re.compile(r"(\+{0,2}|~)arms\.([^=]*)(?:=(.*))?", re.DOTALL)


def _arm_named(error: str, arguments: list[str]) -> str | None:
    """What to write instead, where an error is about an arm that has more than letters and digits in its name."""
    for argument in arguments:
        found = ARM.fullmatch(argument)
        if found is None or f"arms.{found[2]}" not in error:
            continue
        for name in sorted(_arms(arguments), key=len, reverse=True):
            words = r"[\W_]+".join(re.findall(r"[^\W_]+", name))
            inside = re.fullmatch(rf"\W*{words}\W*?(?:\.(\w.*))?", found[2])
            if inside is None or re.fullmatch(r"[\w-]+", name):
                continue
            keys = inside[1].split(".") if inside[1] else []
            said = f"Hydra takes no key with the name of the arm {name!r} in it. "
            if not fits_braces(name):
                return f"{said}Copy the recipe: softs-distill recipes copy"
            if found[1] == "~" or not keys or any(key.isdigit() for key in keys):
                return (
                    f"{said}Settings of it can be changed: {in_braces(name, '{...: ...}')}. To leave it out, or to change "
                    "an element of a list, copy the recipe: softs-distill recipes copy"
                )
            value = f"{keys[-1]}: {found[3]}"
            for key in reversed(keys[:-1]):
                value = f"{key}: {{{value}}}"
            return f"{said}Write: {in_braces(name, f'{{{value}}}')}"
    return None


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
