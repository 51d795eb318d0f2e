"""Runs as SLURM jobs: written into the run directory, checked, submitted, all points of a sweep or none."""

from __future__ import annotations

import json
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence

from dtrain.config.errors import ConfigError, users_to_fix
from dtrain.config.run import without_secrets
from dtrain.launching.code_version import code_version
from dtrain.launching.job_script import job_script, log_path, script_path
from dtrain.launching.outcome import FINISHED, Outcome
from dtrain.launching.point import Point
from dtrain.tracking.atomic import replacing
from dtrain.tracking.console import print_banner

_RECORD = "launch.json"


def check(points: Sequence[Point]) -> None:
    """Refuses what cannot be submitted.

    Raises:
        ConfigError: If a script cannot be written for these keys, a secret would be in it, there is no SLURM here, or a
            job already trains one of the runs.
    """
    for point in points:
        job_script(point)
        for override in point.run.overrides:
            key, _, value = override.lstrip("+").partition("=")
            if "${" not in value and without_secrets({key: value}) != {key: value}:
                raise ConfigError(
                    f"{key}: its value would be written into the job's script. Put it into an environment variable, "
                    f"which the job gets, and set '{key}=${{oc.env:NAME}}'."
                )
    if points[0].launch.dry_run:
        return
    if shutil.which("sbatch") is None:
        raise ConfigError(
            f"launch=slurm: there is no sbatch on the path of {socket.gethostname()}. Go to a login node of the cluster "
            "(there it may take `module load slurm`), or look at the script with launch.dry_run=true."
        )
    for point in points:
        _refuse_second_job(point)


def describe(point: Point) -> str:
    """The batch script."""
    return job_script(point)


def launch(points: Sequence[Point]) -> list[Outcome]:
    """Submits a job for each point; of a single one, prints what to look at.

    Raises:
        ConfigError: If sbatch refuses one; those submitted before it are cancelled then.
    """
    jobs: list[str] = []
    try:
        for point in points:
            _write_script(point)
            jobs.append(_submit(point))
            _write_record(point, jobs[-1])
    except BaseException:
        if jobs:
            subprocess.run(["scancel", *jobs], check=False)
        raise
    if len(points) == 1:
        print_banner(f"submitted job {jobs[0]}", _what_to_look_at(points[0], jobs[0]))
    return [Outcome(f"job {job}", FINISHED) for job in jobs]


def _write_script(point: Point) -> None:
    with users_to_fix("run.dir"):
        # SLURM does not make the folder of a job's output, and without it the job dies without a word.
        log_path(point).parent.mkdir(parents=True, exist_ok=True)
        with replacing(script_path(point)) as handle:
            handle.write(job_script(point).encode())


def _submit(point: Point) -> str:
    """Returns the job id."""
    command = ["sbatch", "--parsable", str(script_path(point))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(
            f"sbatch refused {script_path(point)}, so nothing is submitted. It says:\n"
            + "".join(f"    {line}\n" for line in done.stderr.splitlines())
            + "  `sinfo -o '%P %l %D %G'` lists partitions with their time limits, nodes and GPUs; on a cluster without "
            "GPUs set launch.gpus_per_node=0."
        )
    return done.stdout.strip().partition(";")[0]  # ";cluster" follows where there are several


def _write_record(point: Point, job: str) -> None:
    """Freezes into the run directory what was submitted: the job, the config, and which code it was composed with."""
    record = {
        "job": job,
        "submitted": time.time(),
        "host": socket.gethostname(),
        "config_dirs": list(point.run.config_dirs),
        "overrides": list(point.run.overrides),
        "config": without_secrets(point.run.config),
        "code": code_version(),
    }
    with users_to_fix("run.dir"), replacing(point.run.dir / _RECORD) as handle:
        handle.write(json.dumps(record, indent=2).encode() + b"\n")


def _refuse_second_job(point: Point) -> None:
    path = point.run.dir / _RECORD
    if not path.exists():
        return
    with users_to_fix("run.dir"):
        job = json.loads(path.read_text())["job"]
    found = subprocess.run(["squeue", "-h", "-o", "%T", "-j", job], capture_output=True, text=True, check=False)
    if state := found.stdout.strip():
        raise ConfigError(
            f"run.dir: job {job} ({state}) trains {point.run.dir} already. Let it, or end it first: scancel {job}"
        )


def _what_to_look_at(point: Point, job: str) -> dict[str, str]:
    directory = point.run.dir
    return {
        "run": point.run.name,
        "directory": str(directory),
        "state": f"squeue -j {job}",
        "log": f"tail -F {shlex.quote(str(log_path(point, job)))}",
        "progress": f"cat {shlex.quote(str(directory / 'status.json'))}",
        "stop": f"touch {shlex.quote(str(directory / 'STOP'))}     it saves and ends; the same command goes on later",
        "cancel": f"scancel {job}     it ends at once; the same command goes on from its last checkpoint",
    }
