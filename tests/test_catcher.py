"""The catcher as it is documented: what is selected, what the buffer holds, what run() returns."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softs_lightning.catcher import ModelIOCatcher
from tests.models import MLP, mlp


class Layer(nn.Module):
    """Two children, a keyword and a dict for an answer; it writes down what ran."""

    def __init__(self, log: list[str], name: str) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Linear(4, 4), nn.Linear(4, 4)
        self.log, self.name = log, name

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        self.log.append(f"{self.name}.start")
        x = self.attn(x) * scale
        x = x + self.mlp(x)
        self.log.append(f"{self.name}.end")
        return {"hidden": x}


class Net(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.log: list[str] = []
        self.layers = nn.ModuleList(Layer(self.log, str(i)) for i in range(depth))
        self.head = nn.Linear(4, 2)
        self.unused = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        for layer in self.layers:
            x = layer(x, scale=2.0)["hidden"]
        self.log.append("head")
        return self.head(x)


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


X = torch.arange(8.0).reshape(2, 4) / 8


# -- selecting -------------------------------------------------------------------------------------


def test_the_buffer_has_the_documented_shape(net: Net) -> None:
    catcher = ModelIOCatcher(net)
    with catcher(inputs=["layers.0", "head"], outputs=["layers.0"]) as buf:
        catcher.run(X)
    assert {name: sorted(kinds) for name, kinds in buf.items()} == {
        "layers.0": ["inputs", "outputs"],
        "head": ["inputs"],
    }
    (entry,) = buf["layers.0"]["inputs"]
    assert set(entry) == {"args", "kwargs"}
    assert entry["args"][0] is X
    assert len(entry["args"]) == 1
    assert entry["kwargs"] == {"scale": 2.0}
    (output,) = buf["layers.0"]["outputs"]
    assert torch.equal(output["hidden"], net.layers[0](X, scale=2.0)["hidden"])


@pytest.mark.parametrize("kind", ["inputs", "outputs"])
def test_every_name_of_named_modules_can_be_selected(kind: str) -> None:
    model = mlp()
    for name in dict(model.named_modules()):
        asked: dict[str, Any] = {kind: [name]}
        with ModelIOCatcher(model)(**asked) as buf:
            model(torch.ones(1, 8))
        assert set(buf[name]) == {kind}


def test_the_sides_are_independent_iterables(net: Net) -> None:
    catcher = ModelIOCatcher(net)
    names = (f"layers.{i}" for i in (1, 0))
    with catcher(names, {"head"}) as buf:
        net(X)
    assert list(buf) == ["layers.1", "layers.0", "head"]
    assert list(buf["head"]) == ["outputs"]
    with catcher(outputs=["head"], inputs=()) as buf:
        net(X)
    assert list(buf) == ["head"]


def test_a_name_that_stands_twice_is_captured_once(net: Net) -> None:
    with ModelIOCatcher(net)(outputs=["head", "head"]) as buf:
        net(X)
    assert len(buf["head"]["outputs"]) == 1


def test_inputs_are_taken_before_and_outputs_after_the_whole_subtree(net: Net) -> None:
    order: list[str] = []

    class Noting(list):  # type: ignore[type-arg]
        def __init__(self, name: str) -> None:
            self.name = name

        def append(self, entry: Any) -> None:
            order.append(self.name)

    names = ["layers.0", "layers.0.attn", "layers.0.mlp"]
    with ModelIOCatcher(net)(inputs=names, outputs=names) as buf:
        for name in names:
            for kind in ("inputs", "outputs"):
                buf[name][kind] = Noting(f"{kind} {name}")
        net(X)
    assert order == [
        "inputs layers.0",
        "inputs layers.0.attn",
        "outputs layers.0.attn",
        "inputs layers.0.mlp",
        "outputs layers.0.mlp",
        "outputs layers.0",
    ]


def test_one_entry_a_forward(net: Net) -> None:
    batches = [X, X + 1, X + 2]
    catcher = ModelIOCatcher(net)
    with catcher(inputs=["layers.0"], outputs=["head"]) as buf:
        results = [catcher.run(batch) for batch in batches]
    assert [entry["args"][0] for entry in buf["layers.0"]["inputs"]] == batches
    assert all(map(torch.equal, buf["head"]["outputs"], results))


def test_the_model_itself_is_the_empty_name_or_a_dot(net: Net) -> None:
    catcher = ModelIOCatcher(net)
    for name in ("", "."):
        with catcher(inputs=[name], outputs=[name]) as buf:
            out = net(x=X)
        assert buf[name] is buf["."] is buf[""]
        assert buf[name]["inputs"] == [{"args": (), "kwargs": {"x": X}}]
        assert buf[name]["outputs"][0] is out


def test_device_none_hands_over_the_very_tensors(net: Net) -> None:
    with ModelIOCatcher(net, None)(inputs=["head"], outputs=["layers.2"]) as buf:
        net(X)
    assert buf["head"]["inputs"][0]["args"][0] is buf["layers.2"]["outputs"][0]["hidden"]


@pytest.mark.parametrize("device", ["meta", torch.device("meta")])
def test_inputs_and_outputs_move_to_the_device_and_the_model_does_not(net: Net, device: Any) -> None:
    catcher = ModelIOCatcher(net, device)
    with catcher(inputs=["layers.1"], outputs=["layers.1"]) as buf:
        out = catcher.run(X)
    assert buf["layers.1"]["inputs"][0]["args"][0].device.type == "meta"
    assert buf["layers.1"]["inputs"][0]["kwargs"] == {"scale": 2.0}
    assert buf["layers.1"]["outputs"][0]["hidden"].device.type == "meta"
    assert torch.equal(out, net(X))
    assert {p.device.type for p in net.parameters()} == {"cpu"}


def test_what_a_module_is_called_with_and_returns_may_be_nothing() -> None:
    class Nothing(nn.Module):
        def forward(self) -> None:
            return None

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = Nothing()

        def forward(self, x: Tensor | None = None) -> str:
            self.nothing()
            return "text"

    model = Around()
    catcher = ModelIOCatcher(model, "meta")
    with catcher(inputs=["nothing", "."], outputs=["nothing", "."]) as buf:
        assert catcher.run() == "text"
    assert buf["nothing"] == {"inputs": [{"args": (), "kwargs": {}}], "outputs": [None]}
    assert buf["."] == {"inputs": [{"args": (), "kwargs": {}}], "outputs": ["text"]}
    with catcher.for_product("outputs[nothing]") as buf:
        assert catcher.run() is None
    assert buf.select() == [None]


# -- early exit ------------------------------------------------------------------------------------


def test_a_forward_is_cut_short_when_everything_is_captured(net: Net) -> None:
    catcher = ModelIOCatcher(net)
    with catcher(outputs=["layers.1"], early_exit=True) as buf:
        assert catcher.run(X) is None
    assert net.log == ["0.start", "0.end", "1.start", "1.end"]
    assert len(buf["layers.1"]["outputs"]) == 1


def test_every_batch_of_a_loop_is_cut_short(net: Net) -> None:
    catcher = ModelIOCatcher(net)
    with catcher.for_product("outputs[layers.0]") as buf:
        for i in range(4):
            assert catcher.run(x=X + i) is None
    assert net.log == ["0.start", "0.end"] * 4
    for i, output in enumerate(buf["layers.0"]["outputs"]):
        assert torch.equal(output["hidden"], net.layers[0](X + i, scale=2.0)["hidden"])


@pytest.mark.parametrize(
    ("product", "log"),
    [
        ("outputs[layers.0]", ["0.start", "0.end"]),
        ("inputs[layers.0]", []),
        ("inputs[layers.1]", ["0.start", "0.end"]),
        ("inputs[layers.0]|outputs[layers.0]", ["0.start", "0.end"]),
        ("outputs[layers.0.mlp]", ["0.start"]),
        ("outputs[layers.0.mlp|layers.0]", ["0.start", "0.end"]),
        ("outputs[layers.1|layers.0]", ["0.start", "0.end", "1.start", "1.end"]),
        ("inputs[.]", []),
        ("outputs[.]", ["0.start", "0.end", "1.start", "1.end", "2.start", "2.end", "head"]),
    ],
)
def test_it_stops_right_after_the_last_of_what_is_asked(net: Net, product: str, log: list[str]) -> None:
    catcher = ModelIOCatcher(net)
    with catcher.for_product(product) as buf:
        assert catcher.run(X) is None
    assert net.log == log
    assert {len(entries) for kinds in buf.values() for entries in kinds.values()} == {1}


def test_a_module_that_never_runs_lets_the_forward_complete(net: Net) -> None:
    expected = net(X)
    catcher = ModelIOCatcher(net)
    with catcher.for_product("outputs[layers.0|unused]") as buf:
        assert torch.equal(catcher.run(X), expected)
        assert torch.equal(catcher.run(X), expected)
    assert len(buf["layers.0"]["outputs"]) == 2
    assert buf["unused"]["outputs"] == []


def test_without_early_exit_calling_and_running_are_interchangeable(net: Net) -> None:
    expected = net(X)
    catcher = ModelIOCatcher(net)
    with catcher(outputs=["layers.0"]) as buf:
        assert torch.equal(net(X), expected)
        assert torch.equal(catcher.run(X), expected)
        assert torch.equal(catcher.run(x=X), expected)
    assert len(buf["layers.0"]["outputs"]) == 3
    with catcher.for_product("outputs[layers.0]", early_exit=False):
        assert torch.equal(catcher.run(X), expected)


def test_an_early_exit_must_be_driven_by_run(net: Net) -> None:
    catcher = ModelIOCatcher(net)
    with catcher.for_product("outputs[layers.0]") as buf:
        with pytest.raises(RuntimeError, match=r"must be driven by run\(\)"):
            net(X)
        assert catcher.run(X) is None
    assert len(buf["layers.0"]["outputs"]) == 1


class Repeated(nn.Module):
    """One module, three calls in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.after = nn.Linear(4, 4), nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Any:
        for _ in range(3):
            x = self.shared(x)
            self.calls += 1
        return self.after(x)


