"""Students cut from their teacher: some of its layers, narrower if wanted, and an ordinary transformers model.

The student is built by the teacher's own class from a config that says what is left, and filled with the
teacher's weights. So it is what ``from_pretrained`` builds of what ``save_pretrained`` wrote: places of layers
that caches go by, kinds of attention that differ from layer to layer and tied embeddings come out as the class
makes them, and a layer that would be another at its new place is refused.

Which lists of layers a model has, and which number of its config says their length, is found by building it on
the meta device once more with that number raised by one.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from softs_lightning.narrowing import narrow_hidden, narrow_intermediate

__all__ = ["Stack", "from_teacher", "layer_stacks"]

DEPTH_NAMES = ("layer", "depth", "block")
PER_LAYER_NAMES = ("layer", "attn", "attention", "block", "mlp", "head")
PLACES = re.compile(r"(layer|block)_?(idx|id|index|number)|.*_layer_idx")
FIRST_LAYER_ONLY = ("has_relative_attention_bias",)  # T5's first layer holds the bias of all of them
ACROSS_LAYERS = {
    "scale_attn_by_inverse_layer_idx": "attention is scaled by the layer's place",
    "num_kv_shared_layers": "layers use the keys and values of others",
}

Choice = Sequence[int] | Mapping[str, Sequence[int]]
Source = PreTrainedModel | str | PathLike[str] | Callable[[], nn.Module]


@dataclass(frozen=True)
class Stack:
    """Layers that run one after another.

    Attributes:
        key: the number in the config that says how many there are, ``"num_hidden_layers"`` or, in a part
            of the config, ``"text_config.num_hidden_layers"``.
        names: of each ``nn.ModuleList`` that has one entry a layer; most often a single one.
        depth: how many layers there are.
    """

    key: str
    names: tuple[str, ...]
    depth: int

    def __str__(self) -> str:
        last = self.depth - 1
        return f"{', '.join(self.names)} with the layers {f'0 to {last}' if last else '0'}"

    def called(self, part: str) -> bool:
        """Whether `part` names it: ``"decoder"`` and ``"model.decoder.layers"`` both do."""
        return any(part == name or part in name.split(".") for name in self.names)


def layer_stacks(model: PreTrainedModel) -> tuple[Stack, ...]:
    """The lists of layers of a transformers model whose lengths its config says.

    Raises:
        ValueError: when there is none, with the reason: a model that shares one layer among all places
            (ALBERT) has nothing to leave out.

    >>> from transformers import T5Config, T5Model
    >>> config = T5Config(vocab_size=9, d_model=8, d_kv=4, d_ff=8, num_heads=2, num_layers=3, num_decoder_layers=2)
    >>> [str(stack) for stack in layer_stacks(T5Model(config))]
    ['encoder.block with the layers 0 to 2', 'decoder.block with the layers 0 to 1']
    """
    lengths = _list_lengths(model)
    found, numbers, failed = [], [], None
    for path, config in _configs(model.config):
        for name, depth in _numbers(config):
            key = f"{path}{name}"
            numbers.append(f"{key}={depth}")
            if depth not in lengths.values():
                continue
            try:
                longer = _list_lengths(
                    _on_meta(type(model), _with_depth(model.config, key, [*range(depth), -1]))
                )
            except Exception as error:  # a number of that name may mean anything to a config
                failed = error
                continue
            grown = tuple(n for n, length in lengths.items() if longer.get(n) == length + 1 == depth + 1)
            if grown:
                found.append(Stack(key, grown, depth))
    if not found:
        said = ", ".join(numbers) or "no number of layers"
        raise ValueError(
            f"{type(model).__name__} has no layers to choose from: its config says {said}, and no list of its "
            "modules grows with it. A model that runs the same layers again and again (ALBERT) has none to leave "
            "out: give its config fewer passes instead, and load the teacher's weights as they are"
        ) from failed
    return tuple(found)


def from_teacher(
    teacher: Source,
    *,
    layers: Choice | None = None,
    every: int | None = None,
    intermediate: int | None = None,
    hidden: int | None = None,
    inputs: Sequence[Mapping[str, Tensor]] | None = None,
) -> PreTrainedModel:
    """A student that starts as part of its teacher.

    Args:
        teacher: a transformers model, which is left as it is; a folder or name for ``from_pretrained``; or
            a function that makes one, such as :class:`softs_lightning.Pretrained`.
        layers: which layers it keeps, in rising order, negative ones counted from the end. A model with
            several stacks (encoder and decoder) keeps these of each; a mapping says it for each by
            name, ``{"encoder": [0, 2], "decoder": [0]}``, and leaves those it does not name whole.
        every: keep layers 0, `every`, 2 · `every`, ... of each stack.
        intermediate: width of the feed-forward layers: the most important of their neurons are kept, see
            :func:`softs_lightning.narrowing.narrow_intermediate`.
        hidden: width of the residual stream, where a narrower start is defined: a shared projection for
            ``llama``, ``mistral``, ``qwen2`` and ``qwen3``, with their head; the most important coordinates and
            heads for ``bert``, ``roberta``, ``xlm-roberta``, ``camembert`` and ``distilbert``; no other
            ``model_type``. See :func:`softs_lightning.narrowing.narrow_hidden`.
        inputs: batches of keyword arguments on which `hidden` finds what matters, for Llama-like models.

    Returns:
        a model of the teacher's class, dtype and device, in training mode (``from_pretrained`` leaves
        models in eval mode, without dropout), that shares no memory with the teacher.

    Raises:
        ValueError: for layers that are not there, naming those that are; for models whose layers cannot be
            left out or whose width cannot be reduced, with the reason.
        TypeError: when `teacher` is or makes no transformers model.

    >>> from transformers import BertConfig, BertModel
    >>> config = BertConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, intermediate_size=16)
    >>> student = from_teacher(BertModel(config), every=4, intermediate=12)
    >>> len(student.encoder.layer), student.config.num_hidden_layers, student.config.intermediate_size
    (3, 3, 12)
    """
    if layers is not None and every is not None:
        raise ValueError("layers and every both say which layers are kept: give one of them")
    if layers is None and every is None and intermediate is None and hidden is None:
        raise ValueError("nothing to cut: say layers or every, intermediate, hidden")
    if inputs is not None and hidden is None:
        raise ValueError("inputs are what hidden goes by: give hidden too")
    model = _model(teacher)
    student = None
    if layers is not None or every is not None:
        student = _keep_layers(model, layers, every)
    if intermediate is not None:
        student = narrow_intermediate(student or model, intermediate)
    if hidden is not None:
        student = narrow_hidden(student or model, hidden, inputs=inputs)
    assert student is not None
    moved: PreTrainedModel = student.to(cast(Any, model.device)).train()
    return moved


def _model(teacher: Source) -> PreTrainedModel:
    made: Any = teacher
    if isinstance(teacher, (str, PathLike)):
        from softs_lightning.folders import folder
        from softs_lightning.pretrained import Pretrained

        made = Pretrained(folder(teacher))()
    elif not isinstance(teacher, nn.Module) and callable(teacher):
        made = teacher()
    if not isinstance(made, PreTrainedModel):
        raise TypeError(
            f"a student is cut from a transformers model, a folder or name of one, or a function that makes one; "
            f"got {type(made).__name__}. Of a module that holds one, give that part"
        )
    if getattr(made, "hf_quantizer", None) is not None:
        raise TypeError(
            "the teacher is quantized, and its weights cannot be trained on: load it without quantization"
        )
    return made


def _keep_layers(model: PreTrainedModel, layers: Choice | None, every: int | None) -> PreTrainedModel:
    stacks = layer_stacks(model)
    kept = _chosen(stacks, layers, every)
    for name, reason in ACROSS_LAYERS.items():
        if getattr(model.config.get_text_config(), name, None):
            raise ValueError(f"{name} is set: {reason}, so that a layer at another place is another layer")
    config = model.config
    for stack in stacks:
        config = _with_depth(config, stack.key, kept[stack])
    try:
        student = _build(type(model), config, model.dtype)
    except Exception as error:
        raise ValueError(f"{type(model).__name__} cannot be built with these layers: {error}") from error
    _same_layers(model, student, kept)
    _fill(model, student, kept)
    return student


def _chosen(
    stacks: Sequence[Stack], layers: Choice | None, every: int | None
) -> dict[Stack, tuple[int, ...]]:
    there = "; ".join(map(str, stacks))
    if every is not None:
        if type(every) is not int or every < 1:
            raise ValueError(f"every must be a whole number from 1 on, got {every!r}")
        return {stack: tuple(range(0, stack.depth, every)) for stack in stacks}
    if not isinstance(layers, Mapping):
        return {stack: _indices(stack, layers) for stack in stacks}
    for part in layers:
        named = [stack for stack in stacks if stack.called(part)]
        if len(named) != 1:
            what = "no list of layers" if not named else "several lists of layers"
            raise ValueError(f"layers[{part!r}] names {what}; there is {there}")
    given = {stack: wanted for part, wanted in layers.items() for stack in stacks if stack.called(part)}
    if len(given) < len(layers):
        raise ValueError(f"layers says something twice of one list: {sorted(layers)}; there is {there}")
    return {stack: _indices(stack, given.get(stack, range(stack.depth))) for stack in stacks}


def _indices(stack: Stack, wanted: Any) -> tuple[int, ...]:
    whole = (
        isinstance(wanted, Sequence) and not isinstance(wanted, str) and all(type(i) is int for i in wanted)
    )
    if not whole or not wanted:
        raise ValueError(f"layers must be whole numbers, at least one, got {wanted!r}; there is {stack}")
    missing = [i for i in wanted if not -stack.depth <= i < stack.depth]
    if missing:
        raise ValueError(f"there is no layer {', '.join(map(str, missing))} to keep; there is {stack}")
    indices = tuple(i % stack.depth for i in wanted)
    if any(a >= b for a, b in itertools.pairwise(indices)):
        raise ValueError(
            f"layers must rise, each kept once, in the order in which they run; got {list(wanted)} of {stack}"
        )
    return indices


# -- configs --------------------------------------------------------------------------------------


def _configs(config: PreTrainedConfig) -> Iterator[tuple[str, PreTrainedConfig]]:
    """A config and those inside it, each with the path that leads there."""
    yield "", config
    for name in config.sub_configs or ():
        inner = getattr(config, name, None)
        if isinstance(inner, PreTrainedConfig):
            for path, deeper in _configs(inner):
                yield f"{name}.{path}", deeper


def _numbers(config: PreTrainedConfig) -> list[tuple[str, int]]:
    return [
        (name, value)
        for name, value in config.to_dict().items()
        if type(value) is int and value > 0 and any(part in name for part in DEPTH_NAMES)
    ]


def _with_depth(config: PreTrainedConfig, key: str, kept: Sequence[int]) -> PreTrainedConfig:
    """A copy with as many layers as `kept` has, and every list with an entry a layer cut likewise."""
    copied = copy.deepcopy(config)
    *path, name = key.split(".")
    owner: Any = copied
    for part in path:
        owner = getattr(owner, part)
    depth = getattr(owner, name)
    setattr(owner, name, len(kept))
    for other, value in owner.to_dict().items():
        per_layer = isinstance(value, (list, tuple)) and len(value) == depth
        if per_layer and any(part in other for part in PER_LAYER_NAMES):
            setattr(owner, other, [value[i] for i in kept])
    return copied


# -- models ---------------------------------------------------------------------------------------


def _list_lengths(model: nn.Module) -> dict[str, int]:
    return {name: len(part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)}


def _on_meta(kind: type[PreTrainedModel], config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"):
        return kind(config)


def _build(kind: type[PreTrainedModel], config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """A model of random weights; what was drawn for them does not show in what is drawn later."""
    with torch.random.fork_rng(devices=()):
        return cast(PreTrainedModel, cast(Any, kind)._from_config(config, dtype=dtype))


def _same_layers(model: nn.Module, student: nn.Module, kept: Mapping[Stack, Sequence[int]]) -> None:
    """Refuse a layer that its class makes another one at its new place."""
    for stack, indices in kept.items():
        for name in stack.names:
            for new, old in enumerate(indices):
                ours, theirs = student.get_submodule(f"{name}.{new}"), model.get_submodule(f"{name}.{old}")
                difference = _difference(ours, theirs)
                if difference:
                    raise ValueError(
                        f"layer {old} of {name} cannot be kept as layer {new}: its {difference}. Keep layers "
                        "that are alike at their new places"
                    )


def _difference(ours: nn.Module, theirs: nn.Module) -> str | None:
    others = dict(theirs.named_modules())
    for path, one in ours.named_modules():
        other = others.get(path)
        if other is None:
            continue  # what is missing shows in the weights
        if type(one) is not type(other):
            return f"{path or 'class'} is {type(other).__name__}, there it would be {type(one).__name__}"
        for name, value in vars(one).items():
            passing = name.startswith("_") or name == "training" or name in FIRST_LAYER_ONLY
            if passing or PLACES.fullmatch(name) or not isinstance(value, (bool, int, float, str)):
                continue
            if getattr(other, name, value) != value:
                where = f"{path}.{name}" if path else name
                return f"{where} is {getattr(other, name)!r}, there it would be {value!r}"
    return None


def _fill(model: nn.Module, student: nn.Module, kept: Mapping[Stack, Sequence[int]]) -> None:
    theirs = model.state_dict()
    places = {
        f"{name}.{new}.": (name, old)
        for s, k in kept.items()
        for name in s.names
        for new, old in enumerate(k)
    }
    filled: dict[str, Tensor] = {}
    used = set()
    for name, value in student.state_dict().items():
        prefix = next((place for place in places if name.startswith(place)), None)
        source = name
        if prefix is not None:
            there = f"{places[prefix][0]}.{places[prefix][1]}.{name.removeprefix(prefix)}"
            # What only the layer at that place has, such as T5's relative positions in the first, stays there.
            source = there if there in theirs else name
        if source not in theirs or theirs[source].shape != value.shape:
            has = f"of shape {list(theirs[source].shape)}" if source in theirs else "missing"
            raise ValueError(
                f"the student's {name} has shape {list(value.shape)}, and the teacher's is {has}: "
                f"{type(model).__name__} was changed after it was built, or keeps something for all layers together"
            )
        used.add(source)
        filled[name] = theirs[source]
    dropped = [f"{n}.{i}." for s, k in kept.items() for n in s.names for i in range(s.depth) if i not in k]
    for name in theirs.keys() - used:
        if not name.startswith(tuple(dropped)):
            raise ValueError(f"the teacher's {name} has no place in a {type(student).__name__} of its config")
    student.load_state_dict(filled)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        cast(Any, student).generation_config = copy.deepcopy(generation)
