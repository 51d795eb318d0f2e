"""Decides when a run is saved, writes checkpoints asynchronously, and handles failed writes.

* ``CheckpointManager`` is the interface for the training loop. Its methods are collective: all ranks take the same decision.
* ``AsyncWriter`` writes on rank 0 in a thread. The loop waits for the copy to host memory, not for the disk.
* A failed write ends no run, except for the final checkpoint: the run continues with a warning and saves again later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from dtrain.config.errors import ConfigError
from dtrain.distributed.collectives import broadcast_buffers, from_rank0
from dtrain.distributed.process_group import set_timeout
from dtrain.training.checkpoints import Checkpoint, Checkpoints
from dtrain.training.run_logger import RunLogger
from dtrain.training.state import TrainState

_DISK_TIMEOUT = 3600.0  # seconds: a slow disk must not be reported as a hang
logger = logging.getLogger("dtrain")


class CheckpointManager:
    """Saves the run on request of the training loop.

    Args:
        run: The run.
        run_logger: Receives the warning about a checkpoint that could not be written.

    Attributes:
        waits_for_disk: Whether this rank is waiting for the disk of rank 0 right now.
    """

    def __init__(self, run: TrainState, run_logger: RunLogger) -> None:
        self._run = run
        self._writer = AsyncWriter(run.checkpoints)  # only rank 0 starts it
        self._run_logger = run_logger
        self._every_minutes = run.cfg.checkpoint.every_minutes if run.world.rank == 0 else None
        self._saved_step = run.step.step
        self._saved_at = time.monotonic()
        self.waits_for_disk = False

    @property
    def seconds(self) -> float:
        """Duration of the last write on this rank; 0 before the first."""
        return self._writer.seconds

    def is_due(self) -> bool:
        """Whether ``checkpoint.every_minutes`` have passed on rank 0; the other ranks learn it from the vote."""
        return self._every_minutes is not None and time.monotonic() - self._saved_at > 60 * self._every_minutes

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Collective. Whether ``checkpoint.best`` is set and this evaluation is better than that of every checkpoint.

        Args:
            metrics: Metrics of an evaluation, named as in metrics.jsonl; empty without one.

        Raises:
            ConfigError: If the evaluation has no metric of that name.
        """
        name = self._run.cfg.checkpoint.best
        if name is None or not metrics:
            return False
        if name not in metrics:
            raise ConfigError(
                f"checkpoint.best: got {name!r}, but an evaluation has {', '.join(metrics)}. Use one of these, or null."
            )

        def improved() -> bool:
            self.is_safe()  # a thread may still be writing the best one so far
            return self._run.checkpoints.improved_by(metrics)

        return bool(self._decide_with_disk(improved))

    def save(self, metrics: dict[str, float], *, final: bool) -> None:
        """Collective. Saves the run after the current step, which is settled.

        Waits for the copy to host memory. Waits for the disk only if the checkpoint is final, or if the previous write has not
        ended.

        Args:
            metrics: Metrics of the evaluation after this step; empty without one.
            final: Whether the run ends with this checkpoint.

        Raises:
            ConfigError: If the final checkpoint could not be written.
        """
        # Each rank updates buffers such as BatchNorm statistics from its own rows. Every rank continues with the saved ones,
        # so that a resumed run equals an uninterrupted one.
        broadcast_buffers(self._run.model)
        problem = self._decide_with_disk(lambda: self._begin(metrics, final))
        if problem is not None:
            raise ConfigError(
                f"{problem} Free disk space and start again: the run resumes from the previous checkpoint."
            )
        self._saved_step = self._run.step.step
        self._saved_at = time.monotonic()

    def save_last(self) -> bool:
        """Collective. Ensures that a checkpoint of the current step is on disk. Returns whether it saved one for that."""
        if self._saved_step == self._run.step.step and self._decide_with_disk(self.is_safe):
            return False
        self.save({}, final=True)
        return True

    def is_safe(self, *, wait: bool = True) -> bool:
        """Whether the last checkpoint was written; warns once of a failed write.

        Args:
            wait: False returns True for a write that has not ended.
        """
        if not wait and self._writer.is_writing:
            return True
        try:
            self._writer.wait()
        except NotSaved as error:
            self._run_logger.warn(
                f"{error} The run continues. If it ends before the next checkpoint, the steps since the last one are lost."
            )
            return False
        return True

    def _begin(self, metrics: dict[str, float], final: bool) -> str | None:
        """On rank 0: starts the write. Returns why a final checkpoint could not be written, else None."""
        self.is_safe()
        self._writer.start(self._run.step.step, self._run.checkpoint(metrics))
        try:
            if final:
                self._writer.wait()
        except NotSaved as error:
            return str(error)
        return None

    def _decide_with_disk(self, function: Callable[[], Any]) -> Any:
        """Collective. ``from_rank0`` for a function that may wait for the disk."""
        # While rank 0 waits for the disk, the others wait in a collective. Neither the hang detection nor the collective's own
        # time-out may end the run for that.
        self.waits_for_disk = True
        set_timeout(_DISK_TIMEOUT)
        decision = from_rank0(function)
        set_timeout(self._run.cfg.parallel.timeout_step)
        self.waits_for_disk = False
        return decision


class NotSaved(OSError):
    """A checkpoint could not be written; earlier ones are unchanged."""


class AsyncWriter:
    """Writes one checkpoint at a time in a thread.

    Args:
        checkpoints: Where it writes.

    Attributes:
        seconds: Duration of the last write; 0 before the first.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self.seconds = 0.0
        self._checkpoints = checkpoints
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, step: int, checkpoint: Checkpoint) -> None:
        """Starts a write; waits for the previous one if that has not ended.

        Args:
            step: Attempted step after which the checkpoint was taken.
            checkpoint: A copy that nobody changes.

        Raises:
            NotSaved: If the previous write failed and ``wait`` has not reported it; no new write is started.
        """
        self.wait()
        # Not a daemon thread: the interpreter waits for it, so a process that ends normally leaves a whole checkpoint.
        self._thread = threading.Thread(target=self._write, args=(step, checkpoint), name="checkpoint")
        self._thread.start()

    @property
    def is_writing(self) -> bool:
        """Whether a write is under way."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Waits until no write is under way.

        Raises:
            NotSaved: If the last write failed; raised once.
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
        except BaseException as error:  # noqa: BLE001 - a bug: raised in the thread that waits
            self._error = error
        else:
            self.seconds = time.monotonic() - started
            logger.info("saved %s in %.1f s", path, self.seconds)
