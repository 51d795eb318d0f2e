"""Values that a config computes: places in the cache directory and in the environment."""

from __future__ import annotations

import os

from omegaconf import OmegaConf

from dtrain.config.cache_dir import cache_dir
from dtrain.config.errors import ConfigError


def register() -> None:
    """Makes ``${dtrain.env:A,B}`` and ``${dtrain.cache:NAME}`` known to OmegaConf."""
    OmegaConf.register_new_resolver("dtrain.env", _first_of_environment, replace=True)
    OmegaConf.register_new_resolver("dtrain.cache", lambda name: str(cache_dir() / name), replace=True)


def _first_of_environment(*names: str) -> str:
    for name in names:
        if value := os.environ.get(name):
            return value
    raise ConfigError(f"the environment variable {names[0]} is not set. Set it to the folder that holds the shards.")
