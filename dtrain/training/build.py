"""From config nodes to objects: precision, model, optimizer, schedule, all on this rank's device."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dtrain.config.errors import ConfigError, users_to_fix
from dtrain.config.missing_target import why_missing
from dtrain.config.schema import LossScaleConfig, ParallelConfig, PrecisionConfig, TrainConfig
from dtrain.distributed.world import World
from dtrain.optimizers.groups import decay_groups, trainable
from dtrain.precision import Precision
from dtrain.precision.comm_hooks import COMM_DTYPES, HookGuard, reduce_in
from dtrain.precision.loss_scale import LossScale
from dtrain.training.execution import (
    checkpoint_activations,
    compile_in_place,
    synchronise_batchnorm,
    use_channels_last,
)
from dtrain.training.schedule import Lengths


def by_target(key: str, node: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls the ``_target_`` of a config node with the node's other keys.

    Args:
        key: The node's place in the config, for errors.
        node: The node.
        args: Passed on.
        kwargs: Passed on; they win over the node's keys.

    Raises:
        ConfigError: If there is no ``_target_``, nothing of that name can be imported, or it does not take these keys or
            refuses a value (``ValueError``).
        Exception: What else the target itself raises, or its module while it is imported.
    """
    if not isinstance(node, DictConfig) or "_target_" not in node:
        raise ConfigError(f"{key}: has no _target_. Name a class or function, such as {key}._target_=package.Class.")
    try:
        return instantiate(node, *args, _convert_="all", **kwargs)
    except InstantiationException as error:
        cause = error.__cause__
        if cause is not None and "Error locating target" not in str(error):
            if isinstance(cause, TypeError) and cause.__traceback__ is not None and cause.__traceback__.tb_next is None:
                # Raised by the call, before anything inside ran.
                raise ConfigError(f"{key}: {node._target_} does not take these keys: {cause}.") from error
            if isinstance(cause, ValueError) and not isinstance(cause, ConfigError):
                raise ConfigError(f"{key}: {cause}") from cause
            raise cause from None
        raised = cause
        while raised is not None and raised.__cause__ is not None:
            raised = raised.__cause__
        if raised is not None and not isinstance(raised, (ImportError, AttributeError, ValueError)):
            raise raised from None  # by a module while it was imported
        # Of a target inside this node only Hydra's message says the name.
        named = re.search(r"Error locating target '([^']*)'", str(error))
        target = named[1] if named else str(node._target_)
        where = f"{key}._target_" if target == node._target_ else f"{key}, a _target_ inside"
        reason = why_missing(target)
        if not reason:  # it is there, but nothing that can be called
            raise ConfigError(f"{where}: {target!r}: {str(error).splitlines()[0]}.") from error
        raise ConfigError(f"{where}: {target!r} cannot be imported: {reason}") from error


def build_precision(cfg: PrecisionConfig, device: torch.device) -> tuple[Precision, list[str]]:
    """The precision policy, put in force for this process.

    Returns:
        The policy, and what a user should be warned of.

    Raises:
        ConfigError: If the device cannot compute in it.
    """
    with users_to_fix("precision"):
        precision = Precision(cfg.name, tuple(cfg.keep_fp32))
        return precision, precision.apply(device)


def build_loss_scale(cfg: LossScaleConfig, precision: Precision, device: torch.device) -> LossScale | None:
    """The loss scale; None where the precision does not scale gradients.

    Raises:
        ConfigError: If a factor, interval or bound is impossible.
    """
    if not precision.scales_gradients:
        return None
    with users_to_fix("precision.loss_scale"):
        return LossScale(
            device,
            init=cfg.init,
            growth_factor=cfg.growth_factor,
            backoff_factor=cfg.backoff_factor,
            growth_interval=cfg.growth_interval,
            hysteresis=cfg.hysteresis,
            min_scale=cfg.min,
            max_scale=cfg.max,
        )


def build_model(node: Any, device: torch.device, channels_last: bool = True) -> nn.Module:
    """The bare model on its device.

    Args:
        node: The config node.
        device: The device.
        channels_last: Weights of convolutions get the layout that fast kernels want, as images have it.

    Raises:
        ConfigError: If it is no module, or already wrapped for several devices.
    """
    model = by_target("model", node)
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        raise ConfigError(
            f"model: {node._target_} returns a model wrapped in {type(model).__name__}. dtrain wraps it itself, and two "
            "wrappers would average gradients twice. Return the bare module."
        )
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: {node._target_} returns {type(model).__name__}, want a torch.nn.Module.")
    model = model.to(device)
    if channels_last:
        use_channels_last(model)
    return model


def equip(model: nn.Module, train: TrainConfig, parallel: ParallelConfig, world: World) -> nn.Module:
    """The model as it is to run in training: what ``dtrain.training.execution`` does to it where the config asks for it.

    Raises:
        ConfigError: If a pattern matches no module, or this device cannot do it.
    """
    if parallel.sync_batchnorm:
        model = synchronise_batchnorm(model, world)
    checkpoint_activations(model, train.checkpoint_activations)
    what = OmegaConf.to_container(train.compile) if isinstance(train.compile, ListConfig) else train.compile
    compile_in_place(model, what)  # type: ignore[arg-type]
    return model


