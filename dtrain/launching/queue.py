"""The job that trains a run, and what SLURM says of it."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from dtrain.config.errors import users_to_fix
from dtrain.tracking.atomic import replacing

_JOB = ".job"


@dataclass(frozen=True)
class Job:
    """A job that waits or runs.

    Attributes:
        id: ``123``, or ``123_4`` for an element of an array.
        state: Such as ``PENDING`` or ``RUNNING``.
        reason: Why it waits, such as ``Priority``; its nodes, if it runs.
    """

    id: str
    state: str
    reason: str

    @property
    def runs(self) -> bool:
        """Whether it has nodes."""
        return self.state not in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT")

    def __str__(self) -> str:
        """``job 123 PENDING (Priority)``."""
        return f"job {self.id} {self.state} {self.reason if self.reason.startswith('(') else f'({self.reason})'}"


def job_id(run_dir: Path) -> str | None:
    """The last job that was submitted for a run; None if there was none. Job scripts keep it, too."""
    path = run_dir / _JOB
    with users_to_fix("run.dir"):
        return path.read_text().strip() if path.exists() else None


def keep_job_id(run_dir: Path, job: str) -> None:
    """Writes it down.

    Raises:
        ConfigError: If the disk refuses.
    """
    with users_to_fix("run.dir"), replacing(run_dir / _JOB) as handle:
        handle.write(f"{job}\n".encode())


def active_job(run_dir: Path) -> Job | None:
    """The job that trains a run or is about to; None if there is none, or no SLURM here."""
    job = job_id(run_dir)
    if job is None or shutil.which("squeue") is None:
        return None
    asked = subprocess.run(
        ["squeue", "--noheader", "--format=%T %R", f"--jobs={job}"], capture_output=True, text=True, check=False
    )
    # An error means that SLURM has forgotten the job, which it does minutes after the end.
    state, _, reason = asked.stdout.strip().partition(" ")
    return Job(job, state, reason) if state else None
