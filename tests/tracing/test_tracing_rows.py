"""What blocks with rows of their own see and change of one location, in whichever order they come to it."""

# ruff: noqa: SIM117 (an invoke stands in the body of its trace)

import pytest
import torch
from torch import nn

from softs_lightning.tracing import Envoy
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
                model[0].output.save()

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
