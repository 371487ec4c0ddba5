"""StoredTeacher against the live one, and what it refuses."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from softs_lightning import ProductSpec, Teacher
from softs_lightning.catcher import Capture
from softs_lightning.store import (
    MissingSampleError,
    Numbered,
    ProductStore,
    SampleChangedError,
    StoredTeacher,
    StoreFormatError,
    StoreMismatchError,
)
from softs_lightning.store.store import canonical


class Tokens(nn.Module):
    """Takes tokens by name; gives hidden states, an attention map, a tuple and a pooled vector."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(20, 4)
        self.mix = nn.MultiheadAttention(4, 2, batch_first=True)
        self.pool = nn.Identity()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.embed(input_ids)
        mixed, _ = self.mix(
            hidden, hidden, hidden, key_padding_mask=attention_mask == 0, average_attn_weights=False
        )
        weights = attention_mask[..., None].float()
        return self.pool((mixed * weights).sum(1) / weights.sum(1))  # type: ignore[no-any-return]


ALL = "inputs[mix#0]|outputs[embed|mix#0|mix#1|pool]"


def tokens(*lengths: int, seed: int = 0, total: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    total = total or max(lengths)
    mask = (torch.arange(total) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, 20, (len(lengths), 9), generator=generator)[:, :total]
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": torch.zeros(len(lengths))}


def placed(teacher: Teacher) -> Any:
    teacher.place()
    return teacher


def fill(path: Path, batch: Any, product: str = ALL, source: Any = None, **options: Any) -> list[Any]:
    teacher = placed(StoredTeacher(source or Tokens(), path, **options))
    values = teacher.supply(batch, ProductSpec.parse(product)).select()
    teacher.release()
    return values  # type: ignore[no-any-return]


def read(path: Path, batch: Any, product: str = ALL, **options: Any) -> list[Any]:
    teacher = placed(StoredTeacher(None, path, **options))
    values: list[Any] = teacher.supply(batch, ProductSpec.parse(product)).select()
    teacher.release()
    return values


def live(batch: Any, product: str = ALL, source: Any = None) -> list[Any]:
    return placed(Teacher(source or Tokens())).supply(batch, ProductSpec.parse(product)).select()  # type: ignore[no-any-return]


def blank_padding(value: Tensor, mask: Tensor) -> Tensor:
    value, length = value.clone(), mask.shape[1]
    for dim in range(1, value.ndim):
        if value.shape[dim] == length:
            shape = [len(mask), *(length if d == dim else 1 for d in range(1, value.ndim))]
            value = value.masked_fill(mask.reshape(shape) == 0, float("nan"))
    return value


# -- the same values -------------------------------------------------------------------------------


def test_every_kind_of_product_reads_as_it_was_computed(tmp_path: Path) -> None:
    batch = tokens(6, 3, 5)
    expected = [blank_padding(value, batch["attention_mask"]) for value in live(batch)]
    for values in (fill(tmp_path, batch), read(tmp_path, batch)):
        for ours, theirs in zip(values, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_rows_come_in_any_order_and_with_any_padding(tmp_path: Path) -> None:
    batch = tokens(6, 3, 5)
    fill(tmp_path, batch)
    order = [2, 0]
    longer = {k: nn.functional.pad(v[order], (0, 3)) if v.ndim == 2 else v[order] for k, v in batch.items()}
    for ours, theirs in zip(read(tmp_path, longer), live(batch), strict=True):
        expected = theirs[order]
        for dim in [d for d in range(1, theirs.ndim) if theirs.shape[d] == 6]:
            expected = torch.cat([expected, torch.full_like(expected.narrow(dim, 0, 3), float("nan"))], dim)
        torch.testing.assert_close(
            ours, blank_padding(expected, longer["attention_mask"]), rtol=0, atol=0, equal_nan=True
        )


def test_only_missing_batches_are_computed_and_only_missing_samples_are_kept(tmp_path: Path) -> None:
    teacher = placed(StoredTeacher(Tokens(), tmp_path))
    spec = ProductSpec.parse("outputs[pool]")
    for seed, computed in [(0, 3), (1, 6), (0, 6), (1, 6)]:
        teacher.supply(tokens(4, 4, 4, seed=seed), spec)
        assert teacher.computed == computed
    both = {k: torch.cat([tokens(4, 4, 4)[k], tokens(4, 4, 4, seed=2)[k]]) for k in tokens(4)}
    teacher.supply(both, spec)
    assert (teacher.computed, teacher.seen) == (12, 18)
    teacher.release()
    (column,) = ProductStore(tmp_path).columns()
    assert len(column) == sum(map(len, column.shards)) == 9


def test_a_product_added_later_leaves_the_others_alone(tmp_path: Path) -> None:
    batch = tokens(4, 2)
    fill(tmp_path, batch, "outputs[embed]")
    fill(tmp_path, batch, "outputs[embed|pool]")
    assert {c.key.product: [len(s) for s in c.shards] for c in ProductStore(tmp_path).columns()} == {
        "outputs[embed]": [2],
        "outputs[pool]": [2],
    }


def test_reading_opens_only_the_products_asked_for(tmp_path: Path) -> None:
    fill(tmp_path, tokens(4, 2))
    teacher = placed(StoredTeacher(None, tmp_path))
    teacher.supply(tokens(4, 2), ProductSpec.parse("outputs[pool]"))
    assert list(teacher.columns()) == ["outputs[pool]"]
    others = [c for c in teacher.store._columns.values() if c.key.product != "outputs[pool]"]
    assert len(others) == 4
    assert not any(column.shards for column in others)


def test_the_buffer_is_a_capture(tmp_path: Path) -> None:
    teacher = placed(StoredTeacher(Tokens(), tmp_path))
    buffer = teacher.supply(tokens(3), ProductSpec.parse("inputs[pool]|outputs[pool|mix#0]"))
    assert isinstance(buffer, Capture)
    (value,) = buffer.select("outputs[pool]")
    assert buffer["pool"]["outputs"][0] is value
    assert torch.equal(buffer["pool"]["inputs"][0]["args"][0], buffer.select("inputs[pool]")[0])
    with pytest.raises(LookupError, match=r"outputs\[embed\] was not asked of this session"):
        buffer.select("outputs[embed]")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("encoding", ["exact", "fp16", "int8"])
def test_values_come_back_in_their_type_within_the_stated_error(
    tmp_path: Path, dtype: torch.dtype, encoding: str
) -> None:
    net, x = nn.Linear(3, 5).to(dtype), torch.randn(4, 3).to(dtype)
    fill(tmp_path, x, "outputs[.]", net, encoding=encoding)
    (ours,), (theirs,) = read(tmp_path, x, "outputs[.]"), live(x, "outputs[.]", net)
    (column,) = ProductStore(tmp_path).columns()
    assert ours.dtype == dtype
    # int8 is decoded in float32 and then rounded to the type it had.
    rounding = torch.finfo(dtype).eps * theirs.abs().max().double() if encoding == "int8" else 0.0
    assert (ours.double() - theirs.double()).abs().max() <= column.error["max_abs"] + rounding


def test_encodings_by_product(tmp_path: Path) -> None:
    fill(tmp_path, tokens(4), "outputs[embed|pool]", encoding={"outputs[emb*]": "int8"})
    assert [(c.key.product, c.key.encoding) for c in ProductStore(tmp_path).columns()] == [
        ("outputs[embed]", "int8"),
        ("outputs[pool]", "exact"),
    ]


def test_wrappers_and_picks_are_part_of_no_and_of_every_name() -> None:
    assert canonical("inputs[module.a#x.0]|outputs[_orig_mod.a!1|.]") == [
        "inputs[a#x.0]",
        "outputs[a!1]",
        "outputs[.]",
    ]


def test_selectors_mean_without_the_teacher_what_they_mean_with_it(tmp_path: Path) -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return x

    x = torch.randn(2, 3)
    for product in ("outputs[layers.{1..2}]", "outputs[@Linear]", "outputs[layers.-1]"):
        fill(tmp_path, x, product, Deep())
        assert len(live(x, product, Deep())) == len(read(tmp_path, x, product)) > 0
        for ours, theirs in zip(read(tmp_path, x, product), live(x, product, Deep()), strict=True):
            assert torch.equal(ours, theirs)
    assert [c.key.product for c in ProductStore(tmp_path).columns()] == [
        f"outputs[layers.{i}]" for i in range(4)
    ]
    teacher = placed(StoredTeacher(None, tmp_path))
    with pytest.raises(KeyError, match=r"Deep has no module named 'layers.7'"):
        teacher.check(ProductSpec.parse("outputs[layers.7]"))
    with pytest.raises(KeyError, match=r"the modules of class .ModuleList. are"):
        teacher.check(ProductSpec.parse("outputs[@ModuleList]"))


def test_what_a_program_saves_is_kept_under_an_identity(tmp_path: Path) -> None:
    def program(envoy: Any) -> Any:
        return {"twice": envoy[0].output * 2}

    net, x = nn.Sequential(nn.Linear(3, 2), nn.Tanh()), torch.randn(2, 3)
    with pytest.raises(ValueError, match=r"a teacher with a program .* identity="):
        fill(tmp_path, x, "saved[twice]", net, program=program)
    fill(tmp_path, x, "saved[twice]|outputs[1]", net, program=program, identity="doubling v1")
    (ours,) = read(tmp_path, x, "saved[twice]")
    assert torch.equal(ours, 2 * net[0](x))


def test_a_teacher_in_its_own_type_does_not_depend_on_autocast(tmp_path: Path) -> None:
    net, x = nn.Linear(3, 2), torch.randn(2, 3)
    fill(tmp_path, x, "outputs[.]", net, dtype="bfloat16")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fill(tmp_path, x, "outputs[.]", net, dtype="bfloat16")
    (column,) = ProductStore(tmp_path).columns()
    assert (column.key.autocast, column.key.teacher["dtype"], len(column.shards)) == (None, "bfloat16", 1)


# -- a share of the tokens -------------------------------------------------------------------------


def test_a_share_of_the_tokens_is_kept_and_the_mask_says_which(tmp_path: Path) -> None:
    batch, product = tokens(8, 4, 6), "outputs[embed]"
    fill(tmp_path, batch, product, keep=0.5)
    (theirs,) = live(batch, product)
    teacher = placed(StoredTeacher(None, tmp_path, keep=0.5))
    (ours,) = teacher.supply(batch, ProductSpec.parse(product)).select()
    kept = teacher.kept(batch)
    assert kept.sum(1).tolist() == [4, 2, 3]
    assert not (kept & (batch["attention_mask"] == 0)).any()
    assert torch.equal(ours[kept], theirs[kept])
    assert ours[~kept].isnan().all()


def test_a_share_of_what_has_no_tokens_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"keep= takes a share of tokens, and outputs\[pool\] \[1, 4\]"):
        fill(tmp_path, tokens(3), "outputs[pool]", keep=0.5)


# -- who is who ------------------------------------------------------------------------------------


def other_teacher() -> Tokens:
    teacher = Tokens()
    teacher.embed.weight.data += 1
    return teacher


@pytest.mark.parametrize("mode", ["read", "write"])
def test_another_teacher_is_refused_with_what_differs(tmp_path: Path, mode: Any) -> None:
    fill(tmp_path, tokens(3))
    with pytest.raises(StoreMismatchError, match=r"teacher\.weights: the store has '\w+', asked for is"):
        placed(StoredTeacher(other_teacher(), tmp_path, mode=mode))


def test_another_feed_is_refused_with_what_differs(tmp_path: Path) -> None:
    fill(tmp_path, tokens(3), feed="v1")
    with pytest.raises(StoreMismatchError, match="feed: the store has 'v1', asked for is 'v2'"):
        placed(StoredTeacher(Tokens(), tmp_path, feed="v2"))
    with pytest.raises(StoreMismatchError, match=r"with feed 'v2': there is exact of Tokens .*, feed v1"):
        read(tmp_path, tokens(3), feed="v2")


def test_two_teachers_share_a_store_when_asked_to(tmp_path: Path) -> None:
    batch = tokens(3, 2)
    fill(tmp_path, batch, "outputs[pool]", identity="one")
    fill(tmp_path, batch, "outputs[pool]", other_teacher(), identity="two", mode="add")
    with pytest.raises(StoreMismatchError, match=r"several columns of .*exact of \w+; exact of .*identity="):
        read(tmp_path, batch, "outputs[pool]")
    for identity, source in {"one": Tokens(), "two": other_teacher()}.items():
        (ours,), (theirs,) = (
            read(tmp_path, batch, "outputs[pool]", identity=identity),
            live(batch, "outputs[pool]", source),
        )
        assert torch.equal(ours, theirs)


def test_a_product_that_is_not_there_is_refused_with_the_nearest(tmp_path: Path) -> None:
    fill(tmp_path, tokens(3))
    teacher = placed(StoredTeacher(None, tmp_path))
    with pytest.raises(StoreMismatchError, match=r"holds no outputs\[mix\]: it has .*outputs\[mix#0\]"):
        teacher.check(ProductSpec.parse("outputs[mix]"))
    with pytest.raises(KeyError, match="Tokens has no module named 'embd': the nearest names are 'embed'"):
        teacher.check(ProductSpec.parse("outputs[embd]"))


def test_an_encoding_that_is_not_there_is_refused(tmp_path: Path) -> None:
    fill(tmp_path, tokens(3), "outputs[pool]", encoding="fp16")
    with pytest.raises(StoreMismatchError, match="with no encoding 'int8': there is fp16 of Tokens"):
        read(tmp_path, tokens(3), "outputs[pool]", encoding="int8")


def test_an_encoding_for_what_nobody_asks_for_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no module named 'embd'"):
        placed(StoredTeacher(Tokens(), tmp_path, encoding={"outputs[embd]": "fp16"}))
    teacher = placed(StoredTeacher(Tokens(), tmp_path, encoding={"outputs[pool]": "fp16"}))
    with pytest.raises(
        KeyError, match=r"names outputs\[pool\], which no pair asks for: they ask for outputs\[embed\]"
    ):
        teacher.check(ProductSpec.parse("outputs[embed]"))


def test_a_name_that_is_not_in_the_teacher_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="no module named 'embd'"):
        placed(StoredTeacher(Tokens(), tmp_path)).check(ProductSpec.parse("outputs[embd]"))


