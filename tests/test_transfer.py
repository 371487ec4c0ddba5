"""Containers keep their type. ``meta`` stands for the other device: it needs no hardware."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils.generic import ModelOutput

from softs_lightning import catcher
from softs_lightning.transfer import iter_tensors, map_tensors, transfer_to_device

Point = namedtuple("Point", "x y")


class Typed(NamedTuple):
    hidden: Tensor
    mask: Tensor | None = None


class Shaped(tuple[Any, ...]):
    """A tuple whose class is not made from its elements, and that carries an attribute."""

    extra: Tensor

    def __new__(cls, first: Any, second: Any) -> Shaped:
        new = super().__new__(cls, (first, second))
        new.extra = first
        return new


@dataclass
class Plain:
    hidden: Tensor
    inner: list[Any] = field(default_factory=list)
    made: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.made = self.hidden + 1


@dataclass(frozen=True)
class Frozen:
    hidden: Tensor
    name: str = "n"


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    hidden: Tensor
    name: str = "n"


@dataclass(slots=True)
class Slots:
    hidden: Tensor
    unset: Any = field(init=False)


@dataclass
class Guarded:
    """Its __init__ takes what it does not keep."""

    hidden: Tensor
    token: dataclasses.InitVar[int]

    def __post_init__(self, token: int) -> None:
        assert token == 7


@dataclass
class Output(ModelOutput):
    last_hidden_state: Tensor | None = None
    pair: tuple[Tensor, ...] | None = None


class InPlace:
    """Moves itself, and what it holds, in place, as graph batches do."""

    def __init__(self, hidden: Tensor) -> None:
        self.store = {"hidden": hidden}
        self.rows = [hidden]

    def to(self, device: torch.device) -> InPlace:
        self.store["hidden"] = self.store["hidden"].to(device)
        self.rows[0] = self.rows[0].to(device)
        return self


class Silent(InPlace):
    def to(self, device: torch.device) -> None:  # type: ignore[override]
        super().to(device)


class Functional:
    __slots__ = ("hidden",)

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden

    def to(self, device: torch.device) -> Functional:
        return Functional(self.hidden.to(device))


def t(*size: int) -> Tensor:
    return torch.arange(float(max(1, torch.Size(size).numel()))).reshape(size)


CONTAINERS: dict[str, Callable[[], Any]] = {
    "tensor": lambda: t(2),
    "parameter": lambda: nn.Parameter(t(2)),
    "tuple": lambda: (t(2), 1, None),
    "empty tuple": lambda: (),
    "named tuple": lambda: Point(t(2), "y"),
    "typed named tuple": lambda: Typed(t(2)),
    "own tuple": lambda: Shaped(t(2), 5),
    "torch return type": lambda: torch.max(t(2, 3), 1),
    "list": lambda: [t(2), [t(1)], "s"],
    "own list": lambda: UserList([t(2), 1]),
    "deque": lambda: deque([t(2), t(1)], maxlen=2),
    "dict": lambda: {"a": t(2), 3: (t(1),)},
    "ordered dict": lambda: OrderedDict(b=t(1), a=t(2)),
    "default dict": lambda: defaultdict(list, a=[t(2)]),
    "own dict": lambda: UserDict(a=t(2)),
    "read-only mapping": lambda: MappingProxyType({"a": t(2)}),
    "set": lambda: {t(2)},
    "frozen set": lambda: frozenset([t(2), 1]),
    "dataclass": lambda: Plain(t(2), [t(1), {"k": t(3)}]),
    "frozen dataclass": lambda: Frozen(t(2)),
    "frozen dataclass with slots": lambda: FrozenSlots(t(2)),
    "dataclass with an unset slot": lambda: Slots(t(2)),
    "dataclass with a strict __init__": lambda: Guarded(t(2), 7),
    "ModelOutput": lambda: Output(last_hidden_state=t(2), pair=(t(1), t(3))),
    "transformers' own": lambda: BaseModelOutput(last_hidden_state=t(2), attentions=(t(1),)),
    "BatchEncoding": lambda: BatchEncoding({"input_ids": t(2), "more": [t(1)]}),
    "object with .to in place": lambda: InPlace(t(2)),
    "object with .to and slots": lambda: Functional(t(2)),
    "all of it": lambda: {"a": (Point([t(2)], Frozen(t(1))), Output(last_hidden_state=t(3)))},
}
OPAQUE = (InPlace, Functional)


def held(obj: Any) -> list[Tensor]:
    """Every tensor in a container, found without the code under test."""
    if isinstance(obj, Tensor):
        return [obj]
    if isinstance(obj, Mapping):
        return [x for v in obj.values() for x in held(v)]
    if isinstance(obj, (str, bytes)) or obj is None:
        return []
    found = [x for v in obj for x in held(v)] if hasattr(obj, "__iter__") else []
    slots = {n: getattr(obj, n) for n in getattr(obj, "__slots__", ()) if hasattr(obj, n)}
    return found + [x for v in {**getattr(obj, "__dict__", {}), **slots}.values() for x in held(v)]


def layout(obj: Any) -> Any:
    """Types, keys, sizes and plain values; no tensor's content."""
    if isinstance(obj, Tensor):
        return list(obj.shape), obj.dtype
    if isinstance(obj, Mapping):
        return type(obj), [(k, layout(v)) for k, v in obj.items()]
    if isinstance(obj, (str, bytes, int, float)) or obj is None:
        return obj
    inside = sorted(map(str, map(layout, obj))) if hasattr(obj, "__iter__") else None
    return type(obj), inside, [(k, layout(v)) for k, v in sorted(getattr(obj, "__dict__", {}).items())]


