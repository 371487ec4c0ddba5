"""Layers are chosen sensibly, and their similarity is that of an independent computation."""

from __future__ import annotations

from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from scipy.special import log_softmax
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertModel

from softs_lightning.likeness import Likeness, gram, layers, linear_cka
from softs_lightning.metrics import LinearCKA
from softs_lightning.report import Similarity
from tests import tiny


class Block(nn.Module):
    """A residual block with a shortcut that is a small Sequential."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.shortcut = nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x) + self.shortcut(x))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3)
        self.layer1 = nn.Sequential(Block(4), Block(4))
        self.layer2 = nn.Sequential(Block(4), Block(4))
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(4 * 36, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer2(self.layer1(self.stem(x))))


def bert() -> BertModel:
    config = BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8, vocab_size=20
    )
    return BertModel(config)


def test_blocks_stay_whole_and_what_holds_them_is_opened() -> None:
    assert layers(ResNet()) == ["stem", "layer1.0", "layer1.1", "layer2.0", "layer2.1", "head.2"]
    assert layers(bert()) == ["embeddings", "encoder.layer.0", "encoder.layer.1", "pooler"]
    assert layers(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Flatten())) == ["0", "1"]
    assert layers(tiny.Teacher()) == ["blocks.0", "blocks.1", "head", "tail"]


def centred_kernel_alignment(x: np.ndarray, y: np.ndarray) -> float:
    """CKA by features (Kornblith et al., equation 4), in numpy."""
    x, y = x - x.mean(0), y - y.mean(0)
    return float(np.linalg.norm(y.T @ x) ** 2 / (np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)))


def test_the_gram_matrix_gives_the_cka_of_the_features() -> None:
    x, y = torch.randn(30, 5), torch.randn(30, 7)
    y[:, :3] += x[:, :3]
    metric = LinearCKA()
    metric.update(x, y)
    found = linear_cka(gram(x), gram(y))
    assert found == pytest.approx(metric.compute().item(), rel=1e-10)
    assert found == pytest.approx(centred_kernel_alignment(x.double().numpy(), y.double().numpy()), rel=1e-10)
    assert np.isnan(linear_cka(gram(x), gram(torch.ones(30, 2))))


def by_hook(model: nn.Module, name: str, x: Tensor) -> np.ndarray:
    seen: list[Tensor] = []
    handle = model.get_submodule(name).register_forward_hook(lambda m, i, o: seen.append(o))
    with torch.no_grad():
        model(x)
    handle.remove()
    return seen[0].flatten(1).double().numpy()


def test_a_student_is_compared_layer_by_layer_on_the_validation_samples() -> None:
    teacher, student, data = tiny.Teacher(), tiny.Student(), tiny.Data()
    likeness = Likeness(teacher, data, seed=5, logits=True, samples=30)
    assert likeness.add("alone", student.train()) == 2 * (8 * 4 + 4 * 3)
    assert likeness.flops == 2 * (2 * 8 * 8 + 8 * 3 + 3 * 3)
    found = likeness.found
    assert (found.samples, found.part, found.seed, dict(found.missing)) == (30, "validation", 5, {})
    x = tiny.samples(40, 1).tensors[0]
    assert found.teacher == ("blocks.0", "blocks.1", "head", "tail")
    assert found.students["alone"].layers == ("net.0", "net.1", "net.2")
    for row, theirs in zip(found.students["alone"].cka, found.teacher, strict=True):
        for value, ours in zip(row, found.students["alone"].layers, strict=True):
            expected = centred_kernel_alignment(
                by_hook(student, ours, x)[:30], by_hook(teacher, theirs, x)[:30]
            )
            assert value == pytest.approx(expected, rel=1e-5)


def test_outputs_are_compared_as_scores_where_they_are_scores() -> None:
    teacher, student = tiny.Teacher(), tiny.Student()
    likeness = Likeness(teacher, tiny.Data(), logits=True)
    likeness.add("alone", student)
    x = tiny.samples(40, 1).tensors[0]
    with torch.no_grad():
        ours, theirs = student(x).double().numpy(), teacher(x).double().numpy()
    p, q = log_softmax(theirs, 1), log_softmax(ours, 1)
    cosine = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    assert likeness.found.agreement["alone"] == pytest.approx(
        {
            "agreement": (ours.argmax(1) == theirs.argmax(1)).mean(),
            "kl": (np.exp(p) * (p - q)).sum(1).mean(),
            "cosine": cosine.mean(),
        },
        rel=1e-5,
    )
    plain = Likeness(teacher, tiny.Data())
    plain.add("alone", student)
    assert set(plain.found.agreement["alone"]) == {"cosine"}


class Tokens(L.LightningDataModule):
    """Batches of different lengths, padded: only a test part."""

    def test_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(0)
        batches = []
        for length in (4, 6):
            mask = torch.ones(5, length, dtype=torch.long)
            mask[2:, 3:] = 0
            ids = torch.randint(1, 20, (5, length), generator=generator)
            batches.append({"input_ids": ids, "attention_mask": mask, "labels": ids})
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


class Encoder(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = bert()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return self.encoder(input_ids=input_ids, attention_mask=attention_mask)


def test_sequences_are_the_mean_over_their_tokens_that_count() -> None:
    torch.manual_seed(0)
    teacher, student = bert().eval(), Encoder()
    likeness = Likeness(teacher, Tokens())
    likeness.add("distilled", student)
    found = likeness.found
    assert (found.samples, found.part, dict(found.missing)) == (10, "test", {})
    at = (
        found.teacher.index("encoder.layer.1"),
        found.students["distilled"].layers.index("encoder.encoder.layer.0"),
    )
    sides: list[list[np.ndarray]] = [[], []]
    for batch in Tokens().test_dataloader():
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        with torch.no_grad():
            theirs = teacher(**inputs, output_hidden_states=True).hidden_states[2]
            ours = student.eval().encoder(**inputs, output_hidden_states=True).hidden_states[1]
        for side, hidden in zip(sides, (ours, theirs), strict=True):
            side += [
                h[m.bool()].mean(0).numpy() for h, m in zip(hidden, batch["attention_mask"], strict=True)
            ]
    expected = centred_kernel_alignment(*(np.stack(side).astype("float64") for side in sides))
    assert found.students["distilled"].cka[at[0]][at[1]] == pytest.approx(expected, rel=1e-4)


class NoForward(tiny.Student):
    forward = L.LightningModule.forward  # type: ignore[assignment]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("never reaches a loop", self.net(batch[0]).sum())


def test_a_student_without_a_forward_does_its_validation_step() -> None:
    likeness = Likeness(tiny.Teacher(), tiny.Data())
    student = NoForward()
    likeness.add("alone", student)
    assert dict(likeness.found.missing) == {}
    assert likeness.found.students["alone"].layers == ("net.0", "net.1", "net.2")
    assert "log" not in student.__dict__


class Other(tiny.Student):
    def forward(self, x: Tensor, missing: Tensor) -> Tensor:  # type: ignore[override]
        return self.net(x) + missing


def test_what_cannot_be_measured_is_said_and_stops_nothing() -> None:
    likeness = Likeness(tiny.Teacher(), tiny.Data())
    assert likeness.add("odd", Other()) is None
    (said,) = likeness.found.reasons()
    assert said.startswith("Not measured: student odd: TypeError: ")
    likeness.add("alone", tiny.Student())
    assert list(likeness.found.students) == ["alone"]
    nothing = Likeness(tiny.Teacher(), L.LightningDataModule())
    assert nothing.add("alone", tiny.Student()) is None
    assert list(nothing.found.reasons()) == [
        "Not measured: layers and outputs: LightningDataModule gives neither validation nor test samples."
    ]


def test_a_model_without_layers_to_see_is_named() -> None:
    likeness = Likeness(tiny.Teacher(), tiny.Data())
    likeness.add("bare", nn.Identity())
    (said,) = likeness.found.reasons()
    assert said.startswith("Not measured: the layers of student bare: none of them gave a tensor")
    assert likeness.found.agreement["bare"] == {}  # eight numbers beside three scores


class Shared(nn.Module):
    """One layer that runs three times."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(self.layer(x)))


