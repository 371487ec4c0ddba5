"""A store's contents, its soundness, getting data out and clearing away; and the commands for it."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from softs_lightning import Pair
from softs_lightning.store import (
    DamagedShardError,
    ProductStore,
    SampleChangedError,
    StoredTeacher,
    StoreFormatError,
    StoreMismatchError,
)
from softs_lightning.store.commands import options_of, precompute, run
from softs_lightning.store.shard import Row
from softs_lightning.store.upkeep import clear, contents, export, verify

PRODUCTS = ["outputs[0]", "outputs[1]"]


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh())


def batches() -> list[dict[str, Any]]:
    x = torch.randn(4, 2, 3, generator=torch.Generator().manual_seed(2))
    return [{"x": own, "uid": [f"s{2 * i}", f"s{2 * i + 1}"]} for i, own in enumerate(x)]


def take(batch: Any) -> Any:
    return batch["x"]


OPTIONS: dict[str, Any] = {"ids": "uid", "inputs": take}


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Four shards of two samples for each of two products."""
    path = tmp_path / "store"
    ProductStore.build(path, net(), PRODUCTS, batches(), shard_nbytes=1, progress=False, **OPTIONS)
    return path


def shards(path: Path) -> list[Path]:
    return sorted(path.rglob("outputs_0*/*.safetensors"))


def values(path: Path) -> list[Tensor]:
    # Copies: a map of a file that is truncated afterwards cannot be read any more.
    return [value.clone() for value in ProductStore(path).read("outputs[0]", [f"s{i}" for i in range(8)])]


def damage(file: Path, how: str) -> None:
    data = bytearray(file.read_bytes())
    if how == "truncated":
        data = data[:-7]
    elif how == "emptied":
        data = bytearray()
    else:
        place = {"values": len(data) - 40, "header": 40}[how]
        data[place] ^= 0xFF
    file.write_bytes(data)


DAMAGE = ["truncated", "emptied", "values", "header"]


# -- soundness -------------------------------------------------------------------------------------


def test_a_sound_store_verifies(store: Path) -> None:
    assert verify(store) == []


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_found_named_and_repaired_by_computing_again(store: Path, how: str) -> None:
    before = values(store)
    damage(shards(store)[1], how)
    (problem,) = verify(store)
    assert str(shards(store)[1]) in str(problem)
    assert not problem.repaired
    assert [p.repaired for p in verify(store, repair=True)] == [True]
    assert verify(store) == []
    built = ProductStore.build(store, net(), PRODUCTS, batches(), progress=False, **OPTIONS)
    assert built.computed == 2
    assert all(torch.equal(a, b) for a, b in zip(values(store), before, strict=True))


@pytest.mark.parametrize("how", DAMAGE)
def test_no_reader_gets_a_number_from_a_damaged_shard(store: Path, how: str) -> None:
    damage(shards(store)[1], how)
    with pytest.raises(DamagedShardError, match="verify --repair"):
        values(store)


def test_a_shard_that_is_altered_while_it_is_in_use_is_seen_when_it_is_first_read(store: Path) -> None:
    reader = ProductStore(store)
    reader.read("outputs[0]", ["s0"])
    data = bytearray(shards(store)[1].read_bytes())
    with shards(store)[1].open("r+b") as file:
        file.seek(len(data) - 40)
        file.write(bytes([data[-40] ^ 0xFF]))
    with pytest.raises(DamagedShardError, match=r"the values of sample 's[23]' were altered"):
        reader.read("outputs[0]", ["s2", "s3"])


def test_a_shard_that_is_gone_is_as_if_it_had_never_been(store: Path) -> None:
    shards(store)[1].unlink()
    assert verify(store) == []
    assert ProductStore.build(store, net(), PRODUCTS, batches(), progress=False, **OPTIONS).computed == 2


def foreign_row(store: Path, digest: bytes) -> None:
    """What a second writer would leave that computed sample s0 of other data at the same time."""
    column = next(c for c in ProductStore(store, mode="write").columns() if c.key.product == "outputs[0]")
    column._places.clear()
    column.add(Row("s0", digest, (4,), {"values": torch.zeros(4)}, {"max_abs": 0.0}), column.facts or {})
    column.refresh = lambda: None  # type: ignore[method-assign]
    column.commit()


