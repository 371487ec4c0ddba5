"""What a block reads is what hooks see; what it writes is what the model goes on with."""

# ruff: noqa: PT012, SIM117 (a trace is a with statement with a body)

import pytest
import torch
from torch import nn

from softs_lightning.tracing import Envoy, OutOfOrderError, OutsideTraceError, save


def test_outputs_are_what_hooks_see(net, x, hooked):
    model = Envoy(net)
    with model.trace(x):
        first = model.first.output.save()
        act = model.act.output.save()
        second = model.second.output.save()
        whole = model.output.save()
    seen, result = hooked(net, x)
    for here, name in ((first, "first"), (act, "act"), (second, "second"), (whole, "")):
        assert torch.equal(here, seen[name][0][2])
    assert torch.equal(whole, result)


def test_inputs_are_what_hooks_see(net, x, hooked):
    model = Envoy(net)
    with model.trace(x, scale=2.0):
        root = model.inputs.save()
        second = model.second.input.save()
    seen, _ = hooked(net, x, scale=2.0)
    assert root[0][0] is x
    assert root[1] == {"scale": 2.0} == seen[""][0][1]
    assert torch.equal(second, seen["second"][0][0][0])


def test_the_input_is_the_first_keyword_where_nothing_is_positional(net, x):
    model = Envoy(net)
    with model.trace(x=x):
        read = model.input.save()
        model.input = x * 2
        result = model.output.save()
    assert read is x
    assert torch.equal(result, net(x * 2))


def test_a_module_called_without_arguments_has_no_input():
    class Constant(nn.Module):
        def forward(self) -> torch.Tensor:
            return torch.ones(2)

    net = nn.Module()
    net.constant = Constant()
    net.forward = lambda x: x + net.constant()
    model = Envoy(net)
    with model.trace(torch.zeros(2)):
        inputs = model.constant.inputs.save()
        output = model.constant.output.save()
    assert inputs == ((), {})
    assert torch.equal(output, torch.ones(2))
    with pytest.raises(ValueError, match=r"model\.constant is called without arguments"), model.trace(output):
        model.constant.input.save()


def test_values_are_the_models_own_and_keep_their_graph(net, x):
    model = Envoy(net)
    with model.trace(x):
        hidden = model.first.output.save()
        again = model.first.output
        same = save(again is hidden)
    assert same
    assert type(hidden) is torch.Tensor
    hidden.sum().backward()
    assert torch.equal(net.first.bias.grad, torch.full((5,), 4.0))


def test_assigning_the_output_replaces_it(net, x):
    model = Envoy(net)
    with model.trace(x):
        model.first.output = torch.zeros(4, 5)
        result = model.output.save()
    assert torch.equal(result, torch.tanh(net.second(torch.tanh(torch.zeros(4, 5)))))


def test_assigning_needs_no_read_and_may_follow_one(net, x):
    model = Envoy(net)
    with model.trace(x):
        model.first.output = model.first.output * 2
        now = model.first.output.save()
        result = model.output.save()
    assert torch.equal(now, net.first(x) * 2)
    assert torch.equal(result, torch.tanh(net.second(torch.tanh(net.first(x) * 2))))


def test_changes_in_place_reach_the_model(net, x):
    model = Envoy(net)
    with torch.no_grad():
        with model.trace(x):
            model.first.output[:, 0] = 7
            result = model.output.save()
        hidden = net.first(x)
        hidden[:, 0] = 7
        assert torch.equal(result, torch.tanh(net.second(torch.tanh(hidden))))


def test_assigning_inputs_replaces_them(net, x):
    model = Envoy(net)
    with model.trace(x):
        model.inputs = (x + 1,), {"scale": 3.0}
        model.second.input = model.second.input * 2
        result = model.output.save()
    assert torch.equal(result, torch.tanh(net.second(torch.tanh(net.first(x + 1)) * 2)) * 3.0)


@pytest.mark.parametrize("value", [1, ((1,), 2), ([1], {}), ((), {}, ())])
def test_inputs_are_a_tuple_and_a_dict(net, x, value):
    model = Envoy(net)
    with (
        pytest.raises(TypeError, match=r"model\.first\.inputs is a pair of \(args, kwargs\)"),
        model.trace(x),
    ):
        model.first.inputs = value


