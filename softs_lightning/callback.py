"""DistillationCallback: the lifecycle of a distillation inside a Lightning fit.

In the order in which Lightning calls: ``setup`` builds and places the teacher, and asks to be
called after the student's own ``setup`` and ``configure_model`` (layers may be born there) but
before the strategy wraps it, when the projectors are made; ``on_fit_start`` finds the optimizers,
whose state is not restored yet, and joins the training step; ``teardown`` or ``on_exception``
(Lightning calls one of the two) puts everything back.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities.seed import isolate_rng
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import Tensor, nn

from softs_lightning.attaching import (
    Attachment,
    before_wrapping,
    close_on_interruption,
    needs_every_gradient,
    put_before_finders,
)
from softs_lightning.auxiliary import Auxiliary, enrol, restore, weights
from softs_lightning.balancing import Balance
from softs_lightning.dryrun import measure
from softs_lightning.pairing import BoundPair, Pair
from softs_lightning.placement import is_spread, prove_equal_batches
from softs_lightning.product import ProductSpec
from softs_lightning.refusals import refuse
from softs_lightning.sharding import (
    is_sharding,
    loads_plain_checkpoints,
    mesh_of,
    saves_after_the_fit,
    spread,
)
from softs_lightning.step import Distillation, DistilledStep, ManualDistillation
from softs_lightning.teacher import Teacher
from softs_lightning.validation import Validation
from softs_lightning.windows import Window

__all__ = ["DistillationCallback"]

_PLAIN = (None, True, False, None, False, "replicated")
"""What teacher_inputs, early_exit, copy, teacher_dtype, compile_teacher and placement are when nothing is said."""


class DistillationCallback(Callback):
    """Distil a frozen teacher into whatever LightningModule the Trainer fits, without changing it.

    Args:
        teacher: a module, a function that returns one (called only for a fit), or a :class:`Teacher`.
        pairs: what is compared with what, see :class:`Pair`.
        name: prefix of the logged terms and key of the callback's state; one for each callback.
        task_weight: multiplies the loss that the student's ``training_step`` returns.
        teacher_inputs: ``teacher_inputs(batch)`` gives what the teacher is called with, where its
            own signature does not say it; see :func:`softs_lightning.feeding.feed`.
        early_exit: stop the teacher's forward when the last product is captured.
        teacher_dtype: run the teacher in this floating point type, whatever the precision of the
            training is; by default the trainer's precision applies to it as to the student.
        placement: where the teacher lies: ``"replicated"``, ``"sharded"`` over the ranks or on the ``"cpu"``, see
            :mod:`softs_lightning.placement`.
        compile_teacher: compile the teacher's part before the exit as one graph; a string names the
            backend of ``torch.compile``.
        store: a folder of products on disk: what is there is read, what is missing the teacher supplies
            and is kept. With a full store ``teacher`` may be ``None``: it need not even be installed.
        every_n_steps: distil in each n-th optimizer step only; the teacher runs in no other.
        manual: for modules with manual optimization: their ``training_step`` adds
            ``distillation_loss(batch)`` to its own loss.
        validate: run the teacher on the validation batches of the fit too, and report there each term as
            ``<name>/val/<pair>`` and how alike both sides are as ``<name>/val/<pair>/<metric>``.
        balance: find factors for the terms in training, see :mod:`softs_lightning.balancing`.
        example_batch: a batch for the dry run that finds the sizes of projectors; by default the
            first batch of the training data.
        copy: capture copies, for models that write into their activations in place.
        prog_bar: show ``<name>/total`` in the progress bar.

    Each step logs ``<name>/<pair>``, the unweighted terms, and ``<name>/total``, their weighted
    sum, which is added to ``task_weight`` times the student's own loss.

    Checkpoints are plain checkpoints of the student. The projectors travel in the callback's
    state, so resuming with the callback restores them; ``save_weights_only=True`` leaves them out.

    Raises:
        MisconfigurationException: at the start of a fit, for what cannot be distilled rightly:
            manual optimization without ``manual=True``, ``dataloader_iter`` steps, strategies other
            than one device, DDP and ``ModelParallelStrategy`` (FSDP2), no optimizer, ``WeightAveraging`` placed before this callback.
        KeyError: for a product_id that names no module, with the nearest names.

    Example::

        >>> import torch, lightning as L
        >>> from torch import nn
        >>> class Student(L.LightningModule):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        ...     def training_step(self, batch, batch_idx):
        ...         return nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        ...     def configure_optimizers(self):
        ...         return torch.optim.SGD(self.parameters(), lr=0.1)
        >>> teacher = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
        >>> callback = DistillationCallback(
        ...     teacher,
        ...     [Pair(teacher="outputs[1]", student="outputs[net.1]", loss=nn.MSELoss(), projector="linear")],
        ... )
        >>> data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
        >>> trainer = L.Trainer(max_epochs=1, accelerator="cpu", callbacks=[callback], logger=False,
        ...     enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        >>> student = Student()
        >>> trainer.fit(student, torch.utils.data.DataLoader(data, batch_size=4))
        >>> sorted(student.state_dict())
        ['net.0.bias', 'net.0.weight', 'net.2.bias', 'net.2.weight']
    """

    def __init__(
        self,
        teacher: Teacher | Callable[[], nn.Module] | nn.Module | None,
        pairs: Sequence[Pair],
        *,
        name: str = "distill",
        task_weight: float = 1.0,
        teacher_inputs: Callable[[Any], Any] | None = None,
        early_exit: bool = True,
        teacher_dtype: torch.dtype | str | None = None,
        compile_teacher: bool | str = False,
        placement: str = "replicated",
        store: str | os.PathLike[str] | None = None,
        every_n_steps: int = 1,
        manual: bool = False,
        validate: bool = False,
        balance: Balance | None = None,
        example_batch: Any = None,
        copy: bool = False,
        prog_bar: bool = False,
    ) -> None:
        super().__init__()
        self.pairs = _checked_pairs(pairs)
        if not isinstance(name, str) or not name.strip() or "." in name:
            raise ValueError(f"name must be a word without dots, got {name!r}")
        if store is not None and (not isinstance(store, (str, os.PathLike)) or not os.fspath(store)):
            raise TypeError(f"store must be the path of a folder or an address, got {store!r}")
        if teacher is None:
            if store is None:
                raise TypeError("without a teacher, store= must say where its products are")
            if (early_exit, copy, teacher_dtype, compile_teacher, placement) != _PLAIN[1:]:
                raise ValueError(
                    "early_exit, teacher_dtype, compile_teacher, copy and placement say how a teacher runs, and without "
                    "one (teacher=None) nothing runs: leave them out"
                )
            from softs_lightning.store import StoredTeacher

            self.teacher: Teacher = StoredTeacher(None, store, inputs=teacher_inputs)
        elif isinstance(teacher, Teacher):
            given = teacher_inputs, early_exit, copy, teacher_dtype, compile_teacher, placement
            if given != _PLAIN:
                raise ValueError(
                    "what is about the teacher (teacher_inputs, early_exit, teacher_dtype, compile_teacher, copy, "
                    "placement) goes to the Teacher that you pass"
                )
            self.teacher = teacher
        else:
            self.teacher = Teacher(
                teacher,
                inputs=teacher_inputs,
                early_exit=early_exit,
                copy=copy,
                dtype=teacher_dtype,
                compile=compile_teacher,
                placement=placement,
            )
        if store is not None and teacher is not None:
            from softs_lightning.store import StoredTeacher

            if isinstance(teacher, StoredTeacher):
                raise ValueError(
                    f"the teacher is a StoredTeacher, which has its store at {teacher.path!r}: leave store= out"
                )
            self.teacher = StoredTeacher.around(self.teacher, store)
        self.name = name
        if not isinstance(task_weight, (int, float)) or isinstance(task_weight, bool):
            raise TypeError(
                f"task_weight must be a number, got {task_weight!r}; 0 trains on the distillation alone"
            )
        self.task_weight = float(task_weight)
        if not math.isfinite(self.task_weight):
            raise ValueError(f"task_weight must be finite, got {task_weight}")
        if manual and self.task_weight != 1.0:
            raise ValueError("with manual=True your own step weights its loss: leave task_weight out")
        _check_flags(early_exit=early_exit, manual=manual, validate=validate, copy=copy, prog_bar=prog_bar)
        if not isinstance(every_n_steps, int) or isinstance(every_n_steps, bool) or every_n_steps < 1:
            raise ValueError(f"every_n_steps must be a whole number of at least 1, got {every_n_steps!r}")
        self.every_n_steps = every_n_steps
        self.manual = manual
        self.validate = validate
        if balance is not None and not isinstance(balance, Balance):
            raise TypeError(f"balance must be a softs_lightning.balancing.Balance or None, got {balance!r}")
        if manual and balance is not None and balance.needs_task:
            raise ValueError(
                f"{type(balance).__name__} looks at the task's loss, which manual=True does not show it"
            )
        if manual and any(pair.over_window for pair in self.pairs):
            raise ValueError(
                "with manual=True your own step decides what is accumulated: leave over_window out, and weight the loss"
            )
        self.balance = balance
        self.example_batch = example_batch
        self.prog_bar = prog_bar
        self._attached = Attachment(self)
        self._bound: nn.ModuleList | None = None
        self._share: Distillation | None = None
        self._validation: Validation | None = None
        # What training has come to: for a checkpoint, or for another fit of the same module.
        self._learned: dict[str, Tensor] = {}
        self._settled = False
        self._learned_with: weakref.ref[LightningModule] | None = None

    @property
    def state_key(self) -> str:
        return self._generate_state_key(name=self.name)

    @property
    def projectors(self) -> Mapping[str, nn.ModuleList]:
        """The projectors in training, by the name of their pair; empty outside a fit."""
        return {b.pair.name: b.projectors for b in self._bound or () if isinstance(b, BoundPair)}

    # -- before the strategy wraps the student --------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        self._close()
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        rivals = [c for c in callbacks if isinstance(c, DistillationCallback) and c is not self]
        refuse(self, rivals, trainer, pl_module)
        put_before_finders(trainer, self)
        self._attached.open(trainer, pl_module)
        close_on_interruption(trainer, self._attached)
        self._attached.undo(self._drop)
        with self._attached.closing_on_error(), isolate_rng(include_cuda=torch.cuda.is_available()):
            self._attached.undo(self.teacher.release)
            self.teacher.place(
                trainer.strategy.root_device, trainer.precision_plugin.convert_module, student=pl_module
            )
            self.teacher.check(ProductSpec.union(pair.teacher for pair in self.pairs))
            before_wrapping(pl_module, self._attached, lambda: self._make_projectors(trainer, pl_module))

    def _make_projectors(self, trainer: Trainer, pl_module: LightningModule) -> None:
        with self._attached.closing_on_error(), isolate_rng(include_cuda=torch.cuda.is_available()):
            assert self.teacher.module is not None
            pairs = [pair.resolve(pl_module, self.teacher) for pair in self.pairs]
            ours, theirs = measure(pairs, self.teacher, trainer, pl_module, example_batch=self.example_batch)
            bound = nn.ModuleList(
                BoundPair(pair, ours.get(pair.name), theirs.get(pair.name)) for pair in pairs
            )
            for entry in bound:
                assert isinstance(entry, BoundPair)
                entry.bind(pl_module, self.teacher.module)
            if self.balance is not None:
                bound.append(self.balance.made_for([pair.name for pair in self.pairs]))
            if isinstance(trainer.precision_plugin, (DoublePrecision, HalfPrecision)):
                # Now and not with the student: a checkpoint is loaded before that, and would be rounded.
                trainer.precision_plugin.convert_module(bound)
            if self._learned_with is not None and self._learned_with() is pl_module:
                _load(bound, self._learned, self.name)
            if is_sharding(trainer):
                spread(bound, mesh_of(pl_module), trainer)
            if any(p.requires_grad for p in bound.parameters()) or any(True for _ in bound.buffers()):
                Auxiliary.put(pl_module, self.name, bound)
                self._attached.undo(lambda: Auxiliary.remove(pl_module, self.name))
            self._bound = bound
            self._learned_with = weakref.ref(pl_module)
            self._attached.undo(self._keep_learned)

    # -- the fit --------------------------------------------------------------------------------

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._bound is not None, "setup('fit') runs before on_fit_start"
        with self._attached.closing_on_error():
            enrol(pl_module, trainer.optimizers)
            if is_sharding(trainer):
                loads_plain_checkpoints(trainer, pl_module, self._attached)
                saves_after_the_fit(trainer, pl_module)
            bound = [b for b in self._bound if isinstance(b, BoundPair)]
            averaged = [b for b in bound if b.pair.over_window]
            balance = next((b for b in self._bound if isinstance(b, Balance)), None)
            scaler = getattr(trainer.precision_plugin, "scaler", None)
            if balance is not None and scaler is not None:
                balance.loss_scale = lambda: float(scaler.get_scale())
            share = (ManualDistillation if self.manual else Distillation)(
                self.name,
                self.teacher,
                pl_module,
                bound,
                task_weight=self.task_weight,
                every_n_steps=self.every_n_steps,
                clock=lambda: (trainer.global_step, trainer.current_epoch),
                balance=balance,
                window=Window(trainer, averaged) if averaged else None,
                copy=self.teacher.copy,
                prog_bar=self.prog_bar,
            )
            self._attached.undo(share.close)
            DistilledStep.join(pl_module, share, needs_every_gradient=needs_every_gradient(trainer))
            self._attached.undo(lambda: DistilledStep.leave(pl_module, share))
            self._share = share
            if self.validate:
                self._validation = Validation(share)
                self._attached.undo(self._validation.close)
        rank_zero_info(self._account())

    def _account(self) -> str:
        module = self.teacher.module
        parameters = sum(p.numel() for p in module.parameters()) if module is not None else 0
        pairs = "; ".join(map(repr, self.pairs))
        placed = "" if self.teacher.placement == "replicated" else f", {self.teacher.placement}"
        return f"{self.name}: teacher {type(module).__name__} with {parameters:,} parameters, frozen{placed}. {pairs}"

    def distillation_loss(self, batch: Any) -> Tensor:
        """The weighted sum of the terms, for a ``training_step`` that optimizes manually (``manual=True``).

        Call it after the student's forward, inside ``training_step``: it runs the teacher on `batch`
        and compares with what the student did since the step began, or since the last call. Where
        no term is on in this step it is zero.

        Raises:
            RuntimeError: outside the training step of the fit, or when the callback adds its loss itself.

        Example::

            def training_step(self, batch, batch_idx):
                optimizer = self.optimizers()
                loss = self.loss(self(batch[0]), batch[1]) + self.distillation.distillation_loss(batch)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
        """
        if not self.manual:
            raise RuntimeError(
                "this callback adds its loss by itself; distillation_loss is for manual optimization, with manual=True"
            )
        if not isinstance(self._share, ManualDistillation):
            raise RuntimeError(
                "distillation_loss(batch) is for the training_step of a fit, and none is running"
            )
        return self._share.now(batch)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.teacher.inspect(getattr(trainer.train_dataloader, "dataset", None))
        self._prove_equal_batches([trainer.num_training_batches], "training")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.teacher.commit()
        if self._share is not None and self._share.window is not None:
            self._share.window.check(wait=True)
        if self._share is not None:
            self._share.tell_failures(epoch_ends=True)
        if isinstance(self._share, ManualDistillation) and not self._share.asked:
            raise MisconfigurationException(
                f"{type(pl_module).__name__} optimizes manually and its training_step never called "
                f"distillation_loss(batch) of the distillation {self.name!r}, so nothing was distilled in this epoch"
            )

    def _prove_equal_batches(self, counts: Sequence[float], what: str) -> None:
        if self.teacher.placement == "sharded" and is_spread():
            prove_equal_batches(counts, what)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validation is not None:
            self._prove_equal_batches(trainer.num_val_batches, "validation")

    def on_validation_batch_start(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._validation is not None:
            self._validation.begin(trainer, batch)

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._validation is not None:
            self._validation.end(trainer, batch)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._validation is not None:
            self._validation.report(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Before callbacks that put an average of the weights in their place: a checkpoint written
        # from now on holds what training has come to, as those written before do.
        self._keep_learned()
        self._settled = True

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit":
            self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if is_sharding(trainer):
            # Gathering what was learned would wait for ranks that may be gone.
            self._settled, self._learned_with = True, None
        self._close()

    def _close(self) -> None:
        self._attached.close()

    def _drop(self) -> None:
        self._share = self._bound = self._validation = None
        self._settled = False

    def _keep_learned(self) -> None:
        if self._bound is not None and not self._settled:
            self._learned = weights(self._bound)

    # -- the callback's state -------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        self._keep_learned()
        return {"projectors": self._learned, "pairs": self._names()} if self._learned else {}

    def _names(self) -> list[str]:
        return [pair.name for pair in self.pairs]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        # Called for every stage; only a fit has projectors, and it has them by now.
        if self._bound is None or "projectors" not in state_dict:
            return
        if state_dict["pairs"] != self._names():
            raise MisconfigurationException(
                f"the checkpoint of the distillation {self.name!r} has the pairs {state_dict['pairs']}, and here they "
                f"are {self._names()}: their projectors and the optimizer's state would be mixed up. Resume with the "
                "same pairs in the same order"
            )
        _load(self._bound, state_dict["projectors"], self.name)

    def __getstate__(self) -> dict[str, Any]:
        # Copies and pickles are those of a callback between fits: hooks and wrappers stay with the original.
        if not any(hasattr(p, "full_tensor") for b in self._bound or () for p in b.parameters()):
            self._keep_learned()  # shards would have to be gathered, and one rank alone may be copying
        return {
            **self.__dict__,
            "_attached": None,
            "_bound": None,
            "_share": None,
            "_validation": None,
            "_learned_with": None,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _attached=Attachment(self), _settled=False)

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        trained = any(pair.projector is not None for pair in self.pairs)
        elsewhere = isinstance(trainer.strategy.launcher, _MultiProcessingLauncher) and self._bound is None
        if trained and elsewhere and not self._learned and trainer.state.fn == "fit":
            raise MisconfigurationException(
                f"the projectors of the distillation {self.name!r} were trained in processes that have ended, and this one "
                "has never seen them: have checkpoints written in the fit, by ModelCheckpoint, or use strategy='ddp'. "
                "The student's weights alone are saved by save_student"
            )

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if self._bound is None or not any(True for _ in self._bound.parameters()):
            return
        if self.state_key not in checkpoint.get("callbacks", {}):
            raise MisconfigurationException(
                f"this checkpoint holds no projectors of the distillation {self.name!r}, which would start anew: it "
                "was written without the callback, under another name, or with save_weights_only=True. To begin a "
                "new fit from its weights, load them into the LightningModule and pass no ckpt_path"
            )


def _check_flags(**flags: Any) -> None:
    for flag, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{flag} must be True or False, got {value!r}")


def _checked_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    if not isinstance(pairs, Iterable):
        raise TypeError(f"pairs must be a list of Pair objects, got {pairs!r}")
    pairs = list(pairs)
    if not pairs:
        raise ValueError("pairs is empty: there is nothing to distil")
    for pair in pairs:
        if not isinstance(pair, Pair):
            raise TypeError(f"pairs must hold Pair objects, got {type(pair).__name__}: {pair!r}")
    names = [pair.name for pair in pairs]
    for name in names:
        if names.count(name) > 1 or name == "total":
            raise ValueError(f"two terms would be logged as {name!r}: give each Pair a name= of its own")
    return pairs


def _load(bound: nn.Module, learned: Mapping[str, Tensor], name: str) -> None:
    own = bound.state_dict()
    unlike = [key for key in own if key not in learned or own[key].shape != learned[key].shape]
    unlike += [key for key in learned if key not in own]
    if unlike:
        raise MisconfigurationException(
            f"the saved projectors of the distillation {name!r} are those of other pairs: {', '.join(sorted(unlike))} "
            "differ. Resume with the pairs that the checkpoint was written with"
        )
    restore(bound, learned)
