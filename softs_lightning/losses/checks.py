"""The checks that ``check_loss`` runs, one function each, and the subject that they run on.

A check returns when all is well, raises ``AssertionError`` with what it found, or ``NotApplicable`` with
the reason why it says nothing about this loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["CHECKS", "NotApplicable", "Sample", "Subject"]

Sample = Callable[[torch.Generator], tuple[Any, Any]]


class NotApplicable(Exception):
    """A check says nothing about this loss; the message is the reason."""


@dataclass
class Subject:
    """The loss under test and how to call it."""

    loss: Callable[..., Tensor]
    student_shape: tuple[int, ...]
    teacher_shape: tuple[int, ...]
    sample: Sample | None
    batch: dict[str, Any]
    takes_mask: bool
    divergence: bool
    logits: bool
    row_mean: bool
    sample_mean: bool
    same_shape: bool
    token_dims: tuple[int, ...]
    mask_dims: tuple[int, ...]
    seed: int

    def inputs(self, dtype: torch.dtype = torch.float64, offset: int = 0) -> tuple[Any, Any]:
        generator = torch.Generator().manual_seed(self.seed + offset)
        if self.sample is not None:
            student, teacher = self.sample(generator)
            return tree_map(lambda x: x.to(dtype), student), tree_map(lambda x: x.to(dtype), teacher)
        shapes = self.student_shape, self.teacher_shape
        student, teacher = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
        return student.to(dtype), teacher.to(dtype)

    def tensors(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        student, teacher = self.inputs(dtype)
        if not isinstance(student, Tensor) or not isinstance(teacher, Tensor):
            raise NotApplicable("its inputs are no single tensors")
        return student, teacher

    def masked(self, dtype: torch.dtype = torch.float64) -> tuple[Any, Any, Tensor]:
        """Inputs and a mask ``[batch, ...]`` over their ``mask_dims``, holes at both of its ends."""
        if not self.takes_mask:
            raise NotApplicable("takes no mask")
        student, teacher = self.inputs(dtype)
        shape = _leaves(student)[0].shape
        mask = torch.ones([shape[0], *(shape[d] for d in self.mask_dims)], dtype=torch.long)
        if self.mask_dims:
            mask[-1].view(-1)[-2:] = 0
            mask[0].view(-1)[:2] = 0
        else:
            mask[-1] = 0
        return student, teacher, mask

    def call(
        self,
        student: Any,
        teacher: Any,
        *,
        mask: Tensor | None = None,
        loss: Callable[..., Tensor] | None = None,
        seed: int | None = None,
    ) -> Tensor:
        """The loss of a fresh copy, in the precision of the inputs, with one seed for its own draws."""
        called = copy.deepcopy(self.loss) if loss is None else loss
        if isinstance(called, nn.Module) and _leaves(student)[0].dtype == torch.float64:
            called = called.double()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed if seed is None else seed)
            result = called(student, teacher, **self.batch, **({} if mask is None else {"mask": mask}))
        assert isinstance(result, Tensor), f"returned {type(result).__name__}, not a tensor"
        return result

    def gradient(self, student: Any, teacher: Any, **options: Any) -> tuple[Tensor, list[Tensor]]:
        student = tree_map(lambda x: x.detach().clone().requires_grad_(), student)
        leaves = _leaves(student)
        result = self.call(student, teacher, **options)
        assert result.requires_grad, "the result does not require a gradient: the student is cut off"
        grads = torch.autograd.grad(result, leaves, allow_unused=True)
        return result.detach(), [
            torch.zeros_like(leaf) if grad is None else grad for leaf, grad in zip(leaves, grads, strict=True)
        ]


def tree_map(function: Callable[..., Tensor], value: Any, *others: Any) -> Any:
    """``function`` of a tensor, or of each in a list or tuple."""
    if isinstance(value, Tensor):
        return function(value, *others)
    return type(value)(tree_map(function, *items) for items in zip(value, *others, strict=True))


def _leaves(value: Any) -> list[Tensor]:
    return [value] if isinstance(value, Tensor) else list(value)


def _shapes(value: Any) -> list[torch.Size]:
    return [leaf.shape for leaf in _leaves(value)]


def _close(actual: Tensor, expected: Tensor, what: str, rtol: float, atol: float = 1e-9) -> None:
    gap = (actual.detach().double() - expected.detach().double()).abs().max().item()
    bound = atol + rtol * expected.detach().double().abs().max().item()
    assert gap <= bound, f"{what}: off by {gap:.3g}, allowed {bound:.3g}"


def _scalar(subject: Subject) -> None:
    result = subject.call(*subject.inputs(torch.float32))
    assert result.ndim == 0, f"shape {tuple(result.shape)}, wanted a scalar"
    assert torch.isfinite(result), f"value {result.item()}"


def _gradient(subject: Subject) -> None:
    _, grads = subject.gradient(*subject.inputs(torch.float32))
    assert all(bool(torch.isfinite(grad).all()) for grad in grads), "not finite"
    assert any(bool((grad != 0).any()) for grad in grads), "zero away from the teacher"


def _untouched(subject: Subject) -> None:
    inputs = subject.inputs(torch.float32)
    subject.call(*inputs)
    for left, fresh in zip(inputs, subject.inputs(torch.float32), strict=True):
        same = all(map(torch.equal, _leaves(left), _leaves(fresh)))
        assert same, "the loss changed its inputs in place"


def _repeatable(subject: Subject) -> None:
    first, second = (subject.call(*subject.inputs(torch.float32)) for _ in range(2))
    assert torch.equal(first, second), f"{first.item()} and {second.item()} for one input and one seed"


def _never_negative(subject: Subject) -> None:
    if not subject.divergence:
        raise NotApplicable("claims no minimum at the teacher")
    for offset in range(3):
        student, teacher = subject.inputs(torch.float32, offset)
        nears = [student]
        if _shapes(student) == _shapes(teacher):
            # Near the teacher rounding alone can take a sum of cancelling terms below zero.
            for share in (1e-4, 1e-2):
                nears.append(tree_map(lambda x, y, s=share: y + s * (x - y), student, teacher))
        for near in nears:
            value = subject.call(near, teacher).item()
            assert value >= 0, f"{value:.3g}"


def _zero_at_the_teacher(subject: Subject) -> None:
    if not subject.divergence:
        raise NotApplicable("claims no minimum at the teacher")
    _, away = subject.gradient(*subject.inputs(torch.float32))
    student, teacher = subject.inputs(torch.float32)
    if _shapes(student) != _shapes(teacher):
        raise NotApplicable("student and teacher have unlike shapes here")
    value, grads = subject.gradient(teacher, teacher)
    assert abs(value.item()) <= 1e-6, f"{value.item():.3g} at the teacher"
    largest = max(float(grad.abs().max()) for grad in away)
    left = max(float(grad.abs().max()) for grad in grads)
    assert left <= 1e-5 * max(largest, 1.0), (
        f"gradient of {left:.3g} at the teacher ({largest:.3g} away from it)"
    )


def _shift(subject: Subject) -> None:
    if not subject.logits:
        raise NotApplicable("reads no logits")
    student, teacher = subject.tensors()
    shift = torch.linspace(-5, 5, student[..., 0].numel(), dtype=student.dtype).reshape(
        student[..., :1].shape
    )
    expected = subject.call(student, teacher)
    _close(subject.call(student + shift, teacher), expected, "student shifted", 1e-9)
    _close(subject.call(student, teacher - 2 * shift), expected, "teacher shifted", 1e-9)


def _half(subject: Subject) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        student, teacher = subject.inputs(dtype)
        result = subject.call(student, teacher)
        assert result.dtype == torch.float32, (
            f"{dtype} inputs gave {result.dtype}: computed in half precision"
        )
        raised = [tree_map(lambda x: x.float(), x) for x in (student, teacher)]
        _close(result, subject.call(*raised), f"{dtype} against float32 of the same numbers", 1e-5)


def _double(subject: Subject) -> None:
    exact = subject.call(*subject.inputs(torch.float64))
    assert exact.dtype == torch.float64, f"float64 inputs gave {exact.dtype}"
    _close(subject.call(*subject.inputs(torch.float32)), exact, "float32 against float64", 1e-4, 1e-6)


def _autocast(subject: Subject) -> None:
    student, teacher = subject.inputs(torch.float32)
    expected = subject.call(student, teacher)
    with torch.autocast("cpu", torch.bfloat16):
        result = subject.call(student, teacher)
    _close(result, expected, "inside autocast", 1e-5)


def _gradcheck(subject: Subject) -> None:
    # Central differences along random directions. torch's gradcheck runs several backwards through one
    # graph, which a loss may refuse.
    student, teacher = subject.inputs(torch.float64)
    _, grads = subject.gradient(student, teacher)
    generator = torch.Generator().manual_seed(subject.seed)
    step = 1e-6
    for _ in range(4):
        directions = [torch.randn(grad.shape, generator=generator, dtype=grad.dtype) for grad in grads]
        sides = []
        for sign in (step, -step):
            moves = iter(directions)
            moved = tree_map(lambda x, sign=sign, moves=moves: x + sign * next(moves), student)
            sides.append(subject.call(moved, teacher).item())
        numerical = (sides[0] - sides[1]) / (2 * step)
        analytical = sum(float((grad * move).sum()) for grad, move in zip(grads, directions, strict=True))
        size = max(abs(numerical), sum(float(grad.norm()) for grad in grads))
        assert abs(numerical - analytical) <= 1e-5 * size, (
            f"{analytical:.8g} by autograd, {numerical:.8g} numerically"
        )


def _extremes(subject: Subject) -> None:
    if subject.sample is not None:
        raise NotApplicable("has inputs of its own kind")
    inf = float("inf")
    values = [0.0, 1.0, 1e-30, 1e4, -1e4] + ([1e30, -1e30, inf, -inf] if subject.logits else [])
    for value in values:
        student, teacher = subject.inputs(torch.float32)
        student[0], teacher[-1], teacher[-2] = value, value, teacher[-2] * min(abs(value), 1e30)
        student[1, ..., 0] = value
        result, grads = subject.gradient(student, teacher)
        assert torch.isfinite(result), f"{result.item()} with entries of {value:g}"
        assert all(bool(torch.isfinite(grad).all()) for grad in grads), f"gradient with entries of {value:g}"


def _order(subject: Subject) -> None:
    if subject.batch:
        raise NotApplicable("reads the batch")
    student, teacher = subject.tensors()
    expected = subject.call(student, teacher)
    if not torch.equal(expected, subject.call(student, teacher, seed=subject.seed + 1)):
        raise NotApplicable("draws at random")
    _close(subject.call(student.flip(0), teacher.flip(0)), expected, "reversed batch", 1e-9)


def _split(subject: Subject) -> None:
    if not subject.row_mean:
        raise NotApplicable("claims no independent rows")
    if subject.batch:
        raise NotApplicable("reads the batch")
    student, teacher = subject.tensors()
    mask = subject.masked()[2] if subject.takes_mask else None
    weights = torch.ones(len(student)) if mask is None else mask.flatten(1).sum(1) if mask.ndim > 1 else mask
    if subject.sample_mean:
        weights = (weights > 0).long()
    parts = []
    for rows in (slice(0, 1), slice(1, None)):
        cut = None if mask is None else mask[rows]
        parts.append(subject.call(student[rows], teacher[rows], mask=cut) * weights[rows].sum())
    whole = subject.call(student, teacher, mask=mask)
    _close(sum(parts[1:], parts[0]) / weights.sum(), whole, "two parts, weighed by their rows", 1e-9)


def _spoil(value: Any, mask: Tensor, subject: Subject, fill: float) -> Any:
    """``value`` with ``fill`` wherever it is masked, in every tensor that it has."""

    def one(tensor: Tensor) -> Tensor:
        # Token dimensions are masked one by one, as in attention maps; others all together.
        each = subject.mask_dims == subject.token_dims[:1]
        for dims in (
            [(d,) for d in subject.token_dims] if each and subject.token_dims else [subject.mask_dims]
        ):
            view = [tensor.shape[d] if d in (0, *dims) else 1 for d in range(tensor.ndim)]
            tensor = tensor.masked_fill((mask == 0).reshape(view), fill)
        return tensor

    return tree_map(one, value)


def _padding(subject: Subject) -> None:
    student, teacher, mask = subject.masked()
    expected, grads = subject.gradient(student, teacher, mask=mask)
    for fill in (0.0, 7.0, float("nan"), float("inf")):
        spoiled, blotted = (_spoil(x, mask, subject, fill) for x in (student, teacher))
        result, spoiled_grads = subject.gradient(spoiled, blotted, mask=mask)
        _close(result, expected, f"padding filled with {fill}", 1e-9)
        for grad, spoiled_grad in zip(grads, spoiled_grads, strict=True):
            _close(spoiled_grad, grad, f"gradient with padding filled with {fill}", 1e-9)


def _extra_padding(subject: Subject) -> None:
    student, teacher, mask = subject.masked()
    if mask.ndim == 1:
        raise NotApplicable("has no tokens here")
    if subject.batch:
        raise NotApplicable("reads the batch")
    expected = subject.call(student, teacher, mask=mask)
    if not torch.equal(expected, subject.call(student, teacher, mask=mask, seed=subject.seed + 1)):
        raise NotApplicable("draws at random")
    for dim in {*subject.token_dims, *subject.mask_dims}:
        student, teacher = (
            tree_map(lambda x, d=dim: torch.cat([x, torch.ones_like(x.narrow(d, 0, 2))], d), side)
            for side in (student, teacher)
        )
    for dim in range(1, mask.ndim):
        mask = torch.cat([mask, torch.zeros_like(mask.narrow(dim, 0, 2))], dim)
    _close(subject.call(student, teacher, mask=mask), expected, "two more tokens of padding", 1e-9)


def _fully_masked(subject: Subject) -> None:
    student, teacher, mask = subject.masked()
    for fill in (1.0, float("nan")):
        filled = tree_map(lambda x, f=fill: torch.full_like(x, f), student)
        result, grads = subject.gradient(filled, teacher, mask=torch.zeros_like(mask))
        assert result.item() == 0, f"{result.item()} with no valid token"
        assert not any(bool((grad != 0).any()) for grad in grads), "gradient with no valid token"


def _all_valid(subject: Subject) -> None:
    student, teacher, mask = subject.masked()
    for kind in (torch.bool, torch.long, torch.float32):
        full = torch.ones_like(mask, dtype=kind)
        _close(
            subject.call(student, teacher, mask=full), subject.call(student, teacher), f"{kind} mask", 1e-9
        )


def _no_broadcast(subject: Subject) -> None:
    if not subject.same_shape:
        raise NotApplicable("takes unlike shapes")
    student, teacher = subject.tensors()
    if student.shape[-1] == 1:
        raise NotApplicable("has one feature only")
    try:
        subject.call(student[..., :1], teacher)
    except (ValueError, RuntimeError):
        return
    raise AssertionError(
        f"broadcast {tuple(student[..., :1].shape)} against {tuple(teacher.shape)} without an error"
    )


def _compile(subject: Subject) -> None:
    student, teacher = subject.inputs(torch.float32)
    expected, grads = subject.gradient(student, teacher)
    # Not reset: that would throw away what the caller has compiled.
    compiled = torch.compile(copy.deepcopy(subject.loss), backend="aot_eager")
    result, compiled_grads = subject.gradient(student, teacher, loss=compiled)
    _close(result, expected, "compiled", 1e-6)
    for actual, grad in zip(compiled_grads, grads, strict=True):
        _close(actual, grad, "gradient, compiled", 1e-5)


CHECKS: dict[str, Callable[[Subject], None]] = {
    "finite scalar": _scalar,
    "gradient reaches the student": _gradient,
    "inputs are left alone": _untouched,
    "one answer for one input": _repeatable,
    "never negative": _never_negative,
    "zero at the teacher": _zero_at_the_teacher,
    "shifted logits change nothing": _shift,
    "half precision is raised": _half,
    "float64 is kept": _double,
    "autocast does not reach inside": _autocast,
    "gradient is the numerical one": _gradcheck,
    "extreme values stay finite": _extremes,
    "order of the batch": _order,
    "split batch adds up": _split,
    "padding is not read": _padding,
    "extra padding changes nothing": _extra_padding,
    "no valid token is a zero": _fully_masked,
    "all valid equals no mask": _all_valid,
    "unlike shapes are refused": _no_broadcast,
    "compiled equals eager": _compile,
}
