"""Checkpoints written behind the training's back: the loop waits for the copy to host memory, not for the disk."""

from __future__ import annotations

import logging
import threading
import time

from dtrain.training.checkpoint import Checkpoint
from dtrain.training.checkpoints import Checkpoints

logger = logging.getLogger("dtrain")


class NotSaved(OSError):
    """A checkpoint that could not be written; those before it are untouched."""


class Saver:
    """Writes one checkpoint at a time in a thread of its own.

    Args:
        checkpoints: Where they go.

    Attributes:
        seconds: How long the last write took; 0 before the first.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.seconds = 0.0
        self._checkpoints = checkpoints
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, step: int, checkpoint: Checkpoint) -> None:
        """Begins to write, after the one before is safe, should the disk be slower than the saves.

        Args:
            step: Attempted step that it was taken after.
            checkpoint: A copy that nobody else changes.

        Raises:
            NotSaved: If the one before could not be written and nobody has asked yet; this one is not begun.
        """
        self.wait()
        # Not a daemon: a process that ends while it writes ends after it, and the checkpoint is whole.
        self._thread = threading.Thread(target=self._write, args=(step, checkpoint), name="checkpoint")
        self._thread.start()

    def check(self) -> None:
        """Goes on if nothing went wrong so far, without waiting.

        Raises:
            NotSaved: If a checkpoint could not be written; told once.
        """
        if not self.is_writing:
            self.wait()

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is on its way to the disk."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Returns when nothing is being written.

        Raises:
            NotSaved: If the last one could not be written; told once.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _write(self, step: int, checkpoint: Checkpoint) -> None:
        started = time.monotonic()
        try:
            path = self._checkpoints.save(step, checkpoint)
        except OSError as error:
            self._error = NotSaved(f"the checkpoint of step {step} could not be written ({error}).")
        except BaseException as error:  # noqa: BLE001 - a bug: it belongs to the thread that asks
            self._error = error
        else:
            self.seconds = time.monotonic() - started
            logger.info("saved %s in %.1f s", path, self.seconds)
