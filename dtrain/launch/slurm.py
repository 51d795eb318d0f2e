"""Runs as SLURM jobs: batch scripts are checked, written into the run directory and submitted.

All jobs of a sweep are submitted, or none. The run directory holds ``job.sbatch``, the id of the newest job and the path of
the run (``.job``), and ``launch.json``: the job, the composed config and the version of the code.

A submission holds a lock in each run directory (``.submit.lock``) from the check that the run has no job until its job is
recorded. sbatch inherits the lock, so it outlives a launcher that is killed; the next submission finds the job in the queue.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import dtrain
from dtrain.console import print_banner
from dtrain.errors import ConfigError, as_config_error
from dtrain.files import open_regular, open_to_append, replace_file, try_lock
from dtrain.launch.job import FINISHED, STOPPED, Job, JobResult, StatusJudge, StopRequest
from dtrain.launch.job_script import (
    PRESETS,
    SCRIPT,
    array_log_name,
    array_script,
    freeze_presets,
    job_script,
    log_path,
    script_path,
)
from dtrain.launch.pool import Screen
from dtrain.runs.run_dir import git_output, save_run
from dtrain.runs.run_spec import config_without_secrets
from dtrain.runs.trust import content_with_folders, is_own, mark_as_own

SECONDS_BETWEEN_SQUEUE = 10.0
# Times in a row that squeue must not show a job before it counts as ended: other nodes see its last files a little later.
_MISSED = 2
_RECORD = "launch.json"
_MARKS = "submitted"
_JOB_ID, _LOCK, _ARRAY = ".job", ".submit.lock", "array.sbatch"
_MOST_JOB_ID = 10_000  # bytes; a path has at most 4096
_SQUEUE_SECONDS = 60.0


def check(jobs: Sequence[Job]) -> None:
    """Refuses jobs that cannot be submitted.

    Raises:
        ConfigError: If keys of ``launch`` contradict each other, a script would hold a secret, this machine has no SLURM,
            or a run already has a job.
    """
    if _is_array(jobs):
        array_script(jobs, sweep_dir(jobs))
    for job in jobs:
        job_script(job)
        for override in job.spec.overrides:
            key, _, value = override.lstrip("+").partition("=")
            if "${" not in value and config_without_secrets({key: value}) != {key: value}:
                raise ConfigError(
                    f"{key}: its value would be written into the batch script. Put it into an environment variable, "
                    f"which the job inherits, and set '{key}=${{oc.env:NAME}}'."
                )
    if jobs[0].launch.dry_run:
        return
    require_sbatch()
    for job in jobs:
        refuse_second_job(job.spec.dir)


def describe(jobs: Sequence[Job]) -> str:
    """The batch scripts; the script of a job array comes first."""
    array = [array_script(jobs, sweep_dir(jobs))] if _is_array(jobs) else []
    return "\n".join([*array, *map(job_script, jobs)])


def launch(jobs: Sequence[Job]) -> list[JobResult]:
    """Submits each job, or all jobs as one array. For a single job, prints the commands to watch and stop it.

    Raises:
        ConfigError: If sbatch refuses a job; the jobs submitted before are cancelled.
    """
    ids = _submit(jobs)
    if len(jobs) == 1:
        print_banner(f"submitted job {ids[0]}", _next_commands(jobs[0], ids[0]))
    return [JobResult(f"job {job_id}", FINISHED) for job_id in ids]


def submit(script: Path, locks: Sequence[int]) -> str:
    """Submits a script; returns the job id.

    Args:
        script: The batch script.
        locks: Descriptors that sbatch inherits, from ``submission``.

    Raises:
        ConfigError: If sbatch refuses it; the message holds the output of sbatch.
    """
    done = subprocess.run(
        ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False, pass_fds=locks
    )
    if done.returncode != 0:
        raise ConfigError(
            f"sbatch refused {script}, so no job was submitted:\n"
            + "".join(f"    {line}\n" for line in done.stderr.splitlines())
            + "  `sinfo -o '%P %l %D %G'` lists partitions with their time limits, nodes and GPUs; on a cluster without "
            "GPUs set launch.gpus_per_node=0."
        )
    return done.stdout.strip().partition(";")[0]  # with several clusters the output is ID;CLUSTER


def require_sbatch() -> None:
    """Refuses a machine without SLURM.

    Raises:
        ConfigError: If ``sbatch`` is not on the path.
    """
    if shutil.which("sbatch") is None:
        raise ConfigError(
            f"launch=slurm: sbatch is not on the path of {socket.gethostname()}. Use a login node of the cluster (it may "
            "need `module load slurm`), or print the script with launch.dry_run=true."
        )


def refuse_second_job(run_dir: Path) -> None:
    """Refuses a run that already has a job.

    Raises:
        HasJob: If a job trains the run or waits in the queue; names the job.
        NoAnswer: If SLURM does not answer.
    """
    if job := queued_job(run_dir):
        raise HasJob(f"run.dir: {run_dir} already has {job}. Wait until it ends, or cancel it: scancel {job.id}")


@contextmanager
def submission(run_dirs: Sequence[Path], array: Path | None = None) -> Iterator[list[int]]:
    """Locks runs against other submissions, until their jobs are recorded. Then checks that they have no job.

    Args:
        run_dirs: The run directories.
        array: The batch script of the array that has the runs as elements.

    Yields:
        The descriptors of the locks, for ``submit``.

    Raises:
        ConfigError: If another command submits one of the runs, or one of them has a job.
    """
    with ExitStack() as stack:
        locks = []
        for run_dir in run_dirs:
            with as_config_error("run.dir"):
                run_dir.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(open_to_append(run_dir / _LOCK))
                is_locked = try_lock(file)
            if not is_locked:
                raise ConfigError(
                    f"run.dir: another command is submitting {run_dir} now. Its job is shown by: "
                    f"dtrain launch status {shlex.quote(str(run_dir))}"
                )
            locks.append(file.fileno())
        _record_lost_jobs(run_dirs, array)
        for run_dir in run_dirs:
            refuse_second_job(run_dir)
        yield locks


def _record_lost_jobs(run_dirs: Sequence[Path], array: Path | None) -> None:
    """Records the waiting jobs whose launcher was killed after it had called sbatch. A job that runs has recorded itself."""
    # The last field of a line is the script as it was given to sbatch.
    lines = _squeue(run_dirs[0], "--format=%i %o", "--me").splitlines() if shutil.which("squeue") else []
    jobs = {script: job_id for job_id, _, script in (line.partition(" ") for line in lines)}
    if array is not None and (job_id := jobs.get(str(array))):
        raise HasJob(f"run.dir: the sweep already has job {job_id}. Wait until it ends, or cancel it: scancel {job_id}")
    for run_dir in run_dirs:
        if (job_id := jobs.get(str(run_dir / SCRIPT))) and queued_job(run_dir) is None:
            write_job_id(run_dir, job_id)


def sweep_dir(jobs: Sequence[Job]) -> Path:
    """Folder for the script and the output of a job array, next to its runs. The same sweep has the same folder."""
    directories = [str(job.spec.dir) for job in jobs]
    digest = hashlib.sha256("\0".join(directories).encode()).hexdigest()[:8]
    return jobs[0].spec.dir.parent / f"sweep-{digest}"


def _is_array(jobs: Sequence[Job]) -> bool:
    return len(jobs) > 1 and jobs[0].launch.max_running is not None


def _write_script(job: Job) -> None:
    with as_config_error("run.dir"):
        # SLURM does not create the folder of a job's output; without it the job fails without any message.
        log_path(job).parent.mkdir(parents=True, exist_ok=True)
        script = job_script(job).encode()
        with replace_file(script_path(job)) as handle:
            handle.write(script)
    freeze_presets(job)
    mark_submitted(job.spec.dir, script)


def mark_submitted(run_dir: Path, script: bytes) -> None:
    """Remembers that this user wrote a batch script and the presets that it composes."""
    with as_config_error("run.dir"):
        mark_as_own(content_with_folders(script, [run_dir / PRESETS]), _MARKS)


def is_submitted(run_dir: Path) -> bool:
    """Whether ``mark_submitted`` was called for the batch script and the presets in a run directory."""
    with as_config_error("run.dir"):
        return is_own(content_with_folders((run_dir / SCRIPT).read_bytes(), [run_dir / PRESETS]), _MARKS)


def _submit(jobs: Sequence[Job]) -> list[str]:
    array = sweep_dir(jobs) / _ARRAY if _is_array(jobs) else None
    with submission([job.spec.dir for job in jobs], array) as locks:
        for job in jobs:
            _write_script(job)
        return _submit_each(jobs, locks) if array is None else _submit_array(jobs, array, locks)


def _submit_each(jobs: Sequence[Job], locks: Sequence[int]) -> list[str]:
    ids: list[str] = []
    try:
        for job in jobs:
            ids.append(submit(script_path(job), locks))
            _write_record(job, ids[-1])
    except BaseException:
        if ids:
            subprocess.run(["scancel", *ids], check=False)
        raise
    return ids


def _submit_array(jobs: Sequence[Job], script: Path, locks: Sequence[int]) -> list[str]:
    folder = script.parent
    with as_config_error("run.dir"):
        folder.mkdir(parents=True, exist_ok=True)
        with replace_file(script) as handle:
            handle.write(array_script(jobs, folder).encode())
    array_id = submit(script, locks)
    ids = [f"{array_id}_{element}" for element in range(len(jobs))]
    for element, (job, job_id) in enumerate(zip(jobs, ids, strict=True)):
        _write_record(job, job_id)
        # All elements of an array write into one folder; a link in each run directory points to its own output.
        with as_config_error("run.dir"):
            log_path(job, job_id).symlink_to(folder / array_log_name(array_id, element))
    return ids


def _write_record(job: Job, job_id: str) -> None:
    record = {
        "job": job_id,
        "submitted": time.time(),
        "host": socket.gethostname(),
        "config_dirs": list(job.spec.config_dirs),
        "overrides": list(job.spec.overrides),
        "config": config_without_secrets(job.spec.config),
        "code": code_version(),
    }
    with as_config_error("run.dir"), replace_file(job.spec.dir / _RECORD) as handle:
        handle.write(json.dumps(record, indent=2).encode() + b"\n")
    write_job_id(job.spec.dir, job_id)
    if not (job.spec.dir / "config.yaml").exists():  # else dtrain train records the changes when the run resumes
        with as_config_error("run.dir"):
            save_run(job.spec)


def _next_commands(job: Job, job_id: str) -> dict[str, str]:
    directory = shlex.quote(str(job.spec.dir))
    return {
        "run": job.spec.name,
        "directory": str(job.spec.dir),
        "status": f"dtrain launch status {directory}",
        "log": f"dtrain launch tail {directory}",
        "stop": f"dtrain launch stop {directory}     saves, then ends",
        "cancel": f"scancel {job_id}     ends immediately",
        "resume": f"dtrain launch resume {directory}",
    }


# -- one job as a start in a pool


def starter(running: int, screen: Screen | None) -> Callable[[Job, int], SlurmStart]:
    """The function with which a pool submits jobs, or takes over those that an earlier command has submitted."""
    return lambda job, slot: SlurmStart(job)


class SlurmStart:
    """A run in the queue, over all its allocations.

    Args:
        job: The job; it is submitted if the run has none that waits or runs.

    Raises:
        ConfigError: If sbatch refuses the job.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self._judge = StatusJudge(job.spec.dir)
        self._asked = time.monotonic()
        self._missed = 0
        self._stop = StopRequest(job.spec.dir)
        self._stop_requested = self._cancelled = False
        with suppress(HasJob):
            check([job])
            _submit([job])

    def result(self) -> JobResult | None:
        """The result; None while the run has a job. squeue is called every few seconds."""
        if time.monotonic() - self._asked < SECONDS_BETWEEN_SQUEUE:
            return None
        self._asked = time.monotonic()
        try:
            job = queued_job(self.job.spec.dir)
        except NoAnswer:  # then the job may still train the run
            return None
        if job is not None:
            self._missed = 0
            return None
        self._missed += 1
        if self._missed < _MISSED:
            return None
        self._stop.withdraw()
        return JobResult("stopped", STOPPED) if self._cancelled else self._judge()

    def stop(self) -> None:
        """Cancels a waiting job, and asks a running one to stop."""
        if not self._stop_requested:
            self._stop_requested = True
            job = active_job(self.job.spec.dir)
            if job is not None and not job.has_nodes:
                self._cancelled = True
                subprocess.run(["scancel", job.id], check=False)
        if not self._cancelled:
            self._stop.write()

    def kill(self) -> None:
        """Cancels the job."""
        self._cancelled = True
        cancelled = None
        # Repeated if the job has ended meanwhile and a new one continues the run.
        while (job_id := read_job_id(self.job.spec.dir)) not in (None, cancelled):
            cancelled = job_id
            subprocess.run(["scancel", str(job_id)], check=False)


