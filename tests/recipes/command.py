"""The command line as a user's shell runs it, most often without waiting for its imports."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

# Importing lightning takes most of a short run. A process that has done so, and nothing else, forks once a command.
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["softs_lightning.experiment", "softs_lightning.recipes.digits", "hydra.main"])
ROOT = Path(__file__).parents[2]


def softs_distill(
    *arguments: str,
    folder: Path,
    cache: Path,
    timeout: float = 600,
    path: Path | None = None,
    cold: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `softs-distill` in `folder` on one thread; `path` holds modules of the user's own.

    `cold` starts an interpreter of its own for it, which what launches further processes needs.
    """
    if not cold:
        return forked("softs_lightning", *arguments, folder=folder, cache=cache, timeout=timeout, path=path)
    return subprocess.run(
        [sys.executable, "-m", "softs_lightning", *arguments],
        cwd=folder,
        env=_environment(cache, path),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def _environment(cache: Path, path: Path | None) -> dict[str, str]:
    environment = {**os.environ, "SOFTS_LIGHTNING_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    for leftover in ("LOCAL_RANK", "RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(leftover, None)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return environment


def forked(
    program: str, *arguments: str, folder: Path, cache: Path, timeout: float = 600, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `program`, a module or a file's name in `folder`, as `softs_distill` does its command."""
    environment = _environment(cache, path)
    with TemporaryDirectory() as place:
        said = [os.path.join(place, name) for name in ("stdout", "stderr")]
        process = SERVER.Process(target=_command, args=(program, arguments, folder, environment, said))
        process.start()
        process.join(timeout)
        code = process.exitcode
        if code is None:
            process.kill()
            process.join()
        out, err = (Path(file).read_text(encoding="utf-8") for file in said)
    if code is None:
        raise subprocess.TimeoutExpired([program, *arguments], timeout, out, err)
    return subprocess.CompletedProcess([program, *arguments], code, out, err)


def _command(
    program: str, arguments: Sequence[str], folder: Path, environment: dict[str, str], said: Sequence[str]
) -> None:
    for number, file in enumerate(said, start=1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), number)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    own = environment.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [str(folder), *filter(None, own), *(p for p in sys.path if p and Path(p) != ROOT)]
    sys.argv = [program, *arguments]
    if program.endswith(".py"):
        runpy.run_path(program, run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)


def run_folder(folder: Path, recipe: str) -> Path:
    """The only run of `recipe` in `folder`."""
    (found,) = (folder / "outputs" / recipe).iterdir()
    return found


def scores(report: str) -> dict[int, tuple[float, float]]:
    """Seed → (alone, distilled), read from a report.md."""
    cells = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("|")]
    return {int(row[0]): (float(row[1]), float(row[2])) for row in cells if row[0].isdigit()}
