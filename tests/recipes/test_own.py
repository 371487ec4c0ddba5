"""A user's own recipe, and recipes inside a user's own Hydra app."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from softs_lightning.report import Result
from tests.recipes.command import forked, run_folder, softs_distill

pytestmark = pytest.mark.slow

MODULES = '''
import lightning as L, torch
from torch import nn

class Data(L.LightningDataModule):
    def train_dataloader(self):
        x = torch.rand(32, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(list(zip(x, x.sum(1, keepdim=True))), batch_size=8)

class Net(L.LightningModule):
    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()
        self.body, self.head = nn.Linear(4, width), nn.Linear(width, 1)
    def forward(self, x):
        return self.head(torch.tanh(self.body(x)))
    def training_step(self, batch, batch_idx):
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

class Sum(nn.Module):
    """A perfect teacher: the sum, through a layer that can be named."""
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(4, 1)
        nn.init.ones_(self.head.weight), nn.init.zeros_(self.head.bias)
    def forward(self, x):
        self.body(x)
        return self.head(x)

def score(model, *, data, teacher):
    x = torch.rand(64, 4, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return -float((model(x) - x.sum(1, keepdim=True)).pow(2).mean())
'''

RECIPE = """
# @package _global_
# My own.
defaults:
  - /callbacks: distill
  - /trainer: cpu
  - _self_
seeds: [0, 1]
data: {_target_: mine.Data}
teacher: {_target_: mine.Sum, _partial_: true}
student: {_target_: mine.Net, width: 3}
pairs:
  - _target_: softs_lightning.Pair
    teacher: outputs[body]
    student: outputs[body]
    projector: linear
    loss: {_target_: torch.nn.MSELoss}
trainer: {max_epochs: 2, log_every_n_steps: 1, enable_progress_bar: false}
judge: {name: closeness, score: {_target_: mine.score, _partial_: true}}
"""

APP = """
import hydra
from hydra.utils import instantiate

@hydra.main(version_base="1.3", config_path="conf", config_name="app")
def main(cfg):
    student = instantiate(cfg.student, _convert_="all")
    callbacks = [instantiate(node, _convert_="all") for node in cfg.callbacks.values()]
    trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=False, _convert_="all")
    trainer.fit(student, instantiate(cfg.data, _convert_="all"))
    names = [key for key in trainer.logged_metrics if key.startswith("distill/")]
    print("logged", sorted(names), "steps", trainer.global_step)

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "mine.py").write_text(MODULES)
    (tmp_path / "configs" / "recipe").mkdir(parents=True)
    (tmp_path / "configs" / "recipe" / "own.yaml").write_text(RECIPE)
    return tmp_path


