"""The state of an optimizer in a checkpoint, by the names of parameters.

* Tensors and other values are stored apart: tensors in a file, values as JSON.
* Hyper-parameters stay as the config sets them, except those that the optimizer itself has changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dtrain.distributed.sharding import is_dtensor, own_range
from dtrain.errors import ConfigError
from dtrain.training.checkpoint.tensors import StoredTensor, like

_MAX_PROBLEMS = 5  # differences that one message lists
_MAX_NUMBERS = 16  # in a tensor of a parameter group that is stored as JSON
# State that torch's optimizers create in the first step of a run only, and expect in every later one.
_STATE_OF_OPTIONS: tuple[tuple[type[torch.optim.Optimizer], str, str], ...] = (
    (torch.optim.Adam, "amsgrad", "max_exp_avg_sq"),  # AdamW is a subclass
    (torch.optim.RMSprop, "centered", "grad_avg"),
    (torch.optim.RMSprop, "momentum", "momentum_buffer"),
)


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The optimizer's state by parameter name.

    Returns:
        Tensors under ``<parameter>/<key>``, and other values under such names.

    Raises:
        ConfigError: If the optimizer keeps a value that JSON cannot represent, or of a sharded parameter a tensor that is not
            sharded; names it.
    """
    names: dict[Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for parameter, state in optimizer.state.items():
        for key, value in state.items():
            place = f"{names[parameter]}/{key}"
            if isinstance(value, Tensor):
                if value.dim() and is_dtensor(parameter) and not is_dtensor(value):
                    raise ConfigError(
                        f"optimizer: {type(optimizer).__name__} keeps {place} as a plain tensor of shape {list(value.shape)}, "
                        "which may differ between the ranks of a sharded run, so it cannot be saved. Use parallel=ddp, or "
                        "a different optimizer."
                    )
                tensors[place] = value
            else:
                values[place] = _plain(optimizer, place, value)
    return tensors, values


def group_values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The values of each parameter group except its parameters and ``lr``, which the schedule sets.

    Small tensors become ``{"tensor": numbers, "dtype": name}``, for JSON.
    """
    return [{k: _as_json(v) for k, v in group.items() if k not in ("params", "lr")} for group in optimizer.param_groups]


def changed_groups(optimizer: torch.optim.Optimizer, initial: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The values of parameter groups that the optimizer itself changed since ``initial``, such as Prodigy's step size.

    All other values of a group are config, which may change between starts.
    """
    return [
        {key: _plain(optimizer, key, value) for key, value in now.items() if key not in before or value != before[key]}
        for now, before in zip(group_values(optimizer), initial, strict=True)
    ]


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    tensors: Mapping[str, Tensor | StoredTensor],
    values: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
) -> None:
    """Restores an optimizer from ``optimizer_state`` and ``changed_groups``; hyper-parameters stay as the config sets them.

    Raises:
        ConfigError: If the state is of parameters or groups that this optimizer does not have, or an option is on that was
            off when the state was saved.
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
        if isinstance(value, (Tensor, StoredTensor)):
            value = _state_of(ours[number[name]], place, value)
        state.setdefault(number[name], {})[key] = value
    _refuse_new_options(optimizer, state)
    # torch's load_state_dict puts each state on the device or on the host, as the optimizer needs it.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for group, changed in zip(optimizer.param_groups, groups, strict=False):
        group.update({key: _from_json(value, group.get(key)) for key, value in changed.items()})


@torch.no_grad()
def _state_of(parameter: Tensor, place: str, saved: Tensor | StoredTensor) -> Tensor:
    """A saved state of a parameter, distributed as the parameter if it has its shape."""
    if len(saved.shape) and saved.shape == parameter.shape:
        # Fused kernels walk parameter and state in memory order, so a channels_last weight needs channels_last state.
        return like(parameter, saved[own_range(parameter)])
    if len(saved.shape) and is_dtensor(parameter):
        raise ConfigError(
            f"the checkpoint's optimizer has {place} of shape {list(saved.shape)}, but the parameter has "
            f"{list(parameter.shape)}, so it cannot be divided among the ranks. Use parallel=ddp, or a different optimizer."
        )
    return saved[...]


def _refuse_new_options(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    number = 0
    for group in optimizer.param_groups:
        for _ in group["params"]:
            saved = state.get(number, {})
            number += 1
            for kind, option, key in _STATE_OF_OPTIONS:
                if isinstance(optimizer, kind) and group[option] and saved and key not in saved:
                    raise ConfigError(
                        f"optimizer.{option}: got {group[option]}, but the run was started without it: "
                        f"{type(optimizer).__name__} needs a {key} that the checkpoint does not have. Set it back, or "
                        "start a new run with these weights (run.weights_from)."
                    )


def _as_json(value: Any) -> Any:
    # Some optimizers, such as timm's Lamb, keep a step count in a tensor.
    if isinstance(value, Tensor) and value.numel() <= _MAX_NUMBERS:
        return {"tensor": value.tolist(), "dtype": str(value.dtype).removeprefix("torch.")}
    return value


def _from_json(value: Any, initial: Any) -> Any:
    """The inverse of ``_as_json``; a tensor is put on the device of ``initial``."""
    if not _is_tensor(value):
        return value
    device = initial.device if isinstance(initial, Tensor) else None
    return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"]), device=device)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {"tensor", "dtype"}


def _plain(optimizer: torch.optim.Optimizer, place: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)) or _is_tensor(value):
        return value
    raise ConfigError(
        f"optimizer: {type(optimizer).__name__} keeps {place} as {type(value).__name__}. A checkpoint holds tensors, "
        "numbers, strings and null, so this optimizer could not be restored. Use a different one."
    )
