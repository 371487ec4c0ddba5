"""The other libraries: their versions, and how what does not import by itself is loaded."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

__all__ = ["file_of", "missing", "module", "version"]


def version(peer: str) -> str | None:
    """The installed version of a distribution, or ``None``."""
    try:
        return metadata.version(peer)
    except metadata.PackageNotFoundError:
        return None


def missing(peer: str) -> str:
    """Why a comparison cannot run here; empty where it can."""
    return "" if version(peer) is not None else f"{peer} is not installed"


@functools.cache
def module(name: str) -> Any:
    """A peer's module; what it warns of and prints at import is not ours."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@functools.cache
def file_of(peer: str, path: str) -> Any:
    """One file of a peer whose package does not import (for want of torchao or torchvision), by itself."""
    files = [file for file in metadata.files(peer) or [] if str(file) == path]
    spec = importlib.util.spec_from_file_location(
        f"parity_{Path(path).stem}", str(metadata.distribution(peer).locate_file(files[0]))
    )
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
