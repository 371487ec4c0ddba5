"""The signal that stops a forward: it reaches run() through whatever the model does, and never leaves it."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from softs_lightning.catcher import ModelIOCatcher

X = torch.ones(2, 4)
Body = Callable[["Host", Tensor], Any]


class Host(nn.Module):
    """Two layers inside whatever `body` puts around them."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.body = body
        self.log: list[str] = []

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def except_exception(host: Host, x: Tensor) -> Any:
    try:
        return host.second(host.first(x))
    except Exception:
        host.log.append("swallowed")
        return x


def no_grad(host: Host, x: Tensor) -> Any:
    with torch.no_grad():
        return host.second(host.first(x))


@torch.no_grad()
def decorated(host: Host, x: Tensor) -> Any:
    return host.second(host.first(x))


def inference(host: Host, x: Tensor) -> Any:
    with torch.inference_mode():
        return host.second(host.first(x))


def autocast(host: Host, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return host.second(host.first(x))


def try_finally(host: Host, x: Tensor) -> Any:
    try:
        return host.second(host.first(x))
    finally:
        host.log.append("finally")


def generator(host: Host, x: Tensor) -> Any:
    def steps() -> Iterator[Tensor]:
        try:
            y = host.first(x)
            yield y
            yield host.second(y)
        finally:
            host.log.append("finally")

    return list(steps())


@contextlib.contextmanager
def flagged(host: Host) -> Iterator[None]:
    host.log.append("on")
    try:
        yield
    finally:
        host.log.append("off")


def context_manager(host: Host, x: Tensor) -> Any:
    with flagged(host), contextlib.ExitStack() as stack:
        stack.callback(host.log.append, "stack")
        return host.second(host.first(x))


def suppressing_exceptions(host: Host, x: Tensor) -> Any:
    with contextlib.suppress(Exception):
        return host.second(host.first(x))


def saved_tensor_hooks(host: Host, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        return host.second(host.first(x))


def checkpointed(host: Host, x: Tensor) -> Any:
    return checkpoint(lambda y: host.second(host.first(y)), x, use_reentrant=False)


def checkpointed_reentrant(host: Host, x: Tensor) -> Any:
    return checkpoint(lambda y: host.second(host.first(y)), x.requires_grad_(), use_reentrant=True)


def mapped(host: Host, x: Tensor) -> Any:
    return [host.second(y) for y in map(host.first, [x])]


class Passing(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def function_mode(host: Host, x: Tensor) -> Any:
    with Passing(), torch.device("cpu"):
        return host.second(host.first(x))


BODIES = [
    except_exception,
    no_grad,
    decorated,
    inference,
    autocast,
    try_finally,
    generator,
    context_manager,
    suppressing_exceptions,
    saved_tensor_hooks,
    checkpointed,
    checkpointed_reentrant,
    mapped,
    function_mode,
]


def thread_state() -> tuple[Any, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch._C._len_torch_function_stack(),
        torch.get_default_device(),
    )


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_the_stop_passes_through(body: Body, kind: str) -> None:
    host, second = Host(body), []
    host.second.register_forward_hook(lambda *_: second.append(1))
    before = thread_state()
    catcher = ModelIOCatcher(host)
    name = "first" if kind == "outputs" else "second"
    with catcher.for_product(f"{kind}[{name}]") as buf:
        assert [catcher.run(X.clone()), catcher.run(X.clone())] == [None, None]
    assert len(buf[name][kind]) == 2
    assert second == []
    assert "swallowed" not in host.log
    assert host.log.count("on") == host.log.count("off") == host.log.count("stack")
    assert host.log.count("finally") == (2 if body in (try_finally, generator) else 0)
    assert thread_state() == before


@pytest.mark.parametrize(
    "around", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_the_caller_may_stand_in_any_mode(around: Callable[[], Any]) -> None:
    host = Host(try_finally)
    catcher = ModelIOCatcher(host, copy=True)
    with around(), catcher.for_product("outputs[first]") as buf:
        assert catcher.run(X) is None
    with around():
        expected = host.first(X)
    assert torch.equal(buf["first"]["outputs"][0], expected)
    assert buf["first"]["outputs"][0].dtype == expected.dtype


def bare_except(host: Host, x: Tensor) -> Any:
    try:
        return host.second(host.first(x))
    except:  # noqa: E722
        return x


def return_in_finally(host: Host, x: Tensor) -> Any:
    with contextlib.suppress(BaseException):
        return host.second(host.first(x))
    return x


def retrying(host: Host, x: Tensor) -> Any:
    for _ in range(3):
        try:
            return host.second(host.first(x))
        except BaseException:
            host.log.append("again")
    return None


@pytest.mark.parametrize("body", [bare_except, return_in_finally, retrying], ids=lambda body: body.__name__)
def test_a_model_that_swallows_even_this_is_told_apart(body: Body) -> None:
    host = Host(body)
    catcher = ModelIOCatcher(host)
    with catcher.for_product("outputs[first]"):
        with pytest.raises(RuntimeError, match="swallowed the signal"):
            catcher.run(X)
        with pytest.raises(RuntimeError, match="early_exit=False"):
            catcher.run(X)
    with catcher.for_product("outputs[first]", early_exit=False) as buf:
        assert catcher.run(X).shape == (2, 4)
    assert len(buf["first"]["outputs"]) == 1


def test_an_error_after_a_swallowed_stop_is_the_models_own() -> None:
    def body(host: Host, x: Tensor) -> Any:
        try:
            return host.first(x)
        except BaseException:
            raise ZeroDivisionError("the model's own") from None

    catcher = ModelIOCatcher(Host(body))
    with catcher.for_product("outputs[first]"), pytest.raises(ZeroDivisionError, match="own"):
        catcher.run(X)


@pytest.mark.parametrize("early_exit", [True, False])
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_exception_in_the_model_passes_and_leaves_nothing_armed(
    error: type[BaseException], early_exit: bool
) -> None:
    failing = [True]

    def body(host: Host, x: Tensor) -> Any:
        y = host.first(x)
        if failing[0]:
            raise error("in the model")
        return host.second(y)

    host = Host(body)
    catcher = ModelIOCatcher(host)
    product = "outputs[first|second]"
    with (
        pytest.raises(error, match="in the model"),
        catcher.for_product(product, early_exit=early_exit) as buf,
    ):
        catcher.run(X)
    failing[0] = False
    host(X)
    assert [len(buf[name]["outputs"]) for name in ("first", "second")] == [1, 0]
    with catcher.for_product(product, early_exit=early_exit) as buf:
        catcher.run(X)
    assert [len(buf[name]["outputs"]) for name in ("first", "second")] == [1, 1]


def test_a_session_goes_on_after_an_exception_that_was_caught_inside() -> None:
    failing = [True]

    def body(host: Host, x: Tensor) -> Any:
        y = host.first(x)
        if failing.pop() if failing else False:
            raise ValueError("once")
        return host.second(y)

    catcher = ModelIOCatcher(Host(body))
    with catcher.for_product("outputs[second]") as buf:
        with pytest.raises(ValueError, match="once"):
            catcher.run(X)
        assert catcher.run(X) is None
    assert len(buf["second"]["outputs"]) == 1


def test_a_call_in_a_thread_of_the_model_is_not_captured() -> None:
    def body(host: Host, x: Tensor) -> Any:
        out: list[Tensor] = []
        worker = threading.Thread(target=lambda: out.append(host.first(x)))
        worker.start()
        worker.join()
        return host.second(out[0])

    catcher = ModelIOCatcher(Host(body))
    with catcher.for_product("outputs[first|second]") as buf:
        assert catcher.run(X) is not None
    assert [len(buf[name]["outputs"]) for name in ("first", "second")] == [0, 1]
    with pytest.raises(LookupError, match="'first' never ran"):
        buf.select()


def test_a_cut_forward_leaves_no_cycle_that_keeps_its_tensors() -> None:
    alive: list[weakref.ref[Tensor]] = []

    def body(host: Host, x: Tensor) -> Any:
        large = x * 2
        alive.append(weakref.ref(large))
        return host.second(host.first(large))

    catcher = ModelIOCatcher(Host(body))
    gc.disable()
    try:
        with torch.no_grad(), catcher.for_product("outputs[first]"):
            catcher.run(X)
        assert [entry() for entry in alive] == [None]
    finally:
        gc.enable()
