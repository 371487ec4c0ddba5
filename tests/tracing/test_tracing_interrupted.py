"""Ctrl-C at every instruction of the tracer, on the model's thread: whatever was put up is taken down."""

# ruff: noqa: PT012 (a trace is a with statement with a body)

import dis
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from softs_lightning import tracing
from softs_lightning.tracing import Envoy
from softs_lightning.tracing.interpose import _saving, _stances, _traces
from softs_lightning.tracing.worker import ACTIVE

OURS = str(Path(tracing.__file__).parent)
CAPTURE = str(Path(OURS) / "source.py"), str(Path(OURS) / "reads.py")  # which put up nothing
# Between these of an exception's handler no signal is looked at, and raising there would leave the exception handled.
BOOKKEEPING = {"PUSH_EXC_INFO", "COPY", "POP_EXCEPT", "RERAISE"}

# What a block raised just before Ctrl-C came is only said.
pytestmark = pytest.mark.filterwarnings("ignore:a traced block raised ZeroDivisionError")


class Interrupt:
    """Raises KeyboardInterrupt at an instruction, counted over the different ones that run in the tracer."""

    def __init__(self, at: int) -> None:
        self.at, self.met, self.where = at, set(), "never"

    def _call(self, frame, event, _):
        ours = frame.f_code.co_filename.startswith(OURS) and frame.f_code.co_filename not in CAPTURE
        if threading.current_thread() is not threading.main_thread() or not ours:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._instruction

    def _instruction(self, frame, event, _):
        instruction = id(frame.f_code), frame.f_lasti
        bookkeeping = dis.opname[frame.f_code.co_code[frame.f_lasti]] in BOOKKEEPING
        if event == "opcode" and instruction not in self.met and not bookkeeping:
            self.met.add(instruction)
            if len(self.met) == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._instruction

    def __enter__(self):
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *_):
        sys.settrace(self.before)


def reads(model, x):
    @model.trace(x)
    def block(tracer):
        return model[0].output


def computes(model, x):
    def block(envoy, tracer):
        hidden = envoy[0].output * 2
        envoy[1].input = hidden
        return {"hidden": hidden}

    model.run(block, x)


def stops(model, x):
    def block(envoy, tracer):
        cache = tracer.cache()
        envoy[0].output.sum()
        tracer.stop()
        return {"cache": cache}

    model.run(block, x)


def fails(model, x):
    def block(envoy, tracer):
        envoy[0].output.sum()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        model.run(block, x)


def invokes(model, x):
    def block(envoy, tracer):
        for part in x:

            @tracer.invoke(part[None])
            def rows():
                model[1].input = model[0].output * 2

    model.run(block)


def captured(model, x):
    with model.trace(x):
        hidden = model[0].output.save()
        double = (hidden * 2).save()
    assert double.shape == (2, 3)


def scans(model, x):
    model.run(lambda envoy: {"shape": envoy[0].output.shape}, x, scan=True)


SITUATIONS = [reads, computes, stops, fails, invokes, captured]


def left(net) -> dict[str, object]:
    return {
        "forwards": [module.__dict__.get("forward") for module in net.modules()],
        "parameters": [id(each) for each in net.parameters()],
        "threads": threading.active_count(),
        "files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
        "handled": sys.exc_info()[0],
        "modes": [*_get_current_dispatch_mode_stack(), *_get_current_function_mode_stack()],
        "save": hasattr(torch.Tensor, "save"),
        "active": (ACTIVE.run, ACTIVE.worker, ACTIVE.collecting),
        "traces": (set(_traces), set(_saving), list(_stances)),
        "stance": getattr(sys.modules.get("torch._dynamo.eval_frame"), "_stance", None),
    }


def assert_same(after, before, said=""):
    after["files"] = max(
        after["files"], before["files"]
    )  # garbage of earlier tests may have been closed meanwhile
    assert after == before, said


@pytest.fixture
def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh())


