"""Where dtrain keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$DTRAIN_CACHE``, else ``$XDG_CACHE_HOME/dtrain``, else ``~/.cache/dtrain``; not created here."""
    if place := os.environ.get("DTRAIN_CACHE"):
        return Path(place).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dtrain"
