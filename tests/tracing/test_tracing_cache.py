"""A cache holds what hooks see after every change, for each visit."""

# ruff: noqa: PT012, SIM117 (a trace is a with statement with a body)

import gc
import weakref

import pytest
import torch
from torch import nn

from softs_lightning.tracing import CacheView, Envoy


@pytest.fixture
def model(net):
    return Envoy(net)


def test_every_output_by_path_and_by_navigation(model, net, x, hooked):
    with model.trace(x) as tracer:
        cache = tracer.cache()
    seen, result = hooked(net, x)
    assert torch.equal(cache["model.first"].output, seen["first"][0][2])
    assert torch.equal(cache["first"].output, seen["first"][0][2])
    assert torch.equal(cache.model.second.output, seen["second"][0][2])
    assert torch.equal(cache.second.output, seen["second"][0][2])
    assert torch.equal(cache.model.output, result)
    assert cache.keys() == ["model.first", "model.act", "model.second", "model"]
    assert list(cache) == cache.keys()
    assert len(cache) == 4


def test_a_module_that_is_visited_twice_has_two_entries(model, net, x, hooked):
    with model.trace(x) as tracer:
        cache = tracer.cache()
    seen, _ = hooked(net, x)
    assert len(cache["model.act"]) == 2
    assert len(cache["model.first"]) == 1
    for here, (_, _, out) in zip(cache["model.act"].output, seen["act"], strict=True):
        assert torch.equal(here, out)
    assert torch.equal(cache.act.visits[1].output, seen["act"][1][2])


def test_a_generation_has_an_entry_for_each_step(model, net, x, hooked):
    with model.generate(x, steps=3) as tracer:
        cache = tracer.cache(modules=[model.second], include_inputs=True)
    seen, _ = hooked(net, x, method="generate", steps=3)
    assert len(cache.second) == 3
    assert torch.equal(torch.stack(cache.second.output), torch.stack([out for _, _, out in seen["second"]]))
    assert torch.equal(
        torch.stack(cache.second.input), torch.stack([args[0] for args, _, _ in seen["second"]])
    )


def test_indices_navigate_lists(x):
    net = nn.Sequential(nn.Linear(3, 3), nn.ModuleList([nn.Linear(3, 3)])[0])
    model = Envoy(net)
    with model.trace(x) as tracer:
        cache = tracer.cache()
    assert torch.equal(cache[0].output, net[0](x))
    assert torch.equal(cache.model[1].output, net(x))


def test_what_blocks_changed_is_what_is_recorded(model, net, x):
    with model.trace(x) as tracer:
        cache = tracer.cache(include_inputs=True)
        model.first.output = torch.zeros(4, 5)
        model.second.input = torch.ones(4, 5)
        model.second.output[:] = 3
    assert torch.equal(cache.first.output, torch.zeros(4, 5))
    assert torch.equal(cache.second.input, torch.ones(4, 5))
    assert torch.equal(cache.second.output, torch.full((4, 2), 3.0))
    assert torch.equal(cache.output, torch.tanh(torch.full((4, 2), 3.0)))


def test_a_skipped_module_is_recorded_with_what_took_its_place(model, x):
    with model.trace(x) as tracer:
        cache = tracer.cache()
        model.second.skip(torch.ones(4, 2))
    assert torch.equal(cache.second.output, torch.ones(4, 2))


def test_only_the_modules_asked_for(model, net, x):
    with model.trace(x) as tracer:
        cache = tracer.cache(modules=[model.first, "model.second", "act"])
    assert cache.keys() == ["model.first", "model.act", "model.second"]
    assert "model" not in cache
    assert "second" in cache
    assert "nonsense" not in cache
    with pytest.raises(KeyError, match=r"model was not recorded; recorded: model.first"):
        _ = cache.model.output
    with pytest.raises(AttributeError, match=r"model\.nonsense is no module"):
        _ = cache.nonsense


def test_inputs_and_outputs_can_be_chosen(model, net, x):
    with model.trace(x, scale=2.0) as tracer:
        cache = tracer.cache(include_output=False, include_inputs=True)
    assert cache.model.output is None
    args, kwargs = cache.model.inputs
    assert torch.equal(args[0], x)
    assert kwargs == {"scale": 2.0}
    assert torch.equal(cache.second.input, torch.tanh(net.first(x)))


def test_tensors_leave_the_graph_unless_told_otherwise(model, x):
    with model.trace(x) as tracer:
        detached = tracer.cache()
        attached = tracer.cache(detach=False, device=None)
        hidden = model.first.output.save()
    assert not detached.first.output.requires_grad
    assert attached.first.output is hidden


