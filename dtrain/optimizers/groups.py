"""Parameter groups: which parameters are trained, with which learning rate, and which have weight decay.

* Patterns are fnmatch patterns of names of parameters or modules. As in ``precision.keep_fp32``, ``*`` matches dots, and a
  module stands for everything in it.
* The groups of ``optimizer.groups`` have *factors* by which the optimizer's learning rate and weight decay are multiplied. All
  other parameters are the group ``default``. ``optimizer.no_decay`` turns off weight decay for parameters of any group.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from dtrain.errors import near_names, nearest

#: Pattern for all parameters with fewer than two dimensions: biases and the weights of normalisation layers.
VECTORS = "vectors"
#: The group of all parameters that no pattern of a group matches.
DEFAULT = "default"


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require a gradient, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Numbers of all parameters and of the trainable ones; a sharded parameter counts as a whole."""
    everything = sum(parameter.numel() for parameter in model.parameters())
    return everything, sum(parameter.numel() for parameter in trainable(model).values())


def matching(
    parameters: Mapping[str, nn.Parameter], patterns: Sequence[str], what: str = "trainable parameter"
) -> set[str]:
    """Names that match at least one of ``patterns``, or are in a module that does.

    Args:
        parameters: By name.
        patterns: fnmatch patterns of names of parameters or modules, or ``VECTORS``.
        what: What the parameters are, for the message.

    Raises:
        ValueError: If a pattern matches no parameter; lists similar names.
    """
    if isinstance(patterns, str) or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(f"got {patterns!r}, want a list of patterns, such as [{VECTORS}].")
    chosen: set[str] = set()
    for pattern in patterns:
        found = {
            name
            for name, parameter in parameters.items()
            if (parameter.dim() < 2 if pattern == VECTORS else in_module(name, pattern))
        }
        if not found:
            modules = dict.fromkeys(name.rpartition(".")[0] for name in parameters if "." in name)
            raise ValueError(f"{pattern!r} matches no {what}. {near_names(pattern, [*parameters, *modules])}.")
        chosen |= found
    return chosen


def in_module(name: str, pattern: str) -> bool:
    """Whether the name of a parameter or module, or of a module that contains it, matches a pattern."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")


@dataclass(frozen=True)
class Group:
    """A group of ``optimizer.groups``: parameters with a separate learning rate and weight decay.

    Attributes:
        name: Its name in the metric ``train/lr/NAME``.
        patterns: Patterns of names, see ``matching``.
        lr: Factor by which the optimizer's learning rate is multiplied.
        weight_decay: Factor by which the optimizer's weight decay is multiplied.
    """

    name: str
    patterns: Sequence[str] = ()
    lr: float = 1.0
    weight_decay: float = 1.0

    @classmethod
    def parse(cls, groups: Any) -> list[Group]:
        """Reads ``optimizer.groups``: ``{NAME: {patterns: [...], lr: FACTOR, weight_decay: FACTOR}}``.

        Raises:
            ValueError: If ``groups`` does not have this form, or a factor is out of range.
        """
        if not isinstance(groups, Mapping):
            raise ValueError(f"got {groups!r}, want {{NAME: {{patterns: [...], lr: 10, weight_decay: 0}}}}.")
        keys = [key.name for key in fields(cls) if key.name != "name"]
        for name, group in groups.items():
            if not re.fullmatch(r"[\w.-]+", str(name)) or name == DEFAULT:
                raise ValueError(f"got the name {name!r}, want letters and digits, and not {DEFAULT}.")
            if not isinstance(group, Mapping) or not group.get("patterns"):
                raise ValueError(
                    f"{name}: got {group!r}, want patterns of names, such as {{patterns: [head.*], lr: 10}}."
                )
            for key, value in group.items():
                if key not in keys:
                    raise ValueError(f"{name}: it has no key {key!r}. {nearest(str(key), keys)}")
                least = 0 if key == "weight_decay" else math.ulp(0)
                if key != "patterns" and not (type(value) in (int, float) and least <= value < math.inf):
                    zero = (
                        ""
                        if key == "weight_decay"
                        else " above 0 (train.freeze is for parameters that are not trained)"
                    )
                    raise ValueError(f"{name}.{key}: got {value!r}, want a factor{zero}.")
        return [cls(name=str(name), **group) for name, group in groups.items()]


def parameter_groups(
    model: nn.Module, groups: Sequence[Group], no_decay: Sequence[str]
) -> tuple[list[dict[str, Any]], list[Group]]:
    """The trainable parameters as groups of a torch optimizer: first the default group, then ``groups``.

    Each of them is divided into parameters with and without weight decay. Empty groups are left out.

    Args:
        model: The model.
        groups: Groups with factors.
        no_decay: Name patterns of parameters without weight decay; ``vectors`` for biases and normalisation layers.

    Returns:
        Groups for a torch optimizer, with the key ``name`` if there are ``groups``; and for each of them its ``Group``.

    Raises:
        ValueError: If a pattern matches nothing, or two groups match one parameter.
    """
    parameters = trainable(model)
    exempt = matching(parameters, no_decay)
    owner: dict[str, str] = {}
    for group in groups:
        for name in matching(parameters, group.patterns):
            if (other := owner.setdefault(name, group.name)) != group.name:
                raise ValueError(
                    f"{name} is in {other} and in {group.name}. Change the patterns so that one group has it."
                )
    made: list[tuple[dict[str, Any], Group]] = []
    for group in (Group(DEFAULT), *groups):
        named = {"name": group.name} if groups else {}
        for decay in ({}, {"weight_decay": 0.0}):
            own = [
                p
                for name, p in parameters.items()
                if owner.get(name, DEFAULT) == group.name and (name in exempt) == bool(decay)
            ]
            if own:
                made.append(({"params": own, **named, **decay}, group))
    return [one for one, _ in made], [group for _, group in made]


def apply_factors(optimizer: torch.optim.Optimizer, groups: Sequence[Group]) -> None:
    """Multiplies learning rate and weight decay of each parameter group by its factors.

    Raises:
        ValueError: If the optimizer has no weight decay to multiply.
    """
    for values, group in zip(optimizer.param_groups, groups, strict=True):
        values["lr"] = values["lr"] * group.lr
        if group.weight_decay != 1:
            if "weight_decay" not in values:
                raise ValueError(
                    f"{group.name}.weight_decay: {type(optimizer).__name__} has no weight decay. Leave it out."
                )
            values["weight_decay"] = values["weight_decay"] * group.weight_decay
