"""Torch's state flows from the caller to its blocks and never from a block to the model; nothing is left behind."""

# ruff: noqa: PT012, PT031, SIM117 (a trace is a with statement with a body)

import contextvars
import functools
import gc
import os
import signal
import threading
import time
import warnings
import weakref
from collections import OrderedDict
from contextlib import nullcontext

import lightning
import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from softs_lightning.tracing import Envoy, OutOfOrderError, save
from softs_lightning.tracing.baton import Baton
from softs_lightning.tracing.worker import Worker


@pytest.fixture
def model(net):
    return Envoy(net)


class CountFunctions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class CountOps(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def state():
    """What this thread's torch is set to."""
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "autocast dtype": torch.get_autocast_dtype("cpu"),
        "autocast cache": torch.is_autocast_cache_enabled(),
        "device": torch.get_default_device(),
        "made on": torch.empty(0).device,
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "modes": [type(each) for each in torch.overrides._get_current_function_mode_stack()],
        "dispatch": [type(each) for each in torch.utils._python_dispatch._get_current_dispatch_mode_stack()],
        # Torch 2.6 cannot tell.
        "hooks": getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)(False),
    }


@pytest.mark.parametrize(
    "context",
    [
        nullcontext,
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("cpu", torch.float16, cache_enabled=False),
        lambda: torch.device("meta"),
        CountFunctions,
        CountOps,
        lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t),
    ],
)
def test_the_state_of_the_caller_holds_in_the_block_and_stays(model, context):
    x = torch.ones(2, 3)
    with context():
        before = state()
        with model.trace(x):
            early = save(state())
            model.first.output.save()
            late = save(state())
        assert state() == before
    assert early == before
    assert late == before


def test_an_autocast_dtype_that_is_set_but_not_used_yet_holds_in_the_block(model, x):
    torch.set_autocast_dtype("cpu", torch.float16)
    try:
        with model.trace(x):
            inside = save(torch.get_autocast_dtype("cpu"))
    finally:
        torch.set_autocast_dtype("cpu", torch.bfloat16)
    assert inside is torch.float16


def test_global_defaults_hold_in_the_block(model, net):
    net.double()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("cpu")
    try:
        before = state()
        with model.trace(torch.ones(2, 3)):
            inside = save(state())
            model.first.output.save()
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)
    assert inside == before
    assert inside["dtype"] is torch.float64


def test_a_mode_of_the_caller_sees_the_block(model, x):
    with CountOps() as ops, CountFunctions() as functions:
        with model.trace(x):
            torch.cumsum(model.first.output, 0)
    assert "cumsum" in ops.names
    assert "cumsum" in functions.names


@pytest.mark.parametrize(
    "context", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
)
def test_what_a_block_enters_between_two_locations_does_not_reach_the_model(model, x, context):
    with model.trace(x):
        with context():
            model.first.output.sum()
            inside = model.second.output.save()
        result = model.output.save()
    assert inside.requires_grad
    assert inside.dtype is torch.float32
    assert result.requires_grad


def test_what_a_block_enters_and_never_leaves_ends_with_it(model, x):
    with model.trace(x):
        torch.no_grad().__enter__()
        CountOps().__enter__()
        torch.set_grad_enabled(False)
        model.first.output.save()
        result = model.output.save()
    assert result.requires_grad
    assert torch.is_grad_enabled()
    assert state()["dispatch"] == []


def test_a_block_keeps_the_callers_state_where_the_model_changed_it(x):
    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return self.inner(x)

    model = Envoy(Frozen())
    steer = torch.ones(3, requires_grad=True)
    with model.trace(x):
        hidden = model.inner.output
        steered = (hidden * steer).save()
        enabled = save(torch.is_grad_enabled())
    assert enabled
    assert steered.requires_grad


def test_context_variables_flow_in_and_not_out(model, x):
    variable = contextvars.ContextVar("variable", default="default")
    token = variable.set("outer")
    with model.trace(x):
        seen = save(variable.get())
        variable.set("inner")
        model.first.output.save()
    assert seen == "outer"
    assert variable.get() == "outer"
    variable.reset(token)


@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
def test_inside_of_a_function_transform_a_trace_is_refused(model, net, x, transform):
    def traced(x):
        with model.trace(x):
            result = (model.output.sum() * 2).save()
        return result  # noqa: RET504

    with pytest.raises(RuntimeError, match=r"cannot be traced inside of a torch\.func transform"):
        transform(traced)(x)
    assert "forward" not in net.first.__dict__
    with model.trace(x):
        gradient = transform(lambda each: (each * 3).sum())(model.first.output).save()
    assert torch.equal(gradient, transform(lambda each: (each * 3).sum())(net.first(x)))


