"""Chunked losses: equal to the dense ones, in loss and every gradient, for every option."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import log_softmax
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from softs_lightning.losses import Head, LinearCEKL, LinearJSD, LinearKL, check_loss
from softs_lightning.losses import functional as LF

BATCH, TOKENS, VOCABULARY = 2, 7, 23
SIDES = ("student", "teacher")


def models(dtype: torch.dtype = torch.float32, seed: int = 0, bias: bool = True) -> dict[str, Any]:
    """Hidden states of width 6 and 10 and their heads."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return {
        "student": draw(BATCH, TOKENS, 6).requires_grad_(),
        "weight": draw(VOCABULARY, 6).div_(2).requires_grad_(),
        "bias": draw(VOCABULARY).requires_grad_() if bias else None,
        "teacher": draw(BATCH, TOKENS, 10),
        "teacher_weight": draw(VOCABULARY, 10).div_(2),
        "mask": torch.tensor([[1] * 7, [0, 1, 1, 1, 0, 0, 0]]),
    }


def heads(m: dict[str, Any], **options: Any) -> tuple[Head, Head]:
    return Head(m["weight"], m["bias"], **options), Head(m["teacher_weight"], **options)


def values_and_gradients(loss: Tensor, m: dict[str, Any]) -> list[Tensor]:
    leaves = [m[name] for name in ("student", "weight", "bias") if m[name] is not None]
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def raised(m: dict[str, Any]) -> dict[str, Any]:
    """The same numbers in float64."""

    def raise_one(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value.detach().double().requires_grad_(value.requires_grad)

    return {name: raise_one(value) for name, value in m.items()}


def assert_same(actual: list[Tensor], expected: list[Tensor], rtol: float) -> None:
    for one, two in zip(actual, expected, strict=True):
        gap, size = (one.double() - two.double()).abs().max().item(), two.double().abs().max().item()
        assert gap <= rtol * size


KINDS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], dict[str, Any]]] = {
    "forward": (LF.linear_kl, LF.kl_divergence, {"direction": "forward"}),
    "reverse": (LF.linear_kl, LF.kl_divergence, {"direction": "reverse"}),
    "symmetric": (LF.linear_kl, LF.kl_divergence, {"direction": "symmetric"}),
    "jsd": (LF.linear_jsd, LF.generalized_jsd, {"beta": 0.3}),
    "jsd high": (LF.linear_jsd, LF.generalized_jsd, {"beta": 0.9}),
    "jsd normalized": (LF.linear_jsd, LF.generalized_jsd, {"beta": 0.01, "normalized": True}),
    "jsd end": (LF.linear_jsd, LF.generalized_jsd, {"beta": 1, "normalized": True}),
    "jsd plain end": (LF.linear_jsd, LF.generalized_jsd, {"beta": 0}),
}
SETTINGS: list[dict[str, Any]] = [{}, {"softcap": 2.0}, {"scale": 0.25}, {"softcap": 1.5, "scale": 0.5}]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_chunked_equals_dense(kind: str, dtype: torch.dtype) -> None:
    chunked, dense, options = KINDS[kind]
    rest = itertools.cycle(
        [(1.0, 4, True), (2.5, 1, False), (0.7, 100, True), (1.0, 3, False), (2.5, 5, True)]
    )
    for setting, masked in itertools.product(SETTINGS, (False, True)):
        temperature, chunk, bias = next(rest)
        m = models(dtype, bias=bias)
        common = {"temperature": temperature, "mask": m["mask"] if masked else None, **options}
        loss = chunked(m["student"], m["teacher"], *heads(m, **setting), chunk_size=chunk, **common)
        result = values_and_gradients(loss, m)
        assert {value.dtype for value in result} == {dtype}
        student, teacher = (
            head.logits(m[side]) for head, side in zip(heads(m, **setting), SIDES, strict=True)
        )
        rtol = 1e-6 if dtype == torch.float32 else 1e-13
        torch.testing.assert_close(result[0], dense(student, teacher, **common).detach(), rtol=rtol, atol=0)
        # Gradients of the same logits in float64: the dense float32 ones are off by as much as is allowed.
        reference = dense(student.double(), teacher.double(), **common)
        assert_same(result[1:], values_and_gradients(reference, m)[1:], rtol)


