"""Folders: whole files or none, on a local disk and through fsspec."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest

from softs_lightning.store.errors import StoreFullError, StoreReadOnlyError
from softs_lightning.store.folder import Folder


@pytest.fixture(params=["local", "file", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Folder:
    places = {
        "local": tmp_path / "new",
        "file": f"file://{tmp_path}/new",
        "memory": f"memory://{uuid.uuid4().hex}",
    }
    return Folder(places[request.param], cache=tmp_path / "cache")


def test_a_folder_that_is_not_there_is_empty(folder: Folder) -> None:
    assert folder.names() == []
    assert not folder.has("a")
    with pytest.raises(FileNotFoundError):
        folder.read("a")


def test_what_is_written_is_there(folder: Folder) -> None:
    child = folder.child("inner")
    child.write("b", b"12")
    child.write("a", b"345")
    assert (folder.names(), child.names()) == (["inner"], ["a", "b"])
    assert (child.read("b"), bytes(child.map("a")), child.size("a")) == (b"12", b"345", 3)


def test_writing_again_replaces(folder: Folder) -> None:
    folder.write("a", b"old")
    folder.write("a", b"new!")
    assert (folder.read("a"), bytes(folder.map("a"))) == (b"new!", b"new!")


def test_removing_takes_folders_with_all_they_hold_and_may_be_repeated(folder: Folder) -> None:
    folder.child("inner").write("a", b"1")
    folder.write("b", b"2")
    folder.remove("inner")
    folder.remove("inner")
    assert folder.names() == ["b"]


def test_what_is_set_aside_is_not_seen(folder: Folder) -> None:
    folder.write("a", b"1")
    folder.set_aside("a")
    assert (folder.names(), folder.damaged()) == ([], [".a.damaged"])


def test_a_map_can_be_written_to_without_changing_the_file(folder: Folder) -> None:
    folder.write("a", b"123")
    folder.map("a")[0] = ord("9")
    assert folder.read("a") == bytes(folder.map("a")) == b"123"


def test_an_empty_file_is_an_empty_buffer(folder: Folder) -> None:
    folder.write("a", b"")
    assert len(folder.map("a")) == 0


def test_a_remote_file_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Folder(f"memory://{uuid.uuid4().hex}", cache=tmp_path)
    folder.write("a", b"123")
    first = bytes(folder.map("a"))
    monkeypatch.setattr(type(folder.fs), "get_file", None)
    assert bytes(folder.map("a")) == first == b"123"


@pytest.mark.parametrize(
    ("number", "expected", "message"),
    [
        (errno.ENOSPC, StoreFullError, "no room for 3 bytes"),
        (errno.EDQUOT, StoreFullError, "no room for 3 bytes"),
        (errno.EROFS, StoreReadOnlyError, "open the store with mode='read'"),
        (errno.EACCES, StoreReadOnlyError, "cannot be written to"),
    ],
)
def test_a_write_that_fails_says_why_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, expected: type[OSError], message: str
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(expected, match=message) as raised:
        Folder(tmp_path).write("a", b"123")
    assert raised.value.errno == number
    assert os.listdir(tmp_path) == []


def test_a_file_size_limit_is_a_full_disk(tmp_path: Path) -> None:
    """A limit that the kernel enforces, in a process of its own."""
    script = f"""
import resource, signal
from softs_lightning.store.errors import StoreFullError
from softs_lightning.store.folder import Folder
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
folder = Folder({str(tmp_path)!r})
folder.write("small", b"1")
try:
    folder.write("large", bytes(5000))
except StoreFullError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "no room for 5,000 bytes" in done.stdout
    assert os.listdir(tmp_path) == ["small"]


def test_a_read_only_folder_is_refused_before_anything_is_computed() -> None:
    """By the permissions of a folder, as a user who is not root."""
    place = tempfile.mkdtemp()
    script = f"""
import os
from softs_lightning.store.errors import StoreReadOnlyError
from softs_lightning.store.folder import Folder
if os.geteuid() == 0:
    os.setuid(65534)
for attempt in (Folder({place!r}).refuse_read_only, lambda: Folder({place!r}).write("a", b"1")):
    try:
        attempt()
    except StoreReadOnlyError as error:
        print(error)
"""
    os.chmod(place, 0o555)
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    finally:
        os.rmdir(place)
    assert done.stdout.count("cannot be written to (Permission denied): open the store with mode='read'") == 2


def test_leftovers_are_those_of_processes_that_are_gone(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    host = os.uname().nodename
    names = [f".a~{host}-{gone.pid}~1.tmp", f".a~{host}-{os.getpid()}~1.tmp", ".a~elsewhere-1~1.tmp"]
    for name in names:
        (tmp_path / name).touch()
    folder = Folder(tmp_path)
    assert (folder.names(), folder.leftovers()) == ([], names[:1])
    os.utime(tmp_path / names[2], (0, 0))  # another machine's, untouched for years
    assert folder.leftovers() == sorted([names[0], names[2]])


def test_free_space_is_that_of_the_disk(tmp_path: Path) -> None:
    free = Folder(tmp_path / "not" / "there" / "yet").free()
    assert free is not None
    assert 0 < free <= os.statvfs(tmp_path).f_blocks * os.statvfs(tmp_path).f_frsize
    assert Folder("memory://x").free() is None
