"""Requests to stop: signals and a STOP file. They set a flag; when to stop is agreed in the vote of a step.

A handler does nothing else, because a save or a collective inside a signal handler meets the training thread in the
middle of another one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from dtrain.distributed.process_group import failure

_SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
_GRACE = 1.5  # seconds that a rank has to end by itself when another one has failed
_LOOK_EVERY = 1.0  # seconds between two looks at the STOP file: it may lie on a slow network disk


class StopRequests:
    """Notes what asks this run to stop, while it is entered.

    Args:
        stop_file: The file that asks for a stop; None on ranks that do not look for it.
        peer_failed: Called, in a thread, with what another rank has published before this process is ended for it.
    """

    def __init__(self, stop_file: Path | None, peer_failed: Callable[[str], None] = lambda text: None) -> None:
        self._stop_file = stop_file
        self._peer_failed = peer_failed
        self._reason: str | None = None
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
        for number, handler in self._before.items():
            if handler is not None:  # what was not installed from Python cannot be put back
                signal.signal(number, handler)

    @property
    def reason(self) -> str | None:
        """Why this rank wants to stop: a signal's name or the STOP file; None if it does not."""
        if self._reason is None and self._stop_file is not None and time.monotonic() - self._looked >= _LOOK_EVERY:
            self._looked = time.monotonic()
            if os.path.exists(self._stop_file):  # and not Path.exists, which raises where a network disk hiccups
                self._reason = f"{self._stop_file.name} file"
        return self._reason

    def consume(self) -> None:
        """Takes the STOP file away, once all ranks have agreed, so that the next start does not stop again."""
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
        if number == signal.SIGTERM:
            # torchrun also sends TERM to the peers of a rank that died. A thread looks, since the main one may be
            # inside a call to the same store.
            threading.Thread(target=self._end_if_a_peer_failed, daemon=True).start()

    def _end_if_a_peer_failed(self) -> None:
        if (text := failure()) is None:
            return
        # A rank inside a collective sees it break and ends in order; only one that is busy elsewhere is still there then.
        time.sleep(_GRACE)
        self._peer_failed(text)
        sys.stderr.write(f"dtrain: ending at once because {text}\n")
        sys.stderr.flush()
        os._exit(1)
