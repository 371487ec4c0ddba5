"""Knowledge distillation as a PyTorch Lightning callback.

The names below are loaded when they are first used: importing the package imports neither torch
nor lightning, patches nothing and starts nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softs_lightning.callback import DistillationCallback
    from softs_lightning.catcher import ModelIOCatcher
    from softs_lightning.ema import EMATeacher
    from softs_lightning.export import save_student
    from softs_lightning.losses import check_loss
    from softs_lightning.pairing import Pair
    from softs_lightning.pretrained import Pretrained
    from softs_lightning.product import ProductSpec, parse_io_spec
    from softs_lightning.store import ProductStore, StoredTeacher
    from softs_lightning.surgery import from_teacher
    from softs_lightning.teacher import Teacher
    from softs_lightning.transfer import transfer_to_device

__version__ = "0.1.0"

__all__ = [
    "DistillationCallback",
    "EMATeacher",
    "ModelIOCatcher",
    "Pair",
    "Pretrained",
    "ProductSpec",
    "ProductStore",
    "StoredTeacher",
    "Teacher",
    "__version__",
    "check_loss",
    "from_teacher",
    "parse_io_spec",
    "save_student",
    "transfer_to_device",
]

_HOMES = {
    "DistillationCallback": "callback",
    "EMATeacher": "ema",
    "ModelIOCatcher": "catcher",
    "Pair": "pairing",
    "Pretrained": "pretrained",
    "ProductSpec": "product",
    "ProductStore": "store",
    "StoredTeacher": "store",
    "Teacher": "teacher",
    "check_loss": "losses",
    "from_teacher": "surgery",
    "parse_io_spec": "product",
    "save_student": "export",
    "transfer_to_device": "transfer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
