"""Where hooks stand, what a module may be called, and what may happen to the model meanwhile."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from softs_lightning.catcher import Capture, ModelIOCatcher, OverwrittenWarning
from tests.models import CASES, MLP, mlp, resnet
from tests.test_selectors import WRAPPERS, Tied, Wrapper

X = torch.linspace(-1, 1, 16).reshape(2, 8)


@pytest.fixture
def model() -> Any:
    return mlp()


def hooks(model: nn.Module) -> dict[str, tuple[int, int]]:
    """How many hooks stand before and after each module that has any."""
    found = {n: (len(m._forward_pre_hooks), len(m._forward_hooks)) for n, m in model.named_modules()}
    return {name: count for name, count in found.items() if any(count)}


# -- where hooks stand -----------------------------------------------------------------------------


def test_hooks_stand_only_where_a_session_asked(model: Any) -> None:
    catcher = ModelIOCatcher(model)
    assert hooks(model) == {}
    armed = catcher.for_product("inputs[head]|outputs[layers.1]")
    assert hooks(model) == {}
    with armed:
        assert hooks(model) == {"head": (1, 0), "layers.1": (0, 1)}
    # They stay, and a session that asks again adds none.
    with catcher.for_product("inputs[head]|outputs[layers.1|head]"):
        pass
    assert hooks(model) == {"head": (1, 1), "layers.1": (0, 1)}


def test_all_puts_both_hooks_on_every_submodule(model: Any) -> None:
    catcher = ModelIOCatcher(model, attach="all")
    everywhere = {name: (1, 1) for name, _ in model.named_modules()}
    assert hooks(model) == everywhere
    with catcher.for_product("inputs[head]|outputs[layers.1]") as buf:
        catcher.run(X)
    catcher.attach_hooks()
    assert hooks(model) == everywhere
    assert len(buf["layers.1"]["outputs"]) == 1


@pytest.mark.parametrize("attach", ["armed", "all"])
def test_detaching_leaves_no_hook_and_keeps_others(model: Any, attach: Any) -> None:
    own = model.layers[0].register_forward_hook(lambda *_: None)
    catcher = ModelIOCatcher(model, attach=attach)
    with catcher.for_product("inputs[.]|outputs[layers.0]", early_exit=False):
        model(X)
    catcher.detach_hooks()
    catcher.detach_hooks()
    assert hooks(model) == {"layers.0": (0, 1)}
    own.remove()
    assert hooks(model) == {}


@pytest.mark.parametrize("attach", ["armed", "all"])
def test_after_detaching_a_session_asks_for_attach_hooks(model: Any, attach: Any) -> None:
    catcher = ModelIOCatcher(model, attach=attach)
    catcher.detach_hooks()
    with (
        pytest.raises(RuntimeError, match=r"call attach_hooks\(\) first"),
        catcher.for_product("outputs[head]"),
    ):
        pass
    catcher.attach_hooks()
    catcher.attach_hooks()
    assert len(hooks(model)) == (0 if attach == "armed" else len(list(model.modules())))
    with catcher.for_product("outputs[head]") as buf:
        catcher.run(X)
    assert len(buf["head"]["outputs"]) == 1


def test_detaching_under_an_open_session_is_refused(model: Any) -> None:
    catcher = ModelIOCatcher(model)
    with catcher.for_product("outputs[head]") as buf:
        with pytest.raises(RuntimeError, match="a session is open"):
            catcher.detach_hooks()
        catcher.run(X)
    assert len(buf["head"]["outputs"]) == 1


# -- names -----------------------------------------------------------------------------------------


def test_a_shared_module_is_captured_under_the_name_that_was_asked() -> None:
    model, x = Tied(), torch.ones(1, 4)
    first = model.decoder(x)
    catcher = ModelIOCatcher(model)
    with catcher(inputs=["decoder"], outputs=["encoder.embed", "decoder"]) as buf:
        model(x)
    assert list(buf) == ["decoder", "encoder.embed"]
    for name in buf:
        assert all(map(torch.equal, buf[name]["outputs"], [first, model.decoder(first)]))
        assert len(buf[name]["outputs"]) == 2
    assert len(buf["decoder"]["inputs"]) == 2
    assert hooks(model) == {"encoder.embed": (1, 1)}


@pytest.mark.parametrize("product", ["outputs[decoder]", "outputs[encoder.embed|decoder]"])
def test_the_first_call_of_a_shared_module_meets_the_budget(product: str) -> None:
    model = Tied()
    catcher = ModelIOCatcher(model)
    with catcher.for_product(product) as buf:
        assert catcher.run(torch.ones(1, 4)) is None
    assert {len(kinds["outputs"]) for kinds in buf.values()} == {1}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_names_reach_through_wrappers_and_stay_as_written(model: Any, wrapper: str) -> None:
    wrapped = Wrapper(Wrapper(model, wrapper), "module")
    names = ["layers.1", f"module.{wrapper}.layers.1", f"{wrapper}.layers.1"]
    catcher = ModelIOCatcher(wrapped)
    with catcher(outputs=names) as buf:
        wrapped(X)
    assert list(buf) == names
    assert all(buf[name]["outputs"][0] is buf["layers.1"]["outputs"][0] for name in names)
    bare = ModelIOCatcher(model)
    with bare(outputs=names) as buf:
        model(X)
    assert [len(buf[name]["outputs"]) for name in names] == [1, 1, 1]


@pytest.fixture
def one_process(tmp_path: Any) -> Any:
    from torch import distributed

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_a_distributed_wrapper_is_transparent(model: Any) -> None:
    wrapped = nn.parallel.DistributedDataParallel(model)
    catcher = ModelIOCatcher(wrapped)
    with catcher.for_product("outputs[layers.1]") as buf:
        assert catcher.run(X) is None
    with catcher(outputs=["module.layers.1"]) as full:
        out = catcher.run(X)
    out.sum().backward()
    assert torch.equal(buf.select()[0], full.select()[0])
    assert torch.equal(buf.select()[0], model.layers[1](torch.tanh(model.layers[0](X))))
    assert model.head.weight.grad is not None


@pytest.mark.usefixtures("one_process")
def test_sharded_layers_are_stopped_and_run_again(model: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    whole = model(X)
    expected = [model.layers[0](X), model.layers[1](torch.tanh(model.layers[0](X)))]
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    catcher = ModelIOCatcher(model)
    for k in (1, 0, 1):
        with torch.no_grad(), catcher.for_product(f"outputs[layers.{k}]") as buf:
            assert catcher.run(X) is None
        assert torch.equal(buf.select()[0], expected[k])
    out = model(X)
    assert torch.equal(out, whole)
    out.sum().backward()
    assert model.layers[0].weight.grad is not None


def test_a_name_with_the_grammars_own_characters() -> None:
    model = nn.Sequential()
    model.add_module("a#0", nn.Linear(8, 8))
    model.add_module("b!1", nn.Linear(8, 8))
    catcher = ModelIOCatcher(model)
    with catcher.for_product("outputs[a#0|b!1]", early_exit=False) as buf:
        out = model(X)
    assert list(buf) == ["a#0", "b!1"]
    assert buf["b!1"]["outputs"][0] is out


# -- a model that changes --------------------------------------------------------------------------


def test_a_layer_that_was_replaced_is_found_again(model: Any) -> None:
    catcher = ModelIOCatcher(model)
    for _ in range(2):
        model.layers[1] = nn.Linear(8, 8)
        expected = model.layers[1](torch.tanh(model.layers[0](X)))
        with catcher.for_product("outputs[layers.1]") as buf:
            assert catcher.run(X) is None
        assert torch.equal(buf.select()[0], expected)


def test_a_layer_that_is_gone_is_a_key_error(model: Any) -> None:
    catcher = ModelIOCatcher(model)
    with catcher.for_product("outputs[layers.3]"):
        catcher.run(X)
    del model.layers[3]
    with pytest.raises(KeyError, match=r"no module named 'layers\.3'"):
        catcher.for_product("outputs[layers.3]")


@pytest.mark.parametrize("attach", ["armed", "all"])
@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        lambda m: pickle.loads(pickle.dumps(m)),
        lambda m: torch.load(_saved(m), weights_only=False),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_of_a_hooked_model_is_its_own(model: Any, attach: Any, duplicate: Callable[..., Any]) -> None:
    catcher = ModelIOCatcher(model, attach=attach)
    with catcher(outputs=["layers.0"]) as buf:
        model(X)
        copied = duplicate(model)
        assert torch.equal(copied(X + 1), model(X + 1))
    assert len(buf["layers.0"]["outputs"]) == 2
    with torch.no_grad():
        copied.layers[0].weight.zero_()
    again = ModelIOCatcher(copied)
    with again(outputs=["layers.0"]) as theirs, catcher(outputs=["layers.0"]) as ours:
        copied(X)
    assert [len(b["layers.0"]["outputs"]) for b in (theirs, ours)] == [1, 0]


def _saved(model: nn.Module) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("attach", ["armed", "all"])
@pytest.mark.parametrize("inside", [True, False], ids=["in a session", "idle"])
def test_a_copy_of_a_catcher_watches_its_own_copy_of_the_model(model: Any, attach: Any, inside: bool) -> None:
    class Owner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = model
            self.catcher = ModelIOCatcher(self, attach=attach, copy=True)

        def forward(self, x: Tensor) -> Any:
            return self.net(x)

    owner = Owner()
    with owner.catcher(outputs=["net.layers.0"]) as buf:
        owner(X)
        twin = copy.deepcopy(owner) if inside else None
    twin = twin or copy.deepcopy(owner)
    assert twin.catcher.model is twin
    with twin.catcher.for_product("outputs[net.layers.0]") as theirs:
        assert twin.catcher.run(X) is None
        owner(X)
    assert len(theirs["net.layers.0"]["outputs"]) == len(buf["net.layers.0"]["outputs"]) == 1
    assert torch.equal(theirs.select()[0], buf.select()[0])


# -- in-place writes -------------------------------------------------------------------------------


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.relu, self.last = nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.relu(self.linear(x)))


@pytest.mark.parametrize("device", [None, "cpu"])
@pytest.mark.parametrize("drive", ["run", "call"])
def test_a_later_write_into_what_was_captured_is_reported(drive: str, device: Any) -> None:
    model = InPlace()
    catcher = ModelIOCatcher(model, device)

    def forward() -> Capture:
        with catcher(inputs=["last"], outputs=["linear"]) as buf:
            (catcher.run if drive == "run" else model)(X)
        return buf

    with pytest.warns(
        OverwrittenWarning, match=r"^outputs\[linear\] changed after capture.*copy=True"
    ) as caught:
        buf = forward()
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert (buf["linear"]["outputs"][0] >= 0).all()


def test_run_reports_the_write_at_once() -> None:
    catcher = ModelIOCatcher(InPlace())
    with catcher(outputs=["linear"]):
        for _ in range(2):
            with pytest.warns(OverwrittenWarning, match=r"outputs\[linear\]") as caught:
                catcher.run(X)
            assert len(caught) == 1
            assert caught[0].filename == __file__


def test_what_was_moved_is_out_of_reach_of_a_later_write() -> None:
    model = InPlace()
    with ModelIOCatcher(model, "meta")(outputs=["linear"]):  # warnings are errors here
        model(X)


@pytest.mark.parametrize("device", [None, "cpu"])
def test_a_copy_keeps_the_value_at_capture_and_its_gradient(device: Any) -> None:
    model = InPlace()
    expected = model.linear(X)
    catcher = ModelIOCatcher(model, device, copy=True)
    with catcher(inputs=["relu"], outputs=["linear"]) as buf:
        out = model(X)
    assert torch.equal(buf["linear"]["outputs"][0], expected)
    assert torch.equal(buf["relu"]["inputs"][0]["args"][0], expected)
    assert (expected < 0).any()
    (buf["linear"]["outputs"][0].square().sum() + out.sum()).backward()
    assert model.linear.weight.grad is not None
    assert torch.equal(out, model(X))


def test_the_stop_comes_before_the_write() -> None:
    model = InPlace()
    expected = model.linear(X)
    catcher = ModelIOCatcher(model)
    with catcher.for_product("outputs[linear]") as buf:
        catcher.run(X)
    assert torch.equal(buf.select()[0], expected)


def test_a_write_of_a_later_forward_is_reported_at_the_end_of_the_block() -> None:
    class Cached(nn.Module):
        cache: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()
            self.register_buffer("cache", torch.zeros(2, 8))

        def forward(self, x: Tensor) -> Any:
            self.cache.copy_(x)
            return self.inner(self.cache).sum()

    model = Cached()
    catcher = ModelIOCatcher(model)

    def two_forwards() -> None:
        with catcher(outputs=["inner"]):
            catcher.run(X)
            catcher.run(X + 1)

    with pytest.warns(OverwrittenWarning, match=r"outputs\[inner\] changed") as caught:
        two_forwards()
    assert len(caught) == 1


def test_a_warning_made_an_error_leaves_nothing_armed() -> None:
    model = InPlace()
    catcher = ModelIOCatcher(model)

    def forward() -> None:
        with catcher(outputs=["linear"]):
            model(X)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(OverwrittenWarning):
            forward()
    with catcher(outputs=["last"]) as buf:
        out = model(X)
    assert list(buf) == ["last"]
    assert buf["last"]["outputs"][0] is out


def test_an_error_in_the_block_is_not_hidden_by_the_warning() -> None:
    model = InPlace()
    catcher = ModelIOCatcher(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ZeroDivisionError), catcher(outputs=["linear"]):
            _ = model(X), 1 / 0


def test_residual_networks_are_captured_truly_with_copies() -> None:
    case, model = CASES["resnet"], resnet()
    names = [name for name, _ in model.named_modules() if name]
    expected: dict[str, list[Tensor]] = {}
    handles = [
        module.register_forward_hook(
            lambda m, a, out, name=name: expected.setdefault(name, []).append(out.clone())
        )
        for name, module in model.named_modules()
        if name
    ]
    model(**case.batch())
    for handle in handles:
        handle.remove()
    with ModelIOCatcher(model, copy=True)(outputs=names) as buf:
        model(**case.batch())
    for name in names:
        assert all(map(torch.equal, buf[name]["outputs"], expected[name]))
        assert len(buf[name]["outputs"]) == len(expected[name]) > 0


def test_inference_tensors_have_no_version_and_are_captured() -> None:
    model = InPlace()
    with torch.inference_mode(), ModelIOCatcher(model)(outputs=["linear"]) as buf:
        model(X)
    assert buf["linear"]["outputs"][0].is_inference()


# -- activation checkpointing ----------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_in_backward_adds_no_entry(use_reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.calls = 0
            self.a.register_forward_hook(self._count)

        def _count(self, *_: Any) -> None:
            self.calls += 1

        def forward(self, x: Tensor) -> Any:
            return checkpoint(lambda y: self.b(torch.tanh(self.a(y))), x, use_reentrant=use_reentrant)

    model = Checkpointed()
    expected = model.a(X)
    model.calls = 0
    catcher = ModelIOCatcher(model)
    with catcher(inputs=["a"], outputs=["a", "b", "."]) as buf:
        catcher.run(X.clone().requires_grad_()).sum().backward()
    assert model.calls == 2  # the recomputation did happen
    assert {len(entries) for kinds in buf.values() for entries in kinds.values()} == {1}
    assert torch.equal(buf["a"]["outputs"][0], expected)
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_transformers_checkpointing_adds_no_entry(use_reentrant: bool) -> None:
    from transformers.modeling_layers import GradientCheckpointingLayer

    case = CASES["llama"]
    model = case.build().train()
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.gradient_checkpointing = True
            recompute: Any = partial(checkpoint, use_reentrant=use_reentrant)
            module._gradient_checkpointing_func = recompute
    model.enable_input_require_grads()
    names = ["layers.1", "layers.1.self_attn", "layers.1.mlp", "layers.1.mlp.down_proj"]
    with ModelIOCatcher(model)(inputs=names, outputs=names) as buf:
        model(**case.batch(), use_cache=False).last_hidden_state.sum().backward()
    assert {len(entries) for kinds in buf.values() for entries in kinds.values()} == {1}
    assert model.embed_tokens.weight.grad is not None


def test_a_backward_within_the_session_adds_nothing(model: Any) -> None:
    with ModelIOCatcher(model)(outputs=["layers.0"]) as buf:
        model(X).sum().backward()
        model(X).sum().backward()
    assert len(buf["layers.0"]["outputs"]) == 2


# -- torch.compile ---------------------------------------------------------------------------------


# Where a graph breaks, torch itself looks at the .grad of tensors that are no leaves, and warns.
TORCH_WARNS = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")


class Flat(nn.Module):
    """No loop: compiled code cannot resume inside one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


