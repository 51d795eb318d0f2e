"""How a started run ended, read from its ``status.json``: torchrun makes 1 of every exit code but 0."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from dtrain.config.errors import users_to_fix
from dtrain.launching.point import Point
from dtrain.launching.table import aligned
from dtrain.tracking.history import printable
from dtrain.tracking.status import read_status

FINISHED = 0
FAILED = 1
#: EX_TEMPFAIL of sysexits.h: stopped on request; the same command goes on.
STOPPED = 75


@dataclass(frozen=True)
class Outcome:
    """What became of a point.

    Attributes:
        state: For a person: ``finished``, ``stopped``, ``failed``, ``job 123``.
        code: Exit code that says the same: 0, 75 or another.
    """

    state: str
    code: int


class Verdict:
    """Judges one start of a run.

    Made before the start, because ``status.json`` may be left from an earlier one; every status holds the time of its
    writing, so that one of this start differs from what was there.

    Args:
        run_dir: The run's directory.

    Raises:
        ConfigError: If what lies there as ``status.json`` is none.
    """

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        with users_to_fix("run.dir"):
            self._before = read_status(run_dir)

    def __call__(self) -> tuple[Outcome, str | None]:
        """The outcome, and for a failure what is known about it."""
        with users_to_fix("run.dir"):
            status = read_status(self._run_dir)
        if status is None or status == self._before:
            return Outcome("failed", FAILED), "it ended before the first step"
        if status["state"] == "finished":
            return Outcome("finished", FINISHED), None
        if status["state"] == "stopped":
            return Outcome("stopped", STOPPED), None
        reason = str(status.get("reason") or "it was killed and could not say why").splitlines()[0]
        return Outcome("failed", FAILED), printable(f"step {status.get('step')}: {reason}")


def overall(outcomes: Sequence[Outcome]) -> int:
    """The exit code of a sweep: that of a failure if there is one, else 75 if a point was stopped, else 0."""
    codes = {outcome.code for outcome in outcomes}
    failures = sorted(codes - {FINISHED, STOPPED})
    return failures[0] if failures else max(codes, default=FINISHED)


def print_table(points: Sequence[Point], outcomes: Sequence[Outcome], stream: TextIO | None = None) -> None:
    """Prints a line for each point of a sweep: what it varied, what became of it, where it is."""
    rows = [
        (" ".join(point.varied) or point.run.name, outcome.state, str(point.run.dir))
        for point, outcome in zip(points, outcomes, strict=True)
    ]
    (stream or sys.stdout).write(aligned(rows))
