"""What the losses hold and cost, over the same maths with everything at once.

Here in bytes of live tensors, exact and the same on every machine, and in paired times. More of it prints
``python -m tests.benchmarks.bench_losses [chunked] [table]``, in Markdown. ``chunked``: peak extra memory and CPU time of a forward and backward of the chunked KL over the dense one,
each in a process of its own, on one thread (N = 2,048 tokens, student width 256, teacher 512, float32), and
of the chunked one at several N, with what of it must be: the gradients of hidden states and head, and six
chunks of logits. ``table``: time of every loss over MSE on the same tensors.
"""

from __future__ import annotations

import functools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from softs_lightning import losses
from softs_lightning.losses import functional as LF
from tests.benchmarks import Row, compare
from tests.benchmarks.bench_memory import peak

WIDTHS = (256, 512)


def chunked_or_dense(kind: str, tokens: int, vocabulary: int, chunk_size: int | None) -> None:
    """One forward and backward; prints extra peak memory (MiB), CPU seconds, loss and gradient norms."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden, weights = [], []
    for width in WIDTHS:
        hidden.append(torch.randn(tokens, width, generator=generator))
        weights.append(torch.randn(vocabulary, width, generator=generator).mul_(width**-0.5))
    leaves: list[Any] = [hidden[0].requires_grad_(), weights[0].requires_grad_()]
    student, weight = leaves
    torch.autograd.backward(
        (student[:1] @ weight[:1].T).sum()
    )  # what torch loads on first use is not of the loss
    student.grad = weight.grad = None
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    if kind == "dense":
        loss = LF.kl_divergence(student @ weight.T, hidden[1] @ weights[1].T)
    else:
        heads = losses.Head(weight), losses.Head(weights[1])
        loss = LF.linear_kl(student, hidden[1], *heads, chunk_size=chunk_size)
    torch.autograd.backward(loss)
    seconds = time.process_time() - start
    extra = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    norms = [loss.item(), student.grad.norm().item(), weight.grad.norm().item()]
    print(json.dumps({"extra": extra, "seconds": seconds, "numbers": norms}))


def in_a_process(*arguments: object) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.bench_losses", "one", *map(str, arguments)]
    result: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    return result


def bench_chunked() -> None:
    print("| V | N | dense MiB | chunked MiB | ratio | dense s | chunked s | ratio | largest gap |")
    print("|---|---|---|---|---|---|---|---|---|")
    for vocabulary in (50_257, 128_256):
        dense, chunked = (in_a_process(kind, 2048, vocabulary, "None") for kind in ("dense", "chunked"))
        gap = max(abs(a - b) / abs(a) for a, b in zip(dense["numbers"], chunked["numbers"], strict=True))
        print(
            f"| {vocabulary:,} | 2,048 | {dense['extra']:,.0f} | {chunked['extra']:,.0f} "
            f"| 1/{dense['extra'] / chunked['extra']:.1f} | {dense['seconds']:.1f} | {chunked['seconds']:.1f} "
            f"| {chunked['seconds'] / dense['seconds']:.2f} | {gap:.0e} |"
        )
    print("\n| V | N | chunked MiB | hidden gradients | head's gradient | six chunks of logits |")
    print("|---|---|---|---|---|---|")
    vocabulary = 50_257
    chunk = max(2**21 // vocabulary, 16) * vocabulary
    for tokens in (512, 2048, 8192):
        extra = in_a_process("chunked", tokens, vocabulary, "None")["extra"]
        parts = (tokens * WIDTHS[0], vocabulary * WIDTHS[0], 6 * chunk)
        expected = " | ".join(f"{4 * part / 2**20:.1f}" for part in parts)
        print(f"| {vocabulary:,} | {tokens:,} | {extra:,.0f} | {expected} |")


def dense_relation(student: Tensor, teacher: Tensor, heads: int) -> Tensor:
    """MiniLM's relations, all at once."""
    logs = []
    for states in (student, teacher):
        split = states.unflatten(-1, (heads, -1)).transpose(1, 2)
        logs.append((split @ split.mT / split.shape[-1] ** 0.5).log_softmax(-1))
    return (logs[1].exp() * (logs[1] - logs[0])).sum(-1).mean()


def dense_angles(student: Tensor, teacher: Tensor) -> Tensor:
    """RKD's angles, all triplets at once."""
    cubes = []
    for rows_ in (student, teacher):
        sides = nn.functional.normalize(rows_[None] - rows_[:, None], dim=2)
        cubes.append(sides @ sides.mT)
    return nn.functional.smooth_l1_loss(cubes[0], cubes[1])