def test_two_unlike_samples_under_one_id_are_refused_and_repaired(store: Path) -> None:
    before = values(store)
    foreign_row(store, bytes(16))
    with pytest.raises(SampleChangedError, match="two unlike samples have the id 's0'"):
        values(store)
    (problem,) = verify(store, repair=True)
    assert "hold unlike samples under the id 's0'" in str(problem)
    assert verify(store) == []
    assert ProductStore.build(store, net(), PRODUCTS, batches(), progress=False, **OPTIONS).computed == 2
    assert all(torch.equal(a, b) for a, b in zip(values(store), before, strict=True))


def test_of_one_sample_written_twice_the_first_counts_for_every_reader(store: Path) -> None:
    before = values(store)
    digest = next(c for c in ProductStore(store).columns() if c.key.product == "outputs[0]").row("s0").digest
    foreign_row(store, digest)
    assert verify(store) == []
    assert torch.equal(values(store)[0], before[0])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 0}', "written in format 0 by an older version"),
        ('{"format": 2}', "written in format 2 by another version"),
        ("{}", "damaged"),
        ("", "damaged"),
        ("[1]", "damaged"),
    ],
)
def test_another_format_is_refused(store: Path, text: str, message: str) -> None:
    (store / "store.json").write_text(text)
    for open_it in (contents, verify, lambda path: StoredTeacher(net(), path).place()):
        with pytest.raises(StoreFormatError, match=message):
            open_it(store)


@pytest.mark.parametrize("text", ["{}", "", '{"format": 2}', '{"format": 1, "product": "x"}'])
def test_a_damaged_description_is_refused_and_found(store: Path, text: str) -> None:
    (shards(store)[0].parent / "column.json").write_text(text)
    with pytest.raises(StoreFormatError, match=r"column\.json is"):
        values(store)
    assert len(verify(store)) == 1


def test_a_folder_of_other_things_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StoreFormatError, match="holds other files"):
        StoredTeacher(net(), tmp_path).place()
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


# -- contents, export, clearing --------------------------------------------------------------------


def test_contents_are_listed(store: Path) -> None:
    first, second = contents(store)
    assert (first.key.product, first.samples, first.shards, first.error) == (
        "outputs[0]",
        8,
        4,
        {"max_abs": 0.0},
    )
    assert first.nbytes == sum(file.stat().st_size for file in shards(store))
    assert str(second).startswith("outputs[1]  exact  8 samples")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_export_is_read_with_tar_and_numpy_alone(tmp_path: Path, dtype: torch.dtype) -> None:
    module = net().to(dtype)
    cast = [{**batch, "x": batch["x"].to(dtype)} for batch in batches()]
    ProductStore.build(tmp_path / "store", module, PRODUCTS, cast, progress=False, **OPTIONS)
    assert export(tmp_path / "store", tmp_path / "out.tar") == 8
    script = f"""
import io, json, tarfile
import numpy as np
with tarfile.open({str(tmp_path / "out.tar")!r}) as tar:
    files = {{m.name: tar.extractfile(m).read() for m in tar}}
print(json.dumps({{
    json.loads(files[n])["id"]: np.load(io.BytesIO(files[n.replace("json", "outputs_0.npy")])).tolist()
    for n in files if n.endswith("json")
}}))
"""
    read = json.loads(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout)
    for batch in cast:
        for id, value in zip(batch["uid"], module[0](batch["x"]), strict=True):
            np.testing.assert_array_equal(np.float32(read[id]), value.detach().float().numpy())


