"""Which artefacts this user exported: those may run the code that they name or hold, without being asked for.

A mark is an empty file in dtrain's cache, named by the SHA-256 of ``model.json``, which holds that of the model. It goes with
the cache and not with the artefact: who copies an artefact to another machine vouches for it there.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

from dtrain.config.cache_dir import cache_dir
from dtrain.deployment.description import DESCRIPTION


def remember(folder: Path) -> None:
    """From now on the artefact is known; where the cache cannot be written, it stays unknown."""
    with suppress(OSError):
        mark = _mark(folder)
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()


def is_made_here(folder: Path) -> bool:
    """Whether this user exported the artefact, and nobody changed it since."""
    return _mark(folder).exists()


def _mark(folder: Path) -> Path:
    return cache_dir() / "exported" / hashlib.sha256((folder / DESCRIPTION).read_bytes()).hexdigest()
