"""A table of the situations that the tests put the callback in, written from a run of the tests.

``@pytest.mark.situation("gradient accumulation", proves="equal to a reference")`` says of a test what it
is about; ``pytest --situations FILE`` writes a Markdown table whose cells name the tests and what came
of them in this run: passed, failed, skipped with the reason, or not run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

__all__ = [
    "COLUMNS",
    "ROWS",
    "Situations",
    "pytest_addoption",
    "pytest_configure",
    "pytest_itemcollected",
]

PROPERTY = "situation"

ROWS = (
    "one device",
    "DDP, two nodes",
    "DDP, launched by Lightning",
    "DDP, spawned",
    "FSDP2",
    "other sharding strategies",
    "teacher sharded over the ranks",
    "teacher on the CPU",
    "teacher that is the student's average",
    "precision 32-true",
    "precision 64-true",
    "precision bf16-mixed",
    "precision bf16-true",
    "precision 16-mixed",
    "gradient accumulation",
    "gradient accumulation, all tokens of the window",
    "gradient clipping",
    "learning rate finder",
    "batch size finder",
    "EMAWeightAveraging",
    "WeightAveraging",
    "StochasticWeightAveraging",
    "BaseFinetuning",
    "EarlyStopping on a distillation metric",
    "ModelCheckpoint on a distillation metric",
    "compiled before the fit",
    "compiled by the callback",
    "compiled and run before the fit",
    "manual optimization, several optimizers",
    "LBFGS",
    "CombinedLoader",
    "loader of unknown length",
    "dataloader_iter",
    "overfit_batches",
    "fast_dev_run",
    "limit_train_batches",
    "configure_model",
    "validate, test and predict",
    "LightningCLI",
    "several callbacks",
    "gradient checkpointing, re-entrant",
    "gradient checkpointing, not re-entrant",
    "quantised teacher",
    "fault: exception in the student",
    "fault: exception in the teacher",
    "fault: exception in the loss",
    "fault: exception in another callback",
    "fault: exception in the logger",
    "fault: exception swallowed by a tuner",
    "fault: full disk at a checkpoint",
    "fault: Ctrl-C",
    "fault: killed rank",
)
"""The situations, in the order of the table."""

COLUMNS = (
    "equal to a reference",
    "resumed equal",
    "checkpoint clean",
    "refused with message",
    "left as it was",
)
"""What a test can prove of a situation."""


@dataclass
class Situations:
    """Collects the marked tests and their outcomes, and writes the table when the run is over."""

    out: Path
    cells: dict[tuple[str, str], dict[str, list[str]]] = field(default_factory=dict)
    outcomes: dict[str, str] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "setup":
            self._enter(report)
        if report.failed:
            self.outcomes[report.nodeid] = "failed"
        elif report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self.outcomes[report.nodeid] = f"skipped: {reason.removeprefix('Skipped: ')}"
        elif report.when == "call":
            self.outcomes.setdefault(report.nodeid, "passed")

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            self._enter(item)

    def _enter(self, test: pytest.Item | pytest.TestReport) -> None:
        marks: list[Any] = [value for name, value in test.user_properties if name == PROPERTY]
        for rows, proves in marks:
            for cell in _cells(test.nodeid, *rows, proves=proves):
                tests = self.cells.setdefault(cell, {})
                tests.setdefault(test.nodeid.partition("[")[0], []).append(test.nodeid)

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            self.out.write_text(self.table(), encoding="utf-8")

    def table(self) -> str:
        """The Markdown table."""
        lines = ["| situation | " + " | ".join(COLUMNS) + " |", "|---|" + "---|" * len(COLUMNS)]
        for row in ROWS:
            lines.append(f"| {row} | " + " | ".join(self._cell(row, column) for column in COLUMNS) + " |")
        return "\n".join(lines) + "\n"

    def _cell(self, row: str, column: str) -> str:
        entries = []
        for test, nodes in sorted(self.cells.get((row, column), {}).items()):
            counts = Counter(self.outcomes.get(node, "not run") for node in nodes)
            said = ", ".join(f"{outcome} ×{n}" if n > 1 else outcome for outcome, n in counts.items())
            path, _, name = test.partition("::")
            entries.append(f"`{Path(path).name}::{name}` {said}".replace("|", "\\|"))
        return "<br>".join(entries) or "–"


def _cells(test: str, *rows: str, proves: str | tuple[str, ...]) -> list[tuple[str, str]]:
    columns = (proves,) if isinstance(proves, str) else proves
    unknown = [row for row in rows if row not in ROWS] + [c for c in columns if c not in COLUMNS]
    if unknown or not rows:
        raise pytest.UsageError(
            f"{test}: the mark situation names {unknown or 'no situation'}; known are {', '.join((*ROWS, *COLUMNS))}"
        )
    return [(row, column) for row in rows for column in columns]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--situations", metavar="FILE", help="write the table of the situations that the tests prove"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """The marks travel in a test's reports, to whichever process writes the table."""
    for mark in item.iter_markers("situation"):
        proves = mark.kwargs["proves"]
        _cells(item.nodeid, *mark.args, proves=proves)
        item.user_properties.append((PROPERTY, (mark.args, proves)))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "situation(*names, proves=...): what of the table of situations a test proves"
    )
    of_xdist = hasattr(config, "workerinput")
    if (out := config.getoption("--situations")) and not of_xdist:
        config.pluginmanager.register(Situations(Path(out)), "situations")