@pytest.fixture
def frames() -> Any:
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    yield CompileCounter()
    torch._dynamo.reset()


def compiled(model: Any, style: str, attach: Any, backend: Any) -> tuple[Any, ModelIOCatcher]:
    if style == "wrapped":
        model = torch.compile(model, backend=backend)
    elif style == "in place":
        model.compile(backend=backend)
    return model, ModelIOCatcher(model, attach=attach)


@TORCH_WARNS
@pytest.mark.parametrize("attach", ["armed", "all"])
@pytest.mark.parametrize("style", ["wrapped", "in place"])
def test_a_catcher_made_before_the_first_compiled_call_captures(style: str, attach: Any, frames: Any) -> None:
    plain = Flat()
    expected = plain.b(torch.tanh(plain.a(X)))
    whole = plain(X)
    model, catcher = compiled(plain, style, attach, frames)
    assert torch.equal(model(X), whole)
    assert frames.frame_count == 1
    for i in range(12):
        with catcher.for_product("outputs[b]", early_exit=i % 2 == 0) as buf:
            out = catcher.run(X)
        assert torch.equal(buf.select()[0], expected)
        assert out is None if i % 2 == 0 else torch.equal(out, whole)
        if i == 1:
            after_two = frames.frame_count
    assert torch.equal(model(X), whole)
    # Neither sessions nor growing buffers compile anything again.
    assert frames.frame_count == after_two
    with catcher(outputs=["b"]) as buf:
        for _ in range(12):
            model(X)
    assert len(buf["b"]["outputs"]) == 12
    assert frames.frame_count == after_two


