"""The command line of a store, as functions that print: ``softs-distill precompute`` and ``softs-distill store``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from softs_lightning.store.build import Built

__all__ = ["HELP", "options_of", "precompute", "run"]

HELP = """\
usage: softs-distill precompute [recipe=NAME] store=PATH [encoding=fp16] [ids=content] [device=cuda] [key=value ...]
                                  run a recipe's teacher over its training data once; start again to go on.
                                  trainer.devices=2 trainer.strategy=ddp (or torchrun) shares it out
       softs-distill store ls PATH              what is in a store: products, encodings, samples, size, error
       softs-distill store verify PATH [--repair]
                                  read everything and compare checksums; --repair sets damaged shards aside
       softs-distill store export PATH OUT.tar [PRODUCT ...]
                                  plain NumPy arrays in a tar (WebDataset layout)
       softs-distill store compact PATH [--dry-run]
                                  merge small shards; runs may read and write meanwhile
       softs-distill store gc PATH [--dry-run] [recipe=NAME ... | PRODUCT ...]
                                  remove leftovers and, if recipes or products are named, all other products
"""


def run(
    arguments: Sequence[str], *, products_of: Callable[[Sequence[str]], Iterable[str]] | None = None
) -> int:
    """Carry out ``store`` and what follows it; returns the exit code.

    Args:
        arguments: after ``store``.
        products_of: the teacher's product_ids of the recipes named by ``recipe=NAME`` overrides, for ``gc``.

    Raises:
        ValueError: for a command line that is not understood.
        StoreError: as the functions of :mod:`softs_lightning.store.upkeep`.

    >>> run(["ls"])
    Traceback (most recent call last):
    ValueError: 'store ls' needs a PATH. See softs-distill store --help
    """
    words, flags = (
        [a for a in arguments if not a.startswith("-")],
        [a for a in arguments if a.startswith("-")],
    )
    if not arguments or {"-h", "--help"} & set(flags):
        print(HELP, end="")
        return 0
    name, rest = (words or [""])[0], words[1:]
    known = {
        "ls": (_ls, []),
        "verify": (_verify, ["--repair"]),
        "export": (_export, []),
        "compact": (_compact, ["--dry-run"]),
        "gc": (_gc, ["--dry-run"]),
    }
    if name not in known:
        raise ValueError(
            f"there is no 'store {name}', only {', '.join(known)}. See softs-distill store --help"
        )
    command, allowed = known[name]
    for flag in flags:
        if flag not in allowed:
            raise ValueError(f"'store {name}' has no {flag}. See softs-distill store --help")
    if not rest:
        raise ValueError(f"'store {name}' needs a PATH. See softs-distill store --help")
    if name == "gc":
        recipes = [word for word in rest if word.startswith("recipe=")]
        if recipes and products_of is None:
            raise ValueError("recipes cannot be read here: name the products themselves")
        if recipes and products_of is not None:
            rest = [word for word in rest if word not in recipes] + list(products_of(recipes))
    return command(rest, bool(flags))


def _ls(words: Sequence[str], flag: bool) -> int:
    from softs_lightning.store.upkeep import contents

    _exactly(words, 1, "ls")
    found = contents(words[0])
    print("\n".join(map(str, found)) or "nothing yet")
    return 0


def _verify(words: Sequence[str], repair: bool) -> int:
    from softs_lightning.store.upkeep import verify

    _exactly(words, 1, "verify")
    problems = verify(words[0], repair=repair)
    print("\n".join(map(str, problems)) or "everything is as it was written")
    return 1 if any(not problem.repaired for problem in problems) else 0


def _export(words: Sequence[str], flag: bool) -> int:
    from softs_lightning.store.upkeep import export

    if len(words) < 2:
        raise ValueError("'store export' needs a PATH and the tar to write. See softs-distill store --help")
    print(f"{export(words[0], words[1], words[2:]):,} samples in {words[1]}")
    return 0


def _compact(words: Sequence[str], dry_run: bool) -> int:
    from softs_lightning.store.compacting import compact

    _exactly(words, 1, "compact")
    done = compact(words[0], dry_run=dry_run)
    print("\n".join(map(str, done)) or "there is nothing to merge")
    return 0


def _gc(words: Sequence[str], dry_run: bool) -> int:
    from softs_lightning.store.upkeep import clear

    removed = clear(words[0], words[1:] or None, dry_run=dry_run)
    print("\n".join(removed) or "there is nothing to remove")
    return 0


def _exactly(words: Sequence[str], count: int, name: str) -> None:
    if len(words) != count:
        raise ValueError(
            f"'store {name}' takes one PATH, got {' '.join(words)!r}. See softs-distill store --help"
        )


def options_of(arguments: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Split the words after ``precompute`` into its own options and what belongs to the recipe.

    Raises:
        ValueError: without ``store=PATH``, and for an option that is given twice.

    >>> options_of(["recipe=digits", "store=/tmp/s", "encoding=fp16", "data.labels=50"])
    ({'path': '/tmp/s', 'encoding': 'fp16'}, ['recipe=digits', 'data.labels=50'])
    """
    options: dict[str, str] = {}
    rest = []
    for word in arguments:
        name, _, value = word.partition("=")
        if name not in ("store", "encoding", "ids", "device", "mode"):
            rest.append(word)
            continue
        name = "path" if name == "store" else name
        if name in options:
            raise ValueError(f"{word.partition('=')[0]}= is given twice. See softs-distill store --help")
        options[name] = value
    if not options.get("path"):
        raise ValueError("precompute needs store=PATH. See softs-distill store --help")
    return options, rest


def precompute(
    path: str,
    teacher: Any,
    pairs: Iterable[Any],
    data: Any,
    *,
    device: Any = None,
    trainer: Any = None,
    **options: Any,
) -> Built:
    """Fill a store with what the pairs of a recipe need of its teacher, for its training data.

    Args:
        path: of the store.
        teacher: a module, a function that returns one, or a :class:`~softs_lightning.teacher.Teacher`.
        pairs: those of the recipe.
        data: a ``LightningDataModule``, or the training ``DataLoader`` itself.
        device: where the teacher runs, without a `trainer`.
        trainer: says in how many processes, where and in which precision the teacher runs, see
            :func:`~softs_lightning.store.ranks.build_over_ranks`; without one it is here and as it is.
        options: of :class:`~softs_lightning.store.StoredTeacher`.

    Raises:
        TypeError: when the training data is not one loader.
        ValueError: with both a `device` and a `trainer`.
    """
    from torch.utils.data import DataLoader

    from softs_lightning.store.build import build, stored_for

    if trainer is not None and device is not None:
        raise ValueError("device= is for one process: several run where trainer.accelerator says")

    loader = data
    if hasattr(data, "train_dataloader"):
        data.prepare_data()
        data.setup("fit")
        loader = data.train_dataloader()
    if not isinstance(loader, DataLoader):
        raise TypeError(
            f"the training data is {type(loader).__name__}, not one DataLoader: give ProductStore.build what to iterate over"
        )
    products = [pair.teacher for pair in pairs]
    if trainer is None:
        built = build(path, teacher, products, loader, device=device, **options)
    else:
        from softs_lightning.store.ranks import build_over_ranks

        stored, spec = stored_for(path, teacher, products, **options)
        stored.inspect(loader.dataset)
        built = build_over_ranks(trainer, stored, spec, loader)
    if trainer is None or trainer.is_global_zero:
        print(f"{path}: {built}")
    return built
