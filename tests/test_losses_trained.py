"""Losses with parameters and memories: against torch's and scipy's own, and that they learn and remember."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import rel_entr, softmax
from scipy.stats import multivariate_normal
from torch import Tensor, nn

from softs_lightning import losses
from softs_lightning.losses import functional as LF


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_gaussian_nll_equals_scipys_density_up_to_the_constant() -> None:
    mean, target = draw(4, 3).double(), draw(4, 3, seed=1).double()
    variance = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64)
    density = [multivariate_normal(m, variance.numpy()).logpdf(t) for m, t in zip(mean, target, strict=True)]
    expected = -np.mean(density) / 3 - np.log(2 * np.pi) / 2
    assert LF.gaussian_nll(mean, target, variance).item() == pytest.approx(expected, rel=1e-12)


def test_vid_starts_at_its_variance_and_has_one_a_channel() -> None:
    loss = losses.VID(4, 6, init_variance=5.0)
    variance = nn.functional.softplus(loss.raw_variance) + loss.eps
    torch.testing.assert_close(variance, torch.full((6,), 5.0))


def test_vid_on_maps_is_vid_on_their_positions() -> None:
    torch.manual_seed(0)
    loss = losses.VID(4, 6, channel_dim=1)
    student, teacher = draw(2, 4, 3, 3), draw(2, 6, 3, 3, seed=1)
    on_maps = loss(student, teacher)
    loss.channel_dim = -1
    torch.testing.assert_close(on_maps, loss(student.movedim(1, -1), teacher.movedim(1, -1)))


def test_hcl_equals_the_weighted_sum_of_pooled_errors() -> None:
    student, teacher = draw(2, 3, 8, 8).double(), draw(2, 3, 8, 8, seed=1).double()
    total, weights = 0.0, 0.0
    for size, weight in ((8, 1.0), (4, 0.5), (2, 0.25), (1, 0.125)):
        s, t = (
            x.numpy().reshape(2, 3, size, 8 // size, size, 8 // size).mean((3, 5)) for x in (student, teacher)
        )
        total, weights = total + weight * ((s - t) ** 2).mean(), weights + weight
    loss = LF.hierarchical_context(student, teacher)
    assert loss.item() == pytest.approx(total / weights, rel=1e-12)


def test_log_sum_is_the_logarithm_of_the_mean_power() -> None:
    student, teacher = draw(4, 5).double(), draw(4, 5, seed=1).double()
    expected = np.log(np.mean(np.abs((student - teacher).numpy()) ** 4) + 1e-6)
    assert LF.log_sum(student, teacher).item() == pytest.approx(expected, rel=1e-12)


def test_mgd_rebuilds_from_the_positions_that_are_kept() -> None:
    torch.manual_seed(0)
    loss = losses.MGD(3, 3, ratio=0.5)
    student, teacher = draw(2, 3, 6, 6), draw(2, 3, 6, 6, seed=1)
    torch.manual_seed(1)
    result = loss(student, teacher)
    torch.manual_seed(1)
    kept = torch.rand(2, 1, 6, 6) >= 0.5
    torch.testing.assert_close(result, nn.functional.mse_loss(loss.generator(student * kept), teacher))


def test_reviewkd_of_one_stage_is_a_projection_under_hcl() -> None:
    torch.manual_seed(0)
    loss = losses.ReviewKD([4], [6], hidden=8)
    student, teacher = draw(2, 4, 8, 8), draw(2, 6, 8, 8, seed=1)
    only = loss.fusions[0]
    assert isinstance(only.reduce, nn.Module)
    assert isinstance(only.build, nn.Module)
    expected = LF.hierarchical_context(only.build(only.reduce(student)), teacher)
    torch.testing.assert_close(loss([student], [teacher]), expected)


def test_reviewkd_reviews_the_deeper_stages() -> None:
    torch.manual_seed(0)
    loss = losses.ReviewKD([4, 4], [6, 6], hidden=8).eval()
    student = [draw(2, 4, 8, 8).requires_grad_(), draw(2, 4, 4, 4, seed=1).requires_grad_()]
    teacher = [draw(2, 6, 8, 8, seed=2), draw(2, 6, 4, 4, seed=3)]
    shallow, _ = loss.fusions[0](student[0], loss.fusions[1](student[1], None, (4, 4))[1], (8, 8))
    grads = torch.autograd.grad(LF.hierarchical_context(shallow, teacher[0]), student)
    assert all(bool(grad.any()) for grad in grads)


TRAINED: list[tuple[Callable[[], nn.Module], tuple[Any, Any], dict[str, Any]]] = [
    (lambda: losses.VID(4, 6), (draw(8, 4), draw(8, 6, seed=1)), {}),
    (lambda: losses.SRD(4, 6), (draw(8, 4), draw(8, 6, seed=1)), {}),
    (lambda: losses.MGD(4, 6), (draw(2, 4, 6, 6), draw(2, 6, 6, 6, seed=1)), {}),
    (lambda: losses.ReviewKD([4], [6], hidden=8), ([draw(2, 4, 6, 6)], [draw(2, 6, 6, 6, seed=1)]), {}),
    (
        lambda: losses.CRD(4, 6, samples=8, dim=5, negatives=4),
        (draw(8, 4), draw(8, 6, seed=1)),
        {"batch": {"index": torch.arange(8)}},
    ),
]


@pytest.mark.parametrize(("make", "inputs", "batch"), TRAINED)
def test_every_parameter_of_its_own_is_trained(
    make: Callable[[], nn.Module], inputs: tuple[Any, Any], batch: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    loss = make()
    before = {name: value.detach().clone() for name, value in loss.named_parameters()}
    optimizer = torch.optim.SGD(loss.parameters(), lr=0.05)
    first = loss(*inputs, **batch)
    first.backward()
    optimizer.step()
    assert all(not torch.equal(value, before[name]) for name, value in loss.named_parameters())


@pytest.mark.parametrize(("make", "inputs", "batch"), TRAINED)
def test_a_loss_held_in_bfloat16_still_compares_in_float32(
    make: Callable[[], nn.Module], inputs: tuple[Any, Any], batch: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    loss = make().to(torch.bfloat16)
    assert loss(*inputs, **batch).dtype == torch.float32


def test_crd_equals_a_loop_over_its_pairs() -> None:
    torch.manual_seed(0)
    loss = losses.CRD(4, 6, samples=10, dim=5, negatives=7, temperature=0.1).double().eval()
    student, teacher, index = draw(3, 4).double(), draw(3, 6, seed=1).double(), torch.tensor([2, 5, 9])
    torch.manual_seed(3)
    others = loss._draw(index)
    torch.manual_seed(3)
    result = loss(student, teacher, batch={"index": index})
    ones, twos = (
        nn.functional.normalize(embed(x)).detach().numpy()
        for embed, x in ((loss.student_embed, student), (loss.teacher_embed, teacher))
    )
    total = 0.0
    for embedding, memory in ((ones, loss.teacher_memory.numpy()), (twos, loss.student_memory.numpy())):
        scores = np.exp(
            [[e @ memory[j] / 0.1 for j in (i, *o)] for e, i, o in zip(embedding, index, others, strict=True)]
        )
        p = scores / (scores.mean() * 10)
        noise = 7 / 10
        total -= np.log(p[:, 0] / (p[:, 0] + noise)).sum() + np.log(noise / (p[:, 1:] + noise)).sum()
    assert result.item() == pytest.approx(total / 3, rel=1e-10)


def test_crd_draws_every_unlike_sample_and_no_other() -> None:
    labels = torch.tensor([2, 0, 1, 0, 2, 1, 0, 3])
    loss = losses.CRD(4, 6, samples=8, dim=5, negatives=2000, labels=labels)
    torch.manual_seed(0)
    drawn = loss._draw(torch.arange(8))
    for sample in range(8):
        expected = torch.nonzero(labels != labels[sample]).flatten().tolist()
        assert sorted(set(drawn[sample].tolist())) == expected
        # Uniformly: the rarest of them within a fifth of its share.
        assert drawn[sample].bincount().max() < 1.2 * 2000 / len(expected)
    alone = losses.CRD(4, 6, samples=8, dim=5, negatives=500)._draw(torch.arange(8))
    assert all(sorted(set(alone[i].tolist())) == [j for j in range(8) if j != i] for i in range(8))


def test_crd_remembers_in_training_only_and_across_a_checkpoint() -> None:
    torch.manual_seed(0)
    loss = losses.CRD(4, 6, samples=8, dim=5, negatives=4, momentum=0.5)
    student, teacher, batch = draw(2, 4), draw(2, 6, seed=1), {"index": torch.tensor([1, 6])}
    before = loss.student_memory.clone()
    embedding = nn.functional.normalize(loss.student_embed(student)).detach()
    loss.eval()(student, teacher, batch=batch)
    assert torch.equal(loss.student_memory, before)
    loss.train()(student, teacher, batch=batch)
    expected = before.clone()
    expected[batch["index"]] = nn.functional.normalize(0.5 * before[batch["index"]] + 0.5 * embedding)
    torch.testing.assert_close(loss.student_memory, expected)
    again = losses.CRD(4, 6, samples=8, dim=5, negatives=4)
    again.load_state_dict(loss.state_dict())
    torch.manual_seed(1)
    one = loss(student, teacher, batch=batch)
    torch.manual_seed(1)
    assert torch.equal(again(student, teacher, batch=batch), one)


def test_queue_kl_compares_with_what_was_pushed_and_no_more() -> None:
    loss = losses.QueueKL(4, size=5, student_temperature=0.2, teacher_temperature=0.1)
    batches = [(draw(3, 4, seed=s).double(), draw(3, 4, seed=s + 10).double()) for s in range(3)]
    queue = np.zeros((0, 4))
    for student, teacher in batches:
        s, t = (nn.functional.normalize(x).numpy() for x in (student, teacher))
        keys = np.concatenate([t, queue])
        p, q = softmax(s @ keys.T / 0.2, -1), softmax(t @ keys.T / 0.1, -1)
        # The queue itself is held in float32.
        assert loss(student, teacher).item() == pytest.approx(rel_entr(q, p).sum(-1).mean(), rel=1e-6)
        queue = np.concatenate([t, queue])[:5]
    torch.testing.assert_close(loss.queue, torch.tensor(queue, dtype=torch.float32))
    before = loss.queue.clone()
    loss.eval()(*batches[0])
    assert torch.equal(loss.queue, before)


def test_what_is_masked_is_not_remembered() -> None:
    torch.manual_seed(0)
    crd, queue = losses.CRD(4, 4, samples=6, dim=3, negatives=2), losses.QueueKL(4, 8)
    before = crd.teacher_memory.clone()
    student, teacher = draw(3, 4), draw(3, 4, seed=1)
    mask = torch.tensor([1, 0, 1])
    crd(student, teacher, batch={"index": torch.tensor([5, 2, 0])}, mask=mask)
    changed = (crd.teacher_memory != before).any(1)
    assert changed.nonzero().flatten().tolist() == [0, 5]
    queue(student, teacher, mask=mask)
    assert queue.filled == 2
    torch.testing.assert_close(queue.queue[:2], nn.functional.normalize(teacher[[0, 2]]))
    assert not queue.queue[2:].any()


def test_nothing_is_remembered_of_a_batch_in_which_nothing_counts() -> None:
    crd, queue = losses.CRD(4, 4, samples=6, dim=3, negatives=2), losses.QueueKL(4, 8)
    before = crd.teacher_memory.clone()
    none = torch.zeros(3)
    crd(draw(3, 4), draw(3, 4), batch={"index": torch.arange(3)}, mask=none)
    queue(draw(3, 4), draw(3, 4), mask=none)
    assert torch.equal(crd.teacher_memory, before)
    assert crd.log_constants.isnan().all()  # estimated from the first batch in which something counts
    assert queue.filled == 0


def test_whitened_embeddings_have_unit_covariance() -> None:
    embeddings = draw(200, 6).double() @ draw(6, 6, seed=1).double() + 5
    loss = losses.WhitenedCosine.fit(embeddings, dim=4)
    white = loss.whiten(embeddings)
    np.testing.assert_allclose(np.cov(white.numpy().T), np.eye(4), atol=1e-12)
    np.testing.assert_allclose(white.mean(0).numpy(), 0, atol=1e-12)
    student = draw(200, 4, seed=2).double()
    torch.testing.assert_close(loss(student, embeddings), LF.cosine_distance(student, white))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: losses.VID(0, 4), "student_features must be 1 at least"),
        (lambda: losses.VID(4, 4, init_variance=1e-6), "init_variance must be above eps"),
        (lambda: losses.VID(4, 6)(draw(2, 5), draw(2, 6)), "VID's student product must have 4 features"),
        (lambda: losses.VID(4, 6)(draw(2, 4), draw(2, 7)), "VID's teacher product must have 6 features"),
        (lambda: losses.SRD(4, 6)(draw(2, 5), draw(2, 6)), "SRD's student product must have 4 features"),
        (lambda: losses.MGD(4, 6)(draw(1, 5, 4, 4), draw(1, 6, 4, 4)), "MGD's student product"),
        (lambda: losses.ReviewKD([4], [4])([draw(1, 5, 4, 4)], [draw(1, 4, 4, 4)]), "student map of stage 0"),
        (
            lambda: losses.CRD(4, 4, samples=3)(draw(2, 5), draw(2, 4), batch={"index": torch.arange(2)}),
            "CRD's student product must have 4 features",
        ),
        (lambda: losses.SRD(4, 4, exponent=0), "exponent"),
        (lambda: losses.MGD(4, 4, ratio=1.0), r"ratio must lie in \[0, 1\)"),
        (lambda: losses.MGD(4, 4)(draw(1, 4, 4, 4), draw(1, 4, 2, 2)), "maps of one batch and size"),
        (lambda: losses.ReviewKD([4], [4, 8]), "as many stages a side"),
        (lambda: losses.ReviewKD([4], [4])([], []), "1 maps a side"),
        (lambda: losses.CRD(4, 4, samples=1), "samples must be 2"),
        (lambda: losses.CRD(4, 4, samples=3, labels=torch.zeros(3)), "two at least"),
        (lambda: losses.CRD(4, 4, samples=3, momentum=1.0), "momentum"),
        (
            lambda: losses.CRD(4, 4, samples=3)(draw(2, 4), draw(2, 4), batch={"index": torch.zeros(3)}),
            "index",
        ),
        (lambda: losses.QueueKL(4)(draw(2, 4), draw(2, 5)), "QueueKL compares embeddings"),
        (lambda: losses.QueueKL(0), "QueueKL's features"),
        (lambda: losses.WhitenedCosine.fit(draw(3, 6)), "6 components, 3 samples span 2"),
        (lambda: losses.WhitenedCosine(torch.zeros(3), torch.zeros(4, 2)), "matrix"),
    ],
)
def test_bad_input_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()
