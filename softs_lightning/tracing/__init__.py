"""Read and change a forward pass from a with block.

=============== ==========================================================================================
reads           what a block begins with, if it only reads and saves: carried out without a thread
source          from a running frame to the compiled body of its with statement
capture         a with block that runs later, and whose names come back
baton           what one thread hands to another so that only one of them runs; clean-up despite Ctrl-C
worker          a block, on a thread of its own from the first statement on that is more than a read
interleave      a run: the model on this thread, served to the blocks that wait for it
saving          which values outlive a trace
iterations      steps of a repeated run, and barriers
interpose       what is put around a model while a trace runs
ambient         grad mode, autocast, devices, modes: from the caller to the blocks
batching        several inputs in one forward
cache           many activations at once
invoke          one block of a batch
tracer          what goes into a with statement
scan            the same, without computing
envoy           a model, seen from a block
=============== ==========================================================================================

A block shares no lock with the model: a block that takes an ``RLock`` which the model holds waits forever.
"""

from softs_lightning.tracing.cache import CacheView
from softs_lightning.tracing.envoy import Envoy
from softs_lightning.tracing.errors import OutOfOrderError, OutsideTraceError, WithBlockNotFoundError
from softs_lightning.tracing.invoke import Invoker, Outcome
from softs_lightning.tracing.iterations import Barrier, Iterations
from softs_lightning.tracing.saving import save
from softs_lightning.tracing.scan import ScanningTracer
from softs_lightning.tracing.tracer import InterleavingTracer

__all__ = [
    "Barrier",
    "CacheView",
    "Envoy",
    "InterleavingTracer",
    "Invoker",
    "Iterations",
    "OutOfOrderError",
    "Outcome",
    "OutsideTraceError",
    "ScanningTracer",
    "WithBlockNotFoundError",
    "save",
]
