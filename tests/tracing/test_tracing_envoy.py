"""The envoy mirrors the model; what its document shows a user writing runs on a language model."""

# ruff: noqa: SIM117 (a trace is a with statement with a body)

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from softs_lightning.tracing import Envoy, InterleavingTracer, OutOfOrderError, save


@pytest.fixture(scope="module")
def gpt():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=11, n_positions=32, n_embd=8, n_layer=3, n_head=2, bos_token_id=0, eos_token_id=None
    )
    return GPT2LMHeadModel(config).eval()


IDS = torch.tensor([[1, 2, 3, 4]])


def test_attributes_indices_and_iteration_lead_to_modules(gpt):
    model = Envoy(gpt)
    assert model.transformer.h[1].module is gpt.transformer.h[1]
    assert model.transformer.h[-1].path == "model.transformer.h.2"
    assert [each.module for each in model.transformer.h] == list(gpt.transformer.h)
    assert [each.path for each in model.transformer.h[1:]] == [
        "model.transformer.h.1",
        "model.transformer.h.2",
    ]
    assert len(model.transformer.h) == 3
    assert model["transformer.h.0.attn"].module is gpt.transformer.h[0].attn
    assert model.transformer.h is model.transformer.h
    assert bool(model.lm_head)
    assert "transformer" in dir(model)
    assert "trace" in dir(model)


def test_dicts_of_modules_go_by_key():
    net = nn.ModuleDict({"a": nn.Linear(1, 1), "output": nn.Tanh()})
    model = Envoy(net, name="net")
    assert list(model) == ["a", "output"]
    assert {name: each.module for name, each in model.items()} == dict(net.items())
    assert model["a"].path == "net.a"
    assert model["output"].module is net["output"]


def test_what_is_no_module_comes_from_the_module(gpt):
    model = Envoy(gpt)
    assert model.config is gpt.config
    assert model.lm_head.weight is gpt.lm_head.weight
    assert model.training is False
    assert list(model.lm_head.parameters()) == list(gpt.lm_head.parameters())
    assert model.eval() is gpt


def test_the_repr_is_a_tree(net):
    assert repr(Envoy(net).first) == "model.first: Linear(in_features=3, out_features=5, bias=True)"
    assert repr(Envoy(net)) == f"model: {net!r}"


def test_names_that_are_not_there_name_the_nearest(net):
    model = Envoy(net)
    with pytest.raises(AttributeError, match=r"model \(Net\) has no 'secnd'; did you mean second, scan\?"):
        _ = model.secnd
    with pytest.raises(KeyError, match=r"model has no module 'first\.x'"):
        _ = model["first.x"]
    with pytest.raises(IndexError, match=r"model has 1 modules, there is no \[3\]"):
        _ = Envoy(nn.Sequential(nn.Tanh()))[3]
    with pytest.raises(TypeError, match="its children go by name"):
        _ = model[0]
    with pytest.raises(TypeError, match="an envoy is for a torch"):
        Envoy("model")


def test_only_locations_can_be_assigned(net):
    with pytest.raises(AttributeError):
        Envoy(net).outptu = 1


def test_children_that_are_replaced_are_followed(net, x):
    model = Envoy(net)
    before = model.first
    net.first = nn.Linear(3, 5)
    assert model.first is not before
    with model.trace(x):
        hidden = model.first.output.save()
    assert torch.equal(hidden, net.first(x))


def test_a_child_named_like_a_location_goes_by_key():
    config = BertConfig(
        vocab_size=9, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=6
    )
    net = BertModel(config).eval()
    model = Envoy(net)
    with torch.no_grad(), model.trace(IDS):
        inner = model.encoder.layer[0]["output"].output.save()
        layer = model.encoder.layer[0].output.save()
    seen = {}
    handle = net.encoder.layer[0].output.register_forward_hook(lambda *args: seen.update(inner=args[2]))
    with torch.no_grad():
        net(IDS)
    handle.remove()
    assert torch.equal(inner, seen["inner"])
    assert torch.equal(layer[0] if isinstance(layer, tuple) else layer, inner)


def test_methods_make_tracers_outside_of_blocks_and_are_called_in_them(net, x):
    model = Envoy(net)
    tracer = model.generate(x, steps=1)
    assert type(tracer) is InterleavingTracer
    assert repr(tracer) == "<a tracer for generate(): use it in a with statement or as a decorator>"
    with model.trace(x):
        inside = model.generate(x, steps=1).save()
        model.first.output.save()
    assert torch.equal(inside, net.generate(x, steps=1))