# -- the job of a run


@dataclass(frozen=True)
class SlurmJob:
    """A job in the queue of SLURM, waiting or running.

    Attributes:
        id: Such as ``123``, or ``123_4`` for an element of an array.
        state: Such as ``PENDING`` or ``RUNNING``.
        reason: Why it waits, such as ``Priority``; the names of its nodes if it runs.
    """

    id: str
    state: str
    reason: str

    @property
    def has_nodes(self) -> bool:
        """Whether the job has an allocation."""
        return self.state not in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")

    def __str__(self) -> str:
        """Such as ``job 123 PENDING (Priority)``."""
        return f"job {self.id} {self.state} {self.reason if self.reason.startswith('(') else f'({self.reason})'}"


class NoAnswer(ConfigError):
    """SLURM did not answer, so it is not known whether a run has a job."""


class HasJob(ConfigError):
    """A run has a job that waits or runs."""


def queued_job(run_dir: Path) -> SlurmJob | None:
    """The job of a run that waits or runs; None without one, or if this machine has no SLURM.

    Raises:
        NoAnswer: If squeue fails.
        ConfigError: If ``.job`` is damaged.
    """
    job_id = read_job_id(run_dir)
    if job_id is None or shutil.which("squeue") is None:
        return None
    # A job array with the elements of one run has several lines.
    line = _squeue(run_dir, "--format=%T %R", f"--jobs={job_id}", job_id).strip().partition("\n")[0]
    state, _, reason = line.partition(" ")
    return SlurmJob(job_id, state, reason) if state else None