def rows() -> Iterator[Row]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    tokens, vocabulary = 512, 4096
    hidden, weight = draw(tokens, 128).requires_grad_(), draw(vocabulary, 128).requires_grad_()
    fixed, other = draw(tokens, 192), draw(vocabulary, 192)
    heads = losses.Head(weight), losses.Head(other)
    states, vectors = draw(2, 64, 128, 128), draw(2, 256, 32)
    pairs: list[tuple[str, str, Callable[[], Tensor], Callable[[], Tensor], float]] = [
        (
            f"{tokens} tokens, vocabulary {vocabulary}",
            "KL of hidden states in chunks / of the logits",
            lambda: LF.linear_kl(hidden, fixed, *heads, chunk_size=32),
            lambda: LF.kl_divergence(hidden @ weight.T, fixed @ other.T),
            0.1,
        ),
        (
            "64 × 128 tokens, 8 relation heads",
            "MiniLM's relations in blocks / at once",
            lambda: LF.minilm_relation(states[0].requires_grad_(), states[1], heads=8),
            lambda: dense_relation(states[0].requires_grad_(), states[1], 8),
            0.5,
        ),
        (
            "a batch of 256",
            "RKD's angles in blocks / at once",
            lambda: LF.rkd_angle(vectors[0].requires_grad_(), vectors[1]),
            lambda: dense_angles(vectors[0].requires_grad_(), vectors[1]),
            0.5,
        ),
    ]
    for setting, compared, ours, dense, limit in pairs:
        steps = [lambda f=f: torch.autograd.backward(f()) for f in (ours, dense)]
        ratio = peak(steps[0]) / peak(steps[1])
        yield Row(setting, f"{compared}: bytes", ratio, ratio, ratio, limit)
        if setting != "a batch of 256":  # whose cubes take seconds
            yield compare(setting, f"{compared}: time", *steps, repeats=3, seconds=0.5)


def seconds(step: Callable[[], Tensor], repeats: int = 7) -> float:
    """The median time of a forward and backward."""
    times = []
    for _ in range(repeats):
        start = time.process_time()
        torch.autograd.backward(step())
        times.append(time.process_time() - start)
    return sorted(times)[repeats // 2]


def bench_table() -> None:
    """Rows: a loss on tensors of its kind, its time over that of MSE on these tensors."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    logits, states, maps, batch = (64, 128, 1000), (16, 128, 256), (32, 64, 16, 16), (256, 512)
    attention = (8, 8, 128, 128)
    labels = {"labels": torch.randint(0, 1000, (64, 128))}
    table: list[tuple[nn.Module, tuple[int, ...], dict[str, Any]]] = [
        (losses.KLDivergence(2.0), logits, {}),
        (losses.KLDivergence(2.0, "reverse"), logits, {}),
        (losses.GeneralizedJSD(), logits, {}),
        (losses.SkewedKL(), logits, {}),
        (losses.TotalVariation(), logits, {}),
        (losses.DKD(), logits, {"batch": labels}),
        (losses.CEKL(), logits, {"batch": labels}),
        (losses.DIST(), logits, {}),
        (losses.StandardizedKL(), logits, {}),
        (losses.TopKKL(64), logits, {}),
        (losses.SigmoidKL(), logits, {}),
        (losses.ULD(), logits, {}),
        (losses.SmoothL1(), states, {}),
        (losses.CosineDistance(), states, {}),
        (losses.PKD(None), states, {}),
        (losses.MiniLMRelation(8), states, {}),
        (losses.AttentionMSE(), attention, {}),
        (losses.AttentionKL(), attention, {}),
        (losses.AttentionTransfer(), maps, {}),
        (losses.ChannelWise(), maps, {}),
        (losses.NST(), maps, {}),
        (losses.OFD(torch.zeros(64), torch.ones(64)), maps, {}),
        (losses.MGD(64, 64), maps, {}),
        (losses.VID(64, 64, channel_dim=1), maps, {}),
        (losses.SimilarityPreserving(), batch, {}),
        (losses.PKT(), batch, {}),
        (losses.CorrelationCongruence(), batch, {}),
        (losses.CKA(), batch, {}),
        (losses.RKD(angle=0), batch, {}),
        (losses.RKD(), batch, {}),
        (losses.SRD(512, 512), batch, {}),
        (losses.QueueKL(512, 4096), batch, {}),
        (losses.CRD(512, 512, 4096, negatives=1024), batch, {"batch": {"index": torch.arange(256)}}),
    ]
    print("| loss | tensors | ms | over MSE |\n|---|---|---|---|")
    for loss, shape, options in table:
        student, teacher = torch.randn(shape).softmax(-1).requires_grad_(), torch.randn(shape).softmax(-1)
        own = seconds(functools.partial(loss, student, teacher, **options))
        mse = seconds(functools.partial(LF.mse, student, teacher))
        name = type(loss).__name__ + (" (distance)" if getattr(loss, "angle", 1) == 0 else "")
        print(f"| {name} | {' × '.join(map(str, shape))} | {1000 * own:.1f} | {own / mse:.1f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["one"]:
        kind, tokens, vocabulary, chunk = sys.argv[2:]
        chunked_or_dense(kind, int(tokens), int(vocabulary), None if chunk == "None" else int(chunk))
    else:
        wanted = sys.argv[1:] or ["chunked", "table"]
        for name in wanted:
            {"chunked": bench_chunked, "table": bench_table}[name]()
            print()
