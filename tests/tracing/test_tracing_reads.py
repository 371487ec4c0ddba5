"""Reads at the beginning of a block are carried out without a thread, and mean the same as with one."""

# ruff: noqa: PT012, SIM117 (a trace is a with statement with a body)

import sys
import threading

import pytest
import torch
from torch import nn

from softs_lightning import tracing
from softs_lightning.tracing import Envoy, OutOfOrderError, save


@pytest.fixture
def model(net):
    return Envoy(net)


@pytest.fixture
def started(monkeypatch):
    """The names of the threads that are started."""
    names = []
    start = threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", lambda self: names.append(self.name) or start(self))
    return names


def test_reads_saves_and_a_stop_start_no_thread(model, net, x, hooked, started):
    with model.trace(x) as tracer:
        whole_input = model.inputs.save()
        first = save(model.first.output)
        unnamed = model.act.input.save()
        second = model["second"].output.save()
        tracer.stop()
    seen, _ = hooked(net, x)
    assert started == []
    assert whole_input == ((x,), {})
    assert torch.equal(first, seen["first"][0][2])
    assert torch.equal(unnamed, seen["act"][0][0][0])
    assert torch.equal(second, seen["second"][0][2])


def test_the_result_without_a_thread(model, net, x, started):
    with model.trace(x) as tracer:
        hidden = model.second.output.save()
        result = tracer.result.save()
    assert started == []
    assert torch.equal(result, torch.tanh(hidden))


def test_indices_by_constants_and_variables(x, started):
    net = nn.Sequential(nn.Linear(3, 3), nn.ModuleDict({"a": nn.Linear(3, 3)}), nn.Tanh())
    net.forward = lambda x: net[2](net[1]["a"](net[0](x)))
    model, index, key = Envoy(net), 0, "a"
    with model.trace(x):
        first = model[index].output.save()
        inner = model[1][key].output.save()
        last = model[-1].output.save()
    assert started == []
    assert torch.equal(first, net[0](x))
    assert torch.equal(inner, net[1]["a"](first))
    assert torch.equal(last, torch.tanh(inner))


def test_what_follows_has_a_thread_and_the_same_place(model, net, x, started):
    with torch.no_grad(), model.trace(x):
        hidden = model.first.output
        before = hidden.clone().save()
        hidden[:, 0] = 7
        result = model.output.save()
    assert started == ["traced block"]
    assert torch.equal(before, net.first(x))
    before[:, 0] = 7
    assert torch.equal(result, torch.tanh(net.second(torch.tanh(before))))


def test_a_thread_that_is_late_has_the_state_of_the_caller(x, started):
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return self.inner(x)

    model = Envoy(Frozen())
    with model.trace(x):
        model.inner.input.save()
        enabled = save(torch.is_grad_enabled())
    assert started == ["traced block"]
    assert enabled


def test_names_that_mean_something_else_are_run(model, x, started):
    class Odd:
        output = property(lambda self: asked.append(1) or model.first.output)

    class Sub(Envoy):
        output = property(lambda self: "mine")

    asked, odd, sub, keep = [], Odd(), Sub(model.module), tracing.save

    def save(value):
        return keep([value])

    with model.trace(x):
        through = odd.output.save()
    with model.trace(x):
        kept = save(sub.output)
    assert started == ["traced block"] * 2
    assert asked == [1]
    assert through.shape == (4, 5)
    assert kept == ["mine"]


def test_an_own_save_of_the_value_is_called(x):
    class Figure:
        def save(self):
            return said.append("to disk")

    said = []
    net = nn.Module()
    net.forward = lambda x: Figure()
    model = Envoy(net)
    with model.trace(x):
        model.output.save()
    assert said == ["to disk"]


def test_an_unknown_module_is_an_error_on_its_line(model, x):
    with pytest.raises(AttributeError, match=r"has no 'secnd'; did you mean second") as caught:
        with model.trace(x):
            hidden = model.first.output.save()
            model.secnd.output.save()
    assert hidden.shape == (4, 5)
    assert str(caught.traceback[-1].statement).strip().startswith("model.secnd")


def test_a_read_that_comes_too_late_is_on_its_line(model, x):
    with pytest.raises(OutOfOrderError, match=r"model\.first\.output was asked for after") as caught:
        with model.trace(x):
            hidden = model.second.output.save()
            late = model.first.output.save()  # noqa: F841
    assert hidden.shape == (4, 2)
    assert str(caught.traceback[-1].statement).strip().startswith("late =")


def test_a_read_that_is_never_reached_is_on_its_line(model, net, x):
    net.spare = nn.Linear(1, 1)
    with pytest.raises(OutOfOrderError, match=r"model\.spare\.output was not reached") as caught:
        with model.trace(x):
            hidden = model.first.output.save()
            never = model.spare.output.save()  # noqa: F841
    assert hidden.shape == (4, 5)
    assert str(caught.traceback[-1].statement).strip().startswith("never =")


def test_blocks_of_a_batch_read_their_rows_without_threads(model, net, x, started):
    with model.trace() as tracer:
        with tracer.invoke(x[:1]):
            one = model.first.output.save()
        with tracer.invoke(x[1:]):
            others = model.first.output.save()
            shared = one.save()
        with tracer.invoke():
            whole = model.act.input.save()
    assert started == ["traced block"]
    assert torch.equal(torch.cat([one, others]), whole)
    assert torch.equal(shared, one)
    assert torch.equal(whole, net.first(x))


def test_no_line_is_kept_from_a_trace_function(model, x, started):
    lines = []

    def see(frame, event, _):
        if event == "line" and frame.f_code.co_name == "traced":
            lines.append(frame.f_lineno)
        return see

    def traced():
        with model.trace(x):
            hidden = model.first.output.save()
        return hidden  # noqa: RET504

    before = sys.gettrace()
    sys.settrace(see)
    try:
        traced()
    finally:
        sys.settrace(before)
    assert traced.__code__.co_firstlineno + 2 in lines
    assert started == ["traced block"]


def test_unsaved_reads_do_not_come_back(model, x):
    lost = "before"
    with model.trace(x):
        lost = model.first.output
        model.second.output  # noqa: B018
        model.act.output.save() if False else None
    assert lost == "before"


def test_a_model_error_while_a_read_waits(model, net, x, started):
    net.act.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), model.trace(x):
        hidden = model.first.output.save()
        never = model.second.output.save()  # noqa: F841
    assert hidden.shape == (4, 5)
    assert started == []