class Going(nn.Module):
    """A model that goes on when Ctrl-C comes in its first part."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        try:
            x = self.first(x)
        except KeyboardInterrupt:
            x = x + 1
        return self.second(x)


def test_ctrl_c_in_a_block_ends_the_trace_even_if_the_model_catches_it(net):
    net, x, order = Going(), torch.ones(2, 3), []
    model, before = Envoy(net), left(net)
    with pytest.raises(KeyboardInterrupt), model.trace() as tracer:
        with tracer.invoke(x):
            model.first.output.sum()
            order.append("waits")
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                pass
        with tracer.invoke():
            model.second.input + 0
            order.append("goes on")
    assert order == ["waits"]
    assert_same(left(net), before)


def test_ctrl_c_on_the_way_into_the_statement(net, monkeypatch):
    install, model, entered = sys.settrace, Envoy(net), []

    def interrupted(function):
        install(function)
        if function is not None and not entered:
            entered.append(function)
            raise KeyboardInterrupt

    before = sys.gettrace(), sys._getframe().f_trace
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sys, "settrace", interrupted)
        with model.trace(torch.ones(2, 3)):
            model[0].output.save()
    assert len(entered) == 1
    assert (sys.gettrace(), sys._getframe().f_trace) == before


def interrupted(net, situation, at) -> tuple[bool, str]:
    """Whether Ctrl-C came at all, and where; everything has to be as before."""
    model, x = Envoy(net), torch.ones(2, 3)
    before = left(net)
    interrupt = Interrupt(at)
    try:
        with interrupt:
            situation(model, x)
    except KeyboardInterrupt:
        pass
    assert_same(left(net), before, f"Ctrl-C at instruction {at}, {interrupt.where}")
    return len(interrupt.met) < at, interrupt.where


def positions(net, situation, step, first=1):
    situation(Envoy(net), torch.ones(2, 3))  # compiles the block
    at, done = first, False
    while not done:
        done, _ = interrupted(net, situation, at)
        at += step
    return at


@pytest.mark.parametrize("situation", SITUATIONS)
def test_ctrl_c_at_some_instructions_leaves_nothing(net, situation):
    assert positions(net, situation, 97, first=13) > 500


@pytest.mark.slow
@pytest.mark.parametrize("situation", [*SITUATIONS, scans])
def test_ctrl_c_at_every_instruction_leaves_nothing(net, situation):
    assert positions(net, situation, 1) > 500


STORM = """
import os, random, signal, threading
import torch
from torch import nn
from softs_lightning.tracing import Envoy

net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
model, x = Envoy(net), torch.randn(5, 4)

def interrupted(*_):
    raise KeyboardInterrupt

def nested():
    with model.trace(x):
        hidden = model[0].output * 2
        with model.trace(x):
            total = model[0].output.sum().save()
        result = model.output.save()

def threads():
    with model.trace(x):
        hidden = model[0].output * 2
        for _ in range(20):
            thread = threading.Thread(target=len, args=("",))
            thread.start()
            thread.join()
        result = model.output.save()

signal.signal(signal.SIGALRM, interrupted)
random.seed(0)
for situation in nested, threads:
    situation()
    files, came = len(os.listdir("/proc/self/fd")), 0
    while came < 250:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.random() * 0.002 + 1e-5)
            situation()
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            came += 1
        except RuntimeError as error:  # threading's own, where Ctrl-C meets the start of a thread
            if str(error) != "release unlocked lock":
                raise
        finally:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                signal.setitimer(signal.ITIMER_REAL, 0)
        assert not any("forward" in each.__dict__ for each in net.modules())
    for _ in range(100):  # what Ctrl-C made of a thread of the block's own may end a little later
        if threading.active_count() > 1:
            threading.Event().wait(0.05)
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (1, files)
print("nothing left")
"""


@pytest.mark.slow
def test_ctrl_c_while_a_block_starts_threads_leaves_nothing(tmp_path):
    script = tmp_path / "storm.py"
    script.write_text(STORM)
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(script)], capture_output=True, text=True
    )
    assert done.stdout == "nothing left\n", done.stderr[-3000:]
