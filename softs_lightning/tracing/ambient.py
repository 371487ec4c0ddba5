"""Torch's state of one thread, taken on the caller's and set up on that of a block.

A new thread starts with torch's defaults. What a ``with`` around the trace set up (no_grad, autocast, a default
device, a fake-tensor mode, a CUDA stream, ...) holds in its blocks as well, and because each block has its own
copy, what a block sets up never reaches the model.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import overrides
from torch.utils import _python_dispatch

__all__ = ["snapshot"]

# Torch 2.6 has no way to look at the hooks for saved tensors, so there they do not reach a block.
_TOP_HOOKS = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
_USUAL = {("cpu", False, torch.bfloat16), ("cuda", False, torch.float16)}  # autocast of a new thread


def snapshot() -> Callable[[], AbstractContextManager[None]]:
    """The state of this thread; what is returned makes a context manager that sets it up on another.

    Raises:
        RuntimeError: inside of a function transform (vmap, grad, ...), which no other thread can take part in.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError(
            "a model cannot be traced inside of a torch.func transform (vmap, grad, jvp, ...), because what a "
            "block does on its own thread would not be transformed; transform inside of the block instead"
        )
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _kinds()]
    cache = torch.is_autocast_cache_enabled()
    # There is no public way to look at the two stacks of modes, nor at the hooks for saved tensors.
    functions: list[Any] = []
    dispatches: list[Any] = []
    if torch._C._len_torch_function_stack():
        functions = overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    if torch._C._len_torch_dispatch_stack():
        dispatches = _python_dispatch._get_current_dispatch_mode_stack()
    hooks: tuple[Any, Any] | None = None if _TOP_HOOKS is None else _TOP_HOOKS(False)
    # A default device is a mode, too.
    default = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None) if functions else None
    cuda: tuple[int, torch.cuda.Stream] | None = None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cuda = torch.cuda.current_device(), torch.cuda.current_stream()

    usual = grad and not inference and cache and _USUAL.issuperset(autocast)
    if usual and not (functions or dispatches or hooks or default or cuda):
        return nullcontext  # a new thread is set up like that; doing it takes longer than a small layer

    @contextmanager
    def set_up() -> Iterator[None]:
        if cuda is not None:
            torch.cuda.set_device(cuda[0])
            torch.cuda.set_stream(cuda[1])
        if default is not None:
            torch._GLOBAL_DEVICE_CONTEXT.device_context = default
        torch.autocast_increment_nesting()  # or the end of an autocast in the block would empty the cache
        torch.set_autocast_cache_enabled(cache)
        for kind, enabled, dtype in autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            if hooks is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*hooks)
            # Pushed rather than entered: entering changes state that all threads share.
            for mode in functions:
                overrides._push_mode(mode)  # type: ignore[no-untyped-call]
            for mode in dispatches:
                _python_dispatch._push_mode(mode)
            try:
                yield
            finally:
                for _ in dispatches:
                    _python_dispatch._pop_mode()
                for _ in functions:
                    overrides._pop_mode()  # type: ignore[no-untyped-call]

    return set_up


@functools.cache
def _kinds() -> set[str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return {"cpu"} if accelerator is None else {"cpu", accelerator.type}
