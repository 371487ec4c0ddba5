"""Models that do unusual things while they are traced: call themselves, fail and try again, wrap, trace, fork."""

# ruff: noqa: PT012 (a trace is a with statement with a body)

import contextlib
import copy
import functools
import gc
import io
import runpy
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn

from softs_lightning.tracing import Envoy, OutOfOrderError, save
from softs_lightning.tracing.interleave import Run


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(5, 4)


class Recursive(nn.Module):
    """Calls itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, depth=2):
        x = self.layer(x)
        return 2 * (self(x, depth - 1) if depth else x)


def test_each_visit_of_a_module_within_itself_has_its_output(x):
    net = Recursive()
    model = Envoy(net)
    outputs = []
    with model.trace(x) as tracer:
        first = model.layer.output.save()
        for number in (2, 1, 0):  # the innermost returns first
            for _ in tracer.iter[number]:
                outputs.append(save(model.output))
        again = model.output.save()
    h1 = net.layer(x)
    h3 = net.layer(net.layer(h1))
    assert torch.equal(first, h1)
    assert [torch.equal(each, h3 * 2**n) for n, each in enumerate(outputs, 1)] == [True] * 3
    assert torch.equal(again, net(x))


def test_an_output_of_a_module_within_itself_can_come_too_late(x):
    model = Envoy(Recursive())
    with (
        pytest.raises(
            OutOfOrderError, match=r"model.output \(visit 2\) was asked for after the run had passed"
        ),
        model.trace(x) as tracer,
    ):
        for _ in tracer.iter[1]:
            model.output.sum()
        for _ in tracer.iter[2]:
            model.output.sum()


class Retrying(nn.Module):
    """Goes on with the next try when its layer fails."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with contextlib.suppress(RuntimeError):
            self.layer(x[:, :3])
        return self.last(self.layer(x))


def test_a_visit_that_raised_has_no_output_and_the_next_one_has(x):
    net = Retrying()
    model = Envoy(net)
    with model.trace(x) as tracer:
        narrow = model.layer.input.save()
        for _ in tracer.iter[1]:
            hidden = model.layer.output.save()
    assert narrow.shape == (5, 3)
    assert torch.equal(hidden, net.layer(x))
    with (
        pytest.raises(
            OutOfOrderError, match=r"model.layer.output was not reached, because that visit raised Run"
        ),
        model.trace(x),
    ):
        model.layer.output.sum()