def test_a_write_passes_gradients(net, x):
    steer = torch.zeros(5, requires_grad=True)
    model = Envoy(net)
    with model.trace(x):
        model.first.output = model.first.output + steer
        result = model.output.save()
    result.sum().backward()
    torch.tanh(
        net.second(torch.tanh(net.first(x) + (reference := steer.detach().requires_grad_())))
    ).sum().backward()
    assert torch.equal(steer.grad, reference.grad)


def test_skip_puts_a_value_in_place_of_a_module(net, x):
    model = Envoy(net)
    called = []
    net.second.register_forward_pre_hook(lambda *_: called.append("hook"))
    inner = net.second.forward
    net.second.forward = lambda *args: called.append("forward") or inner(*args)
    with model.trace(x):
        model.second.skip(model.second.input[:, :2])
        output = model.second.output.save()
        result = model.output.save()
    hidden = torch.tanh(net.first(x))
    assert called == ["hook"]
    assert torch.equal(output, hidden[:, :2])
    assert torch.equal(result, torch.tanh(hidden[:, :2]))


def test_what_is_inside_a_skipped_module_is_not_reached(x):
    net = nn.Sequential(nn.Sequential(nn.Linear(3, 3)), nn.ReLU())
    model = Envoy(net)
    with pytest.raises(
        OutOfOrderError, match=r"model\.0\.0\.output was not reached: its module was never called"
    ):
        with model.trace(x):
            model[0].skip(x)
            model[0][0].output.save()


def test_applying_a_module_in_a_block_is_no_visit(net, x):
    model = Envoy(net)
    with model.trace(x):
        early = model.second(model.first(x)).save()
        hidden = model.first.output.save()
        lens = model.second(hidden).save()
        real = model.second.output.save()
    assert torch.equal(hidden, net.first(x))
    assert torch.equal(lens, net.second(hidden))
    assert torch.equal(early, lens)
    assert torch.equal(real, net.second(torch.tanh(hidden)))


def test_an_envoy_is_called_outside_of_a_block_too(net, x):
    assert torch.equal(Envoy(net)(x), net(x))


def test_the_result_is_what_the_call_returned(net, x):
    model = Envoy(net)
    with model.trace(x, scale=2.0) as tracer:
        result = tracer.result.save()
    assert torch.equal(result, net(x, scale=2.0))


def test_other_methods_are_traced_by_name(net, x):
    model = Envoy(net)
    with model.generate(x, steps=2) as tracer:
        hidden = model.first.output.save()
        result = tracer.result.save()
    assert torch.equal(hidden, net.first(x))
    assert torch.equal(result, net.generate(x, steps=2))


def test_a_submodule_is_traced_on_its_own(net, x):
    model = Envoy(net)
    with model.first.trace(x) as tracer:
        output = model.first.output.save()
        result = tracer.result.save()
    assert output is result
    with pytest.raises(ValueError, match=r"model\.second\.output belongs to no module of the model"):
        with model.first.trace(x):
            model.second.output.save()


def test_stop_leaves_the_model_there(net, x):
    ran = []
    net.second.register_forward_hook(lambda *_: ran.append("second"))
    model = Envoy(net)
    with model.trace(x) as tracer:
        hidden = model.first.output.save()
        tracer.stop()
        more = (hidden * 2).save()
    assert torch.equal(hidden, net.first(x))
    assert torch.equal(more, net.first(x) * 2)
    assert ran == []


def test_stop_is_not_swallowed_by_the_model(x):
    ran = []

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                x = self.first(x)
            except Exception:
                ran.append("except Exception")
            try:
                x = self.first(x)
            except BaseException:
                ran.append("except BaseException")
            ran.append("after")
            return self.second(x)

    net = Careful()
    net.second.register_forward_hook(lambda *_: ran.append("second"))
    model = Envoy(net)
    with model.trace(x) as tracer:
        for _ in tracer.iter[1]:
            hidden = model.first.output.save()
            tracer.stop()
    assert hidden.shape == (4, 3)
    assert ran == ["except BaseException", "after"]  # but the next module raises again


def test_asking_after_stop_says_so(net, x):
    model = Envoy(net)
    with pytest.raises(OutOfOrderError, match=r"model\.second\.output was asked for after tracer\.stop\(\)"):
        with model.trace(x) as tracer:
            model.first.output.save()
            tracer.stop()
            model.second.output.save()


