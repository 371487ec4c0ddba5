"""A folder on a local disk or on anything fsspec reaches: what a store needs of a file system.

Files are written once and whole: a name either stands for a complete file or for nothing. Locally
that is a hidden file that is flushed to the disk and then renamed; elsewhere it is one upload,
which object stores make visible only when it is complete.
"""

from __future__ import annotations

import copy
import errno
import hashlib
import mmap
import os
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from softs_lightning.store.errors import StoreFullError, StoreReadOnlyError

__all__ = ["Folder"]

_LEFTOVER = ".tmp"
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_READ_ONLY = {"http", "https"}
_CLOSED = {errno.EACCES, errno.EPERM, errno.EROFS}


class Folder:
    """A place for immutable files.

    Args:
        path: a local path, or a URL such as ``s3://bucket/store`` or ``memory://store``.
        cache: where remote files are kept once they were read, by default in the user's cache folder.

    >>> import tempfile
    >>> folder = Folder(tempfile.mkdtemp()).child("products")
    >>> folder.write("a.bin", b"abc")
    >>> folder.names(), bytes(folder.map("a.bin"))
    (['a.bin'], b'abc')
    """

    def __init__(self, path: str | os.PathLike[str], *, cache: str | os.PathLike[str] | None = None) -> None:
        text = os.fspath(path)
        self.fs: Any = None
        if "://" in text and not text.startswith("file://"):
            import fsspec  # type: ignore[import-untyped]

            self.fs, self.path = fsspec.core.url_to_fs(text)
            self.shown = text.rstrip("/")
        else:
            self.path = os.path.abspath(os.path.expanduser(text.removeprefix("file://")))
            self.shown = self.path
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        self.cache = Path(cache or Path(home) / "softs_lightning" / "store").expanduser()

    def __str__(self) -> str:
        return self.shown

    def child(self, name: str) -> Folder:
        """A folder inside this one; it comes into being with its first file."""
        inner = copy.copy(
            self
        )  # and not by its address: addresses may be chained, as in zip://::file:///a.zip
        inner.path, inner.shown = self._at(name), f"{self.shown}/{name}"
        return inner

    def names(self) -> list[str]:
        """The complete files and the folders here, sorted; none if the folder is not there."""
        return [name for name in self._all() if not name.startswith(".")]

    def leftovers(self) -> list[str]:
        """Files of writers that are gone: of this machine's dead processes, or untouched for a day."""
        return [name for name in self._all() if name.endswith(_LEFTOVER) and self._abandoned(name)]

    def _all(self) -> list[str]:
        if self.fs is None:
            with suppress(FileNotFoundError, NotADirectoryError):
                return sorted(os.listdir(self.path))
            return []
        self.fs.invalidate_cache(self.path)
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(
                {str(name).rstrip("/").rsplit("/", 1)[-1] for name in self.fs.ls(self.path, detail=False)}
            )
        return []

    def _abandoned(self, name: str) -> bool:
        host, _, process = name.removesuffix(_LEFTOVER).split("~")[1].rpartition("-")
        if host == socket.gethostname() and process.isdigit():
            try:
                os.kill(int(process), 0)
            except ProcessLookupError:
                return True
            except PermissionError:
                return False
            return False
        with suppress(OSError):
            return time.time() - os.stat(self._at(name)).st_mtime > 86400
        return False

    def _at(self, name: str) -> str:
        return f"{self.path}/{name}" if self.path else name  # the root of an archive has no name

    def has(self, name: str) -> bool:
        """Whether a file or folder of this name is here."""
        return os.path.exists(self._at(name)) if self.fs is None else bool(self.fs.exists(self._at(name)))

    def size(self, name: str) -> int:
        """The length of a file in bytes."""
        return os.path.getsize(self._at(name)) if self.fs is None else int(self.fs.size(self._at(name)))

    def read(self, name: str) -> bytes:
        """A small file as a whole. Raises ``FileNotFoundError``."""
        if self.fs is not None:
            return bytes(self.fs.cat_file(self._at(name)))
        with open(self._at(name), "rb") as file:
            return file.read()

    def write(self, name: str, data: bytes) -> None:
        """Put a file here, whole, and return when it will survive a loss of power.

        Raises:
            StoreFullError: when the disk is full; nothing of the file is left.
            StoreReadOnlyError: when the folder cannot be written to.
        """
        with self._explained(name, len(data)):
            if self.fs is not None:
                self.fs.makedirs(self.path, exist_ok=True)
                self.fs.pipe_file(self._at(name), data)
                return
            os.makedirs(self.path, exist_ok=True)
            writer = f"{socket.gethostname()}-{os.getpid()}"
            unfinished = self._at(f".{name}~{writer}~{uuid.uuid4().hex[:8]}{_LEFTOVER}")
            try:
                with open(unfinished, "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(unfinished, self._at(name))
            except BaseException:
                with suppress(OSError):
                    os.unlink(unfinished)
                raise
            _flush_folder(self.path)

    @contextmanager
    def _explained(self, name: str, size: int) -> Iterator[None]:
        try:
            yield
        except NotImplementedError as error:  # as fsspec says it of what can only be read
            raise StoreReadOnlyError(
                errno.EROFS, f"{self} cannot be written to: open the store with mode='read'"
            ) from error
        except OSError as error:
            if error.errno in _FULL:
                raise StoreFullError(
                    error.errno,
                    f"no room for {size:,} bytes in {self}: {error.strerror}. What was committed before is complete; "
                    "free some space and start again, it will go on from there",
                ) from error
            if error.errno in _CLOSED:
                raise StoreReadOnlyError(
                    error.errno,
                    f"{self} cannot be written to ({error.strerror}): open the store with mode='read'",
                ) from error
            raise

    def refuse_read_only(self) -> None:
        """Raise ``StoreReadOnlyError`` if it is known already that nothing can be written here."""
        if self.fs is None:
            closed = os.path.isdir(self.path) and not os.access(self.path, os.W_OK | os.X_OK)
            number = errno.EACCES
        else:
            names = {self.fs.protocol} if isinstance(self.fs.protocol, str) else set(self.fs.protocol)
            closed = (
                bool(names & _READ_ONLY) or getattr(self.fs, "mode", "") == "r"
            )  # an archive opened to be read
            number = errno.EROFS
        if closed:
            with self._explained("", 0):
                raise OSError(number, os.strerror(number))

    def map(self, name: str) -> Any:
        """A file's bytes as a buffer: a memory map, so that only what is touched is read.

        A remote file is fetched whole, once, into the cache. Writing to the buffer changes no file. As with any
        memory map, a file that someone shortens while it is mapped ends the process that reads there.
        """
        path = self._at(name) if self.fs is None else self._fetch(name)
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return bytearray()  # which cannot be mapped
            # A private map: torch wants writable memory, and the file must stay as it is.
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)

    def _fetch(self, name: str) -> str:
        place = self.cache / hashlib.sha256(f"{self.shown}/{name}".encode()).hexdigest()[:32]
        if not place.exists() or place.stat().st_size != self.size(name):
            self.cache.mkdir(parents=True, exist_ok=True)
            unfinished = place.with_suffix(f".{uuid.uuid4().hex[:8]}")
            try:
                self.fs.get_file(self._at(name), str(unfinished))
                os.replace(unfinished, place)
            finally:
                with suppress(FileNotFoundError):
                    unfinished.unlink()
        return str(place)

    def remove(self, name: str) -> None:
        """Delete a file, or a folder with all it holds. Deleting what is gone changes nothing."""
        with suppress(FileNotFoundError), self._explained(name, 0):
            if self.fs is not None:
                self.fs.rm(self._at(name), recursive=True)
            elif os.path.isdir(self._at(name)):
                shutil.rmtree(self._at(name))
            else:
                os.unlink(self._at(name))

    def set_aside(self, name: str) -> None:
        """Rename a damaged file so that nobody reads it."""
        with self._explained(name, 0):
            if self.fs is not None:
                self.fs.mv(self._at(name), self._at(f".{name}.damaged"))
            else:
                os.replace(self._at(name), self._at(f".{name}.damaged"))

    def damaged(self) -> list[str]:
        """What :meth:`set_aside` has put away."""
        return [name for name in self._all() if name.startswith(".") and name.endswith(".damaged")]

    def free(self) -> int | None:
        """Free bytes on the disk, ``None`` where that is not known."""
        if self.fs is not None:
            return None
        place = Path(self.path)
        while not place.exists():
            place = place.parent
        return shutil.disk_usage(place).free


def _flush_folder(path: str) -> None:
    """Make a rename durable. Not every file system lets folders be opened."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
