"""Decides when a run is saved, writes checkpoints asynchronously, and handles failed writes.

* ``CheckpointManager`` is the interface for the training loop. Its methods are collective: all ranks take the same decision.
* ``AsyncWriter`` writes on rank 0 in a thread. The loop waits for the copy to host memory, not for the disk.
* In a sharded run every rank has such a thread. It writes the file of its rank and reports it in the store of the ranks. Rank
  0's then completes the checkpoint, unless a rank reports an error or the ranks end before all have reported.
* A failed write ends no run, except for the final checkpoint: the run continues with a warning and saves again later.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from dtrain.distributed.collectives import broadcast_buffers, from_rank0, on_all_ranks, wait_for_all
from dtrain.distributed.process_exit import CHECKPOINT_WRITER
from dtrain.distributed.process_group import set_timeout
from dtrain.distributed.replicas import require_equal_replicas
from dtrain.distributed.store import FAILED, GroupStore, StoreLost, group_store
from dtrain.errors import ConfigError
from dtrain.files import remove
from dtrain.training.checkpoint.checkpoints import Checkpoint
from dtrain.training.checkpoint.state import TrainState

_DISK_TIMEOUT = 3600.0  # seconds: a slow disk must not be reported as a hang
_POLL = 0.1  # seconds
logger = logging.getLogger("dtrain")


class SaveListener(Protocol):
    """Learns the results of saves."""

    def saved(self, path: Path, step: int, is_best: bool) -> None:
        """On rank 0, in the writer's thread: the checkpoint of ``step`` is complete."""

    def warn(self, text: str) -> None:
        """A checkpoint could not be written, and the run continues."""


