"""File systems behind fsspec other than memory: archives, a server over HTTP, one that caches, one without maps."""

from __future__ import annotations

import functools
import http.server
import itertools
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from softs_lightning.store import ProductStore, StoredTeacher, StoreReadOnlyError
from softs_lightning.store.compacting import compact
from softs_lightning.store.folder import Folder
from softs_lightning.store.upkeep import clear, verify
from tests.test_store_build import BATCHES, SPEC, build, loader, net


class Bucket(MemoryFileSystem):
    """As an object store: no folders, no renaming, no appending, only whole objects put and got."""

    protocol = "bucket"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    puts = itertools.count()

    def mv(self, *args: Any, **options: Any) -> None:
        self.copy(args[0], args[1])
        self.rm(args[0])

    def pipe_file(self, path: str, value: bytes, **options: Any) -> None:
        next(self.puts)
        super().pipe_file(path, value)


fsspec.register_implementation("bucket", Bucket, clobber=True)


@pytest.fixture
def local(tmp_path: Path) -> Path:
    build(tmp_path / "store", shard_nbytes=1)
    return tmp_path / "store"


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def served(local: Path) -> Iterator[str]:
    """The folder over HTTP, from this machine to itself."""
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(_Quiet, directory=str(local))
    )
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def assert_read(url: str, cache: Path) -> None:
    reader = StoredTeacher(None, url, cache=cache)
    reader.place()
    for (x,) in loader():
        hidden = net()[0](x)
        for ours, theirs in zip(reader.supply([x], SPEC).select(), (hidden, hidden.tanh()), strict=True):
            assert torch.equal(ours, theirs)
    reader.release()


def test_an_archive_is_read_as_it_stands(local: Path, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", local)
    assert_read(f"zip://::file://{archive}", tmp_path / "cache")


def test_a_folder_inside_an_archive_is_read(local: Path, tmp_path: Path) -> None:
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", local.parent, local.name)
    assert_read(f"zip://{local.name}::file://{archive}", tmp_path / "cache")


def test_a_local_folder_named_by_an_address_is_read_and_written(local: Path, tmp_path: Path) -> None:
    assert_read(f"file://{local}", tmp_path / "cache")
    assert build(f"file://{local}").computed == 0  # type: ignore[arg-type]
    assert not (tmp_path / "cache").exists()  # it is mapped where it lies


def test_a_caching_file_system_in_front_is_read(local: Path, tmp_path: Path) -> None:
    assert_read(f"simplecache::file://{local}", tmp_path / "cache")


def test_a_store_is_read_over_http(served: str, tmp_path: Path) -> None:
    assert_read(served, tmp_path / "cache")


@pytest.mark.parametrize("kind", ["zip", "http"])
def test_what_can_only_be_read_says_so_before_anything_is_computed(
    local: Path, served: str, tmp_path: Path, kind: str
) -> None:
    archive = shutil.make_archive(str(tmp_path / "packed"), "zip", local)
    url = served if kind == "http" else f"zip://::file://{archive}"
    before = Path(archive).read_bytes()
    with pytest.raises(StoreReadOnlyError, match=r"cannot be written to .*: open the store with mode='read'"):
        StoredTeacher(net(), url, cache=tmp_path / "cache").place()
    with pytest.raises(StoreReadOnlyError):
        compact(url)
    assert Path(archive).read_bytes() == before


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    return f"bucket://{tmp_path.name}/store"


def test_a_bucket_is_filled_read_merged_and_cleared(bucket: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"shard_nbytes": 1, "cache": tmp_path / "writer"}
    assert build(bucket, **options).computed == 4 * BATCHES  # type: ignore[arg-type]
    assert_read(bucket, tmp_path / "reader")
    assert verify(bucket) == []
    assert [(d.before, d.after) for d in compact(bucket)] == [(BATCHES, 1)] * 2
    assert_read(bucket, tmp_path / "another")
    assert len(clear(bucket, ["outputs[0]"])) == 1
    assert [column.key.product for column in ProductStore(bucket).columns()] == ["outputs[0]"]


def test_a_bucket_gets_whole_objects_only(bucket: str, tmp_path: Path) -> None:
    before = next(Bucket.puts)
    Folder(bucket, cache=tmp_path).write("a", b"123")
    assert next(Bucket.puts) == before + 2


def test_an_upload_that_fails_leaves_a_store_to_go_on_from(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()
    real = Bucket.pipe_file

    def failing(self: Any, path: str, value: bytes, **options: Any) -> None:
        if next(calls) == 4:
            raise ConnectionError("the network is down")
        real(self, path, value, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Bucket, "pipe_file", failing)
        with pytest.raises(ConnectionError):
            build(bucket, shard_nbytes=1, cache=tmp_path)  # type: ignore[arg-type]
    build(bucket, cache=tmp_path)  # type: ignore[arg-type]
    assert_read(bucket, tmp_path / "reader")
