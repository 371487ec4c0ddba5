"""``check_loss``: what every distillation loss should pass, run on anybody's loss, in one table."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from softs_lightning.losses.checks import CHECKS, NotApplicable, Sample, Subject

__all__ = ["Check", "LossCheckError", "LossReport", "check_loss"]


@dataclass(frozen=True)
class Check:
    """One line of a report: ``outcome`` is ``"pass"``, ``"FAIL"`` or ``"n/a"``."""

    name: str
    outcome: str
    detail: str = ""


@dataclass(frozen=True)
class LossReport:
    """What :func:`check_loss` found; prints as a table."""

    loss: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for check in self.checks if check.outcome == "FAIL")

    def __str__(self) -> str:
        width = max(len(check.name) for check in self.checks)
        lines = [f"{check.outcome:4}  {check.name:{width}}  {check.detail}".rstrip() for check in self.checks]
        return "\n".join([self.loss, *lines])


class LossCheckError(AssertionError):
    """Raised by :func:`check_loss`; ``report`` holds the whole table."""

    def __init__(self, report: LossReport) -> None:
        self.report = report
        names = ", ".join(check.name for check in report.failures)
        super().__init__(f"{len(report.failures)} of {len(report.checks)} checks failed ({names})\n{report}")


def check_loss(
    loss: Callable[..., Tensor],
    *,
    shape: Sequence[int] | None = None,
    teacher_shape: Sequence[int] | None = None,
    sample: Sample | None = None,
    batch: Any = None,
    divergence: bool | None = None,
    logits: bool | None = None,
    row_mean: bool | None = None,
    same_shape: bool | None = None,
    token_dims: Sequence[int] | None = None,
    mask_dims: Sequence[int] | None = None,
    masked: bool | None = None,
    compiled: bool = True,
    seed: int = 0,
) -> LossReport:
    """Run the conformance suite on a loss; raise with the whole table where something failed.

    The loss is any callable ``loss(student, teacher) -> scalar``; one whose signature has ``mask`` gets the
    mask checks, one that has ``batch`` is given yours. Modules are copied before each call, so neither
    parameters nor state of yours change. What the loss claims of itself (``divergence``, ``logits``,
    ``row_mean``, ``sample_mean``, ``same_shape``, ``token_dims``, ``mask_dims``) is read from its attributes of these names, or said here.

    Args:
        loss: the loss.
        shape: the student's shape to test with; ``(3, 5, 8)`` if the loss takes a mask, else ``(6, 8)``.
        teacher_shape: the teacher's, if it differs.
        sample: makes ``(student, teacher)`` from a generator, in float64, for inputs that are no plain
            normal tensors (probabilities, tuples of maps); the checks with extreme values are then left out.
        batch: what a loss with a ``batch`` keyword gets.
        divergence: never negative, zero with a zero gradient at the teacher (default: yes).
        logits: shifting a row of logits changes nothing, infinities are allowed (default: no).
        row_mean: a mean over independent rows, so that a batch may be split (default: no).
        same_shape: unlike shapes must raise (default: yes).
        token_dims: the dimensions that run over tokens, for the mask (default: 1, of three or more).
        mask_dims: the dimensions that a mask ``[batch, ...]`` covers together, as those of a map's pixels
            (default: all but the batch and the loss's ``channel_dim``, or the first of ``token_dims``).
        masked: run the checks on masks (default: where the signature has ``mask``).
        compiled: also compare with ``torch.compile`` (backend ``aot_eager``: no compiler needed).
        seed: of the samples.

    Returns:
        The report, if nothing failed.

    Raises:
        LossCheckError: with the report, if something failed.

    >>> from softs_lightning.losses import KLDivergence
    >>> check_loss(KLDivergence(temperature=2.0)).passed
    True
    >>> check_loss(nn.KLDivLoss(), compiled=False)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    ...
    softs_lightning.losses.conformance.LossCheckError: ... checks failed (...never negative...
    """
    parameters = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).parameters

    def claim(name: str, said: Any, default: Any) -> Any:
        return getattr(loss, name, default) if said is None else said

    if shape is None:
        shape = (3, 5, 8) if "mask" in parameters else (6, 8)
    tokens = tuple(claim("token_dims", token_dims, (1,) if len(shape) > 2 else ()))
    channels = getattr(loss, "channel_dim", None)
    beside = (d for d in range(1, len(shape)) if channels is not None and d != channels % len(shape))
    positions = tuple(claim("mask_dims", mask_dims, tokens[:1] if channels is None else beside))
    if positions != tokens[:1]:
        tokens = ()
    subject = Subject(
        loss=loss,
        student_shape=tuple(shape),
        teacher_shape=tuple(shape if teacher_shape is None else teacher_shape),
        sample=sample,
        batch={"batch": batch} if "batch" in parameters else {},
        takes_mask="mask" in parameters if masked is None else masked,
        divergence=claim("divergence", divergence, True),
        logits=claim("logits", logits, False),
        row_mean=claim("row_mean", row_mean, False),
        sample_mean=claim("sample_mean", None, False),
        same_shape=claim("same_shape", same_shape, True),
        token_dims=tokens,
        mask_dims=positions,
        seed=seed,
    )
    suite = {title: check for title, check in CHECKS.items() if compiled or title != "compiled equals eager"}
    name = repr(loss) if isinstance(loss, nn.Module) else getattr(loss, "__qualname__", repr(loss))
    if "\n" in name:  # a module with submodules
        name = type(loss).__name__
    report = LossReport(name, tuple(_run(title, check, subject) for title, check in suite.items()))
    if not report.passed:
        raise LossCheckError(report)
    return report


def _run(name: str, check: Callable[[Subject], None], subject: Subject) -> Check:
    try:
        with warnings.catch_warnings():  # one report, whatever the caller's filters
            warnings.simplefilter("ignore")
            check(subject)
    except NotApplicable as reason:
        return Check(name, "n/a", str(reason))
    except AssertionError as failure:
        return Check(name, "FAIL", " ".join(str(failure).split()))
    except Exception as error:  # a loss under test may raise anything; the other checks still say something
        return Check(name, "FAIL", f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return Check(name, "pass")
