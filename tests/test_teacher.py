"""The teacher: feeding, freezing, handing back, counting."""

from __future__ import annotations

import copy
import warnings
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding, BertConfig, BertModel

from softs_lightning import ProductSpec, Teacher
from softs_lightning.feeding import feed


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))


def bert() -> BertModel:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
    )
    return BertModel(config).eval()


class Takes(nn.Module):
    def forward(self, x: Any, *, scale: float = 1.0, labels: Any = None) -> Any:
        return x


Row = namedtuple("Row", ["x", "y"])


@pytest.mark.parametrize(
    ("batch", "expected"),
    [
        ({"x": 1, "y": 2, "labels": 3}, ((), {"x": 1})),
        (BatchEncoding({"x": 1, "scale": 2.0}), ((), {"x": 1, "scale": 2.0})),
        ((1, 2), ((1,), {})),
        ([1, 2], ((1,), {})),
        (Row(1, 2), ((1,), {})),
        ([{"x": 1, "labels": 2}, 5], ((), {"x": 1})),
        (7, ((7,), {})),
    ],
)
def test_a_batch_is_fed_by_signature(batch: Any, expected: Any) -> None:
    assert feed(Takes(), batch) == expected


def test_feeding_looks_through_wrappers() -> None:
    compiled = torch.compile(Takes(), backend="eager")
    assert feed(compiled, {"x": 1, "labels": 2}) == ((), {"x": 1})  # type: ignore[arg-type]


def test_a_missing_argument_names_what_the_batch_has() -> None:
    with pytest.raises(TypeError, match=r"Takes.forward requires 'x', but the batch has 'z', 'labels'"):
        feed(Takes(), {"z": 1, "labels": 2})


def test_a_batch_without_any_known_key_is_refused() -> None:
    with pytest.raises(TypeError, match=r"takes 'input_ids', .*none is in the batch, which has 'text'"):
        feed(bert(), {"text": 1})
    with pytest.raises(TypeError, match="the batch is empty"):
        feed(Takes(), [])


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        (lambda batch: batch["a"], ((1,), {})),
        (lambda batch: (batch["a"], batch["b"]), ((1, 2), {})),
        (lambda batch: {"x": batch["a"]}, ((), {"x": 1})),
    ],
)
def test_teacher_inputs_are_passed_by_their_form(inputs: Any, expected: Any) -> None:
    teacher = Teacher(Takes(), inputs=inputs)
    teacher.place()
    assert teacher.arguments({"a": 1, "b": 2}) == expected


def test_supply_equals_the_model_by_hand_and_has_no_gradient() -> None:
    model = bert()
    batch = {
        "input_ids": torch.arange(12).reshape(2, 6),
        "attention_mask": torch.ones(2, 6, dtype=torch.long),
    }
    expected = model(**batch, output_hidden_states=True).hidden_states[2]
    teacher = Teacher(model)
    teacher.place("cpu")
    buffer = teacher.supply(
        {**batch, "labels": torch.zeros(2)}, ProductSpec.parse("outputs[encoder.layer.1]")
    )
    (value,) = buffer.select()
    assert torch.equal(value, expected)
    assert not value.requires_grad
    assert not value.is_inference()
    assert buffer.stopped_at == "encoder.layer.1"


def test_supply_outside_of_place_says_what_to_do() -> None:
    with pytest.raises(RuntimeError, match=r"call place\(\) first"):
        Teacher(net()).supply(torch.ones(1, 4), ProductSpec.parse("outputs[0]"))


def test_cost_counts_the_operations_by_hand() -> None:
    teacher = Teacher(net())
    teacher.place()
    cost = teacher.cost(torch.ones(3, 4), ProductSpec.parse("outputs[1|0]"))
    assert cost.stop == "1"
    assert cost.used == 2 * 3 * 4 * 8
    assert cost.full == 2 * 3 * (4 * 8 + 8 * 16 + 16 * 2)
    assert cost.saved == pytest.approx(1 - 32 / 192)
    whole = teacher.cost(torch.ones(3, 4), ProductSpec.parse("outputs[.]"))
    assert whole.used == whole.full


def test_no_early_exit_when_it_is_switched_off() -> None:
    teacher = Teacher(net(), early_exit=False)
    teacher.place()
    assert teacher.cost(torch.ones(3, 4), ProductSpec.parse("outputs[0]")).saved == 0


