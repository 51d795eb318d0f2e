"""Checks of values that no other part can make before the run directory is changed. A stub."""

from __future__ import annotations

from dtrain.config.errors import ConfigError
from dtrain.config.schema import Config


def validate(cfg: Config) -> None:
    """Checks the values of a config.

    Raises:
        ConfigError: Names the key, the value and the remedy.
    """
    train = cfg.train
    if train.log_every < 1:
        raise ConfigError(f"train.log_every: got {train.log_every}, want at least 1.")
    if train.eval_every is not None and train.eval_every < 0:
        raise ConfigError(
            f"train.eval_every: got {train.eval_every}, want a number of steps, 0 for the end only, or null for each epoch."
        )
