"""softs-distill: run, explain and list recipes.

Hydra composes the config; this module decides which command is meant, turns what went wrong into one
message, and imports torch only behind that.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from softs_lightning import catalog
from softs_lightning.config import Refusal, check, nearest

__all__ = ["main"]

HELP = """\
usage: softs-distill [recipe=NAME] [key=value ...]     run a recipe (digits, if none is named)
       softs-distill explain [recipe=NAME] [key=value ...]
                                  what its product_ids select, where the teacher stops; no training
       softs-distill recipes [list]         the recipes there are
       softs-distill recipes show NAME      print one
       softs-distill recipes copy NAME [FOLDER or FILE.yaml]
                                  a copy to change; run it with --config-dir FOLDER recipe=...

options (they are Hydra's):
  --config-dir DIR        also look for recipes and groups in DIR (DIR/recipe/own.yaml: recipe=own)
  --cfg job               print the composed config and stop
  --multirun              one run for each combination: seed or key=1,2,3
  --hydra-help            the rest of them

examples:
  softs-distill
  softs-distill recipe=digits 'seeds=[0,1]' data.labels=100
  softs-distill trainer.devices=2 trainer.strategy=ddp
  softs-distill explain "pairs.0.teacher='outputs[head]'"    # brackets: quoted twice

Results go to outputs/RECIPE/TIME/. `python -m softs_lightning` is the same command.

recipes:
"""

Task = Callable[[Any], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command line (that of the process, if none is given) and return its exit code.

    >>> main(["recipes", "show", "digit"])  # doctest: +SKIP
    2
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except Refusal as refusal:
        if _is_worker():
            return 0  # the first process says it
        print(f"softs-distill: {refusal}", file=sys.stderr)
        return refusal.code


def _is_worker() -> bool:
    return any(os.environ.get(name, "0") != "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


def _dispatch(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(HELP + "\n".join(_listed()))
        return 0
    command = arguments[0] if arguments else ""
    if command == "recipes":
        return _recipes(arguments[1:])
    if command == "explain":
        return _explain(arguments[1:])
    if command and command[0] not in "-+~" and "=" not in command:
        known = {"explain", "recipes", *(f"recipe={name}" for name in catalog.recipes())}
        raise Refusal(f"There is no command {command!r}. {nearest(command, known)} See softs-distill --help.")
    if not any(argument.startswith("-") for argument in arguments):
        _through_hydra(
            [*arguments, *WRITE_NOTHING], check
        )  # a recipe that is refused leaves no folder behind
    return _run(arguments)


def _listed() -> list[str]:
    known = catalog.recipes()
    width = max(map(len, known))
    return [f"  {name:{width}}  {catalog.summary(file)}" for name, file in known.items()]


def _recipes(arguments: list[str]) -> int:
    match arguments:
        case [] | ["list"]:
            print("\n".join(_listed()))
        case ["show", name]:
            print(catalog.find(name).read_text(encoding="utf-8"), end="")
        case ["copy", name, *rest] if len(rest) < 2:
            file = catalog.copy(name, Path(*rest))
            print(f"{file}")
        case [action, *_] if action not in ("list", "show", "copy"):
            raise Refusal(f"There is no 'recipes {action}'. {nearest(action, ['list', 'show', 'copy'])}")
        case _:
            raise Refusal(
                "Write: recipes list, recipes show NAME, or recipes copy NAME [FOLDER or FILE.yaml]."
            )
    return 0


def _run(arguments: list[str]) -> int:
    def run(recipe: Any) -> None:
        check(recipe)
        _quieten()
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        from softs_lightning.experiment import run_recipe

        hydra = HydraConfig.get()
        sweep = hydra.mode is RunMode.MULTIRUN
        name, directory = hydra.runtime.choices[catalog.GROUP], Path(hydra.runtime.output_dir)
        run_recipe(recipe, name=name, directory=directory, sweep=sweep)

    _through_hydra(arguments, run)
    return 0


def _quieten() -> None:
    """Lightning's hints about hardware, worker processes and its own future are not news to who runs a recipe."""
    import logging
    import warnings

    import lightning.pytorch  # noqa: F401  (sets its own level when it is imported)

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    for category in (DeprecationWarning, FutureWarning):
        warnings.filterwarnings("ignore", category=category, module=r"lightning\.")


# A command that only looks writes no folder and no log.
WRITE_NOTHING = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)


