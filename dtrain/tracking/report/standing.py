"""How a run stands, in a few words."""

from __future__ import annotations

from dtrain.tracking.history import History, printable
from dtrain.tracking.report.wording import shortened
from dtrain.tracking.run_files import is_plain
from dtrain.tracking.status import is_trained

_LONGEST = 100  # characters of a reason


def state(run: History) -> str:
    """``finished``, ``stopped``, ``failed``, ``running`` or ``killed``; without a status what its other files tell."""
    said = run.status.get("state")
    if said is None:
        return _without_status(run)
    return "killed" if was_killed(run) else str(said)


def was_killed(run: History) -> bool:
    """Whether it says that it runs, but has let go of its lock, as only an end can make it."""
    return run.status.get("state") == "running" and is_plain(run.path / ".lock") and not is_trained(run.path)


def told(run: History) -> str:
    """The state with its reason, and what the run lacks."""
    reason = run.status.get("reason") if state(run) in ("failed", "stopped") else None
    because = f": {shortened(str(reason), _LONGEST)}" if reason else ""
    lacks = "" if run.names("eval/") else ", not evaluated" if len(run.columns.steps) else ", nothing logged"
    return printable(f"{state(run)}{because}{lacks}")


def _without_status(run: History) -> str:
    if len(run.columns.steps):
        return "state unknown"  # the status is lost or damaged
    if is_trained(run.path):
        return "starting"
    if (run.path / ".lock").exists():
        return "failed before its first step"
    if (run.path / "logs" / "torchrun").exists():
        return "starting, or failed before its first step"
    return "queued" if (run.path / ".job").exists() else "not begun"
