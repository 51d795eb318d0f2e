"""ScriptModules (``torch.jit.script``, ``torch.jit.trace``): their code does not run in Python, so no hook reaches it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from dtrain.config.errors import ConfigError


def hookable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """``model.named_modules()`` but for ScriptModules, which refuse hooks."""
    return ((name, module) for name, module in model.named_modules() if not isinstance(module, torch.jit.ScriptModule))


def refuse_scripted(module: nn.Module, name: str, key: str) -> None:
    """Refuses what needs Python to run the module.

    Args:
        module: The module.
        name: Its qualified name; ``""`` for the model.
        key: Of the config, or a command, that asks for it.

    Raises:
        ConfigError: If it is a ScriptModule.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            f"{key}: {name or 'the model'} is a ScriptModule (torch.jit.script or torch.jit.trace). Its code does not run in "
            "Python, so that nothing can be changed about it. Build the model without torch.jit."
        )