def test_too_late_names_the_location_and_what_was_reached(net, x):
    model = Envoy(net)
    with pytest.raises(
        OutOfOrderError, match=r"model\.first\.output was asked for after .* is model\.second\.input"
    ):
        with model.trace(x):
            model.second.input.save()
            model.first.output.save()


def test_the_result_comes_after_every_location(net, x):
    model = Envoy(net)
    with pytest.raises(OutOfOrderError, match=r"model\.output was asked for after the run had passed it"):
        with model.trace(x) as tracer:
            tracer.result.save()
            model.output.save()


def test_an_inner_location_may_precede_the_one_around_it(net, x):
    model = Envoy(net)
    with model.trace(x):
        inner = model.second.output.save()
        outer = model.output.save()
    assert torch.equal(outer, torch.tanh(inner))


def test_never_reached_names_the_location_and_what_was_reached(net, x):
    net.spare = nn.Linear(1, 1)
    model = Envoy(net)
    expected = r"model\.spare\.output was not reached: its module was never called .*; .* is model\.output"
    with pytest.raises(OutOfOrderError, match=expected), model.trace(x):
        model.spare.output.save()


def test_a_block_may_handle_what_it_could_not_reach(net, x):
    net.spare = nn.Linear(1, 1)
    model = Envoy(net)
    with model.trace(x):
        hidden = model.first.output.save()
        try:
            model.spare.output.save()
        except OutOfOrderError:
            hidden = (hidden * 0).save()
    assert not hidden.any()


@pytest.mark.parametrize(
    "use",
    [
        lambda model, tracer: model.first.output,
        lambda model, tracer: model.first.input,
        lambda model, tracer: model.first.skip(1),
        lambda model, tracer: setattr(model.first, "output", 1),
        lambda model, tracer: tracer.result,
        lambda model, tracer: tracer.stop(),
        lambda model, tracer: tracer.cache(),
        lambda model, tracer: list(tracer.iter[:2]),
        lambda model, tracer: tracer.barrier(1)(),
        lambda model, tracer: save(1),
    ],
)
def test_nothing_of_a_block_works_outside_of_one(net, x, use):
    model = Envoy(net)
    with model.trace(x) as tracer:
        pass
    with pytest.raises(OutsideTraceError):
        use(model, tracer)


def test_a_tracer_runs_once(net, x):
    model = Envoy(net)
    tracer = model.trace(x)
    with tracer:
        model.first.output.save()
    with pytest.raises(RuntimeError, match="this tracer has run"), tracer:
        model.first.output.save()


def test_the_result_is_read_only(net, x):
    model = Envoy(net)
    with pytest.raises(AttributeError, match=r"tracer\.result is read only"), model.trace(x) as tracer:
        tracer.result = 1


def test_a_model_that_is_traced_within_a_block_is_another_run(net, x):
    model = Envoy(net)
    with model.trace(x):
        hidden = model.first.output
        with model.trace(x * 2) as inner:
            other = model.first.output
            doubled = inner.result
        model.second.input = torch.tanh(other)  # an inner trace hands every name over
        result = model.output.save()
        hidden.save(), doubled.save()
    assert torch.equal(hidden, net.first(x))
    assert torch.equal(doubled, net(x * 2))
    assert torch.equal(result, net(x * 2))


def test_a_tracer_is_about_its_own_run(net, x):
    model = Envoy(net)
    with pytest.raises(RuntimeError, match="about another trace"), model.trace(x) as outer:
        model.first.output.save()
        with model.trace(x):
            outer.stop()


def test_modules_that_hooks_are_on_are_seen_as_their_forward(net, x):
    net.first.register_forward_hook(lambda module, args, out: out * 2)
    net.first.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    model = Envoy(net)
    with model.trace(x):
        seen_in = model.first.input.save()
        seen_out = model.first.output.save()
        after = model.act.input.save()
    assert torch.equal(seen_in, x + 1)
    assert torch.equal(after, seen_out * 2)


def test_two_wrappers_may_trace_one_model(net, x):
    one, other = Envoy(net), Envoy(net)
    with one.trace(x):
        one.first.output = one.first.output * 0
        changed = one.output.save()
    with other.trace(x):
        same = other.output.save()
    with other.trace(x):
        mixed = one.first.output.save()
    assert not torch.equal(changed, same)
    assert torch.equal(same, net(x))
    assert torch.equal(mixed, net.first(x))
