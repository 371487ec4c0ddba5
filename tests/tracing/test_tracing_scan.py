"""A scan tells shapes, dtypes and devices of the real run without running it."""

import inspect
import threading
from collections import OrderedDict, deque

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from softs_lightning.tracing import Envoy, save


@pytest.fixture
def model(net):
    return Envoy(net)


def metadata(tensor):
    return tensor.shape, tensor.dtype, tensor.device


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_metadata_are_those_of_the_real_run(net, x, dtype):
    net, x = net.to(dtype), x.to(dtype)
    model = Envoy(net)

    def program(model):
        save([metadata(each.output) for each in (model.first, model.act, model.second, model)], "found")

    real = model.run(program, x)["found"]
    with model.scan(x):
        found = [metadata(each.output) for each in (model.first, model.act, model.second, model)].save()
    assert found == real
    assert found[0] == (torch.Size([4, 5]), dtype, torch.device("cpu"))


def test_values_are_fake_in_the_block_and_after_it(model, x):
    with model.scan(x) as tracer:
        hidden = model.first.output.save()
        made = torch.ones(3).save()
        result = tracer.result.save()
    assert isinstance(hidden, FakeTensor)
    assert isinstance(made, FakeTensor)
    assert isinstance(result.mean() + 1, FakeTensor)
    assert result.sum().cpu().shape == ()
    assert not isinstance(torch.ones(1), FakeTensor)


def test_nothing_is_computed_and_nothing_changes(x):
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout())
    before = {name: each.clone() for name, each in net.state_dict().items()}
    random = torch.get_rng_state()
    model = Envoy(net)
    with model.scan(x):
        model[0].output[:] = 0
        model[1].output = model[1].output * 2
        shape = model.output.shape.save()
    assert shape == (4, 3)
    assert all(torch.equal(each, before[name]) for name, each in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert not any(isinstance(each, FakeTensor) for each in net.buffers())


def test_what_a_model_keeps_of_a_scan_is_put_back(x):
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(3))
            self.mask = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mask is None:
                self.mask = torch.ones_like(x)
                self.scale = self.scale * 2
                self.late = x
            return x * self.mask * self.scale

    net = Keeps()
    with Envoy(net).scan(x) as tracer:
        shape = tracer.result.shape.save()
    assert shape == (4, 3)
    assert net.mask is None
    assert not hasattr(net, "late")
    assert torch.equal(net(x), x * 2)


def test_invokes_and_text_are_prepared_as_in_a_trace(model, x):
    with model.scan() as tracer:
        with tracer.invoke(x[:1]):
            one = model.first.output.shape.save()
        with tracer.invoke(x[1:]):
            model.first.output = model.first.output * 2
            rest = model.output.shape.save()
        with tracer.invoke():
            whole = model.output.shape.save()
    assert (one, rest, whole) == ((1, 5), (3, 2), (4, 2))


def test_caches_steps_and_stop_work_in_a_scan(model, x):
    with model.scan(x) as tracer:
        cache = tracer.cache(device=None)
        for _ in tracer.iter[1]:
            shape = model.act.output.shape.save()
            tracer.stop()
    assert shape == (4, 2)
    assert [tuple(each.shape) for each in cache.act.output] == [(4, 5), (4, 2)]


def test_a_model_without_weights_is_scanned_on_the_meta_device():
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=3,
        num_attention_heads=32,
    )
    with torch.device("meta"):
        net = LlamaForCausalLM(config)
    model = Envoy(net)
    with model.scan(torch.ones(2, 16, dtype=torch.long)):
        hidden = metadata(model.model.layers[2].output).save()
        logits = metadata(model.lm_head.output).save()
    assert hidden == (torch.Size([2, 16, 4096]), torch.float32, torch.device("meta"))
    assert logits[0] == (2, 16, 32000)
    assert all(each.is_meta and not isinstance(each, FakeTensor) for each in net.parameters())


def test_what_is_real_in_a_model_without_weights_moves_along(x):
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 5, device="meta")
            self.own = nn.Parameter(torch.ones(5))
            self.register_buffer("table", torch.arange(5.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) * self.own + self.table

    net = Mixed()
    with Envoy(net).scan(x) as tracer:
        found = metadata(tracer.result).save()
    assert found == ((4, 5), torch.float32, torch.device("meta"))
    assert torch.equal(net.table, torch.arange(5.0))
    assert torch.equal(net.own, torch.ones(5))


def test_a_small_model_has_the_same_shapes_on_the_meta_device():
    config = LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2
    )
    with torch.device("meta"):
        meta = LlamaForCausalLM(config)
    real = LlamaForCausalLM(config)
    ids = torch.ones(1, 4, dtype=torch.long)

    def program(model, tracer):
        save(
            {
                name: each.output.shape
                for name, each in (("mlp", model.model.layers[0].mlp), ("", model.lm_head))
            },
            "at",
        )

    assert Envoy(real).run(program, ids)["at"] == {"mlp": (1, 4, 8), "": (1, 4, 20)}
    with Envoy(meta).scan(ids) as tracer:
        shapes = tracer.cache(device=None)
    with Envoy(real).scan(ids) as tracer:
        same = tracer.cache(device=None)
    for path in ("model.model.layers.0.mlp", "model.lm_head", "model.model.layers.1"):
        assert shapes[path].output.shape == same[path].output.shape


