"""Repeated visits, loops over them, and blocks that wait for each other."""

# ruff: noqa: PT012, PT031, SIM117 (a trace is a with statement with a body)

import pytest
import torch
from torch import nn

from softs_lightning.tracing import Envoy, OutOfOrderError, save


@pytest.fixture
def model(net):
    return Envoy(net)


def outputs(hooked, net, x, name, steps):
    return [out for _, _, out in hooked(net, x, method="generate", steps=steps)[0][name]]


@pytest.mark.parametrize(
    ("selection", "steps"),
    [
        (slice(3), [0, 1, 2]),
        (slice(1, 3), [1, 2]),
        (slice(0, 4, 2), [0, 2]),
        (slice(None), [0, 1, 2, 3]),
        (slice(2, None), [2, 3]),
        (1, [1]),
        ([0, 2, 3], [0, 2, 3]),
    ],
)
def test_a_loop_reads_the_visits_it_selects(model, net, x, hooked, selection, steps):
    found, numbers = [], []
    with model.generate(x, steps=4) as tracer:
        for step in tracer.iter[selection]:
            numbers.append(step)
            found.append(model.first.output)
    reference = outputs(hooked, net, x, "first", 4)
    assert numbers == steps
    assert all(torch.equal(here, reference[step]) for here, step in zip(found, steps, strict=True))


def test_all_is_every_visit(model, net, x, hooked):
    found = []
    with model.generate(x, steps=3) as tracer:
        for _ in tracer.all():
            found.append(model.second.output)
            found.append(model.output)
    second, whole = outputs(hooked, net, x, "second", 3), outputs(hooked, net, x, "", 3)
    assert torch.equal(torch.stack(found[::2]), torch.stack(second))
    assert torch.equal(torch.stack(found[1::2]), torch.stack(whole))


def test_what_follows_an_open_loop_runs(model, net, x):
    with model.generate(x, steps=3) as tracer:
        last = None
        for _ in tracer.iter[:]:
            last = model.output
        last.save()
        result = tracer.result.save()
        after = save("ran")
    assert after == "ran"
    assert torch.equal(result, net.generate(x, steps=3))
    assert torch.equal(result[:, :2], last)


def test_a_loop_with_an_end_that_is_not_reached_warns_and_goes_on(model, x):
    with pytest.warns(UserWarning, match="was to go on with step 2, but the run ended before it"):
        with model.generate(x, steps=2) as tracer:
            kept = [].save()
            for _ in tracer.iter[:5]:
                kept.append(model.first.output)
            result = tracer.result.save()
    assert len(kept) == 2
    assert result.shape == (4, 3)


def test_a_loop_that_matches_the_run_does_not_warn(model, x):
    with model.generate(x, steps=2) as tracer:
        for _ in tracer.iter[:2]:
            hidden = model.first.output.save()
        result = tracer.result.save()
    assert hidden.shape == (4, 5)
    assert result.shape == (4, 3)


def test_a_first_step_that_is_not_reached_is_an_error(model, x):
    with pytest.raises(
        OutOfOrderError, match=r"model\.first\.output \(visit 5\) was not reached.* visited 2 times"
    ):
        with model.generate(x, steps=2) as tracer:
            for _ in tracer.iter[5]:
                model.first.output.save()


def test_writes_are_bound_to_the_step_too(model, net, x):
    with model.generate(x, steps=3) as tracer:
        for step in tracer.iter[1:]:
            model.second.output = model.second.output * 0 + step
        result = tracer.result.save()
    hidden = torch.cat([net(x), torch.ones(4, 1)], dim=1)
    assert not torch.equal(net(hidden), torch.tanh(torch.ones(4, 2)))
    assert torch.equal(result, torch.cat([torch.tanh(torch.full((4, 2), 2.0)), torch.ones(4, 1)], dim=1))


def test_visits_are_counted_for_each_location(model, net, x, hooked):
    seen, _ = hooked(net, x)
    with model.trace(x) as tracer:
        for _ in tracer.iter[1]:
            again = model.act.output.save()
    assert torch.equal(again, seen["act"][1][2])
    with model.trace(x) as tracer:
        found = [].save()
        for _ in tracer.all():
            found.append(model.act.output)
    assert [torch.equal(here, out) for here, (_, _, out) in zip(found, seen["act"], strict=True)] == [
        True,
        True,
    ]


def test_loops_nest_and_restore_what_was_meant(model, net, x, hooked):
    seen, _ = hooked(net, x, method="generate", steps=2)
    found = []
    with model.generate(x, steps=2) as tracer:
        for step in tracer.iter[:2]:
            found.append(model.first.output)
            for _ in tracer.iter[2 * step + 1]:
                found.append(model.act.output)
            found.append(model.output)
    expected = [seen["first"][0], seen["act"][1], seen[""][0], seen["first"][1], seen["act"][3], seen[""][1]]
    assert all(torch.equal(here, out) for here, (_, _, out) in zip(found, expected, strict=True))


def test_leaving_a_loop_early_restores_the_first_visit(model, net, x):
    with model.generate(x, steps=3) as tracer:
        for _ in tracer.iter[:]:
            model.first.input.save()
            break
        hidden = model.first.output.save()
    assert torch.equal(hidden, net.first(x))


