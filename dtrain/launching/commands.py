"""``python -m dtrain.launch status|tail|stop|resume DIR``: what one does with a run that was started."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from dtrain.config.errors import ConfigError, users_to_fix
from dtrain.config.run import recompose
from dtrain.launching import slurm
from dtrain.launching.outcome import FINISHED
from dtrain.launching.point import assignment
from dtrain.launching.queue import active_job, job_id, keep_job_id
from dtrain.launching.standing import table
from dtrain.tracking.status import is_trained

#: Starts what a command line of ``dtrain.launch`` describes; returns the exit code.
Launch = Callable[[Sequence[str]], int]
_SCRIPT = "job.sbatch"
_LINES = 30


def status(directories: Sequence[Path]) -> int:
    """Prints a line for each run, side by side."""
    with users_to_fix("status"):
        print(table(directories), end="")
    return FINISHED


def tail(directories: Sequence[Path]) -> int:
    """Becomes ``tail -F`` of a run's log: what its job says, else what rank 0 says."""
    if len(directories) != 1:
        raise ConfigError(f"tail: got {len(directories)} directories, want one.")
    log = newest_log(directories[0])
    print(f"==> {log}", flush=True)
    os.execvp("tail", ["tail", f"--lines={_LINES}", "-F", str(log)])


def newest_log(run_dir: Path) -> Path:
    """The log that tells what a run does now.

    Raises:
        ConfigError: If there is none; says why that may be.
    """
    job = job_id(run_dir)
    of_job = run_dir / "logs" / f"slurm-{job}.out"
    if of_job.exists():
        return of_job
    others = sorted((run_dir / "logs").glob("slurm-*.out"), key=lambda path: path.lstat().st_mtime)
    for log in (*others[-1:], run_dir / "logs" / "rank-00000.log"):
        if log.exists():
            return log
    waiting = active_job(run_dir)
    raise ConfigError(
        f"{run_dir / 'logs'} has no log yet"
        + (f": {waiting}." if waiting else ".")
        + (f" If `scontrol show job {job}` says FAILED, its node may not see this directory." if job else "")
    )


def stop(directories: Sequence[Path]) -> int:
    """Asks runs to save and stop; those that still wait for nodes are taken out of the queue."""
    for run_dir in directories:
        job = active_job(run_dir)
        if job is not None and not job.runs:
            subprocess.run(["scancel", job.id], check=True)
            print(f"{run_dir}: {job} is taken out of the queue")
        elif job is not None or is_trained(run_dir):
            with users_to_fix("stop"):
                (run_dir / "STOP").touch()
            print(f"{run_dir}: asked to save and stop")
        else:
            raise ConfigError(f"{run_dir}: nothing trains it, so there is nothing to stop.")
    return FINISHED


def resume(directories: Sequence[Path], launch: Launch) -> int:
    """Starts runs again as they were started: the script of a job, or the command line on this machine.

    Args:
        directories: The runs' directories.
        launch: For those that were started on this machine.
    """
    codes = []
    for run_dir in directories:
        if (run_dir / _SCRIPT).exists():
            slurm.require_sbatch()
            slurm.refuse_second_job(run_dir)
            keep_job_id(run_dir, submitted := slurm.submit(run_dir / _SCRIPT))
            print(f"{run_dir}: submitted job {submitted}")
            codes.append(FINISHED)
        elif job := job_id(run_dir):
            raise ConfigError(
                f"{run_dir}: job {job} was not made by dtrain.launch. Submit its script again with the directory: "
                f"RUN_DIR={shlex.quote(str(run_dir))} sbatch slurm/..."
            )
        else:
            arguments = recompose([assignment("run.dir", str(run_dir))])
            print(f"python -m dtrain.launch {shlex.join(arguments)}", file=sys.stderr, flush=True)
            codes.append(launch(arguments))
    return max(codes)


def run_command(arguments: Sequence[str], launch: Launch) -> int:
    """Runs such a command line; returns its exit code.

    Args:
        arguments: Begins with one of :data:`COMMANDS`.
        launch: As for :func:`resume`.

    Raises:
        ConfigError: If a directory is missing, or there is nothing to do in it.
    """
    name, *rest = arguments
    paths = [Path(argument).expanduser().absolute() for argument in rest]
    # runs/* also stands for the report.html of these runs
    directories = [path for path in paths if len(paths) == 1 or not path.is_file()]
    if not directories:
        raise ConfigError(f"{name}: name the directory of a run: python -m dtrain.launch {name} runs/NAME")
    for directory in directories:
        if not directory.is_dir():
            raise ConfigError(f"{name}: {directory} is no directory. Name the directory of a run (run.dir).")
    return COMMANDS[name](directories, launch)


COMMANDS: dict[str, Callable[[Sequence[Path], Launch], int]] = {
    "status": lambda directories, launch: status(directories),
    "tail": lambda directories, launch: tail(directories),
    "stop": lambda directories, launch: stop(directories),
    "resume": resume,
}
