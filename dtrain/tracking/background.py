"""A sink in a thread of its own, so that nothing that happens to it costs the training more than putting a record in a queue.

* The thread *opens* the sink, serves it, and closes it. A sink that hangs keeps its thread waiting, and nobody else.
* What waits is bounded: past that, records are left out rather than kept in memory. metrics.jsonl has them.
* An error that the sink is known to raise is said in one line and ends the thread; one that nobody foresaw ends it with its
  traceback. Either way the run goes on, and later records are let go.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from dtrain.tracking.record import Record

#: Seconds that the training waits at its start for a sink to open.
START = 5.0
#: Seconds that it waits at its end; and at the end of a run that failed, whose other processes should not be kept.
PATIENCE, PATIENCE_AFTER_FAILURE = 65.0, 10.0
#: Records that may wait for a slow sink.
WAITING = 10_000


class SlowSink(Protocol):
    """A sink that may take its time, fail or hang. One thread uses it."""

    def log(self, record: Record) -> None:
        """Takes one record."""

    def media(self, step: int, name: str, path: Path) -> None:
        """Takes a picture (``.png``) or a text (``.txt``)."""

    def finish(self, state: str, reason: str | None = None) -> None:
        """Ends with the state that status.json has, and why."""


class BackgroundSink:
    """Serves a sink from a thread.

    Args:
        name: What to call it in notes.
        open: Makes the sink; called in the thread.
        errors: What the sink may raise.
        note: Shows a sentence to a person; called from any thread.
        if_unfinished: What to do about a sink that was not done in time, for a note.
    """

    def __init__(
        self,
        name: str,
        open: Callable[[], SlowSink],
        *,
        errors: tuple[type[Exception], ...],
        note: Callable[[str], None],
        if_unfinished: str = "",
    ) -> None:
        self._name = name
        self._open = open
        self._errors = errors
        self._note = note
        self._if_unfinished = if_unfinished
        self._queue: queue.Queue[Callable[[SlowSink], None] | None] = queue.Queue(WAITING)
        self._full = False
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        # wandb starts processes of its own. A loader worker that is forked in that moment inherits the pipes on which
        # Python waits for them and keeps them open, so wandb would hang until the loader ends (seen). By now it has
        # started them and is done, or waits for its server.
        self._started.wait(START)

    def log(self, record: Record) -> None:
        """Leaves one record for the thread; returns at once, whatever the sink does."""
        self._put(lambda sink: sink.log(record))

    def media(self, step: int, name: str, path: Path) -> None:
        """Leaves a picture or text for the thread; returns at once."""
        self._put(lambda sink: sink.media(step, name, path))

    def finish(self, state: str, reason: str | None = None) -> None:
        """Waits until the sink has sent or stored everything, but not for ever."""
        deadline = time.monotonic() + (PATIENCE_AFTER_FAILURE if state == "failed" else PATIENCE)
        for item in (lambda sink: sink.finish(state, reason), None):
            self._put(item, deadline)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._note(f"{self._name}: not done in time. {self._if_unfinished}".rstrip())

    def _put(self, item: Callable[[SlowSink], None] | None, deadline: float | None = None) -> None:
        if not self._thread.is_alive():
            return
        try:
            if deadline is None:
                self._queue.put_nowait(item)
            else:
                self._queue.put(item, timeout=max(0.0, deadline - time.monotonic()))
        except queue.Full:
            if not self._full:
                self._note(f"{self._name}: {WAITING} records wait; the next are left out. metrics.jsonl has all.")
            self._full = True

    def _work(self) -> None:
        try:
            sink = self._open()
            self._started.set()
            while (serve := self._queue.get()) is not None:
                serve(sink)
        except self._errors as error:
            reason = " ".join(str(error).split())
            self._note(f"{self._name}: {reason}. The run goes on without it; metrics.jsonl has everything.")
        finally:
            self._started.set()
