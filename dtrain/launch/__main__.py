"""``dtrain launch [--multirun] launch=local|slurm experiment=NAME [key=value ...]``: starts runs.

It takes the config of ``dtrain train``. ``launch=local`` returns 0 when the run is finished, 75 when it was stopped and can be
resumed, a different code on failure; ``launch=slurm`` returns 0 when the job is submitted. ``launch.dry_run=true`` prints the
commands or scripts and starts nothing.

* A *sweep*, ``--multirun optimizer.lr=1e-3,3e-3``, has a run for each combination of values: on this machine
  ``launch.max_running`` at a time, on SLURM as one job each, or as a job array.
* A *search*, ``launch.search.trials=20 optimizer.lr=interval(1e-4,1e-1)``, has a run for each set of values that Optuna
  suggests.

A run that was finished before is not started again. ``dtrain launch status|tail|stop|resume DIR`` is for runs that
were started.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from dtrain import command_line
from dtrain.config import compose
from dtrain.distributed.services import join_service
from dtrain.errors import ConfigError, nearest, printable
from dtrain.launch import local, slurm
from dtrain.launch.commands import COMMANDS, run_command
from dtrain.launch.job import (
    ALREADY_FINISHED,
    FAILED,
    FINISHED,
    Job,
    JobResult,
    assignment,
    exit_code,
    named_job,
    print_results,
    with_unique_dirs,
)
from dtrain.launch.search import Launcher, is_search, search
from dtrain.runs.recompose import recompose_if_run

LAUNCHERS: dict[str, Launcher] = {"local": local, "slurm": slurm}
_SWEEP_DIR = "hydra.sweep.dir"
USAGE = """Usage
  dtrain launch [--multirun] launch=local|slurm experiment=NAME [KEY=VALUE ...]

  --multirun                        one run for each combination of values: optimizer.lr=1e-3,3e-3 run.seed=1,2
  launch.max_running=N              run at most N at a time; local: each has its share of the cores and GPUs
  launch.dry_run=true               print the commands or scripts, and exit
  launch.processes_per_node=N       local: default one for each GPU; slurm: default 1
  KEY=VALUE                         any key of the config; `dtrain train --help` lists them

A search with Optuna (pip install 'dtrain[optuna]'); the same command continues it
  launch.search.trials=N            number of runs
  'KEY=tag(log,interval(1e-4,1e-1))' 'KEY=int(interval(1,8))' KEY=a,b       what to search; see docs/sweeps.md
  launch.search.metric=eval/NAME    the objective, default eval/loss; launch.search.best=true: its best value, not its last
  launch.search.direction=D         minimize or maximize; default: decided by the metric's name
  launch.search.pruner=median       stop runs that are worse than the others; also halving
  launch.search.seed=N              seed of the sampler, launch.search.sampler=tpe or random

Commands for runs that were started
  dtrain launch status DIR...     state, step and last metrics, as a table; also of mirrors: s3://BUCKET/runs
  dtrain launch tail DIR          follow the log
  dtrain launch stop DIR...       save and stop the runs
  dtrain launch resume DIR...     resume the run as it was started

With launch=slurm
  launch.nodes=N                    number of nodes; launch.min_nodes=M allows fewer if not all are available
  launch.time=HH:MM:SS              time limit of one allocation; the job asks for new ones until the run is finished
  launch.partition=P                partition; also launch.account=A
  launch.gpus_per_node=N            default one for each process; 0 on a cluster without GPUs
  launch.cpus_per_process=N         default one, plus one for each of data.num_workers (auto: four)
  launch.stop_seconds=S             save and stop S seconds before the time limit: more than a step and a save take
  launch.max_running=N              with --multirun: one job array; without it, a job for each run
  launch.requeue=false              do not ask for new allocations
  'launch.extra=["--qos=high"]'     additional options of sbatch
  'launch.srun=["--container-image=IMAGE"]' launch.python=/usr/bin/python             a container, with Pyxis
  'launch.container=[apptainer,exec,--nv,IMAGE]' launch.python=/usr/bin/python        a container, with Apptainer

