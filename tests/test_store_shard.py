"""Shards: readable by the safetensors library, and never wrong when damaged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from softs_lightning.store.errors import DamagedShardError, StoreFormatError
from softs_lightning.store.shard import Row, Shard, pack

FACTS = {"dtype": "float32", "dims": [0]}


def rows() -> list[Row]:
    generator = torch.Generator().manual_seed(1)
    lengths = [3, 0, 5, 1]
    return [
        Row(
            id=f"sample {i} ü",
            digest=bytes([i] * 16),
            shape=(length, 2),
            parts={
                "values": torch.randn(2 * length, generator=generator),
                "scale": torch.randn(length, generator=generator),
            },
            error={"max_abs": float(i)},
        )
        for i, length in enumerate(lengths)
    ]


def data() -> bytearray:
    return bytearray(pack(rows(), FACTS))


def read_all(buffer: bytearray) -> list[Row]:
    shard = Shard(buffer, "here")
    return [Row(id, shard.digest(i), shard.shape(i), shard.parts(i)) for i, id in enumerate(shard.ids)]


def test_what_is_packed_is_read() -> None:
    for ours, theirs in zip(read_all(data()), rows(), strict=True):
        assert (ours.id, ours.digest, ours.shape) == (theirs.id, theirs.digest, theirs.shape)
        assert ours.parts.keys() == theirs.parts.keys()
        assert all(torch.equal(ours.parts[name], part) for name, part in theirs.parts.items())
    shard = Shard(data(), "here")
    assert (shard.facts, shard.error, len(shard)) == (FACTS, {"max_abs": 3.0}, 4)


def test_the_safetensors_library_reads_it_without_us(tmp_path: Path) -> None:
    (tmp_path / "shard.safetensors").write_bytes(data())
    with safe_open(tmp_path / "shard.safetensors", framework="np") as file:
        ids = json.loads(file.metadata()["ids"])
        offsets, values, shapes = (file.get_tensor(n) for n in ("values.offsets", "values", "shapes"))
    assert ids == [row.id for row in rows()]
    for i, row in enumerate(rows()):
        own = values[offsets[i] : offsets[i + 1]].reshape(shapes[i])
        np.testing.assert_array_equal(own, row.parts["values"].reshape(row.shape).numpy())


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint16, torch.bool]
)
def test_every_type_survives(dtype: torch.dtype) -> None:
    part = torch.arange(6).to(dtype)
    (row,) = read_all(bytearray(pack([Row("a", bytes(16), (6,), {"values": part})], {})))
    assert row.parts["values"].dtype == dtype
    assert torch.equal(row.parts["values"], part)


def test_activations_without_dimensions_are_kept() -> None:
    scalars = [Row(str(i), bytes(16), (), {"values": torch.tensor([float(i)])}) for i in range(3)]
    assert [row.shape for row in read_all(bytearray(pack(scalars, {})))] == [(), (), ()]


def test_reading_copies_nothing() -> None:
    buffer = data()
    shard = Shard(buffer, "here")
    first, again = shard.parts(0)["values"], shard.parts(0)["values"]
    assert first.data_ptr() == again.data_ptr()
    start = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    assert start < first.data_ptr() < start + len(buffer)


@pytest.mark.parametrize("length", [0, 4, 8, 100, -1, -8])
def test_a_truncated_shard_is_refused(length: int) -> None:
    with pytest.raises(DamagedShardError, match=r"here is damaged: .*--repair"):
        Shard(data()[:length], "here")


def test_a_shard_with_something_after_its_end_is_refused() -> None:
    with pytest.raises(DamagedShardError, match="its header says"):
        Shard(data() + b"\0", "here")


def test_no_altered_byte_gives_a_wrong_number() -> None:
    """Every byte of the file, one after another."""
    whole, expected = data(), [row.parts for row in rows()]
    for position in range(len(whole)):
        altered = bytearray(whole)
        altered[position] ^= 0x10
        try:
            read = read_all(altered)
        except (DamagedShardError, StoreFormatError):
            continue
        # What is not noticed must not matter: blanks in the header, say.
        assert [row.id for row in read] == [row.id for row in rows()]
        for ours, theirs in zip(read, expected, strict=True):
            assert all(torch.equal(ours[name], part) for name, part in theirs.items()), position


def test_another_format_is_refused() -> None:
    altered = data().replace(b'"softs_products":"1"', b'"softs_products":"7"')
    with pytest.raises(
        StoreFormatError, match="is of format 7, and this version of softs_lightning reads format 1"
    ):
        Shard(altered, "here")


def test_samples_of_unlike_dimensions_do_not_share_a_shard() -> None:
    unlike = [*rows(), Row("x", bytes(16), (1, 1, 1), {"values": torch.ones(1), "scale": torch.ones(1)})]
    with pytest.raises(ValueError, match="differ in their number of dimensions"):
        pack(unlike, FACTS)
