"""Heads found in real models: a chunked loss on what enters them equals the dense one on the models' logits."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from softs_lightning.losses import Head, KLDivergence, LinearCEKL, LinearJSD, LinearKL
from softs_lightning.losses.heads import head_of

VOCABULARY = 40
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])


def model(kind: str, width: int = 16, vocabulary: int = VOCABULARY) -> Any:
    torch.manual_seed(width)
    shared: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    ids: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
    makers: dict[str, Callable[[], Any]] = {
        "llama": lambda: LlamaForCausalLM(LlamaConfig(**shared)),
        "gpt2": lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=vocabulary, n_embd=width, n_layer=1, n_head=2, **ids)
        ),
        "gemma2": lambda: Gemma2ForCausalLM(
            Gemma2Config(**shared, head_dim=8, final_logit_softcapping=1.5, query_pre_attn_scalar=8)
        ),
        "cohere": lambda: CohereForCausalLM(CohereConfig(**shared, logit_scale=0.0625)),
        "granite": lambda: GraniteForCausalLM(GraniteConfig(**shared, logits_scaling=8.0)),
    }
    built = makers[kind]()
    with torch.no_grad():  # logits of a size that softcaps and temperatures can be seen on
        built.get_output_embeddings().weight.mul_(20)
    return built.eval()


def run(model: Any) -> tuple[Tensor, Tensor]:
    """What enters the head, and the model's own logits."""
    entered: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    logits = model(TOKENS).logits
    hook.remove()
    return entered[0], logits


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "cohere"])
@pytest.mark.parametrize("teacher_kind", ["llama", "gemma2"])
def test_bound_losses_equal_the_dense_ones_on_the_models_logits(kind: str, teacher_kind: str) -> None:
    student, teacher = model(kind), model(teacher_kind, width=32)
    loss = LinearKL(temperature=2.0, chunk_size=5)
    loss.bind(student, teacher)
    entered, logits = run(student)
    with torch.no_grad():
        teacher_entered, teacher_logits = run(teacher)
    chunked, dense = loss(entered, teacher_entered), KLDivergence(2.0)(logits, teacher_logits)
    torch.testing.assert_close(chunked, dense, rtol=2e-6, atol=1e-7)
    weight = student.get_output_embeddings().weight
    one, two = (torch.autograd.grad(x, weight, retain_graph=True)[0] for x in (dense, chunked))
    # Gradients reach the tied embedding through the body, too: sums in another order.
    torch.testing.assert_close(two, one, rtol=1e-4, atol=1e-6)


def test_a_scale_that_the_config_does_not_explain_must_be_given() -> None:
    granite, llama = model("granite"), model("llama")
    with pytest.raises(ValueError, match=r"GraniteConfig\.logits_scaling = 8\.0"):
        LinearKL().bind(llama, granite)
    loss = LinearKL(teacher_scale=1 / 8)
    loss.bind(llama, granite)
    (entered, logits), (teacher_entered, teacher_logits) = run(llama), run(granite)
    torch.testing.assert_close(
        loss(entered, teacher_entered), KLDivergence()(logits, teacher_logits.detach())
    )


def test_what_is_given_goes_before_the_config() -> None:
    loss = LinearKL(student_softcap=7.0, student_scale=0.5)
    loss.bind(model("gemma2"), model("cohere"))
    student, teacher = loss.heads()
    assert (student.softcap, student.scale) == (7.0, 0.5)
    assert (teacher.softcap, teacher.scale) == (None, 0.0625)


def test_the_head_is_found_inside_a_wrapper() -> None:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model("llama")

    wrapped = Module()
    loss = LinearKL()
    loss.bind(wrapped, wrapped.inner)
    assert loss.heads()[0].weight is wrapped.inner.lm_head.weight


def test_heads_stay_out_of_the_losses_own_parameters() -> None:
    student = model("llama")
    loss = LinearKL()
    loss.bind(student, copy.deepcopy(student))
    assert list(loss.parameters()) == []
    assert list(loss.state_dict()) == []


