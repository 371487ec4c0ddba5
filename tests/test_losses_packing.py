"""Packed documents, ignored labels, the one shift: a row of documents scores as each of them alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softs_lightning import losses
from softs_lightning.losses import functional as LF

WIDTH, VOCABULARY, LENGTHS = 6, 11, (4, 1, 5, 3)
HEADS: dict[str, Any] = {"student_head": "0", "teacher_head": "0", "chunk_size": 3}


def documents() -> list[dict[str, Tensor]]:
    """Of unlike lengths, one of a single token; some labels are ignored, as those of prompts."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for number, length in enumerate(LENGTHS):
        labels = torch.randint(VOCABULARY, (1, length), generator=generator)
        labels[0, : length // 3] = -100
        states = torch.randn(2, 1, length, WIDTH, generator=generator, dtype=torch.float64)
        segments = torch.full((1, length), number)
        found.append({"student": states[0], "teacher": states[1], "labels": labels, "segments": segments})
    return found


def packed(padding: int) -> dict[str, Tensor]:
    """All documents in one row, padding behind them."""
    row = {name: torch.cat([document[name] for document in documents()], 1) for name in documents()[0]}
    for name, fill in (("student", torch.nan), ("teacher", torch.nan), ("labels", -100), ("segments", -1)):
        shape = [1, padding, *row[name].shape[2:]]
        row[name] = torch.cat([row[name], torch.full(shape, fill, dtype=row[name].dtype)], 1)
    return row


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, VOCABULARY)).double()


ON_LOGITS: dict[str, nn.Module] = {
    "kl": losses.KLDivergence(2.0),
    "jsd": losses.GeneralizedJSD(0.3),
    "skewed": losses.SkewedKL(),
    "total variation": losses.TotalVariation(),
    "top k": losses.TopKKL(3),
    "uld": losses.ULD(),
    "ce kl": losses.CEKL(0.3, 2.0, shift=True, segments="segments"),
}
ON_STATES: dict[str, Any] = {
    "linear kl": losses.LinearKL(2.0, **HEADS),
    "linear jsd": losses.LinearJSD(0.3, **HEADS),
    "linear ce kl": losses.LinearCEKL(0.3, 2.0, segments=lambda batch: batch["segments"], **HEADS),
}


def score(name: str, row: dict[str, Tensor], segments: bool) -> tuple[Tensor, Tensor]:
    """The loss of a row, and how many predictions it is the mean of."""
    student, teacher = model(0), model(1)
    mask = LF.prediction_mask(row["labels"], segments=row["segments"] if segments else None)
    values = row["student"], row["teacher"]
    if name in ON_STATES:
        loss = ON_STATES[name]
        loss.bind(student, teacher)
    else:
        loss, values = ON_LOGITS[name], (student(values[0]), teacher(values[1]))
    extras: dict[str, Any] = {"batch": row} if name.endswith("ce kl") or name == "ce kl" else {"mask": mask}
    return loss(*values, **extras), mask.sum()


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("name", [*ON_LOGITS, *ON_STATES])
def test_a_packed_row_scores_as_its_documents_alone(name: str, padding: int) -> None:
    value, count = score(name, packed(padding), segments=True)
    alone = [score(name, document, segments=False) for document in documents()]
    assert count == sum(number for _, number in alone)
    expected = torch.stack([loss * number for loss, number in alone]).sum() / count
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("make", [losses.CEKL, losses.LinearCEKL])
def test_without_segments_the_ends_are_predicted_across(make: Any) -> None:
    options = HEADS if make is losses.LinearCEKL else {}
    results = []
    for segments in ("segments", None):
        loss = make(1.0, shift=True, segments=segments, **options)
        row = packed(0)
        values: tuple[Tensor, ...] = (row["student"], row["teacher"])
        if options:
            loss.bind(model(0), model(1))
        else:
            values = model(0)(values[0]), model(1)(values[1])
        results.append(loss(*values, batch=row).item())
    assert abs(results[0] - results[1]) > 1e-3


def test_labels_shifted_before_are_not_shifted_again() -> None:
    row = packed(2)
    shifted = {"labels": LF.next_labels(row["labels"], segments=row["segments"])}
    logits = model(0)(row["student"].nan_to_num()), model(1)(row["teacher"].nan_to_num())
    here = losses.CEKL(shift=True, segments="segments")(*logits, batch=row)
    before = losses.CEKL()(*logits, batch=shifted)
    torch.testing.assert_close(here, before, rtol=1e-12, atol=0)


@pytest.mark.parametrize("make", [losses.CEKL, losses.LinearCEKL])
def test_segments_without_a_shift_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=rf"{make.__name__}'s segments keep the shift from crossing"):
        make(shift=False, segments="segments")


def test_segments_that_do_not_fit_are_refused() -> None:
    row = {**packed(0), "segments": torch.zeros(1, 3)}
    with pytest.raises(ValueError, match=r"labels are .* and segments alike"):
        losses.CEKL(shift=True, segments="segments")(row["student"], row["teacher"], batch=row)