def loop_ce_kl(m: dict[str, Any], labels: Tensor, hard: float, temperature: float) -> float:
    """Token by token in float64, with the shift written out."""
    rows = []
    for b, t in itertools.product(range(BATCH), range(TOKENS - 1)):
        label = int(labels[b, t + 1])
        if label == -100:
            continue
        logits = (
            m["weight"].detach().numpy() @ m["student"][b, t].detach().numpy() + m["bias"].detach().numpy()
        )
        target = m["teacher_weight"].numpy() @ m["teacher"][b, t].numpy()
        log_s, log_t = log_softmax(logits / temperature), log_softmax(target / temperature)
        kl = temperature**2 * np.sum(np.exp(log_t) * (log_t - log_s))
        rows.append(-hard * log_softmax(logits)[label] + (1 - hard) * kl)
    return float(np.mean(rows))


@pytest.mark.parametrize(("hard", "temperature"), [(0.0, 1.0), (0.3, 2.0), (1.0, 1.0)])
def test_ce_kl_equals_a_loop_that_shifts_once(hard: float, temperature: float) -> None:
    m = models(torch.float64)
    labels = torch.randint(0, VOCABULARY, (BATCH, TOKENS), generator=torch.Generator().manual_seed(1))
    labels[0, :3] = -100
    options: dict[str, Any] = {"hard": hard, "temperature": temperature, "chunk_size": 3}
    loss = LF.linear_ce_kl(m["student"], m["teacher"], *heads(m), labels, **options)
    assert loss.item() == pytest.approx(loop_ce_kl(m, labels, hard, temperature), rel=1e-12)
    shifted = LF.next_labels(labels)
    again = LF.linear_ce_kl(m["student"], m["teacher"], *heads(m), shifted, shift=False, **options)
    torch.testing.assert_close(again, loss)


def test_ce_kl_gradients_equal_the_dense_ones() -> None:
    labels = LF.next_labels(torch.arange(BATCH * TOKENS).view(BATCH, TOKENS))
    for dtype, rtol in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
        m = models(dtype)
        both = heads(m, softcap=3.0)
        loss = LF.linear_ce_kl(
            m["student"], m["teacher"], *both, labels, shift=False, temperature=2.0, chunk_size=5
        )
        logits = both[0].logits(m["student"])
        kl = LF.kl_divergence(logits, both[1].logits(m["teacher"]), temperature=2.0, mask=labels != -100)
        ce = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        assert_same(values_and_gradients(loss, m), values_and_gradients((ce + kl) / 2, m), rtol)


def test_a_copy_task_is_solved_under_the_one_shift() -> None:
    # Hidden states that name the next token: perfect with one shift, wrong with none and with two.
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    hidden = 50 * nn.functional.one_hot(torch.roll(tokens, -1, 1), VOCABULARY).float()
    head = Head(torch.eye(VOCABULARY))
    losses = [
        LF.linear_ce_kl(hidden, hidden, head, head, labels, hard=1.0, shift=shift).item()
        for labels, shift in ((tokens, True), (tokens, False), (LF.next_labels(tokens), True))
    ]
    assert losses[0] == pytest.approx(0, abs=1e-6)
    assert min(losses[1:]) > 10


@given(
    rows=st.integers(1, 12),
    vocabulary=st.integers(2, 40),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    chunk=st.integers(1, 15),
    scale=st.floats(1e-3, 30),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=40, deadline=None)
def test_any_shape_and_chunk_equals_dense(
    rows: int, vocabulary: int, widths: tuple[int, int], chunk: int, scale: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(s, generator=generator, dtype=torch.float64) for s in [(rows, w) for w in widths]]
    weights = [torch.randn(vocabulary, w, generator=generator, dtype=torch.float64) * scale for w in widths]
    hidden = draw[0].requires_grad_()
    mask = torch.rand(rows, generator=generator) > 0.3
    loss = LF.linear_kl(hidden, draw[1], Head(weights[0]), Head(weights[1]), mask=mask, chunk_size=chunk)
    dense = LF.kl_divergence(hidden @ weights[0].T, draw[1] @ weights[1].T, mask=mask)
    torch.testing.assert_close(loss, dense)
    torch.testing.assert_close(torch.autograd.grad(loss, hidden), torch.autograd.grad(dense, hidden))


