"""The names of a data set's classes, where somebody gave them any."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dtrain.config.errors import ConfigError
from dtrain.config.schema import DataConfig
from dtrain.data import shards

_FILE = "classes.json"


def class_names(data: DataConfig) -> list[str] | None:
    """What ``dtrain.pack imagefolder`` wrote beside the shards: a list in which a label's place is its name.

    Args:
        data: Of ``train`` and ``eval``, the first with such a file counts.

    Returns:
        The names; None where there are none.

    Raises:
        ConfigError: If the file is no readable list of names.
    """
    for pattern in (None if OmegaConf.is_missing(data, "train") else data.train, data.eval):
        if (file := _beside(pattern)) is not None:
            return _read(file)
    return None


def _beside(pattern: Any) -> Path | None:
    # Names are welcome, not needed: the shards may be gone by now.
    with suppress(ValueError, OSError):
        paths = shards.expand(pattern if isinstance(pattern, str) else list(pattern or []))
        file = Path(paths[0]).parent / _FILE
        if file.is_file():
            return file
    return None


def _read(path: Path) -> list[str]:
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise ConfigError(f"{path} cannot be read as JSON ({error}). Correct or delete it.") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path} is not a list of class names. Correct or delete it.")
    return names