@TORCH_WARNS
def test_a_catcher_that_is_older_than_the_compilation_captures(frames: Any) -> None:
    model = Flat()
    first = model.a(X)
    second = model.b(torch.tanh(first))
    catcher = ModelIOCatcher(model)
    model.compile(backend=frames)
    # Its first session hooks every module, so what a later one asks for is there.
    for name, expected in (("a", first), ("b", second)):
        with catcher.for_product(f"outputs[{name}]") as buf:
            assert catcher.run(X) is None
        assert torch.equal(buf.select()[0], expected)
        assert len(hooks(model)) == 4


@TORCH_WARNS
def test_a_model_that_is_compiled_from_outside_needs_its_hooks_before(frames: Any) -> None:
    model = Flat()
    first = model.a(X)
    second = model.b(torch.tanh(first))
    catcher = ModelIOCatcher(model, attach="all")
    outside = torch.compile(model, backend=frames)
    outside(X)
    for name, expected in (("a", first), ("b", second)):
        with catcher(outputs=[name]) as buf:
            outside(X)
        assert torch.equal(buf.select()[0], expected)


@TORCH_WARNS
def test_regions_that_are_compiled_each(frames: Any) -> None:
    model = mlp()
    expected = [model.layers[0](X), model.layers[1](torch.tanh(model.layers[0](X)))]
    for layer in model.layers:
        layer.compile(backend=frames)
    catcher = ModelIOCatcher(model)
    model(X)
    with catcher.for_product("outputs[layers.0|layers.1]") as buf:
        assert catcher.run(X) is None
    assert all(map(torch.equal, buf.select(), expected))


