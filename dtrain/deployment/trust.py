"""Which artefacts may run code that they name or hold: those that this user exported, and those that are harmless.

* A user's own artefacts are known by a *mark*, an empty file in dtrain's cache that is named by the SHA-256 of ``model.json``,
  which holds that of the model. It goes with the cache and not with the artefact: who copies an artefact to another machine
  vouches for it there.
* *Harmless* is a graph that holds no code, and a model that is built by calling nothing but classes derived from
  ``torch.nn.Module``. A program for torch holds code of its own, so it never is.
"""

from __future__ import annotations

import hashlib
import pkgutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from dtrain.config.cache_dir import cache_dir
from dtrain.config.errors import ConfigError
from dtrain.deployment.description import DESCRIPTION, Description

_REMEDY = "If you trust whoever made the artefact, add --trust."


def remember(folder: Path) -> None:
    """From now on the artefact is this user's; where the cache cannot be written, it stays unknown."""
    with suppress(OSError):
        mark = _mark(folder)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def require_trusted(folder: Path, description: Description) -> None:
    """Accepts an artefact that this user exported and nobody changed since, and one that is harmless.

    Raises:
        ConfigError: If it is neither, or a ``_target_`` cannot be imported.
    """
    if _mark(folder).exists():
        return
    if description.format.holds_code:
        raise ConfigError(
            f"{folder}: {description.file} is a program with code of its own, which could do anything. {_REMEDY}"
        )
    if not description.format.traced:  # it would be built
        _require_harmless(description.model, folder)


def _require_harmless(node: Any, folder: Path) -> None:
    if isinstance(node, Mapping):
        if "_target_" in node:
            _require_module(str(node["_target_"]), folder)
        for value in node.values():
            _require_harmless(value, folder)
    elif isinstance(node, str):
        # OmegaConf would compute it when the model is built, and what comes of it may have a _target_.
        if "${" in node:
            raise ConfigError(f"{folder}: its model is built with {node!r}, which could stand for anything. {_REMEDY}")
    elif isinstance(node, Sequence):
        for value in node:
            _require_harmless(value, folder)


def _require_module(target: str, folder: Path) -> None:
    try:
        found = pkgutil.resolve_name(target)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{folder}: its model is built by {target}, which cannot be imported ({error}). Install its package, or set "
            "PYTHONPATH to the folder of its module."
        ) from error
    if not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ConfigError(
            f"{folder}: its model is built by calling {target}, which is not a torch.nn.Module class and could do anything. "
            f"{_REMEDY}"
        )


def _mark(folder: Path) -> Path:
    return cache_dir() / "exported" / hashlib.sha256((folder / DESCRIPTION).read_bytes()).hexdigest()
