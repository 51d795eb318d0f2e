"""What checkpoints cost a run: a copy to host memory, and the time until it is safe on the disk."""

from __future__ import annotations

import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from dtrain.config.errors import users_to_fix
from dtrain.config.schema import CheckpointConfig
from dtrain.diagnosis.file_system import ENOUGH_TO_TELL, WriteSpeed, write_speed
from dtrain.diagnosis.finding import Finding, size_text
from dtrain.distributed.collectives import decided_by_rank_zero


@dataclass(frozen=True)
class Saving:
    """A checkpoint and the place where it goes.

    Attributes:
        nbytes: Of a checkpoint.
        copy: Seconds to copy it to host memory, for which the loop waits.
        rate: Bytes a second that rank 0 writes there, synced.
        folder: Of the run, or the nearest one that exists.
    """

    nbytes: int
    copy: float
    rate: float
    folder: Path

    @classmethod
    def measure(cls, run_dir: Path, nbytes: int, copy: float, seconds: float) -> Saving:
        """Collective. Rank 0 writes.

        Args:
            run_dir: Of the run; need not exist.
            nbytes: Of a checkpoint.
            copy: Seconds that copying it took.
            seconds: To spend.

        Raises:
            ConfigError: On every rank, if nothing can be written there.
        """

        def write() -> tuple[str, dict[str, float]]:
            folder = place_of(run_dir)
            with users_to_fix("run.dir"):
                return str(folder), asdict(write_speed(folder, max(nbytes, ENOUGH_TO_TELL), seconds))

        folder, written = decided_by_rank_zero(write)
        return cls(nbytes, copy, WriteSpeed(**written).rate, Path(folder))

    @property
    def write(self) -> float:
        """Seconds until a checkpoint is safe."""
        return self.nbytes / self.rate

    def finding(self, between: float) -> Finding:
        """What was measured.

        Args:
            between: Seconds of training between two checkpoints.
        """
        every = f"one every {between:,.1f} s" if math.isfinite(between) else "only at the end"
        return Finding(
            "checkpoints",
            f"{size_text(self.nbytes)}, {every}: {1e3 * self.copy:,.1f} ms to copy, {self.write:,.2f} s to write "
            f"({self.rate / 1e6:,.0f} MB/s with fsync in {self.folder})",
        )


def place_of(run_dir: Path) -> Path:
    """The folder of a run, or the nearest one above it that exists.

    Raises:
        ConfigError: If the trainer could write nothing there.
    """
    with users_to_fix(f"run.dir: {run_dir} cannot be written, choose another one"):
        place = next(place for place in (run_dir, *run_dir.parents) if place.exists())
        with tempfile.TemporaryFile(dir=place):
            return place


def between_saves(cfg: CheckpointConfig, step: float) -> float:
    """Seconds of training between two checkpoints; infinite if there is only the last one.

    Args:
        cfg: When they are written.
        step: Seconds of a step.
    """
    by_steps = cfg.every_steps * step if cfg.every_steps else math.inf
    by_clock = 60 * cfg.every_minutes if cfg.every_minutes is not None else math.inf
    return max(min(by_steps, by_clock), step)
