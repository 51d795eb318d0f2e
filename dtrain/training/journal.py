"""What a run says of itself while it trains: records, its status, notes. A full disk takes none of it down."""

from __future__ import annotations

import logging
import time

from dtrain.tracking.record import Record
from dtrain.tracking.sinks import NullSinks, Sinks
from dtrain.tracking.status import write_status
from dtrain.training.parts import Parts

_STATUS_EVERY = 5.0  # seconds
logger = logging.getLogger("dtrain")


class Journal:
    """Used on all ranks; rank 0's writes.

    Args:
        parts: The objects of the run.
        last_step: Attempted step after which the run is finished.
        sinks: Where records and notes go.
    """

    def __init__(self, parts: Parts, last_step: int, sinks: Sinks | NullSinks) -> None:
        self._parts = parts
        self._last_step = last_step
        self._sinks = sinks
        self._status_at = float("-inf")

    def record(self, record: Record) -> None:
        """Hands one record to the sinks."""
        self._sinks.log(record)

    def status(self, *, at_most_every: float = 0.0) -> None:
        """Writes ``status.json``: the run is running, and how far it is.

        Args:
            at_most_every: Seconds since it was last written below which nothing is done.
        """
        if self._parts.world.rank != 0 or time.monotonic() - self._status_at < at_most_every:
            return
        times = self._parts.progress.times()
        try:
            write_status(self._parts.run_dir, "running", self._parts.step.step, last_step=self._last_step, **times)
        except OSError as error:
            self.warn(f"status.json could not be written ({error}).")
        self._status_at = time.monotonic()

    def logged(self, record: Record) -> None:
        """A record of a step, and the status if it is old."""
        self.record(record)
        self.status(at_most_every=_STATUS_EVERY)

    def media(self, step: int, name: str, content: bytes | str) -> None:
        """Hands a picture (the bytes of a PNG file) or a text to the sinks."""
        self._sinks.media(step, name, content)

    def note(self, line: str) -> None:
        """Something that the user should read once."""
        self._sinks.note(line)

    def warn(self, text: str) -> None:
        """Something that the user should act on."""
        logger.warning(text)
        self._sinks.note(f"WARNING: {text}")
