"""Several invokes are one batch; each block reads and writes its own rows of it."""

# ruff: noqa: PT012, SIM117 (a trace is a with statement with a body)

from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import BatchEncoding

from softs_lightning.tracing import Envoy, OutsideTraceError, save
from softs_lightning.tracing.batching import RowRange, join


@pytest.fixture
def model(net):
    return Envoy(net)


def test_each_block_sees_its_rows_and_an_empty_one_all(model, net, x, hooked):
    with model.trace() as tracer:
        with tracer.invoke(x[:1]):
            one = model.first.output.save()
        with tracer.invoke(x[1:]):
            rest = model.first.output.save()
            result = tracer.result.save()
        with tracer.invoke():
            whole = model.first.output.save()
    seen, expected = hooked(net, x)
    assert torch.equal(whole, seen["first"][0][2])
    assert torch.equal(torch.cat([one, rest]), whole)
    assert torch.equal(result, expected[1:])


def test_each_block_writes_its_rows(model, net, x):
    with model.trace() as tracer:
        with tracer.invoke(x[:1]):
            model.first.output = torch.ones(1, 5)
        with tracer.invoke(x[1:2]):
            model.first.output[:] = 2
            own = model.output.save()
        with tracer.invoke(x[2:]):
            hidden = model.first.output.save()
        with tracer.invoke():
            result = model.output.save()
    expected = torch.cat([torch.ones(1, 5), torch.full((1, 5), 2.0), net.first(x)[2:]])
    assert torch.equal(hidden, expected[2:])
    assert torch.equal(result, torch.tanh(net.second(torch.tanh(expected))))
    assert torch.equal(own, result[1:2])


def test_a_write_to_some_rows_keeps_the_gradient_of_the_others(model, net, x):
    with model.trace() as tracer:
        with tracer.invoke(x[:1]):
            with torch.no_grad():
                model.first.output = model.first.output * 0
        with tracer.invoke(x[1:]):
            result = model.output.save()
    result.sum().backward()
    gradient = net.first.weight.grad
    net.first.weight.grad = None
    net(x)[1:].sum().backward()
    assert torch.allclose(gradient, net.first.weight.grad, rtol=0, atol=1e-6)
    assert gradient.abs().sum() > 0


def test_inputs_are_read_and_written_by_rows(model, net, x):
    with model.trace(scale=2.0) as tracer:
        with tracer.invoke(x[:2]):
            args, kwargs = model.inputs.save()
            model.input = x[:2] + 1
        with tracer.invoke(x[2:]):
            rest = model.second.input.save()
        with tracer.invoke():
            result = tracer.result.save()
    assert torch.equal(args[0], x[:2])
    assert kwargs == {"scale": 2.0}
    changed = torch.cat([x[:2] + 1, x[2:]])
    assert torch.equal(rest, torch.tanh(net.first(changed))[2:])
    assert torch.equal(result, net(changed, scale=2.0))


@pytest.mark.parametrize("value", [torch.zeros(2, 5), torch.zeros(()), (torch.zeros(1, 5),), 1])
def test_a_wrong_number_of_rows_is_refused_on_its_line(model, x, value):
    with pytest.raises(ValueError, match=r"the value written is|so it needs 1 in dimension 0"):
        with model.trace() as tracer:
            with tracer.invoke(x[:1]):
                model.first.output = value
            with tracer.invoke(x[1:]):
                model.first.output.save()


def test_one_invoke_is_the_whole_batch(model, net, x):
    with model.trace() as tracer:
        with tracer.invoke(x):
            model.first.output = torch.zeros(7, 5)  # any number of rows
            result = model.output.save()
    assert result.shape == (7, 2)


def test_skipping_takes_all_rows(model, net, x):
    with model.trace() as tracer:
        with tracer.invoke(x[:1]):
            model.second.skip(torch.ones(1, 2))
        with tracer.invoke(x[1:]):
            model.second.skip(model.second.input[:, :2] * 0)
            result = model.output.save()
        with tracer.invoke():
            output = model.second.output.save()
    assert torch.equal(output, torch.cat([torch.ones(1, 2), torch.zeros(3, 2)]))
    assert torch.equal(result, torch.zeros(3, 2))


def test_skipping_some_rows_only_is_an_error(model, x):
    with pytest.raises(ValueError, match=r"model\.second\.input was skipped for some rows .* 1 block"):
        with model.trace() as tracer:
            with tracer.invoke(x[:1]):
                model.second.skip(torch.ones(1, 2))
            with tracer.invoke(x[1:]):
                model.second.input.save()


