"""One block of a trace whose inputs make one batch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from softs_lightning.tracing.batching import Inputs, rows_of
from softs_lightning.tracing.capture import Body, Capturing, FunctionBody
from softs_lightning.tracing.saving import save, save_or_call
from softs_lightning.tracing.worker import ACTIVE

if TYPE_CHECKING:
    from softs_lightning.tracing.tracer import InterleavingTracer

__all__ = ["Invoker", "Outcome"]


class Invoker(Capturing):
    """One ``with tracer.invoke(x):`` block: registers its input and its body with the trace around it."""

    _keeps = True
    _save = staticmethod(save_or_call)

    def __init__(self, tracer: "InterleavingTracer", args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if tracer._outer is None:
            running = ACTIVE.worker is not None
            raise ValueError(
                "tracer.invoke() belongs in the body of a trace that got no input"
                + (", not in a block of a running one" if running else "; this one is not collecting invokes")
            )
        self._tracer: InterleavingTracer | None = tracer
        self.inputs: Inputs | None = None
        if args or kwargs:
            self.inputs = tracer._tokenized(args, kwargs)
            rows_of(self.inputs)
        self.body: Body
        self._outcome = Outcome()

    def _execute(self, body: Body) -> None:
        if self._tracer is None or self._tracer._outer is None:
            raise ValueError("the trace of this invoke is over")
        self.body = body
        self._tracer._invokes.append(self)
        self._tracer = None

    def __call__(self, function: Callable[..., Any]) -> "Outcome":
        self._execute(FunctionBody(function, (self._tracer,)))
        save(self._outcome)  # the name it is bound to is one of the body around
        return self._outcome

    def finish(self) -> None:
        if isinstance(self.body, FunctionBody):
            self._outcome.value = self.body.value
        self.body.release()
        self.inputs = None


class Outcome:
    """Stands for what a function decorated with ``@tracer.invoke(...)`` returns: ``value``, after the trace."""

    value: Any

    def __getattr__(self, name: str) -> Any:
        if name == "value":
            raise AttributeError(
                "the block of this invoke has not run yet; its value is there after the trace"
            )
        raise AttributeError(name)
