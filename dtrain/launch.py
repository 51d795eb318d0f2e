"""``python -m dtrain.launch [--multirun] launch=local|slurm experiment=NAME [key=value ...]``: starts a run or a sweep.

The config is that of ``dtrain.train``; ``launch.dry_run=true`` shows what would be started. ``launch=local`` returns 0
when the run is finished, 75 when it was stopped and can go on, another code when it failed; ``launch=slurm`` returns 0
when the job is submitted. With ``--multirun`` (``optimizer.lr=1e-3,3e-3``) each point is a run with a directory of its
own: one after the other here, a job or an element of a job array each on SLURM.

``python -m dtrain.launch status|tail|stop|resume DIR`` is for runs that were started.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from tempfile import TemporaryDirectory

from dtrain.config import app
from dtrain.config.errors import ConfigError
from dtrain.config.presets import nearest
from dtrain.launching import local, slurm
from dtrain.launching.commands import COMMANDS, run_command
from dtrain.launching.outcome import FAILED, FINISHED, overall, print_table
from dtrain.launching.point import Point, assignment, told_apart

LAUNCHERS = {"local": local, "slurm": slurm}
_SWEEP_DIR = "hydra.sweep.dir"
USAGE = """Usage
  python -m dtrain.launch [--multirun] launch=local|slurm experiment=NAME [KEY=VALUE ...]

  --multirun                        a run for each combination of values: optimizer.lr=1e-3,3e-3 run.seed=1,2
  launch.dry_run=true               show what would be started or submitted, and do nothing
  launch.processes_per_node=N       local: default one for each GPU; slurm: default 1
  KEY=VALUE                         any key of the config; `python -m dtrain.train --help` lists them

What to do with runs, by their directories
  python -m dtrain.launch status DIR...     state, step and last metrics, side by side
  python -m dtrain.launch tail DIR          follow the log
  python -m dtrain.launch stop DIR...       save and stop
  python -m dtrain.launch resume DIR...     go on as it was started

With launch=slurm
  launch.nodes=N                    nodes; launch.min_nodes=M starts with fewer where others are missing
  launch.time=HH:MM:SS              of one allocation; the job asks for new ones until the run is finished
  launch.partition=P                where to run; also launch.account=A
  launch.gpus_per_node=N            default one for each process; 0 on a cluster without GPUs
  launch.cpus_per_process=N         default one, and one for each of data.num_workers
  launch.stop_seconds=S             so long before the time is up the run saves and stops: more than a checkpoint takes
  launch.max_running=N              with --multirun: one job array, N of its runs at once
  launch.requeue=false              one allocation and no more
  'launch.extra=["--qos=high"]'     further options of sbatch
  'launch.srun=["--container-image=IMAGE"]' launch.python=/usr/bin/python             a container, with Pyxis
  'launch.container=[apptainer,exec,--nv,IMAGE]' launch.python=/usr/bin/python        a container, with Apptainer

Exit codes: 0 finished (slurm: submitted), 75 stopped and can go on, else failed
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if {"--help", "-h"} & set(arguments):
        print(USAGE)
        return FINISHED
    try:
        # An override of Hydra's has a "=" in it, so that no command line means both.
        if arguments and arguments[0] in COMMANDS:
            return run_command(arguments, _start)
        if arguments and arguments[0].isidentifier():
            raise ConfigError(f"there is no command {arguments[0]!r}. {nearest(arguments[0], COMMANDS)}")
        return _start(arguments)
    except ConfigError as error:
        sys.stderr.write(f"dtrain: error: {error}\n")
        return FAILED


def _start(arguments: Sequence[str]) -> int:
    points: list[Point] = []
    with TemporaryDirectory() as aside:
        app.run(lambda composed: points.append(Point.of(composed)), arguments, lambda given: _for_hydra(given, aside))
    # None with --cfg and --info.
    return launch(told_apart(points)) if points else FINISHED


def launch(points: Sequence[Point]) -> int:
    """Starts the points of one command line, or shows what would be started; returns the exit code.

    Raises:
        ConfigError: If one of them cannot be started; none of them is then.
    """
    names = {point.launch.name for point in points}
    if len(names) > 1 or not names <= LAUNCHERS.keys():
        raise ConfigError(f"launch.name: got {', '.join(sorted(names))}, want one of {', '.join(LAUNCHERS)}.")
    launcher = LAUNCHERS[names.pop()]
    launcher.check(points)
    if points[0].launch.dry_run:
        print(launcher.describe(points), end="")
        return FINISHED
    outcomes = launcher.launch(points)
    if len(points) > 1:
        print_table(points, outcomes)
        directories = shlex.join(str(point.run.dir) for point in points)
        sys.stderr.write(f"side by side: python -m dtrain.launch status {directories}\n")
    return overall(outcomes)


def _for_hydra(arguments: list[str], aside: str) -> list[str]:
    """Of a sweep, Hydra keeps a file of its own: not among the runs."""
    is_sweep = not {"--multirun", "-m"}.isdisjoint(arguments)
    return [*arguments, assignment(_SWEEP_DIR, aside)] if is_sweep else arguments


if __name__ == "__main__":
    sys.exit(main())