def test_skipping_with_a_wrong_number_of_rows_is_an_error(model, x):
    with pytest.raises(
        ValueError, match="this block has 1 rows of the batch; it skips with a tensor of shape"
    ):
        with model.trace() as tracer:
            with tracer.invoke(x[:1]):
                model.second.skip(torch.ones(4, 2))
            with tracer.invoke(x[1:]):
                model.second.skip(torch.ones(3, 2))


def test_an_empty_invoke_may_skip_for_all(model, x):
    with model.trace() as tracer:
        with tracer.invoke(x):
            result = model.output.save()
        with tracer.invoke():
            model.second.skip(torch.zeros(4, 2))
    assert torch.equal(result, torch.zeros(4, 2))


def test_variables_of_a_loop_are_bound_to_each_invoke(model, net, x):
    found = {}
    with model.trace() as tracer:
        for number in range(4):
            with tracer.invoke(x[number : number + 1]):
                found[number] = model.first.output
    assert torch.equal(torch.cat([found[number] for number in range(4)]), net.first(x))


def test_blocks_see_what_others_assigned_unless_they_did_themselves(model, x):
    shared, said = "before", []
    with model.trace() as tracer:
        with tracer.invoke(x):
            shared = "first"
            own = ["first"]
            model.first.output.save()
        with tracer.invoke(x):
            own = ["second"]
            said.append((shared, own[0]))
            shared = save("second")
    assert said == [("first", "second")]
    assert shared == "second"
    with pytest.raises(UnboundLocalError):
        _ = own


def test_helpers_do_not_share_each_others_names(model, x):
    said = []

    def probe(tracer, number):
        with tracer.invoke(x):
            if number == 0:
                value = number
            try:
                said.append((number, value))
            except NameError:
                said.append((number, None))

    with model.trace() as tracer:
        probe(tracer, 0)
        probe(tracer, 1)
        with tracer.invoke(x):
            model.first.output.save()
    assert said == [(0, 0), (1, None)]


def test_what_is_around_the_invokes_runs_first_and_once(model, x):
    order = []
    with model.trace() as tracer:
        order.append("above")
        with tracer.invoke(x):
            order.append("block")
            model.first.output.save()
        order.append("below")
        note = save("kept")
    assert order == ["above", "below", "block"]
    assert note == "kept"


def test_invokes_as_functions(model, net, x):
    with model.trace() as tracer:

        @tracer.invoke(x[:1])
        def first():
            return model.first.output

        @tracer.invoke(x[1:])
        def second():
            return model.first.output

        with pytest.raises(AttributeError, match="has not run yet"):
            first.value  # noqa: B018
    assert torch.equal(torch.cat([first.value, second.value]), net.first(x))


def test_no_input_anywhere_is_refused(model):
    with pytest.raises(ValueError, match="the trace got no input"), model.trace():
        x = 1  # noqa: F841


def test_a_location_outside_of_the_invokes_says_so(model, x):
    with pytest.raises(OutsideTraceError, match="this trace got no input, so its body only collects invokes"):
        with model.trace() as tracer:
            with tracer.invoke(x):
                model.first.output.save()
            model.output.save()


def test_invokes_belong_in_a_trace_without_input(model, x):
    with pytest.raises(ValueError, match="that got no input, not in a block of a running one"):
        with model.trace(x) as tracer:
            tracer.invoke(x)
    with pytest.raises(ValueError, match="that got no input, not in a block of a running one"):
        with model.trace() as tracer:
            with tracer.invoke(x):
                tracer.invoke(x)
    with pytest.raises(ValueError, match="this one is not collecting invokes"):
        tracer.invoke(x)


def test_a_model_without_input_is_traced_by_an_empty_invoke():
    net = nn.Module()
    net.layer = nn.Linear(2, 2)
    net.forward = lambda: net.layer(torch.ones(2))
    model = Envoy(net)
    with model.trace() as tracer:
        with tracer.invoke():
            result = tracer.result.save()
    assert torch.equal(result, net.layer(torch.ones(2)))


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


