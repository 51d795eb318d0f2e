"""Runs jobs, a limited number at a time, and asks them to save and stop on a signal.

* A *start* is one start of a job: a torchrun process on this machine, or a SLURM job.
* The *pool* has a number of slots; a start occupies one until it has ended.
* The first signal asks all starts to save and stop. A second SIGINT, SIGTERM or SIGQUIT ends them without waiting for the
  save.

The signal handler only counts signals. The waiting thread does everything else, because a handler may interrupt any code,
such as the creation of a process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.status import Status
from rich.text import Text

from dtrain.launch.job import Job, JobResult
from dtrain.report.style import format_duration
from dtrain.runs.run_dir import tail

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_SECOND_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
_POLL, _REDRAW = 0.1, 1.0  # seconds
_LAST_RECORDS = 8192  # bytes of metrics.jsonl in which the last step is searched


class Start(Protocol):
    """One start of a job."""

    job: Job

    def result(self) -> JobResult | None:
        """The result, or None while the start has not ended."""

    def stop(self) -> None:
        """Asks the run to save and stop. Called again and again until the start has ended."""

    def kill(self) -> None:
        """Ends the run without waiting for a save."""


class Pool:
    """Starts jobs, at most ``size`` at a time. Use it in a ``with`` block, which handles signals.

    Args:
        size: Number of slots.
        start: Starts a job in a slot, ``0 <= slot < size``.
        screen: Prints the progress; None if the runs themselves write to the terminal.
    """

    def __init__(self, size: int, start: Callable[[Job, int], Start], screen: Screen | None = None) -> None:
        self._start = start
        self._screen = screen
        self._free = list(range(size))
        self._starts: dict[int, Start] = {}
        self._since: dict[int, float] = {}
        self._signals = 0
        self._killed = False
        self._previous_handlers: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Pool:
        for number in _SIGNALS:
            # nohup ignores SIGHUP so that the runs outlive the terminal.
            if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._previous_handlers[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            # After an error the runs are stopped, too: nothing would record their results.
            self._signals += error is not None
            while self._starts:
                self.wait()
        finally:
            for number, handler in self._previous_handlers.items():
                signal.signal(number, handler)
            if self._screen is not None:
                self._screen.close()

    @property
    def stopping(self) -> bool:
        """Whether a signal asked to stop; then nothing may be started any more."""
        return self._signals > 0

    @property
    def has_room(self) -> bool:
        """Whether a job may be started now."""
        return bool(self._free) and not self.stopping

    @property
    def starts(self) -> list[Start]:
        """The starts that have not ended."""
        return list(self._starts.values())

    def start(self, job: Job) -> Start:
        """Starts a job in a free slot."""
        slot = min(self._free)
        start = self._start(job, slot)
        self._free.remove(slot)
        self._starts[slot], self._since[slot] = start, time.monotonic()
        if self._screen is not None:
            self._screen.note(f"{job.name}: started: {job.spec.dir}")
        return start

    def wait(self) -> list[tuple[Job, JobResult, str]]:
        """Waits a moment; returns the jobs that have ended since the last call, with result and duration (``12.3 s``)."""
        time.sleep(_POLL)
        ended = []
        for slot, start in list(self._starts.items()):
            if (result := start.result()) is not None:
                del self._starts[slot]
                self._free.append(slot)
                ended.append((start.job, result, format_duration(time.monotonic() - self._since[slot])))
            elif self.stopping:
                start.stop()
        if self._signals > 1 and not self._killed:
            self._killed = True
            for start in self.starts:
                start.kill()
        if self._screen is not None:
            self._screen.show(self.starts)
        return ended

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if not self._signals:
            self._signals = 1
            text = f"{name}: saving and stopping; a second signal ends the training within 30 s without waiting for the save"
        elif self._signals == 1 and number in _SECOND_SIGNALS:
            self._signals = 2
            text = f"{name} again: ending the training"
        else:
            return
        # os.write, because the interrupted code may be inside a write to sys.stderr.
        os.write(2, f"dtrain: {text}\n".encode())


class Screen:
    """Lines on standard error about the runs; in a terminal, also one line that shows where the running ones are.

    Args:
        total: Number of runs.
        done: Number of runs that an earlier command has finished.
    """

    def __init__(self, total: int, done: int = 0) -> None:
        self._total = total
        self._done = done
        self._drawn = 0.0
        self._console = Console(file=sys.stderr, highlight=False)
        self._status: Status | None = None

    def note(self, text: str, done: int = 0) -> None:
        """Writes a line; ``done`` is the number of runs that have ended with it."""
        self._done += done
        count = f"  ({self._done} of {self._total} done)" if done else ""
        self._console.print(Text(f"dtrain: {text}{count}"), soft_wrap=True)

    def show(self, starts: list[Start]) -> None:
        """Redraws the line of the running ones, about once a second."""
        if not self._console.is_terminal or time.monotonic() - self._drawn < _REDRAW:
            return
        self._drawn = time.monotonic()
        places = "  ".join(f"{start.job.name}: {_step(start.job.spec.dir)}" for start in starts)
        text = Text(
            f"{self._done} of {self._total} done, {len(starts)} running  {places}", overflow="ellipsis", no_wrap=True
        )
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)

    def close(self) -> None:
        """Removes the line of the running ones."""
        if self._status is not None:
            self._status.stop()
            self._status = None


def _step(run_dir: Path) -> str:
    """The step of the last record, such as ``step 40``."""
    path = run_dir / "metrics.jsonl"
    try:
        lines = tail(path, _LAST_RECORDS).splitlines() if path.exists() else []
        return f"step {json.loads(lines[-1])['step']}" if lines else "starting"
    except (OSError, ValueError, KeyError, TypeError):  # the line is being written
        return "..."