def test_a_backward_pass_in_a_block(model, net, x):
    with model.trace(x):
        model.output.sum().backward()
        gradient = model.first.weight.grad.clone().save()
    net.first.weight.grad = None
    net(x).sum().backward()
    assert torch.equal(gradient, net.first.weight.grad)


class Watch:
    """What a trace may not change or leave: threads, forwards, attributes, file descriptors."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.before = self.now()

    def now(self):
        forwards = [module.__dict__.get("forward") for module in self.net.modules()]
        files = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
        return (
            set(threading.enumerate()),
            forwards,
            hasattr(torch.Tensor, "save"),
            hasattr(object, "save"),
            files,
        )

    def clean(self) -> bool:
        assert self.now() == self.before
        return True


def fine(model, x):
    with model.trace(x):
        model.first.output.save()


def computed(model, x):  # which takes a thread
    with model.trace(x):
        hidden = model.first.output.save()
        (hidden * 2).save()


def stopped(model, x):
    with model.trace(x) as tracer:
        model.first.output.save()
        tracer.stop()


def block_error(model, x):
    with pytest.raises(KeyError), model.trace(x):
        model.first.output.save()
        {}["missing"]


def early_error(model, x):
    with pytest.raises(KeyError), model.trace(x):
        {}["missing"]


def model_error(model, x):
    with pytest.raises(RuntimeError, match="mat1"), model.trace(x[:, :1]):
        model.second.output.save()


def too_late(model, x):
    with pytest.raises(OutOfOrderError), model.trace(x):
        model.second.output.save()
        model.first.output.save()


def siblings(model, x):
    with pytest.raises(KeyError), model.trace() as tracer:
        with tracer.invoke(x):
            model.first.output.save()
            {}["missing"]
        with tracer.invoke(x):
            model.second.output.save()


def collecting(model, x):
    with pytest.raises(KeyError), model.trace() as tracer:
        with tracer.invoke(x):
            model.first.output.save()
        {}["missing"]


def exit_(model, x):
    with pytest.raises(SystemExit), model.trace(x):
        model.first.output.save()
        raise SystemExit


def scanned(model, x):
    with model.scan(x):
        model.first.output.save()


def functions(model, x):
    with model.trace(x):

        def helper(value):
            return value * factor

        factor = 2
        [(lambda row: row * factor)(row) for row in helper(model.first.output)].save()


def ctrl_c_in_the_model(model, x):
    handle = model.module.second.register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt), model.trace(x):
            model.first.output.save()
            model.output.save()
    finally:
        handle.remove()


def ctrl_c_in_the_block(model, x):
    with pytest.raises(KeyboardInterrupt), model.trace(x):
        model.first.output.save()
        os.kill(os.getpid(), signal.SIGINT)  # from here: a timer's might come before the block, or never
        end = time.monotonic() + 30
        while time.monotonic() < end:
            pass


ENDINGS = [
    fine, computed, stopped, block_error, early_error, model_error, too_late, siblings, collecting, exit_, scanned, functions,
    ctrl_c_in_the_model, ctrl_c_in_the_block,
]  # fmt: skip


@pytest.mark.parametrize("ending", ENDINGS)
def test_nothing_is_left_behind(model, net, x, ending):
    watch = Watch(net)
    ending(model, x)
    assert watch.clean()
    fine(model, x)
    assert watch.clean()


@pytest.mark.parametrize("ending", ENDINGS)
def test_everything_is_freed_without_the_garbage_collector(ending):
    gc.collect()
    gc.disable()
    try:
        net = nn.Module()
        net.first, net.second = nn.Linear(3, 5), nn.Linear(5, 2)
        net.forward = lambda x, net=weakref.proxy(net): net.second(net.first(x))  # noqa: B008
        model, x = Envoy(net), torch.ones(2, 3)
        gone = [weakref.ref(each) for each in (net, net.first, model, x)]
        net.first.register_forward_hook(lambda module, args, out: gone.append(weakref.ref(out)))
        ending(model, x)
        del net, model, x
        assert [each() for each in gone] == [None] * len(gone)
    finally:
        gc.enable()


def test_a_thousand_traces_leave_nothing(model, net, x):
    both = fine, computed
    for trace in both:
        trace(model, x)
    gc.collect()
    watch, objects = Watch(net), len(gc.get_objects())
    for number in range(1000):
        both[number % 2](model, x)
    assert watch.clean()
    gc.collect()
    assert len(gc.get_objects()) - objects < 100


def test_values_that_are_not_kept_are_freed_while_the_model_runs(net, x):
    model, gone = Envoy(net), []
    with model.trace(x):
        gone.append(weakref.ref(model.first.output))
        model.second.output.sum()
        freed = save(gone[0]() is None)
    with torch.no_grad(), model.trace(x):
        gone.append(weakref.ref(model.first.output))
        model.second.output.sum()
        freed_without_graph = save(gone[1]() is None)
    assert freed_without_graph
    assert freed


def test_the_tracer_keeps_no_model(x):
    gc.disable()
    try:
        model = Envoy(nn.Sequential(nn.Linear(3, 3)))
        gone = weakref.ref(model.module)
        with model.trace(x) as tracer:
            model.output.save()
        del model
        assert gone() is None
        assert tracer.envoy is None
    finally:
        gc.enable()


def in_a_dict(model, x):
    with model.trace(x):
        functions = {"relu": lambda v: v.relu()}
        hidden = model.first.output
        functions["relu"](hidden).sum()


def in_a_partial(model, x):
    with model.trace(x):
        function = functools.partial(lambda v, w: v + w, 1)
        hidden = model.first.output
        function(hidden)


def decorated(model, x):
    with model.trace(x):

        @torch.no_grad()
        def twice(v):
            return v * 2

        hidden = model.first.output
        twice(hidden)


def unfinished(model, x):
    with model.trace(x):
        hidden = model.first.output
        rows = (row * 2 for row in hidden)
        next(rows)


KEPT = []


def kept_elsewhere(model, x):
    with model.trace(x):
        hidden = model.first.output
        hidden.sum()
        KEPT.append(lambda: None)


def without_a_name(model, x):
    with model.trace(x):
        hidden = model.first.output
        hidden.sum()
        function = lambda: None  # noqa: E731
        function()


@pytest.mark.parametrize(
    "block", [kept_elsewhere, without_a_name, in_a_dict, in_a_partial, decorated, unfinished]
)
def test_functions_of_a_block_keep_nothing_alive(block):
    gc.collect()
    gc.disable()
    try:
        net, x, gone = nn.Sequential(OrderedDict(first=nn.Linear(3, 5))), torch.ones(2, 3), []
        net.first.register_forward_hook(lambda module, args, out: gone.append(weakref.ref(out)))
        block(Envoy(net), x)
        assert gone[0]() is None
    finally:
        gc.enable()


def test_a_save_that_tensors_have_already_is_theirs(model, x, monkeypatch):
    saved = []
    own = lambda value: saved.append(value)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "save", own, raising=False)

    def kept(value):
        value.save()

    for _ in range(2):
        with model.trace(x):
            kept(model.first.output)
        assert torch.Tensor.save is own
    assert len(saved) == 2


def test_locals_that_somebody_holds_stay(model, x):
    kept = locals()
    with model.trace(x):
        model.first.output.save()
    assert kept["x"] is x


def test_a_block_that_does_not_give_up_is_ended(model, net, x):
    tries = []
    net.act.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), model.trace(x):
        for _ in range(3):
            try:
                model.second.output.save()
            except BaseException as error:
                tries.append(type(error).__name__)
    assert tries == ["Cancelled"] * 3


def test_an_error_while_a_block_is_ended_warns(model, net, x):
    net.act.register_forward_hook(lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match=r"raised KeyError\('missing'\) while it was being ended"):
        with pytest.raises(ZeroDivisionError), model.trace(x):
            model.first.output.save()
            try:
                model.second.output.save()
            finally:
                {}["missing"]


def test_two_threads_trace_two_models_at_once(x):
    barrier, results, errors = threading.Barrier(2, timeout=30), {}, []

    def work(number):
        try:
            torch.manual_seed(number)
            net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
            model = Envoy(net)
            with model.trace(x):
                hidden = model[0].output.save()
                barrier.wait()
                model[1].input = hidden * number
                result = model.output.save()
            barrier.wait()
            results[number] = torch.equal(result, torch.tanh(net[0](x) * number)) and torch.equal(
                hidden, net[0](x)
            )
        except BaseException as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=work, args=(number,)) for number in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert results == {2: True, 3: True}
    assert not hasattr(torch.Tensor, "save")


def test_threads_may_trace_one_model_at_once(net, x):
    model, found, errors = Envoy(net), [], []

    def work(scale):
        try:
            for _ in range(20):
                with model.trace(x * scale):
                    hidden = model.first.output.save()
                    result = model.output.save()
                found.append(
                    torch.equal(hidden, net.first(x * scale)) and torch.equal(result, net(x * scale))
                )
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (1, 2, 3)]
    for thread in threads:
        thread.start()
    plain = [net(x) for _ in range(20)]
    for thread in threads:
        thread.join()
    assert errors == []
    assert found == [True] * 60
    assert all(torch.equal(each, net(x)) for each in plain)
    assert "forward" not in net.first.__dict__


def test_a_forward_that_somebody_set_is_called_and_put_back(net, x):
    own = net.first.forward
    net.first.forward = lambda x: own(x) + 1
    replaced = net.first.forward
    model = Envoy(net)
    with model.trace(x):
        hidden = model.first.output.save()
        name = save(net.second.forward.__name__)
    assert torch.equal(hidden, own(x) + 1)
    assert name == "forward"
    assert net.first.forward is replaced


def test_a_forward_that_the_model_replaces_meanwhile_stays(net, x):
    def replacement(x):
        return x

    net.first.register_forward_hook(lambda module, *_: setattr(module, "forward", replacement))
    model = Envoy(net)
    with model.trace(x):
        model.second.output.save()
    assert net.first.forward is replacement


def test_compiled_models_are_traced_eagerly_and_stay_compiled(x):
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
    compiled = torch.compile(net, backend=backend)
    in_place = nn.Sequential(nn.Linear(3, 5), nn.Tanh())
    in_place.compile(backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # dynamo's own, on some platforms
        expected = compiled(x), in_place(x)
    compilations = len(graphs)
    assert compilations > 0
    for each, module in ((compiled, net), (in_place, in_place)):
        model = Envoy(each)
        with model.trace(x):
            hidden = model[0].output.save()
            model[1].input = model[1].input * 2
            result = model.output.save()
        assert torch.equal(hidden, module[0](x))
        assert torch.equal(result, torch.tanh(hidden * 2))
    assert torch.equal(compiled(x), expected[0])
    assert torch.equal(in_place(x), expected[1])
    assert len(graphs) == compilations


def test_a_thread_that_cannot_be_started_is_an_error_at_once(model, net, x, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    watch = Watch(net)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start new thread"):
        patch.setattr(threading.Thread, "start", start)
        computed(model, x)
    assert watch.clean()


def test_ctrl_c_while_a_thread_is_being_started(model, net, x, monkeypatch):
    start, run = threading.Thread.start, threading.Thread.run
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        watch = Watch(net)
        patch.setattr(threading.Thread, "run", lambda self: time.sleep(0.1) or run(self))
        patch.setattr(
            threading.Thread, "start", lambda self: start(self) or signal.raise_signal(signal.SIGINT)
        )
        computed(model, x)
    assert watch.clean()


def test_a_model_that_turns_every_error_into_its_own_is_stopped_all_the_same(x):
    class Wraps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.inner(x)
            except BaseException as error:
                raise RuntimeError("wrapped") from error

    model = Envoy(Wraps())
    with model.trace(x) as tracer:
        hidden = model.inner.output.save()
        tracer.stop()
    assert torch.equal(hidden, model.module.inner(x))
    with pytest.raises(KeyError, match="mine"), model.trace(x):
        model.inner.output.save()
        raise KeyError("mine")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_teacher_and_student_are_traced_in_a_training_step(precision):
    class Student(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.plain = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)), []

        def training_step(self, batch, _):
            with torch.no_grad(), teacher.trace(batch[0]) as tracer:
                target = teacher[1].output.save()
                tracer.stop()
            student = Envoy(self.net)
            with student.trace(batch[0]):
                mine = student[1].output.save()
            plain = nn.functional.mse_loss(self.net[1](self.net[0](batch[0])), target)
            loss = nn.functional.mse_loss(mine, target)
            self.plain.append(torch.equal(loss, plain))
            return loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    teacher = Envoy(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
    student = Student()
    before = student.net[0].weight.detach().clone()
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 3)), batch_size=4)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", precision=precision, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on workers
        trainer.fit(student, data)
    assert student.plain == [True, True]
    assert not torch.equal(student.net[0].weight, before)


def test_ctrl_c_just_before_a_block_is_given_the_baton(model, net, x, monkeypatch):
    give, taken, watch = Baton.give, [], Watch(net)

    def interrupted(self):
        if threading.current_thread() is threading.main_thread() and not taken:
            taken.append(1)
            raise KeyboardInterrupt
        give(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Baton, "give", interrupted)
        patch.setattr(Worker, "interrupt", lambda *_: taken.append("interrupted"))
        with model.trace(x):
            (model.first.output * 2).save()
    assert taken == [1]  # the block sleeps, so nothing is raised in it, and nobody waits for it to give up
    assert watch.clean()
