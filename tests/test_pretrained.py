"""Pretrained teachers: with their weights, and by their shape alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf

from softs_lightning import Pretrained, from_teacher
from softs_lightning.pretrained import KNOWN, without_weights
from tests.architectures import built


@pytest.fixture
def folder(tmp_path: Path) -> str:
    built("roberta").save_pretrained(tmp_path)
    return str(tmp_path)


def test_a_folder_is_loaded_as_the_class_that_its_config_names(folder: str) -> None:
    model = Pretrained(folder)()
    assert type(model).__name__ == "RobertaForMaskedLM"
    assert not model.training
    expected = built("roberta").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert type(Pretrained(folder, model="AutoModelForMaskedLM").untrained()).__name__ == "RobertaForMaskedLM"


def test_without_weights_the_shape_is_the_same_and_nothing_is_read(folder: str) -> None:
    (Path(folder) / "model.safetensors").unlink()
    teacher = Pretrained(folder, attn_implementation="eager")
    with without_weights():
        model = teacher()
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in built("roberta").named_parameters()
    }
    assert model.config._attn_implementation == "eager"
    with pytest.raises(FileNotFoundError, match="neither a folder with a model nor a name"):
        teacher()


# Published sizes, in millions of parameters.
SIZES = {
    "bert-base-uncased": 109.5, "bert-large-uncased": 335.2, "roberta-base": 124.7, "roberta-large": 355.4,
    "distilbert-base-uncased": 67.0, "sentence-transformers/stsb-roberta-base-v2": 124.6, "gpt2": 124.4, "gpt2-medium": 354.8, "gpt2-large": 774.0, "gpt2-xl": 1557.6,
    "sentence-transformers/all-MiniLM-L6-v2": 22.7, "sentence-transformers/all-MiniLM-L12-v2": 33.4,
    "sentence-transformers/all-mpnet-base-v2": 109.5, "HuggingFaceTB/SmolLM2-135M-Instruct": 134.5,
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_known_names_have_their_published_sizes(name: str) -> None:
    with torch.device("meta"):
        model = Pretrained(name).untrained()
    assert round(sum(p.numel() for p in model.parameters()) / 1e6, 1) == SIZES[name]


def test_what_is_not_known_is_said_with_the_nearest_names() -> None:
    with pytest.raises(ValueError, match=r"'bert-base' is not known here.*Did you mean .*bert-base-uncased"):
        Pretrained("bert-base").untrained()
    with pytest.raises(ValueError, match="no model class 'BertModle'"):
        Pretrained("bert-base-uncased", model="BertModle")
    with pytest.raises(ValueError, match="model_type"):
        Pretrained("mine", config={"hidden_size": 4})
    with pytest.raises(ValueError, match="a folder or a model's name"):
        Pretrained(" ")


def test_the_group_cuts_a_student_from_a_node_or_a_folder(folder: str) -> None:
    import softs_lightning.conf

    group = OmegaConf.load(Path(softs_lightning.conf.__file__).parent / "student" / "from_teacher.yaml")
    by_folder = instantiate(OmegaConf.merge(group, {"teacher": folder, "layers": [0, 2]}))
    node = {"_target_": "softs_lightning.Pretrained", "name": folder}
    by_node = instantiate(OmegaConf.merge(group, {"teacher": node, "layers": [0, 2]}))
    expected = from_teacher(built("roberta"), layers=[0, 2]).state_dict()
    for student in (by_folder, by_node):
        assert all(torch.equal(value, expected[name]) for name, value in student.state_dict().items())
