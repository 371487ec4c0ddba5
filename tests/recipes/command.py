"""The command line as a user's shell runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def softs_distill(
    *arguments: str, folder: Path, cache: Path, timeout: float = 240, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `softs-distill` in `folder` on one thread; `path` holds modules of the user's own."""
    environment = {**os.environ, "SOFTS_LIGHTNING_CACHE": str(cache), "OMP_NUM_THREADS": "1"}
    for leftover in ("LOCAL_RANK", "RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        environment.pop(leftover, None)
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run(
        [sys.executable, "-m", "softs_lightning", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def run_folder(folder: Path, recipe: str) -> Path:
    """The only run of `recipe` in `folder`."""
    (found,) = (folder / "outputs" / recipe).iterdir()
    return found


def scores(report: str) -> dict[int, tuple[float, float]]:
    """Seed → (alone, distilled), read from a report.md."""
    cells = [line.strip("| ").split(" | ") for line in report.splitlines() if line.startswith("|")]
    return {int(row[0]): (float(row[1]), float(row[2])) for row in cells if row[0].isdigit()}