def _squeue(run_dir: Path, format: str, which: str, job_id: str = "") -> str:
    """The output of squeue; empty for a job that SLURM no longer lists."""
    try:
        done = subprocess.run(
            ["squeue", "--noheader", format, which],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_SQUEUE_SECONDS,
        )
        # squeue fails for a job that ended some minutes ago, because SLURM has deleted it from its queue.
        if done.returncode == 0 or "Invalid job id" in done.stderr:
            return done.stdout
        reason = done.stderr.strip()
    except subprocess.TimeoutExpired:
        reason = f"it did not answer for {_SQUEUE_SECONDS:.0f} s"
    raise NoAnswer(
        f"run.dir: {run_dir} may still have {f'job {job_id}' if job_id else 'a job'}, but squeue failed: {reason}. Run the "
        "command again when SLURM answers."
    )


def active_job(run_dir: Path) -> SlurmJob | None:
    """As ``queued_job``, for a display: None also if SLURM does not answer, or ``.job`` is damaged."""
    return active_jobs([run_dir])[0]


def active_jobs(run_dirs: Sequence[Path]) -> list[SlurmJob | None]:
    """``active_job`` of several runs. If SLURM does not answer once, it is not asked again."""
    jobs: list[SlurmJob | None] = [None] * len(run_dirs)
    for number, run_dir in enumerate(run_dirs):
        try:
            jobs[number] = queued_job(run_dir)
        except NoAnswer:
            break
        except ConfigError:
            continue
    return jobs