def test_wrapping_changes_nothing_of_a_model(net, x):
    before = {name: dict(each.__dict__) for name, each in net.named_modules()}
    model = Envoy(net)
    with model.trace(x):
        model.first.output.save()
        twin = copy.deepcopy(net).save()
        loaded = pickle.loads(pickle.dumps(net)).save()
    assert {name: dict(each.__dict__) for name, each in net.named_modules()} == before
    assert torch.equal(twin(x), net(x))
    assert torch.equal(loaded(x), net(x))
    with Envoy(twin).trace(x) as tracer:
        result = tracer.result.save()
    assert torch.equal(result, net(x))


def test_what_the_document_shows(gpt):
    model = Envoy(gpt)
    with torch.no_grad():
        reference = gpt(IDS, output_hidden_states=True)
        with model.trace(IDS) as tracer:
            hidden = model.transformer.h[0].output.save()
            tracer.stop()
        assert torch.equal(first_tensor(hidden), reference.hidden_states[1])
        with model.trace(IDS):
            output = model.output.save()
        assert torch.equal(output.logits, reference.logits)
    with model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0) as tracer:
        ids = tracer.result.save()
    expected = gpt.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert torch.equal(ids, expected)
    with model.generate(IDS, max_new_tokens=3, do_sample=False, pad_token_id=0) as tracer:
        tokens = [].save()
        for step in tracer.iter[:3]:  # noqa: B007
            hidden = model.transformer.h[0].output.save()
            tokens.append(model.lm_head.output[:, -1].argmax(-1))
        ids = tracer.result.save()
    assert len(tokens) == 3
    assert torch.equal(torch.stack(tokens, 1), ids[:, 4:])
    with model.trace(IDS) as tracer:
        cache = tracer.cache()
    assert torch.equal(cache["model.transformer.h.0"].output, cache.transformer.h[0].output)
    with model.trace() as tracer:
        with tracer.invoke(IDS):
            a = model.transformer.h[0].output.save()
        with tracer.invoke(IDS + 1):
            b = model.transformer.h[0].output.save()
    assert a.shape == b.shape == (1, 4, 8)


def first_tensor(value):
    return value[0] if isinstance(value, tuple) else value


def test_handing_embeddings_over_as_the_document_shows(gpt):
    model = Envoy(gpt)
    with model.generate(max_new_tokens=3, do_sample=False, pad_token_id=0) as tracer:
        barrier = tracer.barrier(2)
        with tracer.invoke(IDS):
            embeddings = model.transformer.wte.output
            barrier()
            first = tracer.result.save()
        with tracer.invoke(IDS * 0):
            barrier()
            model.transformer.wte.output = embeddings
            second = tracer.result.save()
    assert torch.equal(first[:, 4:], second[:, 4:])
    assert torch.equal(second[:, :4], IDS * 0)


def test_hidden_states_are_those_that_transformers_returns(gpt):
    model = Envoy(gpt)
    with torch.no_grad():
        reference = gpt(IDS, output_hidden_states=True).hidden_states
        with model.trace(IDS):
            found = [model.transformer.h[0].input]
            for layer in model.transformer.h:
                found.append(first_tensor(layer.output))
            norm = model.transformer.ln_f.output.save()
            found.save()
    for here, there in zip(found[:-1], reference, strict=False):
        assert torch.equal(here, there)
    assert torch.equal(norm, reference[-1])


def test_outputs_of_transformers_are_written_whole(gpt):
    model = Envoy(gpt)
    with torch.no_grad(), model.trace(IDS) as tracer:
        output = model.output
        output.logits = output.logits * 0
        model.output = output
        result = tracer.result.save()
    assert not result.logits.any()
    assert type(result) is type(gpt(IDS))


def test_outputs_of_transformers_are_batched(gpt):
    model = Envoy(gpt)
    with torch.no_grad(), model.trace(use_cache=False) as tracer:
        with tracer.invoke(IDS):
            mine = model.output.save()
        with tracer.invoke(IDS + 1):
            output = model.output
            output.logits = output.logits * 0
            model.output = output
        with tracer.invoke():
            whole = model.output.save()
    assert type(mine) is type(whole)
    assert torch.equal(whole.logits[:1], mine.logits)
    assert not whole.logits[1:].any()
    assert torch.allclose(mine.logits, gpt(IDS).logits, rtol=0, atol=1e-6)


def test_the_fused_path_of_torch_encoders_says_that_it_skips_modules():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    model, x = Envoy(layer), torch.ones(1, 3, 8)
    with pytest.raises(
        OutOfOrderError, match=r"model\.linear1\.output was not reached: its module was never called"
    ):
        with torch.no_grad(), model.trace(x):
            model.linear1.output.save()
    with model.trace(x):  # with gradients there is no fused path
        hidden = model.linear1.output.save()
        shape = save(hidden.shape)
    assert shape == (1, 3, 16)
