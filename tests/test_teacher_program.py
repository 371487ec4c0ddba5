"""A teacher whose products come from a program over its trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from softs_lightning import DistillationCallback, Pair, ProductSpec, Teacher
from softs_lightning.tracing import save
from tests.training import Student, loader, make_student, make_teacher, trainer

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def steer(model: Any) -> dict[str, Any]:
    model[1].output = model[1].output + 1.0
    return {"steered": model[2].output}


def placed(program: Any, module: nn.Module | None = None, **options: Any) -> Teacher:
    teacher = Teacher(module or net(), program=program, **options)
    teacher.place("cpu")
    return teacher


def test_a_program_changes_the_forward_and_its_values_are_products() -> None:
    x = torch.randn(5, 4)
    model = net()
    expected = model[2](model[1](model[0](x)) + 1.0)
    buffer = placed(steer).supply(x, ProductSpec.parse("saved[steered]"))
    (value,) = buffer.select()
    assert torch.equal(value, expected)
    assert not value.requires_grad


def test_saved_and_captured_products_of_one_forward() -> None:
    x = torch.randn(5, 4)
    model = net()
    spec = ProductSpec.parse("outputs[2]|inputs[1]|saved[steered]")
    assert str(spec) == "inputs[1]|outputs[2]|saved[steered]"
    before, after, saved = placed(steer).supply(x, spec).select()
    assert torch.equal(before, model[0](x))
    assert torch.equal(after, model[2](model[1](model[0](x)) + 1.0))
    assert torch.equal(after, saved)


def test_a_program_stops_the_forward() -> None:
    calls: list[int] = []
    model = net()
    model[2].register_forward_hook(lambda *_: calls.append(1))

    def early(model: Any, tracer: Any) -> None:
        save(model[0].output, "first")
        tracer.stop()

    x = torch.randn(5, 4)
    (value,) = placed(early, model).supply(x, ProductSpec.parse("saved[first]")).select()
    assert torch.equal(value, model[0](x))
    assert not calls


def test_a_step_of_a_generation_is_a_product() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=30, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=29
    )
    model = GPT2LMHeadModel(config).eval()
    x = torch.tensor([[1, 2, 3]])

    def third(model: Any, tracer: Any) -> dict[str, Any]:
        for _ in tracer.iter[2]:
            logits = model.lm_head.output
        return {"logits": logits}

    teacher = placed(
        third,
        model,
        method="generate",
        inputs=lambda ids: {"input_ids": ids, "max_new_tokens": 4, "do_sample": False, "pad_token_id": 0},
    )
    (value,) = teacher.supply(x, ProductSpec.parse("saved[logits]")).select()
    tokens = model.generate(x, max_new_tokens=2, do_sample=False, pad_token_id=0)
    torch.testing.assert_close(value[:, -1], model(tokens).logits[:, -1])


def test_what_a_program_did_not_save_is_named() -> None:
    with pytest.raises(
        LookupError, match=r"saved\[other\]: the program saved nothing under 'other', only 'steered'"
    ):
        placed(steer).supply(torch.randn(5, 4), ProductSpec.parse("saved[other]"))


def test_saved_products_need_a_program() -> None:
    teacher = Teacher(net())
    teacher.place("cpu")
    with pytest.raises(ValueError, match=r"saved\[x\] names what a program saves.*Teacher\(program="):
        teacher.check(ProductSpec.parse("saved[x]"))
    with pytest.raises(ValueError, match="give program too"):
        Teacher(net(), method="generate")
    with pytest.raises(TypeError, match="a program is a function"):
        Teacher(net(), program="steer")  # type: ignore[arg-type]


def test_distilling_a_program_equals_distilling_the_model_it_makes() -> None:
    """Steering by a program equals a teacher with the edit built in."""

    class Plus(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1.0

    def edit(model: Any) -> dict[str, Any]:
        model[1].output = model[1].output + 1.0
        return {"logits": model[3].output}

    plain = make_teacher()
    built_in = nn.Sequential(plain[0], plain[1], Plus(), plain[2], plain[3])
    students: list[Student] = []
    for teacher, product in (
        (Teacher(make_teacher(), program=edit), "saved[logits]"),
        (built_in, "outputs[4]"),
    ):
        student = make_student()
        callback = DistillationCallback(teacher, [Pair(product, "outputs[net]", nn.MSELoss(), name="logits")])
        trainer(callback).fit(student, loader())
        students.append(student)
    for mine, its in zip(students[0].parameters(), students[1].parameters(), strict=True):
        assert torch.equal(mine, its)


def test_a_projector_is_sized_by_a_program() -> None:
    def first(model: Any) -> dict[str, Any]:
        return {"h": model[1].output}

    pair = Pair("saved[h]", "outputs[net.1]", nn.MSELoss(), projector="linear", name="hidden")
    callback = DistillationCallback(Teacher(make_teacher(), program=first), [pair])
    trainer(callback).fit(make_student(), loader())
    (weight,) = [v for k, v in callback.state_dict()["projectors"].items() if k.endswith("weight")]
    assert weight.shape == (8, 6)
