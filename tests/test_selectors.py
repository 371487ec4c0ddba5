from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from softs_lightning.product import ProductSpec
from softs_lightning.selectors import (
    UnknownModuleError,
    all_names,
    nearest,
    resolve_module,
    resolve_spec,
    strip_wrappers,
)
from tests.models import MLP, mlp


class Tied(nn.Module):
    """One module under two names, at two depths."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"embed": nn.Linear(4, 4)})
        self.decoder = self.encoder["embed"]

    def forward(self, x: torch.Tensor) -> Any:
        return self.decoder(self.encoder["embed"](x))


class Wrapper(nn.Module):
    """Puts a module where a real wrapper puts it."""

    def __init__(self, inner: nn.Module, attribute: str) -> None:
        super().__init__()
        self.attribute = attribute
        self.add_module(attribute, inner)

    def forward(self, *args: torch.Tensor) -> Any:
        return getattr(self, self.attribute)(*args)


WRAPPERS = ["module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"]


def test_every_name_of_named_modules_is_its_module() -> None:
    model = mlp()
    for name, module in model.named_modules():
        assert resolve_module(model, name).module is module
        assert resolve_module(model, name).path == name


@pytest.mark.parametrize("name", ["", "."])
def test_the_model_itself(name: str) -> None:
    model = mlp()
    assert resolve_module(model, name).module is model


@pytest.mark.parametrize("name", ["encoder.embed", "decoder"])
def test_a_shared_module_answers_to_each_of_its_names(name: str) -> None:
    model = Tied()
    assert resolve_module(model, name).module is model.decoder


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_wrappers_around_the_model_need_not_be_spelled_out(wrapper: str) -> None:
    model = mlp()
    wrapped = Wrapper(Wrapper(model, wrapper), "module")
    for name in ("layers.1", f"{wrapper}.layers.1", f"module.{wrapper}.layers.1"):
        assert resolve_module(wrapped, name).module is model.layers[1]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_written_for_a_wrapped_model_fit_the_bare_one(wrapper: str) -> None:
    model = mlp()
    assert resolve_module(model, f"{wrapper}.layers.1").module is model.layers[1]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_wrapper_inside_the_model(wrapper: str) -> None:
    model = mlp()
    inner = model.layers[1]
    model.layers[1] = Wrapper(inner, wrapper)
    assert resolve_module(model, "layers.1").module is model.layers[1]
    assert resolve_module(model, f"layers.1.{wrapper}").module is inner
    assert resolve_module(Wrapper(model, "module"), "layers.1").module is model.layers[1]


def test_a_module_that_is_called_module_keeps_its_name() -> None:
    model = nn.ModuleDict({"module": nn.Linear(1, 1), "other": nn.Linear(1, 1)})
    assert resolve_module(model, "module").module is model["module"]


def test_two_places_that_differ_only_in_wrappers_are_ambiguous() -> None:
    model: Any = nn.ModuleDict(
        {"a": Wrapper(nn.ModuleDict({"x": nn.Linear(1, 1)}), "module"), "module": nn.Module()}
    )
    model["module"].add_module("a", nn.ModuleDict({"x": nn.Linear(1, 1)}))
    with pytest.raises(UnknownModuleError, match="could mean any of") as error:
        resolve_module(model, "_orig_mod.a.x")
    assert "'a.module.x'" in str(error.value)
    assert "'module.a.x'" in str(error.value)


@pytest.mark.parametrize(
    "name", ["layers.9", "laers.1", "act.weight", "module", "layers.", ".layers", "layers..1"]
)
def test_an_unknown_name_is_a_key_error_that_is_readable(name: str) -> None:
    with pytest.raises(KeyError) as error:
        resolve_module(MLP(), name)
    message = str(error.value)
    assert message.startswith(f"MLP has no module named {name!r}: ")
    assert "Its direct children are 'layers', 'act', 'head'" in message
    assert "shows all 7 names" in message


def test_the_nearest_names_are_offered() -> None:
    with pytest.raises(KeyError, match=r"nearest names are .*'layers\.1'"):
        resolve_module(MLP(), "layer.1")
    with pytest.raises(KeyError, match="no name is near it"):
        resolve_module(MLP(), "qqqqqqqq")
    assert nearest("mlp", ["model.layers.0.mlp", "model.embed"])[0] == "model.layers.0.mlp"
    assert nearest("a", [f"a.{i}" for i in range(20)], count=3) == ["a.0", "a.1", "a.2"]


def test_wrappers_are_stripped_anywhere() -> None:
    assert strip_wrappers("module._orig_mod.a.module.b") == "a.b"
    assert strip_wrappers("modules.a") == "modules.a"


def test_a_module_that_leads_back_to_itself_is_not_looked_for_inside_of_itself() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    net[1].add_module("up", net)
    assert resolve_module(net, "1.0").module is net[1][0]
    assert list(all_names(net)) == [name for name, _ in net.named_modules()]
    assert str(resolve_spec(net, ProductSpec.parse("outputs[@Linear]"))) == "outputs[0|1.0]"
    with pytest.raises(UnknownModuleError, match=r"no module named '1\.up'"):
        resolve_module(net, "1.up")


def test_all_names_are_those_of_torch_where_nothing_leads_back() -> None:
    tied = Tied()
    assert all_names(tied) == dict(tied.named_modules(remove_duplicate=False))