# -- samples ---------------------------------------------------------------------------------------


def test_a_sample_that_is_not_there_is_refused_when_reading(tmp_path: Path) -> None:
    fill(tmp_path, tokens(3, 4))
    with pytest.raises(
        MissingSampleError, match=r"lacks 2 of the samples asked for .* its 2 samples have ids such as"
    ):
        read(tmp_path, tokens(3, 4, seed=5))


def numbered(make: Any, **options: Any) -> Any:
    data = Numbered([None] * 2, collate_fn=lambda items: [make()], **options)
    return data.collate([data[0], data[1]])


def test_a_sample_that_changed_under_its_id_is_refused(tmp_path: Path) -> None:
    x = torch.randn(2, 3)
    fill(tmp_path, numbered(lambda: x), "outputs[.]", nn.Linear(3, 2), ids="index")
    read(tmp_path, numbered(lambda: x), "outputs[.]", ids="index")
    flipped = numbered(lambda: x.flip(1))
    with pytest.raises(SampleChangedError, match=r"sample '0' is not what it was .* a random augmentation"):
        read(tmp_path, flipped, "outputs[.]", ids="index")
    read(tmp_path, flipped, "outputs[.]", ids="index", check="none")  # as the user wishes


def test_an_augmentation_keyed_by_its_seed_is_kept_apart(tmp_path: Path) -> None:
    net = nn.Linear(3, 2)

    def flip(batch: Any) -> Any:
        return {"x": batch["x"].flip(1) if batch["seed"][0] else batch["x"]}

    options: dict[str, Any] = {"ids": "uid", "seed": "seed", "inputs": lambda batch: flip(batch)["x"]}
    batch = {"x": torch.randn(2, 3), "uid": ["a", "b"], "seed": [0, 0]}
    plain = fill(tmp_path, batch, "outputs[.]", net, **options)
    other = fill(tmp_path, {**batch, "seed": [1, 1]}, "outputs[.]", net, **options)
    assert torch.equal(read(tmp_path, batch, "outputs[.]", **options)[0], plain[0])
    assert torch.equal(read(tmp_path, {**batch, "seed": [1, 1]}, "outputs[.]", **options)[0], other[0])
    assert not torch.equal(plain[0], other[0])