def build_optimizer(node: Any, model: nn.Module, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer over the model's trainable parameters; fused where its class has it and the config is silent.

    A target with an argument ``model`` gets the model, to make groups of its own. The node's key ``no_decay`` is not for the
    target: see ``decay_groups``.

    Raises:
        ConfigError: If nothing is trainable, or a pattern matches nothing.
    """
    parameters: list[Any] = list(trainable(model).values())
    if not parameters:
        raise ConfigError("model: it has no parameter that requires a gradient, so there is nothing to train.")
    if not isinstance(node, DictConfig) or "_target_" not in node:
        return by_target("optimizer", node)  # which says so
    node = node.copy()
    with open_dict(node):
        no_decay = node.pop("no_decay", None)
    if no_decay is not None:
        with users_to_fix("optimizer.no_decay"):
            parameters = decay_groups(model, no_decay)
    takes = _arguments(node._target_)
    if "model" in takes:
        if no_decay is not None:
            raise ConfigError(
                f"optimizer.no_decay: {node._target_} makes its own groups of parameters. Set it to null."
            )
        with users_to_fix("optimizer"):
            optimizer = by_target("optimizer", node, model=model)
    else:
        fused = {"fused": True} if "fused" in takes and not {"fused", "foreach", "_partial_"} & set(node) else {}
        try:
            optimizer = by_target("optimizer", node, parameters, **fused)
        except TypeError as error:  # as torch says that a number is none
            given = ", ".join(f"{key}={value}" for key, value in node.items() if key != "_target_")
            raise ConfigError(f"optimizer: {error}. One of its values is wrong: {given}.") from error
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise ConfigError(f"optimizer: {node._target_} returns {type(optimizer).__name__}, want a torch Optimizer.")
    return optimizer


def _arguments(target: str) -> set[str]:
    """Names of what a class or function takes; empty if it cannot be imported, which ``by_target`` says."""
    with suppress(ValueError, ImportError, InstantiationException):
        return set(inspect.signature(get_object(target)).parameters)
    return set()


def build_schedule(node: Any, lengths: Lengths) -> Callable[[int], float]:
    """The learning-rate schedule: a factor for a number of applied steps.

    Args:
        node: The config node; durations in it, such as ``5 epochs``, become steps.
        lengths: Of the run; its horizon is used where the node's ``horizon`` is null.
    """
    if isinstance(node, DictConfig):
        plain = OmegaConf.to_container(node, resolve=True)
        node = OmegaConf.create(lengths.in_steps(plain))
        if node.get("horizon") is None:
            node.horizon = lengths.horizon
    with users_to_fix("schedule"):
        schedule = by_target("schedule", node)
    if not callable(schedule):
        raise ConfigError(
            f"schedule: {node._target_} gives {type(schedule).__name__}, want a callable of applied steps."
        )
    return schedule


def wrap(
    model: nn.Module, parallel: ParallelConfig, world: World, deterministic: bool
) -> tuple[nn.Module, HookGuard | None]:
    """The model as the step runs it: in DDP where there are several ranks.

    DDP lays its buckets out anew after the first backward of a process. From three ranks on that changes the order of
    summation, so a resumed run would differ in the last bit; only a search for unused parameters keeps the layout.

    Returns:
        The model, and for the step to ask: what guards ``parallel.comm_hook``, where there is one.

    Raises:
        ConfigError: If ``parallel.comm_dtype`` is none, or there is a hook as well.
    """
    if parallel.comm_dtype not in COMM_DTYPES:
        raise ConfigError(f"parallel.comm_dtype: got {parallel.comm_dtype!r}, want one of {', '.join(COMM_DTYPES)}.")
    if parallel.comm_hook is not None and parallel.comm_dtype != "fp32":
        raise ConfigError(
            f"parallel: got comm_dtype={parallel.comm_dtype} and a comm_hook, which decides by itself what is sent. Set "
            "one of them."
        )
    if world.size == 1:
        return model, None
    ddp = DistributedDataParallel(
        model,
        device_ids=[world.device.index] if world.device.type == "cuda" else None,
        bucket_cap_mb=parallel.bucket_cap_mb,
        find_unused_parameters=parallel.find_unused_parameters or deterministic,
        static_graph=parallel.static_graph and not deterministic,
        gradient_as_bucket_view=parallel.gradient_as_bucket_view,
    )
    if parallel.comm_hook is None:
        reduce_in(ddp, COMM_DTYPES[parallel.comm_dtype])
        return ddp, None
    # The node is the hook and its state, as torch's register_comm_hook takes them; the bucket comes later.
    hook = by_target("parallel.comm_hook", parallel.comm_hook, _partial_=True)
    if inspect.isclass(hook.func) or hook.args or not set(hook.keywords) <= {"state"}:
        raise ConfigError(
            f"parallel.comm_hook: got {OmegaConf.to_container(parallel.comm_hook)}, want the _target_ of a function "
            "hook(state, bucket), and its state, which may be a _target_ with options of its own."
        )
    return ddp, HookGuard(ddp, hook.func, hook.keywords.get("state"))
