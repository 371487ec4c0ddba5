"""Encodings against NumPy and SciPy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.special import log_softmax, logsumexp
from scipy.stats import entropy
from torch import Tensor

from softs_lightning.store import Exact, TopK
from softs_lightning.store.encoding import Encoding, encoding

SHAPE = (5, 7)


def values(scale: float = 3.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return scale * torch.randn(SHAPE, generator=torch.Generator().manual_seed(1), dtype=dtype)


def back(kept: Encoding, value: Tensor) -> Tensor:
    return kept.decode(kept.encode(value), tuple(value.shape))


def nbytes(kept: Encoding, value: Tensor) -> int:
    return sum(part.numel() * part.element_size() for part in kept.encode(value).values())


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool, torch.uint8],
)
def test_exact_keeps_every_bit_of_every_type(dtype: torch.dtype) -> None:
    value = values().to(dtype)
    assert torch.equal(back(Exact(), value), value)
    assert back(Exact(), value).dtype == dtype


def test_exact_keeps_nan_and_infinities() -> None:
    value = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    assert torch.equal(back(Exact(), value).view(torch.int32), value.view(torch.int32))


def test_fp16_rounds_as_numpy_does() -> None:
    np.testing.assert_array_equal(
        back(encoding("fp16"), values()).numpy(), values().numpy().astype(np.float16)
    )


def test_bf16_rounds_to_the_nearest_of_the_upper_halves() -> None:
    bits = values().numpy().view(np.uint32).astype(np.uint64)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # round half to even
    expected = (nearest << 16).astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(back(encoding("bf16"), values()).float().numpy(), expected)


def test_int8_divides_each_vector_by_its_own_scale() -> None:
    value = values().numpy().astype(np.float64)
    scale = np.abs(value).max(-1, keepdims=True) / 127
    np.testing.assert_allclose(
        back(encoding("int8"), values()).numpy(), np.round(value / scale) * scale, rtol=1e-6
    )


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16", "int8"])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_the_error_is_the_largest_difference_there_is(name: str, scale: float) -> None:
    kept, value = encoding(name), values(scale, torch.float64)
    measured = kept.error(value, back(kept, value))["max_abs"]
    difference = np.abs(back(kept, value).double().numpy() - value.numpy())
    assert measured == difference.max()
    assert measured > 0


@given(hnp.arrays(np.float32, (4, 6), elements=st.floats(-1e4, 1e4, width=32)))
def test_int8_errs_by_half_a_step_at_most(array: np.ndarray) -> None:
    value = torch.from_numpy(array)
    step = np.abs(array).max(-1, keepdims=True).astype(np.float64) / 127
    error = np.abs(back(encoding("int8"), value).numpy().astype(np.float64) - array)
    assert (error <= step / 2 * (1 + 1e-4) + 1e-37).all()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("fp16", torch.tensor([1e5]), "100000 is too large for fp16"),
        ("bf16", torch.tensor([1e300], dtype=torch.float64), "too large for bf16"),
        ("int8", torch.tensor([float("inf")]), "int8 cannot hold infinities"),
        ("int8", torch.tensor([float("nan")]), "int8 cannot hold infinities or NaN"),
        ("fp16", torch.tensor([1, 2]), "fp16 is for floating point activations, and this one is torch.int64"),
        ("top2-fp16", torch.randn(3, 2), "over more than 2 classes"),
        ("top2-fp16", torch.full((1, 4), float("nan")), "hold NaN"),
        ("top2-fp16", torch.full((1, 4), -float("inf")), "every class is impossible"),
    ],
)
def test_what_an_encoding_cannot_hold_is_refused(name: str, value: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        encoding(name).encode(value)


def test_infinities_that_were_there_pass_through_a_cast() -> None:
    value = torch.tensor([1.0, -float("inf")])
    assert torch.equal(back(encoding("fp16"), value).float(), value)
    assert encoding("fp16").error(value, back(encoding("fp16"), value)) == {"max_abs": 0.0}


@pytest.mark.parametrize("name", ["fp64", "top", "top0.5", "mass2-max3", "", "FP16"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="there is no encoding"):
        encoding(name)


@pytest.mark.parametrize(
    "name", ["exact", "fp32", "bf16", "fp16", "int8", "top64-fp16", "top3-fp32", "mass0.99-max64-fp16"]
)
def test_a_name_reads_back(name: str) -> None:
    assert encoding(name).name == name


# -- top-k -----------------------------------------------------------------------------------------


def logits(classes: int = 40, scale: float = 4.0) -> Tensor:
    return scale * torch.randn(6, classes, generator=torch.Generator().manual_seed(2))


def test_the_largest_log_probabilities_are_kept_and_the_rest_shares_the_rest() -> None:
    kept = TopK(5, values="fp32")
    expected = log_softmax(logits().double().numpy(), axis=-1)
    for row in expected:
        top = np.argsort(row)[-5:]
        rest = np.delete(row, top)
        row[np.setdiff1d(np.arange(40), top)] = logsumexp(rest) - np.log(35)
    np.testing.assert_allclose(back(kept, logits()).numpy(), expected, atol=2e-6)


def test_a_tail_that_one_minus_the_sum_would_lose_is_kept() -> None:
    value = torch.tensor([[0.0, -1.0, -60.0, -61.0]])
    tail = TopK(2, values="fp32").encode(value)["tail"].item()
    exact = logsumexp([-60.0, -61.0]) - logsumexp([0.0, -1.0, -60.0, -61.0])
    assert tail == pytest.approx(exact, rel=1e-6)
    assert 1 - np.exp(log_softmax(value.numpy(), -1)[0, :2]).sum() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("kept", [TopK(5), TopK(5, values="fp32"), TopK(20, mass=0.9, values="fp32")])
def test_what_is_read_is_a_distribution(kept: TopK) -> None:
    tolerance = 2e-3 if kept.values == "fp16" else 1e-5
    np.testing.assert_allclose(logsumexp(back(kept, logits()).numpy(), axis=-1), 0, atol=tolerance)


@pytest.mark.parametrize("kept", [TopK(1), TopK(8, values="fp32"), TopK(20, mass=0.8)])
def test_the_error_is_the_largest_divergence(kept: TopK) -> None:
    teacher = np.exp(log_softmax(logits().double().numpy(), axis=-1))
    ours = np.exp(back(kept, logits()).double().numpy())
    measured = kept.error(logits(), back(kept, logits()))["max_kl"]
    assert measured == pytest.approx(max(entropy(p, q) for p, q in zip(teacher, ours, strict=True)), rel=1e-3)


def test_more_classes_lose_less() -> None:
    lost = [TopK(k).error(logits(), back(TopK(k), logits()))["max_kl"] for k in (1, 4, 16, 39)]
    assert lost == sorted(lost, reverse=True)


@pytest.mark.parametrize("mass", [0.3, 0.9, 0.999])
def test_as_few_are_kept_as_hold_the_mass(mass: float) -> None:
    counts = TopK(39, mass=mass).encode(logits())["counts"].tolist()
    for count, row in zip(counts, np.exp(log_softmax(logits().double().numpy(), -1)), strict=True):
        held = np.cumsum(np.sort(row)[::-1])
        assert count == np.searchsorted(held, mass) + 1


def test_no_more_than_k_are_kept_for_any_mass() -> None:
    assert TopK(3, mass=0.999).encode(logits(scale=0.01))["counts"].tolist() == [3] * 6


def test_impossible_classes_stay_out_of_the_way() -> None:
    value = torch.tensor([[1.0, -float("inf"), 0.0, -float("inf"), -float("inf")]])
    read = back(TopK(3), value)
    assert torch.isfinite(read).all()
    np.testing.assert_allclose(read.exp()[0, [0, 2]].numpy(), np.exp(log_softmax([1.0, 0.0])), atol=1e-3)
    assert read.exp()[0, [1, 3, 4]].sum() == 0


@pytest.mark.parametrize(
    ("name", "expected"),
    [("exact", 4 * 400), ("fp16", 2 * 400), ("int8", 400 + 4), ("top64-fp16", 64 * 4 + 4)],
)
def test_bytes_a_token(name: str, expected: int) -> None:
    assert nbytes(encoding(name), torch.randn(10, 400)) == 10 * expected


def test_large_vocabularies_take_wider_class_numbers() -> None:
    value = torch.zeros(1, 70_000)
    value[0, 69_999] = 5.0
    assert back(TopK(2), value)[0].argmax() == 69_999


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "at least one class"),
        ({"k": 2, "mass": 1.0}, "between 0 and 1"),
        ({"k": 2, "values": "int8"}, "fp16 or fp32"),
    ],
)
def test_a_top_k_that_makes_no_sense_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TopK(**arguments)  # type: ignore[arg-type]
