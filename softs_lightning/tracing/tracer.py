"""The tracers: what ``trace``, ``generate``, ``scan`` and ``invoke`` hand to a with statement."""

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from softs_lightning.tracing import ambient
from softs_lightning.tracing.batching import Inputs, RowRange, join, leaves, rows_of, tokenized
from softs_lightning.tracing.baton import surely
from softs_lightning.tracing.cache import CacheView, Recorder, selected
from softs_lightning.tracing.capture import Body, Capturing, own_frames_removed
from softs_lightning.tracing.interleave import Run
from softs_lightning.tracing.interpose import Interposed
from softs_lightning.tracing.invoke import Invoker
from softs_lightning.tracing.iterations import Barrier, Iterations
from softs_lightning.tracing.reads import STOP, Where
from softs_lightning.tracing.saving import Saves, current_saves, save_or_call
from softs_lightning.tracing.worker import ACTIVE, OUTPUT, RESULT, Worker, current_worker

if TYPE_CHECKING:
    from softs_lightning.tracing.envoy import Envoy

__all__ = ["InterleavingTracer", "tree"]


class InterleavingTracer(Capturing):
    """Runs the body of a with statement interleaved with a call of the model.

    Args:
        envoy: whose module is called.
        fn: what to call in its place: a callable, or the name of a method of the module.
        args: the arguments of the call.
        kwargs: the arguments of the call.
    """

    _save = staticmethod(save_or_call)

    def __init__(
        self, envoy: "Envoy", fn: Callable[..., Any] | str | None, /, *args: Any, **kwargs: Any
    ) -> None:
        self.envoy: Envoy | None = envoy
        self.fn = fn
        self.args = args
        self.kwargs = kwargs
        self._run: Run | None = None
        self._standing: Interposed | None = None
        self._blocks: list[tuple[Body, RowRange | None]] = []
        self._invokes: list[Invoker] = []
        self._outer: tuple[Any, Any] | None = (
            None  # what was active around, while the body runs that registers them
        )
        self._caches: list[Recorder] = []

    def __repr__(self) -> str:
        name = self.fn if isinstance(self.fn, str) else "trace"
        return f"<a tracer for {name}(): use it in a with statement or as a decorator>"

    # In a block.

    @property
    def result(self) -> Any:
        """What the traced call returned. It comes last: no location can be asked for after it."""
        return self._worker("tracer.result").read(RESULT, OUTPUT, "tracer.result")

    @result.setter
    def result(self, value: Any) -> None:
        raise AttributeError("tracer.result is read only: assign the output of the model instead")

    def stop(self) -> None:
        """Leave the model here; what was read, changed and saved up to this point counts.

        Other blocks that wait at this very location are still served. The block itself goes on, but no location
        after this one can be reached. Code of the model that a ``finally`` or an ``except BaseException`` guards
        still runs on the way out; forward hooks do not, not even those registered with ``always_call=True``.

        >>> import torch
        >>> from softs_lightning.tracing import Envoy
        >>> model = Envoy(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(7, 7)))
        >>> with model.trace(torch.ones(1, 2)) as tracer:  # the last layer would not fit
        ...     hidden = model[1].output.save()
        ...     tracer.stop()
        >>> hidden.shape
        torch.Size([1, 3])
        """
        worker = self._worker("tracer.stop()")
        worker.run.stop(worker)

    @property
    def iter(self) -> Iterations:
        """Visits of a location by number: ``for step in tracer.iter[:3]``; see `Iterations`.

        >>> import torch
        >>> from softs_lightning.tracing import Envoy
        >>> model = Envoy(torch.nn.Sequential(*[torch.nn.Tanh()] * 3))  # one module, three times
        >>> with model.trace(torch.ones(1)) as tracer:
        ...     found = [].save()
        ...     for step in tracer.iter[1:]:
        ...         found.append((step, round(model[0].output.item(), 2)))
        >>> found
        [(1, 0.64), (2, 0.57)]
        """
        root = 0 if self.envoy is None else id(self.envoy.module)
        return Iterations(root=root)

    def all(self) -> Iterations:
        """Every visit: the same as ``tracer.iter[:]``."""
        return self.iter[:]

    def barrier(self, n: int) -> Barrier:
        """A meeting point for ``n`` blocks of this trace.

        Each block calls it; nothing below a barrier runs before everything above it, in all of them. It can be
        used again. If fewer blocks get there, those that wait raise ValueError when the run ends.

        >>> import torch
        >>> from softs_lightning.tracing import Envoy
        >>> model = Envoy(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
        >>> with model.trace() as tracer:
        ...     barrier = tracer.barrier(2)
        ...     with tracer.invoke(torch.zeros(1, 1)):
        ...         barrier()
        ...         model[0].output = given
        ...         result = model.output.save()
        ...     with tracer.invoke(torch.ones(1, 1)):
        ...         given = model[0].output * 100
        ...         barrier()
        >>> result.item()
        1.0
        """
        return Barrier(n)

    def cache(
        self,
        modules: "Sequence[Envoy | str] | None" = None,
        device: torch.device | str | None = torch.device("cpu"),  # noqa: B008
        dtype: torch.dtype | None = None,
        detach: bool = True,
        include_output: bool = True,
        include_inputs: bool = False,
        non_blocking: bool = False,
    ) -> CacheView:
        """Record many modules at once, after every change that blocks make; needs no ``save``.

        Args:
            modules: envoys or paths; None for every module.
            device: where tensors are moved to; None leaves them where they are.
            dtype: what floating-point tensors are cast to; None leaves them.
            detach: whether they leave the autograd graph.
            include_output: whether to record what modules return.
            include_inputs: whether to record what they are called with.
            non_blocking: whether the move to ``device`` may go on in the background.

        Raises:
            ValueError: the block has already read or changed something, which the cache would have missed.
            KeyError: a path names no module of the traced model.

        >>> import torch
        >>> from softs_lightning.tracing import Envoy
        >>> model = Envoy(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU()))
        >>> with model.trace(torch.ones(1, 2)) as tracer:
        ...     cache = tracer.cache()
        ...     model[0].output[:] = -1
        >>> cache.keys(), cache["model.1"].output
        (['model.0', 'model.1', 'model'], tensor([[0., 0., 0.]]))
        """
        run, rows = self._run, None
        if self._outer is None or ACTIVE.worker is not None:
            worker = self._worker("tracer.cache()")
            rows = worker.rows
            if worker.asked:
                raise ValueError("a cache has to be made before the block reads or changes anything")
        assert self.envoy is not None
        root, saves = self.envoy.path, current_saves()
        paths, targets = selected(root, self.envoy.module, modules)
        how = device, dtype, detach, include_output, include_inputs, non_blocking
        recorder = Recorder(root, paths, targets, rows, *how)
        self._caches.append(recorder)
        # Else the body runs that collects invokes, and the cache is of the whole batch.
        if run is not None:
            run.observe(recorder)
        view = recorder.view
        assert saves is not None
        saves.add(view)
        return view

    def invoke(self, /, *args: Any, **kwargs: Any) -> "Invoker":
        """A block with an input of its own, in a trace that got none.

        The inputs of all invokes make one batch, and each block reads and writes its own rows. Without an input,
        the block sees all rows. The body around the invokes runs first, to collect them; a name that one invoke
        assigns is seen by the others, unless they assigned it themselves. As a decorator, it takes a function
        as the block, and the name then stands for an `Outcome`.

        A tensor of the model counts as a batch if its dimension 0 is as long as the batch; others are seen whole.

        >>> import torch
        >>> from softs_lightning.tracing import Envoy
        >>> model = Envoy(torch.nn.Sequential(torch.nn.ReLU(), torch.nn.Tanh()))
        >>> with model.trace() as tracer:
        ...     with tracer.invoke(torch.zeros(2, 1)):
        ...         model[0].output = torch.ones(2, 1)
        ...     with tracer.invoke(torch.zeros(1, 1)):
        ...         mine = model[0].output.save()
        ...     with tracer.invoke():
        ...         whole = model[1].input.save()
        >>> mine.tolist(), whole.tolist()
        ([[0.0]], [[1.0], [1.0], [0.0]])
        """
        return Invoker(self, args, kwargs)

    def _locate(self, run: Run, steps: list[tuple[bool, Any]], kind: str) -> Where | None:
        if steps or run is not self._run or kind not in ("result", STOP):
            return None
        return RESULT, OUTPUT if kind == "result" else STOP, f"tracer.{kind}"

    def _worker(self, what: str) -> Worker:
        worker = current_worker(what)
        if worker.run is not self._run:
            raise RuntimeError(f"{what} is about another trace than the one this block is in")
        return worker

    # On the way out of the with statement.

    def _execute(self, body: Body) -> dict[str, Any]:
        if self.envoy is None:
            raise RuntimeError("this tracer has run; make a new one for each trace")
        saves = Saves(current_saves())
        surely(functools.partial(self._trace, body, saves), functools.partial(self._close, body, saves))
        return saves.named

    def _trace(self, body: Body, saves: Saves) -> None:
        try:
            if self.args or any(isinstance(each, torch.Tensor) for each in leaves(self.kwargs)):
                self._blocks = [(body, None)]
                inputs = self._tokenized(self.args, self.kwargs)
            else:
                self._collect(body, saves)
                inputs, rows = self._batch(self._invokes)
                bodies = [each.body for each in self._invokes]
                self._blocks = list(zip(bodies, rows, strict=True))
                for each in bodies:
                    each.join(bodies)
            self._interleave(inputs, saves)
        except AttributeError as error:
            if error.name == "save":
                error.add_note("for values that are no tensors, call save(value) of softs_lightning.tracing")
            raise

    def _close(self, body: Body, saves: Saves) -> None:
        """End the run and hand the names back. May be repeated, if a Ctrl-C got into it."""
        if self._outer is not None:
            ACTIVE.worker, ACTIVE.collecting = self._outer
        if self._run is not None:
            self._run.close()
        if self._standing is not None:
            self._standing.remove()
        for each, _ in self._blocks:
            each.push(saves.keeps)
        if (body, None) not in self._blocks:
            body.push(saves.keeps)
        for invoke in self._invokes:
            invoke.finish()
        self.fn, self.args, self.kwargs = None, (), {}
        self._blocks, self._invokes, self._caches = [], [], []
        self.envoy = self._run = self._standing = None

    def _collect(self, body: Body, saves: Saves) -> None:
        self._outer = ACTIVE.worker, ACTIVE.collecting
        ACTIVE.worker, ACTIVE.collecting = None, saves
        try:
            body.run()
        except BaseException as error:
            error.__traceback__ = own_frames_removed(error.__traceback__)
            raise
        finally:
            ACTIVE.worker, ACTIVE.collecting = self._outer
            self._outer = None

    def _batch(self, invokes: "list[Invoker]") -> tuple[Inputs, list[RowRange | None]]:
        if not invokes:
            raise ValueError(
                "the trace got no input: give trace() one, or use tracer.invoke(...) in its body"
            )
        with_input = [each.inputs for each in invokes if each.inputs is not None]
        assert self.envoy is not None
        module, tokenizer = self.envoy.module, self.envoy._tokenizer
        config = getattr(module, "config", None)
        padding = getattr(tokenizer, "pad_token_id", getattr(config, "pad_token_id", None))
        side = getattr(tokenizer, "padding_side", "left" if self.fn == "generate" else "right")
        args, kwargs = join(with_input, padding, side) if with_input else ((), {})
        if both := kwargs.keys() & self.kwargs.keys():
            raise ValueError(f"{', '.join(sorted(both))} is given both to the trace and to an invoke")
        rows: list[RowRange | None] = [None] * len(invokes)
        if len(with_input) > 1:
            sizes = [0 if each.inputs is None else rows_of(each.inputs) for each in invokes]
            start = 0
            for number, size in enumerate(sizes):
                if invokes[number].inputs is not None:
                    rows[number] = RowRange(start, size, sum(sizes))
                start += size
        return (args, {**kwargs, **self.kwargs}), rows

    def _tokenized(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
        assert self.envoy is not None
        return tokenized(args, kwargs, self.envoy._tokenizer, self.envoy.module)

    def _interleave(self, inputs: Inputs, saves: Saves) -> None:
        assert self.envoy is not None
        module, path = self.envoy.module, self.envoy.path
        call = (
            module if self.fn is None else getattr(module, self.fn) if isinstance(self.fn, str) else self.fn
        )
        modules = tree(module)

        def name_of(key: int, kind: str) -> str:
            name = next(name for name, each in module.named_modules() if id(each) == key)
            return f"{path}.{name}.{kind}" if name else f"{path}.{kind}"

        def ambient_of_a_thread() -> AbstractContextManager[None]:
            standing.saveable()
            return set_up()

        set_up = ambient.snapshot()
        standing = self._standing = Interposed()
        run = self._run = Run(
            [Worker(body, rows) for body, rows in self._blocks],
            dict.fromkeys(modules, 0),
            saves,
            name_of,
            ambient_of_a_thread,
        )
        for recorder in self._caches:
            run.observe(recorder)
        standing.put(modules, run)
        try:
            run.drive(functools.partial(_called, call, *inputs))
        finally:
            for recorder in self._caches:
                recorder.finish()


def tree(root: nn.Module) -> dict[int, nn.Module]:
    """Every module once, by its id; `nn.Module.modules` takes as long as a small forward."""
    seen = {id(root): root}
    stack = [root]
    while stack:
        for each in stack.pop()._modules.values():
            if each is not None and id(each) not in seen:
                seen[id(each)] = each
                if each._modules:
                    stack.append(each)
    return seen


def _called(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        return call(*args, **kwargs)
    except (TypeError, AttributeError) as error:
        if not any(isinstance(each, str) for each in leaves(args)):
            raise
        # A model may take text, but most cannot; they then fail on something that says nothing of it.
        raise TypeError(
            f"the model was given text and failed on it ({error}); to have text tokenized, make the envoy "
            "with Envoy(model, tokenizer=tokenizer), or give the model what a tokenizer returns"
        ) from error
