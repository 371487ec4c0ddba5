"""A shard: some samples' products in one safetensors file, which anyone can read.

======================  ==============  =====================================================
tensor                  shape           what
======================  ==============  =====================================================
``<part>``              [values]        the samples' values one after another, unpadded
``<part>.offsets``      [samples + 1]   where each sample's values begin
``shapes``              [samples, dims] the shape of each sample's activation
``digests``             [samples, 16]   BLAKE2 of what the teacher was called with
``checksums``           [samples]       CRC-32 of the sample's bytes in all parts, in the parts' order
======================  ==============  =====================================================

The file's metadata holds ``ids`` (a JSON list, the samples in order), what the column is, the
error that was measured, and ``index``, a BLAKE2 digest of all but the values, so that a shard is
checked when it is opened without reading the values.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from softs_lightning.store.encoding import Parts
from softs_lightning.store.errors import DamagedShardError, StoreFormatError

__all__ = ["FORMAT", "Row", "Shard", "pack"]

FORMAT = 1
"""The version of the format on disk; it changes when older versions could not read it."""

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}
_INDEX = ("shapes", "digests", "checksums")


@dataclass(frozen=True)
class Row:
    """One sample's product, encoded.

    Attributes:
        id: the sample's.
        digest: 16 bytes, of what the teacher was called with.
        shape: of the activation, before encoding.
        parts: flat tensors.
        error: what the encoding lost.
    """

    id: str
    digest: bytes
    shape: tuple[int, ...]
    parts: Parts
    error: Mapping[str, float] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self.parts.values()) + 64


def pack(rows: Sequence[Row], facts: Mapping[str, Any]) -> bytes:
    """The bytes of a shard that holds `rows`.

    Args:
        rows: of one column; at least one, with distinct ids.
        facts: what every shard of the column must agree on; plain JSON.

    Raises:
        ValueError: when the rows' activations differ in their number of dimensions.
    """
    if len({len(row.shape) for row in rows}) > 1:
        raise ValueError(
            f"activations of one product differ in their number of dimensions: {rows[0].shape} and others"
        )
    names = sorted(rows[0].parts)
    tensors: dict[str, Tensor] = {}
    for name in names:
        lengths = torch.tensor([row.parts[name].numel() for row in rows])
        tensors[name] = torch.cat([row.parts[name].contiguous() for row in rows])
        tensors[f"{name}.offsets"] = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tensors["shapes"] = torch.tensor([row.shape for row in rows], dtype=torch.int64).reshape(
        len(rows), len(rows[0].shape)
    )
    digests = bytearray(b"".join(row.digest for row in rows))
    tensors["digests"] = torch.frombuffer(digests, dtype=torch.uint8).reshape(len(rows), -1)
    tensors["checksums"] = torch.tensor([_checksum([row.parts[name] for name in names]) for row in rows])
    error: dict[str, float] = {}
    for row in rows:
        for name, value in row.error.items():
            error[name] = max(value, error.get(name, value))
    metadata = {
        "softs_products": str(FORMAT),
        "ids": json.dumps([row.id for row in rows]),  # in ASCII, which any text can be written in
        "parts": json.dumps(names),
        "facts": json.dumps(dict(facts), sort_keys=True),
        "error": json.dumps(error, sort_keys=True),
    }
    metadata["index"] = _index_digest(metadata, tensors)
    return save(tensors, metadata)


def _checksum(parts: Sequence[Tensor]) -> int:
    crc = 0
    for part in parts:
        crc = zlib.crc32(part.contiguous().view(torch.uint8).numpy().data, crc)
    return crc


def _index_digest(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for key in sorted(set(metadata) - {"index"}):
        digest.update(f"{key}={metadata[key]}\n".encode())
    for name in sorted(tensors):
        digest.update(f"{name}:{tensors[name].dtype}:{list(tensors[name].shape)}\n".encode())
        if name in _INDEX or name.endswith(".offsets"):
            digest.update(tensors[name].contiguous().numpy().tobytes())
    return digest.hexdigest()


class Shard:
    """A shard opened for reading: its index checked, its values untouched.

    Args:
        buffer: the file's bytes, most often a memory map.
        where: what it is called in messages.

    Raises:
        DamagedShardError: when the bytes are not those that were written.
        StoreFormatError: when another version of the format wrote them.

    >>> row = Row("a", bytes(16), (2, 2), {"values": torch.arange(4.0)})
    >>> shard = Shard(bytearray(pack([row], {"product": "outputs[0]"})), "example")
    >>> shard.ids, shard.shape(0), shard.parts(0)["values"]
    (['a'], (2, 2), tensor([0., 1., 2., 3.]))
    """

    def __init__(self, buffer: Any, where: str) -> None:
        self.where = where
        try:
            metadata, self._tensors = _parse(buffer)
        except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, struct.error) as error:
            raise DamagedShardError(
                self._damage(f"it is truncated or no safetensors file ({error})")
            ) from None
        version = metadata.get("softs_products", "none")
        if version != str(FORMAT):
            raise StoreFormatError(
                f"{where} is of format {version}, and this version of softs_lightning reads format {FORMAT}"
            )
        if metadata.get("index") != _index_digest(metadata, self._tensors):
            raise DamagedShardError(self._damage("its index is not what was written"))
        self.ids: list[str] = json.loads(metadata["ids"])
        self.names: list[str] = json.loads(metadata["parts"])
        self.facts: dict[str, Any] = json.loads(metadata["facts"])
        self.error: dict[str, float] = json.loads(metadata["error"])
        self._shapes: list[list[int]] = self._tensors["shapes"].tolist()
        self._checksums: list[int] = self._tensors["checksums"].tolist()
        self._offsets = {name: self._tensors[f"{name}.offsets"].tolist() for name in self.names}
        self._digests = self._tensors["digests"].numpy().tobytes()
        self._checked = bytearray(len(self.ids))
        self.nbytes = len(buffer)

    def __len__(self) -> int:
        return len(self.ids)

    def _damage(self, what: str) -> str:
        return (
            f"{self.where} is damaged: {what}. `softs-distill store verify --repair` sets it aside, and the samples in "
            "it are computed again by the next run that has the teacher"
        )

    @property
    def values_nbytes(self) -> int:
        """Bytes of the encoded values, without the index."""
        return sum(self._tensors[n].numel() * self._tensors[n].element_size() for n in self.names)

    def shape(self, index: int) -> tuple[int, ...]:
        return tuple(self._shapes[index])

    def digest(self, index: int) -> bytes:
        return self._digests[16 * index : 16 * index + 16]

    def parts(self, index: int, *, recheck: bool = False) -> Parts:
        """A sample's parts, as views of the file.

        The checksum is compared when the sample is first read, and again with `recheck`.

        Raises:
            DamagedShardError: when the bytes are not those that were written.
        """
        views = {
            name: self._tensors[name][offsets[index] : offsets[index + 1]]
            for name, offsets in self._offsets.items()
        }
        if recheck or not self._checked[index]:
            if _checksum([views[name] for name in self.names]) != self._checksums[index]:
                raise DamagedShardError(
                    self._damage(f"the values of sample {self.ids[index]!r} were altered")
                )
            self._checked[index] = 1
        return views


def _parse(buffer: Any) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Read a safetensors file without copying its tensors."""
    view = memoryview(buffer)
    (length,) = struct.unpack_from("<Q", view)
    if length > len(view) - 8:
        raise ValueError("the header runs over the end of the file")
    header = json.loads(bytes(view[8 : 8 + length]))
    metadata = header.pop("__metadata__")
    start, end = 8 + length, 8 + length
    tensors: dict[str, Tensor] = {}
    for name, entry in header.items():
        dtype, (first, last) = _DTYPES[entry["dtype"]], entry["data_offsets"]
        count = (last - first) // dtype.itemsize
        if start + last > len(view):
            raise ValueError(f"the tensor {name!r} runs over the end of the file")
        flat = (
            torch.frombuffer(buffer, dtype=dtype, count=count, offset=start + first)
            if count
            else torch.empty(0, dtype=dtype)
        )
        tensors[name] = flat.reshape(entry["shape"])
        end = max(end, start + last)
    if end != len(view):
        raise ValueError(f"the file has {len(view):,} bytes, its header says {end:,}")
    return metadata, tensors
