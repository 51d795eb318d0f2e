"""What of a run goes into a checkpoint, and how it comes back: everything or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.config.errors import ConfigError
from dtrain.training.checkpoint import Checkpoint

_SHOWN = 5
_FEW = 16  # numbers that a group may hold in a tensor
# What torch's optimizers make in the first step of a run only, and look for in every later one.
_STATE_OF_OPTIONS: tuple[tuple[type[torch.optim.Optimizer], str, str], ...] = (
    (torch.optim.Adam, "amsgrad", "max_exp_avg_sq"),  # and AdamW, which is one
    (torch.optim.RMSprop, "centered", "grad_avg"),
    (torch.optim.RMSprop, "momentum", "momentum_buffer"),
)


def host_copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies on the CPU that share no memory, as safetensors wants them."""
    # From a GPU all at once into page-locked memory, which torch keeps for the next time.
    copies = {name: tensor.detach().to("cpu", copy=True, non_blocking=True) for name, tensor in tensors.items()}
    if any(tensor.is_cuda for tensor in tensors.values()):
        torch.cuda.synchronize()
    return {name: copy.contiguous() for name, copy in copies.items()}


def load_module(module: nn.Module, tensors: Mapping[str, Tensor], what: str) -> None:
    """Copies parameters and buffers into a module.

    Args:
        module: The bare module.
        tensors: Its ``state_dict`` as it was saved.
        what: Names the source in the error.

    Raises:
        ConfigError: If names or shapes differ, before anything is copied; names the first few.
    """
    own = module.state_dict()
    problems = [f"{name} is missing" for name in own if name not in tensors]
    problems += [f"{name} is unknown to this model" for name in tensors if name not in own]
    problems += [
        f"{name} has shape {list(tensors[name].shape)}, the model has {list(own[name].shape)}"
        for name in own
        if name in tensors and tensors[name].shape != own[name].shape
    ]
    if problems:
        more = f" and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ConfigError(
            f"{what} is of another model: {'; '.join(problems[:_SHOWN])}{more}. Use the model config that it was saved "
            "with, or another run.dir."
        )
    module.load_state_dict(dict(tensors))


def load_weights(module: nn.Module, checkpoint: Checkpoint, weights: str) -> str:
    """Loads a checkpoint's weights for use without training.

    Args:
        module: The bare module.
        checkpoint: Where from.
        weights: ``ema``, ``raw``, or ``""``: the moving average where there is one.

    Returns:
        ``ema`` or ``raw``.

    Raises:
        ConfigError: If there are none of that kind, or they are of another model.
    """
    if weights not in ("", "ema", "raw"):
        raise ConfigError(f"weights: got {weights!r}, want ema or raw.")
    kind = weights or ("ema" if "ema" in checkpoint.tensors else "raw")
    if kind == "ema" and "ema" not in checkpoint.tensors:
        raise ConfigError(
            "weights=ema: the checkpoint has no moving average (train.ema_decay was null). Use weights=raw."
        )
    load_module(module, checkpoint.tensors["ema" if kind == "ema" else "model"], "the checkpoint")
    return kind


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state by parameter name, so that it does not depend on the order of parameters.

    Returns:
        Tensors ``<parameter>/<key>``, and the values that are not tensors under the same names.

    Raises:
        ConfigError: If the optimizer keeps something that JSON cannot hold; names it.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            place = f"{names[parameter]}/{key}"
            if isinstance(value, Tensor):
                tensors[place] = value
            else:
                values[place] = _plain(optimizer, place, value)
    return tensors, values


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What each parameter group holds beside its parameters and its learning rate, which the schedule sets; plain values,
    and tensors of a few numbers as ``{"tensor": numbers, "dtype": name}``."""
    return [{k: _as_json(v) for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]


def changed_groups(optimizer: torch.optim.Optimizer, built: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the optimizer itself has put into its groups since they were ``built``, as Prodigy does with its step size.

    Everything else in a group is config, and may change when a run goes on.
    """
    return [
        {key: _plain(optimizer, key, value) for key, value in now.items() if key not in before or value != before[key]}
        for now, before in zip(group_values(optimizer), built, strict=True)
    ]


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Puts back what ``optimizer_state`` and ``changed_groups`` took; hyper-parameters stay those of the config.

    Raises:
        ConfigError: If the state is of parameters or groups that this optimizer does not have, or it lacks what an option
            that was switched on needs.
    """
    if any(groups) and len(groups) != len(optimizer.param_groups):
        raise ConfigError(
            f"the checkpoint's optimizer has {len(groups)} parameter groups that hold state, this one has "
            f"{len(optimizer.param_groups)}. Use the optimizer config that it was saved with."
        )
    names = {parameter: name for name, parameter in model.named_parameters()}
    ours = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    number = {names[parameter]: i for i, parameter in enumerate(ours)}
    state: dict[int, dict[str, Any]] = {}
    for place, value in {**tensors, **values}.items():
        name, _, key = place.rpartition("/")
        if name not in number:
            raise ConfigError(
                f"the checkpoint's optimizer has a state for {name}, which this one does not train. Use the model and "
                "optimizer config that it was saved with."
            )
        parameter = ours[number[name]]
        if isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
            # Fused kernels walk parameter and state in memory order, so a channels_last weight needs such a state.
            value = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
        state.setdefault(number[name], {})[key] = value
    _refuse_new_options(optimizer, state)
    # torch's own loader knows which state lives on the device and which on the host.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for group, changed in zip(optimizer.param_groups, groups, strict=False):
        group.update({key: _as_it_was(value, group.get(key)) for key, value in changed.items()})


def _refuse_new_options(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    number = 0
    for group in optimizer.param_groups:
        for _ in group["params"]:
            saved = state.get(number, {})
            number += 1
            for kind, option, key in _STATE_OF_OPTIONS:
                if isinstance(optimizer, kind) and group[option] and saved and key not in saved:
                    raise ConfigError(
                        f"optimizer.{option}: got {group[option]}, but the run was begun without it: "
                        f"{type(optimizer).__name__} needs a {key} that the checkpoint does not have. Set it back, or "
                        "start a new run with these weights (run.weights_from)."
                    )


def _as_json(value: Any) -> Any:
    # Some optimizers, such as timm's Lamb, count in a tensor.
    if isinstance(value, Tensor) and value.numel() <= _FEW:
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    return value


def _as_it_was(value: Any, built: Any) -> Any:
    """The inverse of ``_as_json``; a tensor comes to where the optimizer has made its own."""
    if not _is_tensor(value):
        return value
    device = built.device if isinstance(built, Tensor) else None
    return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]), device=device)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {"tensor", "dtype"}


def _plain(optimizer: torch.optim.Optimizer, place: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)) or _is_tensor(value):
        return value
    raise ConfigError(
        f"optimizer: {type(optimizer).__name__} keeps {place} as {type(value).__name__}. A checkpoint holds tensors, "
        "numbers, strings and null, so this optimizer could not continue. Use another one."
    )
