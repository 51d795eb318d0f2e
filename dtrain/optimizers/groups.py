"""Parameters by what an optimizer does with them."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

#: Stands for all parameters of fewer than two dimensions: those of norms, and biases.
VECTORS = "vectors"


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def matching(parameters: dict[str, nn.Parameter], patterns: Sequence[str]) -> set[str]:
    """Names that match one of ``patterns`` (fnmatch), or ``VECTORS``.

    Raises:
        ValueError: If a pattern matches no name; gives some.
    """
    if isinstance(patterns, str):
        raise ValueError(f"got the text {patterns!r}, want a list of patterns, such as [{VECTORS}].")
    chosen: set[str] = set()
    for pattern in patterns:
        found = {
            name
            for name, parameter in parameters.items()
            if (parameter.dim() < 2 if pattern == VECTORS else fnmatchcase(name, pattern))
        }
        if not found:
            raise ValueError(
                f"{pattern!r} matches no trainable parameter. The first names: {', '.join(list(parameters)[:8])}."
            )
        chosen |= found
    return chosen


def decay_groups(model: nn.Module, no_decay: Sequence[str]) -> list[dict[str, Any]]:
    """Two parameter groups: those with the optimizer's weight decay, and those with none.

    Args:
        model: The model.
        no_decay: Patterns of the names of the second group; ``vectors`` are norms and biases.

    Returns:
        As torch's optimizers take them; a group that would be empty is left out.

    Raises:
        ValueError: If a pattern matches nothing.
    """
    parameters = trainable(model)
    exempt = matching(parameters, no_decay)
    groups: list[dict[str, Any]] = [
        {"params": [parameter for name, parameter in parameters.items() if name not in exempt]},
        {"params": [parameter for name, parameter in parameters.items() if name in exempt], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]
