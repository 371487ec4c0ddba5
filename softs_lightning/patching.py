"""Replacement layers: one registry of which class stands in for which, shared with transformers.

``register_patch_mapping`` writes into the registry that transformers reads when it builds a model
(``from_pretrained``, ``from_config``, ``transformers.monkey_patching.apply_patches``), and what was
registered there counts here: as a declaration's target after :func:`patch_output_recorders`, and in
a selector's ``@Class`` at once. transformers is imported by the first call that writes, not before.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
import threading
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from softs_lightning.names import nearest, quoted
from softs_lightning.recorders import DECLARATION, Recorded, find_recorded, own_modules

__all__ = [
    "find_replacement",
    "get_patch_mapping",
    "patch_output_recorders",
    "register_patch_mapping",
    "unregister_patch_mapping",
]

REGISTRY = "transformers.monkey_patching"
_lock = threading.RLock()


def register_patch_mapping(mapping: Mapping[str, type[nn.Module]], overwrite: bool = False) -> None:
    """Name the classes that replace others. All of `mapping` is registered, or nothing of it.

    Args:
        mapping: name of the original class → the class that stands in for it. A name that is no
            class's own is a regular expression, found anywhere in a class's name (``re.search``);
            exact names win over expressions, and of those the first registered wins.
        overwrite: replace what is registered under the same name.

    Raises:
        ValueError: for a name that is registered already, or that is no regular expression.
        TypeError: for a replacement that is no ``torch.nn.Module`` class.

    >>> class FastAttention(nn.MultiheadAttention): ...
    >>> register_patch_mapping({"^My.*Attention$": FastAttention})
    >>> find_replacement("MyCrossAttention").__name__
    'FastAttention'
    >>> unregister_patch_mapping(["^My.*Attention$"])
    """
    if not isinstance(mapping, Mapping):
        raise TypeError(f"a patch mapping maps names to module classes, got {type(mapping).__name__}")
    for name, replacement in mapping.items():
        _check(name, replacement)
    with _lock:
        before = get_patch_mapping()
        taken = [name for name in mapping if name in before]
        if taken and not overwrite:
            raise ValueError(
                f"{quoted(taken)} {'is' if len(taken) == 1 else 'are'} registered already; nothing was changed. "
                "Pass overwrite=True to replace, or unregister_patch_mapping first"
            )
        registry = importlib.import_module(REGISTRY)
        try:
            registry.register_patch_mapping(dict(mapping), overwrite=overwrite)
        except BaseException:
            _restore(registry, before)
            raise


def _check(name: Any, replacement: Any) -> None:
    if not isinstance(name, str) or not name:
        raise TypeError(f"a patch mapping's keys are class names or regular expressions, got {name!r}")
    if not (isinstance(replacement, type) and issubclass(replacement, nn.Module)):
        raise TypeError(f"the replacement for {name!r} must be a torch.nn.Module class, got {replacement!r}")
    try:
        re.compile(name)
    except re.error as error:
        raise ValueError(f"{name!r} is neither a class name nor a regular expression: {error}") from None


def unregister_patch_mapping(keys: Iterable[str]) -> None:
    """Remove mappings by the names they were registered under. All of `keys` go, or none.

    Raises:
        ValueError: for a name that is not registered, with the nearest ones that are.
        TypeError: for one bare string, whose letters would be taken for names.
    """
    if isinstance(keys, str):
        raise TypeError(f"give a list of names: unregister_patch_mapping([{keys!r}])")
    names = list(dict.fromkeys(keys))
    with _lock:
        before = get_patch_mapping()
        for name in names:
            if name not in before:
                close = nearest(str(name), list(before)) or list(before)
                raise ValueError(
                    f"no replacement is registered under {name!r}, so nothing was removed; registered are "
                    f"{quoted(close, 'no names at all')}"
                )
        registry = importlib.import_module(REGISTRY)
        try:
            registry.unregister_patch_mapping(names)
        except BaseException:
            _restore(registry, before)
            raise


def _restore(registry: Any, before: dict[str, type[nn.Module]]) -> None:
    now = registry.get_patch_mapping()
    registry.unregister_patch_mapping([name for name in now if name not in before])
    registry.register_patch_mapping(before, overwrite=True)


def get_patch_mapping() -> dict[str, type[nn.Module]]:
    """A copy of what is registered, here or with transformers.

    >>> get_patch_mapping()
    {}
    """
    registry = sys.modules.get(REGISTRY)  # without transformers nothing can be registered yet
    mapping: dict[str, type[nn.Module]] = registry.get_patch_mapping() if registry is not None else {}
    return mapping


def find_replacement(
    class_name: str, mapping: Mapping[str, type[nn.Module]] | None = None
) -> type[nn.Module] | None:
    """The class registered to stand in for `class_name`, or ``None``.

    Args:
        mapping: where to look, by default in what is registered.
    """
    mapping = get_patch_mapping() if mapping is None else mapping
    if class_name in mapping:
        return mapping[class_name]
    for pattern, replacement in mapping.items():
        if _searches(pattern, class_name):
            return replacement
    return None


def _searches(pattern: str, class_name: str) -> bool:
    try:
        return re.search(pattern, class_name) is not None
    except re.error:  # transformers' registry takes any text, and lets it match nothing
        return False


def patch_output_recorders(model: nn.Module) -> None:
    """Point the declarations of `model` at the classes that are registered to replace their targets.

    A model that was built with replaced layers, but not by ``from_pretrained``, still declares the
    original classes, which it does not contain. This gives each of its submodels a declaration of
    its own; the class, and other models of it, stay as they are. It may be called again, before or
    after the model ran. Where modules of the original class remain, both are declared.

    Raises:
        RuntimeError: for a transformers model in a version whose own capture cannot be told.

    >>> class Block(nn.Linear): ...
    >>> class FastBlock(nn.Identity): ...
    >>> class Net(nn.Sequential):
    ...     _can_record_outputs = {"hidden_states": Block}
    >>> net = Net(FastBlock(), nn.ReLU(), FastBlock())
    >>> register_patch_mapping({"Block": FastBlock})
    >>> patch_output_recorders(net)
    >>> unregister_patch_mapping(["Block"])
    >>> [found.path for found in find_recorded(net)], Net._can_record_outputs["hidden_states"].__name__
    (['0', '2'], 'Block')
    """
    mapping = get_patch_mapping()
    if not mapping:
        return
    changed = False
    for submodel in model.modules():
        declaration = getattr(submodel, DECLARATION, None)
        if not declaration:
            continue
        found = find_recorded(submodel)
        new = {
            key: _patched(value, mapping, [one for one in found if one.key == key])
            for key, value in declaration.items()
        }
        if new != declaration:
            setattr(submodel, DECLARATION, new)
            changed = True
    if changed:
        _refresh_transformers(model)


def _patched(value: Any, mapping: Mapping[str, type[nn.Module]], found: list[Recorded]) -> Any:
    """One declared value in the form it had, a class or a recorder or a list, with its target replaced."""
    if isinstance(value, (list, tuple)):
        flat: list[Any] = []
        for one in value:
            patched = _patched(one, mapping, found)
            flat += patched if isinstance(patched, list) else [patched]
        return flat
    recorder = value if hasattr(value, "target_class") else None
    target = value if recorder is None else recorder.target_class or recorder.class_name
    replacement = find_replacement(target if isinstance(target, str) else target.__name__, mapping)
    if replacement is None or replacement is target:
        return value
    # Both forms of recorder, transformers' and ours, are dataclasses.
    new = replacement if recorder is None else dataclasses.replace(recorder, target_class=replacement)
    originals = [
        one for one in found if one.recorder.target == target and not isinstance(one.module, replacement)
    ]
    return [new, value] if originals else new


def _refresh_transformers(model: nn.Module) -> None:
    """Let the capture of transformers' own models see the declarations of this one.

    It reads the declaration of a class, once, when it first captures; hooks that it may have placed
    by then watch the wrong modules. So they are placed here, from the declarations as they are now.
    """
    modeling = sys.modules.get("transformers.modeling_utils")
    if modeling is None:
        return
    submodels = [m for m in model.modules() if isinstance(m, modeling.PreTrainedModel)]
    if not submodels:
        return
    capturing = sys.modules.get("transformers.utils.output_capturing")
    place = getattr(capturing, "install_output_capuring_hook", None)
    if capturing is None or place is None:
        version = sys.modules["transformers"].__version__
        raise RuntimeError(
            f"transformers {version} places its capture hooks in a way that is not known here, so its own "
            "output_attentions and output_hidden_states would miss the replaced layers: build the model with "
            "from_config or from_pretrained, which know the registered replacements"
        )
    with capturing._hook_installation_lock:
        for submodel in submodels:
            for _, module in own_modules(submodel):
                for number, hook in list(module._forward_hooks.items()):
                    code = getattr(hook, "__code__", None)
                    if code is not None and code.co_filename == capturing.__file__:
                        del module._forward_hooks[number]
            for one in find_recorded(submodel):
                place(one.module, one.key, one.recorder.index, one.recorder.capture_initial_hidden_state)
            # The mark by which transformers knows that the hooks are there.
            object.__setattr__(submodel, "_output_capturing_hooks_installed", True)
