"""The container that trains with the student and stays out of its state_dict."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from softs_lightning.auxiliary import CONTAINER, Auxiliary, weights


def student() -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    Auxiliary.put(module, "distill", nn.Linear(2, 3))
    return module


def test_hidden_from_the_state_dict_but_not_from_parameters() -> None:
    module = student()
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    assert module.state_dict().keys() == plain.state_dict().keys()
    assert f"{CONTAINER}.distill_.weight" in dict(module.named_parameters())
    outer = nn.ModuleDict({"inner": module})
    assert all(CONTAINER not in name for name in outer.state_dict())


def test_loads_strictly_alone_nested_and_averaged() -> None:
    module = student()
    module.load_state_dict(copy.deepcopy(module.state_dict()), strict=True)
    outer = nn.ModuleDict({"inner": module})
    outer.load_state_dict(outer.state_dict(), strict=True)
    averaged = AveragedModel(module)
    averaged.load_state_dict(averaged.state_dict(), strict=True)


def test_strictness_stays_for_the_students_own_names() -> None:
    module = student()
    state = module.state_dict()
    del state["0.weight"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "0.weight"'):
        module.load_state_dict(state, strict=True)


def test_removed_with_the_last_entry() -> None:
    module = student()
    Auxiliary.put(module, "other", nn.Linear(1, 1))
    Auxiliary.remove(module, "distill")
    assert list(getattr(module, CONTAINER)) == ["other_"]
    Auxiliary.remove(module, "other")
    Auxiliary.remove(module, "other")
    assert not hasattr(module, CONTAINER)


def test_an_attribute_of_the_users_is_not_taken() -> None:
    module = nn.Linear(1, 1)
    setattr(module, CONTAINER, "mine")
    with pytest.raises(AttributeError, match="rename it"):
        Auxiliary.put(module, "distill", nn.Linear(1, 1))


def test_weights_are_copies() -> None:
    layer = nn.Linear(1, 1)
    kept = weights(layer)
    with torch.no_grad():
        layer.weight += 1
    assert not torch.equal(kept["weight"], layer.weight)
