"""Blocks where users write them: scripts, -c, notebooks, under a debugger and coverage, on other Pythons."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SCRIPT = """
import torch
from softs_lightning.tracing import Envoy
model = Envoy(torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh()))
with model.trace(torch.ones(1, 2)):
    hidden = model[0].output.save()
    width = hidden.shape[1].save()
    result = model.output.save()
print("same", torch.equal(result, torch.tanh(hidden)), width)
"""


def run(*command: str, code: str = "", **kwargs: object) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parents[1])}
    return subprocess.run(
        command, input=code, capture_output=True, text=True, env=env, timeout=120, check=False, **kwargs
    )


def interpreter(version: str) -> str | None:
    """A Python of this version: the running one, on the path, or under pyenv."""
    if version == f"{sys.version_info.major}.{sys.version_info.minor}":
        return sys.executable
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    known = [shutil.which(f"python{version}"), *sorted(root.glob(f"versions/{version}.*/bin/python"))]
    for path in filter(None, known):
        said = run(str(path), "-c", "import sys; print(sys.version_info[:2])")
        if said.stdout.strip() == str(tuple(map(int, version.split(".")))):
            return str(path)
    return None


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_the_part_without_torch_works_on(version):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"this machine has no Python {version}")
    done = run(python, str(HERE / "shapes.py"))
    assert done.stderr == ""
    assert done.stdout == f"16 checks passed on Python {version}\n"


# A run of the toy model, whose modules add their numbers: as a trace, but there is no torch to wait for.
TOY = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from shapes import Captured, Toy, Traced, read, result, save
with Traced(Toy(1, 10), 0):
    first = save(read(1))
    double = save(first * 2)
    whole = save(result())
print(first, double, whole)
"""


def test_a_script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(TOY)
    done = run(sys.executable, str(path))
    assert (done.stdout, done.stderr) == ("1 2 11\n", "")


def test_dash_c_and_what_it_executes():
    code = TOY + (
        "try:\n    exec('with Captured():\\n    first = 5\\n')\n"
        "except RuntimeError as error:\n    print(type(error).__name__, first)\n"
    )
    done = run(sys.executable, "-c", code)
    assert (done.stdout, done.stderr) == ("1 2 11\nWithBlockNotFoundError 1\n", "")


def test_a_script_from_standard_input_has_no_source():
    done = run(sys.executable, "-", code=TOY)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert "WithBlockNotFoundError: the with block at <stdin>:5 cannot be captured" in last
    assert "`@model.trace(...)` over `def block(tracer): ...`" in last


def test_importing_starts_nothing_and_loads_no_more_than_torch():
    code = (
        "import sys, threading, torch\n"
        "before = set(sys.modules)\n"
        "import softs_lightning.tracing\n"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "print(sorted(new - sys.stdlib_module_names), hasattr(torch.Tensor, 'save'), threading.active_count())\n"
    )
    assert run(sys.executable, "-c", code).stdout == "['softs_lightning'] False 1\n"


def test_a_debugger_stops_and_steps_in_a_block(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(TOY)
    commands = "b 7\nc\np ('first', first)\nn\np ('double', double)\nc\nq\n"
    done = run(sys.executable, "-m", "pdb", str(path), code=commands, cwd=tmp_path)
    assert "script.py(7)" in done.stdout
    assert "('first', 1)" in done.stdout
    assert "script.py(8)" in done.stdout
    assert "('double', 2)" in done.stdout
    assert "1 2 11" in done.stdout


def test_coverage_sees_the_lines_of_a_block(tmp_path):
    path, data = tmp_path / "script.py", tmp_path / "data"
    path.write_text(TOY + "with Traced(Toy(1), 0):\n    if read(1) == 2:\n        first = 0\n")
    options = f"--data-file={data}", f"--include={path}"
    done = run(sys.executable, "-m", "coverage", "run", *options, str(path), cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("1 2 11\n", "")
    report = run(sys.executable, "-m", "coverage", "json", f"--data-file={data}", "-o", "-", cwd=tmp_path)
    (lines,) = json.loads(report.stdout)["files"].values()
    assert lines["missing_lines"] == [12]


CELLS = [
    SCRIPT,
    "def traced(x):\n    with model.trace(x):\n        hidden = model[0].output.save()\n    return tuple(hidden.shape)",
    "print(traced(torch.ones(2, 2)))",
    "def traced(x):\n    with model.trace(x):\n        hidden = model[1].output.save()\n    return hidden.ndim",
    "print(traced(torch.ones(2, 2)))",
    "import asyncio\nawait asyncio.sleep(0)\nwith model.trace(torch.ones(4, 2)):\n"
    "    hidden = model[0].output.save()\nprint(len(hidden))",
    "with model.trace(torch.ones(4, 2)):\n    hidden = model[0].output.save()\n    1 / 0",
    "%%time\nwith model.trace(torch.ones(5, 2)):\n    hidden = model[0].output.save()",
    "@model.trace(torch.ones(6, 2))\ndef found():\n    return len(model[0].output)\nprint(found)",
]

EXECUTE = """
import json, sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in json.loads(sys.stdin.read())])
NotebookClient(notebook, timeout=100, kernel_name="python3", allow_errors=True).execute()
print(json.dumps([cell.outputs for cell in notebook.cells]))
"""


def test_a_notebook():
    done = run(sys.executable, "-c", EXECUTE, code=json.dumps(CELLS))
    outputs = json.loads(done.stdout)
    printed = ["".join(each.get("text", "") for each in cell) for cell in outputs]
    assert printed[0] == "same True 3\n"
    assert printed[2] == "(2, 3)\n"
    assert printed[4] == "2\n"
    assert printed[5] == "4\n"
    assert printed[8] == "6\n"
    errors = {
        number: each for number, cell in enumerate(outputs) for each in cell if each["output_type"] == "error"
    }
    assert {number: error["ename"] for number, error in errors.items()} == {
        6: "ZeroDivisionError",
        7: "WithBlockNotFoundError",
    }
    frames = [re.sub(r"\x1b\[[0-9;]*m", "", each) for each in errors[6]["traceback"]]
    assert re.search(r"-> 3 +1 / 0", frames[-2])
