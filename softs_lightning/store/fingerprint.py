"""Who made a product: the identity of a teacher and of what feeds it.

A fingerprint is plain data, kept beside the products, so that a difference can be named.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from softs_lightning.names import strip_wrappers
from softs_lightning.transfer import iter_tensors

__all__ = ["differences", "feed_fingerprint", "teacher_fingerprint"]

# What a configuration notes about where it came from, not about what the model computes.
_PROVENANCE = {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash"}


def teacher_fingerprint(module: nn.Module) -> dict[str, Any]:
    """What decides a frozen model's outputs, as plain data.

    Digests of the weights and buffers (names, types, shapes, bytes) and of the printed architecture,
    the configuration if the model has one, and the major versions of torch and transformers. Names
    are taken without the wrappers of ``torch.compile`` and DDP. Reads every weight once.

    Raises:
        TypeError: for a weight whose bytes cannot be read; give such a teacher an identity by hand.

    >>> torch.manual_seed(0).initial_seed()
    0
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    >>> before = teacher_fingerprint(net)
    >>> before == teacher_fingerprint(net)
    True
    >>> _ = net[0].weight.data.add_(1)
    >>> differences(before, teacher_fingerprint(net))[0].split(":")[0]
    'weights'
    """
    weights = hashlib.blake2b(digest_size=16)
    count = 0
    types = set()
    for name, tensor in _tensors(module):
        try:
            data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, TypeError, NotImplementedError) as error:
            raise TypeError(
                f"the weight {name!r} of {type(module).__name__}, a {type(tensor).__name__}, cannot be read as bytes "
                f"({error}): say who this teacher is with identity='name and revision'"
            ) from error
        weights.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}\n".encode())
        weights.update(data.data)
        count += tensor.numel()
        types.add(str(tensor.dtype).removeprefix("torch."))
    architecture = re.sub(r" at 0x[0-9a-f]+", "", repr(_inner(module)))
    return {
        "class": type(_inner(module)).__name__,
        "weights": weights.hexdigest(),
        "architecture": hashlib.blake2b(architecture.encode(), digest_size=16).hexdigest(),
        "numbers": count,
        "dtype": "+".join(sorted(types)),
        "config": _config(module),
        "torch": _major("torch"),
        "transformers": _major("transformers") if _config(module) else None,
    }


def _tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    named = {strip_wrappers(n): t for n, t in [*module.named_parameters(), *module.named_buffers()]}
    named.update(_packed(module))
    yield from sorted(named.items())


def _packed(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights that quantised layers of ``torch.ao`` keep outside their parameters, as what they stand for."""
    for name, layer in module.named_modules():
        kind = type(layer).__module__
        if kind.startswith("torch.ao.nn.") and ".quantized." in kind:
            for key, value in layer.state_dict().items():
                for i, tensor in enumerate(iter_tensors(value)):
                    yield (
                        f"{strip_wrappers(name)}.{key}.{i}",
                        tensor.dequantize() if tensor.is_quantized else tensor,
                    )


def _inner(module: nn.Module) -> nn.Module:
    for name, inner in module.named_modules():
        if name and not strip_wrappers(name):
            module = inner
    return module


def _config(module: nn.Module) -> dict[str, Any]:
    for inner in module.modules():
        config = getattr(inner, "config", None)
        to_dict = getattr(config, "to_dict", None)
        if callable(to_dict):
            plain = {k: v for k, v in to_dict().items() if k not in _PROVENANCE}
            attention = getattr(config, "_attn_implementation", None)
            found: dict[str, Any] = json.loads(
                json.dumps({**plain, "attention": attention}, default=str, sort_keys=True)
            )
            return found
    return {}


def _major(package: str) -> int | None:
    try:
        return int(importlib.metadata.version(package).split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return None


def feed_fingerprint(feed: Any) -> str:
    """The state of what turns raw samples into the teacher's input: a tokenizer, a transform, or a name for it.

    Args:
        feed: ``None``, a string that the user vouches for, a tokenizer of transformers or tokenizers
            (vocabulary, merges, special tokens; padding and truncation show in the input itself), or
            an object whose ``repr`` shows its settings, as torchvision's transforms have it.

    Raises:
        TypeError: for an object whose ``repr`` shows an address instead of its settings.

    >>> feed_fingerprint("imagenet-224 v2")
    'imagenet-224 v2'
    """
    if feed is None or isinstance(feed, str):
        return feed or ""
    kind = type(feed).__name__
    backend = getattr(feed, "backend_tokenizer", feed)
    if callable(getattr(backend, "to_str", None)):
        state = json.loads(backend.to_str())
        state = {k: v for k, v in state.items() if k not in ("padding", "truncation")}
        text = json.dumps(state, sort_keys=True)
    elif callable(getattr(feed, "get_vocab", None)):
        special = getattr(feed, "special_tokens_map", {})
        text = json.dumps([feed.get_vocab(), special], sort_keys=True, default=str)
    else:
        text = repr(feed)
        if " at 0x" in text:
            raise TypeError(
                f"the state of {kind} cannot be seen in its repr, {text[:80]}: pass a string that names it, as in "
                "feed='imagenet-224 v2'"
            )
    return f"{kind}:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def differences(stored: Mapping[str, Any], asked: Mapping[str, Any], prefix: str = "") -> list[str]:
    """The entries in which two fingerprints differ, each as a line.

    >>> differences({"dtype": "float32", "config": {"layers": 6}}, {"dtype": "float32", "config": {"layers": 12}})
    ['config.layers: the store has 6, asked for is 12']
    """
    lines = []
    for key in [*stored, *(k for k in asked if k not in stored)]:
        ours, theirs = stored.get(key), asked.get(key)
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            lines += differences(ours, theirs, f"{prefix}{key}.")
        elif ours != theirs:
            lines.append(f"{prefix}{key}: the store has {ours!r}, asked for is {theirs!r}")
    return lines
