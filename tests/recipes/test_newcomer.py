"""The page that leads from a clone to one's own student, followed to the letter."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from softs_lightning.report import Result
from tests.recipes.command import forked, softs_distill

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[2] / ".docs" / "own.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """The commands after the installation, which the tests' own environment stands for, and the default recipe."""
    lines = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
    return lines[lines.index("softs-distill 'seeds=[0]'") + 1 :]


def follow(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Carry out one command of the page in `folder`, and no other kind than it has."""
    words = shlex.split(command)
    path = folder if words[0] == "PYTHONPATH=." else None
    match words[path is not None :]:
        case ["python", "use.py"]:
            # The package is out of reach by then, as where it was never installed.
            (folder / "softs_lightning.py").write_text("raise ImportError('not installed')\n")
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            return subprocess.run(
                [sys.executable, "use.py"],
                cwd=folder,
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
            )
        case ["python", program]:
            return forked(program, folder=folder, cache=folder / "cache", path=path)
        case ["softs-distill", *arguments]:
            return softs_distill(*arguments, folder=folder, cache=folder / "cache", path=path)
    raise ValueError(f"the page has another kind of command, {command!r}")


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder after the last command, and what each command printed."""
    folder = tmp_path_factory.mktemp("newcomer")
    (folder / "configs" / "recipe").mkdir(parents=True)
    for language, text in BLOCKS:
        if language == "python":
            (folder / text.splitlines()[0].removeprefix("# ")).write_text(text, encoding="utf-8")
        if language == "yaml":
            (folder / "configs" / "recipe" / "own.yaml").write_text(text, encoding="utf-8")
    printed = {}
    for command in commands():
        done = follow(command, folder)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        printed[command] = done.stdout
    return folder, printed


def test_the_own_teacher_helps_the_own_student(followed: tuple[Path, dict[str, str]]) -> None:
    folder, printed = followed
    found = Result.from_json((folder / "run" / "results.json").read_text())
    alone, distilled = found.arms
    assert min(distilled.of(found.headline)) > max(alone.of(found.headline))
    assert found.teacher["accuracy"] > 85
    (explained,) = (text for command, text in printed.items() if "explain" in command)
    assert "ViTForImageClassification" in explained
    assert "pair huber" in explained
    assert "Found by a scan of the teacher: nothing of it was computed, and no weights of it" in explained


def test_the_exported_student_scores_the_same_in_plain_transformers(
    followed: tuple[Path, dict[str, str]],
) -> None:
    folder, printed = followed
    found = Result.from_json((folder / "run" / "results.json").read_text())
    assert printed["python use.py"] == f"accuracy {found.arms[1].scores[0]['accuracy']:.1f}\n"
    assert sorted(path.name for path in (folder / "my-student").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_the_own_loss_passes_the_suite(followed: tuple[Path, dict[str, str]]) -> None:
    _, printed = followed
    assert "FAIL" not in printed["python own_loss.py"]
    assert "pass" in printed["python own_loss.py"]
