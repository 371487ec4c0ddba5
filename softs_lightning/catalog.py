"""The recipes that can be run by name: those of the package and those of the user's folders."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from softs_lightning.config import Refusal, nearest

__all__ = ["copy", "find", "recipes", "scales", "summary"]

GROUP = "recipe"
SCALE = "scale"


def recipes(folders: Iterable[Path] = ()) -> dict[str, Traversable]:
    """Name → file of every recipe in the package and in `folders`, which are as given to `--config-dir`.

    >>> "digits" in recipes()
    True
    """
    places: list[Traversable] = [files("softs_lightning.recipes"), *folders]
    found: dict[str, Traversable] = {}
    for place in places:
        group = place / GROUP
        if not group.is_dir():
            continue
        for entry in sorted(group.iterdir(), key=lambda entry: entry.name):
            if entry.name.endswith((".yaml", ".yml")):
                found[entry.name.rpartition(".")[0]] = entry
    return found


def find(name: str, folders: Iterable[Path] = ()) -> Traversable:
    """The file of the recipe called `name`.

    Raises:
        Refusal: with the nearest names.
    """
    known = recipes(folders)
    stem = name.removesuffix(".yaml")
    if stem not in known:
        raise Refusal(f"There is no recipe {name!r}. {nearest(stem, known)}")
    return known[stem]


def scales(name: str, folders: Iterable[Path] = ()) -> dict[str, Traversable]:
    """Name → file of every set of overrides that takes the recipe called `name` to another size."""
    found: dict[str, Traversable] = {}
    for place in (files("softs_lightning.recipes"), *folders):
        group = place / SCALE / name
        if group.is_dir():
            for entry in sorted(group.iterdir(), key=lambda entry: entry.name):
                if entry.name.endswith(".yaml"):
                    found[entry.name.removesuffix(".yaml")] = entry
    return found


def summary(recipe: Traversable) -> str:
    """The first comment of a recipe that is not Hydra's package line."""
    for line in recipe.read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            break
        text = line.strip("# ")
        if text and not text.startswith("@package"):
            return text
    return ""


def copy(name: str, destination: Path) -> Path:
    """Write the recipe called `name` to `destination`, a new file or a folder given to `--config-dir`.

    Raises:
        Refusal: for an unknown recipe, or rather than overwrite a file.
    """
    recipe = find(name)
    if destination.suffix == ".yml":
        raise Refusal(f"Hydra reads only .yaml files: name it {destination.with_suffix('.yaml')}.")
    file = destination if destination.suffix == ".yaml" else destination / GROUP / recipe.name
    if file.exists():
        raise Refusal(f"{file} is already there; remove it or name another place.")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(recipe.read_text(encoding="utf-8"), encoding="utf-8")
    except OSError as error:
        raise Refusal(f"{file} cannot be written: {error.strerror}.") from None
    return file