def test_placing_and_releasing_is_repeatable_and_gives_back() -> None:
    model = net().train()
    model[0].weight.requires_grad_(False)
    teacher = Teacher(model)
    for _ in range(2):
        teacher.place()
        assert not model.training
        assert not any(p.requires_grad for p in model.parameters())
        teacher.supply(torch.ones(1, 4), ProductSpec.parse("outputs[0]"))
        teacher.release()
        teacher.release()
        assert model.training
        assert [p.requires_grad for p in model.parameters()] == [False] + [True] * 5
        assert all(not m._forward_hooks for m in model.modules())


def test_a_conversion_that_would_change_the_dtype_works_on_a_copy() -> None:
    model = net()
    before = copy.deepcopy(model.state_dict())
    teacher = Teacher(model)
    teacher.place(convert=lambda module: module.to(torch.bfloat16))
    assert teacher.module is not model
    assert next(teacher.module.parameters()).dtype == torch.bfloat16
    teacher.release()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_what_is_no_teacher_is_refused() -> None:
    with pytest.raises(TypeError, match=r"a torch.nn.Module or a function"):
        Teacher("bert-base-uncased")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="returned str, not a module"):
        Teacher(lambda: "bert").place()  # type: ignore[arg-type, return-value]
    with pytest.raises(TypeError, match="a function of the batch"):
        Teacher(net(), inputs="x")  # type: ignore[arg-type]


def test_a_factory_with_required_arguments_is_refused_with_the_way_out() -> None:
    def factory(name: str) -> nn.Module:
        return net()

    with pytest.raises(TypeError, match=r"functools\.partial"):
        Teacher(factory)  # type: ignore[arg-type]


def test_an_in_place_teacher_can_be_copied() -> None:
    class Overwrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2)
            self.b = nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x))

    model = Overwrites()
    x = torch.randn(5, 2)
    teacher = Teacher(model, copy=True, early_exit=False)
    teacher.place()
    assert torch.equal(teacher.supply(x, ProductSpec.parse("outputs[a]")).select()[0], model.a(x))


def test_a_teacher_whose_layers_the_precision_replaces_is_copied_first() -> None:
    class Other(nn.Linear):
        """What a quantising plugin puts in place of a layer."""

    def convert(module: nn.Module) -> nn.Module:
        for name, child in module.named_children():
            if type(child) is nn.Linear:
                setattr(module, name, Other(child.in_features, child.out_features))
        return module

    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    teacher = Teacher(module)
    teacher.place("cpu", convert)
    assert teacher.module is not None
    assert type(teacher.module[0]) is Other  # type: ignore[index]
    assert type(module[0]) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float64"])
def test_a_teacher_in_a_type_of_its_own(dtype: torch.dtype | str) -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Tanh()).train()
    teacher = Teacher(module, dtype=dtype)
    teacher.place("cpu", convert=lambda m: m.half())  # the trainer's precision does not apply
    found = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    x = torch.randn(2, 3)
    with torch.autocast("cpu", torch.bfloat16):
        (out,) = teacher.supply(x, ProductSpec.parse("outputs[1]")).select()
    assert out.dtype == found
    assert torch.equal(out, copy.deepcopy(module).to(found)(x.to(found)))
    teacher.release()
    assert next(module.parameters()).dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32


def test_types_that_are_none_are_refused() -> None:
    for dtype in ("bf17", "int8", torch.int64):
        with pytest.raises(ValueError, match="must be a floating point type such as 'bfloat16'"):
            Teacher(nn.Linear(1, 1), dtype=dtype)


def test_a_dynamically_quantised_teacher() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is moving to torchao, and says so in several ways
        quantised = torch.ao.quantization.quantize_dynamic(net, {nn.Linear}, dtype=torch.qint8)
    teacher = Teacher(quantised)
    teacher.place("cpu")
    x = torch.randn(2, 3)
    assert torch.equal(teacher.supply(x, ProductSpec.parse("outputs[2]")).select()[0], quantised(x))


def test_cost_counts_attention() -> None:
    """Two matrix products for each head, sample and layer, by hand; the CPU's fused kernel included."""
    teacher = Teacher(bert())
    teacher.place()
    batch = {"input_ids": torch.ones(2, 6, dtype=torch.long), "attention_mask": torch.ones(2, 6)}
    cost = teacher.cost(batch, ProductSpec.parse("outputs[encoder.layer.0]"))
    tokens, width, inner = 2 * 6, 16, 32
    linear = 2 * tokens * (4 * width * width + 2 * width * inner)
    attention = 2 * 2 * tokens * 6 * width
    assert cost.used == linear + attention
    assert cost.full == 4 * (linear + attention) + 2 * 2 * width * width  # and the pooler
