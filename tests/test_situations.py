"""The table of situations, from a run of a few small tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

TESTS = """
import pytest

@pytest.mark.situation("LBFGS", "CombinedLoader", proves="equal to a reference")
@pytest.mark.parametrize("n", [1, 2, 3])
def test_equal(n):
    if n == 3:
        pytest.skip("no third | here")

@pytest.mark.situation("LBFGS", proves=("equal to a reference", "left as it was"))
def test_other():
    assert False

@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.situation("one device", proves="resumed equal"))])
def test_left_out(n):
    pass

@pytest.fixture
def broken():
    raise OSError

@pytest.mark.situation("fast_dev_run", proves="checkpoint clean")
def test_broken(broken):
    pass
"""


def run(folder: Path, tests: str, *options: str) -> tuple[str, dict[str, list[str]]]:
    (folder / "test_some.py").write_text(tests, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.situations",
        "-c",
        "/dev/null",
        "--rootdir",
        folder,
    ]
    done = subprocess.run(
        [*command, "--situations", folder / "table.md", folder / "test_some.py", *options],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        check=False,
    )
    lines = (
        (folder / "table.md").read_text(encoding="utf-8").splitlines()
        if (folder / "table.md").exists()
        else []
    )
    rows = [line.strip("| ").split(" | ") for line in lines]
    return done.stdout + done.stderr, {row[0]: row[1:] for row in rows}


def test_each_cell_names_its_tests_and_what_came_of_them(tmp_path: Path) -> None:
    said, table = run(tmp_path, TESTS, "-k", "not left_out")
    assert "1 failed" in said
    assert table["situation"][0] == "equal to a reference"
    equal = "`test_some.py::test_equal` passed ×2, skipped: no third \\| here"
    assert table["LBFGS"] == [
        f"{equal}<br>`test_some.py::test_other` failed",
        "–",
        "–",
        "–",
        "`test_some.py::test_other` failed",
    ]
    assert table["CombinedLoader"][0] == equal
    assert table["one device"][1] == "`test_some.py::test_left_out` not run"
    assert table["fast_dev_run"][2] == "`test_some.py::test_broken` failed"
    assert table["BaseFinetuning"] == ["–"] * 5


def test_a_situation_that_is_not_in_the_table_is_refused(tmp_path: Path) -> None:
    said, table = run(tmp_path, TESTS.replace('"LBFGS", proves', '"LBGFS", proves'))
    assert "test_other: the mark situation names ['LBGFS']; known are" in said
    assert not table