def test_an_own_recipe_runs_and_its_student_needs_no_plugin(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = softs_distill(
        "--config-dir", "configs", "recipe=own", folder=mine, cache=mine / "cache", path=mine / "modules"
    )
    assert done.returncode == 0, done.stderr
    assert "The teacher stops at body" in done.stdout
    folder = run_folder(mine, "own")
    assert "closeness" in (folder / "report.md").read_text()
    for name in [name for name in sys.modules if name.partition(".")[0] == "softs_lightning"]:
        monkeypatch.setitem(sys.modules, name, None)  # as where it is not installed
    with pytest.raises(ImportError, match="softs_lightning"):
        import softs_lightning  # noqa: F401
    modules: dict[str, Any] = {"__name__": "mine"}
    exec(MODULES, modules)
    net = modules["Net"].load_from_checkpoint(folder / "student.ckpt", weights_only=True)
    kept = torch.load(folder / "student.ckpt", weights_only=True)["state_dict"]
    assert sorted(kept) == ["body.bias", "body.weight", "head.bias", "head.weight"]
    assert all(torch.equal(value, kept[name]) for name, value in net.state_dict().items())


def test_an_own_mistake_keeps_its_traceback(mine: Path) -> None:
    file = mine / "modules" / "mine.py"
    file.write_text(
        file.read_text().replace("def train_dataloader(self):", "def train_dataloader(self):\n        1 / 0")
    )
    done = softs_distill(
        "--config-dir", "configs", "recipe=own", folder=mine, cache=mine / "cache", path=mine / "modules"
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "mine.py" in done.stderr


def app(folder: Path, config: str, *arguments: str) -> str:
    (folder / "conf").mkdir()
    (folder / "conf" / "app.yaml").write_text(config)
    (folder / "app.py").write_text(APP)
    done = forked("app.py", *arguments, folder=folder, cache=folder / "cache", path=folder / "modules")
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_groups_work_inside_another_hydra_app(mine: Path) -> None:
    own = (
        RECIPE.replace("# @package _global_\n", "")
        .replace("/callbacks", "callbacks")
        .replace("/trainer", "trainer")
    )
    config = f"{own}\nhydra: {{searchpath: ['pkg://softs_lightning.conf']}}\n"
    printed = app(mine, config, "trainer.max_epochs=3")
    assert "logged ['distill/body', 'distill/total'] steps 12" in printed


def test_a_recipe_works_inside_another_hydra_app(mine: Path) -> None:
    config = """
defaults: [_self_, recipe: digits]
seed: 0
hydra: {searchpath: ['pkg://softs_lightning.conf', 'pkg://softs_lightning.recipes']}
"""
    short = ["data.passes=2", "teacher.data.passes=1", "trainer.enable_progress_bar=false"]
    printed = app(mine, config, *short, "pairs.0.name=logits")
    assert "logged ['distill/logits', 'distill/total'] steps 8" in printed


ARMS = """
arms:
  hidden: {}
  shared start: {callbacks: {distill: null}, trainer: {max_epochs: 3}}
  scores:
    pairs:
      - _target_: softs_lightning.Pair
        teacher: outputs[head]
        student: outputs[head]
        loss: {_target_: torch.nn.MSELoss}
judge:
  name: closeness
  score: {_target_: mine.two_scores, _partial_: true}
  others: {error: {lower: true}}
"""

TWO_SCORES = """

def two_scores(model, *, data, teacher):
    found = score(model, data=data, teacher=teacher)
    return {"closeness": found, "error": -found}
"""


def test_several_ways_to_train_and_several_measures_stand_in_one_table(mine: Path) -> None:
    recipe = mine / "configs" / "recipe" / "own.yaml"
    recipe.write_text(RECIPE.partition("judge:")[0] + ARMS)
    (mine / "modules" / "mine.py").write_text(MODULES + TWO_SCORES)
    done = softs_distill(
        "--config-dir", "configs", "recipe=own", folder=mine, cache=mine / "cache", path=mine / "modules"
    )
    assert done.returncode == 0, done.stderr
    folder = run_folder(mine, "own")
    found = Result.from_json((folder / "results.json").read_text())
    assert [arm.name for arm in found.arms] == ["alone", "hidden", "shared start", "scores"]
    assert [[stop.module for stop in arm.stops] for arm in found.arms] == [[], ["body"], [], ["head"]]
    for arm in found.arms:
        closeness, error = (arm.of(measure) for measure in found.measures)
        assert closeness == tuple(-value for value in error)
    # Three epochs without a teacher are three epochs of the same training: the scores say that it was longer.
    assert found.arms[2].scores != found.alone.scores
    assert found.gain(found.arms[1], found.measures[0]) == found.gain(found.arms[1], found.measures[1])
    assert all(f"{arm.name}: {found.verdict(arm)}" in done.stdout for arm in found.arms[1:])
    assert "The teacher stops at body (" in done.stdout
    assert "for hidden." in done.stdout
    assert sorted(path.name for path in (folder / "logs").iterdir()) == [
        "alone",
        "hidden",
        "scores",
        "shared start",
    ]