@pytest.mark.parametrize(
    ("product", "calls"),
    [("outputs[shared]", 0), ("outputs[shared!0]", 0), ("outputs[shared!2]", 2), ("inputs[shared!1]", 1)],
)
def test_the_first_call_meets_the_budget_unless_another_is_asked_for(product: str, calls: int) -> None:
    model = Repeated()
    catcher = ModelIOCatcher(model)
    with catcher.for_product(product):
        catcher.run(X)
        catcher.run(X)
    assert model.calls == 2 * calls


def test_every_call_is_recorded_until_the_stop() -> None:
    model = Repeated()
    a = model.shared(X)
    b = model.shared(a)
    catcher = ModelIOCatcher(model)
    with catcher(outputs=["shared"]) as buf:
        model(X)
    assert all(map(torch.equal, buf["shared"]["outputs"], [a, b, model.shared(b)]))
    assert len(buf["shared"]["outputs"]) == 3
    with catcher.for_product("outputs[shared|after]") as buf:
        catcher.run(X)
    assert len(buf["shared"]["outputs"]) == 3


# -- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("product", ["", "inputs[]|outputs[]", "outputs[ | ]"])
def test_a_product_that_selects_nothing_is_a_value_error(net: Net, product: str) -> None:
    with pytest.raises(ValueError, match="selects nothing"):
        ModelIOCatcher(net).for_product(product)