def test_after_a_loop_the_first_visit_is_meant_and_that_is_over(model, x):
    expected = r"model\.second\.output was asked for after .*visited 2 times, `tracer\.iter\[n\]` selects"
    with pytest.raises(OutOfOrderError, match=expected):
        with model.generate(x, steps=2) as tracer:
            for _ in tracer.iter[:2]:
                model.second.output.save()
            model.second.output.save()


def test_an_open_loop_may_ask_in_some_steps_only(model, net, x, hooked):
    reference = outputs(hooked, net, x, "first", 4)
    found = []
    with model.generate(x, steps=4) as tracer:
        for step in tracer.iter[:]:
            if step % 2:
                found.append(model.first.output)
    assert torch.equal(torch.stack(found), torch.stack(reference[1::2]))


def test_an_open_loop_that_asks_for_nothing_ends_with_the_run_and_says_so(model, x):
    steps = []
    with pytest.warns(UserWarning, match="asked for no location"), model.generate(x, steps=3) as tracer:
        for step in tracer.iter[:]:
            steps.append(step)
    assert steps == [0, 1, 2]


@pytest.mark.parametrize(
    "selection", [-1, slice(-2, None), slice(0, -1), [0, -1], [2, 1], [1, 1], slice(0, None, 2)]
)
def test_selections_that_no_run_has_are_refused(model, x, selection):
    with pytest.raises(ValueError, match=r"steps|stride"), model.generate(x) as tracer:
        tracer.iter[selection]


def test_stop_in_a_loop_keeps_what_came_before(model, x):
    kept = []
    with model.generate(x, steps=5) as tracer:
        for step in tracer.iter[:]:
            kept.append(model.first.output)
            if step == 1:
                tracer.stop()
    assert len(kept) == 2


def test_a_step_of_the_run_that_raises_is_the_models_error(model, net, x):
    net.second.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), model.generate(x) as tracer:
        for _ in tracer.iter[:]:
            model.first.output.save()


@pytest.mark.parametrize("sender_first", [True, False])
def test_a_barrier_hands_over_in_either_order(model, net, x, sender_first):
    with model.trace() as tracer:
        barrier = tracer.barrier(2)
        if not sender_first:
            with tracer.invoke(x[:1]):
                barrier()
                model.first.output = sent  # noqa: F821
                received = model.output.save()
        with tracer.invoke(x[1:2]):
            sent = model.first.output
            barrier()
        if sender_first:
            with tracer.invoke(x[:1]):
                barrier()
                model.first.output = sent
                received = model.output.save()
    assert torch.allclose(received, net(x[1:2]), rtol=0, atol=1e-6)  # one batch of two against a batch of one


def test_a_barrier_is_used_again(model, x):
    order = []
    with model.trace() as tracer:
        barrier = tracer.barrier(3)
        for name in "abc":
            with tracer.invoke(x):
                for round in range(3):
                    order.append((round, name))
                    barrier()
    assert [round for round, _ in order] == [0, 0, 0, 1, 1, 1, 2, 2, 2]


def test_a_barrier_in_every_step(model, x):
    found = []
    with model.generate(steps=2) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(x[:2]):
            for _ in tracer.iter[:2]:
                sent = model.first.output * 2
                barrier()
        with tracer.invoke(x[2:]):
            for _ in tracer.iter[:2]:
                barrier()
                model.first.output = sent
        with tracer.invoke():
            for _ in tracer.iter[[0, 2]]:  # the activation is visited twice a step
                found.append(model.act.input)
    assert len(found) == 2
    assert all(torch.equal(rows[:2] * 2, rows[2:]) for rows in found)


def test_a_barrier_that_too_few_reach_is_an_error(model, x):
    with pytest.raises(ValueError, match="a barrier for 3 blocks was reached by 2 of them"):
        with model.trace() as tracer:
            barrier = tracer.barrier(3)
            with tracer.invoke(x):
                barrier()
            with tracer.invoke(x):
                barrier()


@pytest.mark.parametrize("n", [0, -1, 1.5, None])
def test_a_barrier_is_for_a_number_of_blocks(model, x, n):
    with pytest.raises(ValueError, match="a barrier is for a number of blocks"), model.trace(x) as tracer:
        tracer.barrier(n)


def test_stop_serves_the_others_at_this_location_and_ends_them(model, net, x):
    ran = []
    net.second.register_forward_hook(lambda *_: ran.append("second"))
    with model.trace() as tracer:
        with tracer.invoke(x[:1]):
            one = model.first.output.save()
            tracer.stop()
        with tracer.invoke(x[1:]):
            other = model.first.output.save()
            model.second.output.save()
            ran.append("not reached")
    assert torch.equal(torch.cat([one, other]), net.first(x))
    assert ran == []


def test_a_module_that_calls_itself_is_visited_inside_out():
    class Nested(nn.Module):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            return self(x, depth - 1) + 1 if depth else x

    model = Envoy(Nested())
    with model.trace(torch.zeros(1)) as tracer:
        for _ in tracer.iter[2]:
            innermost = model.output.save()
        result = tracer.result.save()
    assert (innermost.item(), result.item()) == (0, 2)
