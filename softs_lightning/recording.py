"""Recording by declaration: a model's ``forward`` collects per-layer outputs that its layers know nothing of.

A class says in ``_can_record_outputs`` which submodules produce what (``softs_lightning.recorders``),
its ``forward`` is decorated with :func:`capture_outputs`, and ``model(..., output_hidden_states=True)``
returns them. It works on any ``nn.Module``; a ``config`` is used where there is one.

>>> from dataclasses import dataclass
>>> class Attention(nn.Module):
...     def forward(self, hidden_states):
...         weights = (hidden_states @ hidden_states.mT).softmax(-1)
...         return weights @ hidden_states, weights
>>> class Block(nn.Module):
...     def __init__(self):
...         super().__init__()
...         self.self_attn, self.crossattention = Attention(), Attention()
...     def forward(self, hidden_states):
...         hidden_states, _ = self.self_attn(hidden_states)
...         return self.crossattention(hidden_states)[0]
>>> @dataclass
... class Output:
...     last_hidden_state: torch.Tensor
...     hidden_states: tuple | None = None
...     attentions: tuple | None = None
...     cross_attentions: tuple | None = None
>>> class Model(nn.Module):
...     _can_record_outputs = {
...         "hidden_states": Block,  # what each Block returns, after what the first is given
...         "attentions": OutputRecorder(Attention, index=1, layer_name="self_attn"),
...         "cross_attentions": OutputRecorder(Attention, index=1, layer_name="crossattention"),
...     }
...     def __init__(self):
...         super().__init__()
...         self.layers = nn.ModuleList([Block(), Block()])
...     @merge_with_config_defaults
...     @capture_outputs
...     def forward(self, hidden_states, **kwargs):
...         for layer in self.layers:
...             hidden_states = layer(hidden_states)
...         return Output(last_hidden_state=hidden_states)
>>> out = Model()(torch.ones(1, 4, 8), output_hidden_states=True, output_attentions=True)
>>> len(out.hidden_states), len(out.attentions), out.cross_attentions[0].shape
(3, 2, torch.Size([1, 4, 4]))
>>> Model()(torch.ones(1, 4, 8)).hidden_states is None
True
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn

from softs_lightning.collecting import Wanted, record, records_now
from softs_lightning.names import quoted
from softs_lightning.product import describe
from softs_lightning.recorders import DECLARATION, OutputRecorder, configured

__all__ = ["OutputRecorder", "capture_outputs", "merge_with_config_defaults"]

Forward = TypeVar("Forward", bound=Callable[..., Any])

FOLLOWERS = {"cross_attentions": "attentions", "mask_decoder_attentions": "attentions"}
"""Outputs that are recorded along with another unless the call or the config says otherwise."""


@overload
def capture_outputs(func: Forward) -> Forward: ...
@overload
def capture_outputs(*, tie_last_hidden_states: bool = ...) -> Callable[[Forward], Forward]: ...
def capture_outputs(func: Any = None, *, tie_last_hidden_states: bool = True) -> Any:
    """Decorate a model's ``forward`` so that it records what the class declares in ``_can_record_outputs``.

    For each declared key the call may give ``output_<key>``: ``True``, ``False``, or the positions
    that are wanted, as an int or a list of ints (negative ones count from the end; the others hold
    ``None``). ``None``, or nothing, means what ``self.config.output_<key>`` says, or else ``False``.
    ``cross_attentions`` follow ``output_attentions``. What is recorded is put as a tuple into the
    returned dataclass, ``ModelOutput`` or dict; with ``return_dict=False`` (from the call, or else the
    config) that becomes a tuple of what it holds. ``forward`` is given those flags that it has
    parameters for.

    Args:
        tie_last_hidden_states: whether the last of ``hidden_states`` is the output's
            ``last_hidden_state``, after a final norm. ``config.tie_last_hidden_states`` decides first.

    Raises:
        ValueError: for a key that matches no module of the model.
        IndexError: for an index that a module's output, or a position that the record, does not have.
        TypeError: when ``forward`` returns something that nothing can be put into.
        RuntimeError: when no declared module ran, when what they gave was ``None``, and when a
            re-entrant checkpoint cut what was recorded off the graph.
    """

    def decorate(forward: Forward) -> Forward:
        @functools.wraps(forward)
        def recording_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return_dict = kwargs.pop("return_dict", None)
            if return_dict is None:
                return_dict = configured(self, "return_dict")
            wanted, args = flags(self, args, kwargs)
            if wanted or (not torch.compiler.is_compiling() and records_now(self)):
                output, values = record(forward, self, args, kwargs, wanted)
                setting = configured(self, "tie_last_hidden_states")
                if tie_last_hidden_states if setting is None else setting:
                    _tie(output, values)
                output = _put(self, output, values) if values else output
            else:
                output = forward(self, *args, **kwargs)
            return _as_tuple(self, output) if return_dict is False else output

        flags = _Flags(forward)
        marked: Any = recording_forward
        marked._ties_last_hidden_state = tie_last_hidden_states
        return cast(Forward, recording_forward)

    return decorate if func is None else decorate(func)


class _Parameters:
    """How a function takes an argument: by position, by name, in ``**kwargs``, or not at all."""

    def __init__(self, function: Callable[..., Any]) -> None:
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self.positions = {name: at for at, name in enumerate(positional[1:])}  # without self
        self.named = {p.name for p in parameters}
        self.open = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def given(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        at = self.positions.get(name, len(args))
        return args[at] if at < len(args) else kwargs.get(name)

    def put(self, name: str, value: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
        """Let the function see `value`, where it stood or by keyword, if it has any place for it."""
        at = self.positions.get(name, len(args))
        if at < len(args):
            args[at] = value
        elif name in self.named or self.open:
            kwargs[name] = value
        else:
            kwargs.pop(name, None)


class _Flags(_Parameters):
    """Reads the ``output_<key>`` arguments of a call."""

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[dict[str, Wanted], tuple[Any, ...]]:
        """What is wanted, by key, and the positional arguments; both kinds then hold the flags resolved."""
        new = list(args)
        wanted: dict[str, Wanted] = {}
        keys = getattr(model, DECLARATION, None) or ()
        for key in keys:
            name = f"output_{key}"
            value = self.given(name, args, kwargs)
            if value is None:
                value = configured(model, name)
            if name in kwargs or (value is not None and name in self.named):
                self.put(name, value, new, kwargs)
            if asked := _wanted(name, value):
                wanted[key] = asked
            elif value is None and key in FOLLOWERS:
                leader = f"output_{FOLLOWERS[key]}"
                led = self.given(leader, args, kwargs)
                if configured(model, leader) if led is None else led:
                    wanted[key] = Wanted(follows=True)
        return wanted, tuple(new)


def _wanted(name: str, value: Any) -> Wanted | None:
    if value is None or value is False:
        return None
    if value is True:
        return Wanted()
    positions = (
        (value,) if isinstance(value, int) else tuple(value) if isinstance(value, (list, tuple)) else None
    )
    if positions is None or not all(isinstance(at, int) and not isinstance(at, bool) for at in positions):
        raise TypeError(f"{name} must be True, False, None, an int or a list of ints, got {value!r}")
    return Wanted(positions) if positions else None


# -- what the model returns ----------------------------------------------------------------------


def _tie(output: Any, values: dict[str, tuple[Any, ...]]) -> None:
    states = values.get("hidden_states", (None,))
    last = (
        output.get("last_hidden_state")
        if isinstance(output, Mapping)
        else getattr(output, "last_hidden_state", None)
    )
    if last is not None and states[-1] is not None:
        values["hidden_states"] = (*states[:-1], last)


def _put(model: nn.Module, output: Any, values: Mapping[str, tuple[Any, ...]]) -> Any:
    if isinstance(output, MutableMapping):  # a ModelOutput is one, too
        for key, value in values.items():
            output[key] = value  # not update(): ModelOutput refuses it
        return output
    if not dataclasses.is_dataclass(output) or isinstance(output, type):
        raise TypeError(
            f"{type(model).__name__}.forward returned {describe(output)}, and {quoted(list(values))} cannot be put "
            "into that: return a dataclass, a ModelOutput or a dict"
        )
    fields = [field.name for field in dataclasses.fields(output)]
    missing = [key for key in values if key not in fields]
    if missing:
        raise TypeError(
            f"{type(output).__name__} has no field for {quoted(missing)}; its fields are {quoted(fields)}"
        )
    return dataclasses.replace(output, **values)


def _as_tuple(model: nn.Module, output: Any) -> tuple[Any, ...]:
    if hasattr(output, "to_tuple"):
        return cast(tuple[Any, ...], output.to_tuple())
    if isinstance(output, tuple):
        return output
    if isinstance(output, Mapping):
        return tuple(value for value in output.values() if value is not None)
    if dataclasses.is_dataclass(output) and not isinstance(output, type):
        values = [getattr(output, field.name) for field in dataclasses.fields(output)]
        return tuple(value for value in values if value is not None)
    raise TypeError(
        f"return_dict=False asks for a tuple, and {type(model).__name__}.forward returned {describe(output)}: "
        "return a dataclass, a ModelOutput or a dict"
    )


# -- defaults from the config --------------------------------------------------------------------

DEFAULTED = ("use_cache", "vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio")


def merge_with_config_defaults(func: Forward) -> Forward:
    """Decorate a model's ``forward`` so that arguments left ``None`` take what ``self.config`` says.

    These are ``use_cache``, ``vision_feature_layer``, ``vision_feature_select_strategy`` and
    ``vision_aspect_ratio``, where ``forward`` takes them and the config has them. The config is only
    read. ``use_cache`` becomes ``False`` while activations are checkpointed
    (``self.gradient_checkpointing``, in training, with gradients).

    Raises:
        ValueError: for a ``vision_feature_select_strategy`` other than ``"default"`` and ``"full"``.

    >>> from types import SimpleNamespace
    >>> class Decoder(nn.Module):
    ...     config = SimpleNamespace(use_cache=True)
    ...     @merge_with_config_defaults
    ...     def forward(self, x, use_cache=None):
    ...         return use_cache
    >>> Decoder()(1), Decoder()(1, use_cache=False)
    (True, False)
    """
    parameters = _Parameters(func)
    taken = [name for name in DEFAULTED if parameters.open or name in parameters.named]

    @functools.wraps(func)
    def merged(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        new = list(args)
        for name in taken:
            value = parameters.given(name, args, kwargs)
            if value is None:
                value = configured(self, name)
            if value is None:
                continue
            if name == "use_cache" and value and _checkpoints(self):
                value = False
            if name == "vision_feature_select_strategy" and value not in ("default", "full"):
                raise ValueError(f"{name} must be 'default' or 'full', got {value!r}")
            parameters.put(name, value, new, kwargs)
        return func(self, *new, **kwargs)

    return cast(Forward, merged)


def _checkpoints(model: nn.Module) -> bool:
    return (
        bool(getattr(model, "gradient_checkpointing", False)) and model.training and torch.is_grad_enabled()
    )
