"""When a run is saved, and what happens if the disk refuses: what all ranks decide together about checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dtrain.config.errors import ConfigError
from dtrain.distributed.collectives import decided_by_rank_zero, equalise_buffers
from dtrain.distributed.hang import BACKSTOP
from dtrain.distributed.process_group import set_timeout
from dtrain.training.checkpoints import Checkpoints
from dtrain.training.journal import Journal
from dtrain.training.parts import Parts
from dtrain.training.saver import NotSaved, Saver

_DISK_WITHIN = 3600.0  # seconds: a disk that is slower than the saves is no hang


class Saves:
    """The checkpoints of a run, as the loop takes them.

    Args:
        parts: The objects of the run.
        checkpoints: Where checkpoints go.
        journal: Hears of a checkpoint that could not be written.

    Attributes:
        waits_for_disk: Whether this rank waits for the disk of rank 0 at this moment.
    """

    def __init__(self, parts: Parts, checkpoints: Checkpoints, journal: Journal) -> None:
        self._parts = parts
        self._checkpoints = checkpoints
        self._saver = Saver(checkpoints)  # rank 0's is used
        self._journal = journal
        self._every_minutes = parts.cfg.checkpoint.every_minutes if parts.world.rank == 0 else None
        self._step = parts.step.step
        self._at = time.monotonic()
        self.waits_for_disk = False

    @property
    def seconds(self) -> float:
        """How long the last write took on this rank; 0 before the first."""
        return self._saver.seconds

    def is_due(self) -> bool:
        """Whether rank 0's clock asks for a checkpoint; the others learn it from the vote."""
        return self._every_minutes is not None and time.monotonic() - self._at > 60 * self._every_minutes

    def is_best(self, metrics: dict[str, float]) -> bool:
        """Collective. Whether the run keeps its best checkpoint, and this evaluation is better than that one's.

        Raises:
            ConfigError: If the evaluation has no such metric.
        """
        name = self._parts.cfg.checkpoint.best
        if name is None or not metrics:
            return False
        if name not in metrics:
            raise ConfigError(f"checkpoint.best: got {name!r}, but an evaluation has {', '.join(metrics)}.")

        def improved() -> bool:
            self.are_safe()  # the best so far may still be on its way to the disk
            return self._checkpoints.improved_by(metrics)

        return bool(self._decided_at_the_disk(improved))

    def save(self, metrics: dict[str, float], *, final: bool) -> None:
        """Collective. Waits for the copy to host memory; for the disk only if it is final, or still at the one before.

        A full disk ends no run, unless this is its final checkpoint.

        Args:
            metrics: Of the evaluation after this step, if there was one.
            final: Whether nothing comes after it.

        Raises:
            ConfigError: If the final checkpoint could not be written.
        """
        equalise_buffers(self._parts.model)
        problem = self._decided_at_the_disk(lambda: self._begin(metrics, final))
        if problem is not None:
            raise ConfigError(f"{problem} Start again when there is room: the run continues from the one before.")
        self._step = self._parts.step.step
        self._at = time.monotonic()

    def save_last(self) -> None:
        """Collective. When it returns, the newest checkpoint is that of the last step, and safe."""
        if self._step != self._parts.step.step or not self._decided_at_the_disk(self.are_safe):
            self.save({}, final=True)

    def are_safe(self, *, wait: bool = True) -> bool:
        """Whether the last checkpoint is safe, as far as is known; warns once if it could not be written."""
        try:
            self._saver.wait() if wait else self._saver.check()
        except NotSaved as error:
            self._journal.warn(
                f"{error} The run goes on; what it learns is lost if it ends before the next checkpoint."
            )
            return False
        return True

    def _begin(self, metrics: dict[str, float], final: bool) -> str | None:
        """What is wrong with a final checkpoint, if it could not be written."""
        self.are_safe()
        self._saver.start(self._parts.step.step, self._parts.checkpoint(metrics))
        try:
            if final:
                self._saver.wait()
        except NotSaved as error:
            return str(error)
        return None

    def _decided_at_the_disk(self, function: Callable[[], Any]) -> Any:
        """Collective. What rank 0 decides after it waited for a checkpoint, while the others wait for rank 0."""
        self.waits_for_disk = True
        set_timeout(_DISK_WITHIN)
        decision = decided_by_rank_zero(function)
        set_timeout(self._parts.cfg.parallel.timeout_step + BACKSTOP)
        self.waits_for_disk = False
        return decision