@pytest.mark.parametrize("name", CONTAINERS)
def test_every_container_moves_keeps_its_type_and_leaves_the_callers_alone(name: str) -> None:
    before = CONTAINERS[name]()
    shape, tensors = layout(before), held(before)
    moved = transfer_to_device(before, "meta")
    assert layout(moved) == shape
    assert all(x.device.type == "meta" for x in held(moved))
    assert len(held(moved)) == len(tensors)
    # The caller's: the same containers with the same tensors on the same device.
    assert layout(before) == shape
    assert all(x is y for x, y in zip(held(before), tensors, strict=True))
    assert all(x.device.type == "cpu" for x in tensors)


@pytest.mark.parametrize("name", CONTAINERS)
def test_values_survive_a_transfer_to_where_they_are(name: str) -> None:
    before = CONTAINERS[name]()
    after = transfer_to_device(before, torch.device("cpu"))
    assert layout(after) == layout(before)
    # A tensor that is already there is not copied.
    assert {id(x) for x in held(after)} == {id(x) for x in held(before)}


@pytest.mark.parametrize("name", CONTAINERS)
def test_no_device_leaves_everything_in_place(name: str) -> None:
    before = CONTAINERS[name]()
    assert transfer_to_device(before, None) is before


@pytest.mark.parametrize("name", [n for n in CONTAINERS if not isinstance(CONTAINERS[n](), OPAQUE)])
def test_mapping_and_walking_meet_the_same_tensors(name: str) -> None:
    before, met = CONTAINERS[name](), []
    after = map_tensors(lambda x: met.append(x) or x + 10, before)  # type: ignore[func-returns-value]
    assert sorted(map(id, met)) == sorted(map(id, iter_tensors(before)))
    assert len(met) == len({id(x) for x in held(before)})
    by_size = lambda x: (x.numel(), x.sum().item())  # noqa: E731
    for old, new in zip(sorted(held(before), key=by_size), sorted(held(after), key=by_size), strict=True):
        assert torch.equal(old + 10, new)


def test_the_catcher_module_offers_it_too() -> None:
    assert catcher.transfer_to_device is transfer_to_device


@pytest.mark.parametrize(
    "value", [None, 1, 1.5, True, "text", b"b", torch.float32, torch.device("cpu"), len, nn.Module]
)
def test_everything_else_passes_through(value: Any) -> None:
    assert transfer_to_device(value, "meta") is value
    assert transfer_to_device([value], "meta")[0] is value


def test_a_module_passes_through_whatever_else_it_is() -> None:
    @dataclass(eq=False)
    class Both(nn.Module):
        weight: Any

        def __post_init__(self) -> None:
            nn.Module.__init__(self)

    module = Both.__new__(Both)
    nn.Module.__init__(module)
    module.weight = t(2)
    assert transfer_to_device(module, "meta") is module
    assert list(iter_tensors([module])) == []


def test_sizes_modules_and_plain_objects_pass_through() -> None:
    size, module, plain = torch.Size([1, 2]), nn.Linear(1, 1), SimpleNamespace(x=t(1))
    moved = transfer_to_device((size, module, plain), "meta")
    assert moved[0] is size
    assert moved[1] is module
    assert module.weight.device.type == "cpu"
    assert moved[2] is plain


def test_aliases_stay_aliases_and_move_once() -> None:
    x, shared = t(2), [t(3)]
    moved: Any = transfer_to_device({"a": x, "b": (x, shared), "c": shared}, "meta")
    assert moved["a"] is moved["b"][0]
    assert moved["b"][1] is moved["c"]


