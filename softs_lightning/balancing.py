"""Balancing: factors for the terms that nobody has to tune by hand.

``DistillationCallback(balance=...)`` takes one of

=======================  ===================================================================
``GradientBalance``      each term pulls on its activation as hard as the task's loss does
``UncertaintyBalance``   each term has a noise level that is learned with the student
=======================  ===================================================================

Weights of the pairs come on top, as relative importance. What is learned or averaged is part of
the callback's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

__all__ = ["Balance", "GradientBalance", "UncertaintyBalance"]


class Balance(nn.Module):
    """Turns unweighted terms into balanced ones; a fit trains it beside the student."""

    needs_task = False
    """Whether it looks at the task's loss, which manual optimization does not show it."""

    loss_scale: Callable[[], float] = staticmethod(lambda: 1.0)
    """By how much 16-bit training scales its loss, so that small gradients are not rounded to zero."""

    def made_for(self, names: Sequence[str]) -> Balance:
        """A new one for the pairs of these names."""
        raise NotImplementedError

    def forward(
        self,
        terms: Mapping[str, Tensor],
        activations: Mapping[str, Sequence[Tensor]],
        task: Tensor | None,
        step: int,
    ) -> dict[str, Tensor]:
        """The balanced terms.

        Args:
            terms: the unweighted terms that are on.
            activations: what of the student each of them looks at.
            task: the student's own loss.
            step: optimizer steps done so far.
        """
        raise NotImplementedError


class UncertaintyBalance(Balance):
    """``term / (2 σ²) + log σ`` with a learned σ for each term (Kendall et al. 2018, arXiv:1705.07115).

    A term that stays large gets a larger σ and so a smaller factor. The logarithms of σ² start at 0
    and train with the projectors, in the optimizer's first group.

    >>> balance = UncertaintyBalance().made_for(["hidden"])
    >>> balance({"hidden": torch.tensor(3.0)}, {}, None, 0)["hidden"].item()
    1.5
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.log_variance = nn.Parameter(torch.zeros(0))

    def made_for(self, names: Sequence[str]) -> UncertaintyBalance:
        made = type(self)()
        made.names = list(names)
        made.log_variance = nn.Parameter(torch.zeros(len(names)))
        return made

    def forward(
        self,
        terms: Mapping[str, Tensor],
        activations: Mapping[str, Sequence[Tensor]],
        task: Tensor | None,
        step: int,
    ) -> dict[str, Tensor]:
        spread = dict(zip(self.names, self.log_variance.unbind(), strict=True))
        return {name: (term * torch.exp(-spread[name]) + spread[name]) / 2 for name, term in terms.items()}


class GradientBalance(Balance):
    """Scales each term so that its gradient on its activations is as large as the task's is there.

    The factor is ``‖∂task/∂a‖ / ‖∂term/∂a‖`` for the student's activations ``a`` of the pair, both
    norms averaged over time (of a step whose scaled gradients overflow nothing is kept, as its
    optimizer step is skipped); the adaptive weight of VQGAN (Esser et al. 2021, arXiv:2012.09841) on
    activations in place of a last layer. Ranks use common norms, those of the union of their batches.

    Args:
        every: measure in each n-th optimizer step; each measurement costs the part of a backward
            pass that lies behind the activations.
        momentum: of the averages; 0 takes the last measurement alone.
        most: the factor is at most this, for terms that vanish.

    Raises:
        RuntimeError: for a pair whose activations the task's loss does not depend on.
    """

    needs_task = True
    bits: Tensor
    measured: Tensor

    def __init__(self, *, every: int = 1, momentum: float = 0.9, most: float = 1e4) -> None:
        super().__init__()
        if every < 1 or not 0 <= momentum < 1 or most <= 0:
            raise ValueError(
                f"every must be at least 1, momentum in [0, 1) and most positive, got {every}, {momentum}, {most}"
            )
        self.every, self.momentum, self.most = every, momentum, most
        self.names: list[str] = []
        self._register(0)

    def _register(self, count: int) -> None:
        # The bits of float64 numbers: as such a trainer's "true" half precision would round them.
        self.register_buffer("bits", torch.zeros(count, 2, dtype=torch.int64))
        self.register_buffer("measured", torch.zeros(count, dtype=torch.bool))

    @property
    def norms(self) -> Tensor:
        """The averaged norms, a row for each pair: the task's and the term's."""
        return self.bits.view(torch.float64)

    def made_for(self, names: Sequence[str]) -> GradientBalance:
        made = type(self)(every=self.every, momentum=self.momentum, most=self.most)
        made.names = list(names)
        made._register(len(names))
        return made

    def forward(
        self,
        terms: Mapping[str, Tensor],
        activations: Mapping[str, Sequence[Tensor]],
        task: Tensor | None,
        step: int,
    ) -> dict[str, Tensor]:
        assert task is not None
        rows = {name: self.names.index(name) for name in terms}
        due = [name for name in terms if step % self.every == 0 or not self.measured[rows[name]]]
        if due:
            self._measure({name: terms[name] for name in due}, activations, task)
        factors = {}
        for name, row in rows.items():
            task_norm, term_norm = self.norms[row].unbind()
            factors[name] = (task_norm / term_norm.clamp_min(1e-30)).clamp_max(self.most)
        return {name: term * factors[name].to(term.dtype) for name, term in terms.items()}

    def _measure(
        self, terms: Mapping[str, Tensor], activations: Mapping[str, Sequence[Tensor]], task: Tensor
    ) -> None:
        scale = self.loss_scale()
        found = torch.stack(
            [
                torch.stack([_squared_norm(loss, activations[name], name, scale) for loss in (task, term)])
                for name, term in terms.items()
            ]
        )
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(found)
            found /= torch.distributed.get_world_size() ** 2  # the mean over the union divides each gradient
        for name, new in zip(terms, found, strict=True):
            row = self.names.index(name)
            kept = self.momentum if self.measured[row] else 0.0
            usable = torch.isfinite(new).all()
            mean = kept * self.norms[row] + (1 - kept) * new.sqrt()
            self.norms[row] = torch.where(usable, mean, self.norms[row])
            self.measured[row] |= usable


def _squared_norm(loss: Tensor, activations: Sequence[Tensor], name: str, scale: float) -> Tensor:
    gradients = torch.autograd.grad(loss * scale, list(activations), retain_graph=True, allow_unused=True)
    if all(gradient is None for gradient in gradients):
        raise RuntimeError(
            f"pair {name!r}: the task's loss does not depend on the student's activations of this pair, so there is no "
            "gradient to balance with: choose others, or balance by uncertainty"
        )
    squares = [(g.double() / scale).square().sum() for g in gradients if g is not None]
    return torch.stack(squares).sum()
