"""What blocks with rows of their own see and change of one location, in whichever order they come to it."""

# ruff: noqa: SIM117 (an invoke stands in the body of its trace)

from collections import UserList, defaultdict, deque
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from transformers.modeling_outputs import BaseModelOutput

from softs_lightning.tracing import Envoy, save
from softs_lightning.tracing.capture import Scope


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Envoy(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)))


@pytest.fixture
def x():
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(1))


def test_rows_that_a_block_holds_are_the_models_whatever_another_block_assigned_meanwhile(model, x):
    with model.trace() as tracer:
        both = tracer.barrier(2)
        with tracer.invoke(x[:2]):
            rows = model[0].output
            both()
            rows[:] = 0
        with tracer.invoke(x[2:]):
            model[0].output = model[0].output * 2
            both()
        with tracer.invoke():
            whole = model[1].input.save()
    assert torch.equal(whole[:2], torch.zeros(2, 8))
    assert torch.equal(whole[2:], 2 * model.module[0](x)[2:])


def test_what_a_block_assigned_may_still_be_changed_in_place(model, x):
    with model.trace() as tracer:
        both = tracer.barrier(2)
        with tracer.invoke(x[:2]):
            model[0].output = torch.ones(2, 8)
            both()
            model[0].output[:] = 5
        with tracer.invoke(x[2:]):
            model[0].output.sum()
            both()
        with tracer.invoke():
            whole = model[1].input.save()
    assert torch.equal(whole[:2], torch.full((2, 8), 5.0))


def test_a_block_that_reads_again_sees_its_rows_of_what_was_assigned_to_all(model, x):
    with model.trace() as tracer:
        both = tracer.barrier(2)
        with tracer.invoke(x[:2]):
            model[0].output.sum()
            both()
            again = (model[0].output + 0).save()
        with tracer.invoke(x[2:]):
            pass
        with tracer.invoke():
            model[0].output = torch.full((5, 8), 7.0)
            both()
    assert torch.equal(again, torch.full((2, 8), 7.0))


def test_a_block_of_all_rows_sees_what_the_others_assigned_before_it(model, x):
    with model.trace() as tracer:
        with tracer.invoke(x[:2]):
            model[0].output = torch.ones(2, 8)
        with tracer.invoke(x[2:]):
            model[0].output = torch.zeros(3, 8)
        with tracer.invoke():
            whole = model[0].output.save()
    assert whole.sum(1).tolist() == [8.0, 8.0, 0.0, 0.0, 0.0]


def test_an_input_without_rows_has_no_rows(model, x):
    with model.trace() as tracer:
        with tracer.invoke(torch.zeros(0, 4)):
            none = model[0].output.save()
        with tracer.invoke(x):
            all_of_them = model[0].output.save()
    assert (none.shape, all_of_them.shape) == ((0, 8), (5, 8))


def test_ctrl_c_as_the_names_are_let_go_of_comes_out_as_itself(model, x, monkeypatch):
    functions, came = Scope.functions, []

    def once(self):
        if not came:
            came.append(self)
            raise KeyboardInterrupt
        return functions(self)

    def traced():
        with model.trace() as tracer:
            with tracer.invoke(x):
                (lambda output: output.save())(model[0].output)

    monkeypatch.setattr(Scope, "functions", once)
    with pytest.raises(KeyboardInterrupt):
        traced()
    assert len(came) == 1


def test_an_error_in_code_without_lines_comes_out_as_itself(model, x):
    def divided():
        return 1 / 0

    def traced():
        with model.trace(x):
            model[0].output.sum()
            divided()

    divided.__code__ = divided.__code__.replace(co_linetable=b"")
    with pytest.raises(ZeroDivisionError):
        traced()


