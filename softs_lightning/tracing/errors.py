"""What a trace raises, and the signals it unwinds threads with."""

__all__ = ["OutOfOrderError", "OutsideTraceError", "WithBlockNotFoundError"]


class WithBlockNotFoundError(RuntimeError):
    """The source of a with block cannot be found, so it cannot be captured."""


class OutOfOrderError(RuntimeError):
    """A block asked for a location that the run has passed, or that it never reached."""


class OutsideTraceError(RuntimeError):
    """Something that only means something while a trace runs was used outside of one."""


class Unwind(BaseException):
    """Ends the model's part of a run early.

    A ``BaseException``, so that a model's own ``except Exception`` does not swallow it.
    """


class Cancelled(BaseException):
    """Ends a block whose run is over; never leaves the thread it is thrown into."""


class LastStep(BaseException):
    """Tells a loop over the steps of a run that there is no other."""


class Skip(BaseException):
    """Keeps a captured with block from running where it stands."""
