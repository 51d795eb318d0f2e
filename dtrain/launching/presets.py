"""Presets as they were when a job was submitted: what is edited while it waits or between its allocations is not its config."""

from __future__ import annotations

import shutil

from dtrain.config.app import conf_dir
from dtrain.config.errors import users_to_fix
from dtrain.launching.point import Point

_FOLDER = "presets"


def frozen_arguments(point: Point) -> list[str]:
    """What follows ``-m dtrain.train``: as ``point.arguments``, with the presets that :func:`freeze` keeps."""
    folder = point.run.dir / _FOLDER
    theirs = [
        part for number in range(len(point.run.config_dirs)) for part in ("--config-dir", str(folder / str(number)))
    ]
    return ["--config-path", str(folder / "conf"), *theirs, *point.overrides]


def freeze(point: Point) -> None:
    """Copies dtrain's presets and the user's into the run directory.

    Raises:
        ConfigError: If the disk refuses.
    """
    folder = point.run.dir / _FOLDER
    with users_to_fix("run.dir"):
        if folder.exists():
            shutil.rmtree(folder)
        shutil.copytree(conf_dir(), folder / "conf")
        for number, theirs in enumerate(point.run.config_dirs):
            shutil.copytree(theirs, folder / str(number))
