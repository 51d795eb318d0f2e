"""Helpers for walks over a model: names of modules and dtypes, nested tensors, ScriptModules.

ScriptModules (``torch.jit.script``, ``torch.jit.trace``) do not run in Python, so hooks and changed forwards have no effect
on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.errors import ConfigError


def plain_name(name: str) -> str:
    """A qualified name as its author wrote it: without the ``_orig_mod`` that ``torch.compile`` inserts."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def first_names(names: Sequence[str], most: int) -> str:
    """The first ``most`` names and the number of the others: ``a, b and 7 more``."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def dtype_name(dtype: torch.dtype) -> str:
    """``fp32``, ``bf16``, ``fp16``, ``fp64``."""
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp")


def tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in ``value``: itself, or those inside nested mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
        return
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    for item in value:
        yield from tensors(item)


def hookable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``model.named_modules()`` without ScriptModules, which refuse hooks."""
    return ((name, module) for name, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule))


def refuse_scripted(module: nn.Module, name: str, key: str) -> None:
    """Refuses a ScriptModule, whose forward cannot be changed from Python.

    Args:
        module: The module.
        name: Its qualified name; ``""`` for the whole model.
        key: The config key or command that has to change the forward.

    Raises:
        ConfigError: Names ``key`` and ``name``.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            f"{key}: {name or 'the model'} is a ScriptModule (torch.jit.script or torch.jit.trace). It does not run in Python, "
            "so its forward cannot be changed. Build the model without torch.jit."
        )