def test_a_copied_loss_still_trains_the_models_own_head() -> None:
    student = model("llama")
    loss = LinearKL()
    loss.bind(student, student)
    assert copy.deepcopy(loss).heads()[0].weight is student.lm_head.weight


def test_a_replaced_weight_is_read_at_the_next_call() -> None:
    student = model("llama")
    loss = LinearKL()
    loss.bind(student, student)
    student.lm_head.weight = nn.Parameter(torch.ones_like(student.lm_head.weight))
    assert loss.heads()[0].weight is student.lm_head.weight


def test_padded_vocabularies_of_real_heads_are_cut_with_a_warning() -> None:
    student, teacher = model("llama"), model("llama", width=32, vocabulary=VOCABULARY + 24)
    loss = LinearKL()
    loss.bind(student, teacher)
    (entered, logits), (teacher_entered, teacher_logits) = run(student), run(teacher)
    with pytest.warns(UserWarning, match="first 40 are compared"):
        chunked = loss(entered, teacher_entered)
    torch.testing.assert_close(chunked, KLDivergence()(logits, teacher_logits[..., :VOCABULARY].detach()))


def test_t5_scales_before_its_head_so_that_nothing_is_left_to_do() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"decoder_start_token_id": 0}
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=16,
        d_ff=32,
        d_kv=8,
        num_layers=1,
        num_heads=2,
        **options,
    )
    student: Any = T5ForConditionalGeneration(config)
    student.eval()
    entered: list[Tensor] = []
    student.lm_head.register_forward_pre_hook(lambda _, args: entered.append(args[0]))
    logits = student(input_ids=TOKENS, decoder_input_ids=TOKENS).logits
    loss = LinearJSD()
    loss.bind(student, student)
    assert loss(entered[0], entered[0]).item() == pytest.approx(0, abs=1e-7)
    torch.testing.assert_close(loss.heads()[0].logits(entered[0]), logits)


def test_unbound_unknown_and_unfit_heads_are_refused() -> None:
    plain = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 10))
    with pytest.raises(RuntimeError, match=r"call bind\(student_module, teacher_module\)"):
        LinearKL()(torch.zeros(2, 8), torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"0 output heads found in Sequential.*linear layers: 0, 1"):
        LinearKL().bind(plain, plain)
    with pytest.raises(KeyError, match="nearest: lm_head"):
        LinearKL(student_head="lm_haed").bind(model("llama"), plain)
    with pytest.raises(ValueError, match="2 output heads"):
        LinearKL().bind(nn.ModuleList([model("llama"), model("gpt2")]), plain)
    with pytest.raises(TypeError, match="plain linear module, got Sequential"):
        head_of(plain)
    with pytest.raises(ValueError, match="dequantised"):
        Head(torch.zeros(3, 4, dtype=torch.int8))
    with pytest.raises(ValueError, match="bias"):
        Head(torch.zeros(3, 4), torch.zeros(4))
    with pytest.raises(ValueError, match="softcap"):
        Head(torch.zeros(3, 4), softcap=0.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LinearKL(0.0),
        lambda: LinearKL(direction="up"),
        lambda: LinearKL(chunk_size=0),
        lambda: LinearJSD(2.0),
        lambda: LinearJSD(0.5, 0.0),
        lambda: LinearCEKL(1.5),
        lambda: LinearCEKL(direction="up"),
    ],
)
def test_bad_settings_are_refused_at_once(make: object) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=r"must|zero"):
        make()


def test_ce_kl_trains_a_model_towards_its_labels_and_its_teacher() -> None:
    student, teacher = model("llama"), model("llama", width=32)
    loss = LinearCEKL(hard=0.5, chunk_size=4)
    loss.bind(student, teacher)
    with torch.no_grad():
        target, _ = run(teacher)
    optimizer = torch.optim.Adam(student.parameters(), lr=1e-2)
    values = []
    for _ in range(15):
        optimizer.zero_grad()
        value = loss(run(student)[0], target, batch={"labels": TOKENS})
        value.backward()
        optimizer.step()
        values.append(value.item())
    assert values[-1] < 0.5 * values[0]
