"""Checkpoints as artifacts of wandb: ``tracker.artifacts=best|last|all``.

* An artifact has the weights of a checkpoint, its ``state.json`` and the run's ``config.yaml``. It has no state of the
  optimizer, except for a sharded run, whose files contain both.
* Its files are *staged* first: hard links in ``<run.dir>/wandb/checkpoints``, because the run may delete the checkpoint before
  it is uploaded. They need no disk space while the checkpoint exists. Offline they stay until `wandb sync` has read them.
* Staging and queueing take a millisecond. The upload is done by wandb's own process.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import wandb

from dtrain.files import link_or_copy

_LEFT_OUT = ("optimizer.safetensors", "manifest.json")


class StagedCheckpoint(NamedTuple):
    """The files of an artifact.

    Attributes:
        folder: Holds only these files.
        step: Attempted steps of the checkpoint.
        is_best: Whether it has the best value of ``checkpoint.best`` so far.
    """

    folder: Path
    step: int
    is_best: bool


class CheckpointArtifacts:
    """Chooses and stages the checkpoints that wandb gets.

    Args:
        which: ``best``, ``last`` or ``all``.
        run_dir: The run's directory.
        put: Passes a staged checkpoint to wandb's thread; never blocks.
    """

    def __init__(self, which: str, run_dir: Path, put: Callable[[StagedCheckpoint], None]) -> None:
        self._which = which
        self._run_dir = run_dir
        self._put = put
        self._last: StagedCheckpoint | None = None

    def saved(self, path: Path, step: int, is_best: bool) -> None:
        """Called when a checkpoint was written, before the next one can be.

        Raises:
            OSError: If it cannot be staged.
        """
        if self._which == "best" and not is_best:
            return
        staged = StagedCheckpoint(self._stage(path), step, is_best)
        if self._which != "last":
            self._put(staged)
            return
        if self._last is not None and self._last.folder != staged.folder:
            shutil.rmtree(self._last.folder)
        self._last = staged

    def finish(self) -> None:
        """Called when no further checkpoint follows."""
        if self._last is not None:
            self._put(self._last)
        self._last = None

    def _stage(self, path: Path) -> Path:
        folder = self._run_dir / "wandb" / "checkpoints" / path.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in (self._run_dir / "config.yaml", *sorted(path.iterdir())):
            if file.name not in _LEFT_OUT:
                link_or_copy(file, folder / file.name)
        return folder


def checkpoint_artifact(run_id: str, checkpoint: StagedCheckpoint) -> tuple[wandb.Artifact, list[str]]:
    """The artifact of a staged checkpoint, and its aliases.

    Raises:
        OSError, ValueError: If a file cannot be read.
    """
    artifact = wandb.Artifact(f"checkpoint-{run_id}", type="model", metadata={"step": checkpoint.step})
    for file in sorted(checkpoint.folder.resolve().iterdir()):
        # These files do not change, so wandb needs no copy.
        artifact.add_file(str(file), policy="immutable", skip_cache=True)
    return artifact, ["latest", f"step-{checkpoint.step}", *(["best"] if checkpoint.is_best else [])]
