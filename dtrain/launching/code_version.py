"""Which code a run was started with."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import dtrain


def code_version() -> dict[str, Any]:
    """Versions, and for the git checkouts of dtrain and of the working directory their commit.

    Returns:
        ``{"dtrain", "torch", "python", "git": {checkout: {"commit", "modified"}}}``; ``modified`` tells of changes that
        no commit holds.
    """
    checkouts = {_git(folder, "rev-parse", "--show-toplevel") for folder in (Path(dtrain.__file__).parent, Path.cwd())}
    return {
        "dtrain": dtrain.__version__,
        "torch": torch.__version__,
        "python": sys.executable,
        "git": {
            checkout: {
                "commit": _git(Path(checkout), "rev-parse", "HEAD"),
                "modified": bool(_git(Path(checkout), "status", "--porcelain")),
            }
            for checkout in sorted(filter(None, checkouts))
        },
    }


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says, or None where it is not installed, or the folder is no checkout of this user's."""
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()
