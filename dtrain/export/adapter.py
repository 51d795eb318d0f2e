"""Adapters of peft in an export: merged into the model, or alone in peft's own format.

* A model has an *adapter* if one of its modules is a ``peft.PeftModel``, as ``peft.get_peft_model`` returns it.
* *Merged*, the adapter's update is added to the weights of the layers that it changes. The artefact is then the model that
  ``peft.get_peft_model`` got, so it is loaded without peft.
* *Separate*, ``adapter_config.json`` and ``adapter_model.safetensors`` have the adapter only.
  ``peft.PeftModel.from_pretrained`` loads them onto the same base. Such a folder is no artefact, so ``dtrain predict`` does not
  take it.
* *Kept*, the artefact has the base and the adapter as they were trained, and is loaded with peft.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dtrain.errors import ConfigError, as_config_error

#: Values of ``export.adapter``.
MERGED, SEPARATE, KEPT = ADAPTERS = ("merged", "separate", "kept")
#: Files of a separate adapter; peft writes the last one, too.
CONFIG, WEIGHTS, CARD = "adapter_config.json", "adapter_model.safetensors", "README.md"
_TARGET = "peft.get_peft_model"


def find_adapter(model: nn.Module) -> tuple[str, Any] | None:
    """Name and module of the model's ``PeftModel``; None if it has none. Does not import peft."""
    peft = sys.modules.get("peft")  # imported by whatever has built the adapter
    modules = model.named_modules() if peft is not None else ()
    return next(((name, module) for name, module in modules if isinstance(module, peft.PeftModel)), None)  # type: ignore[union-attr]


def without_adapter(node: Any) -> Any:
    """A config node ``model`` in which each ``peft.get_peft_model`` is replaced by its argument ``model``."""
    if isinstance(node, Mapping):
        if node.get("_target_") == _TARGET:
            return without_adapter(node.get("model"))
        return {key: without_adapter(value) for key, value in node.items()}
    return [without_adapter(value) for value in node] if isinstance(node, list) else node


def merge(model: nn.Module, node: Any) -> nn.Module:
    """The model with its adapter merged into the weights; the model itself without one. Changes the model.

    Args:
        model: The bare model.
        node: The config node that has built it.

    Raises:
        ConfigError: If this kind of adapter cannot be merged, or ``node`` does not say what the model is without it.
    """
    found = find_adapter(model)
    if found is None:
        return model
    name, adapter = found
    if without_adapter(node) == node:
        raise ConfigError(
            f"export.adapter: got {MERGED}, but {node.get('_target_')} builds the adapter itself, so the config does not say "
            f"how to build the model without it. Use _target_: {_TARGET} with an argument model, or export.adapter={KEPT}."
        )
    if not hasattr(adapter, "merge_and_unload"):
        raise ConfigError(
            f"export.adapter: got {MERGED}, but an adapter of the kind {adapter.peft_type} is not part of weights. Use "
            f"export.adapter={SEPARATE} or {KEPT}."
        )
    with as_config_error("export.adapter"):
        merged: nn.Module = adapter.merge_and_unload(safe_merge=True)
    if not name:
        return merged
    parent, _, key = name.rpartition(".")
    setattr(model.get_submodule(parent), key, merged)
    return model


def write_adapter(model: nn.Module, dtype: torch.dtype, folder: Path) -> int:
    """Writes the model's adapter in peft's format, and casts the model.

    Args:
        model: The trained model.
        dtype: Of the weights.
        folder: An existing folder.

    Returns:
        The size of the weights' file in bytes.

    Raises:
        ConfigError: If the model has no adapter.
        OSError: On a write failure.
    """
    found = find_adapter(model)
    if found is None:
        raise ConfigError(
            f"export.adapter: got {SEPARATE}, but no module of the model is a peft.PeftModel. Leave export.adapter out, or "
            f"build the model with {_TARGET}."
        )
    found[1].to(dtype).save_pretrained(folder)
    return (folder / WEIGHTS).stat().st_size
