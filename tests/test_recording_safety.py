"""Recording where it could go wrong: threads, exceptions, copies, checkpointing, compiled code."""

from __future__ import annotations

import asyncio
import copy
import gc
import io
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from softs_lightning.catcher import ModelIOCatcher
from softs_lightning.recording import OutputRecorder, capture_outputs
from tests.recorded_models import Attention, Block, Decoder, Output, x


def blocks(model: Any) -> list[Any]:
    return list(model.layers)


def equal(got: Any, expected: Any) -> bool:
    return len(got) == len(expected) and all(map(torch.equal, got, expected))


# -- threads and tasks -----------------------------------------------------------------------------


class Meeting(nn.Module):
    """A layer in which two threads wait for each other, so that their forwards overlap for certain."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(2, timeout=300)

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        self.barrier.wait()
        return hidden_states + 1, hidden_states * 2


class Met(nn.Module):
    _can_record_outputs = {"hidden_states": Meeting, "attentions": Meeting}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Meeting() for _ in range(3))

    @capture_outputs
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> dict[str, Any]:
        for layer in self.layers:
            hidden_states = layer(hidden_states)[0]
        return {"y": hidden_states}


PARTNERS: list[dict[str, bool]] = [
    {},
    {"output_attentions": True},
    {"output_hidden_states": True},
    {"output_hidden_states": True, "output_attentions": True},
]


def check_met(out: dict[str, Any], start: float, flags: dict[str, bool]) -> None:
    assert set(out) == {"y", *(name.removeprefix("output_") for name in flags)}
    if "hidden_states" in out:
        assert [float(value) for value in out["hidden_states"]] == [start, start + 1, start + 2, start + 3]
    if "attentions" in out:
        assert [float(value) for value in out["attentions"]] == [2 * start, 2 * start + 2, 2 * start + 4]


@pytest.mark.parametrize("partner", PARTNERS)
def test_threads_with_other_flags_do_not_see_each_other(partner: dict[str, bool]) -> None:
    model = Met()
    flags = {"output_hidden_states": True}
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            one = pool.submit(model, torch.tensor(0.0), **flags)
            two = pool.submit(model, torch.tensor(100.0), **partner)
            check_met(one.result(), 0, flags)
            check_met(two.result(), 100, partner)


def test_tasks_do_not_see_each_other() -> None:
    model = Met()

    async def both() -> Any:
        first = asyncio.to_thread(model, torch.tensor(0.0), output_attentions=True)
        return await asyncio.gather(first, asyncio.to_thread(model, torch.tensor(7.0)))

    one, two = asyncio.run(both())
    check_met(one, 0, {"output_attentions": True})
    check_met(two, 7, {})


def test_layers_that_run_in_threads_of_their_own_are_not_missed_in_silence() -> None:
    class Pooled(Decoder):
        @capture_outputs
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            with ThreadPoolExecutor(1) as pool:
                for layer in self.layers:
                    hidden_states = pool.submit(layer, hidden_states).result()
            return Output(hidden_states)

    with pytest.raises(RuntimeError, match="none of the 3 modules that Pooled declares for it ran"):
        Pooled()(x(), output_hidden_states=True)


def test_a_replica_is_refused() -> None:
    model: Any = Decoder()
    replica = model._replicate_for_data_parallel()
    with pytest.raises(RuntimeError, match="use DistributedDataParallel"):
        replica(x(), output_attentions=True)


# -- exceptions, copies, replaced layers -----------------------------------------------------------


def test_after_an_exception_nothing_is_armed() -> None:
    model = Decoder()
    works = blocks(model)[1].forward
    blocks(model)[1].forward = lambda hidden_states: 1 / 0
    with pytest.raises(ZeroDivisionError):
        model(x(), output_attentions=True)
    blocks(model)[1].forward = works
    assert model(x()).attentions is None
    taps: list[Any] = [tap for module in model.modules() for tap in module._forward_hooks.values()]
    assert taps
    assert not any(tap.armed for tap in taps)
    assert len(model(x(), output_attentions=True).attentions) == 3


def test_a_copy_records_for_itself() -> None:
    model = Decoder()
    with torch.no_grad():
        model(x(), output_attentions=True)
        twin = copy.deepcopy(model)
        out = twin(x(seed=1), output_attentions=True)
        assert equal(out.attentions, [block.self_attn.seen[-1] for block in blocks(twin)])
        out = model(x(seed=2), output_attentions=True)
        assert equal(out.attentions, [block.self_attn.seen[-1] for block in blocks(model)])
    assert [len(block.self_attn.seen) for block in blocks(model)] == [2, 2, 2]


def test_a_copy_made_while_it_records_is_not_armed() -> None:
    model = Decoder()
    twins: list[nn.Module] = []
    blocks(model)[0].register_forward_hook(
        lambda *_: twins.append(copy.deepcopy(model)) if not twins else None
    )
    with torch.no_grad():
        model(x(), output_attentions=True)
        assert twins[0](x()).attentions is None
        assert len(twins[0](x(), output_attentions=True).attentions) == 3


def test_a_recorded_model_can_be_saved_and_loaded() -> None:
    with torch.no_grad():
        model = Decoder()
        expected = model(x(), output_attentions=True).attentions
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        assert equal(loaded(x(), output_attentions=True).attentions, expected)


def test_a_layer_that_was_replaced_is_found_again() -> None:
    model = Decoder()
    model(x(), output_hidden_states=True)
    old = blocks(model)[1]
    model.layers[1] = new = Block()
    model.layers.append(Block())
    out = model(x(), output_hidden_states=True)
    assert len(out.hidden_states) == 5
    assert out.hidden_states[2] is new.gave[0]
    assert len(old.gave) == 1


def test_a_declaration_that_was_changed_counts_at_once() -> None:
    model = Decoder()
    model(x(), output_attentions=True)
    model._can_record_outputs = {"attentions": OutputRecorder(Attention, index=0)}
    assert [list(value.shape) for value in model(x(), output_attentions=True).attentions] == [[2, 3, 4]] * 6


def test_the_model_is_freed_when_nobody_holds_it() -> None:
    model = Decoder()
    with torch.no_grad():
        model(x(), output_attentions=True, output_hidden_states=True)
    gone = weakref.ref(model), weakref.ref(blocks(model)[0])
    gc.disable()
    try:
        del model
        assert [ref() for ref in gone] == [None, None]
    finally:
        gc.enable()


def test_a_catcher_on_the_same_model_sees_the_same() -> None:
    model = Decoder()
    catcher = ModelIOCatcher(model)
    with catcher.for_product("outputs[%hidden_states|%attentions]", early_exit=False) as buffer:
        out = catcher.run(x(), output_hidden_states=True, output_attentions=True)
    got = buffer.select()
    expected = [*out.hidden_states, *out.attentions]
    assert all(a is b for a, b in zip(got, expected, strict=True))


# -- checkpointing ---------------------------------------------------------------------------------


class Checkpointed(Decoder):
    """Recomputes its blocks, or only their attention, in the backward pass."""

    reentrant = False
    inner = False

    @capture_outputs
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
        for layer in self.layers:
            part = layer if not self.inner else layer.self_attn
            hidden_states = checkpoint(part, hidden_states, use_reentrant=self.reentrant)
            hidden_states = hidden_states[0] if self.inner else hidden_states
        return Output(hidden_states)


def checkpointed(*, reentrant: bool, inner: bool = False) -> Checkpointed:
    torch.manual_seed(0)
    model = Checkpointed()
    model.reentrant, model.inner = reentrant, inner
    return model


@pytest.mark.parametrize("inner", [False, True])
def test_recomputing_records_nothing_twice_and_gradients_are_right(inner: bool) -> None:
    def gradients(model: nn.Module, **kwargs: Any) -> list[Any]:
        out = model(x().requires_grad_(), output_attentions=True)
        assert len(out.attentions) == 3
        sum(weights.square().sum() for weights in out.attentions).backward()
        assert len(out.attentions) == 3
        return [p.grad for p in model.parameters()]

    recomputed = checkpointed(reentrant=False, inner=inner)
    plain: Any = checkpointed(reentrant=False, inner=inner)
    plain.forward = _without_checkpoint(plain)
    for got, expected in zip(gradients(recomputed), gradients(plain), strict=True):
        assert (got is None) == (expected is None)
        assert got is None or torch.equal(got, expected)


def _without_checkpoint(model: Checkpointed) -> Any:
    @capture_outputs
    def forward(self: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
        for layer in self.layers:
            hidden_states = layer.self_attn(hidden_states)[0] if self.inner else layer(hidden_states)
        return Output(hidden_states)

    return forward.__get__(model)


@pytest.mark.parametrize("inner", [False, True])
def test_a_reentrant_checkpoint_would_cut_the_gradient_and_is_refused(inner: bool) -> None:
    model = checkpointed(reentrant=True, inner=inner)
    with pytest.raises(RuntimeError, match=r"no gradient.*re-entrant checkpoint.*use_reentrant=False"):
        model(x().requires_grad_(), output_attentions=True)


# torch says so of every re-entrant checkpoint under no_grad, whoever records.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_without_gradients_a_reentrant_checkpoint_is_no_matter() -> None:
    model = checkpointed(reentrant=True)
    with torch.no_grad():
        got = model(x(), output_attentions=True).attentions
    assert equal(got, [block.self_attn.seen[0] for block in blocks(model)])


def test_a_frozen_part_may_run_without_gradients() -> None:
    class Frozen(Decoder):
        @capture_outputs
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            with torch.no_grad():
                for layer in self.layers:
                    hidden_states = layer(hidden_states)
            return Output(hidden_states)

    assert len(Frozen()(x(), output_attentions=True).attentions) == 3


# -- compiled models -------------------------------------------------------------------------------
# torch warns about its own internals while it compiles, and turns such a warning into an error.

quiet = pytest.mark.filterwarnings("ignore")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.tanh = nn.Tanh()

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = self.tanh(self.linear(hidden_states))
        return out


class Traced(nn.Module):
    _can_record_outputs = {"hidden_states": Layer, "sums": OutputRecorder(nn.Linear, index=0)}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    @capture_outputs
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> dict[str, Any]:
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return {"y": hidden_states}


@pytest.fixture
def traced() -> Iterator[Traced]:
    torch.manual_seed(0)
    torch.compiler.reset()
    yield Traced()
    torch.compiler.reset()


def whole(model: nn.Module) -> Callable[..., Any]:
    return torch.compile(model, backend="eager")


def in_place(model: nn.Module) -> Callable[..., Any]:
    model.compile(backend="eager")
    return model


@quiet
@pytest.mark.parametrize("compiled", [whole, in_place])
@pytest.mark.parametrize("first", [False, True])
def test_a_compiled_model_records_before_and_after_a_plain_call(
    traced: Traced, compiled: Callable[..., Any], first: bool
) -> None:
    expected = traced(x(), output_hidden_states=True, output_sums=True)
    run = compiled(copy.deepcopy(traced))
    if first:
        run(x())
    for _ in range(2):
        out = run(x(), output_hidden_states=True, output_sums=True)
        assert equal(out["hidden_states"], expected["hidden_states"])
        assert equal(out["sums"], expected["sums"])
        assert set(run(x())) == {"y"}


@quiet
def test_recording_in_a_compiled_model_does_not_compile_again_and_again(traced: Traced) -> None:
    graphs: list[int] = []

    def backend(graph: Any, example: Any) -> Any:
        graphs.append(1)
        return graph.forward

    run = torch.compile(traced, backend=backend)
    for _ in range(2):
        run(x())
        run(x(), output_hidden_states=True)
    settled = len(graphs)
    for _ in range(10):
        run(x())
        run(x(), output_hidden_states=True)
    assert len(graphs) == settled


@quiet
def test_hooks_that_compiled_code_does_not_see_are_an_error(traced: Traced) -> None:
    for layer in traced.layers:
        layer.compile(backend="eager")
    traced(x())
    with pytest.raises(
        RuntimeError, match=r"none of the 3 modules that Traced declares.*torch\.compiler\.reset"
    ):
        traced(x(), output_sums=True)
    torch.compiler.reset()
    assert len(traced(x(), output_sums=True)["sums"]) == 3


@quiet
def test_compiled_code_that_misses_some_of_them_is_an_error(traced: Traced) -> None:
    traced.layers[1].compile(backend="eager")
    traced(x())
    with pytest.raises(RuntimeError, match="2 of the 3 modules that Traced declares"):
        traced(x(), output_sums=True)


@quiet
def test_hooks_placed_before_compiling_fire(traced: Traced) -> None:
    expected = traced(x(), output_sums=True)["sums"]
    for layer in traced.layers:
        layer.compile(backend="eager")
    traced(x())
    assert equal(traced(x(), output_sums=True)["sums"], expected)


@quiet
def test_a_single_graph_cannot_record_and_says_so(traced: Traced) -> None:
    run = torch.compile(traced, backend="eager", fullgraph=True)
    assert set(run(x())) == {"y"}
    with pytest.raises(torch._dynamo.exc.Unsupported):
        run(x(), output_hidden_states=True)


def test_a_module_that_holds_its_parent_is_no_endless_loop() -> None:
    model = Decoder()
    blocks(model)[0].parent = model
    assert len(model(x(), output_attentions=True).attentions) == 3
