"""Narrower copies of transformers models: where a smaller width is defined, and what it starts as.

``intermediate``  neurons of the feed-forward layers are left out. Any model whose config names that width and
                  whose weights of it are matrices and vectors; exact for neurons whose weights are zero.
``hidden``        of the residual stream. Llama-like models (pre-norm, RMSNorm) allow any rotation of it, so
                  its principal directions are kept (as in SliceGPT, arXiv:2401.15024, with one basis for all
                  layers, so that no matrices are added); exact when the stream lies in as many dimensions.
                  BERT-like models (LayerNorm with its own weights after every sum) allow none: their most
                  important coordinates and heads are kept (as in Minitron, arXiv:2407.14679), a start to
                  train from and nothing more.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

__all__ = ["narrow_hidden", "narrow_intermediate"]

INTERMEDIATE_NAMES = (
    "intermediate_size",
    "n_inner",
    "hidden_dim",
    "d_ff",
    "ffn_dim",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
)
LAYER = re.compile(r".*?\.\d+(?=\.)")

ROTATED = ("llama", "mistral", "qwen2", "qwen3")
SELECTED = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert")

READERS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
WRITERS = ("o_proj", "down_proj")
HEADS_OUT = re.compile(r"attention\.(self\.(query|key|value)|[qkv]_lin)\.(weight|bias)$")
HEADS_IN = re.compile(r"attention\.(output\.dense|out_lin)\.weight$")
VALUES = re.compile(r"attention\.(self\.value|v_lin)\.weight$")


def narrow_intermediate(model: PreTrainedModel, width: int) -> PreTrainedModel:
    """A copy whose feed-forward layers are `width` wide.

    In each layer the neurons are kept for which the product of the norms of their weights (in, gate, out)
    is largest, in the order in which they stand.

    Raises:
        ValueError: for a width that is not smaller, for models whose config does not name it, and for
            those that keep its weights in other shapes (fused projections, experts).

    >>> from transformers import LlamaConfig, LlamaModel
    >>> config = LlamaConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, intermediate_size=16)
    >>> narrow_intermediate(LlamaModel(config), 12).layers[0].mlp.down_proj.weight.shape
    torch.Size([8, 12])
    """
    names = [name for name in INTERMEDIATE_NAMES if hasattr(model.config, name)]
    if not names:
        raise ValueError(
            f"the config of {type(model).__name__} names no width of its feed-forward layers; looked for "
            f"{', '.join(INTERMEDIATE_NAMES)}"
        )
    config = _with(model.config, **dict.fromkeys(names, _whole("intermediate", width)))
    changed = _changes(model, config)
    old = {(model.get_parameter(name).shape[dim]) for name, dims in changed.items() for dim in dims}
    if any(len(dims) != 1 for dims in changed.values()) or len(old) > 1:
        raise ValueError(
            f"{type(model).__name__} has weights that hold its feed-forward width in another way (fused or per "
            f"expert: {', '.join(list(changed)[:3])}): which rows belong together is not known"
        )
    if old != {width}:
        _smaller("intermediate", width, old.pop() if old else 0)
    scores: dict[str, Tensor] = {}
    for name, (dim,) in changed.items():
        weight = model.get_parameter(name).detach().double()
        if weight.ndim > 2:
            raise ValueError(
                f"{name} holds the weights of several experts: which neurons matter is not defined"
            )
        if weight.ndim == 2:
            norms = torch.linalg.vector_norm(weight, dim=1 - dim).clamp_min(torch.finfo(weight.dtype).tiny)
            scores[_layer(name)] = scores.get(_layer(name), torch.zeros((), dtype=weight.dtype)) + norms.log()
    kept = {layer: score.topk(width).indices.sort().values for layer, score in scores.items()}
    return _filled(model, config, {name: {dim: kept[_layer(name)]} for name, (dim,) in changed.items()})


def narrow_hidden(
    model: PreTrainedModel, width: int, *, inputs: Sequence[Mapping[str, Tensor]] | None = None
) -> PreTrainedModel:
    """A copy whose residual stream is `width` wide; attention heads keep their size.

    *Llama-like* (``llama``, ``mistral``, ``qwen2``, ``qwen3``, with their head): the stream ``x`` becomes
    ``x Q``, with one orthonormal ``Q [hidden, width]`` for all layers: matrices that read it become ``W diag(γ) Q``
    with the weight γ of the norm before them, those that write it ``Qᵀ W``, and the norms
    ``sqrt(hidden / width)``, for they average over fewer numbers (``rms_norm_eps`` likewise). ``Q`` is made of the
    principal directions of the stream's unit vectors on `inputs`, or, without, of what writes into it:
    embeddings and output projections, each counted alike. The head is untied from the embeddings, since γ of
    the last norm moves into it.

    *BERT-like* (``bert``, ``roberta``, ``xlm-roberta``, ``camembert``, ``distilbert``): the `width` coordinates whose weights, over
    all matrices of equal size, are largest; of each layer the ``width / head size`` heads whose value and output
    weights are largest.

    Raises:
        ValueError: for other models, with the reason; for widths that are not smaller, or that do not
            make whole heads.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=9, hidden_size=8, num_attention_heads=2, intermediate_size=16)
    >>> student = narrow_hidden(LlamaForCausalLM(config), 6)
    >>> student.config.hidden_size, student.config.head_dim, student(torch.tensor([[1, 2]])).logits.shape
    (6, 4, torch.Size([1, 2, 9]))
    """
    kind = model.config.model_type
    if kind in ROTATED:
        return _rotated(model, _whole("hidden", width), inputs)
    if kind in SELECTED:
        if inputs is not None:
            raise ValueError(f"a {kind} model is narrowed by its weights alone: leave inputs out")
        return _selected(model, _whole("hidden", width))
    raise ValueError(
        f"a narrower residual stream is not defined for {kind!r}. Where LayerNorm subtracts a mean or norms "
        "carry weights between the sums, no rotation of the stream leaves the model the same, and which of its "
        f"coordinates belong together is known for {', '.join((*ROTATED, *SELECTED))} only. Make a student of the "
        "width you want from a config, and give its pairs a projector"
    )


# -- Llama-like -----------------------------------------------------------------------------------


def _rotated(
    model: PreTrainedModel, width: int, inputs: Sequence[Mapping[str, Tensor]] | None
) -> PreTrainedModel:
    old = model.config.hidden_size
    _smaller("hidden", width, old)
    base, head = model.base_model, cast(Any, model).get_output_embeddings()
    if head is None or base is model:
        raise ValueError(
            f"{type(model).__name__} has no head into which the weight of its last norm could move: give the "
            "model with its head (…ForCausalLM)"
        )
    if width % model.config.num_attention_heads:
        raise ValueError(
            f"hidden={width} must be a multiple of the {model.config.num_attention_heads} attention heads (the "
            "config demands it)"
        )
    basis = _principal(_moments(model, inputs), width)
    config = _with(
        model.config,
        hidden_size=width,
        head_dim=getattr(model.config, "head_dim", None) or old // model.config.num_attention_heads,
        rms_norm_eps=model.config.rms_norm_eps * old / width,
        tie_word_embeddings=False,
    )
    student = _build(model, config)
    prefix = next(name for name, part in model.named_modules() if part is base) + "."
    theirs = {name: value.detach().double().to(_place(model)) for name, value in model.state_dict().items()}
    filled = {}
    for name in student.state_dict():
        value = theirs[name]
        stem = name.removeprefix(prefix)
        part = stem.rpartition(".")[0].rpartition(".")[2]
        layer = LAYER.match(stem)
        if part in READERS and name.endswith("weight"):
            norm = "post_attention_layernorm" if "mlp" in stem else "input_layernorm"
            assert layer is not None
            value = (value * theirs[f"{prefix}{layer[0]}.{norm}.weight"]) @ basis
        elif part in WRITERS:
            value = basis.T @ value
        elif part == "embed_tokens":
            value = value @ basis
        elif stem == "norm.weight" or part.endswith("_layernorm"):
            value = torch.full((width,), (old / width) ** 0.5, dtype=value.dtype, device=value.device)
        elif name == f"{_name_of(model, head)}.weight":
            value = (value * theirs[f"{prefix}norm.weight"]) @ basis
        filled[name] = value.to(model.dtype)
    student.load_state_dict(filled)
    cast(Any, student).generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    return student


def _moments(model: PreTrainedModel, inputs: Sequence[Mapping[str, Tensor]] | None) -> Tensor:
    """Second moment of the residual stream's directions ``[hidden, hidden]``."""
    size = model.config.hidden_size
    on = _place(model)
    total = torch.zeros(size, size, dtype=torch.float64, device=on)
    if inputs is None:
        embeddings = model.get_input_embeddings()
        assert isinstance(embeddings, nn.Embedding)
        written = [embeddings.weight.T]
        written += [
            part.weight
            for name, part in model.named_modules()
            if name.rpartition(".")[2] in WRITERS and isinstance(part, nn.Linear)
        ]
        for weight in (weight.detach().double().to(on) for weight in written):
            moment = weight @ weight.T
            total += moment / moment.trace().clamp_min(torch.finfo(moment.dtype).tiny)
        return total

    def note(module: nn.Module, args: tuple[Any, ...]) -> None:
        rows = nn.functional.normalize(args[0].detach().double().flatten(0, -2), dim=-1).cpu()
        total.addmm_(rows.T, rows)

    norms = [
        part
        for part in model.modules()
        if type(part).__name__.endswith("RMSNorm") and part.weight.shape == (size,)
    ]
    hooks = [norm.register_forward_pre_hook(note) for norm in norms]
    training = model.training
    try:
        cast(nn.Module, model).eval()
        with torch.no_grad():
            for batch in inputs:
                model(**batch)
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    if not total.trace():
        raise ValueError("inputs hold no batch: there is nothing to find the stream's directions from")
    return total