def test_floating_point_is_cast_and_moved(x):
    net = nn.Embedding(3, 2)
    model = Envoy(net)
    with model.trace(torch.tensor([1, 2])) as tracer:
        cache = tracer.cache(dtype=torch.float64, device="meta", include_inputs=True, non_blocking=True)
    assert cache.model.output.dtype is torch.float64
    assert cache.model.output.device.type == "meta"
    assert cache.model.input.dtype is torch.int64


def test_a_module_that_returns_nothing_is_recorded_at_every_visit(x):
    class Log(nn.Module):
        def forward(self, value, *, tag):
            return None if tag < 2 else value

    net = nn.Module()
    net.log = Log()
    net.forward = lambda x: [net.log(x * tag, tag=tag) for tag in range(3)][-1]
    model = Envoy(net)
    with model.trace(x) as tracer:
        cache = tracer.cache(include_inputs=True)
    assert [each is None for each in cache.log.output] == [True, True, False]
    assert [inputs[1]["tag"] for inputs in cache.log.inputs] == [0, 1, 2]
    assert torch.equal(cache.log.input[2], cache.log.output[2])


def test_a_module_called_without_arguments_has_no_input():
    class Constant(nn.Module):
        def forward(self):
            return torch.ones(1)

    model = Envoy(Constant())
    with model.trace() as tracer:
        cache = tracer.cache(include_inputs=True)
        with tracer.invoke():
            model.output.save()
    assert cache.model.inputs == ((), {})
    assert cache.model.input is None


def test_a_cache_comes_before_everything_else(model, x):
    with (
        pytest.raises(ValueError, match="before the block reads or changes anything"),
        model.trace(x) as tracer,
    ):
        model.first.output.save()
        tracer.cache()


def test_modules_that_are_not_there_are_refused(model, x):
    with pytest.raises(KeyError, match=r"secnd is no module of the traced model.*second"):
        with model.trace(x) as tracer:
            tracer.cache(modules=["secnd"])
    with pytest.raises(TypeError, match="takes a list, got the string"), model.trace(x) as tracer:
        tracer.cache(modules="second")
    other = Envoy(nn.ModuleDict({"second": nn.Linear(1, 1)}))
    with pytest.raises(KeyError, match=r"model\.second is no module"), model.trace(x) as tracer:
        tracer.cache(modules=[other.second])


def test_each_invoke_records_its_rows_in_memory_of_their_own(model, net, x):
    with model.trace() as tracer:
        whole = tracer.cache()
        with tracer.invoke(x[:1]):
            one = tracer.cache()
        with tracer.invoke(x[1:]):
            rest = tracer.cache(modules=[model.first])
            model.first.output = torch.zeros(3, 5)
    assert torch.equal(whole.first.output, torch.cat([net.first(x)[:1], torch.zeros(3, 5)]))
    assert torch.equal(one.first.output, net.first(x)[:1])
    assert torch.equal(rest.first.output, torch.zeros(3, 5))
    assert one.second.output.untyped_storage().nbytes() == 2 * 4
    assert rest.keys() == ["model.first"]


def test_what_the_model_changes_in_place_afterwards_is_said():
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    model = Envoy(net)
    with pytest.warns(UserWarning, match=r"model\.0\.output changed in place after it was recorded"):
        with torch.no_grad(), model.trace(torch.ones(1, 3)) as tracer:
            tracer.cache()


def test_stop_keeps_what_was_recorded(model, x):
    with model.trace(x) as tracer:
        cache = tracer.cache()
        model.act.output.save()
        tracer.stop()
    assert cache.keys() == ["model.first", "model.act"]


def test_shared_modules_are_found_under_all_their_names(x):
    layer = nn.Linear(3, 3)
    model = Envoy(nn.Sequential(layer, layer))
    with model.trace(x) as tracer:
        cache = tracer.cache()
    assert len(cache[0]) == len(cache[1]) == 2


def test_a_cache_keeps_no_model_alive(net, x):
    def traced():
        model = Envoy(nn.Sequential(nn.Linear(3, 3)))
        with model.trace(x) as tracer:
            cache = tracer.cache()
        return cache, weakref.ref(model.module[0])

    gc.disable()
    try:
        cache, gone = traced()
        assert gone() is None, gc.get_referrers(gone())
        assert isinstance(cache, CacheView)
        assert cache["model.0"].output.shape == (4, 3)
    finally:
        gc.enable()


def test_a_model_that_holds_itself_is_recorded_once(x):
    net = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Tanh()))
    net[1].add_module("up", net)
    net.forward = lambda x: net[1][0](net[0](x))
    model = Envoy(net)
    with model.trace(x) as tracer:
        cache = tracer.cache()
    assert cache.keys() == ["model.0", "model.1.0", "model"]
    assert torch.equal(cache["model.1.0"].output, torch.tanh(net[0](x)))
