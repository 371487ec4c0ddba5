"""Several inputs in one forward: each invoke's input becomes its rows of one batch, and each block sees its rows.

A row is an index of dimension 0. A tensor of the model is taken to hold the batch if its dimension 0 is as long
as the batch; every other tensor is shared and seen whole. So is a tensor that a model keeps in another layout,
such as (sequence, batch, width), or with more rows than the batch has (beams).
"""

import copy
from collections import UserList, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from softs_lightning.transfer import iter_tensors, map_tensors

__all__ = ["Inputs", "RowRange", "join", "leaves", "rows_of", "tokenized"]

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

# What tokenizers return per token, and what each is padded with; input_ids take the tokenizer's own padding.
_PADDING = {"attention_mask": 0, "token_type_ids": 0, "special_tokens_mask": 1, "labels": -100}

_WHOLE = torch.Size, PackedSequence  # tuples whose elements make sense together only


def _children(value: Any) -> dict[Any, Any] | None:
    """What is in a container, by key, index or field."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, tuple | list | deque | UserList) and not isinstance(value, _WHOLE):
        return dict(enumerate(value))
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value) if hasattr(value, each.name)}
    return None


def _rebuild(like: Any, children: dict[Any, Any]) -> Any:
    """A container of the kind of ``like``, with other elements in it."""
    kind: Any = type(like)
    if isinstance(like, tuple):
        # Past a class's own __new__, which may take other arguments, but for torch's return types.
        structure = hasattr(kind, "n_sequence_fields")
        return kind(children.values()) if structure else tuple.__new__(kind, children.values())
    if isinstance(like, Mapping) and not isinstance(like, MutableMapping):
        return kind(children)
    new = copy.copy(like)
    for key, child in children.items():
        if isinstance(like, Mapping | list | deque | UserList):
            new[key] = child
        else:
            object.__setattr__(new, key, child)
    return new


def leaves(value: Any) -> Iterator[Any]:
    """Everything in ``value`` that is not a tuple, list, mapping or dataclass."""
    children = _children(value)
    if children is None:
        yield value
        return
    for child in children.values():
        yield from leaves(child)


def _map(function: Callable[..., Any], where: str, *values: Any) -> Any:
    """Apply ``function(where, *leaves)`` over values of the same structure."""
    children = [_children(value) for value in values]
    first = children[0]
    for value, each in zip(values, children, strict=True):
        if (each is None) != (first is None) or list(each or ()) != list(first or ()):
            raise ValueError(f"{where} is {_said(values[0])} in one place and {_said(value)} in another")
    if first is None:
        return function(where, *values)
    mapped = {
        key: _map(function, f"{where}[{key!r}]", *(each[key] for each in children if each is not None))
        for key in first
    }
    return values[0] if all(mapped[key] is first[key] for key in first) else _rebuild(values[0], mapped)


def _said(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    of = f" with the keys {list(value)}" if isinstance(value, Mapping) else ""
    of = f" of {len(value)}" if isinstance(value, tuple | list) else of
    return f"a {type(value).__name__}{of}"


@dataclass(frozen=True)
class RowRange:
    """Rows ``start`` to ``start + size`` of a batch of ``total``."""

    start: int
    size: int
    total: int

    def _holds(self, value: Any, size: int) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == size

    def narrow(self, value: Any) -> Any:
        """These rows of every tensor that holds the batch, as views."""

        def rows(_: str, each: Any) -> Any:
            return each.narrow(0, self.start, self.size) if self._holds(each, self.total) else each

        return _map(rows, "the value", value)

    def state(self, value: Any) -> list[tuple[Any, int]]:
        """What a view of these rows holds, and how often that was changed in place, where tensors tell."""
        return [(each, _version(each) if self._holds(each, self.size) else 0) for each in leaves(value)]

    def changed(self, value: Any, before: list[tuple[Any, int]], *, in_place: bool) -> bool:
        """Whether the view holds something else than ``before``, or, with ``in_place``, the same but changed."""
        now = self.state(value)
        if len(now) != len(before):
            return True
        return any(a is not b or (in_place and v != w) for (a, v), (b, w) in zip(now, before, strict=True))

    def check(self, value: Any, whole: Any) -> None:
        """Raise ValueError unless ``value`` fits these rows of ``whole``."""

        def fits(where: str, old: Any, new: Any) -> None:
            if self._holds(old, self.total) and not self._holds(new, self.size):
                raise ValueError(
                    f"{where} is {_said(new)}, but this block has rows {self.start} to "
                    f"{self.start + self.size - 1} of the batch, so it needs {self.size} in dimension 0"
                )

        _map(fits, "the value written", whole, value)

    def widen(self, whole: Any, value: Any) -> Any:
        """``whole`` with ``value`` as these rows; the gradient reaches both."""

        def put(_: str, old: Any, new: Any) -> Any:
            if not self._holds(old, self.total):
                return new
            end = self.start + self.size
            return torch.cat([old[: self.start], new.to(old.device), old[end:]])

        return _map(put, "the value written", whole, value)

    def check_part(self, value: Any) -> None:
        """Raise ValueError unless every tensor in ``value`` has as many rows as this range."""
        for each in iter_tensors(value):
            if not self._holds(each, self.size):
                raise ValueError(f"this block has {self.size} rows of the batch; it skips with {_said(each)}")

    def gather(self, parts: list[Any]) -> Any:
        """One value for the batch from those of all its ranges, in order."""

        def cat(_: str, *each: Any) -> Any:
            return torch.cat(each) if isinstance(each[0], torch.Tensor) else each[0]

        return _map(cat, "the value skipped with", *parts)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def rows_of(inputs: Inputs) -> int:
    """How many rows an input has.

    Raises:
        ValueError: it holds no tensor, or tensors of different lengths.
    """
    lengths = {each.shape[0] for each in iter_tensors(inputs) if each.dim()}
    if len(lengths) != 1:
        found = f"tensors of {sorted(lengths)} rows"
        if not lengths:
            text = any(isinstance(each, str) for each in leaves(inputs))
            found = "text, and the envoy has no tokenizer" if text else "no tensor with a batch dimension"
        raise ValueError(
            f"an input of tracer.invoke() has to have one number of rows; this one holds {found}"
        )
    return int(lengths.pop())


def join(inputs: Sequence[Inputs], padding: int | None, side: str) -> Inputs:
    """One batch of several inputs of the same structure.

    Token inputs of different lengths are padded on ``side`` with ``padding``, if they have an attention mask.

    Raises:
        ValueError: the inputs differ in structure, or in shape beyond dimension 0, or in what is no tensor.
    """
    if len(inputs) == 1:
        return inputs[0]
    inputs = _padded(inputs, padding, side)

    def merge(where: str, *each: Any) -> Any:
        if all(isinstance(value, torch.Tensor) and value.dim() for value in each):
            if len({(value.shape[1:], value.dtype) for value in each}) > 1:
                raise ValueError(
                    f"{where} differs between invokes: {', '.join(_said(value) for value in each)}; a batch needs "
                    "the same shape beyond dimension 0 (tokens are padded where there is an attention mask)"
                )
            return torch.cat(each)
        for value in each[1:]:
            both = isinstance(value, torch.Tensor) and isinstance(each[0], torch.Tensor)
            same = torch.equal(value, each[0]) if both else type(value) is type(each[0]) and value == each[0]
            if not same:
                raise ValueError(
                    f"{where} is {each[0]!r} in one invoke and {value!r} in another; it has to be one"
                )
        return each[0]

    args = _map(merge, "the positional input", *(args for args, _ in inputs))
    kwargs = _map(merge, "the keyword input", *({key: kw[key] for key in sorted(kw)} for _, kw in inputs))
    return args, kwargs


def _padded(inputs: Sequence[Inputs], padding: int | None, side: str) -> Sequence[Inputs]:
    tokens = [kwargs.get("input_ids") for _, kwargs in inputs]
    if not all(isinstance(each, torch.Tensor) and each.dim() == 2 for each in tokens):
        return inputs
    lengths = [each.shape[1] for each in tokens if each is not None]
    longest = max(lengths)
    if min(lengths) == longest:
        return inputs
    padded = []
    for (args, kwargs), length in zip(inputs, lengths, strict=True):
        if "attention_mask" not in kwargs:
            raise ValueError(
                f"the invokes have token inputs of {sorted(set(lengths))} tokens and no attention_mask; padding "
                "would change what the model sees, so give the mask too (a tokenizer's output has it)"
            )
        if padding is None:
            raise ValueError(
                "the invokes' token inputs differ in length and there is no padding token: set "
                "`tokenizer.pad_token`, and make the envoy with `Envoy(model, tokenizer=tokenizer)`"
            )
        fill = {**_PADDING, "input_ids": padding}
        kwargs = dict(kwargs)
        for key, value in kwargs.items():
            if key in fill and isinstance(value, torch.Tensor) and value.shape[1:] == (length,):
                gap = (longest - length, 0) if side == "left" else (0, longest - length)
                kwargs[key] = functional.pad(value, gap, value=fill[key])
        padded.append((args, kwargs))
    return padded


def tokenized(args: tuple[Any, ...], kwargs: dict[str, Any], tokenizer: Any, model: nn.Module) -> Inputs:
    """The input as tensors: text through the tokenizer, a tokenizer's output as keyword arguments.

    Without a tokenizer, text is left to the model.

    Raises:
        ValueError: there are several texts, and the tokenizer has no padding token.
    """
    if len(args) != 1 or isinstance(args[0], torch.Tensor):
        return args, kwargs
    (first,) = args
    texts = [first] if isinstance(first, str) else first
    if isinstance(texts, list | tuple) and texts and all(isinstance(each, str) for each in texts):
        if tokenizer is None:
            return args, kwargs
        if len(texts) > 1 and getattr(tokenizer, "pad_token", "") is None:
            raise ValueError("several texts need padding: set `tokenizer.pad_token`, it is None")
        first = tokenizer(list(texts), return_tensors="pt", padding=len(texts) > 1)
    elif isinstance(first, dict) or not isinstance(first, Mapping) or "input_ids" not in first:
        return args, kwargs
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    return (), {**map_tensors(lambda each: each.to(device), dict(first)), **kwargs}