def test_bfloat16_sums_in_float32() -> None:
    m = models(torch.bfloat16)
    loss = LF.linear_kl(m["student"], m["teacher"], *heads(m), chunk_size=1)
    grads = values_and_gradients(loss, m)
    assert loss.dtype == torch.float32
    assert {grad.dtype for grad in grads[1:]} == {torch.bfloat16}
    wide = raised(m)
    expected = values_and_gradients(LF.linear_kl(wide["student"], wide["teacher"], *heads(wide)), wide)
    for one, two in zip(grads, expected, strict=True):
        # Logits and gradients are rounded to bf16 once each: 2^-8 of the largest, a few times over.
        assert (one.double() - two).abs().max() <= 0.02 * two.abs().max()


def test_autocast_does_not_reach_inside() -> None:
    m = models()
    expected = values_and_gradients(LF.linear_kl(m["student"], m["teacher"], *heads(m)), m)
    with torch.autocast("cpu", torch.bfloat16):
        loss = LF.linear_kl(m["student"], m["teacher"], *heads(m))
    assert_same(values_and_gradients(loss, m), expected, 0)


def test_only_what_requires_a_gradient_gets_one() -> None:
    m = models()
    m["weight"].requires_grad_(False)
    m["teacher"].requires_grad_()
    loss = LF.linear_kl(m["student"], m["teacher"], *heads(m))
    node = loss.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    assert [grad is None for grad in node.gradients] == [False, True, False]  # type: ignore[union-attr]
    torch.autograd.backward(loss)
    assert m["weight"].grad is None
    assert m["teacher"].grad is None
    assert m["student"].grad is not None


def test_nothing_is_kept_without_gradients() -> None:
    m = models()
    with torch.no_grad():
        loss = LF.linear_kl(m["student"], m["teacher"], *heads(m))
    assert loss.grad_fn is None


def test_the_head_may_be_tied_to_the_embedding() -> None:
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    m = models(torch.float64)
    teacher = m["teacher"][:1, :5]

    def step(chunked: bool) -> Tensor:
        hidden = torch.tanh(nn.functional.embedding(tokens, m["weight"]))
        if chunked:
            loss = LF.linear_kl(hidden, teacher, Head(m["weight"]), Head(m["teacher_weight"]), chunk_size=2)
        else:
            loss = LF.kl_divergence(hidden @ m["weight"].T, teacher @ m["teacher_weight"].T)
        grad: Tensor = torch.autograd.grad(loss, m["weight"])[0]
        return grad

    torch.testing.assert_close(step(True), step(False))


@pytest.mark.parametrize("wider", ["student", "teacher"])
def test_padded_vocabularies_are_cut_with_a_warning(wider: str) -> None:
    m = models(torch.float64, bias=False)
    short = 20
    cut = {"student": slice(None), "teacher": slice(None)}
    cut["teacher" if wider == "student" else "student"] = slice(short)
    with pytest.warns(UserWarning, match="first 20 are compared"):
        loss = LF.linear_kl(
            m["student"],
            m["teacher"],
            Head(m["weight"][cut["student"]]),
            Head(m["teacher_weight"][cut["teacher"]]),
        )
    dense = LF.kl_divergence(
        m["student"] @ m["weight"][:short].T, m["teacher"] @ m["teacher_weight"][:short].T
    )
    assert_same(values_and_gradients(loss, m), values_and_gradients(dense, m), 1e-13)


def test_labels_beyond_the_shared_vocabulary_are_refused() -> None:
    m = models()
    with pytest.raises(ValueError, match="labels reach from 0 to 23"):
        LF.linear_ce_kl(m["student"], m["teacher"], *heads(m), torch.tensor([[0, 0, 23, 0, 0, 0, 0]] * 2))