def read_job_id(run_dir: Path) -> str | None:
    """Id of the newest job of a run, which the launcher or a batch script wrote.

    None without one. Also in a copy of a run directory: its file names the job of the original.

    Raises:
        ConfigError: If the file is damaged.
    """
    path = run_dir / _JOB_ID
    try:
        with open_regular(path) as file:
            job_id, _, owner = file.read(_MOST_JOB_ID).decode().strip().partition("\n")
        if job_id and not re.fullmatch(r"\d[\d_+]*", job_id):
            raise ValueError(f"got {job_id[:40]!r}, want the id of a job")
        if owner and os.path.isdir(owner) and not os.path.samefile(owner, run_dir):
            return None
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"run.dir: {path} cannot be read ({error}), so it is not known whether the run has a job. If `squeue --me` shows "
            "none, delete the file."
        ) from error
    return job_id or None


def write_job_id(run_dir: Path, job_id: str) -> None:
    """Stores the id of the newest job of a run, and which directory is trained by it.

    Raises:
        ConfigError: If it cannot be written.
    """
    with as_config_error("run.dir"), replace_file(run_dir / _JOB_ID) as handle:
        handle.write(f"{job_id}\n{os.path.realpath(run_dir)}\n".encode())


# -- the version of the code


def code_version() -> dict[str, Any]:
    """Versions of dtrain, torch and Python, and the git commits of dtrain and of the working directory.

    Returns:
        ``{"dtrain", "torch", "python", "git": {checkout: {"commit", "modified"}}}``; ``modified`` is True if the checkout
        has uncommitted changes.
    """
    checkouts = {
        git_output(folder, "rev-parse", "--show-toplevel") for folder in (Path(dtrain.__file__).parent, Path.cwd())
    }
    return {
        "dtrain": dtrain.__version__,
        "torch": torch.__version__,
        "python": sys.executable,
        "git": {
            checkout: {
                "commit": git_output(Path(checkout), "rev-parse", "HEAD"),
                "modified": bool(git_output(Path(checkout), "status", "--porcelain")),
            }
            for checkout in sorted(filter(None, checkouts))
        },
    }
