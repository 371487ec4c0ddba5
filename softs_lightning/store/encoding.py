"""How a product is kept: the encodings, what each costs in bytes and what it loses.

An encoding turns one sample's activation into named flat tensors (its *parts*) and back. Each
measures its own error on every value it writes; the store keeps that figure beside the data.

==================  =====================================================================
``exact``           as the teacher gave it
``fp32 bf16 fp16``  rounded to that type
``int8``            a byte a value and one scale for each vector along the last dimension
``top64-fp16``      the 64 largest log-probabilities and the mass of the rest, see :mod:`.topk`
==================  =====================================================================
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Cast", "Encoding", "Exact", "Int8", "Parts", "encoding"]

Parts = dict[str, Tensor]
"""Flat tensors by name: what one sample's activation becomes."""

_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Encoding(Protocol):
    """What the store asks of an encoding."""

    @property
    def name(self) -> str:
        """The text that :func:`encoding` reads back; two encodings of one name write the same bytes."""
        ...

    def encode(self, value: Tensor) -> Parts:
        """One sample's activation as flat tensors. Raises ``ValueError`` for values it cannot hold."""
        ...

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        """The activation in `shape`; the caller casts it to the type it had."""
        ...

    def error(self, value: Tensor, decoded: Tensor) -> dict[str, float]:
        """What was lost, as named figures whose maximum over samples is the bound."""
        ...


@dataclass(frozen=True)
class Exact:
    """Every bit as the teacher gave it.

    >>> import torch
    >>> x = torch.randn(3, 4, dtype=torch.bfloat16)
    >>> torch.equal(Exact().decode(Exact().encode(x), (3, 4)), x)
    True
    """

    name: str = "exact"

    def encode(self, value: Tensor) -> Parts:
        return {"values": value.reshape(-1)}

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        return parts["values"].reshape(shape)

    def error(self, value: Tensor, decoded: Tensor) -> dict[str, float]:
        return {"max_abs": 0.0}


@dataclass(frozen=True)
class Cast:
    """Rounded to a floating point type: ``"fp32"``, ``"bf16"`` or ``"fp16"``.

    Raises:
        ValueError: for a finite value that becomes infinite.

    >>> import torch
    >>> Cast("fp16").encode(torch.tensor([70000.0]))
    Traceback (most recent call last):
    ValueError: 70000 is too large for fp16 (largest: 65504): use bf16 or int8
    """

    name: str

    def __post_init__(self) -> None:
        if self.name not in _TYPES:
            raise ValueError(f"there is no type {self.name!r}: choose one of {', '.join(_TYPES)}")

    def encode(self, value: Tensor) -> Parts:
        _refuse_integers(value, self.name)
        dtype = _TYPES[self.name]
        values = value.reshape(-1).to(dtype)
        overflown = torch.isinf(values) & torch.isfinite(value.reshape(-1))
        if bool(overflown.any()):
            raise ValueError(
                f"{value.reshape(-1)[overflown].abs().max().item():g} is too large for {self.name} "
                f"(largest: {torch.finfo(dtype).max:g}): use bf16 or int8"
            )
        return {"values": values}

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        return parts["values"].reshape(shape)

    def error(self, value: Tensor, decoded: Tensor) -> dict[str, float]:
        return {"max_abs": largest_difference(value, decoded)}


@dataclass(frozen=True)
class Int8:
    """One byte a value: each vector along the last dimension is divided by its largest magnitude over 127.

    The error of a value is at most half its vector's scale.

    >>> import torch
    >>> x = torch.tensor([[0.0, 1.27, -0.634], [0.0, 0.0, 0.0]])
    >>> Int8().decode(Int8().encode(x), (2, 3))
    tensor([[ 0.0000,  1.2700, -0.6300],
            [ 0.0000,  0.0000,  0.0000]])
    """

    name: str = "int8"

    def encode(self, value: Tensor) -> Parts:
        _refuse_integers(value, self.name)
        if not bool(torch.isfinite(value).all()):
            raise ValueError("int8 cannot hold infinities or NaN: use exact, or top-k for masked logits")
        vectors = value.reshape(-1, value.shape[-1] if value.ndim else 1).to(torch.float32)
        scale = vectors.abs().amax(dim=1) / 127
        # A vector of zeros has scale zero; what it is divided by does not matter.
        codes = torch.round(vectors / torch.where(scale > 0, scale, torch.ones_like(scale))[:, None])
        return {"values": codes.clamp(-127, 127).to(torch.int8).reshape(-1), "scale": scale}

    def decode(self, parts: Mapping[str, Tensor], shape: tuple[int, ...]) -> Tensor:
        vectors = parts["values"].reshape(-1, shape[-1] if shape else 1).to(torch.float32)
        return (vectors * parts["scale"][:, None]).reshape(shape)

    def error(self, value: Tensor, decoded: Tensor) -> dict[str, float]:
        return {"max_abs": largest_difference(value, decoded)}


def largest_difference(value: Tensor, decoded: Tensor) -> float:
    """The largest absolute difference, in float64; equal infinities do not differ, nor NaN from NaN."""
    if not value.numel():
        return 0.0
    ours, theirs = decoded.to(torch.float64), value.to(torch.float64)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return float(torch.where(same, torch.zeros_like(ours), (ours - theirs).abs()).max())


def _refuse_integers(value: Tensor, name: str) -> None:
    if not value.is_floating_point():
        raise ValueError(
            f"{name} is for floating point activations, and this one is {value.dtype}: use exact"
        )


def encoding(name: str | Encoding) -> Encoding:
    """The encoding of this name.

    Args:
        name: ``exact``, ``fp32``, ``bf16``, ``fp16``, ``int8``, ``top64-fp16``, ``mass0.99-max64-fp16``; an
            encoding is returned as it is.

    Raises:
        ValueError: for any other name.
        TypeError: for what is no name.

    >>> encoding("top64-fp32").k
    64
    """
    if not isinstance(name, str):
        if not isinstance(getattr(name, "name", None), str):
            raise TypeError(f"an encoding is a name such as 'fp16', got {name!r}")
        return name
    if name in _TYPES:
        return Cast(name)
    if name in ("exact", "int8"):
        return Exact() if name == "exact" else Int8()
    from softs_lightning.store.topk import TopK

    if match := re.fullmatch(r"top(\d+)(?:-(fp16|fp32))?", name):
        return TopK(int(match[1]), values=match[2] or "fp16")
    if match := re.fullmatch(r"mass(0?\.\d+)-max(\d+)(?:-(fp16|fp32))?", name):
        return TopK(int(match[2]), mass=float(match[1]), values=match[3] or "fp16")
    raise ValueError(
        f"there is no encoding {name!r}: choose exact, fp32, bf16, fp16, int8, top64-fp16 (the 64 largest "
        "log-probabilities) or mass0.99-max64-fp16 (as many as hold 0.99 of the mass, at most 64)"
    )
