"""The directory of files that dtrain can rebuild, such as indexes and copies of shards."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$DTRAIN_CACHE``, else ``$XDG_CACHE_HOME/dtrain``, else ``~/.cache/dtrain``; it may not exist."""
    if folder := os.environ.get("DTRAIN_CACHE"):
        return Path(folder).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dtrain"