@TORCH_WARNS
def test_a_hook_added_after_the_first_compiled_call_is_reported(frames: Any) -> None:
    model: Any = torch.compile(Flat(), backend=frames)
    model(X)
    catcher = ModelIOCatcher(model)
    for early_exit in (True, False):
        with (
            catcher.for_product("outputs[b]", early_exit=early_exit) as buf,
            pytest.raises(RuntimeError, match=r"outputs\[b\] never fired in a compiled model"),
        ):
            catcher.run(X)
        with pytest.raises(LookupError, match="compiled code that is older than its hook"):
            buf.select()
    torch.compiler.reset()
    with catcher.for_product("outputs[b]") as buf:
        assert catcher.run(X) is None
    assert len(buf["b"]["outputs"]) == 1


@TORCH_WARNS
def test_one_graph_for_all_refuses_capture_and_says_so(frames: Any) -> None:
    plain = Flat()
    model: Any = torch.compile(plain, backend=frames, fullgraph=True)
    catcher = ModelIOCatcher(model)
    whole = model(X)
    with (
        pytest.raises(torch._dynamo.exc.Unsupported, match="which fullgraph=True rules out"),
        catcher(outputs=["b"]),
    ):
        model(X)
    assert torch.equal(model(X), whole)
    with ModelIOCatcher(plain).for_product("outputs[b]", early_exit=False) as buf:
        plain(X)
    assert len(buf["b"]["outputs"]) == 1


