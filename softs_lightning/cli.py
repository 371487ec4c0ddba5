"""softs-distill: run, explain and list recipes.

Hydra composes the config; this module decides which command is meant, turns what went wrong into one
message, and imports torch only behind that.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from softs_lightning import catalog
from softs_lightning.compose import WRITE_NOTHING, compose, folders_given, for_the_user, wants_traceback
from softs_lightning.config import Failure, Refusal, check, nearest

__all__ = ["main"]

HELP = """\
usage: softs-distill [recipe=NAME] [key=value ...]     run a recipe (digits, if none is named)
       softs-distill explain [recipe=NAME] [key=value ...]
                                  what its product_ids select, where the teacher stops; no training
       softs-distill recipes [list]         the recipes there are
       softs-distill recipes show NAME      print one
       softs-distill recipes copy NAME [FOLDER or FILE.yaml]
                                  a copy to change; run it with --config-dir FOLDER recipe=...
       softs-distill report FOLDER
                                  write the report of a run, or the comparison of a sweep, again
       softs-distill precompute [recipe=NAME] store=PATH [key=value ...]
                                  run the recipe's teacher over its training data once, into a store
       softs-distill store ls|verify|export|compact|gc PATH
                                  look after a store; more: softs-distill store --help

options (they are Hydra's):
  --config-dir DIR        also look for recipes and groups in DIR (DIR/recipe/own.yaml: recipe=own)
  --cfg job               print the composed config and stop
  --multirun              one run for each combination: key=1,2,3; ends with a comparison of them
  --hydra-help            the rest of them
HYDRA_FULL_ERROR=1 in the environment adds the traceback to an error.

examples:
  softs-distill
  softs-distill recipe=digits 'seeds=[0,1]' data.labels=100
  softs-distill trainer.devices=2 trainer.strategy=ddp
  softs-distill explain "pairs.0.teacher='outputs[head]'"    # brackets: quoted twice

Results go to outputs/RECIPE/TIME/, those of a sweep to outputs/sweeps/TIME/. `python -m softs_lightning` is the same command.

recipes:
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out one command line (that of the process, if none is given) and return its exit code.

    >>> main(["recipes", "show", "digit"])  # says on stderr: There is no recipe 'digit'. Did you mean digits?
    2
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    ours = not _in_a_group()
    try:
        code = _dispatch(arguments)
        if ours:
            _leave_the_group()
        return code
    except KeyboardInterrupt:
        print("softs-distill: interrupted", file=sys.stderr)
        return 130
    except Refusal as refusal:
        if wants_traceback():
            raise
        if _is_worker():
            return 0  # the first process says it
        print(f"softs-distill: {refusal}", file=sys.stderr)
        return refusal.code


def _in_a_group() -> bool:
    distributed = sys.modules.get("torch.distributed")  # what is not imported has made no group
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _leave_the_group() -> None:
    """End the processes' group that the command made, while the interpreter is whole.

    Lightning leaves it to the end of the process, where a thread of gloo that still holds a tensor aborts it:
    "terminate called without an active exception".
    """
    if _in_a_group():
        sys.modules["torch.distributed"].destroy_process_group()


def _is_worker() -> bool:
    return any(os.environ.get(name, "0") != "0" for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID"))


def _dispatch(arguments: list[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(HELP + "\n".join(_listed()))
        return 0
    if arguments and arguments[-1] in ("--config-dir", "-cd"):
        raise Refusal(f"{arguments[-1]} is followed by a folder.")
    command = arguments[0] if arguments else ""
    if command == "recipes":
        return _recipes(arguments[1:])
    if command == "explain":
        return _explain(arguments[1:])
    if command == "report":
        return _report(arguments[1:])
    if command == "precompute":
        return _precompute(arguments[1:])
    if command == "store":
        return _store(arguments[1:])
    if command and command[0] not in "-+~" and "=" not in command:
        known = {
            "explain",
            "precompute",
            "recipes",
            "report",
            "store",
            *(f"recipe={name}" for name in catalog.recipes()),
        }
        raise Refusal(f"There is no command {command!r}. {nearest(command, known)} See softs-distill --help.")
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


# What Hydra does instead of one run.
MODES = {"--multirun": {"-m", "--multirun"}, "--cfg": {"-c", "--cfg"}, "--info": {"-i", "--info"}}


def _run(arguments: list[str]) -> int:
    sweeps: list[Path] = []
    failures: list[tuple[Path, Exception]] = []

    def run(recipe: Any) -> None:
        from hydra.core.hydra_config import HydraConfig
        from hydra.types import RunMode

        hydra = HydraConfig.get()
        sweep = hydra.mode is RunMode.MULTIRUN
        name, directory = hydra.runtime.choices[catalog.GROUP], Path(hydra.runtime.output_dir)
        given = [*folders_given(arguments), *hydra.overrides.task] if sweep else arguments
        command = shlex.join(["softs-distill", *given])
        if sweep:
            sweeps.append(Path(hydra.sweep.dir))
        try:
            check(recipe)
            _quieten()
            from softs_lightning.experiment import run_recipe

            run_recipe(recipe, name=name, directory=directory, sweep=sweep, command=command)
        except Exception as error:
            if not sweep:
                _remove_unused(directory)
                raise
            failures.append((directory, for_the_user(error)))  # the other runs of the sweep go on
            _note_failure(*failures[-1])
        except BaseException:
            _remove_unused(directory)
            raise

    modes = [name for name, flags in MODES.items() if flags & {a.partition("=")[0] for a in arguments}]
    if len(modes) > 1:
        raise Refusal(f"{' and '.join(modes)} cannot be combined: give one of them.")
    if not modes:
        compose([*arguments, *WRITE_NOTHING], check)  # a recipe that is refused leaves no folder behind
    compose(arguments, run)
    if sweeps:
        _end_sweep(sweeps[0], len(sweeps), failures)
    return 0


def _note_failure(directory: Path, error: Exception) -> None:
    from softs_lightning.report.comparison import note_failure

    if not isinstance(error, Refusal):
        traceback.print_exception(error)
    print(f"softs-distill: {directory.name}: {error}", file=sys.stderr)
    note_failure(directory, error)


def _end_sweep(folder: Path, count: int, failures: Sequence[tuple[Path, Exception]]) -> None:
    """Compare the runs of a sweep; without a run to compare, raise what went wrong in the first."""
    if len(failures) == count:
        for directory, _ in failures:
            _remove_unused(directory)
        raise failures[0][1]
    _compare(folder)
    if failures:
        raise Failure(f"{len(failures)} of {count} runs of the sweep failed; the comparison names them.")


def _compare(folder: Path) -> None:
    from softs_lightning.report.comparison import write_comparison

    sweep = write_comparison(folder)
    print(f"\n{sweep.table()}\n")
    for one in sweep.unfinished:
        print(f"Without a result: {one}")
    print(f"Comparison: {folder}")


def _report(arguments: list[str]) -> int:
    match arguments:
        case [name] if not name.startswith("-"):
            folder = Path(name)
        case _:
            raise Refusal("Write: report FOLDER, the folder of a run or of a sweep.")
    from softs_lightning.report.comparison import is_sweep
    from softs_lightning.report.run import write_report

    try:
        if is_sweep(folder):
            _compare(folder)
        else:
            write_report(folder)
            print(f"Report: {folder / 'report.html'}")
    except OSError as error:
        raise Refusal(f"The report cannot be written: {error}.") from None
    return 0


def _remove_unused(directory: Path) -> None:
    """Remove a run's folder in which nothing was trained: only Hydra's own files, a log and an error are there."""
    for file in directory.rglob("*"):
        ours = file.suffix == ".log" or file.name == "failed.json"
        if file.is_file() and file.parent.name != ".hydra" and not ours and file.stat().st_size:
            return
    shutil.rmtree(directory, ignore_errors=True)
    recipe, outputs = directory.parent, directory.parent.parent
    if outputs.name == "outputs":  # the usual place, which the run made
        with suppress(OSError):  # other runs are there
            recipe.rmdir()
            outputs.rmdir()


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


def _precompute(arguments: list[str]) -> int:
    from softs_lightning.store.commands import options_of, precompute

    try:
        options, rest = options_of(arguments)
    except ValueError as error:
        raise Refusal(str(error)) from None

    def fill(recipe: Any) -> None:
        check(recipe)
        _quieten()
        from softs_lightning.callback import DistillationCallback
        from softs_lightning.config import build
        from softs_lightning.explain import build_callbacks
        from softs_lightning.store import StoreError

        # Lightning starts other processes by the command line as it finds it.
        sys.argv[1:] = ["precompute", *arguments]
        for callback in build_callbacks(recipe):
            if isinstance(callback, DistillationCallback):
                try:
                    precompute(
                        teacher=callback.teacher,
                        pairs=callback.pairs,
                        data=build(recipe.data, "data"),
                        trainer=_sharing_trainer(recipe, callback.teacher),
                        **options,
                    )
                except StoreError as error:
                    raise Refusal(str(error)) from None

    compose([*rest, *WRITE_NOTHING], fill)
    return 0


def _sharing_trainer(recipe: Any, teacher: Any) -> Any:
    """The recipe's trainer where it runs in several processes or not in float32, else None."""
    from softs_lightning.config import build
    from softs_lightning.trained import TrainedTeacher

    trainer = build(
        recipe.trainer,
        "trainer",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        inference_mode=False,
    )
    started = int(os.environ.get("WORLD_SIZE", 1))
    if started > trainer.world_size:
        raise Refusal(
            f"This was started in {started} processes, of which each would compute everything. Add trainer.strategy=ddp "
            f"trainer.devices={started}, or start it once."
        )
    if trainer.world_size == 1 and trainer.precision == "32-true":
        return None
    if not _is_worker() and isinstance(teacher.source, TrainedTeacher):
        teacher.source()  # trained and kept before there are others, who find it
    return trainer


def _store(arguments: list[str]) -> int:
    from softs_lightning.store.commands import run
    from softs_lightning.store.errors import StoreError

    def products_of(recipes: Sequence[str]) -> list[str]:
        found: list[str] = []
        for recipe in recipes:
            compose(
                [recipe, *WRITE_NOTHING], lambda node: found.extend(str(pair.teacher) for pair in node.pairs)
            )
        return found

    try:
        return run(arguments, products_of=products_of)
    except (StoreError, ValueError) as error:
        raise Refusal(str(error)) from None


def _explain(arguments: list[str]) -> int:
    def explain(recipe: Any) -> None:
        check(recipe)
        _quieten()
        from softs_lightning.explain import explain_recipe

        print(explain_recipe(recipe))

    compose([*arguments, *WRITE_NOTHING], explain)
    return 0
