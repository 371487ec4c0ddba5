"""What can go wrong with a store, each as an exception of its own."""

from __future__ import annotations

__all__ = [
    "DamagedShardError",
    "MissingSampleError",
    "SampleChangedError",
    "StoreError",
    "StoreFormatError",
    "StoreFullError",
    "StoreMismatchError",
    "StoreReadOnlyError",
]


class StoreError(RuntimeError):
    """A product store cannot do what was asked; the message says what stands there and what to do."""


class StoreFormatError(StoreError):
    """The folder is no store, or one of another format version."""


class StoreMismatchError(StoreError):
    """The store holds products of another teacher, product, encoding or feed than the one asked for."""


class MissingSampleError(StoreError, LookupError):
    """A sample was asked for that the store does not hold."""


class SampleChangedError(StoreError):
    """A sample under a known id is not what it was when its products were written."""


class DamagedShardError(StoreError):
    """A shard is truncated, or its content does not have the checksum it was written with."""


class StoreFullError(OSError, StoreError):
    """The disk, or the quota on it, is full."""


class StoreReadOnlyError(PermissionError, StoreError):
    """The folder cannot be written to."""
