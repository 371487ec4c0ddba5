"""Fidelity metrics against formulas on all rows at once."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import entropy
from sklearn.metrics import accuracy_score
from torch import Tensor

from softs_lightning.metrics import FIDELITY, Cosine, LinearCKA, TeacherKL, TopOneAgreement, row_count, rows


def pairs(classes: int = 5) -> list[tuple[Tensor, Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (
            torch.randn(n, 3, classes, generator=generator),
            torch.randn(n, 3, classes, generator=generator),
            torch.rand(n, 3, generator=generator) > 0.3,
        )
        for n in (4, 2, 5)
    ]


def all_rows(masked: bool) -> tuple[Tensor, Tensor]:
    kept = [(s[m], t[m]) if masked else (s.flatten(0, 1), t.flatten(0, 1)) for s, t, m in pairs()]
    return torch.cat([s for s, _ in kept]).double(), torch.cat([t for _, t in kept]).double()


def reference(name: str, s: Tensor, t: Tensor) -> float:
    if name == "agreement":
        return float(accuracy_score(t.argmax(-1), s.argmax(-1)))
    if name == "kl":
        return float(entropy(t.softmax(-1), s.softmax(-1), axis=-1).mean())
    if name == "cosine":
        return float(((s * t).sum(-1) / s.norm(dim=-1) / t.norm(dim=-1)).mean())
    s, t = s - s.mean(0), t - t.mean(0)
    k, m = s @ s.T, t @ t.T
    return float((k * m).sum() / (k.norm() * m.norm()))


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", ["agreement", "kl", "cosine", "cka"])
def test_metrics_add_up_over_batches(name: str, masked: bool) -> None:
    metric = FIDELITY[name]()
    for s, t, m in pairs():
        metric.update(s, t, m if masked else None)
    assert metric.compute().item() == pytest.approx(reference(name, *all_rows(masked)), abs=1e-12)
    metric.reset()
    s, t, _ = pairs()[0]
    metric.update(s, t)
    expected = reference(name, s.flatten(0, 1).double(), t.flatten(0, 1).double())
    assert metric.compute().item() == pytest.approx(expected, abs=1e-12)


def test_cka_compares_unlike_widths_and_ignores_rotation() -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    wide = torch.randn(40, 9, generator=generator, dtype=torch.float64)
    metric = LinearCKA()
    metric.update(x, wide)
    assert metric.compute().item() == pytest.approx(reference("cka", x, wide), abs=1e-12)
    turned = LinearCKA()
    turned.update(x, x @ torch.linalg.qr(wide[:6, :6])[0])
    assert turned.compute().item() == pytest.approx(1.0, abs=1e-12)


def test_feature_maps_have_channels_as_features() -> None:
    maps = torch.randn(2, 3, 4, 5)
    assert torch.equal(rows(maps), maps.permute(0, 2, 3, 1).reshape(40, 3).double())
    assert row_count(maps) == 40
    assert row_count(torch.ones(2, 7, 3)) == 14


def test_kl_of_impossible_classes_is_finite() -> None:
    metric = TeacherKL()
    metric.update(torch.tensor([[0.0, 0.0, -torch.inf]]), torch.tensor([[0.0, 0.0, -torch.inf]]))
    assert metric.compute().item() == pytest.approx(0.0, abs=1e-12)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="TopOneAgreement compares equal shapes"):
        TopOneAgreement().update(torch.ones(2, 3), torch.ones(2, 4))
    with pytest.raises(ValueError, match="the same rows, got 2 of the student and 3 of the teacher"):
        LinearCKA().update(torch.ones(2, 3), torch.ones(3, 3))
    with pytest.raises(ValueError, match="one entry for each row"):
        Cosine().update(torch.ones(2, 3), torch.ones(2, 3), torch.ones(3))