def test_two_datasets_numbered_alike_are_refused_and_names_help(tmp_path: Path) -> None:
    net, one, two = nn.Linear(3, 2), torch.randn(2, 3), torch.randn(2, 3)
    fill(tmp_path, numbered(lambda: one), "outputs[.]", net, ids="index")
    with pytest.raises(SampleChangedError, match="is not what it was"):
        fill(tmp_path, numbered(lambda: two), "outputs[.]", net, ids="index")
    fill(tmp_path, numbered(lambda: two, name="val"), "outputs[.]", net, ids="index")
    assert sorted(ProductStore(tmp_path).columns()[0].ids()) == ["0", "1", "val:0", "val:1"]


def test_a_mask_that_is_longer_than_what_was_kept_is_refused(tmp_path: Path) -> None:
    batch = {**tokens(3, 3, total=5), "uid": [1, 2]}
    fill(tmp_path, batch, "outputs[embed]", ids="uid")
    longer = {**tokens(4, 4, total=5), "uid": [1, 2]}
    with pytest.raises(SampleChangedError, match="has 4 tokens, and 3 when its products were computed"):
        read(tmp_path, longer, "outputs[embed]", ids="uid", check="none")


def test_arguments_that_are_not_in_the_batch_are_named(tmp_path: Path) -> None:
    fill(tmp_path, tokens(3))
    with pytest.raises(KeyError, match="the teacher was called with 'input_ids', which the batch"):
        read(tmp_path, {"attention_mask": tokens(3)["attention_mask"]})