def _principal(moment: Tensor, width: int) -> Tensor:
    directions: Tensor = torch.linalg.eigh(moment).eigenvectors
    return directions[:, -width:].flip(1)


# -- BERT-like ------------------------------------------------------------------------------------


def _selected(model: PreTrainedModel, width: int) -> PreTrainedModel:
    old, heads = model.config.hidden_size, model.config.num_attention_heads
    _smaller("hidden", width, old)
    size = old // heads
    if width % size:
        raise ValueError(f"hidden={width} must be a multiple of the head size {size}, which heads keep")
    config = _with(model.config, hidden_size=width, num_attention_heads=width // size)
    changed = _changes(model, config)
    on = _place(model)
    importance = torch.zeros(old, dtype=torch.float64, device=on)
    for name, dims in changed.items():
        weight = model.get_parameter(name).detach().double().to(on)
        for dim in dims:
            if weight.ndim == 2 and not _of_heads(name, dim):
                squares = weight.square().sum(1 - dim)
                importance += squares / squares.sum().clamp_min(torch.finfo(squares.dtype).tiny)
    kept = importance.topk(width).indices.sort().values
    values, outputs = (
        {_layer(name): model.get_parameter(name) for name in changed if pattern.search(name)}
        for pattern in (VALUES, HEADS_IN)
    )
    rows = {layer: _heads(values[layer], outputs[layer], on, size, width // size) for layer in outputs}
    return _filled(
        model,
        config,
        {
            name: {dim: rows[_layer(name)] if _of_heads(name, dim) else kept for dim in dims}
            for name, dims in changed.items()
        },
    )


def _of_heads(name: str, dim: int) -> bool:
    return bool((dim == 0 and HEADS_OUT.search(name)) or (dim == 1 and HEADS_IN.search(name)))


def _heads(value: Tensor, output: Tensor, on: str, size: int, count: int) -> Tensor:
    """The rows of the heads of one layer whose value and output weights are largest."""
    value, output = (weight.detach().double().to(on) for weight in (value, output))
    each = len(value) // size
    score = value.view(each, size, -1).norm(dim=(1, 2)) * output.view(-1, each, size).norm(dim=(0, 2))
    heads: Tensor = score.topk(count).indices.sort().values
    return (heads[:, None] * size + torch.arange(size, device=on)).flatten()


# -- both -----------------------------------------------------------------------------------------


def _place(model: PreTrainedModel) -> str:
    """Where is computed what is kept; of weights without values, shapes are all there is."""
    return "meta" if model.device.type == "meta" else "cpu"


def _build(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """Another model of the class; what is drawn for its weights does not show in what is drawn later."""
    try:
        with torch.random.fork_rng(devices=()), torch.device(_place(model)):
            return cast(PreTrainedModel, cast(Any, type(model))._from_config(config, dtype=model.dtype))
    except ValueError as error:
        raise ValueError(f"{type(model).__name__} cannot be built this narrow: {error}") from error


def _with(config: PreTrainedConfig, **changes: Any) -> PreTrainedConfig:
    copied = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(copied, name, value)
    return copied


def _whole(what: str, width: Any) -> int:
    if type(width) is not int or width < 1:
        raise ValueError(f"{what} must be a whole number from 1 on, got {width!r}")
    return width


def _smaller(what: str, width: int, old: int) -> None:
    if width > old:
        raise ValueError(f"{what}={width} is not narrower: the teacher's is {old}")


def _layer(name: str) -> str:
    found = LAYER.match(name)
    return str(found[0]) if found else ""


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    found: str = next(name for name, part in model.named_modules() if part is wanted)
    return found


def _changes(model: PreTrainedModel, config: PreTrainedConfig) -> dict[str, list[int]]:
    """Which dimensions of which weights another config changes."""
    with torch.device("meta"):
        shapes = {name: p.shape for name, p in type(model)(config).named_parameters()}
    own = {name: p.shape for name, p in model.named_parameters()}
    if shapes.keys() != own.keys():
        raise ValueError(
            f"{type(model).__name__} has other weights at that width, or was changed after it was built"
        )
    return {
        name: dims
        for name in own
        if (dims := [d for d, (a, b) in enumerate(zip(own[name], shapes[name], strict=True)) if a != b])
    }


def _filled(
    model: PreTrainedModel, config: PreTrainedConfig, kept: Mapping[str, Mapping[int, Tensor]]
) -> PreTrainedModel:
    student = _build(model, config)
    own, tied = dict(model.state_dict()), {id(p): name for name, p in model.named_parameters()}
    first = {name: tied.get(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    for name, value in own.items():
        for dim, indices in kept.get(first.get(name, name), {}).items():
            value = value.index_select(dim, indices.to(value.device))
        own[name] = value
    student.load_state_dict(own)
    cast(Any, student).generation_config = copy.deepcopy(getattr(model, "generation_config", None))
    return student