@TORCH_WARNS
def test_what_is_captured_in_a_compiled_model_carries_the_gradient(frames: Any) -> None:
    model, catcher = compiled(Flat(), "wrapped", "armed", "aot_eager")
    model(X)
    with catcher(outputs=["b"]) as buf:
        model(X)
    buf.select()[0].square().sum().backward()
    assert model._orig_mod.a.weight.grad is not None
    assert model._orig_mod.c.weight.grad is None


@TORCH_WARNS
def test_the_root_of_a_compiled_model_is_captured(frames: Any) -> None:
    model, catcher = compiled(Flat(), "wrapped", "armed", frames)
    whole = model(X)
    with catcher(inputs=["."], outputs=["."]) as buf:
        model(X)
    assert buf["."]["inputs"][0]["args"][0] is X
    assert torch.equal(buf["."]["outputs"][0], whole)


# -- other ways to call a model --------------------------------------------------------------------


def test_weights_that_are_passed_in(model: Any) -> None:
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    with ModelIOCatcher(model)(outputs=["layers.0"]) as buf:
        torch.func.functional_call(model, zeros, (X,))
    assert buf["layers.0"]["outputs"][0].abs().sum() == 0


def test_a_model_on_the_meta_device() -> None:
    with torch.device("meta"):
        model = MLP()
    catcher = ModelIOCatcher(model)
    with catcher.for_product("outputs[layers.1]") as buf:
        assert catcher.run(torch.empty(5, 8, device="meta")) is None
    assert buf.select()[0].shape == (5, 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_capture_on_the_gpu_can_be_read_on_the_cpu_at_once() -> None:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6))).cuda()
    x = torch.randn(2048, 2048, device="cuda")
    catcher = ModelIOCatcher(model, "cpu")
    with torch.no_grad(), catcher.for_product("outputs[4]") as buf:
        catcher.run(x)
        at_once = buf.select()[0].clone()
        expected = model[:5](x).cpu()
    assert torch.equal(at_once, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_recomputation_on_the_gpu_adds_no_entry(use_reentrant: bool) -> None:
    layer = nn.Linear(8, 8)
    model = nn.Sequential(layer).cuda()
    with ModelIOCatcher(model)(outputs=["0"]) as buf:
        checkpoint(model, X.cuda().requires_grad_(), use_reentrant=use_reentrant).sum().backward()
    assert len(buf["0"]["outputs"]) == 1


def test_the_hooks_of_a_catcher_that_is_gone_go_with_it() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    for _ in range(3):
        catcher = ModelIOCatcher(model)
        with catcher(outputs=["0"]):
            model(torch.ones(1, 2))
        assert len(model[0]._forward_hooks) == 1
        del catcher
        gc.collect()
        assert not model[0]._forward_hooks