def test_a_fully_masked_batch_is_a_zero_in_the_graph() -> None:
    m = models()
    loss = LF.linear_kl(m["student"] * torch.nan, m["teacher"], *heads(m), mask=torch.zeros(BATCH, TOKENS))
    assert loss.item() == 0
    grads = values_and_gradients(loss, m)[2:]
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def test_a_second_backward_is_refused_unless_the_graph_is_kept() -> None:
    m = models()
    loss = LF.linear_kl(m["student"], m["teacher"], *heads(m))
    (first,) = torch.autograd.grad(3 * loss, m["student"], retain_graph=True)  # a graph that is kept keeps it
    (second,) = torch.autograd.grad(loss, m["student"])
    torch.testing.assert_close(first, 3 * second)
    with pytest.raises(RuntimeError, match=r"handed over by its first backward|a second time"):
        torch.autograd.backward(loss)


def test_a_second_derivative_is_refused() -> None:
    m = models()
    loss = LF.linear_kl(m["student"], m["teacher"], *heads(m))
    (grad,) = torch.autograd.grad(loss, m["student"], create_graph=True)
    with pytest.raises(RuntimeError, match="does not require grad"):
        grad.sum().backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant: bool) -> None:
    m = models(torch.float64)

    def step(student: Tensor) -> Tensor:
        return LF.linear_kl(torch.tanh(student), m["teacher"], *heads(m), chunk_size=4)

    expected = torch.autograd.grad(step(m["student"]), m["student"])[0]
    checkpoint(step, m["student"], use_reentrant=reentrant).backward()
    torch.testing.assert_close(m["student"].grad, expected)


def test_the_loss_scales_with_what_comes_after_it() -> None:
    m = models()
    single = values_and_gradients(LF.linear_kl(m["student"], m["teacher"], *heads(m)), m)
    triple = values_and_gradients(3 * LF.linear_kl(m["student"], m["teacher"], *heads(m)), m)
    assert_same(triple, [3 * value for value in single], 1e-6)


def test_window_normalizer_adds_up() -> None:
    m = models(torch.float64)
    whole = LF.linear_kl(m["student"], m["teacher"], *heads(m), mask=m["mask"])
    parts = [
        LF.linear_kl(
            m["student"][i], m["teacher"][i], *heads(m), mask=m["mask"][i], normalizer=m["mask"].sum() / BATCH
        )
        for i in range(BATCH)
    ]
    torch.testing.assert_close(torch.stack(parts).mean(), whole)


def test_unlike_tokens_widths_and_masks_are_refused() -> None:
    m = models()
    with pytest.raises(ValueError, match=r"student \(2, 7, 6\) and teacher \(2, 6, 10\)"):
        LF.linear_kl(m["student"], m["teacher"][:, 1:], *heads(m))
    with pytest.raises(ValueError, match="student hidden states have 6 features, its head takes 10"):
        LF.linear_kl(m["student"], m["teacher"], *heads(m)[::-1])
    with pytest.raises(ValueError, match=r"mask \(2, 6\)"):
        LF.linear_kl(m["student"], m["teacher"], *heads(m), mask=torch.ones(2, 6))
    with pytest.raises(ValueError, match=r"labels \(2, 6\)"):
        LF.linear_ce_kl(m["student"], m["teacher"], *heads(m), torch.zeros(2, 6, dtype=torch.long))


def bound(loss: LinearKL | LinearJSD | LinearCEKL, width: int = 8) -> LinearKL | LinearJSD | LinearCEKL:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, VOCABULARY))
    loss.bind(model, copy.deepcopy(model))
    return loss


@pytest.mark.parametrize(
    "options", [{}, {"chunk_size": 2}, {"student_softcap": 2.0, "teacher_softcap": 2.0}], ids=str
)
def test_the_modules_conform(options: dict[str, Any]) -> None:
    options = {"student_head": "0", "teacher_head": "0", **options}
    check_loss(bound(LinearKL(2.0, **options)))
    check_loss(bound(LinearJSD(0.3, **options)), compiled=False)
    labels = torch.arange(15).view(3, 5)
    check_loss(bound(LinearCEKL(temperature=2.0, **options)), batch={"labels": labels}, compiled=False)