Exit codes: 0 finished (slurm: submitted), 75 stopped and resumable, other codes on failure
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line, ``sys.argv`` by default; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(USAGE)
        return FINISHED
    try:
        # Overrides of Hydra contain "=" and commands do not, so a command line is never ambiguous.
        if arguments and arguments[0] in COMMANDS:
            return run_command(arguments, _start)
        if arguments and arguments[0].isidentifier():
            raise ConfigError(f"there is no command {arguments[0]!r}. {nearest(arguments[0], COMMANDS)}")
        return _start(arguments)
    except ConfigError as error:
        text = printable(str(error), keep="\n\t")
        sys.stderr.write(f"dtrain: error: {text}\n")
        return FAILED


def _start(arguments: Sequence[str]) -> int:
    join_service()
    if is_search(arguments):
        return search(arguments, launcher_of)
    jobs: list[Job] = []

    def add(composed: compose.Composed) -> None:
        with named_job(composed, arguments):
            jobs.append(Job.from_composed(composed))

    with TemporaryDirectory() as folder:
        command_line.run(add, arguments, lambda typed: _with_sweep_dir(recompose_if_run(typed), folder))
    # Without jobs Hydra only printed the config (--cfg, --info).
    return launch(with_unique_dirs(jobs)) if jobs else FINISHED


def launch(jobs: Sequence[Job]) -> int:
    """Starts the jobs of one command line, or prints their commands or scripts; returns the exit code.

    Jobs that were finished by an earlier command are not started again.

    Raises:
        ConfigError: If one of the jobs cannot start; then no job is started.
    """
    launcher = launcher_of(jobs)
    if jobs[0].launch.search.trials is not None:
        raise ConfigError(
            f"launch.search.trials: got {jobs[0].launch.search.trials} in a preset. Write it on the command line, with the "
            "keys to search: launch.search.trials=20 'optimizer.lr=interval(1e-4,1e-1)'."
        )
    finished = [job for job in jobs if job.is_finished]
    waiting = [job for job in jobs if not job.is_finished]
    for job in finished:
        sys.stderr.write(f"dtrain: {job.name}: {ALREADY_FINISHED}: {job.spec.dir}\n")
    if waiting:
        launcher.check(waiting)
    if jobs[0].launch.dry_run:
        print(launcher.describe(waiting) if waiting else "", end="")
        return FINISHED
    for job in finished:
        local.settle_outputs(job.spec.dir)
    ended = dict(zip((job.spec.dir for job in waiting), launcher.launch(waiting) if waiting else [], strict=True))
    results = [ended.get(job.spec.dir, JobResult(ALREADY_FINISHED, FINISHED)) for job in jobs]
    if len(jobs) > 1:
        print_results(jobs, results)
        # A run that was not started has no directory, and status would refuse it.
        directories = shlex.join(str(job.spec.dir) for job in jobs if job.spec.dir.is_dir())
        if directories:
            sys.stderr.write(f"to compare these runs: dtrain launch status {directories}\n")
    return exit_code(results)


def launcher_of(jobs: Sequence[Job]) -> Launcher:
    """The launcher of the jobs of one command line.

    Raises:
        ConfigError: If ``launch.name`` is unknown, or differs between the jobs.
    """
    names = {job.launch.name for job in jobs}
    if len(names) > 1 or not names <= LAUNCHERS.keys():
        raise ConfigError(f"launch.name: got {', '.join(sorted(names))}, want one of {', '.join(LAUNCHERS)}.")
    return LAUNCHERS[names.pop()]


def _with_sweep_dir(arguments: list[str], folder: str) -> list[str]:
    """Makes Hydra write its own file of a sweep to a temporary folder instead of the runs' folder."""
    is_sweep = not {"--multirun", "-m"}.isdisjoint(arguments)
    return [*arguments, assignment(_SWEEP_DIR, folder)] if is_sweep else arguments


if __name__ == "__main__":
    sys.exit(main())
