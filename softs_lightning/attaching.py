"""How a callback takes its place beside a student and a trainer.

Each change here is undone through the :class:`Attachment` of the fit, in reverse order and in any
order among several callbacks; a fit that Lightning ended without telling its callbacks is undone
by the next one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.nn.parallel import DistributedDataParallel

from softs_lightning.auxiliary import Auxiliary

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "Attachment",
    "before_wrapping",
    "close_on_interruption",
    "needs_every_gradient",
    "put_before_finders",
]

_AT_WORK: WeakKeyDictionary[LightningModule, list[Attachment]] = WeakKeyDictionary()
"""Which attachments have put something into which student."""


class Attachment:
    """Everything that one callback has put in place for one fit.

    Args:
        owner: the callback.
    """

    def __init__(self, owner: Callback) -> None:
        self.owner = owner
        self._undo = ExitStack()

    def open(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin, with `pl_module` free of what earlier fits, or the model that it is a copy of, have left."""
        self.close()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        earlier = callbacks[: callbacks.index(self.owner)]
        for other in list(_AT_WORK.get(pl_module, [])):
            if other.owner not in earlier:
                other.close()
        if not _AT_WORK.get(pl_module):
            Auxiliary.discard(pl_module)
        _AT_WORK.setdefault(pl_module, []).append(self)
        self.undo(lambda: _forget(pl_module, self))

    def undo(self, action: Callable[[], Any]) -> None:
        """Have `action` called at the end."""
        self._undo.callback(action)

    def close(self) -> None:
        """Undo everything, in reverse order. Closing twice is harmless."""
        self._undo.close()

    @contextmanager
    def closing_on_error(self) -> Iterator[None]:
        """Close if the block raises."""
        try:
            yield
        except BaseException:
            self.close()
            raise


def _forget(pl_module: LightningModule, attachment: Attachment) -> None:
    _AT_WORK[pl_module].remove(attachment)
    if not _AT_WORK[pl_module]:
        del _AT_WORK[pl_module]


class _Interruption:
    """Stands in for the strategy's ``on_exception`` while attachments are open."""

    def __init__(self, inner: Callable[[BaseException], None], own: Any) -> None:
        self.inner = inner
        self.own = own
        self.attachments: list[Attachment] = []

    def __call__(self, exception: BaseException) -> None:
        for attachment in list(self.attachments):
            attachment.close()
        self.inner(exception)


def close_on_interruption(trainer: Trainer, attachment: Attachment) -> None:
    """Close when the strategy is told of an exception: a tuner whose step fails has set the callbacks aside."""
    place = trainer.strategy.__dict__
    own = place.get("on_exception")
    told = own if isinstance(own, _Interruption) else _Interruption(trainer.strategy.on_exception, own)
    told.attachments.append(attachment)
    place["on_exception"] = told

    def leave() -> None:
        told.attachments.remove(attachment)
        if not told.attachments and place.get("on_exception") is told:
            if told.own is None:
                del place["on_exception"]
            else:
                place["on_exception"] = told.own

    attachment.undo(leave)


def before_wrapping(pl_module: LightningModule, attachment: Attachment, make: Callable[[], None]) -> None:
    """Call `make` after the student's own configure_model: the last moment before the strategy wraps it."""
    own = pl_module.__dict__.get("configure_model")
    inner = pl_module.configure_model if is_overridden("configure_model", pl_module) else None

    def restore() -> None:
        if pl_module.__dict__.get("configure_model") is configure_model:
            if own is None:
                del pl_module.__dict__["configure_model"]
            else:
                pl_module.__dict__["configure_model"] = own

    def configure_model() -> None:
        restore()
        if inner is not None:
            inner()
        make()

    pl_module.__dict__["configure_model"] = configure_model
    attachment.undo(restore)


def put_before_finders(trainer: Trainer, callback: Callback) -> None:
    """Lightning runs its tuners first, inside their ``on_fit_start``: they would tune a training without a teacher."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    finders = [i for i, c in enumerate(callbacks) if isinstance(c, (BatchSizeFinder, LearningRateFinder))]
    if finders and finders[0] < callbacks.index(callback):
        rest = [c for c in callbacks if c is not callback]
        rest.insert(finders[0], callback)
        trainer.callbacks = rest  # type: ignore[attr-defined]


def needs_every_gradient(trainer: Trainer) -> bool:
    """Whether a trainable parameter without a gradient stops the next step, as DDP does unless told otherwise."""
    wrapped = trainer.strategy.model
    return isinstance(wrapped, DistributedDataParallel) and not (
        wrapped.find_unused_parameters or wrapped.static_graph
    )
