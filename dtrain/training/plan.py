"""How long a run is, in attempted steps; equal on all ranks before the first one."""

from __future__ import annotations

from dtrain.config.errors import ConfigError
from dtrain.config.schema import TrainConfig
from dtrain.data import ShardLoader


def schedule_horizon(train: TrainConfig, loader: ShardLoader) -> int:
    """Steps that the learning-rate schedule is laid out for: where ``max_epochs`` ends, else ``max_steps``.

    ``max_epochs`` comes first, so that a run that ``max_steps`` cuts short has the curve of the whole one.

    Raises:
        ConfigError: If neither is set, or one is below 1.
    """
    for key in ("max_steps", "max_epochs"):
        value = getattr(train, key)
        if value is not None and value < 1:
            raise ConfigError(f"train.{key}: got {value}, want at least 1, or null for no such limit.")
    if train.max_epochs is not None:
        return train.max_epochs * loader.steps_per_epoch
    if train.max_steps is not None:
        return train.max_steps
    raise ConfigError("train.max_steps and train.max_epochs are both null. Set at least one: it ends the run.")


def last_step(train: TrainConfig, loader: ShardLoader, step: int) -> int:
    """The attempted step after which the run is finished: the first of ``max_steps`` and ``max_epochs``.

    Args:
        train: The config.
        loader: At the committed position.
        step: Attempted steps so far.
    """
    limits = [train.max_steps] if train.max_steps is not None else []
    if train.max_epochs is not None:
        later_epochs = train.max_epochs - loader.position[0] - 1
        limits.append(step + loader.steps_left + later_epochs * loader.steps_per_epoch if later_epochs >= 0 else step)
    return min(limits)
