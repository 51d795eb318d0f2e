"""Parameter groups: which parameters are trained, and which have weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

#: Pattern for all parameters with fewer than two dimensions: biases and the weights of normalisation layers.
VECTORS = "vectors"


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def matching(parameters: dict[str, nn.Parameter], patterns: Sequence[str]) -> set[str]:
    """Names that match at least one of ``patterns``: fnmatch patterns, or ``VECTORS``.

    Raises:
        ValueError: If a pattern matches no parameter; names some parameters.
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
    """Two parameter groups: with the optimizer's weight decay, and without weight decay.

    Args:
        model: The model.
        no_decay: Name patterns of parameters without weight decay; ``vectors`` for biases and normalisation layers.

    Returns:
        Groups for a torch optimizer; an empty group is left out.

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
