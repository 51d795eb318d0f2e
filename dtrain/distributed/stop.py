"""Requests to stop: signals, a STOP file and time limits. The ranks agree when to stop, in the vote of a step.

* A signal handler only sets a flag: a save or a collective inside a handler would interrupt the training thread in the middle
  of another save or collective.
* Some time after SIGTERM, torchrun sends SIGKILL. A rank that does not reach the next vote reports where it waits before
  that. (torchrun sends SIGTERM also to the peers of a failed rank; ``HangWatch`` ends them.)
* A time limit (``run.max_hours``, the end of the SLURM allocation) requests a stop before it is reached. Time
  is reserved for the longest interval measured between two checks (a step and a save, or a micro-batch of an
  evaluation) and for writing the final checkpoint.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from dtrain.errors import ConfigError, RankLost

_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
# Seconds:
_REPORT_BEFORE_KILL = 5.0  # the time that a report of where all ranks wait takes
_STOP_FILE_POLL = 1.0  # the file may be on a slow network disk
_RESERVE = 60.0  # of an allocation, for closing the tracker and ending the processes; at most a tenth of what is left
_SQUEUE_TIMEOUT = 20.0
_TIME_LEFT = re.compile(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)$")  # squeue: [[days-]hours:]minutes:seconds
logger = logging.getLogger("dtrain")


class StopRequests:
    """Collects requests to stop this run, inside its ``with`` block.

    Args:
        stop_file: A file whose existence requests a stop; None on ranks that do not check it.
        time_limit: When to stop without a request; None: never.
        stuck: Called in a thread, with a reason, when torchrun is about to kill this process and the ranks have not yet
            agreed to stop.
        reason: Why a stop is already requested at the start; None: it is not.
    """

    def __init__(
        self,
        stop_file: Path | None,
        *,
        time_limit: TimeLimit | None = None,
        stuck: Callable[[str], None] = lambda text: None,
        reason: str | None = None,
    ) -> None:
        self._stop_file = stop_file
        self._time_limit = time_limit or TimeLimit()
        self._stuck = stuck
        self._reason = reason
        self._terminated = False
        self._ended = threading.Event()  # the end is agreed, or the block was left: the training is not stuck
        self._interrupted = False
        self._checked = float("-inf")
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        for name in _SIGNALS:
            number = getattr(signal, name)
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._ended.set()
        for number, handler in self._previous.items():
            # torchrun sends SIGTERM to the peers of a failed rank, and a checkpoint may still be being written.
            keep_ours = isinstance(error, RankLost) or (error is not None and number == signal.SIGTERM)
            if handler is not None and not keep_ours:  # None: not installed from Python, so it cannot be restored
                signal.signal(number, handler)

    @property
    def reason(self) -> str | None:
        """Why this rank requests a stop: the name of a signal, the STOP file or a time limit; None if it does not."""
        if self._reason is None:
            now = time.monotonic()
            if self._stop_file is not None and now - self._checked >= _STOP_FILE_POLL:
                self._checked = now
                if os.path.exists(self._stop_file):  # not Path.exists, which raises on errors of a network disk
                    self._reason = f"{self._stop_file.name} file"
            self._reason = self._reason or self._time_limit.reached(now)
        return self._reason

    def save_takes(self, seconds: Callable[[], float]) -> None:
        """Sets how long the final checkpoint takes to write, for the time limits.

        Args:
            seconds: Called at each check.
        """
        self._time_limit.save_seconds = seconds

    def consume(self) -> None:
        """Marks the end of the run as agreed and deletes the STOP file, so that the next start does not stop again."""
        self._ended.set()
        if self._stop_file is not None:
            try:
                self._stop_file.unlink(missing_ok=True)
            except OSError as error:
                sys.stderr.write(f"dtrain: {error}. Delete it by hand, or the next start will stop again.\n")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child inherits the handler
            return
        name = signal.Signals(number).name
        if self._interrupted and number in (signal.SIGINT, signal.SIGTERM):
            # Not sys.stderr, which the interrupted code may be writing to.
            os.write(2, f"dtrain: {name} after SIGINT: ending at once, without a checkpoint\n".encode())
            os._exit(128 + number)
        self._interrupted |= number == signal.SIGINT
        self._reason = self._reason or name
        until_kill = seconds_until_kill()
        if number == signal.SIGTERM and not self._terminated and until_kill is not None:
            self._terminated = True
            with suppress(RuntimeError):  # at interpreter shutdown no thread can start, and none is needed
                threading.Thread(target=self._watch, args=(until_kill,), name="stop", daemon=True).start()

    def _watch(self, until_kill: float) -> None:
        """Reports that the ranks do not agree, before torchrun's SIGKILL."""
        seconds = max(0.0, until_kill - _REPORT_BEFORE_KILL)
        if not self._ended.wait(seconds):
            self._stuck(f"asked to stop, but the ranks did not agree within {seconds:.0f} s")