def test_a_container_that_holds_itself() -> None:
    loop: list[Any] = [t(1)]
    loop.append(loop)
    moved = transfer_to_device(loop, "meta")
    assert moved[1] is moved
    assert moved[0].device.type == "meta"
    assert [x is loop[0] for x in iter_tensors(loop)] == [True]


def test_a_model_output_keeps_keys_that_are_no_fields() -> None:
    output: Any = Output(last_hidden_state=t(2))
    output["added"] = t(3)
    moved = transfer_to_device(output, "meta")
    assert list(moved) == ["last_hidden_state", "added"]
    assert moved["added"].device.type == moved.added.device.type == "meta"
    assert moved["added"] is moved.added
    assert moved.to_tuple()[1] is moved["added"]
    assert moved.pair is None
    assert output["added"].device.type == output.added.device.type == "cpu"


def test_attributes_added_to_a_dataclass_move_too() -> None:
    plain: Any = Plain(t(2))
    plain.cached = t(4)
    assert transfer_to_device(plain, "meta").cached.device.type == "meta"
    assert any(x is plain.cached for x in iter_tensors(plain))


def test_a_batch_encoding_keeps_its_own_api() -> None:
    moved = transfer_to_device(BatchEncoding({"input_ids": t(2)}), "meta")
    assert moved.input_ids is moved["input_ids"]
    assert moved.input_ids.device.type == "meta"


def test_a_packed_sequence_keeps_its_lengths_on_the_cpu() -> None:
    packed = pack_sequence([t(2, 3), t(4, 3)], enforce_sorted=False)
    moved: Any = transfer_to_device(packed, "meta")
    assert type(moved) is PackedSequence
    assert {moved.data.device.type, moved.sorted_indices.device.type} == {"meta"}  # type: ignore[union-attr]
    assert moved.batch_sizes is packed.batch_sizes
    same = map_tensors(torch.clone, packed)
    assert torch.equal(pad_packed_sequence(same)[0], pad_packed_sequence(packed)[0])


def test_an_object_whose_to_returns_nothing_is_its_moved_copy() -> None:
    silent = Silent(t(2))
    moved = transfer_to_device(silent, "meta")
    assert type(moved) is Silent
    assert moved.store["hidden"].device.type == moved.rows[0].device.type == "meta"
    assert silent.store["hidden"].device.type == silent.rows[0].device.type == "cpu"


def test_gradients_flow_through_a_transfer() -> None:
    leaf = torch.ones(2, requires_grad=True)
    (copied,) = map_tensors(torch.clone, (leaf * 3,))
    copied.sum().backward()  # type: ignore[no-untyped-call]
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [3, 3]
    moved = transfer_to_device([leaf * 3], "meta")[0]
    assert moved.requires_grad


def test_tensors_are_met_in_order_and_once() -> None:
    a, b, c = t(1), t(2), t(3)
    assert [id(x) for x in iter_tensors({"k": (a, [b]), "l": a, "m": Frozen(c)})] == [id(a), id(b), id(c)]


LEAVES = st.none() | st.integers() | st.text(max_size=3) | st.integers(1, 4).map(t)
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
        st.dictionaries(st.integers(), inner, max_size=3).map(OrderedDict),
        st.builds(Point, inner, inner),
        st.builds(Frozen, inner),
        st.lists(inner, max_size=3).map(deque),
    ),
    max_leaves=12,
)


@settings(deadline=None)
@given(NESTED)
def test_any_nesting_survives(value: Any) -> None:
    shape, before = layout(value), held(copy.copy(value))
    moved = transfer_to_device(value, "meta")
    assert layout(moved) == layout(value) == shape
    assert all(x.device.type == "meta" for x in held(moved))
    back = map_tensors(lambda x: x - 1, map_tensors(lambda x: x + 1, value))
    assert layout(back) == shape
    assert all(torch.equal(x, y) for x, y in zip(held(back), before, strict=True))
    assert [id(x) for x in iter_tensors(value)] == list(dict.fromkeys(map(id, held(value))))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_transfer_to_the_cpu_has_arrived_when_it_returns() -> None:
    busy = torch.randn(4096, 4096, device="cuda")
    for _ in range(10):
        busy = busy @ busy / 64
    got = transfer_to_device({"x": (busy,)}, "cpu")["x"][0]
    at_once = got.clone()
    torch.cuda.synchronize()
    assert torch.equal(at_once, busy.cpu())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_transfer_from_pinned_memory_is_ordered_before_what_follows() -> None:
    source = torch.randn(1 << 22).pin_memory()
    moved = transfer_to_device([source], "cuda")[0]
    assert torch.equal((moved + 1).cpu(), source + 1)
