"""Requests to stop: signals, a STOP file, a time limit. They set a flag; when to stop is agreed in the vote of a step, or
beside the micro-batches of an evaluation.

* A handler does nothing else, because a save or a collective inside a signal handler meets the training thread in the
  middle of another one.
* After SIGTERM a thread looks on, because torchrun also sends it to the peers of a rank that died, and kills what is left
  after a time-out: a rank whose peer failed ends at once, and one that is not heard of any more says where it is before
  it is killed.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from dtrain.distributed.ending import end_process
from dtrain.distributed.process_group import failure
from dtrain.distributed.time_limit import TimeLimit

_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
_GRACE = 1.5  # seconds that a rank has to end by itself when another one has failed
_LOOK_FOR_FAILURE_EVERY = 0.5
_BEFORE_THE_KILL = 5.0  # seconds: what it takes to say where all ranks are
_LOOK_EVERY = 1.0  # seconds between two looks at the STOP file: it may lie on a slow network disk


class StopRequests:
    """Notes what asks this run to stop, while it is entered.

    Args:
        stop_file: The file that asks for a stop; None on ranks that do not look for it.
        peer_failed: Called, in a thread, with what another rank has published before this process is ended for it.
        time_limit: When to stop unasked; None: never.
        stuck: Called, in a thread, if torchrun is about to kill this process and the ranks have not agreed to stop; it
            says where they wait.
    """

    def __init__(
        self,
        stop_file: Path | None,
        peer_failed: Callable[[str], None] = lambda text: None,
        *,
        time_limit: TimeLimit | None = None,
        stuck: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._stop_file = stop_file
        self._peer_failed = peer_failed
        self._time_limit = time_limit or TimeLimit()
        self._stuck = stuck
        self._reason: str | None = None
        self._terminated = False
        self._over = threading.Event()  # agreed, or left: whatever happens now, the training is not stuck
        self._left = threading.Event()
        self._interrupted = False
        self._looked = float("-inf")
        self._pid = os.getpid()
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        for name in _SIGNALS:
            number = getattr(signal, name)
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        if error is None:  # else the thread stays: closing a tracker must not delay the end of a job that failed
            self._left.set()
        for number, handler in self._before.items():
            # torchrun sends SIGTERM to the peers of a rank that failed: a checkpoint may still be on its way to the disk.
            is_kept = error is not None and number == signal.SIGTERM
            if handler is not None and not is_kept:  # what was not installed from Python cannot be put back
                signal.signal(number, handler)

    @property
    def reason(self) -> str | None:
        """Why this rank wants to stop: a signal's name, the STOP file, a time limit; None if it does not."""
        if self._reason is None:
            now = time.monotonic()
            if self._stop_file is not None and now - self._looked >= _LOOK_EVERY:
                self._looked = now
                if os.path.exists(self._stop_file):  # and not Path.exists, which raises where a network disk hiccups
                    self._reason = f"{self._stop_file.name} file"
            self._reason = self._reason or self._time_limit.reached(now)
        return self._reason

    def save_takes(self, seconds: Callable[[], float]) -> None:
        """A stop has to leave time for a checkpoint, whose writing takes as long as ``seconds`` says when asked."""
        self._time_limit.save_seconds = seconds

    def consume(self) -> None:
        """The run ends here, by agreement or at its last step: takes the STOP file away, lest the next start stop again."""
        self._over.set()
        if self._stop_file is not None:
            try:
                self._stop_file.unlink(missing_ok=True)
            except OSError as error:
                sys.stderr.write(f"dtrain: {error}. Delete it by hand, or the next start will stop again.\n")

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a forked child has inherited this handler
            return
        name = signal.Signals(number).name
        if self._interrupted and number in (signal.SIGINT, signal.SIGTERM):
            # Not sys.stderr, which the interrupted code may be writing to.
            os.write(2, f"dtrain: {name} after SIGINT: ending at once, without a checkpoint\n".encode())
            os._exit(128 + number)
        self._interrupted |= number == signal.SIGINT
        self._reason = self._reason or name
        if number == signal.SIGTERM and not self._terminated:
            self._terminated = True
            with suppress(RuntimeError):  # the interpreter is ending: it takes no more threads, and needs none
                threading.Thread(target=self._look_on, args=(time.monotonic(),), name="stop", daemon=True).start()

    def _look_on(self, terminated_at: float) -> None:
        patience = seconds_until_kill()
        while (text := failure()) is None:
            overdue = patience is not None and time.monotonic() - terminated_at > patience - _BEFORE_THE_KILL
            if overdue and not self._over.is_set():
                self._stuck(f"asked to stop, and not agreed within {time.monotonic() - terminated_at:.0f} s")
                return
            if self._left.wait(_LOOK_FOR_FAILURE_EVERY):
                return
        # A rank inside a collective sees it break and ends in order; only one that is busy elsewhere is still there then.
        time.sleep(_GRACE)
        self._peer_failed(text)
        sys.stderr.write(f"dtrain: ending at once because {text}\n")
        end_process(1)


def seconds_until_kill(environment: Mapping[str, str] = os.environ) -> float | None:
    """How long after SIGTERM torchrun sends SIGKILL; None where torchrun did not start this process."""
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    return float(environment.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or 30)
