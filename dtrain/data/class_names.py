"""The names of a data set's classes, where somebody gave them any."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from dtrain.config.errors import ConfigError
from dtrain.data import shards

_FILE = "classes.json"


def class_names(*patterns: Any) -> list[str] | None:
    """What ``dtrain.pack imagefolder`` wrote beside the shards: a list in which a label's place is its name.

    Args:
        patterns: What ``data.train`` and ``data.eval`` say; the first with such a file counts.

    Returns:
        The names; None where there are none.

    Raises:
        ConfigError: If the file is no list of names.
    """
    for pattern in patterns:
        # Names are welcome, not needed: the shards may be gone by now.
        with suppress(ValueError, OSError):
            paths = shards.expand(pattern if isinstance(pattern, str) else list(pattern or []))
            path = Path(paths[0]).parent / _FILE
            if path.is_file():
                return _read(path)
    return None


def _read(path: Path) -> list[str]:
    try:
        names = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON ({error}). Correct or delete it.") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{path} is not a list of class names. Correct or delete it.")
    return names
