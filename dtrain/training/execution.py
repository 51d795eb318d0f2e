"""How a model runs, without a change of what it computes: layout, recomputed activations, compiled code, one BatchNorm for all.

None of this is part of a run's identity, and none changes a name in its checkpoints: it may be switched when a run goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dtrain.config.errors import ConfigError
from dtrain.distributed.world import World
from dtrain.precision.scripted import refuse_scripted

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def use_channels_last(model: nn.Module) -> None:
    """Lays weights and buffers of four and five dimensions out with channels innermost, as fast convolutions want them.

    ``model.to(memory_format=torch.channels_last)`` does so for four and refuses five.
    """
    for tensor in chain(model.parameters(), model.buffers()):
        if tensor.dim() in _CHANNELS_LAST:
            tensor.data = tensor.data.contiguous(memory_format=_CHANNELS_LAST[tensor.dim()])


def synchronise_batchnorm(model: nn.Module, world: World) -> nn.Module:
    """Every BatchNorm normalises with the statistics of all ranks' micro-batches, by ``torch.nn.SyncBatchNorm``.

    Call it before anything else looks at the model's modules; parameters stay the same objects.

    Raises:
        ConfigError: On a CPU, where torch has none, if there are several ranks.
    """
    if world.size == 1:
        return model
    if world.device.type == "cpu":
        raise ConfigError(
            "parallel.sync_batchnorm=true, but torch's SyncBatchNorm computes on GPUs only. Set it to false, or take a norm "
            "that does not look at other samples, such as GroupNorm."
        )
    return nn.SyncBatchNorm.convert_sync_batchnorm(model)


def checkpoint_activations(model: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Modules whose activations are computed again in the backward pass instead of being kept (Chen et al. 2016).

    Costs one more forward of these modules, and saves all that they would have kept but their inputs. Dropout draws the same
    numbers both times. A matching module inside a matching one is left alone.

    Args:
        model: The model.
        patterns: Of module names (fnmatch), such as ``blocks.*``.

    Returns:
        The modules' names.

    Raises:
        ConfigError: If a pattern matches no module, or a ScriptModule.
    """
    modules = dict(model.named_modules())
    outermost: list[str] = []
    for name in _matching(model, "train.checkpoint_activations", patterns):
        if not any(name.startswith(f"{outer}.") for outer in outermost):
            outermost.append(name)
            module = modules[name]
            refuse_scripted(module, name, "train.checkpoint_activations")
            module.__class__ = _recomputing(type(module))  # type: ignore[arg-type]
    return outermost


def compile_in_place(model: nn.Module, what: bool | Sequence[str]) -> list[str]:
    """``module.compile()`` on the whole model or on some of its modules, so that no name in a checkpoint changes.

    Nothing is compiled before the first call. Modules of equal code, such as blocks, are compiled once.

    Args:
        model: The bare model. In DDP, torch splits one graph of the whole where DDP's buckets end, so that it hands over its
            gradients as they come, as blocks do; outside of DDP it does not.
        what: True for the whole model, or patterns of module names (fnmatch), such as ``[blocks.*]``.

    Returns:
        The modules' names; ``""`` is the whole model.

    Raises:
        ConfigError: If it is neither, or a pattern matches no module, or a ScriptModule is to be compiled.
    """
    if isinstance(what, bool):
        names = [""] if what else []
    elif isinstance(what, Sequence) and not isinstance(what, str):
        names = _matching(model, "train.compile", what)
    else:
        raise ConfigError(f"train.compile: got {what!r}, want true, false, or a list of patterns such as [blocks.*].")
    modules = dict(model.named_modules())
    for name in names:
        module = modules[name]
        refuse_scripted(module, name, "train.compile")
        module.compile()
    return names


def _matching(model: nn.Module, key: str, patterns: Sequence[str]) -> list[str]:
    """Names of the modules that match, in the model's order; a pattern's ``*`` stops at a dot, as in a path."""
    names = [name for name, _ in model.named_modules() if name]
    for pattern in patterns:
        if not any(_fits(name, pattern) for name in names):
            children = ", ".join(name for name, _ in model.named_children())
            raise ConfigError(f"{key}: {pattern!r} matches no module of the model, which has {children or 'none'}.")
    return [name for name in names if any(_fits(name, pattern) for pattern in patterns)]


def _fits(name: str, pattern: str) -> bool:
    return name.count(".") == pattern.count(".") and fnmatchcase(name, pattern)


class _Recomputing:
    """Marks the classes that ``_recomputing`` makes."""


@cache
def _recomputing(cls: type[nn.Module]) -> type[nn.Module]:
    """The subclass of ``cls`` whose activations are recomputed; names, hooks and deep copies go on as before."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return cls.forward(self, *args, **kwargs)
        return checkpoint(cls.forward, self, *args, use_reentrant=False, **kwargs)

    return type(cls.__name__, (_Recomputing, cls), {"forward": forward, "__module__": cls.__module__})
