"""Products on disk: run the teacher once, train many times.

In the order of reading: :mod:`.folder` a place for files, :mod:`.encoding` and :mod:`.topk` how values
are kept, :mod:`.shard` a file of samples, :mod:`.column` all samples of one product,
:mod:`.store` all columns; :mod:`.fingerprint`, :mod:`.samples` and :mod:`.numbered` who is who;
:mod:`.following` ids on their way to the training step; :mod:`.tokens` padding; :mod:`.alone` batches whose samples
look at each other; :mod:`.buffers` memory for batches; :mod:`.rows` from a batch to rows and back; :mod:`.teacher` the
teacher that looks things up; :mod:`.prefetch`, :mod:`.build`, :mod:`.ranks`, :mod:`.upkeep`, :mod:`.compacting` and
:mod:`.commands` what a user does with a store.

Names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softs_lightning.store.build import Built
    from softs_lightning.store.encoding import Cast, Exact, Int8
    from softs_lightning.store.errors import (
        DamagedShardError,
        MissingSampleError,
        SampleChangedError,
        StoreError,
        StoreFormatError,
        StoreFullError,
        StoreMismatchError,
        StoreReadOnlyError,
    )
    from softs_lightning.store.fingerprint import feed_fingerprint, teacher_fingerprint
    from softs_lightning.store.numbered import Numbered, refuse_random
    from softs_lightning.store.prefetch import Prefetch
    from softs_lightning.store.store import ProductStore
    from softs_lightning.store.teacher import StoredTeacher
    from softs_lightning.store.tokens import Kept
    from softs_lightning.store.topk import TopK

_HOMES = {
    "Built": "build",
    "Cast": "encoding",
    "DamagedShardError": "errors",
    "Exact": "encoding",
    "Int8": "encoding",
    "Kept": "tokens",
    "MissingSampleError": "errors",
    "Numbered": "numbered",
    "Prefetch": "prefetch",
    "ProductStore": "store",
    "SampleChangedError": "errors",
    "StoreError": "errors",
    "StoreFormatError": "errors",
    "StoreFullError": "errors",
    "StoreMismatchError": "errors",
    "StoreReadOnlyError": "errors",
    "StoredTeacher": "teacher",
    "TopK": "topk",
    "feed_fingerprint": "fingerprint",
    "refuse_random": "numbered",
    "teacher_fingerprint": "fingerprint",
}

__all__ = [
    "Built",
    "Cast",
    "DamagedShardError",
    "Exact",
    "Int8",
    "Kept",
    "MissingSampleError",
    "Numbered",
    "Prefetch",
    "ProductStore",
    "SampleChangedError",
    "StoreError",
    "StoreFormatError",
    "StoreFullError",
    "StoreMismatchError",
    "StoreReadOnlyError",
    "StoredTeacher",
    "TopK",
    "feed_fingerprint",
    "refuse_random",
    "teacher_fingerprint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