class CheckpointManager:
    """Saves the run on request of the training loop.

    Args:
        run: The run.
        listener: Learns the results of saves.

    Attributes:
        waits_for_disk: Whether this rank is waiting for the disk of rank 0 right now.
    """

    def __init__(self, run: TrainState, listener: SaveListener) -> None:
        self._run = run
        self._writer = AsyncWriter(self._written)  # only rank 0 starts it, except in a sharded run
        self._listener = listener
        self._every_minutes = run.cfg.checkpoint.every_minutes if run.world.rank == 0 else None
        self._saved_step = run.step.step
        self._saved_at = time.monotonic()
        self._failed = False  # on rank 0: the last write, as far as is known
        self.waits_for_disk = False

    @property
    def seconds(self) -> float:
        """Duration of the last write on this rank; 0 before the first."""
        return self._writer.seconds

    @property
    def saved_step(self) -> int:
        """Step of the newest save, or after which this start began."""
        return self._saved_step

    def is_due(self) -> bool:
        """Whether ``checkpoint.every_minutes`` have passed on rank 0; the other ranks learn it from the vote."""
        return self._every_minutes is not None and time.monotonic() - self._saved_at > 60 * self._every_minutes

    def is_due_after(self, step: int) -> bool:
        """Whether ``checkpoint.every_steps`` demands a checkpoint after this step."""
        every = self._run.cfg.checkpoint.every_steps
        return bool(every and step % every == 0)

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Collective. Whether ``checkpoint.best`` is set and this evaluation is better than every checkpoint's.

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
            ConfigError: If the final checkpoint could not be written, or the parameters of the ranks have drifted apart.
        """
        # Each rank updates buffers such as BatchNorm statistics from its own rows. Every rank continues with the saved ones,
        # so that a resumed run equals an uninterrupted one.
        broadcast_buffers(self._run.model)
        require_equal_replicas(self._run.model, getattr(self._run.step.model, "parameters_to_ignore", ()))
        if self._run.is_sharded:
            problem = self._save_sharded(metrics, final)
        else:
            problem = self._decide_with_disk(lambda: self._begin(metrics, final))
        if problem is not None:
            last = from_rank0(lambda: max(self._run.checkpoints.steps(), default=0))
            where = (
                f"resumes from the checkpoint of step {last}" if last else "begins again, because it has no checkpoint"
            )
            raise ConfigError(f"{problem} Free disk space and start again: the run {where}.")
        self._saved_step = self._run.step.step
        self._saved_at = time.monotonic()

    def save_last(self) -> bool:
        """Collective. Ensures that a checkpoint of the current step is on disk. Returns whether it saved one for that."""
        if self._saved_step == self._run.step.step and self._decide_with_disk(self.is_safe):
            return False
        self.save({}, final=True)
        return True

    def save_before_failing(self, metrics: dict[str, float]) -> None:
        """Saves a run that ends with an error: on rank 0 alone, but collective in a sharded run. Waits for the disk.

        Args:
            metrics: Metrics of the evaluation after the current step; empty without one.

        Raises:
            ConfigError: If the checkpoint could not be written.
        """
        if self._run.is_sharded:
            self.save(metrics, final=True)
        elif (problem := self._begin(metrics, True)) is not None:
            raise ConfigError(problem)

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
            self._listener.warn(
                f"{error} The run continues. If it ends before the next checkpoint, the steps since the last one are lost."
            )
            self._failed = True
        return not self._failed

    def _begin(self, metrics: dict[str, float], final: bool) -> str | None:
        """On rank 0: starts the write. Returns why a final checkpoint could not be written, else None."""
        self.is_safe()
        self._failed = False
        step, checkpoint = self._run.step.step, self._run.checkpoint(metrics)
        self._writer.start(step, lambda: self._run.checkpoints.save(step, checkpoint))
        return self._problem() if final else None

    def _save_sharded(self, metrics: dict[str, float], final: bool) -> str | None:
        """Collective. ``_begin`` for a sharded run."""
        step = self._run.step.step
        staged = self._decide_with_disk(lambda: self._stage(step))
        if staged is not None:
            checkpoint, store = on_all_ranks(lambda: self._run.checkpoint(metrics)), group_store()
            self._writer.start(step, lambda: self._write_sharded(step, Path(staged), checkpoint, store))
        return self._decide_with_disk(self._problem) if final else None

    def _stage(self, step: int) -> str | None:
        """On rank 0: the folder for the ranks' files; None if it cannot be made, as the writer then reports."""
        self.is_safe()
        self._failed = False
        try:
            return str(self._run.checkpoints.stage(step))
        except OSError as error:
            reason = error

        def fail() -> None:
            raise reason

        self._writer.start(step, fail)
        return None

    def _write_sharded(self, step: int, staged: Path, checkpoint: Checkpoint, store: GroupStore) -> Path | None:
        """In a thread: writes this rank's file and reports it; on rank 0 then completes the checkpoint and returns its folder.

        Raises:
            OSError: On rank 0, if the checkpoint could not be written; no other rank raises it.
        """
        world, checkpoints = self._run.world, self._run.checkpoints
        keys = [f"dtrain/checkpoint/{staged.name}/{rank}" for rank in range(world.size)]
        report: dict[str, Any] = {}
        try:
            report["entry"] = checkpoints.write_rank(staged, checkpoint, world)
        except OSError as error:
            report["error"] = str(error)
        except BaseException as error:  # a bug: this rank ends with it, when it waits for the thread
            report["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            _publish(store, keys[world.rank], json.dumps(report))
            self._writer.has_written.set()
        if world.rank != 0:
            return None
        try:
            reports = [json.loads(text) for text in _collect(store, keys)]
            for rank, each in enumerate(reports):
                if "error" in each:
                    raise OSError(f"rank {rank}: {each['error']}")
            return checkpoints.complete(step, staged, checkpoint, [each["entry"] for each in reports])
        finally:
            remove(staged)

    def _written(self, step: int, path: Path) -> None:
        """On rank 0, in the writer's thread: a checkpoint is complete."""
        self._listener.saved(path, step, self._run.checkpoints.best_step() == step)

    def _problem(self) -> str | None:
        """Waits for the write. Returns why the checkpoint could not be written, None if it was."""
        try:
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
        if self._run.is_sharded:
            # Rank 0 will wait for the files of all ranks. If a rank ends while it writes, this barrier fails.
            self._writer.has_written.wait()
            wait_for_all()
        decision = from_rank0(function)
        set_timeout(self._run.cfg.parallel.timeout_step)
        self.waits_for_disk = False
        return decision


class NotSaved(OSError):
    """A checkpoint could not be written; earlier ones are unchanged."""

    @classmethod
    def from_error(cls, step: int, error: OSError) -> NotSaved:
        """For the checkpoint of ``step``."""
        return cls(f"the checkpoint of step {step} could not be written ({error}).")


class AsyncWriter:
    """Writes one checkpoint at a time in a thread.

    Args:
        written: Called in the thread with step and folder of a checkpoint that this rank has completed.

    Attributes:
        seconds: Duration of the last write; 0 before the first.
        has_written: Set while this rank has no file to write. A write of ``start`` may set it before it ends.
    """

    def __init__(self, written: Callable[[int, Path], None] = lambda step, path: None) -> None:
        self._written = written
        self.seconds = 0.0
        self.has_written = threading.Event()
        self.has_written.set()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, step: int, write: Callable[[], Path | None]) -> None:
        """Starts a write; waits for the previous one if that has not ended.

        Args:
            step: Attempted step after which the checkpoint was taken.
            write: Writes a copy of the state. Returns the checkpoint's folder, or None if another rank completes it.

        Raises:
            NotSaved: If the previous write failed and ``wait`` has not reported it; no new write is started.
        """
        self.wait()
        self.has_written.clear()
        # Not a daemon thread: the interpreter waits for it, so a process that ends normally leaves a whole checkpoint.
        self._thread = threading.Thread(target=self._write, args=(step, write), name=CHECKPOINT_WRITER)
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

    def _write(self, step: int, write: Callable[[], Path | None]) -> None:
        started = time.monotonic()
        try:
            path = write()
        except OSError as error:
            self._error = NotSaved.from_error(step, error)
        except BaseException as error:  # noqa: BLE001 - a bug: raised in the thread that waits
            self._error = error
        else:
            self.seconds = time.monotonic() - started
            if path is not None:
                logger.info("saved %s in %.1f s", path, self.seconds)
                self._written(step, path)
        finally:
            self.has_written.set()


def _publish(store: GroupStore, key: str, text: str) -> None:
    """Sets a key as soon as the store answers, while this process is in the process group."""
    while store.is_open:
        try:
            return store.call(lambda it: it.set(key, text))
        except StoreLost:
            time.sleep(_POLL)


def _collect(store: GroupStore, keys: list[str]) -> list[str]:
    """Waits until all ranks have reported, and returns what they reported.

    Raises:
        OSError: If the ranks end before.
    """
    missing = keys
    while True:
        try:
            failure, *texts = store.read(FAILED, *keys)
        except StoreLost:
            failure, texts = None, [None] * len(keys)
        missing = [key for key, text in zip(keys, texts, strict=True) if text is None]
        if not missing:
            with suppress(StoreLost):
                store.call(lambda it: [it.delete_key(key) for key in keys])
            return [text for text in texts if text is not None]
        if failure is not None or not store.is_open:
            ranks = ", ".join(key.rpartition("/")[2] for key in missing)
            raise OSError(f"the run ended before rank {ranks} had written")
        time.sleep(_POLL)
