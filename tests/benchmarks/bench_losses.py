"""What the losses cost: ``python tests/benchmarks/bench_losses.py [chunked] [table]`` prints Markdown.

``chunked``: peak extra memory and CPU time of a forward and backward of the chunked KL over the dense one,
each in a process of its own, on one thread (N = 2,048 tokens, student width 256, teacher 512, float32), and
of the chunked one at several N. ``table``: time of every loss over MSE on the same tensors.
"""

from __future__ import annotations

import functools
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from softs_lightning import losses
from softs_lightning.losses import functional as LF

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
    command = [sys.executable, __file__, "one", *map(str, arguments)]
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
    print("\n| V | N | chunked MiB | of these, gradient of the hidden states |\n|---|---|---|---|")
    for tokens in (512, 2048, 8192):
        extra = in_a_process("chunked", tokens, 50_257, "None")["extra"]
        print(f"| 50,257 | {tokens:,} | {extra:,.0f} | {tokens * WIDTHS[0] * 4 / 2**20:.1f} |")


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
