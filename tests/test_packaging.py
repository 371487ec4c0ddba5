"""The wheel: what is in it, and that it works where the repository is not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SHIPPED = {
    "softs_lightning": "softs_lightning",
    "conf": "softs_lightning/conf",
    "recipes": "softs_lightning/recipes",
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that neither leftovers get in nor anything is left in the repository."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in SHIPPED:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", source],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (built,) = (source / "dist").glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


def run(installed: Path, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed), "SOFTS_LIGHTNING_CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_and_config_of_the_repository_is_in_it(wheel: Path) -> None:
    expected = {
        f"{place}/{file.relative_to(ROOT / name).as_posix()}"
        for name, place in SHIPPED.items()
        for file in (ROOT / name).rglob("*")
        if file.suffix in (".py", ".yaml", ".typed")
    }
    files = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert files == expected
    assert "softs_lightning/py.typed" in expected


def test_it_installs_one_package_and_brings_its_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"softs_lightning"}
    assert sum(name.endswith("licenses/LICENSE") for name in names) == 1


def test_the_command_works_from_it_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    where = run(
        installed,
        tmp_path,
        "-c",
        "import softs_lightning as a, softs_lightning.conf as b, softs_lightning.recipes as c;"
        "print(a.__file__, b.__file__, c.__file__, sep='\\n')",
    )
    assert all(Path(file).is_relative_to(installed) for file in where.split())
    assert "digits" in run(installed, tmp_path, "-m", "softs_lightning", "recipes")
    assert "stops at early" in run(installed, tmp_path, "-m", "softs_lightning", "explain")


def test_the_installed_command_sees_its_configs_from_anywhere(tmp_path: Path) -> None:
    """Of whichever installation the tests run in: with `pip install -e`, the editable one."""
    command = Path(sys.executable).with_name("softs-distill")
    done = subprocess.run(
        [command, "--cfg", "job"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    assert "teacher: outputs[early]" in done.stdout
    shown = subprocess.run(
        [command, "recipes", "show", "digits"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert shown.stdout == (ROOT / "recipes" / "recipe" / "digits.yaml").read_text()
