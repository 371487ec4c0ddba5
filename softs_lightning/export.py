"""Leaving with the student: files that need nothing of this package."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["save_student"]


def save_student(module: nn.Module, path: str | Path) -> Path:
    """Write a student's weights, as its own class would, without any trace of the distillation.

    Args:
        module: the LightningModule or any part of it, during a fit or after.
        path: ends in ``.pt``, ``.pth`` or ``.ckpt`` for a file that ``torch.load`` reads as a plain
            ``state_dict``, in ``.safetensors`` for one of that format; anything else is a directory
            for ``save_pretrained``, which the module must have (a transformers model). The rule is the
            same for all: weights and nothing else. A checkpoint of Lightning, which
            ``load_from_checkpoint`` reads, is written by ``trainer.save_checkpoint``; a ``.ckpt`` of
            this function is for ``module.load_state_dict(torch.load(path))``.

    Returns:
        the path. The file is complete or not there: it is written beside its place and moved.

    Raises:
        TypeError: for what is no module, such as a Trainer.
        ValueError: for a directory and a module without ``save_pretrained``, naming its parts that have it; for a
            state that is not tensors alone and a ``.safetensors`` file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     saved = save_student(nn.Linear(2, 1), Path(folder) / "student.pt")
    ...     sorted(torch.load(saved, weights_only=True))
    ['bias', 'weight']
    """
    _refuse_others(module)
    path = Path(path)
    inner = getattr(module, "_orig_mod", module)
    module = inner if isinstance(inner, nn.Module) else module
    if path.suffix in (".pt", ".pth", ".ckpt"):
        _write(path, lambda file: torch.save(_plain_state(module), file))
    elif path.suffix == ".safetensors":
        from safetensors.torch import save_file

        plain = _plain_state(module)
        others = [name for name, value in plain.items() if not isinstance(value, Tensor)]
        if others:
            raise ValueError(
                f"a .safetensors file holds tensors alone, and {', '.join(map(repr, others[:4]))} of the state_dict of "
                f"{type(module).__name__} is none: name a file that ends in .pt or .ckpt"
            )
        state = {name: tensor.contiguous().clone() for name, tensor in plain.items()}
        _write(path, lambda file: save_file(state, file))
    else:
        _save_pretrained(module, path)
    return path


def _refuse_others(given: Any) -> None:
    if not isinstance(given, nn.Module):
        own = getattr(given, "lightning_module", None)
        hint = ": pass its lightning_module" if isinstance(own, nn.Module) else ""
        raise TypeError(f"save_student saves a torch.nn.Module, and was given {type(given).__name__}{hint}")


def _plain_state(module: nn.Module) -> dict[str, Any]:
    """The ``state_dict`` on the CPU, under the names that it has without ``torch.compile``."""
    return {
        ".".join(part for part in name.split(".") if part != "_orig_mod"): (
            value.detach().cpu() if isinstance(value, Tensor) else value
        )
        for name, value in module.state_dict().items()
    }


def _write(path: Path, save: Callable[[Path], Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save(beside)
        beside.replace(path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise


def _save_pretrained(module: nn.Module, path: Path) -> None:
    save: Any = getattr(module, "save_pretrained", None)
    if save is None:
        parts = [name for name, part in module.named_modules() if hasattr(part, "save_pretrained")]
        have = f"its {', '.join(map(repr, parts[:4]))} has" if parts else "no part of it has either"
        raise ValueError(
            f"{str(path)!r} names a directory, and {type(module).__name__} has no save_pretrained ({have}): pass such "
            "a part, or a file name that ends in .pt, .ckpt or .safetensors"
        )
    compiled = any("_orig_mod" in name for name, _ in module.named_modules())
    save(path, state_dict=_plain_state(module) if compiled else None)