class Structured(nn.Module):
    """Takes and returns containers of every kind, and one tensor that has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()
        self.register_buffer("table", torch.arange(3.0))

    def forward(self, both, *, more):
        out = {"pair": Pair(both[0] * 2, more["b"]), "list": [both[1], self.table], "flag": True}
        return self.inner(out)


def test_tuples_and_dicts_of_tensors_are_batched():
    model, net = Envoy(net := Structured()), net
    inputs = [((torch.full((n, 2), n), torch.ones(n)), {"b": torch.zeros(n, 1)}) for n in (1, 2)]
    with model.trace() as tracer:
        for both, more in inputs:
            with tracer.invoke(both, more=more):
                model.inner.output = {
                    **model.inner.output,
                    "list": [both[1] * 5, model.inner.output["list"][1]],
                }
        with tracer.invoke():
            whole = tracer.result.save()
    assert type(whole["pair"]) is Pair
    assert torch.equal(whole["pair"].left, torch.tensor([[2, 2], [4, 4], [4, 4]]))
    assert torch.equal(whole["list"][0], torch.full((3,), 5.0))
    assert torch.equal(whole["list"][1], net.table)
    assert whole["flag"] is True


@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        (torch.ones(1, 3), torch.ones(1, 4), r"\[0\] differs between invokes.*\(1, 3\).*\(1, 4\)"),
        (torch.ones(1, 3), torch.ones(1, 3, dtype=torch.int), "differs between invokes"),
        (torch.ones(1, 3), (torch.ones(1, 3),), "in one place and a tuple of 1 in another"),
        ({"a": torch.ones(1)}, {"b": torch.ones(1)}, "keys"),
        ((torch.ones(1), 1), (torch.ones(1), 2), "is 1 in one invoke and 2 in another"),
        ((torch.ones(1), torch.tensor(1)), (torch.ones(1), torch.tensor(2)), "in one invoke and"),
    ],
)
def test_inputs_that_make_no_batch_are_refused(model, one, other, message):
    with pytest.raises(ValueError, match=message), model.trace() as tracer:
        with tracer.invoke(one):
            model.output.save()
        with tracer.invoke(other):
            model.output.save()


@pytest.mark.parametrize("value", [1, ["ab"], (torch.ones(1), torch.ones(2)), torch.tensor(1)])
def test_an_input_without_one_number_of_rows_is_refused(model, value):
    with pytest.raises(ValueError, match=r"one number of rows"):
        with model.trace() as tracer:
            tracer.invoke(value)


def test_an_argument_given_twice_is_refused(model, x):
    with pytest.raises(ValueError, match="scale is given both to the trace and to an invoke"):
        with model.trace(scale=2.0) as tracer:
            with tracer.invoke(x, scale=3.0):
                model.output.save()


def test_rows_of_a_slice_are_views_and_writes_are_not():
    rows = RowRange(1, 2, 4)
    whole = torch.arange(8.0).view(4, 2)
    part = rows.narrow((whole, "other", torch.ones(3)))
    assert part[0].data_ptr() == whole[1:].data_ptr()
    assert part[1] == "other"
    assert part[2].shape == (3,)
    widened = rows.widen(whole, torch.zeros(2, 2))
    assert torch.equal(widened, torch.cat([whole[:1], torch.zeros(2, 2), whole[3:]]))
    assert torch.equal(whole, torch.arange(8.0).view(4, 2))


def encoded(*lengths):
    ids = [torch.arange(1, length + 1) for length in lengths]
    longest = max(lengths)
    pad = [nn.functional.pad(each, (0, longest - len(each))) for each in ids]
    return BatchEncoding({"input_ids": torch.stack(pad), "attention_mask": (torch.stack(pad) > 0).long()})


@pytest.fixture(scope="module")
def bert():
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16
    )
    return BertModel(config).eval()


def test_tokenizer_output_is_padded_like_the_tokenizer_would(bert):
    model = Envoy(bert)
    short, long = encoded(3), encoded(6, 5)
    with torch.no_grad():
        with model.trace() as tracer:
            with tracer.invoke(short):
                ids = model.embeddings.inputs[1]["input_ids"].save()
                one = model.encoder.layer[1].inputs[0][0].save()
        with model.trace() as tracer:
            with tracer.invoke(short):
                padded = model.encoder.layer[1].inputs[0][0].save()
            with tracer.invoke(long):
                other = model.pooler.output.save()
            with tracer.invoke():
                all_ids = model.embeddings.inputs[1]["input_ids"].save()
        alone = bert(**long).pooler_output
    assert ids.shape == (1, 3)
    assert torch.equal(all_ids[0], torch.tensor([1, 2, 3, 0, 0, 0]))
    assert torch.allclose(padded[:, :3], one, rtol=0, atol=1e-6)
    assert torch.allclose(other, alone, rtol=0, atol=1e-6)


def test_tokens_of_different_lengths_need_a_mask_and_a_padding_token(bert):
    model = Envoy(bert)
    for kwargs in (
        {"input_ids": torch.ones(1, 2, dtype=torch.long)},
        {"input_ids": torch.ones(1, 3, dtype=torch.long)},
    ):
        assert kwargs["input_ids"].dim() == 2
    with pytest.raises(ValueError, match="and no attention_mask"), model.trace() as tracer:
        for length in (2, 3):
            with tracer.invoke(input_ids=torch.ones(1, length, dtype=torch.long)):
                model.pooler.output.save()
    with pytest.raises(ValueError, match="there is no padding token"):
        join([((), dict(encoded(2))), ((), dict(encoded(3)))], None, "right")


def test_padding_goes_to_the_side_asked_for():
    inputs = [((), dict(encoded(2))), ((), dict(encoded(3)))]
    _, right = join(inputs, 9, "right")
    _, left = join(inputs, 9, "left")
    assert right["input_ids"].tolist() == [[1, 2, 9], [1, 2, 3]]
    assert right["attention_mask"].tolist() == [[1, 1, 0], [1, 1, 1]]
    assert left["input_ids"].tolist() == [[9, 1, 2], [1, 2, 3]]
    assert left["attention_mask"].tolist() == [[0, 1, 1], [1, 1, 1]]


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = ["<pad>", "<unk>", "the", "cat", "sat", "on", "mat", "a"]
    core = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", padding_side="left")


@pytest.fixture(scope="module")
def gpt(tokenizer):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=8,
        n_positions=32,
        n_embd=8,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    return GPT2LMHeadModel(config).eval()


def test_text_goes_through_the_tokenizer(gpt, tokenizer):
    model = Envoy(gpt, tokenizer=tokenizer)
    with torch.no_grad():
        with model.trace("the cat sat"):
            logits = model.lm_head.output.save()
        with model.trace(["the cat sat", "a mat"]):
            both = model.lm_head.output.save()
        assert torch.equal(logits, gpt(torch.tensor([[2, 3, 4]])).logits)
        assert torch.equal(
            both, gpt(**tokenizer(["the cat sat", "a mat"], return_tensors="pt", padding=True)).logits
        )


def test_invokes_of_text_are_padded_on_the_tokenizers_side(gpt, tokenizer):
    model = Envoy(gpt, tokenizer=tokenizer)
    with torch.no_grad():
        with model.trace() as tracer:
            with tracer.invoke("a mat"):
                ids = model.inputs[1]["input_ids"].save()
            with tracer.invoke("the cat sat on"):
                last = model.lm_head.output[:, -1].save()
        expected = gpt(torch.tensor([[2, 3, 4, 5]])).logits[:, -1]
    assert ids.tolist() == [[0, 0, 7, 6]]
    assert torch.allclose(last, expected, rtol=0, atol=1e-6)


def test_text_without_a_tokenizer_or_a_padding_token_is_refused(gpt, tokenizer):
    with (
        pytest.raises(ValueError, match="text, and the envoy has no tokenizer"),
        Envoy(gpt).trace() as tracer,
    ):
        tracer.invoke("the cat")
    for text in ("the cat", ["the cat", "a mat"]):
        expected = r"was given text and failed on it .* Envoy\(model, tokenizer=tokenizer\)"
        with pytest.raises(TypeError, match=expected) as caught, Envoy(gpt).trace(text):
            _ = 1
        assert isinstance(caught.value.__cause__, TypeError | AttributeError)
    with pytest.raises(TypeError, match=r"^mine$"), Envoy(gpt).trace("the cat"):
        raise TypeError("mine")
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ValueError, match=r"set `tokenizer\.pad_token`"):
        with Envoy(gpt, tokenizer=bare).trace(["the cat", "a"]):
            _ = 1


def test_generation_of_a_batch_of_prompts(gpt, tokenizer):
    model = Envoy(gpt, tokenizer=tokenizer)
    with model.generate(max_new_tokens=3, do_sample=False) as tracer:
        with tracer.invoke("the cat sat"):
            embeddings = model.transformer.wte.output.save()
            first = tracer.result.save()
        with tracer.invoke("a mat"):
            steps = [].save()
            for _ in tracer.iter[:]:
                steps.append(model.lm_head.output[:, -1].argmax(-1))
            second = tracer.result.save()
    inputs = tokenizer(["the cat sat", "a mat"], return_tensors="pt", padding=True)
    reference = gpt.generate(**inputs, max_new_tokens=3, do_sample=False)
    assert torch.equal(torch.cat([first, second]), reference)
    assert torch.equal(torch.stack(steps, 1), reference[1:, 3:])
    assert torch.equal(embeddings, gpt.transformer.wte(torch.tensor([[2, 3, 4]])))


def test_a_model_that_takes_text_itself_needs_no_tokenizer():
    class Length(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, text: str) -> torch.Tensor:
            return self.inner(torch.tensor(len(text)))

    model = Envoy(Length())
    with model.trace("text"):
        length = model.inner.output.save()
    assert length.item() == 4