def test_calling_for_nothing_is_a_value_error(net: Net) -> None:
    with pytest.raises(ValueError, match="selects nothing"):
        ModelIOCatcher(net)()


def test_an_unknown_module_is_a_key_error_before_anything_runs(net: Net) -> None:
    catcher = ModelIOCatcher(net)
    with pytest.raises(KeyError, match=r"no module named 'layer\.0'.*'layers\.0'"):
        catcher.for_product("outputs[layers.0|layer.0]")
    with pytest.raises(KeyError, match="no module named"):
        catcher(inputs=["layers.7"])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules())


def test_leftover_text_in_a_product_is_pointed_at(net: Net) -> None:
    with pytest.raises(ValueError, match=r"character 1 on:\n    output\[head\]\n    \^"):
        ModelIOCatcher(net).for_product("output[head]")


@pytest.mark.parametrize("names", ["layers.0", b"layers.0"])
def test_a_single_string_is_no_list_of_names(net: Net, names: Any) -> None:
    with pytest.raises(TypeError, match="lists of module names"):
        ModelIOCatcher(net)(outputs=names)
    with pytest.raises(TypeError, match="lists of module names"):
        ModelIOCatcher(net)(inputs=names)


def test_a_module_is_no_name(net: Net) -> None:
    with pytest.raises(TypeError, match="a module is given by its name, got Linear"):
        ModelIOCatcher(net)(outputs=[net.head])  # type: ignore[list-item]


def test_the_constructor_refuses_what_it_cannot_use(net: Net) -> None:
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module, got function"):
        ModelIOCatcher(mlp)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="attach must be 'armed' or 'all', got 'none'"):
        ModelIOCatcher(net, attach="none")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="nope"):
        ModelIOCatcher(net, "nope")
    replicas = nn.DataParallel(net)
    replicas.device_ids = [0, 1]
    with pytest.raises(RuntimeError, match="use DistributedDataParallel"):
        ModelIOCatcher(replicas)


