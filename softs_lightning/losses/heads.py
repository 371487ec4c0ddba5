"""Vocabulary projections: what lies between a language model's last hidden states and its logits."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn

__all__ = ["Head", "find_head", "head_of", "head_settings"]

# Fields of transformers' configs that change the logits after the head, one way or the other by model.
_SCALES = ("logits_scaling", "lm_head_multiplier", "output_multiplier")


@dataclass(frozen=True)
class Head:
    """A linear head and what the model does to its result.

    ``logits = cap(scale · (hidden @ weight.T + bias))`` with ``cap(x) = softcap · tanh(x / softcap)``.

    Attributes:
        weight: ``[vocabulary, features]``.
        bias: ``[vocabulary]`` or ``None``.
        softcap: Gemma's bound on the logits, or ``None``.
        scale: multiplies the logits before the cap (Cohere).
    """

    weight: Tensor
    bias: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0

    def __post_init__(self) -> None:
        if self.weight.ndim != 2 or not self.weight.is_floating_point():
            raise ValueError(
                f"a head's weight is a floating-point [vocabulary, features], got {self.weight.dtype} "
                f"{tuple(self.weight.shape)}; quantised heads must be dequantised first"
            )
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise ValueError(f"bias {tuple(self.bias.shape)} for a weight {tuple(self.weight.shape)}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap must be above 0, got {self.softcap!r}")

    @property
    def vocabulary(self) -> int:
        """How many logits the head gives."""
        return self.weight.shape[0]

    def cut(self, vocabulary: int) -> Head:
        """The same head for the first entries of its vocabulary only."""
        if vocabulary == self.vocabulary:
            return self
        bias = None if self.bias is None else self.bias[:vocabulary]
        return replace(self, weight=self.weight[:vocabulary], bias=bias)

    def to(self, dtype: torch.dtype) -> Head:
        """The same head in another dtype."""
        bias = None if self.bias is None else self.bias.to(dtype)
        return replace(self, weight=self.weight.to(dtype), bias=bias)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits of ``hidden``, raised to float32 at least.

        The product itself is taken in the wider dtype of the two operands, as the model itself does.
        """
        dtype = torch.promote_types(hidden.dtype, self.weight.dtype)
        bias = None if self.bias is None else self.bias.to(dtype)
        logits = nn.functional.linear(hidden.to(dtype), self.weight.to(dtype), bias)
        logits = logits.to(torch.promote_types(dtype, torch.float32))
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def find_head(model: nn.Module, name: str | None = None) -> tuple[nn.Module, Any]:
    """The output head of a model and the config that goes with it (or ``None``).

    With a name, that submodule; without one, the only ``get_output_embeddings()`` in the model.

    Raises:
        KeyError: for an unknown name, with the nearest ones.
        ValueError: where no head, or more than one, was found.
    """
    owners = [module for module in model.modules() if hasattr(module, "get_output_embeddings")]
    if name is not None:
        modules = dict(model.named_modules())
        if name not in modules:
            near = difflib.get_close_matches(name, modules, n=3, cutoff=0.4)
            raise KeyError(
                f"no module {name!r} in {type(model).__name__}; nearest: {', '.join(near) or 'none'}"
            )
        return modules[name], getattr(owners[0], "config", None) if owners else None
    found: dict[int, tuple[nn.Module, nn.Module]] = {}
    for owner in owners:
        head = cast(Any, owner).get_output_embeddings()
        if head is not None:
            found.setdefault(id(head), (head, owner))
    if len(found) != 1:
        linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        raise ValueError(
            f"{len(found)} output heads found in {type(model).__name__} through get_output_embeddings(); name "
            f"the one that is meant; linear layers: {', '.join(linears[-5:]) or 'none'}"
        )
    head, owner = next(iter(found.values()))
    return head, getattr(owner, "config", None)


def head_settings(config: Any, softcap: float | None, scale: float | None) -> tuple[float | None, float]:
    """Softcap and scale: as given, or else as the model's config says."""
    if hasattr(config, "get_text_config"):
        config = config.get_text_config()
    if softcap is None:
        softcap = getattr(config, "final_logit_softcapping", None)
    if scale is None:
        scale = getattr(config, "logit_scale", None)
        for field in _SCALES:
            value = getattr(config, field, None)
            if value not in (None, 1):
                raise ValueError(
                    f"{type(config).__name__}.{field} = {value!r} changes the logits after the head: say how "
                    f"by a scale ({value!r} where the model multiplies, 1 / {value!r} where it divides)"
                )
    return softcap, 1.0 if scale is None else float(scale)


def head_of(module: nn.Module, softcap: float | None = None, scale: float = 1.0) -> Head:
    """The :class:`Head` that a linear module is now; sharded parameters are gathered.

    Raises:
        TypeError: for a module that is more than its ``weight`` and ``bias`` (adapters, quantisation).
    """
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if not isinstance(weight, Tensor) or any(True for _ in module.children()):
        raise TypeError(
            f"a head must be a plain linear module, got {type(module).__name__}; merge adapters into it, or use "
            "the loss on the logits instead"
        )
    return Head(_whole(weight), None if bias is None else _whole(bias), softcap, scale)


def _whole(parameter: Tensor) -> Tensor:
    """An FSDP2 shard gathered; its gradient is averaged over ranks as FSDP averages all others."""
    if not hasattr(parameter, "full_tensor"):
        return parameter
    from torch.distributed.tensor import DTensor, Partial

    assert isinstance(parameter, DTensor)
    placements = [Partial("avg")] * parameter.device_mesh.ndim
    gathered: Tensor = parameter.full_tensor(grad_placements=placements)
    return gathered