class Circular(nn.Module):
    """Raises, once it is left, an exception that arose from another and that from it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        try:
            return self.layer(x)
        except BaseException:
            first, second = ValueError("one"), ValueError("two")
            first.__cause__, second.__cause__ = second, first
            raise first  # noqa: B904


def test_exceptions_that_arose_from_each_other_are_followed_to_their_end(x):
    model = Envoy(Circular())

    with model.trace(x) as tracer:  # what the model made of being left is no error of it
        total = model.layer.output.sum().save()
        tracer.stop()
    assert torch.equal(total, model.module.layer(x).sum())


@pytest.mark.parametrize("assigns", [True, False])
def test_rows_changed_in_place_after_the_whole_was_put_together_are_not_lost(model, x, assigns):
    def traced():
        with model.trace() as tracer:
            looked = tracer.barrier(3)
            with tracer.invoke(x[:2]):
                mine = model[0].output
                if assigns:
                    model[0].output = mine = mine * 2
                looked()
                mine[:] = 7
            with tracer.invoke(x[2:]):
                model[0].output = torch.zeros(3, 8)
                looked()
            with tracer.invoke():
                model[0].output.sum()
                looked()

    with pytest.raises(ValueError, match="changed its rows in place"):
        traced()


def test_rows_read_again_after_the_whole_was_put_together_can_be_changed(model, x):
    with model.trace() as tracer:
        looked = tracer.barrier(3)
        with tracer.invoke(x[:2]):
            model[0].output.sum()
            looked()
            model[0].output[:] = 7
        with tracer.invoke(x[2:]):
            model[0].output = torch.zeros(3, 8)
            looked()
        with tracer.invoke():
            model[0].output.sum()
            looked()
            model[0].output[:, 1] = 5
            whole = model[0].output.save()
    expected = torch.tensor([[7.0] * 8] * 2 + [[0.0] * 8] * 3)
    expected[2:, 1] = 5  # the block that comes last to the barrier goes on first
    assert torch.equal(whole, expected)


@dataclass
class Out:
    hidden: torch.Tensor
    name: str = "out"


class Pair(tuple):
    """Not made of one iterable."""

    def __new__(cls, first, second):
        return super().__new__(cls, (first, second))


MAKE = {
    "dict": lambda h: {"h": h, "n": 1},
    "defaultdict": lambda h: defaultdict(list, h=h),
    "list": lambda h: [h, 1],
    "deque": lambda h: deque([h]),
    "user list": lambda h: UserList([h]),
    "tuple subclass": lambda h: Pair(h, 1),
    "dataclass": Out,
    "model output": lambda h: BaseModelOutput(last_hidden_state=h),
    "nested": lambda h: ({"a": [h]}, 1),
    "return type": lambda h: torch.max(h, dim=1, keepdim=True),
}
TENSOR = {
    "dict": lambda out: out["h"],
    "defaultdict": lambda out: out["h"],
    "list": lambda out: out[0],
    "deque": lambda out: out[0],
    "user list": lambda out: out[0],
    "tuple subclass": lambda out: out[0],
    "dataclass": lambda out: out.hidden,
    "model output": lambda out: out.last_hidden_state,
    "nested": lambda out: out[0]["a"][0],
    "return type": lambda out: out[0],
}


class Making(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return MAKE[self.kind](x)


class Containing(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer, self.part, self.kind = nn.Linear(4, 8), Making(kind), kind

    def forward(self, x):
        return TENSOR[self.kind](self.part(self.layer(x))).sum(1)


@pytest.mark.parametrize("kind", MAKE)
def test_rows_of_every_container(x, kind):
    net = Containing(kind)
    model = Envoy(net)
    whole = MAKE[kind](net.layer(x))
    with model.trace() as tracer:
        cache = tracer.cache(modules=["part"])
        with tracer.invoke(x[:2]):
            first = model.part.output.save()
        with tracer.invoke(x[2:]):
            TENSOR[kind](model.part.output)[:] = 3
            result = model.output.save()
    assert type(first) is type(whole)
    assert torch.equal(TENSOR[kind](first), TENSOR[kind](whole)[:2])
    assert (result == 3 * TENSOR[kind](whole).shape[1]).all()
    cached = cache["model.part"].output
    assert type(cached) is type(whole)
    assert not TENSOR[kind](cached).requires_grad


def assigned(output, kind):
    new = torch.full((3, 8), 5.0)
    match kind:
        case "dict":
            output["h"] = new
        case "list" | "deque" | "user list":
            output[0] = new
        case "dataclass":
            output.hidden = new
        case "model output":
            output.last_hidden_state = new
        case "nested":
            output[0]["a"][0] = new


@pytest.mark.parametrize(
    "kind", ["dict", "list", "deque", "user list", "dataclass", "model output", "nested"]
)
@pytest.mark.parametrize("looked_at", [False, True])
def test_what_is_put_in_a_container_of_rows_reaches_the_model(x, kind, looked_at):
    net = Containing(kind)
    model = Envoy(net)
    with model.trace() as tracer:
        with tracer.invoke(x[:2]):
            first = model.output.save()
        with tracer.invoke(x[2:]):
            assigned(model.part.output, kind)
            second = model.output.save()
        if looked_at:
            with tracer.invoke():
                whole = TENSOR[kind](model.part.output).sum(1).save()
    assert torch.equal(first, net(x)[:2])
    assert (second == 40).all()
    if looked_at:
        assert torch.equal(whole, torch.cat([first, second]))


def test_a_key_put_in_a_container_of_rows_that_was_not_there_is_refused(x):
    model = Envoy(Containing("dict"))

    def traced():
        with model.trace() as tracer:
            with tracer.invoke(x[:2]):
                model.part.output["more"] = 2
            with tracer.invoke(x[2:]):
                pass

    with pytest.raises(
        ValueError, match=r"the value written is a dict with the keys \['h', 'n'\] in one place"
    ):
        traced()


def test_a_dataclass_with_other_rows_is_refused(x):
    model = Envoy(Containing("dataclass"))

    def traced():
        with model.trace() as tracer:
            with tracer.invoke(x[:2]):
                model.part.output = Out(torch.zeros(3, 8))
            with tracer.invoke(x[2:]):
                pass

    with pytest.raises(ValueError, match="this block has rows 0 to 1 of the batch, so it needs 2"):
        traced()


def test_a_barrier_of_a_trace_that_failed_can_be_used_again(model, x):
    kept = []
    with pytest.raises(ZeroDivisionError), model.trace() as tracer:  # noqa: PT012
        barrier = tracer.barrier(2)
        kept.append(save(barrier))
        with tracer.invoke(x[:2]):
            model[0].output.sum()
            barrier()
        with tracer.invoke(x[2:]):
            model[0].output.sum() / (1 / 0)
    order = []
    with model.trace() as tracer:
        with tracer.invoke(x[:2]):
            kept[0]()
            order.append("first")
        with tracer.invoke(x[2:]):
            order.append("before")
            kept[0]()
            order.append("second")
    assert order == ["before", "second", "first"]


class Collecting(nn.Module):
    """Its parts add what they are given to a list and a dict of the model."""

    class Part(nn.Module):
        def forward(self, x, found, named):
            found.append(x)
            named[len(found)] = x
            return x + 1

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([self.Part(), self.Part()])

    def forward(self, x):
        found, named = [], {}
        for part in self.parts:
            x = part(x, found, named)
        return torch.cat([*found, *named.values()], 1)


def test_containers_among_the_arguments_are_the_models_own(x):
    model = Envoy(Collecting())
    with model.trace() as tracer:
        with tracer.invoke(x[:2]):
            model.parts[0].input = torch.zeros(2, 4)
            first = model.output.save()
        with tracer.invoke(x[2:]):
            second = model.output.save()
    zero, one = torch.zeros(2, 4), torch.ones(2, 4)
    assert torch.equal(first, torch.cat([zero, one, zero, one], 1))
    assert torch.equal(second, torch.cat([x[2:], x[2:] + 1] * 2, 1))


def test_a_tensor_that_all_rows_share_can_be_changed_by_a_block_of_all(x):
    class Sharing(nn.Module):
        def forward(self, x):
            return x * 1, torch.zeros(7)

    net = nn.Sequential(Sharing())
    model = Envoy(net)
    with model.trace() as tracer:
        with tracer.invoke(x[:2]):
            h, shared = model[0].output
            model[0].output = (h * 2, shared)
        with tracer.invoke(x[2:]):
            model[0].output[0].sum()
        with tracer.invoke():
            model[0].output[1].add_(1)
            result = model.output.save()
    assert torch.equal(result[0], torch.cat([x[:2] * 2, x[2:]]))
    assert torch.equal(result[1], torch.ones(7))


def test_packed_sequences_are_seen_whole():
    packed = pack_sequence([torch.ones(2, 4), torch.ones(1, 4)])  # as many steps as sequences

    class Packing(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(4, 3)

        def forward(self, x):
            return self.rnn(packed)[0].data.sum() + x.sum(1)

    model = Envoy(Packing())
    with model.trace() as tracer:
        with tracer.invoke(torch.zeros(1, 4)):
            model.rnn.input = model.rnn.input
            seen = model.rnn.input.save()
        with tracer.invoke(torch.zeros(1, 4)):
            pass
    assert seen is packed