def seconds_until_kill(environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds between torchrun's SIGTERM and its SIGKILL; None if torchrun did not start this process."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    return float(environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or 30)


# -- time limits


@dataclass(frozen=True)
class Limit:
    """A point in time by which the run must have ended.

    Attributes:
        name: What sets it, such as ``run.max_hours=2``.
        at: Seconds of ``time.monotonic()``.
    """

    name: str
    at: float


class TimeLimit:
    """Decides when to stop; rank 0 checks it in every step, and in every micro-batch of an evaluation.

    Args:
        limits: The earliest one counts.

    Attributes:
        save_seconds: Returns how long the final checkpoint takes to write; 0 while that is unknown.
    """

    def __init__(self, *limits: Limit) -> None:
        self._limits = limits
        self._checked: float | None = None
        self._longest = 0.0
        self.save_seconds: Callable[[], float] = lambda: 0.0

    @classmethod
    def from_config(
        cls,
        max_hours: float | None,
        rank: int = 0,
        environment: Mapping[str, str] = os.environ,
        began: float | None = None,
    ) -> TimeLimit:
        """The limits of this start. Ranks other than 0 have none, so that one clock decides.

        Args:
            max_hours: ``run.max_hours``.
            rank: This process.
            environment: SLURM's variables in it describe the job.
            began: When ``max_hours`` began, in seconds of ``time.monotonic()``; None: now.

        Raises:
            ConfigError: If ``max_hours`` is not above 0.
        """
        if max_hours is not None and not max_hours > 0:
            raise ConfigError(f"run.max_hours: got {max_hours}, want a number above 0, or null for no limit.")
        now, limits = time.monotonic(), []
        if rank != 0:
            return cls()
        if max_hours is not None:
            limits.append(Limit(f"run.max_hours={max_hours:g}", (now if began is None else began) + 3600 * max_hours))
        left = slurm_seconds_left(environment)
        if left is not None:
            limits.append(Limit("end of the SLURM allocation", now + left - min(_RESERVE, 0.1 * left)))
        return cls(*limits)

    def reached(self, now: float) -> str | None:
        """The name of the limit that leaves no time for another step; None if there is time.

        Args:
            now: ``time.monotonic()``.
        """
        if not self._limits:
            return None
        if self._checked is not None:
            self._longest = max(self._longest, now - self._checked)
        self._checked = now
        needed = self._longest + self.save_seconds()
        return next((limit.name for limit in self._limits if now + needed >= limit.at), None)

    def __str__(self) -> str:
        """The limits and the hours left, for the banner; ``""`` without limits."""
        now = time.monotonic()
        return ", ".join(f"{limit.name} in {(limit.at - now) / 3600:.2f} h" for limit in self._limits)


def slurm_seconds_left(environment: Mapping[str, str] = os.environ) -> float | None:
    """Seconds until SLURM ends this job; None outside of a job, without a limit, or if SLURM does not answer.

    Newer versions of SLURM set ``SLURM_JOB_END_TIME``; for others, ``squeue`` is called once.
    """
    if end := environment.get("SLURM_JOB_END_TIME"):
        return float(end) - time.time()
    if not (job := environment.get("SLURM_JOB_ID")):
        return None
    if "SLURM_ARRAY_TASK_ID" in environment:  # the id of one element can also mean the whole array
        job = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    try:
        squeue = subprocess.run(
            ["squeue", "--noheader", "--jobs", job, "--format=%L"],
            capture_output=True,
            text=True,
            timeout=_SQUEUE_TIMEOUT,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("the end of SLURM job %s is not known: %s", job, error)
        return None
    match = _TIME_LEFT.match(squeue.stdout.strip())
    if match is None:  # UNLIMITED, NOT_SET
        logger.info("time left to SLURM job %s, as squeue prints it: %s", job, squeue.stdout.strip() or "nothing")
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
