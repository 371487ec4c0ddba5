"""Proofs on the first batch: that each term can train the student, and that nothing is left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from softs_lightning.capture import Capture
from softs_lightning.pairing import BoundPair
from softs_lightning.product import ProductSpec

__all__ = ["prove_loss", "prove_reached", "prove_trainable", "selected"]


def selected(capture: Capture, spec: ProductSpec, what: str, model: nn.Module | None) -> list[Any]:
    """The values of `spec`; an error names `what`, and says if compiled code may have skipped a hook.

    Raises:
        LookupError: for a product that was not captured, or whose module ran several times.
    """
    try:
        return capture.select(spec)
    except LookupError as error:
        never = any(not capture[item.name][kind] for kind, item in spec)
        hint = _COMPILED if never and _has_compiled(model) else ""
        raise LookupError(f"{what}: {error.args[0]}{hint}") from None


_COMPILED = (
    ". The model is compiled, and compiled code does not see hooks that are added after its first call: "
    "fit before that call, or call torch.compiler.reset() first"
)


def _has_compiled(model: nn.Module | None) -> bool:
    if model is None or getattr(model, "_compiler_ctx", None) is not None:
        return model is not None  # Lightning's note on a module that was compiled whole
    return any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in model.modules())


def prove_trainable(bound: BoundPair, values: Sequence[Any], student: nn.Module) -> None:
    """Raise ``RuntimeError`` unless each of the student's activations leads to parameters that learn."""
    own = {id(p) for p in bound.parameters()}
    trained = {id(p) for p in student.parameters() if p.requires_grad} - own
    # FSDP2 computes with tensors of its own in place of the parameters that it has sharded.
    sharded = any(hasattr(p, "full_tensor") for p in student.parameters())
    for (kind, item), value in zip(bound.pair.student, values, strict=True):
        if not isinstance(value, Tensor):
            continue  # the pair itself says what is wrong with it
        what = f"pair {bound.pair.name!r}: the student's {kind}[{item}]"
        if not value.requires_grad:
            raise RuntimeError(
                f"{what} has no gradient, so this term could not train anything: it is detached, computed under "
                "no_grad, belongs to a frozen part (start the term when that is unfrozen: weight=Between(...)), or "
                "lies inside re-entrant activation checkpointing (use_reentrant=False keeps gradients)"
            )
        found, hidden = _leaves(value)
        found -= {id(None)}
        if not hidden and not (found if sharded else trained & found):
            raise RuntimeError(
                f"{what} reaches no trainable parameter of {type(student).__name__}, so this term could not train it: "
                "choose a module behind the parameters that are to learn"
            )


def prove_loss(bound: BoundPair, term: Tensor) -> None:
    """Raise unless the first loss is finite and depends on the student."""
    if not bool(torch.isfinite(term)):
        raise FloatingPointError(
            f"pair {bound.pair.name!r}: the loss is {term.item()} on the first batch; look for infinite logits, an "
            "empty mask or a division by zero in it"
        )
    if not term.requires_grad:
        raise RuntimeError(
            f"pair {bound.pair.name!r}: the loss has no gradient with respect to the student's activation: it is "
            "constant or detaches its first argument"
        )


def prove_reached(student: nn.Module, total: Tensor) -> None:
    """Raise ``RuntimeError`` with their names if trainable parameters get no gradient, which DDP would wait for."""
    found, hidden = _leaves(total)
    idle = [name for name, p in student.named_parameters() if p.requires_grad and id(p) not in found]
    if idle and not hidden:
        listed = ", ".join(map(repr, idle[:8])) + (f" and {len(idle) - 8} more" if len(idle) > 8 else "")
        raise RuntimeError(
            f"under DDP every trainable parameter must get a gradient in every step, and {listed} got none from the "
            "task loss or any distillation term. Freeze what is not to learn with requires_grad_(False), or use "
            "strategy='ddp_find_unused_parameters_true'"
        )


def _leaves(value: Tensor) -> tuple[set[int], bool]:
    """The ids of the tensors that `value` would give gradients to, and whether some may be hidden."""
    if value.grad_fn is None:
        return {id(value)}, False
    waiting, seen = [value.grad_fn], {value.grad_fn}
    found, hidden = set(), False
    while waiting:
        node = waiting.pop()
        found.add(id(getattr(node, "variable", None)))
        # Re-entrant checkpointing hides the parameters inside.
        hidden = hidden or node.name().startswith("CheckpointFunction")
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return found, hidden
