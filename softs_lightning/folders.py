"""Folders of models that somebody named, found before a hub is asked for them."""

from __future__ import annotations

import difflib
import os
from pathlib import Path
from typing import Any

__all__ = ["MissingFolderError", "folder", "looks_like_path"]

_LISTED = 10  # names of what is there


class MissingFolderError(FileNotFoundError):
    """A model or tokenizer is to be read from a folder that is not there, or by a name that cannot be fetched.

    Attributes:
        given: the folder or name, as it was written.
    """

    def __init__(self, message: str, given: str) -> None:
        super().__init__(message)
        self.given = given


def looks_like_path(name: Any) -> bool:
    """Whether a name can only be that of a folder: ``/a``, ``./a``, ``../a``, ``~/a``, or no text but a path.

    >>> [looks_like_path(name) for name in ("/a", "./a", "..", "~/a", Path("a"), "a", "a/b", "a.b/c")]
    [True, True, True, True, True, False, False, False]
    """
    if not isinstance(name, str):
        return isinstance(name, os.PathLike)
    first = name.replace(os.sep, "/").partition("/")[0]
    return first in (".", "..") or name.startswith(("/", "~")) or Path(name).is_absolute()


def folder(name: str | os.PathLike[str]) -> str:
    """The name of a model or tokenizer, with ``~`` written out; a path must be that of a folder.

    Raises:
        MissingFolderError: a ``FileNotFoundError`` that says what is there instead.

    >>> folder("bert-base-uncased")
    'bert-base-uncased'
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     Path(place, "bert-large").mkdir()
    ...     try:
    ...         folder(f"{place}/bert-lagre")
    ...     except MissingFolderError as error:
    ...         print(str(error).replace(place, "PLACE"))
    there is no folder PLACE/bert-lagre; the nearest in PLACE: bert-large
    """
    if not looks_like_path(name):
        return os.fspath(name)
    try:
        path = Path(name).expanduser()
    except RuntimeError as error:  # "~somebody" who does not exist
        raise MissingFolderError(f"there is no folder {os.fspath(name)}: {error}", os.fspath(name)) from None
    if path.is_dir():
        return str(path)
    if path.exists():
        raise MissingFolderError(f"{path} is a file, not a folder: give {path.parent}", os.fspath(name))
    raise MissingFolderError(
        f"there is no folder {os.fspath(name)}{_instead(Path(os.path.abspath(path)))}", os.fspath(name)
    )


def _instead(path: Path) -> str:
    """What is there instead of a path that is not."""
    above = next((parent for parent in path.parents if parent.is_dir()), None)
    if above is None:
        return ""
    wanted = path.relative_to(above).parts[0]
    beside = "" if above / wanted == path else f", nor {above / wanted}"
    try:
        there = sorted(entry.name for entry in above.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        return f"{beside} ({error})"
    close = difflib.get_close_matches(wanted, there, n=3, cutoff=0.6)
    if close:
        return f"{beside}; the nearest in {above}: {', '.join(close)}"
    if len(there) > _LISTED:
        return f"{beside}; in {above} nothing has a name like it"
    return f"{beside}; in {above} there is {', '.join(there) or 'nothing'}"
