"""How runs stand, by their directories: one of them for a decision, several side by side for a person."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dtrain.launching.queue import active_job
from dtrain.launching.table import aligned
from dtrain.tracking.history import History, printable, read_all
from dtrain.tracking.report.directories import run_directories
from dtrain.tracking.report.varied import varied
from dtrain.tracking.report.wording import shortened
from dtrain.tracking.status import is_trained

_LONGEST = 100  # characters of a reason


def table(directories: Sequence[Path]) -> str:
    """A line for each run: its step, what was varied, as in a report, its last metrics, and how it stands.

    Args:
        directories: Of runs, or with runs below them.

    Raises:
        ValueError: If a directory holds no run.
    """
    runs = read_all(run_directories(directories))
    settings, _ = varied(runs)
    results = dict.fromkeys(name for run in runs for name in run.names("eval/") if not name.endswith("samples"))
    metrics = ["train/loss", *results]
    rows = [["run", "step", *(setting.name for setting in settings), *metrics, "state"]]
    for number, run in enumerate(runs):
        values = [setting.brief[number] or "-" for setting in settings]
        rows.append([run.label, _steps(run), *values, *(_last(run, name) for name in metrics), standing(run)])
    return aligned([list(map(printable, row)) for row in rows])  # the runs may be somebody else's


def standing(run: History) -> str:
    """In words: ``finished``, ``stopped (SIGTERM)``, ``running, job 12 RUNNING (n[1-2])``, ``killed``."""
    state, reason = str(run.status.get("state", "not begun")), run.status.get("reason")
    if job := active_job(run.path):
        return f"{state}, {job}"
    if state == "running":
        return state if is_trained(run.path) else "killed"
    return f"{state} ({shortened(str(reason).splitlines()[0], _LONGEST)})" if reason and state != "finished" else state


def _steps(run: History) -> str:
    step, last = run.status.get("step"), run.status.get("last_step")
    logged = run.series("step")[1]
    if len(logged) and (step is None or logged[-1] > step):
        step = int(logged[-1])
    return "-" if step is None else f"{step}/{last}" if last else str(step)


def _last(run: History, metric: str) -> str:
    values = run.series(metric)[1]
    return f"{values[-1]:.4g}" if len(values) else "-"
