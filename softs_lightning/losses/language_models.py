"""Chunked losses as modules: they find both models' heads and read them anew at each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn

from softs_lightning.losses.arithmetic import (
    DistillationLoss,
    Normalizer,
    one_of,
    positive,
    unit_interval,
    whole,
)
from softs_lightning.losses.divergences import DIRECTIONS
from softs_lightning.losses.heads import Head, find_head, head_of, head_settings
from softs_lightning.losses.hidden import HiddenStates
from softs_lightning.losses.liger import BACKENDS, check_liger, check_liger_head, liger_mean
from softs_lightning.losses.linear import linear_ce_kl, linear_jsd, linear_kl
from softs_lightning.losses.tokens import BatchKey, check_segments, labels_of

__all__ = ["LinearCEKL", "LinearJSD", "LinearKL"]


SIDES = ("student", "teacher")


class _LinearLoss(DistillationLoss):
    """What the chunked losses share: options of the heads, and :meth:`bind`."""

    same_shape: ClassVar[bool] = False

    def __init__(
        self,
        *,
        student_head: str | None = None,
        teacher_head: str | None = None,
        student_softcap: float | None = None,
        teacher_softcap: float | None = None,
        student_scale: float | None = None,
        teacher_scale: float | None = None,
        chunk_size: int | None = None,
        backend: str = "torch",
    ) -> None:
        super().__init__()
        self.backend = one_of(f"{type(self).__name__}'s backend", backend, BACKENDS)
        name = type(self).__name__
        self.chunk_size = None if chunk_size is None else whole(f"{name}'s chunk_size", chunk_size)
        self._names = (student_head, teacher_head)
        self._softcaps = (student_softcap, teacher_softcap)
        self._scales = (student_scale, teacher_scale)
        if backend == "liger":
            name = type(self).__name__
            check_liger(name)
            for side, softcap, scale in zip(SIDES, self._softcaps, self._scales, strict=True):
                check_liger_head(name, side, softcap, 1.0 if scale is None else scale)
        # Functions, not modules: a registered head would be trained, moved and saved with the loss.
        self._heads: tuple[Callable[[], Head], Callable[[], Head]] | None = None

    def bind(self, student_module: nn.Module, teacher_module: nn.Module) -> None:
        """Find both models' heads: by the names given, or by their one ``get_output_embeddings()``.

        Softcap and scale of the logits are read from the models' configs where they were not given. The
        heads are read again at each call, so that weights may be replaced, moved or sharded meanwhile.

        Raises:
            KeyError: for an unknown name.
            TypeError: for a head that is no plain linear module.
            ValueError: where there is no head, or more than one, or a scale that must be given.
        """
        found = []
        for side, model, name, softcap, scale in zip(
            SIDES, (student_module, teacher_module), self._names, self._softcaps, self._scales, strict=True
        ):
            module, config = find_head(model, name)
            settings = head_settings(config, softcap, scale)
            if self.backend == "liger":
                check_liger_head(type(self).__name__, f"{side}'s config", *settings)
            head_of(module, *settings)  # now, so that an unfit head is refused before training
            found.append(_Reader(module, *settings))
        self._heads = (found[0], found[1])

    def _by_liger(
        self,
        student: Tensor,
        teacher: Tensor,
        *,
        beta: float,
        temperature: float,
        mask: Tensor | None,
        normalizer: Normalizer,
        labels: Tensor | None = None,
        hard: float = 0.0,
    ) -> Tensor:
        states = HiddenStates.of(student, teacher, self.heads(), mask, labels)
        return liger_mean(
            states,
            beta=beta,
            temperature=temperature,
            normalizer=normalizer,
            chunk_size=self.chunk_size,
            hard=hard,
        )

    def heads(self) -> tuple[Head, Head]:
        """The student's and the teacher's head as they are now."""
        if self._heads is None:
            raise RuntimeError(
                f"{type(self).__name__} does not know the heads yet: call bind(student_module, teacher_module)"
            )
        return self._heads[0](), self._heads[1]()


class _Reader:
    """Reads a head from its module; keeps the module out of the loss's own submodules."""

    def __init__(self, module: nn.Module, softcap: float | None, scale: float) -> None:
        self.module, self.softcap, self.scale = module, softcap, scale

    def __deepcopy__(self, memo: object) -> _Reader:
        # A copied loss still trains the model's head, not a copy of it.
        return self

    def __call__(self) -> Head:
        return head_of(self.module, self.softcap, self.scale)


class LinearKL(_LinearLoss):
    """KL of the logits from what enters both heads: :func:`~softs_lightning.losses.functional.linear_kl`.

    Pair ``inputs[lm_head]`` of both models (the teacher then stops before its head); the callback binds the
    loss. The heads' vocabularies may be padded unlike: the shared part is compared, with a warning.

    Args:
        temperature: above 0.
        direction: ``"forward"``, ``"reverse"`` or ``"symmetric"``.
        student_head: name of the student's head; by default its ``get_output_embeddings()``.
        teacher_head: name of the teacher's head; likewise.
        student_softcap: cap · tanh(logits / cap); by default what the model's config says.
        teacher_softcap: likewise.
        student_scale: multiplies the logits; by default what the model's config says.
        teacher_scale: likewise.
        chunk_size: tokens at a time; by default as many as make 2 Mi logits on a CPU, 64 Mi elsewhere.
        backend: ``"torch"``, or ``"liger"`` for Liger-Kernel's chunked loss where it is installed. That one has
            no symmetric direction, softcap or scale, and sums in the dtype of the head.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 100))
    >>> loss = LinearKL(temperature=2.0, student_head="1", teacher_head="1")
    >>> loss.bind(model, model)
    >>> hidden = torch.ones(2, 3, 8)
    >>> loss(hidden, hidden).item()
    0.0
    """

    def __init__(self, temperature: float = 1.0, direction: str = "forward", **options: Any) -> None:
        super().__init__(**options)
        self.temperature = positive("LinearKL's temperature", temperature)
        self.direction = one_of("LinearKL's direction", direction, DIRECTIONS)
        if self.backend == "liger":
            check_liger("LinearKL", direction)

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        if self.backend == "liger":
            return self._by_liger(
                student,
                teacher,
                beta=float(self.direction == "reverse"),
                temperature=self.temperature,
                mask=mask,
                normalizer=normalizer,
            )
        return linear_kl(
            student,
            teacher,
            *self.heads(),
            temperature=self.temperature,
            direction=self.direction,
            mask=mask,
            normalizer=normalizer,
            chunk_size=self.chunk_size,
        )


