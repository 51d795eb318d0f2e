"""``python -m dtrain.launch status|tail|stop|resume DIR``: commands for runs that were started."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dtrain.config.errors import ConfigError, as_config_error
from dtrain.config.run import recompose
from dtrain.launching import slurm
from dtrain.launching.job import FINISHED, assignment
from dtrain.launching.job_script import SCRIPT
from dtrain.reporting.health import run_state, run_state_with_reason
from dtrain.reporting.sweep import varied_settings
from dtrain.reporting.tables import Column, setting_column, text_table
from dtrain.tracking.history import History, read_all, run_directories
from dtrain.tracking.run_dir import is_trained

#: Starts the runs of a command line of ``dtrain.launch``; returns the exit code.
Launch = Callable[[Sequence[str]], int]
_TAIL_LINES = 30


def run_command(arguments: Sequence[str], launch: Launch) -> int:
    """Runs a command; returns its exit code.

    Args:
        arguments: One of :data:`COMMANDS`, then run directories.
        launch: Starts a run on this machine; ``resume`` needs it.

    Raises:
        ConfigError: If a directory is missing, or the command cannot be applied to it.
    """
    name, *rest = arguments
    paths = [Path(argument).expanduser().absolute() for argument in rest]
    # A shell expands runs/* to files such as report.html, too.
    directories = [path for path in paths if len(paths) == 1 or not path.is_file()]
    if not directories:
        raise ConfigError(f"{name}: give the directory of a run: python -m dtrain.launch {name} runs/NAME")
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError(f"{name}: {directory} is not a directory. Give the directory of a run (run.dir).")
    return COMMANDS[name](directories, launch)


def status(directories: Sequence[Path]) -> int:
    """Prints a table with one line for each run."""
    with as_config_error("status"):
        print(status_table(directories), end="")
    return FINISHED


def status_table(directories: Sequence[Path]) -> str:
    """A table with one line for each run: name, step, varied settings, last metrics, state.

    Args:
        directories: Run directories, or directories that hold run directories.

    Raises:
        ValueError: If a directory holds no run.
    """
    runs = read_all(run_directories(directories))
    settings, _ = varied_settings(runs)
    evaluated = dict.fromkeys(name for run in runs for name in run.names("eval/") if not name.endswith("samples"))
    return text_table(
        [
            Column("run", [run.label for run in runs], False),
            Column("step", [_steps(run) for run in runs], False),
            *map(setting_column, settings),
            *(Column(name, [_last_value(run, name) for run in runs]) for name in ("train/loss", *evaluated)),
            Column("state", [_state(run) for run in runs], False),
        ]
    )


def _state(run: History) -> str:
    """Such as ``finished``, ``stopped: SIGTERM``, ``running, job 12 RUNNING (n[1-2])``, ``killed``."""
    if job := slurm.active_job(run.path):
        state = run_state(run)
        # On some file systems this machine does not see the lock that a run on another node holds.
        return f"{'running' if state == 'killed' and job.has_nodes else state}, {job}"
    return run_state_with_reason(run)


def _steps(run: History) -> str:
    step, last = run.status.get("step"), run.status.get("last_step")
    logged = run.series("step")[1]
    if len(logged) and (step is None or logged[-1] > step):
        step = int(logged[-1])
    return "" if step is None else f"{step}/{last}" if last else str(step)


def _last_value(run: History, metric: str) -> str:
    return f"{run.last(metric):.4g}" if run.has(metric) else ""


def tail(directories: Sequence[Path]) -> int:
    """Replaces this process by ``tail -F`` of the log of a run."""
    if len(directories) != 1:
        raise ConfigError(f"tail: got {len(directories)} directories, want one.")
    log = newest_log(directories[0])
    print(f"==> {log}", flush=True)
    os.execvp("tail", ["tail", f"--lines={_TAIL_LINES}", "-F", str(log)])


def newest_log(run_dir: Path) -> Path:
    """The log of the newest SLURM job of a run; without one, the log of rank 0.

    Raises:
        ConfigError: If there is no log; names possible reasons.
    """
    job_id = slurm.read_job_id(run_dir)
    of_job = run_dir / "logs" / f"slurm-{job_id}.out"
    if of_job.exists():
        return of_job
    others = sorted((run_dir / "logs").glob("slurm-*.out"), key=lambda path: path.lstat().st_mtime)
    for log in (*others[-1:], run_dir / "logs" / "rank-00000.log"):
        if log.exists():
            return log
    waiting = slurm.active_job(run_dir)
    raise ConfigError(
        f"{run_dir / 'logs'} has no log yet"
        + (f": {waiting}." if waiting else ".")
        + (f" If `scontrol show job {job_id}` shows FAILED, its node may not see this directory." if job_id else "")
    )


def stop(directories: Sequence[Path]) -> int:
    """Asks running runs to save and stop; cancels jobs that wait in the queue."""
    for run_dir in directories:
        job = slurm.active_job(run_dir)
        if job is not None and not job.has_nodes:
            subprocess.run(["scancel", job.id], check=True)
            print(f"{run_dir}: cancelled {job}, which was waiting in the queue")
        elif job is not None or is_trained(run_dir):
            with as_config_error("stop"):
                (run_dir / "STOP").touch()
            print(f"{run_dir}: the run will save and stop")
        else:
            raise ConfigError(f"{run_dir}: no process trains this run, so there is nothing to stop.")
    return FINISHED


def resume(directories: Sequence[Path], launch: Launch) -> int:
    """Starts runs again as they were started: by submitting their batch script, or on this machine.

    Args:
        directories: The run directories.
        launch: Starts a run on this machine.
    """
    codes = []
    for run_dir in directories:
        if (run_dir / SCRIPT).exists():
            slurm.require_sbatch()
            slurm.refuse_second_job(run_dir)
            slurm.write_job_id(run_dir, submitted := slurm.submit(run_dir / SCRIPT))
            print(f"{run_dir}: submitted job {submitted}")
            codes.append(FINISHED)
        elif job_id := slurm.read_job_id(run_dir):
            raise ConfigError(
                f"{run_dir}: dtrain.launch did not write the batch script of job {job_id}. Submit that script again with the "
                f"run directory: RUN_DIR={shlex.quote(str(run_dir))} sbatch slurm/..."
            )
        else:
            arguments = recompose([assignment("run.dir", str(run_dir))])
            print(f"python -m dtrain.launch {shlex.join(arguments)}", file=sys.stderr, flush=True)
            codes.append(launch(arguments))
    return max(codes)


COMMANDS: dict[str, Callable[[Sequence[Path], Launch], int]] = {
    "status": lambda directories, launch: status(directories),
    "tail": lambda directories, launch: tail(directories),
    "stop": lambda directories, launch: stop(directories),
    "resume": resume,
}