def test_values_that_are_not_by_sample_are_refused(tmp_path: Path) -> None:
    class Flat(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(-1)

    with pytest.raises(ValueError, match=r"outputs\[\.\] has shape \[6\] for a batch of 2 samples"):
        fill(tmp_path, torch.ones(2, 3), "outputs[.]", Flat())
    with pytest.raises(TypeError, match=r"outputs\[mix\] is a tuple of 2 .* pick one with '#'"):
        fill(tmp_path / "two", tokens(3), "outputs[mix]")


class Similarity(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x @ x.T


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class Counted(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.long() + len(x)


@pytest.mark.parametrize("module", [Similarity(), Centred(), Counted()])
def test_products_that_depend_on_the_rest_of_the_batch_are_refused(tmp_path: Path, module: nn.Module) -> None:
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    with pytest.raises(
        ValueError, match=r"outputs\[\.\] of a sample depends on the other samples of its batch"
    ):
        fill(tmp_path, x, "outputs[.]", module)
    assert ProductStore(tmp_path).columns() == []
    fill(tmp_path, x, "outputs[.]", module, check="none")  # as the user wishes


def test_a_teacher_that_cannot_take_one_sample_says_so(tmp_path: Path) -> None:
    class Even(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(-1, 2).repeat_interleave(2, 0).reshape(len(x), 2)

    with pytest.raises(ValueError, match="cannot be run on one sample"):
        fill(tmp_path, torch.ones(4, 1), "outputs[.]", Even())


def test_independence_is_proven_once(tmp_path: Path) -> None:
    class Counting(nn.Linear):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return super().forward(x)

    teacher = placed(StoredTeacher(Counting(3, 2), tmp_path, early_exit=False))
    for x in torch.randn(3, 4, 3):
        teacher.supply(x, ProductSpec.parse("outputs[.]"))
    assert (Counting.calls, teacher.computed) == (4, 12)


def test_what_an_encoding_cannot_hold_names_the_product_and_the_sample(tmp_path: Path) -> None:
    net = nn.Linear(1, 1, bias=False)
    net.weight.data.fill_(1e6)
    with pytest.raises(ValueError, match=r"outputs\[\.\], sample 'a': 1e\+06 is too large for fp16"):
        fill(
            tmp_path,
            {"x": torch.ones(1, 1), "u": ["a"]},
            "outputs[.]",
            net,
            encoding="fp16",
            ids="u",
            inputs=lambda b: b["x"],
        )


# -- arguments and life ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (None, {"mode": "write"}, "needs a teacher"),
        (nn.ReLU(), {"mode": "append"}, "mode must be"),
        (nn.ReLU(), {"check": "some"}, "check must be"),
        (nn.ReLU(), {"encoding": "zip"}, "there is no encoding 'zip'"),
        (nn.ReLU(), {"keep": 2.0}, "between 0 and 1"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(
    tmp_path: Path, source: Any, options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        StoredTeacher(source, tmp_path, **options)


def test_reading_where_there_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreFormatError, match=r"there is no product store at .*precompute"):
        placed(StoredTeacher(None, tmp_path / "nothing"))


def test_a_column_that_has_no_samples_yet_is_said_to_have_none(tmp_path: Path) -> None:
    fill(tmp_path, tokens(3), "outputs[pool]")
    next(tmp_path.rglob("*.safetensors")).unlink()
    with pytest.raises(MissingSampleError, match=r"has no samples of outputs\[pool\] yet"):
        read(tmp_path, tokens(3), "outputs[pool]")


def test_a_loss_that_looks_at_an_absent_teacher_is_told_so(tmp_path: Path) -> None:
    fill(tmp_path, tokens(3))
    teacher = placed(StoredTeacher(None, tmp_path))
    with pytest.raises(
        AttributeError, match="'lm_head' cannot be looked at: a loss that is shown both models"
    ):
        teacher.module.lm_head  # noqa: B018


def test_it_is_copied_and_sent_only_when_it_is_not_placed(tmp_path: Path) -> None:
    teacher = StoredTeacher(nn.Linear(2, 2), tmp_path)
    assert pickle.loads(pickle.dumps(teacher)).path == str(tmp_path)
    placed(teacher)
    with pytest.raises(RuntimeError, match="release"):
        pickle.dumps(teacher)


def test_what_waits_is_committed_when_there_is_much_of_it(tmp_path: Path) -> None:
    teacher = placed(StoredTeacher(Tokens(), tmp_path, shard_nbytes=1))
    teacher.supply(tokens(3, 3), ProductSpec.parse("outputs[pool]"))
    assert teacher.waiting_nbytes == 0
    assert len(ProductStore(tmp_path).columns()[0]) == 2


def test_what_waits_is_committed_when_it_has_waited(tmp_path: Path) -> None:
    teacher = placed(StoredTeacher(Tokens(), tmp_path, commit_seconds=0.0))
    teacher.supply(tokens(3, 3), ProductSpec.parse("outputs[pool]"))
    assert len(ProductStore(tmp_path).columns()[0]) == 2


def test_two_writers_see_what_the_other_committed(tmp_path: Path) -> None:
    spec, batch = ProductSpec.parse("outputs[pool]"), tokens(3, 4)
    one, two = (placed(StoredTeacher(Tokens(), tmp_path)) for _ in range(2))
    one.supply(batch, spec)
    two.supply(tokens(4, 2, seed=1), spec)
    one.commit()
    two.supply(batch, spec)  # from what the first has committed
    assert (one.computed, two.computed) == (2, 2)


def test_two_writers_of_one_sample_leave_one(tmp_path: Path) -> None:
    spec, batch = ProductSpec.parse("outputs[pool]"), tokens(3, 4)
    one, two = (placed(StoredTeacher(Tokens(), tmp_path)) for _ in range(2))
    for teacher in (one, two):
        teacher.supply(batch, spec)
    assert [one.commit(), two.commit()] == [2, 0]
    (column,) = ProductStore(tmp_path).columns()
    assert sum(map(len, column.shards)) == 2


def test_a_look_up_costs_no_operations(tmp_path: Path) -> None:
    spec, net, x = ProductSpec.parse("outputs[.]"), nn.Linear(3, 5), torch.ones(2, 3)
    writer = placed(StoredTeacher(net, tmp_path))
    cost = writer.cost(x, spec)
    assert (cost.full, cost.used, writer.computed) == (2 * 2 * 3 * 5, 0, 0)
    writer.supply(x, spec)
    writer.release()
    assert placed(StoredTeacher(None, tmp_path)).cost(x, spec).full == 0


def test_the_users_module_is_given_back(tmp_path: Path) -> None:
    net = nn.Linear(2, 2).train()
    fill(tmp_path, torch.ones(1, 2), "outputs[.]", net)
    assert net.training
    assert net.weight.requires_grad


def test_a_store_on_another_file_system(tmp_path: Path) -> None:
    path: Any = f"memory://{tmp_path.name}"
    batch = tokens(5, 2)
    expected = fill(path, batch, cache=tmp_path)
    for ours, theirs in zip(read(path, batch, cache=tmp_path), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