class Wrapping(nn.Module):
    """Puts something around the forward of its layer when it is first called."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def counted(self, forward, x):
        self.calls += 1
        return forward(x)

    def forward(self, x):
        if not self.calls:
            self.layer.forward = functools.partial(self.counted, self.layer.forward)
        return self.layer(x)


def test_a_forward_that_the_model_wrapped_is_visited_once_by_later_traces(x):
    net = Wrapping()
    model = Envoy(net)
    for calls in (1, 2, 3):
        with model.trace(x) as tracer:
            cache = tracer.cache(modules=["layer"])
            model.layer.output[:] = calls
        assert len(cache["model.layer"]) == 1
        assert (cache["model.layer"].output == calls).all()
        assert net.calls == calls
    assert torch.equal(net(x), nn.functional.linear(x, net.layer.weight, net.layer.bias))
    assert isinstance(net.layer.__dict__["forward"], functools.partial)  # it was the model's to keep


class Replacing(nn.Module):
    """Keeps the forward of its layer in one call and puts it back in the next."""

    kept = None

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        if self.kept is None:
            self.kept, self.layer.forward = self.layer.forward, torch.tanh
        else:
            self.layer.forward = self.kept
        return self.layer(x)


def test_a_forward_that_the_model_puts_back_later_is_the_modules_own(x):
    net = Replacing()
    model = Envoy(net)
    outputs = []
    for _ in range(3):
        with model.trace(x):
            outputs.append(save(model.output))
    assert torch.equal(outputs[0], torch.tanh(x))
    assert torch.equal(outputs[2], nn.functional.linear(x, net.layer.weight, net.layer.bias))
    assert "forward" not in net.layer.__dict__


class Tracing(nn.Module):
    """Traces its own part."""

    def __init__(self):
        super().__init__()
        self.part = nn.Sequential(nn.Linear(4, 4), nn.ReLU())

    def forward(self, x):
        part = Envoy(self.part)
        with part.trace(x):
            part[0].output[:] += 1
            result = part.output.save()
        return 3 * result


def test_a_trace_sees_what_happens_in_a_trace_that_the_model_makes(x):
    net = Tracing()
    model = Envoy(net)
    with model.trace(x) as tracer:
        cache = tracer.cache()
        given = model.part[0].input.save()
        changed = model.part[0].output.clone().save()
        model.part[1].output[:, 0] = 7
        result = model.output.save()
    expected = nn.functional.linear(x, net.part[0].weight, net.part[0].bias) + 1
    assert torch.equal(given, x)
    assert torch.equal(changed, expected)  # by the trace of the model, which is part of what the model does
    assert torch.equal(result[:, 1:], 3 * expected.relu()[:, 1:])
    assert (result[:, 0] == 21).all()
    assert cache.keys() == ["model.part.0", "model.part.1", "model.part", "model"]
    assert [len(cache[path]) for path in cache] == [1, 1, 1, 1]
    assert not any("forward" in each.__dict__ for each in net.modules())


def test_a_trace_around_one_of_the_model_can_stop_in_it(x):
    net = Tracing()
    model = Envoy(net)
    with model.trace(x) as tracer:
        hidden = model.part[0].output.save()
        tracer.stop()
    assert torch.equal(hidden, nn.functional.linear(x, net.part[0].weight, net.part[0].bias) + 1)
    assert not any("forward" in each.__dict__ for each in net.modules())


class Stubborn(nn.Module):
    """Raises an error of its own, whatever leaves its layer."""

    def __init__(self, error, cause=None):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.error, self.cause = error, cause

    def forward(self, x):
        try:
            return self.layer(x)
        except BaseException:
            if self.cause is not None:
                raise self.error from self.cause
        raise self.error


@pytest.mark.parametrize("cause", [None, KeyError("for another reason")])
def test_an_error_of_a_block_is_not_hidden_by_what_the_model_makes_of_it(x, cause):
    model = Envoy(Stubborn(RuntimeError("the model's"), cause))
    with pytest.raises(ZeroDivisionError), model.trace(x):
        model.layer.output.sum() / (1 / 0)


def stopped(net, x):
    model = Envoy(net)
    with model.trace(x) as tracer:
        hidden = model.layer.output.save()
        tracer.stop()
    return hidden


def test_what_the_model_makes_of_being_stopped_is_no_error(x):
    net = Stubborn(RuntimeError("the model's"), KeyError("for another reason"))
    assert torch.equal(stopped(net, x), net.layer(x))


def test_an_error_that_did_not_come_from_being_stopped_is_said(x):
    net = Stubborn(RuntimeError("the model's"))
    with pytest.warns(UserWarning, match="the model raised RuntimeError.*after it was left by tracer.stop"):
        hidden = stopped(net, x)
    assert torch.equal(hidden, net.layer(x))


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_ctrl_c_as_the_model_is_left_comes_out(x, error):
    net = Stubborn(error, KeyError("for another reason"))
    with pytest.raises(type(error)):
        stopped(net, x)
    assert not any("forward" in each.__dict__ for each in net.modules())


class Swallowing(nn.Module):
    """Goes on whatever its layer raises."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        with contextlib.suppress(BaseException):
            x = self.layer(x)
        with contextlib.suppress(BaseException):
            x = self.last(x)
        return x


@pytest.mark.parametrize("function", ["_pause", "_forget", "_resume", "_leave"])
def test_ctrl_c_in_the_bookkeeping_of_a_trace_comes_out_whatever_the_model_swallows(x, monkeypatch, function):
    net = Swallowing()
    model = Envoy(net)
    usual, came = getattr(Run, function), []

    def interrupted(self, *args):
        if self.last and not came:
            came.append(function)
            raise KeyboardInterrupt
        return usual(self, *args)

    monkeypatch.setattr(Run, function, interrupted)
    with pytest.raises(KeyboardInterrupt), model.trace(x):
        (model.layer.output * 2).sum()
        (model.last.output * 2).sum()
    assert came
    assert not any("forward" in each.__dict__ for each in net.modules())


def test_a_visit_that_a_trace_of_the_model_left_is_said_to_be_left(x):
    class Leaving(Tracing):
        def forward(self, x):
            part = Envoy(self.part)
            with part.trace(x) as tracer:
                hidden = part[0].output.save()
                tracer.stop()
            return hidden

    model = Envoy(Leaving())
    with (
        pytest.raises(
            OutOfOrderError, match=r"model.part.output was not reached, because that visit was left"
        ),
        model.trace(x),
    ):
        model.part.output.sum()


