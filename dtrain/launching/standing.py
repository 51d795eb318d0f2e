"""How runs stand, by their directories: one of them for a decision, several side by side for a person."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dtrain.launching.queue import active_job
from dtrain.launching.table import aligned
from dtrain.tracking.history import ABSENT, History, differences, printable, read_all
from dtrain.tracking.status import is_trained

# Where a run is, how it is started and watched: not what one compares.
_NOT_COMPARED = ("run.name", "launch.", "tracker.")


def table(directories: Sequence[Path]) -> str:
    """A line for each run: how it stands, its step, the config keys in which the runs differ, its last metrics.

    Raises:
        ValueError: If a directory holds no run.
    """
    runs = read_all(directories)
    varied = {key: values for key, values in differences(runs).items() if not key.startswith(_NOT_COMPARED)}
    results = dict.fromkeys(name for run in runs for name in run.names("eval/") if not name.endswith("samples"))
    metrics = ["train/loss", *results]
    rows = [["run", "state", "step", *varied, *metrics]]
    for number, run in enumerate(runs):
        settings = [_setting(values[number]) for values in varied.values()]
        rows.append([run.label, standing(run), _steps(run), *settings, *(_last(run, name) for name in metrics)])
    return aligned([list(map(printable, row)) for row in rows])  # the runs may be somebody else's


def standing(run: History) -> str:
    """In words: ``finished``, ``stopped (SIGTERM)``, ``running, job 12 RUNNING (n[1-2])``, ``killed``."""
    state, reason = str(run.status.get("state", "not begun")), run.status.get("reason")
    if job := active_job(run.path):
        return f"{state}, {job}"
    if state == "running":
        return state if is_trained(run.path) else "killed"
    return f"{state} ({str(reason).splitlines()[0]})" if reason and state != "finished" else state


def _steps(run: History) -> str:
    step, last = run.status.get("step"), run.status.get("last_step")
    logged = run.series("step")[1]
    if len(logged) and (step is None or logged[-1] > step):
        step = int(logged[-1])
    return "-" if step is None else f"{step}/{last}" if last else str(step)


def _last(run: History, metric: str) -> str:
    values = run.series(metric)[1]
    return f"{values[-1]:.4g}" if len(values) else "-"


def _setting(value: Any) -> str:
    return "-" if value is ABSENT else str(value)