def test_each_call_of_a_shared_layer_is_a_layer() -> None:
    assert Likeness(Shared(), tiny.Data()).found.teacher == ("layer!0", "layer!1", "layer!2")


class Pictures(Dataset[Tensor]):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((1, 8, 8), float(index)) + torch.arange(64.0).reshape(1, 8, 8).sin() * index**2


def test_maps_of_any_size_are_compared_and_drawing_numbers_changes_nothing() -> None:
    class Data(L.LightningDataModule):
        def val_dataloader(self) -> Any:
            return DataLoader(Pictures(), batch_size=4, shuffle=True)

    torch.manual_seed(3)
    before = torch.get_rng_state()
    likeness = Likeness(ResNet().eval(), Data())
    likeness.add("alone", ResNet())
    torch.manual_seed(3)
    assert torch.equal(torch.get_rng_state(), before)
    values = np.array(likeness.found.students["alone"].cka)
    assert values.shape == (6, 6)
    assert ((values > 0) & (values <= 1 + 1e-9)).all()


def test_similarity_comes_back_from_its_file() -> None:
    likeness = Likeness(tiny.Teacher(), tiny.Data(), logits=True)
    likeness.add("alone", tiny.Student())
    assert Similarity.from_json(likeness.found.to_json()) == likeness.found
