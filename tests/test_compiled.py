"""The compiled prefix against the model run eagerly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softs_lightning.catcher import ModelIOCatcher
from softs_lightning.compiled import CompiledPrefix
from softs_lightning.product import ProductSpec
from softs_lightning.teacher import Teacher
from softs_lightning.transfer import iter_tensors
from tests.models import CASES

BATCHES: dict[str, dict[str, Any]] = {"mlp": {"width": 16}, "resnet": {}, "bert": {}, "llama": {}}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("name", list(BATCHES))
def test_the_prefix_captures_what_a_session_captures(name: str) -> None:
    case = CASES[name]
    model = case.build(16, 4).requires_grad_(False)
    batch = case.batch(**BATCHES[name])
    first, second, last = (case.layer.format(i) for i in (0, 1, 3))
    spec = ProductSpec.parse(f"inputs[{second}]|outputs[{first}|{second}]")
    catcher = ModelIOCatcher(model)
    with torch.no_grad(), catcher.for_product(spec) as expected:
        catcher.run(**batch)
    catcher.detach_hooks()
    for parameter in model.get_submodule(last).parameters():
        parameter.fill_(torch.nan)  # it does not run
    prefix = CompiledPrefix(model, spec, backend="aot_eager")
    for _ in range(2):
        with torch.no_grad():
            found = prefix(**batch)
        assert found.stopped_at == second
        ours, theirs = list(iter_tensors(dict(found))), list(iter_tensors(dict(expected)))
        assert len(ours) == len(theirs)
        for mine, its in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, its)
    assert prefix.compilations == 1
    prefix.close()
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def net(width: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, 2), nn.ReLU()).requires_grad_(False)


def test_two_prefixes_of_one_model_and_of_like_models_do_not_mix() -> None:
    first, second = net(), net()
    x = torch.ones(4, 2)
    one = CompiledPrefix(first, ProductSpec.parse("outputs[0]"), backend="eager")
    other = CompiledPrefix(first, ProductSpec.parse("outputs[2]"), backend="eager")
    third = CompiledPrefix(second, ProductSpec.parse("outputs[1]"), backend="eager")
    for _ in range(2):
        assert torch.equal(one(x).select()[0], first[0](x))
        assert torch.equal(other(x).select()[0], first[:3](x))
        assert torch.equal(third(x).select()[0], second[:2](x))
    assert torch.equal(first(x), second(x))  # called by themselves, they run whole


def test_calls_are_counted_and_the_model_may_end_without_the_product() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.never = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(self.b(self.a(x)))

    model = Twice().requires_grad_(False)
    x = torch.ones(1, 2)
    first = CompiledPrefix(model, ProductSpec.parse("outputs[a]"), backend="eager")(x)
    assert len(first["a"]["outputs"]) == 1
    second = CompiledPrefix(model, ProductSpec.parse("outputs[a!1]"), backend="eager")(x)
    assert torch.equal(second.select()[0], model(x))
    never = CompiledPrefix(model, ProductSpec.parse("outputs[never]"), backend="eager")(x)
    assert never.stopped_at is None
    with pytest.raises(LookupError, match="'never' never ran"):
        never.select()


def test_recompilations_are_bounded() -> None:
    prefix = CompiledPrefix(net(), ProductSpec.parse("outputs[0]"), backend="eager")
    for rows in (2, 3, 4, 5, 6):
        prefix(torch.ones(rows, 2))
    assert prefix.compilations == 2  # the second has dynamic shapes
    with (
        torch._dynamo.config.patch(recompile_limit=1),
        pytest.raises(RuntimeError, match="was compiled 2 times, for ever other shapes"),
    ):
        prefix(torch.ones(2, 2, 2))


def test_models_that_are_compiled_already_are_refused() -> None:
    with pytest.raises(ValueError, match="is compiled already"):
        CompiledPrefix(torch.compile(net(), backend="eager"), ProductSpec.parse("outputs[0]"))  # type: ignore[arg-type]
    with pytest.raises(KeyError, match="no module named '9'"):
        CompiledPrefix(net(), ProductSpec.parse("outputs[9]"))


def test_a_backend_that_torch_lacks_is_refused_before_a_teacher_is_built() -> None:
    built = []

    def make() -> nn.Module:
        built.append(nn.Linear(1, 1))
        return built[0]

    teacher = Teacher(make, compile="egaer")
    with pytest.raises(ValueError, match=r"no backend 'egaer'\. Did you mean eager\?"):
        teacher.place("cpu")
    assert not built
