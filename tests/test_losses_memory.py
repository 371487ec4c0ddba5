"""What the losses hold at most: of tokens only the hidden states' gradients, of triplets no cube."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from softs_lightning.losses import Head
from softs_lightning.losses import functional as LF
from tests.benchmarks.bench_memory import peak as most_bytes

VOCABULARY, WIDTH, TEACHER_WIDTH, CHUNK, FLOAT = 1000, 32, 48, 16, 4


def peak(kind: str, tokens: int, masked: bool) -> int:
    """The most bytes that live at once in a forward and backward, inputs not counted."""
    generator = torch.Generator().manual_seed(0)
    student = torch.randn(1, tokens, WIDTH, generator=generator).requires_grad_()
    teacher = torch.randn(1, tokens, TEACHER_WIDTH, generator=generator)
    weight = torch.randn(VOCABULARY, WIDTH, generator=generator).requires_grad_()
    heads = Head(weight), Head(torch.randn(VOCABULARY, TEACHER_WIDTH, generator=generator))
    mask = torch.rand(1, tokens, generator=generator) > 0.1 if masked else None
    labels = torch.zeros(1, tokens, dtype=torch.long)

    def step() -> None:
        if kind == "kl":
            loss = LF.linear_kl(student, teacher, *heads, mask=mask, chunk_size=CHUNK)
        elif kind == "jsd":
            loss = LF.linear_jsd(student, teacher, *heads, mask=mask, chunk_size=CHUNK)
        elif kind == "ce_kl":
            loss = LF.linear_ce_kl(student, teacher, *heads, labels, mask=mask, chunk_size=CHUNK)
        else:
            loss = LF.kl_divergence(student @ weight.T, teacher @ heads[1].weight.T, mask=mask)
        torch.autograd.backward(loss)

    return most_bytes(step)


def beyond_hidden_gradients(kind: str, tokens: int, masked: bool) -> int:
    return peak(kind, tokens, masked) - tokens * WIDTH * FLOAT


@pytest.mark.parametrize("kind", ["kl", "jsd", "ce_kl"])
@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "mask"])
def test_beyond_the_hidden_gradients_nothing_grows_with_the_tokens(kind: str, masked: bool) -> None:
    few, many = (beyond_hidden_gradients(kind, times * CHUNK, masked) for times in (4, 16))
    # Of each token a mask leaves its flag and its number, labels their shifted copy beside these.
    a_token = 48 if kind == "ce_kl" else 16 if masked else 0
    assert 0 <= many - few <= 12 * CHUNK * a_token
    # Without chunks each token holds its logits and their gradients, several times over.
    assert (
        peak("dense", 16 * CHUNK, masked) - peak("dense", 4 * CHUNK, masked)
        > 12 * CHUNK * VOCABULARY * FLOAT * 4
    )


def test_what_does_not_grow_is_the_gradient_of_the_head_and_a_few_chunks_of_logits() -> None:
    chunks = beyond_hidden_gradients("kl", 4 * CHUNK, False) - VOCABULARY * WIDTH * FLOAT
    assert chunks < 5.2 * CHUNK * VOCABULARY * FLOAT


@pytest.mark.parametrize("function", [LF.rkd_angle, LF.rkd_distance, LF.pkt, LF.similarity_preserving])
def test_relations_hold_matrices_of_the_batch_and_no_cube(function: Any) -> None:
    def held(rows: int) -> int:
        student, teacher = torch.randn(2, rows, 8).unbind()
        return most_bytes(lambda: torch.autograd.backward(function(student.requires_grad_(), teacher)))

    # Four times is what matrices make, eight a cube.
    assert held(256) / held(128) < 4.2


@pytest.mark.parametrize("masked", [False, True], ids=["all tokens", "mask"])
def test_minilm_holds_the_relations_of_a_block_of_samples(masked: bool) -> None:
    heads, tokens, width = 8, 256, 32  # two samples are a block

    def held(batch: int) -> int:
        student, teacher = torch.randn(2, batch, tokens, width).unbind()
        mask = torch.ones(batch, tokens) if masked else None
        student.requires_grad_()
        return most_bytes(
            lambda: torch.autograd.backward(LF.minilm_relation(student, teacher, heads=heads, mask=mask))
        )

    states = 4 * tokens * width * FLOAT  # of each sample: both cleared of padding, the gradient, once scaled
    grown = held(12) - held(4)
    assert grown <= 8 * (states + tokens * 3 * FLOAT)
    assert grown < 8 * heads * tokens**2 * FLOAT / 10  # dense, each sample holds several of these
