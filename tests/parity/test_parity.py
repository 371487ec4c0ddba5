"""What ``.docs/parity.md`` says holds, for the peers that are installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from softs_lightning import losses
from softs_lightning.losses import DistillationLoss
from tests.parity import COMPARISONS, WITHOUT_A_PEER, Comparison, compare
from tests.parity.peers import missing
from tests.parity.table import page

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("comparison", COMPARISONS, ids=lambda comparison: comparison.name)
def test_equal_or_unequal_for_the_reason_given(comparison: Comparison) -> None:
    if comparison.peer != "torch" and (reason := missing(comparison.peer)):
        pytest.skip(reason)
    found = compare(comparison)
    if comparison.reason:
        assert found.plain > 0.01  # the reason is a real one
    assert found.value <= comparison.rtol
    assert found.gradient is None or found.gradient <= comparison.rtol


def test_a_reason_comes_with_its_correction() -> None:
    assert all(bool(x.reason) == (x.corrected is not None) for x in COMPARISONS)


def test_every_loss_has_a_peer_or_says_why_not() -> None:
    classes = {
        name
        for name in losses.__all__
        if isinstance(found := getattr(losses, name), type)
        and issubclass(found, DistillationLoss)
        and found is not DistillationLoss
    }
    compared = {comparison.loss for comparison in COMPARISONS}
    assert compared | set(WITHOUT_A_PEER) == classes
    assert not compared & set(WITHOUT_A_PEER)


def test_the_committed_page_has_every_comparison() -> None:
    committed = (ROOT / ".docs" / "parity.md").read_text(encoding="utf-8")

    def without_numbers(text: str) -> list[list[str]]:
        rows = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line[:1] == "|"]
        return [[cells[1], cells[2], cells[6]] for cells in rows if len(cells) == 8]

    def line(name: str, comparison: Comparison) -> str:
        return f"| {name} | {comparison.peer} {comparison.theirs} | | | | {comparison.reason} |"

    assert without_numbers(committed)[2:] == without_numbers(page(line))[2:]


def test_what_is_tested_elsewhere_names_a_test_that_is_there() -> None:
    for where in WITHOUT_A_PEER.values():
        file, _, test = where.partition("::")
        assert f"def {test}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), where
