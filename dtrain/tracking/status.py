"""status.json: how a run stands, for whoever started it.

Batch scripts and the launcher judge a run by this file, because torchrun turns every non-zero exit code of a worker
into 1. Rank 0 alone writes it.
"""

from __future__ import annotations

import fcntl
import json
import time
from pathlib import Path
from typing import Any

from dtrain.tracking.atomic import replacing
from dtrain.tracking.run_files import is_plain

#: ``running`` also stands in the file of a run that was killed: compare its ``time``, or ask whoever started the run.
STATES = ("running", "finished", "stopped", "failed")


def write_status(run_dir: Path, state: str, step: int, reason: str | None = None, **extra: Any) -> None:
    """Replaces ``run_dir/status.json``.

    Args:
        run_dir: The run's directory; it exists.
        state: One of :data:`STATES`. ``stopped`` means on request and resumable.
        step: Attempted optimizer steps.
        reason: A sentence for a person: why it stopped or failed.
        extra: Further entries that JSON can hold.

    Raises:
        ValueError: If ``state`` is none of :data:`STATES`.
        OSError: If the file cannot be written; the old one is then still there.
    """
    if state not in STATES:
        raise ValueError(f"status: got state {state!r}; known are {', '.join(STATES)}.")
    status = {"state": state, "step": step, "reason": reason, "time": time.time(), **extra}
    with replacing(run_dir / "status.json") as handle:
        handle.write(json.dumps(status, indent=2, allow_nan=False).encode() + b"\n")


def read_status(run_dir: Path) -> dict[str, Any] | None:
    """What ``run_dir/status.json`` says, or None if there is none.

    Raises:
        ValueError: If the file is not a status; it is never half-written, so someone else wrote it.
    """
    path = run_dir / "status.json"
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        status = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}). Delete it; the run writes a new one.") from error
    if not isinstance(status, dict) or status.get("state") not in STATES:
        raise ValueError(f"{path}: no 'state' among {', '.join(STATES)}. Delete it; the run writes a new one.")
    return status


def is_trained(run_dir: Path) -> bool:
    """Whether a process trains a run: one that was killed leaves the state ``running``, but not the run's lock."""
    path = run_dir / ".lock"
    if not is_plain(path):
        return False
    try:
        with path.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:  # somebody has it; or the file system has no locks, and then only the state tells
        return True
    return False