def test_an_error_in_a_scan_comes_out_as_itself(model, net):
    with pytest.raises(RuntimeError), model.scan(torch.ones(2, 7)):
        model.first.output.save()
    assert "forward" not in net.first.__dict__


class Helper:
    table = None


class Tables(dict):
    """Not copied by a call of its class."""

    def __init__(self, name):
        super().__init__()
        self.name = name


class Caching(nn.Module):
    """Keeps what it made in the first call, in containers and objects of every kind, and counts its calls."""

    def __init__(self):
        super().__init__()
        self.layer, self.helper, self.helper.deeper = nn.Linear(3, 3), Helper(), Helper()
        self.tables, self.nested, self.seen = Tables("a"), ([{"last": None}],), set()
        self.recent, self.ordered = deque([torch.zeros(3)], maxlen=1), OrderedDict()
        self.calls, self.total = 0, torch.zeros(3)

    def forward(self, x):
        n = x.shape[-1]
        if n not in self.tables:
            self.tables[n] = torch.arange(float(n))
            self.helper.table = torch.ones(n)
            self.helper.deeper.table = [torch.ones(n)]
            self.nested[0][0]["last"] = torch.ones(n)
            self.seen.add(torch.ones(n))
            self.ordered["made"] = torch.ones(n)
        self.calls += 1
        self.recent.append(x[0])
        self.total += x[0]
        made = (
            self.helper.table * self.helper.deeper.table[0] * self.nested[0][0]["last"] * self.ordered["made"]
        )
        return self.layer(x) + self.tables[n] * made + 0 * self.recent[0]


def test_what_a_model_keeps_in_a_scan_is_not_kept(x):
    net = Caching()
    net.kept, net.shared = [], net.tables
    tables, recent, total = net.tables, net.recent[0], net.total
    for _ in range(2):
        with Envoy(net).scan(x) as tracer:
            shape = tracer.result.shape.save()
            net.kept.append(save(shape))  # holds no fake tensor
    assert shape == (4, 3)
    assert net.tables is net.shared is tables
    assert (net.tables, net.nested, net.seen, net.ordered) == ({}, ([{"last": None}],), set(), {})
    assert (net.helper.table, net.helper.deeper.table) == (None, None)
    assert net.recent[0] is recent
    assert net.total is total
    assert total.tolist() == [0, 0, 0]
    assert (net.calls, net.kept) == (2, [(4, 3)] * 2)
    expected = nn.functional.linear(x, net.layer.weight, net.layer.bias) + torch.arange(3.0)
    assert torch.equal(net(x), expected)


def test_a_model_is_scanned_by_one_thread_at_a_time(model, net, x):
    parameters = list(net.parameters())
    refused = []

    def other():
        try:
            model.run(lambda envoy: None, x, scan=True)
        except RuntimeError as error:
            refused.append(str(error))

    with model.scan(x):
        model.first.output.sum()
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        with Envoy(net).scan(x):  # this thread may
            inner = net.first.weight.shape.save()
    assert refused == ["model is being scanned on another thread; scan it after that"]
    assert inner == (5, 3)
    assert [a is b for a, b in zip(net.parameters(), parameters, strict=True)] == [True] * 4


def test_a_lazy_module_has_no_shape_to_scan(x):
    model = Envoy(nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(
        ValueError, match="model has lazy modules, whose shapes a first real call has to make"
    ):
        model.run(lambda envoy: None, x, scan=True)
    assert model.run(lambda envoy: {"out": envoy.output}, x)["out"].shape == (4, 3)
    assert model.run(lambda envoy: {"out": envoy.output}, x, scan=True)["out"].shape == (4, 3)


def test_a_generation_that_was_scanned_leaves_a_cache_of_the_model_as_it_was():
    config = LlamaConfig(
        hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=11
    )

    # Newer releases of transformers call it otherwise.
    name = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"

    class Holding(nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.cache = LlamaForCausalLM(config), DynamicCache(config=config)

        def forward(self, ids):
            return self.model(ids, use_cache=True, **{name: self.cache}).logits

    net, ids = Holding().eval(), torch.tensor([[1, 2, 3]])
    with Envoy(net).scan(ids) as tracer:
        shape = tracer.result.shape.save()
    assert shape == (1, 3, 11)
    assert net.cache.get_seq_length() == 0
    with torch.no_grad():
        assert torch.equal(net(ids), net.model(ids).logits)
    assert net.cache.get_seq_length() == 3
