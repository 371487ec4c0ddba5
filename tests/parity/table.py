"""The page that the comparisons make."""

from __future__ import annotations

import platform
from collections.abc import Callable

import torch

from tests.parity import COMPARISONS, WITHOUT_A_PEER, Comparison, compare
from tests.parity.peers import version

__all__ = ["COMMAND", "PEERS", "page", "row"]

PEERS = sorted({comparison.peer for comparison in COMPARISONS} - {"torch"})
COMMAND = f"""pip install -c .ci/constraints.txt -e . accelerate datasets requests pulp nvidia-ml-py tensorboard pydantic rich
pip install --no-deps {" ".join(f"{peer}=={version(peer)}" for peer in PEERS)}
python -m tests.parity"""

HEAD = """\
# The losses against those of other libraries

Each line computes one loss here and in another library on the same float64 tensors. *Plain* is the relative
difference of the values as they come; where it is not rounding, the last column says why, and *corrected* is what is
left of it, in the value and in the student's gradient, once that one thing is changed in ours. `tests/parity` asserts
every line: that without a reason the two are equal, that with one they are not, and that the reason is all of it.
Libraries that sum in float32 or add an epsilon leave that much (1e-8 to 1e-6).

| loss | peer | plain | corrected | gradient | the difference |
|---|---|---|---|---|---|
"""

NOTES = """\
Read around, not through their packages: torchtune's `kd_losses.py` is loaded as a file, since its package asks for
an older torchao; Liger's losses are its chunked ones, uncompiled, which are pure torch (its Triton kernels need a
GPU). GKD's trainer calls its own divergence without the temperature, which there only affects sampling.
"""


def row(name: str, comparison: Comparison) -> str:
    """One line of the table."""
    found = compare(comparison)
    gradient = "–" if found.gradient is None else _rounding(found.gradient)
    plain = f"{found.plain:.2g}" if comparison.reason else _rounding(found.plain)
    corrected = _rounding(found.value) if comparison.reason else ""
    return f"| {name} | {comparison.peer} {comparison.theirs} | {plain} | {corrected} | {gradient} | {comparison.reason} |"


def _rounding(difference: float) -> str:
    return f"{difference:.0e}" if difference else "0"


def page(line: Callable[[str, Comparison], str] = row) -> str:
    """The whole page."""
    lines = [line(comparison.ours, comparison) for comparison in COMPARISONS]
    alone = "\n".join(f"| `{name}` | `tests/{what}` |" for name, what in sorted(WITHOUT_A_PEER.items()))
    return (
        HEAD
        + "\n".join(lines)
        + f"\n\n{NOTES}\nLosses that no library that installs from an index has, and what they are tested against:\n\n"
        + f"| loss | tested |\n|---|---|\n{alone}\n\nMade by\n\n```bash\n{COMMAND}\n```\n\n"
        + f"with Python {platform.python_version()} and torch {torch.__version__.partition('+')[0]}.\n"
    )
