"""Several sessions at once: one catcher, several catchers, several threads, generators; and what is freed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softs_lightning.catcher import Capture, ModelIOCatcher
from tests.models import mlp

X = torch.linspace(-1, 1, 16).reshape(2, 8)


@pytest.fixture
def model() -> Any:
    return mlp()


def counts(buf: Capture) -> dict[str, int]:
    return {f"{kind}[{name}]": len(entries) for name, kinds in buf.items() for kind, entries in kinds.items()}


def idle(model: nn.Module) -> bool:
    """Whether a forward of the model is captured by nobody."""
    taps = [h for m in model.modules() for h in [*m._forward_hooks.values(), *m._forward_pre_hooks.values()]]
    return not any(tap.armed for tap in taps if hasattr(tap, "armed"))


# -- one catcher -----------------------------------------------------------------------------------


def test_a_second_session_of_one_catcher_is_refused_and_the_first_goes_on(model: Any) -> None:
    catcher = ModelIOCatcher(model)
    with catcher.for_product("outputs[layers.0]") as buf:
        with (
            pytest.raises(RuntimeError, match=r"open around this one.*second ModelIOCatcher"),
            catcher.for_product("outputs[layers.1]"),
        ):
            pass
        assert catcher.run(X) is None
    assert counts(buf) == {"outputs[layers.0]": 1}
    # The refused session is not kept for the next block.
    with pytest.raises(RuntimeError, match="nothing is armed"), catcher:
        pass


def test_run_inside_run_is_refused(model: Any) -> None:
    catcher = ModelIOCatcher(model)
    handle = model.layers[1].register_forward_hook(lambda *_: catcher.run(X))
    with (
        catcher.for_product("outputs[layers.2]"),
        pytest.raises(RuntimeError, match=r"called inside run\(\)"),
    ):
        catcher.run(X)
    handle.remove()
    with catcher.for_product("outputs[layers.2]") as buf:
        catcher.run(X)
    assert counts(buf) == {"outputs[layers.2]": 1}


def test_a_session_driven_by_a_generator(model: Any) -> None:
    catcher = ModelIOCatcher(model)

    def activations() -> Generator[Tensor]:
        with catcher.for_product("outputs[layers.0]") as buf:
            for i in range(3):
                catcher.run(X + i)
                yield buf["layers.0"]["outputs"].pop()

    got = list(activations())
    assert all(torch.equal(a, model.layers[0](X + i)) for i, a in enumerate(got))
    abandoned = activations()
    next(abandoned)
    assert not idle(model)
    abandoned.close()
    assert idle(model)
    with catcher.for_product("outputs[layers.1]") as buf:
        catcher.run(X)
    assert counts(buf) == {"outputs[layers.1]": 1}


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, GeneratorExit])
def test_an_exception_in_the_block_disarms(model: Any, error: type[BaseException]) -> None:
    catcher = ModelIOCatcher(model)
    buffers: list[Capture] = []

    def block() -> None:
        with catcher.for_product("inputs[layers.0]|outputs[head]", early_exit=False) as buf:
            buffers.append(buf)
            catcher.run(X)
            raise error

    with pytest.raises(error):
        block()
    assert idle(model)
    model(X)
    assert counts(buffers[0]) == {"inputs[layers.0]": 1, "outputs[head]": 1}


def test_a_failure_while_arming_disarms(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    catcher = ModelIOCatcher(model)

    def fail(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model.layers[1], "register_forward_hook", fail)
    with pytest.raises(KeyboardInterrupt), catcher.for_product("outputs[layers.0|layers.1]"):
        pass
    assert idle(model)
    with catcher.for_product("outputs[layers.0]") as buf:
        catcher.run(X)
    assert counts(buf) == {"outputs[layers.0]": 1}


# -- two catchers ----------------------------------------------------------------------------------


def test_two_catchers_watch_one_forward(model: Any) -> None:
    a, b = ModelIOCatcher(model), ModelIOCatcher(model, attach="all")
    with a(outputs=["layers.0", "head"]) as left, b(inputs=["head"], outputs=["layers.0"]) as right:
        model(X)
    assert counts(left) == {"outputs[layers.0]": 1, "outputs[head]": 1}
    assert counts(right) == {"inputs[head]": 1, "outputs[layers.0]": 1}
    assert left["layers.0"]["outputs"][0] is right["layers.0"]["outputs"][0]


def test_they_end_in_any_order(model: Any) -> None:
    a, b = ModelIOCatcher(model), ModelIOCatcher(model)
    left = a(outputs=["layers.0"]).__enter__()
    right = b(outputs=["layers.0"]).__enter__()
    model(X)
    a.__exit__(None, None, None)
    model(X)
    b.__exit__(None, None, None)
    model(X)
    assert (counts(left)["outputs[layers.0]"], counts(right)["outputs[layers.0]"]) == (1, 2)


def test_one_runs_with_an_early_exit_while_the_other_watches(model: Any) -> None:
    a, b = ModelIOCatcher(model), ModelIOCatcher(model)
    with a(outputs=["layers.0", "layers.3"]) as watching, b.for_product("outputs[layers.1]") as buf:
        assert b.run(X) is None
    assert counts(watching) == {"outputs[layers.0]": 1, "outputs[layers.3]": 0}
    assert counts(buf) == {"outputs[layers.1]": 1}


def test_an_inner_early_exit_inside_an_outer_run_ends_only_the_inner_forward(model: Any) -> None:
    outer, inner = ModelIOCatcher(model), ModelIOCatcher(model)
    inside: list[Tensor] = []
    entered: list[int] = []

    def look_ahead(module: nn.Module, args: Any, output: Tensor) -> None:
        if not entered:
            entered.append(1)
            with inner.for_product("outputs[layers.2]") as buf:
                assert inner.run(X + 1) is None
            inside.extend(buf.select())

    model.layers[1].register_forward_hook(look_ahead)
    expected = mlp()(X)
    with outer.for_product("outputs[head]", early_exit=False) as buf:
        result = outer.run(X)
    assert torch.equal(result, expected)
    assert torch.equal(buf.select()[0], expected)
    x = X + 1
    for layer in model.layers[:3]:
        last = layer(x)
        x = torch.tanh(last)
    assert torch.equal(inside[0], last)


def test_an_outer_stop_inside_an_inner_run_reaches_the_outer_run(model: Any) -> None:
    outer, inner = ModelIOCatcher(model), ModelIOCatcher(model)
    after: list[int] = []

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Tensor) -> Any:
            with inner.for_product("outputs[layers.3]") as buf:
                inner.run(x)
            after.append(len(buf["layers.3"]["outputs"]))

    outer = ModelIOCatcher(Around())
    with outer.for_product("outputs[model.layers.1]") as buf:
        assert outer.run(X) is None
    # The outer forward has what it wants in the middle of the inner one, and takes that down with it.
    assert counts(buf) == {"outputs[model.layers.1]": 1}
    assert after == []
    assert idle(model)
    with inner.for_product("outputs[layers.3]") as buf:
        assert inner.run(X) is None


def test_a_forward_driven_by_the_other_catcher_is_no_run_of_an_early_exit(model: Any) -> None:
    a, b = ModelIOCatcher(model), ModelIOCatcher(model)
    with (
        a.for_product("outputs[layers.0]"),
        b.for_product("outputs[layers.1]"),
        pytest.raises(RuntimeError, match=r"run\(\) of the catcher that opened it"),
    ):
        b.run(X)
    assert idle(model)


def test_one_catcher_detaches_and_the_others_hooks_stay(model: Any) -> None:
    a, b = ModelIOCatcher(model, attach="all"), ModelIOCatcher(model)
    own: list[int] = []
    model.layers[0].register_forward_hook(lambda *_: own.append(1))
    with b(outputs=["layers.0"]) as buf:
        a.detach_hooks()
        model(X)
    assert counts(buf) == {"outputs[layers.0]": 1}
    assert own == [1]


# -- threads ---------------------------------------------------------------------------------------


def in_thread(work: Any) -> Any:
    """What `work` returns or raises in another thread."""
    result: list[Any] = []

    def target() -> None:
        try:
            result.append(work())
        except Exception as error:
            result.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(30)
    return result[0]


def test_forwards_of_other_threads_are_not_captured(model: Any) -> None:
    catcher = ModelIOCatcher(model)
    with catcher.for_product("outputs[layers.0]") as buf:
        expected = in_thread(lambda: model(X))
        assert torch.equal(in_thread(lambda: catcher.run(X)), expected)
        assert counts(buf) == {"outputs[layers.0]": 0}
        assert catcher.run(X) is None
    assert torch.equal(expected, model(X))
    assert counts(buf) == {"outputs[layers.0]": 1}


def test_a_run_of_another_thread_in_the_middle_of_a_run_is_a_plain_call(model: Any) -> None:
    catcher = ModelIOCatcher(model)
    expected = model(X)
    beside: list[Any] = []

    def run_beside(*_: Any) -> None:
        handle.remove()
        beside.append(in_thread(lambda: catcher.run(X)))

    handle = model.layers[0].register_forward_pre_hook(run_beside)
    with catcher.for_product("outputs[layers.1]") as buf:
        assert catcher.run(X) is None
    assert torch.equal(beside[0], expected)
    assert counts(buf) == {"outputs[layers.1]": 1}


def test_another_thread_cannot_open_a_second_session(model: Any) -> None:
    catcher = ModelIOCatcher(model)

    def work() -> None:
        with catcher.for_product("outputs[layers.0]"):
            pass

    with catcher.for_product("outputs[layers.0]"):
        assert "session open in another thread" in str(in_thread(work))


def test_what_another_thread_armed_is_not_entered(model: Any) -> None:
    catcher = ModelIOCatcher(model)
    armed = catcher.for_product("outputs[layers.0]")
    in_thread(lambda: catcher.for_product("outputs[layers.1]"))
    with pytest.raises(RuntimeError, match="nothing is armed in this thread"), armed:
        pass


def test_threads_with_a_catcher_each_see_their_own_forwards(model: Any) -> None:
    gate = threading.Barrier(4)

    def work(i: int) -> tuple[list[Tensor], int]:
        catcher = ModelIOCatcher(model)
        gate.wait(20)
        got: list[Tensor] = []
        for step in range(20):
            with catcher.for_product(f"outputs[layers.{i}]") as buf:
                assert catcher.run(X + i + step / 20) is None
            got += buf.select()
        return got, i

    results: list[Any] = []
    threads = [threading.Thread(target=lambda i=i: results.append(work(i))) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 4
    for got, i in results:
        for step, value in enumerate(got):
            x = X + i + step / 20
            for layer in model.layers[: i + 1]:
                last = layer(x)
                x = torch.tanh(last)
            assert torch.equal(value, last)


# -- memory ----------------------------------------------------------------------------------------


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("attach", ["armed", "all"])
@pytest.mark.parametrize("early_exit", [True, False])
def test_the_model_is_freed_with_its_catcher_and_not_kept_by_the_buffer(
    attach: Any, early_exit: bool
) -> None:
    model = mlp()
    catcher = ModelIOCatcher(model, attach=attach)
    with torch.no_grad(), catcher.for_product("inputs[layers.0]|outputs[layers.1]", early_exit) as buf:
        catcher.run(X)
    alive = [weakref.ref(m) for m in model.modules()]
    del model, catcher
    assert [r() for r in alive] == [None] * len(alive)
    assert buf["layers.1"]["outputs"][0].shape == (2, 8)
    assert torch.equal(buf.select("inputs[layers.0]")[0], X)


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("early_exit", [True, False])
def test_the_catcher_keeps_nothing_of_a_session(model: Any, early_exit: bool) -> None:
    catcher = ModelIOCatcher(model)
    with torch.no_grad(), catcher.for_product("outputs[layers.1]", early_exit) as buf:
        catcher.run(X)
    alive = weakref.ref(buf["layers.1"]["outputs"][0])
    del buf
    assert alive() is None


@pytest.mark.usefixtures("no_gc")
def test_what_is_taken_out_of_the_buffer_is_freed_while_the_session_lasts(model: Any) -> None:
    catcher = ModelIOCatcher(model)
    alive: list[weakref.ref[Tensor]] = []
    with torch.no_grad(), catcher.for_product("outputs[layers.1]") as buf:
        for _ in range(5):
            catcher.run(X)
            alive.append(weakref.ref(buf["layers.1"]["outputs"].pop()))
        assert [r() for r in alive] == [None] * 5


@pytest.mark.usefixtures("no_gc")
def test_an_exception_in_the_model_keeps_nothing(model: Any) -> None:
    catcher = ModelIOCatcher(model)
    alive: list[weakref.ref[Tensor]] = []

    def fail(module: nn.Module, args: Any, output: Tensor) -> None:
        alive.append(weakref.ref(output))
        raise ZeroDivisionError

    handle = model.layers[2].register_forward_hook(fail)
    with torch.no_grad(), pytest.raises(ZeroDivisionError), catcher.for_product("outputs[layers.1|layers.3]"):
        catcher.run(X)
    handle.remove()
    assert catcher._session is None
    assert idle(model)
    gc.collect()  # pytest holds the traceback in a cycle of its own
    assert [r() for r in alive] == [None]
