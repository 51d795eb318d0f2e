"""Builds the optimizer of a run: fused where that works, and refused if it cannot train the model's parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dtrain.config.instantiate import OWN_KEYS, argument_names, by_target
from dtrain.distributed.sharding import is_sharded, small_part
from dtrain.errors import ConfigError, as_config_error
from dtrain.optimizers.groups import Group, apply_factors, parameter_groups, trainable

# Of torch's optimizers.
_SUPPORT_SPARSE = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)


def build_optimizer(node: Any, model: nn.Module) -> torch.optim.Optimizer:
    """Builds the optimizer over the model's trainable parameters.

    It is fused by default where its class supports that and all parameters are real with dense gradients. A target with an
    argument ``model`` gets the model and makes its own parameter groups. The node's keys ``OWN_KEYS`` are not passed to the
    target: see ``parameter_groups``.

    Raises:
        ConfigError: If nothing is trainable, a pattern matches nothing, the target refuses its arguments, or the optimizer
            does not support a parameter.
    """
    parameters: list[Any] = list(trainable(model).values())
    if not parameters:
        raise ConfigError("model: it has no parameter that requires a gradient, so there is nothing to train.")
    if not isinstance(node, Mapping) or "_target_" not in node:
        by_target("optimizer", node)  # raises
    if str(node["_target_"]).endswith("ZeroRedundancyOptimizer"):
        raise ConfigError(
            f"optimizer: {node['_target_']} divides its state among the ranks, which checkpoints and the vote do not support. "
            "Set parallel=fsdp, which divides parameters and gradients as well, and a different optimizer."
        )
    node = dict(node)
    no_decay, groups = (node.pop(key, None) for key in OWN_KEYS["optimizer"])
    factors: list[Group] = []
    if no_decay is not None:
        with as_config_error("optimizer.no_decay"):
            parameters, _ = parameter_groups(model, [], no_decay)
    if groups:
        with as_config_error("optimizer.groups"):
            parameters, factors = parameter_groups(model, Group.parse(groups), no_decay or [])
    arguments = argument_names(node["_target_"])
    if "model" in arguments:
        for key, value in zip(OWN_KEYS["optimizer"], (no_decay, groups), strict=True):
            if value is not None:
                raise ConfigError(
                    f"optimizer.{key}: {node['_target_']} makes its own groups of parameters. Set it to null."
                )
        with as_config_error("optimizer"):
            optimizer = by_target("optimizer", node, model=model)
    else:
        may_fuse = "fused" in arguments and not {"fused", "foreach", "_partial_"} & set(node)
        if reason := _not_fusable(model):
            may_fuse = False
            if node.get("fused"):
                raise ConfigError(
                    f"optimizer.fused: got true, but {reason}, which fused optimizers do not support. Leave it out."
                )
        on_meta = any(parameter.is_meta for parameter in model.parameters())  # where torch has no fused optimizer
        fused = {"fused": True} if may_fuse and not on_meta else {}
        if is_sharded(model):
            fused = _options_for_parts(node, model, fused)
        optimizer = by_target("optimizer", node, parameters, **fused)
        if _fused_on_cpus_only(optimizer):
            if node.get("fused"):
                raise ConfigError(
                    f"optimizer.fused: got true, but torch {torch.__version__} has no fused {type(optimizer).__name__} for "
                    "GPUs. Leave it out."
                )
            optimizer = by_target("optimizer", node, parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer: {node['_target_']} returns {type(optimizer).__name__}, want a torch Optimizer.")
    if factors:
        with as_config_error("optimizer.groups"):
            apply_factors(optimizer, factors)
    is_torch_optimizer = type(optimizer).__module__.startswith("torch.optim.")
    if is_torch_optimizer and not isinstance(optimizer, _SUPPORT_SPARSE) and (sparse := _sparse_weights(model)):
        supporting = ", ".join(cls.__name__ for cls in _SUPPORT_SPARSE)
        raise ConfigError(
            f"optimizer: {node['_target_']} does not support the sparse gradients of {sparse[0]}. Build that module with "
            f"sparse=False, or use one of {supporting}."
        )
    return optimizer


def _options_for_parts(node: Any, model: nn.Module, fused: dict[str, bool]) -> dict[str, bool]:
    """Tries the optimizer on a small sharded parameter; returns ``fused``, or {} if it works only without it.

    torch has no fused SGD for parts of parameters, and no Adafactor; without this trial they would fail in the first step.

    Raises:
        ConfigError: If it cannot update parts of parameters.
    """
    for options in (fused, {}):
        parameter = small_part(model)
        optimizer = by_target("optimizer", node, [parameter], **options)
        if not isinstance(optimizer, torch.optim.Optimizer):
            return options  # which is refused later
        try:
            optimizer.step()
            if isinstance(optimizer, torch.optim.Adafactor):
                # In torch 2.9 the step runs, but takes the means over a part instead of the whole parameter.
                raise NotImplementedError("it needs the means of whole rows and columns")
        except (RuntimeError, NotImplementedError, TypeError, AssertionError) as error:
            reason = str(error).partition("\n")[0]
        else:
            return options
    raise ConfigError(
        f"optimizer: {node['_target_']} cannot update a parameter that is divided among the ranks ({reason}). Use a "
        "different one, such as optimizer=adamw, or set parallel=ddp."
    )


def _fused_on_cpus_only(optimizer: Any) -> bool:
    """Whether it is fused on a GPU where it would fail in the first step, as Adagrad of torch 2.11 and older does."""
    if not isinstance(optimizer, torch.optim.Optimizer) or not type(optimizer).__module__.startswith("torch.optim."):
        return False
    on_gpu = any(parameter.is_cuda for group in optimizer.param_groups for parameter in group["params"])
    # torch sets this for the fused optimizers that have a kernel for GPUs.
    return on_gpu and bool(optimizer.defaults.get("fused")) and not hasattr(optimizer, "_step_supports_amp_scaling")


def _not_fusable(model: nn.Module) -> str:
    """Why fused optimizers, which need real parameters with dense gradients, cannot train the model; ``""`` if they can."""
    complex_ = [name for name, parameter in trainable(model).items() if parameter.is_complex()]
    if complex_:
        return f"{complex_[0]} is complex"
    sparse = _sparse_weights(model)
    return f"the gradients of {sparse[0]} are sparse" if sparse else ""


def _sparse_weights(model: nn.Module) -> list[str]:
    """Names of the trained parameters with sparse gradients."""
    return [
        f"{name}.weight".lstrip(".")
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse and module.weight.requires_grad
    ]
