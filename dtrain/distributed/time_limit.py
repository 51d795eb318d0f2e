"""When a start has to be over: ``run.max_hours``, and the end of the SLURM allocation.

A limit is noticed early enough to end in time: as long before it as the longest time between two looks (a step, with a
save if there was one; in an evaluation, a micro-batch), and the time that the final checkpoint takes to write. Both are
measured.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dtrain.config.errors import ConfigError

# Of an allocation, beside what is measured: closing the tracker and ending the processes; a tenth of a short one.
_RESERVE = 60.0
_ANSWER_WITHIN = 20.0
_TIME_LEFT = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)$")  # squeue: [[days-]hours:]minutes:seconds
logger = logging.getLogger("dtrain")


@dataclass(frozen=True)
class Limit:
    """A moment, in seconds of ``time.monotonic()``, and what sets it."""

    name: str
    at: float


class TimeLimit:
    """Says when it is time to stop, to one rank that asks in every step, and in every micro-batch of an evaluation.

    Args:
        limits: The moments that count.

    Attributes:
        save_seconds: Gives how long the final checkpoint takes to write, as far as it is known.
    """

    def __init__(self, *limits: Limit) -> None:
        self._limits = limits
        self._looked: float | None = None
        self._longest = 0.0
        self.save_seconds: Callable[[], float] = lambda: 0.0

    @classmethod
    def of(cls, max_hours: float | None, rank: int = 0, environment: Mapping[str, str] = os.environ) -> TimeLimit:
        """The limits of this start. Rank 0 alone looks at the clock; the others have none.

        Args:
            max_hours: ``run.max_hours``.
            rank: This process.
            environment: In which SLURM describes the job.

        Raises:
            ConfigError: If ``max_hours`` is not above 0.
        """
        if max_hours is not None and not max_hours > 0:
            raise ConfigError(f"run.max_hours: got {max_hours}, want a number above 0, or null for no limit.")
        now, limits = time.monotonic(), []
        if rank != 0:
            return cls()
        if max_hours is not None:
            limits.append(Limit(f"run.max_hours={max_hours:g}", now + 3600 * max_hours))
        left = slurm_seconds_left(environment)
        if left is not None:
            limits.append(Limit("end of the SLURM allocation", now + left - min(_RESERVE, 0.1 * left)))
        return cls(*limits)

    def reached(self, now: float) -> str | None:
        """The limit that is so near that the run must stop now; None if there is time for another step.

        Args:
            now: ``time.monotonic()``.
        """
        if self._looked is not None:
            self._longest = max(self._longest, now - self._looked)
        self._looked = now
        needed = self._longest + self.save_seconds()
        return next((limit.name for limit in self._limits if now + needed >= limit.at), None)

    def __str__(self) -> str:
        """For a banner; ``""`` without limits."""
        now = time.monotonic()
        return ", ".join(f"{limit.name} in {(limit.at - now) / 3600:.2f} h" for limit in self._limits)


def slurm_seconds_left(environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds until SLURM ends this job; None outside of a job, without a limit, or if SLURM does not say.

    Newer versions put the end into the environment; others are asked once, with ``squeue``.
    """
    if end := environment.get("SLURM_JOB_END_TIME"):
        return float(end) - time.time()
    if not (job := environment.get("SLURM_JOB_ID")):
        return None
    if "SLURM_ARRAY_TASK_ID" in environment:  # the id of one element also stands for the whole array
        job = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    try:
        asked = subprocess.run(
            ["squeue", "--noheader", "--jobs", job, "--format=%L"],
            capture_output=True,
            text=True,
            timeout=_ANSWER_WITHIN,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the end of SLURM job %s is not known: %s", job, error)
        return None
    match = _TIME_LEFT.match(asked.stdout.strip())
    if match is None:  # UNLIMITED, NOT_SET
        logger.info("SLURM says of the time left to job %s: %s", job, asked.stdout.strip() or "nothing")
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