class LinearJSD(_LinearLoss):
    """Generalised JSD of the logits: :func:`~softs_lightning.losses.functional.linear_jsd`.

    Args:
        beta: the teacher's share of the mixture, in [0, 1]; 0 is the forward KL, 1 the reverse KL.
        temperature: above 0.
        normalized: divide by ``beta·(1−beta)``, which makes it continuous at both ends.
        **options: of the heads, as in :class:`LinearKL`.

    >>> import torch
    >>> head = nn.Sequential(nn.Linear(8, 100))
    >>> loss = LinearJSD(0.3, student_head="0", teacher_head="0")
    >>> loss.bind(head, head)
    >>> loss(torch.ones(2, 8), torch.ones(2, 8)).item()
    0.0
    """

    def __init__(
        self, beta: float = 0.5, temperature: float = 1.0, *, normalized: bool = False, **options: Any
    ) -> None:
        super().__init__(**options)
        self.beta = unit_interval("LinearJSD's beta", beta)
        self.temperature = positive("LinearJSD's temperature", temperature)
        self.normalized = normalized

    def forward(
        self, student: Tensor, teacher: Tensor, *, mask: Tensor | None = None, normalizer: Normalizer = None
    ) -> Tensor:
        if self.backend == "liger":
            share = self.beta * (1 - self.beta) if self.normalized else 0.0
            plain = self._by_liger(
                student,
                teacher,
                beta=self.beta,
                temperature=self.temperature,
                mask=mask,
                normalizer=normalizer,
            )
            return plain / share if share else plain
        return linear_jsd(
            student,
            teacher,
            *self.heads(),
            beta=self.beta,
            temperature=self.temperature,
            normalized=self.normalized,
            mask=mask,
            normalizer=normalizer,
            chunk_size=self.chunk_size,
        )


class LinearCEKL(_LinearLoss):
    """Cross-entropy and KL in one pass: :func:`~softs_lightning.losses.functional.linear_ce_kl`.

    For a task whose own loss is the same cross-entropy, set the task's weight to 0 and use this one.

    Args:
        hard: share of the cross-entropy, in [0, 1].
        temperature: of the KL, above 0.
        direction: of the KL.
        labels: key or position in the batch, or a function of the batch; ``[batch, tokens]``, -100 ignored.
        shift: the labels are the inputs' own (transformers' convention) and are shifted here, once.
        segments: where several documents are packed into one row, what of the batch numbers them: no
            prediction is scored across an end. Like ``labels``, a key, a position or a function.
        **options: of the heads, as in :class:`LinearKL`.

    >>> import torch
    >>> head = nn.Sequential(nn.Linear(8, 100))
    >>> loss = LinearCEKL(student_head="0", teacher_head="0")
    >>> loss.bind(head, head)
    >>> hidden = torch.zeros(1, 4, 8)
    >>> loss(hidden, hidden, batch={"labels": torch.tensor([[1, 2, 3, -100]])}) > 0
    tensor(True)
    """

    divergence: ClassVar[bool] = False

    def __init__(
        self,
        hard: float = 0.5,
        temperature: float = 1.0,
        direction: str = "forward",
        *,
        labels: BatchKey = "labels",
        shift: bool = True,
        segments: BatchKey | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.hard = unit_interval("LinearCEKL's hard", hard)
        self.temperature = positive("LinearCEKL's temperature", temperature)
        self.direction = one_of("LinearCEKL's direction", direction, DIRECTIONS)
        if self.backend == "liger":
            check_liger("LinearCEKL", direction)
        self.labels = labels
        self.shift = shift
        self.segments = check_segments("LinearCEKL", shift, segments)

    def forward(
        self,
        student: Tensor,
        teacher: Tensor,
        *,
        batch: Any,
        mask: Tensor | None = None,
        normalizer: Normalizer = None,
    ) -> Tensor:
        labels = labels_of(batch, self.labels, type(self).__name__, shift=self.shift, segments=self.segments)
        if self.backend == "liger":
            return self._by_liger(
                student,
                teacher,
                beta=float(self.direction == "reverse"),
                temperature=self.temperature,
                mask=mask,
                normalizer=normalizer,
                labels=labels,
                hard=self.hard,
            )
        return linear_ce_kl(
            student,
            teacher,
            *self.heads(),
            labels,
            hard=self.hard,
            temperature=self.temperature,
            direction=self.direction,
            shift=False,
            mask=mask,
            normalizer=normalizer,
            chunk_size=self.chunk_size,
        )
