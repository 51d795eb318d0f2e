"""The checkpoints of a run: which to continue from, and which stay.

* A *checkpoint* is a folder ``step-000000050``, whole or absent (``checkpoint``). The newest may be torn by a power cut, so
  reading falls back to the one before.
* Nothing old is deleted before something new is safe.

Rank 0 writes. Reading is decided by rank 0 and done by every rank.
"""

from __future__ import annotations

import logging
import math
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from dtrain.config.errors import ConfigError
from dtrain.config.schema import CheckpointConfig
from dtrain.training.checkpoint import (
    BadCheckpoint,
    Checkpoint,
    metrics_of,
    put_back_replaced,
    read_folder,
    verify_folder,
    write_folder,
)

_NAME = re.compile(r"step-(\d{9})$")
logger = logging.getLogger("dtrain")


class Checkpoints:
    """The checkpoints of a run.

    Args:
        directory: ``<run.dir>/checkpoints``.
        keep_last: How many of the newest stay.
        best: Metric whose best checkpoint stays, too; None keeps none for it.
        best_mode: ``"max"`` or ``"min"``.
        keep_every: Those whose step is divisible by it stay for good; None keeps none for that.

    Raises:
        ValueError: If ``keep_last``, ``keep_every`` or ``best_mode`` is impossible.
    """

    def __init__(
        self,
        directory: Path,
        keep_last: int = 2,
        best: str | None = None,
        best_mode: str = "max",
        keep_every: int | None = None,
    ) -> None:
        if keep_last < 1:
            raise ValueError(f"checkpoint.keep_last: got {keep_last}, want at least 1.")
        if keep_every is not None and keep_every < 1:
            raise ValueError(f"checkpoint.keep_every: got {keep_every}, want at least 1, or null to keep none for it.")
        if best_mode not in ("max", "min"):
            raise ValueError(f"checkpoint.best_mode: got {best_mode!r}, want max or min.")
        self.directory = directory
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._best = best
        self._sign = 1 if best_mode == "max" else -1

    @classmethod
    def of(cls, run_dir: Path, cfg: CheckpointConfig) -> Checkpoints:
        """Those of a run, kept as its config says."""
        return cls(run_dir / "checkpoints", cfg.keep_last, cfg.best, cfg.best_mode, cfg.keep_every)

    def choose(self, which: str) -> int:
        """The step of a checkpoint by name.

        Args:
            which: ``best``, ``latest``, a step; or ``""``: the best where one is kept, else the latest.

        Raises:
            ConfigError: If there is no such checkpoint, or it is broken; names those there are.
        """
        steps = self.steps()
        step = int(which) if which.isdecimal() else self.best_step() if which in ("", "best") else None
        if which == "latest" or (which == "" and step is None):
            step, problems = self.newest_good()
            for problem in problems:
                logger.warning("passed over a broken checkpoint: %s", problem)
        if step not in steps:
            raise ConfigError(
                f"checkpoint={which or 'latest'}: {self.directory} has "
                + (f"steps {', '.join(map(str, steps))}" if steps else "none")
                + ". Name one of them, or latest; best needs checkpoint.best=METRIC in the run's config."
            )
        self.verify(step)
        return step

    def to_resume(self, mode: str) -> tuple[int | None, list[str]]:
        """Where a start continues, as ``run.resume`` says.

        Args:
            mode: ``"auto"``: the newest whole checkpoint, if there is one; ``"must"``: it must exist; ``"never"``: none
                may exist.

        Returns:
            The step, or None for a start from nothing, and a line for each broken checkpoint that was passed over.

        Raises:
            ConfigError: If the mode does not fit what there is, or all there is is broken.
        """
        if mode not in ("auto", "must", "never"):
            raise ConfigError(f"run.resume: got {mode!r}, want auto, must or never.")
        put_back_replaced(self.directory)  # a save may have been killed between its two renames
        if mode == "never":
            if self.steps():
                raise ConfigError(f"run.resume=never, but {self.directory} holds checkpoints. Use another run.dir.")
            return None, []
        step, problems = self.newest_good()
        if step is None and (problems or mode == "must"):
            found = "\n".join(f"    {problem}" for problem in problems) or "    there is none"
            raise ConfigError(
                f"{self.directory} has no checkpoint to continue from:\n{found}\n  Restore one, or start afresh in "
                "another run.dir."
            )
        return step, [f"passed over a broken checkpoint: {problem}" for problem in problems]

    def steps(self) -> list[int]:
        """Steps of the checkpoints there are, oldest first; not checked."""
        if not self.directory.is_dir():
            return []
        return sorted(int(match[1]) for entry in self.directory.iterdir() if (match := _NAME.match(entry.name)))

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self.directory / f"step-{step:09d}"

    def save(self, step: int, checkpoint: Checkpoint) -> Path:
        """Writes a checkpoint and then deletes those that need not stay.

        A later one is there only if it is broken, so that the run went on from an earlier one; one of the same step also if
        its evaluation was still due. They are deleted, or replaced.

        Args:
            step: Attempted step that it was taken after.
            checkpoint: Tensors on the CPU; ``state["metrics"]`` is where ``best`` is looked up.

        Raises:
            OSError: If it cannot be written; those before are untouched.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        for left_over in self.directory.glob(".step-*"):  # of a save that was killed
            shutil.rmtree(left_over, ignore_errors=True)
        target = self.path(step)
        write_folder(target, checkpoint)
        self._delete_old(step)
        return target

    def verify(self, step: int) -> None:
        """Compares a checkpoint's files with its manifest.

        Raises:
            BadCheckpoint: If one is missing or differs; names it.
        """
        verify_folder(self.path(step))

    def newest_good(self) -> tuple[int | None, list[str]]:
        """The newest checkpoint that is whole, and what is wrong with newer ones.

        Returns:
            Its step, or None if there is none, and a line for each broken one.
        """
        problems = []
        for step in reversed(self.steps()):
            try:
                self.verify(step)
            except BadCheckpoint as error:
                problems.append(str(error))
            else:
                return step, problems
        return None, problems

    def load(self, step: int) -> Checkpoint:
        """Reads a checkpoint as it is: ``verify`` comes first, on one rank.

        Raises:
            BadCheckpoint: If it cannot be read or is of another format.
        """
        return read_folder(self.path(step))

    def best_step(self) -> int | None:
        """The step with the best value of the ``best`` metric; None if none has it. The later one wins a tie."""
        ranked = self._ranked()
        return max(ranked)[1] if ranked else None

    def improved_by(self, metrics: Mapping[str, float]) -> bool:
        """Whether a checkpoint with these metrics would be the best one there is."""
        value = self._value(metrics)
        return value is not None and all(value >= other for other, _ in self._ranked())

    def _ranked(self) -> list[tuple[float, int]]:
        """Value, higher is better, and step of those that have the ``best`` metric."""
        return [
            (value, step) for step in self.steps() if (value := self._value(metrics_of(self.path(step)))) is not None
        ]

    def _value(self, metrics: Mapping[str, float]) -> float | None:
        """The ``best`` metric, higher is better; None if it is not there or not finite."""
        value = metrics.get(self._best or "")
        return self._sign * value if value is not None and math.isfinite(value) else None

    def _delete_old(self, saved: int) -> None:
        steps = self.steps()
        stay = {self.best_step(), *[step for step in steps if step <= saved][-self._keep_last :]}
        if self._keep_every is not None:
            stay.update(step for step in steps if step % self._keep_every == 0)
        for step in steps:
            if step > saved or step not in stay:
                # A folder that cannot be deleted is a matter of disk space, not of the run.
                shutil.rmtree(self.path(step), ignore_errors=True)