def test_an_export_takes_what_is_named_and_leaves_nothing_when_it_fails(store: Path, tmp_path: Path) -> None:
    export(store, tmp_path / "one.tar", ["outputs[1]"])
    with tarfile.open(tmp_path / "one.tar") as tar:
        assert tar.getnames()[:2] == ["000000000.json", "000000000.outputs_1.npy"]
    damage(shards(store)[1], "values")
    with pytest.raises(DamagedShardError):
        export(store, tmp_path / "two.tar", ["outputs[0]"])
    with pytest.raises(StoreMismatchError, match=r"holds no outputs\[7\]"):
        export(store, tmp_path / "two.tar", ["outputs[7]"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.tar", "store"]


def test_what_no_recipe_uses_is_removed(store: Path) -> None:
    before = sorted(store.rglob("*"))
    (would,) = clear(store, ["outputs[module.0]"], dry_run=True)
    assert sorted(store.rglob("*")) == before
    assert clear(store, ["outputs[module.0]"]) == [would]
    assert would.startswith("outputs_1-exact-")
    assert [c.key.product for c in ProductStore(store).columns()] == ["outputs[0]"]


@pytest.mark.parametrize("used", ["outputs[*]", "outputs[{0..1}]", "outputs[@Linear|@Tanh]", "outputs[0|-1]"])
def test_what_selectors_mean_stays(store: Path, used: str) -> None:
    assert clear(store, [used]) == []
    assert len(contents(store)) == 2


@pytest.mark.parametrize("used", [["outputs[7]"], ["outputs[embd]", "inputs[0]"], []])
def test_a_store_is_not_emptied_by_a_name_that_is_wrong(store: Path, used: list[str]) -> None:
    with pytest.raises(
        ValueError, match=r"none of the products in use .*, only outputs\[0\], outputs\[1\], and nothing was"
    ):
        clear(store, used)
    assert len(contents(store)) == 2


def test_what_only_the_model_can_tell_removes_nothing(store: Path) -> None:
    with pytest.raises(ValueError, match="cannot be told without the model"):
        clear(store, ["outputs[%hidden_states]"])
    assert len(contents(store)) == 2


def test_leftovers_are_removed_and_products_stay_unless_products_are_named(store: Path) -> None:
    damage(shards(store)[1], "header")
    verify(store, repair=True)
    assert len(clear(store)) == 1
    assert clear(store) == []
    assert len(contents(store)) == 2


# -- the commands ----------------------------------------------------------------------------------


def test_ls_and_gc_print_what_they_see(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ls", str(store)]) == 0
    assert run(["gc", str(store), "--dry-run", "outputs[0]"]) == 0
    assert run(["gc", str(store), "recipe=a"], products_of=lambda recipes: ["outputs[1]"]) == 0
    assert run(["ls", str(store)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:10] for line in lines] == [
        "outputs[0]",
        "outputs[1]",
        "outputs_1-",
        "outputs_0-",
        "outputs[1]",
    ]


def test_verify_says_by_its_exit_code_whether_all_is_well(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["verify", str(store)]) == 0
    damage(shards(store)[0], "values")
    assert run(["verify", str(store)]) == 1
    assert run(["verify", "--repair", str(store)]) == 0
    assert run(["verify", str(store)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == said[3] == "everything is as it was written"
    assert said[2].endswith("(set aside)")


def test_export_from_the_command_line(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["export", str(store), str(tmp_path / "out.tar"), "outputs[0]"]) == 0
    assert capsys.readouterr().out == f"8 samples in {tmp_path}/out.tar\n"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["lst", "x"], "no 'store lst', only ls, verify, export, compact, gc"),
        (["ls"], "needs a PATH"),
        (["ls", "a", "b"], "takes one PATH, got 'a b'"),
        (["ls", "a", "--repair"], "has no --repair"),
        (["export", "a"], "needs a PATH and the tar"),
        (["gc", "a", "recipe=x"], "recipes cannot be read here"),
    ],
)
def test_a_command_line_that_is_not_understood_is_refused(line: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(line)


@pytest.mark.parametrize("line", [[], ["--help"], ["ls", "-h"]])
def test_help_is_printed(line: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(line) == 0
    assert "softs-distill store ls PATH" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "needs store=PATH"),
        (["store="], "needs store=PATH"),
        (["store=a", "store=b"], "store= is given twice"),
    ],
)
def test_precompute_needs_one_store(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options_of(words)


class Data:
    """As much of a LightningDataModule as is called."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.calls = loader, []  # type: ignore[var-annotated]

    def prepare_data(self) -> None:
        self.calls.append("prepare_data")

    def setup(self, stage: str) -> None:
        self.calls.append(stage)

    def train_dataloader(self) -> Any:
        return self.loader


def test_a_recipes_products_are_precomputed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loader = DataLoader([torch.randn(3) for _ in range(4)], batch_size=2)  # type: ignore[arg-type]
    data = Data(loader)
    pairs = [Pair(product, "outputs[x]", nn.MSELoss(), name=product) for product in PRODUCTS]
    built = precompute(str(tmp_path), net, pairs, data, progress=False, encoding="fp16")
    assert data.calls == ["prepare_data", "fit"]
    assert (built.computed, [c.samples for c in contents(tmp_path)]) == (4, [4, 4])
    assert f"{tmp_path}: 4 samples, 4 of them computed" in capsys.readouterr().out
    with pytest.raises(TypeError, match="the training data is dict, not one DataLoader"):
        precompute(str(tmp_path), net, pairs, Data({"a": loader}))
