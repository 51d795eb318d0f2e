"""Parameters that are not trained, for the whole run or in its first steps (``train.freeze``).

* Parameters that are frozen *for the whole run* require no gradient. ``freeze`` declares that before DDP or sharding, so that
  their gradients are neither computed nor reduced.
* Parameters that are frozen *until a step* have gradients in every step, because DDP expects the same parameters in all steps.
  ``Frozen`` drops these gradients after the backward. A gradient of None keeps norm, clipping, weight decay and momentum away.

What is frozen follows from the number of the attempted step alone, so a resumed or replayed run freezes the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from dtrain.errors import ConfigError, as_config_error, nearest
from dtrain.optimizers.groups import in_module, matching, trainable

_BATCHNORM = ("train", "eval")


@dataclass(frozen=True)
class FreezeRule:
    """Parameters that are frozen together.

    Attributes:
        patterns: Patterns (fnmatch) of names of parameters or modules.
        until: The last attempted step in which they are frozen; None: the whole run.
        batchnorm: ``eval``: meanwhile, BatchNorm modules that match use their running statistics and do not change them.
    """

    patterns: Sequence[str]
    until: int | None = None
    batchnorm: str = "train"

    @classmethod
    def parse(cls, entries: Sequence[Any]) -> list[FreezeRule]:
        """Reads ``train.freeze``, a list of patterns and of mappings with the keys of this class.

        Raises:
            ValueError: If an entry is something else, or a value is impossible.
        """
        rules = []
        keys = [key.name for key in fields(cls)]
        for entry in entries:
            values = {"patterns": [entry]} if isinstance(entry, str) else entry
            if not isinstance(values, Mapping) or not isinstance(values.get("patterns"), Sequence):
                raise ValueError(
                    f"got {entry!r}, want a pattern such as stem.*, or {{patterns: [stem.*], until: 500}}."
                )
            for key in values:
                if key not in keys:
                    raise ValueError(f"it has no key {key!r}. {nearest(str(key), keys)}")
            rule = cls(**values)
            if rule.until is not None and (type(rule.until) is not int or rule.until < 1):
                raise ValueError(f"until: got {rule.until!r}, want the last frozen step, at least 1; or null.")
            if rule.batchnorm not in _BATCHNORM:
                raise ValueError(f"batchnorm: got {rule.batchnorm!r}, want {' or '.join(_BATCHNORM)}.")
            rules.append(rule)
        return rules


def freeze(model: nn.Module, entries: Sequence[Any]) -> None:
    """Sets ``requires_grad`` of parameters that are frozen for the whole run to False. Checks all rules.

    Args:
        model: The bare model, not sharded yet.
        entries: ``train.freeze``.

    Raises:
        ConfigError: If a rule is impossible, a pattern matches nothing, or no parameter is left to train.
    """
    with as_config_error("train.freeze"):
        # A tied parameter has several names.
        named = dict(model.named_parameters(remove_duplicate=False))
        early: dict[nn.Parameter, bool] = {}  # frozen in step 1: whether for the whole run
        for rule in FreezeRule.parse(entries):
            for name in matching(named, rule.patterns, "parameter or module of the model"):
                early[named[name]] = early.get(named[name], False) or rule.until is None
            if rule.batchnorm == "eval" and not _norms(model, rule):
                raise ValueError(
                    f"batchnorm: got eval, but {', '.join(rule.patterns)} matches no BatchNorm. Leave it out."
                )
        if early and all(parameter in early for parameter in trainable(model).values()):
            raise ValueError("every parameter is frozen in step 1, so there is nothing to train. Change the patterns.")
        for parameter, always in early.items():
            if always:
                parameter.requires_grad_(False)


class Frozen:
    """Keeps a model's frozen parameters and BatchNorm modules as they are; ``freeze`` was called with the same entries.

    Args:
        model: The bare model.
        entries: ``train.freeze``.
        optimizer: Over its parameters.

    Raises:
        ConfigError: If a rule is impossible, or the optimizer cannot begin to train parameters later than others.
    """

    def __init__(self, model: nn.Module, entries: Sequence[Any], optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._until: dict[nn.Parameter, int] = {}
        self._norms: dict[nn.Module, float] = {}
        with as_config_error("train.freeze"):
            rules = FreezeRule.parse(entries)
        for rule in rules:
            for name, parameter in model.named_parameters(remove_duplicate=False):
                if rule.until is not None and parameter.requires_grad and _matches(name, rule):
                    self._until[parameter] = max(rule.until, self._until.get(parameter, 0))
            if rule.batchnorm == "eval":
                until = math.inf if rule.until is None else rule.until
                self._norms |= {norm: max(until, self._norms.get(norm, 0)) for norm in _norms(model, rule)}
        dampened = any(group.get("fused") and group.get("dampening") for group in optimizer.param_groups)
        if self._until and isinstance(optimizer, torch.optim.SGD) and dampened:
            raise ConfigError(
                "optimizer.dampening: torch's fused SGD applies it from the second step of all parameters on, and with "
                "until in train.freeze some have their first step later. Set optimizer.fused=false."
            )

    def set_batchnorm(self, steps: int) -> None:
        """Before the forward: sets the modes of the BatchNorm modules, after so many attempted steps."""
        for norm, until in self._norms.items():
            norm.train(self._model.training and steps >= until)

    def drop_gradients(self, steps: int) -> None:
        """After the backward: sets gradients of frozen parameters to None, after so many attempted steps."""
        for parameter, until in self._until.items():
            if steps < until:
                parameter.grad = None


def _matches(name: str, rule: FreezeRule) -> bool:
    return any(in_module(name, pattern) for pattern in rule.patterns)


def _norms(model: nn.Module, rule: FreezeRule) -> list[nn.Module]:
    return [module for name, module in model.named_modules() if isinstance(module, _BatchNorm) and _matches(name, rule)]
