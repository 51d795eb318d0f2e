"""Runs as SLURM jobs: written into the run directory, checked, submitted, all points of a sweep or none."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from dtrain.config.errors import ConfigError, users_to_fix
from dtrain.config.run import without_secrets
from dtrain.launching.code_version import code_version
from dtrain.launching.job_script import array_log_name, array_script, job_script, log_path, script_path
from dtrain.launching.outcome import FINISHED, Outcome
from dtrain.launching.point import Point
from dtrain.launching.presets import freeze
from dtrain.launching.queue import active_job, keep_job_id
from dtrain.tracking.atomic import replacing
from dtrain.tracking.console import print_banner

_RECORD = "launch.json"


def check(points: Sequence[Point]) -> None:
    """Refuses what cannot be submitted.

    Raises:
        ConfigError: If a script cannot be written for these keys, a secret would be in it, there is no SLURM here, or a
            job already trains one of the runs.
    """
    if _is_array(points):
        array_script(points, sweep_dir(points))
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
    require_sbatch()
    for point in points:
        refuse_second_job(point.run.dir)


def describe(points: Sequence[Point]) -> str:
    """The batch scripts; of an array the one that is submitted comes first."""
    array = [array_script(points, sweep_dir(points))] if _is_array(points) else []
    return "\n".join([*array, *map(job_script, points)])


def launch(points: Sequence[Point]) -> list[Outcome]:
    """Submits a job for each point, or one array; of a single point, prints what to look at.

    Raises:
        ConfigError: If sbatch refuses one; those submitted before it are cancelled then.
    """
    for point in points:
        _write_script(point)
    jobs = _submit_array(points) if _is_array(points) else _submit_each(points)
    if len(points) == 1:
        print_banner(f"submitted job {jobs[0]}", _what_to_look_at(points[0], jobs[0]))
    return [Outcome(f"job {job}", FINISHED) for job in jobs]


def submit(script: Path) -> str:
    """Hands a script to sbatch; returns the job id.

    Raises:
        ConfigError: If sbatch refuses it; says why in SLURM's words.
    """
    done = subprocess.run(["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ConfigError(
            f"sbatch refused {script}, so nothing is submitted. It says:\n"
            + "".join(f"    {line}\n" for line in done.stderr.splitlines())
            + "  `sinfo -o '%P %l %D %G'` lists partitions with their time limits, nodes and GPUs; on a cluster without "
            "GPUs set launch.gpus_per_node=0."
        )
    return done.stdout.strip().partition(";")[0]  # ";cluster" follows where there are several


def require_sbatch() -> None:
    """Refuses a machine without SLURM.

    Raises:
        ConfigError: If there is no sbatch on the path.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            f"launch=slurm: there is no sbatch on the path of {socket.gethostname()}. Go to a login node of the cluster "
            "(there it may take `module load slurm`), or look at the script with launch.dry_run=true."
        )


def _submit_each(points: Sequence[Point]) -> list[str]:
    jobs: list[str] = []
    try:
        for point in points:
            jobs.append(submit(script_path(point)))
            _write_record(point, jobs[-1])
    except BaseException:
        if jobs:
            subprocess.run(["scancel", *jobs], check=False)
        raise
    return jobs


def _submit_array(points: Sequence[Point]) -> list[str]:
    folder = sweep_dir(points)
    with users_to_fix("run.dir"):
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / "array.sbatch") as handle:
            handle.write(array_script(points, folder).encode())
    array = submit(folder / "array.sbatch")
    for element, point in enumerate(points):
        job = f"{array}_{element}"
        _write_record(point, job)
        # All elements of an array write into one folder; each run shows its own where its logs are.
        with users_to_fix("run.dir"):
            log_path(point, job).symlink_to(folder / array_log_name(array, element))
    return [f"{array}_{element}" for element in range(len(points))]


def sweep_dir(points: Sequence[Point]) -> Path:
    """Where the script and the output of a job array go: beside its runs; the same sweep has the same place."""
    directories = [str(point.run.dir) for point in points]
    digest = hashlib.sha256("\0".join(directories).encode()).hexdigest()[:8]
    return points[0].run.dir.parent / f"sweep-{digest}"


def _is_array(points: Sequence[Point]) -> bool:
    return len(points) > 1 and points[0].launch.max_running is not None


def _write_script(point: Point) -> None:
    with users_to_fix("run.dir"):
        # SLURM does not make the folder of a job's output, and without it the job dies without a word.
        log_path(point).parent.mkdir(parents=True, exist_ok=True)
        with replacing(script_path(point)) as handle:
            handle.write(job_script(point).encode())
    freeze(point)


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
    keep_job_id(point.run.dir, job)
    if not (point.run.dir / "config.yaml").exists():  # else the run notes what has changed when it goes on
        with users_to_fix("run.dir"):
            point.run.save()


def refuse_second_job(run_dir: Path) -> None:
    """Refuses a run that has a job already.

    Raises:
        ConfigError: Names the job.
    """
    if job := active_job(run_dir):
        raise ConfigError(f"run.dir: {job} trains {run_dir} already. Let it, or end it first: scancel {job.id}")


def _what_to_look_at(point: Point, job: str) -> dict[str, str]:
    directory = shlex.quote(str(point.run.dir))
    return {
        "run": point.run.name,
        "directory": str(point.run.dir),
        "status": f"python -m dtrain.launch status {directory}",
        "log": f"python -m dtrain.launch tail {directory}",
        "stop": f"python -m dtrain.launch stop {directory}     it saves and ends",
        "cancel": f"scancel {job}     it ends at once",
        "go on": f"python -m dtrain.launch resume {directory}     from where it was",
    }