def test_entering_without_arming_says_how_to_arm(net: Net) -> None:
    catcher = ModelIOCatcher(net)
    with pytest.raises(RuntimeError, match="nothing is armed"), catcher:
        pass
    with catcher.for_product("outputs[head]"):
        catcher.run(X)
    # What was armed for one block is not armed for the next.
    with pytest.raises(RuntimeError, match="nothing is armed"), catcher:
        pass


# -- scope -----------------------------------------------------------------------------------------


def test_outside_the_block_nothing_is_captured_and_the_buffer_stays(net: Net) -> None:
    catcher = ModelIOCatcher(net)
    with catcher.for_product("outputs[layers.0]", early_exit=True) as buf:
        catcher.run(X)
    before = buf["layers.0"]["outputs"][0]["hidden"].clone()
    expected = net(X)
    assert torch.equal(catcher.run(X), expected)
    assert len(buf["layers.0"]["outputs"]) == 1
    assert torch.equal(buf["layers.0"]["outputs"][0]["hidden"], before)


def test_two_blocks_have_two_buffers(net: Net) -> None:
    catcher = ModelIOCatcher(net)
    with catcher.for_product("outputs[layers.0]") as first:
        catcher.run(X)
    with catcher.for_product("inputs[layers.0]") as second:
        catcher.run(X)
    assert list(first["layers.0"]) == ["outputs"]
    assert list(second["layers.0"]) == ["inputs"]
    assert len(first["layers.0"]["outputs"]) == len(second["layers.0"]["inputs"]) == 1


def test_for_product_returns_the_catcher(net: Net) -> None:
    catcher = ModelIOCatcher(net)
    assert catcher.for_product("outputs[head]") is catcher
    assert catcher(outputs=["head"]) is catcher


def test_the_model_is_left_as_it_was_but_for_hooks(net: Net) -> None:
    def account() -> list[Any]:
        hooks = {"_forward_hooks", "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"}
        return [{k: id(v) for k, v in vars(m).items() if k not in hooks} for m in net.modules()]

    before, classes = account(), [type(m) for m in net.modules()]
    catcher = ModelIOCatcher(net, attach="all")
    with catcher.for_product("outputs[layers.1]"):
        catcher.run(X)
        assert account() == before
    catcher.detach_hooks()
    assert account() == before
    assert [type(m) for m in net.modules()] == classes


def test_importing_the_catcher_patches_nothing_and_pulls_in_nothing_heavy() -> None:
    code = """
import sys, threading
import torch, torch.nn as nn
watched = [nn.Module, torch.Tensor, nn.Linear, nn.Sequential, torch.nn.modules.module, torch, object]
before = [{k: id(v) for k, v in vars(w).items()} for w in watched]
loaded, threads = set(sys.modules), threading.active_count()
import softs_lightning.catcher
assert [{k: id(v) for k, v in vars(w).items()} for w in watched] == before
assert threading.active_count() == threads
new = {n.split(".")[0] for n in set(sys.modules) - loaded}
bad = {"lightning", "pytorch_lightning", "transformers", "hydra", "omegaconf", "torchmetrics", "numpy.testing"} & new
assert not bad, bad
assert "torch._dynamo" not in sys.modules
net = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
catcher = softs_lightning.catcher.ModelIOCatcher(net, torch.device("cpu"))
with catcher.for_product("outputs[0]") as buf:
    assert catcher.run(torch.ones(1, 2)) is None
assert len(buf["0"]["outputs"]) == 1
assert "torch._dynamo" not in sys.modules
assert "lightning" not in sys.modules and "transformers" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


def test_mlp_by_the_example_of_the_documentation() -> None:
    model = MLP()
    loader = [{"x": torch.randn(2, 8)} for _ in range(3)]
    catcher = ModelIOCatcher(model, torch.device("cpu"))
    with catcher(inputs=["layers.0"], outputs=["layers.0"]) as buf:
        for batch in loader:
            catcher.run(**batch)
    assert len(buf["layers.0"]["outputs"]) == 3
    assert buf["layers.0"]["inputs"][0]["args"][0].shape == (2, 8)
    with catcher.for_product("outputs[layers.1]", early_exit=True) as buf:
        assert [catcher.run(**batch) for batch in loader] == [None] * 3
    assert len(buf["layers.1"]["outputs"]) == 3
