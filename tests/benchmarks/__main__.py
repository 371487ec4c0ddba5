"""Run the benchmarks: ``python -m tests.benchmarks [NAME ...] [--out FILE]``."""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
from pathlib import Path

import torch

from tests.benchmarks import table

HERE = Path(__file__).parent


def main() -> int:
    available = sorted(path.stem.removeprefix("bench_") for path in HERE.glob("bench_*.py"))
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which to run: {', '.join(available)} (all)"
    )
    parser.add_argument("--out", type=Path, help="also write the tables into this file")
    asked = parser.parse_args()
    if unknown := [name for name in asked.names if name not in available]:
        parser.error(f"no benchmark named {', '.join(unknown)}: there are {', '.join(available)}")
    torch.set_num_threads(1)
    where = (
        f"Python {platform.python_version()}, torch {torch.__version__}, one thread of {platform.machine()}"
    )
    parts = [f"Medians of paired, interleaved runs, with the range over the repeats. {where}."]
    over = 0
    for name in asked.names or available:
        print(f"{name} ...", file=sys.stderr, flush=True)
        module = importlib.import_module(f"tests.benchmarks.bench_{name}")
        rows = list(module.rows())
        over += sum(row.limit is not None and row.ratio > row.limit for row in rows)
        parts += [f"**{name}**: {(module.__doc__ or '').strip().splitlines()[0]}", table(rows)]
    text = "\n\n".join(parts)
    print(text)
    if asked.out is not None:
        asked.out.write_text(text + "\n", encoding="utf-8")
    return 1 if over else 0


if __name__ == "__main__":
    raise SystemExit(main())