class Copying(nn.Module):
    """Copies its layer in each call."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.ModuleList([nn.Linear(4, 4)])[0])
        self.copies = []

    def forward(self, x):
        made = copy.deepcopy(self.layer)
        self.copies.append(weakref.ref(made[0]))
        return made(x)


def test_copies_made_in_a_trace_are_like_those_made_outside(x):
    net = Copying()
    model = Envoy(net)
    gc.disable()
    try:
        with model.trace(x):
            result = model.output.save()
            made = copy.deepcopy(model.module).save()
        assert net.copies[0]() is None
    finally:
        gc.enable()
    assert torch.equal(result, net(x))
    assert not any("forward" in each.__dict__ for each in made.modules())
    made.copies.clear()
    file = io.BytesIO()
    torch.save(made, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), result)


def test_a_copy_keeps_a_forward_that_it_was_given(x):
    model = Envoy(nn.Sequential(nn.Linear(4, 4)))
    with model.trace(x):
        made = copy.deepcopy(model.module).save()
        made.forward = lambda x: x * 100
        twice = (model.output * 2).save()
    assert torch.equal(made(x), x * 100)
    assert torch.equal(twice, 2 * model.module(x))


def test_a_copy_can_be_traced_beyond_the_trace_that_it_was_made_in(x):
    model = Envoy(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    ready, over = threading.Event(), threading.Event()

    def other(made, found):
        def block(envoy):
            found.append(envoy[0].output)
            ready.set()
            over.wait(10)
            found.append(envoy[1].output)

        Envoy(made).run(block, x)

    found = []
    with model.trace(x):
        made = copy.deepcopy(model.module).save()
        thread = save(threading.Thread(target=other, args=(made, found)))
        thread.start()
        ready.wait(10)
    over.set()
    thread.join()
    assert torch.equal(found[1], made(x))
    assert torch.equal(found[0], made[0](x))
    assert not any("forward" in each.__dict__ for each in made.modules())


class Scripted(nn.Module):
    """To be scripted: with a child that is never called itself."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_scripted_part_is_one_module(x):
    part = torch.jit.script(Scripted())
    net = nn.Sequential(part, nn.Linear(4, 4))
    model = Envoy(net)
    with model.trace(x):
        hidden = model[0].output.save()
        model[1].input = hidden * 2
        result = model.output.save()
    assert torch.equal(hidden, part(x))
    assert torch.equal(result, net[1](part(x) * 2))
    alone = Envoy(part)
    with alone.trace(x):
        whole = alone.output.save()
    assert torch.equal(whole, hidden)


def test_a_stand_in_that_the_model_left_on_another_module_is_replaced(x):
    class Sharing(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.shared = nn.Linear(4, 4), nn.Linear(4, 4), False

        def forward(self, x):
            if not self.shared:
                self.shared, self.b.forward = True, self.a.forward
            return self.b(x)

    net = Sharing()
    model = Envoy(net)
    with model.trace(x):
        assert torch.equal(model.output, net.a(x))
    with model.trace(x):
        result = (model.b.output * 2).save()
    assert torch.equal(result, 2 * net.a(x))


FORKS = """
import os
import torch
from torch import nn
from softs_lightning.tracing import Envoy, save

def in_another(call):
    child = os.fork()
    if not child:
        code = 1
        try:
            call()
        except RuntimeError as error:
            code = 0 if "forked" in str(error) else 2
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]

class Forking(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x)
        self.status = in_another(lambda: self.last(x))
        return self.last(x)

x = torch.ones(2, 4)
net = Forking()
model = Envoy(net)
with model.trace(x):
    hidden = (model.first.output * 1).save()  # on a thread, which another process has not
    result = model.last.output.save()
assert net.status == 0
assert torch.equal(result, net.last(hidden))

model = Envoy(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
with model.trace(x):
    hidden = (model[0].output * 1).save()
    status = save([in_another(lambda: model[1].output.sum())])
    result = model[1].output.save()
assert status == [0]
assert torch.equal(result, model.module[1](hidden))
print("both went on")
"""


def test_a_process_forked_by_a_model_or_a_block_has_no_trace_and_leaves_that_of_the_first(tmp_path):
    script = tmp_path / "forks.py"  # a process of its own: what else runs in this one may not be forked
    script.write_text(FORKS)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "both went on\n", done.stderr[-3000:]


GLOBALS = """
import torch
from softs_lightning.tracing import Envoy, save

count, seen = 0, []
model = Envoy(torch.nn.Sequential(torch.nn.Linear(4, 4)))

def counted(value):
    global count
    count += 1
    return value

with model.trace(torch.ones(1, 4)):
    counted(model[0].input)
    counted(model[0].output)
    seen.append(count)
    later = save(count)

with model.trace() as tracer:
    for _ in range(2):
        with tracer.invoke(torch.ones(1, 4)):
            counted(model[0].output)
            seen.append(count)

width, gone = 4, 1
with model.trace(torch.ones(1, 4)):
    class Probe(torch.nn.Module):
        shape = (width, Envoy.__name__, count)
    def made():
        class Inner:
            shape = (width, Envoy.__name__, eval("count"))
        return Inner.shape
    counted(None)
    del gone
    shape = Probe.shape.save()
    inner = made().save()
    evaluated = (lambda: eval("width"))().save()
"""


def test_a_block_of_a_script_sees_what_functions_do_to_its_globals(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(GLOBALS)
    found = runpy.run_path(str(script))
    assert (found["seen"], found["later"], found["count"]) == ([2, 3, 4], 2, 5)
    assert (found["shape"], found["inner"], found["evaluated"]) == ((4, "Envoy", 4), (4, "Envoy", 5), 4)