def _explain(arguments: list[str]) -> int:
    def explain(recipe: Any) -> None:
        check(recipe)
        _quieten()
        from softs_lightning.explain import explain_recipe

        print(explain_recipe(recipe))

    _through_hydra([*arguments, *WRITE_NOTHING], explain)
    return 0


def _through_hydra(arguments: list[str], task: Task) -> None:
    """Compose the config as `arguments` say and hand it to `task`; what goes wrong becomes a `Refusal`."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    _find_recipes(arguments)
    refusals: list[Refusal] = []

    def guarded(recipe: Any) -> None:
        # Hydra adds lines of its own to what a task raises, and ends a sweep at the first of them.
        try:
            task(recipe)
        except Refusal as refusal:
            refusals.append(refusal)
        except HydraException as error:
            refusals.append(Refusal(str(error)))
        except Exception as error:
            if not _is_for_the_user(error):
                raise
            refusals.append(Refusal(str(error.args[0] if error.args else error)))

    try:
        _call_hydra(arguments, guarded)
    except (HydraException, OmegaConfBaseException) as error:
        raise Refusal(_plainly(error, arguments)) from error
    if refusals:
        raise refusals[0]


def _is_for_the_user(error: Exception) -> bool:
    """Whether this package (or Lightning, of a configuration) raised it: then the message says all."""
    if type(error).__name__ == "MisconfigurationException":
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    raised_in = trace.tb_frame.f_globals.get("__name__", "") if trace else ""
    ours = raised_in.startswith("softs_lightning.") and not raised_in.startswith("softs_lightning.recipes.")
    return ours and not isinstance(error, AssertionError)


def _call_hydra(arguments: list[str], task: Task) -> None:
    import hydra

    with _command_line(arguments), _environment(HYDRA_FULL_ERROR="1"):
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
def _environment(**variables: str) -> Iterator[None]:
    # With this set Hydra raises errors instead of printing them and leaving the process.
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


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


def _folders(arguments: Sequence[str]) -> list[Path]:
    text = "\n".join(arguments)
    return [Path(folder) for folder in re.findall(r"^(?:--config-dir|-cd)[=\n](.+)$", text, re.MULTILINE)]


def _plainly(error: Exception, arguments: list[str]) -> str:
    """Hydra's message, with the nearest names and without advice for its developers."""
    text = str(error).strip()
    if (option := re.search(r"Could not override '([^']+)'", text)) is not None:
        name = option[1]
        return (
            f"This recipe has no option {name!r}. {_nearest_option(name, _options(arguments))} "
            f"(To hand on one that the recipe does not mention: +{name}=...)"
        )
    if (
        group := re.search(r"Could not override '?([^'\s]+)'?\.\s*No match in the defaults", text)
    ) is not None:
        return f"This recipe has no group {group[1]!r}. {_nearest_option(group[1], _options(arguments))}"
    if "mismatched input" in text or "no viable alternative" in text or "token recognition" in text:
        return (
            f"{text.splitlines()[0]}\n"
            "Values with brackets, commas or signs are quoted twice: \"pairs.0.teacher='outputs[name]'\""
        )
    return text.partition("\nConfig search path:")[0]


def _nearest_option(name: str, options: list[str]) -> str:
    """The closest of all options; else those that stand beside it, not all hundred."""
    parent = name.rpartition(".")[0]
    while parent and parent not in options:
        parent = parent.rpartition(".")[0]
    beside = [option for option in options if option.rpartition(".")[0] == parent and "._" not in option]
    close = nearest(name, options)
    return close if close.startswith("Did") else nearest(name, beside)


def _options(arguments: list[str]) -> list[str]:
    """Every option of the recipe that `arguments` name, as written on the command line."""
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

    kept = [
        argument
        for position, argument in enumerate(arguments)
        if argument.startswith((catalog.GROUP + "=", "--config-dir", "-cd"))
        or (position and arguments[position - 1] in ("--config-dir", "-cd"))
    ]
    _call_hydra([*kept, *WRITE_NOTHING], lambda recipe: collect(OmegaConf.to_container(recipe), ""))
    return found
