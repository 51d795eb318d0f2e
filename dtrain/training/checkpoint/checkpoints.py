"""Checkpoint folders: their format, their verification, the choice of one to resume from, and retention.

* A *checkpoint* is a folder ``step-000000050`` with safetensors files, ``state.json`` and ``manifest.json``. The manifest has
  the size and SHA-256 of each of the other files. Nothing is pickled.
* A *sharded* checkpoint has one file for each rank, with the parts of the tensors that this rank holds. Any other checkpoint
  has one file each for the model, the optimizer and the moving average. Both are read in the same way, and only the parts that
  are needed.
* A checkpoint is *whole or absent*: its folder is staged, synced and renamed. A disk may still lose data in a power cut, so
  reading verifies the manifest and falls back to the previous checkpoint.
* *Retention* deletes an old checkpoint only after the new one is safe on disk.
* ``saved.json`` has the step of the last save, 0 before the first one. If there is no checkpoint, it distinguishes a run that
  was killed before its first save from a run whose checkpoints were lost.
* Only regular files (and links to them) are read, and only if they have the size that the manifest says: a checkpoint may
  come from another user.

Rank 0 writes, and chooses the checkpoint to read. Every rank reads it. Of a sharded checkpoint each rank writes its own file,
into the folder that rank 0 has staged and renames, and the ranks divide its verification among them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import socket
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from dtrain.config.directions import require_direction
from dtrain.config.schema import CheckpointConfig
from dtrain.distributed.collectives import from_rank0
from dtrain.distributed.world import World
from dtrain.errors import ConfigError, as_config_error
from dtrain.files import (
    fsync_path,
    open_regular,
    remove,
    replace_file,
    replace_folder,
    restore_replaced,
    size_and_hash,
)
from dtrain.runs.run_dir import retained_steps
from dtrain.training.checkpoint.manifest import MANIFEST, Manifest, compare, first_damaged, read_manifest
from dtrain.training.checkpoint.rest import Rest
from dtrain.training.checkpoint.tensors import (
    Part,
    StoredTensor,
    rank_file,
    read_parts,
    read_whole,
    write_parts,
    write_whole,
)

_FORMAT, _SHARDED_FORMAT = 1, 2
_SAVED = "saved.json"
# The second after a kill between the two renames of a save.
_NAME = re.compile(r"(?:step-(\d{9})|\.step-(\d{9})\.replaced)$")
logger = logging.getLogger("dtrain")


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        tensors: Group to named tensors, such as ``{"model": {...}, "optimizer": {...}, "ema": {...}}``. In a sharded run, a
            checkpoint to save has only the parts that this rank writes. Tensors of a saved checkpoint are read on use.
        state: Everything else, as JSON values.
    """

    tensors: Mapping[str, Mapping[str, Tensor | Part | StoredTensor]]
    state: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that this rank writes."""
        values = [each for named in self.tensors.values() for each in named.values()]
        tensors = [each.values if isinstance(each, Part) else each for each in values]
        return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))

    @property
    def rest(self) -> Rest | None:
        """The parameters that ``checkpoint.only_trained`` left out of the checkpoint; None if it has all parameters.

        Raises:
            ConfigError: If that part of its state is damaged.
        """
        return Rest.from_state(self.state["rest"]) if self.state.get("rest") is not None else None

    def stored(self, group: str) -> Mapping[str, Tensor | StoredTensor]:
        """The tensors of a group, to load them."""
        tensors = self.tensors[group]
        assert not any(isinstance(tensor, Part) for tensor in tensors.values()), "a rank's parts cannot be restored"
        return tensors  # type: ignore[return-value]


class BadCheckpoint(ConfigError):
    """A checkpoint that is incomplete or altered."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: ``<run.dir>/checkpoints``. It need not exist yet.
        keep_last: Number of newest checkpoints to keep.
        best: Metric whose best checkpoint is kept as well; None: no such checkpoint.
        best_mode: ``"max"`` or ``"min"``; None: decided by the metric's name.
        keep_every: Checkpoints whose step is divisible by it are never deleted; None: no such checkpoints.

    Raises:
        ConfigError: If ``keep_last``, ``keep_every`` or ``best_mode`` is impossible, or ``best_mode`` is None and the name of
            ``best`` does not tell the direction.
    """

    def __init__(
        self,
        directory: Path,
        keep_last: int = 2,
        best: str | None = None,
        best_mode: str | None = None,
        keep_every: int | None = None,
    ) -> None:
        if keep_last < 1:
            raise ConfigError(f"checkpoint.keep_last: got {keep_last}, want at least 1.")
        if keep_every is not None and keep_every < 1:
            raise ConfigError(f"checkpoint.keep_every: got {keep_every}, want at least 1, or null.")
        mode = require_direction(best or "eval/loss", best_mode, "checkpoint.best_mode")
        self.directory = directory
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._best = best
        self._sign = 1 if mode == "max" else -1

    @classmethod
    def from_config(cls, run_dir: Path, cfg: CheckpointConfig) -> Checkpoints:
        """The checkpoints in ``run_dir``, with the retention of ``cfg``."""
        return cls(run_dir / "checkpoints", cfg.keep_last, cfg.best, cfg.best_mode, cfg.keep_every)

    @staticmethod
    def check_resume(mode: str) -> None:
        """Refuses an unknown ``run.resume`` with a ``ConfigError``."""
        if mode not in ("auto", "must", "never"):
            raise ConfigError(f"run.resume: got {mode!r}, want auto, must or never.")

    def choose(self, which: str) -> int:
        """Collective. The step of a checkpoint, chosen by name and verified.

        Args:
            which: ``best``, ``latest``, a step; or ``""``: the best if the run keeps one, else the latest.

        Raises:
            ConfigError: On every rank, if there is no such checkpoint, or it is broken; names the existing ones.
        """

        def named() -> list[Any]:
            with as_config_error("run.dir"):
                steps = self.steps()
                step = int(which) if which.isdecimal() else self.best_step() if which in ("", "best") else None
            return [steps, step]

        steps, step = from_rank0(named)
        if which == "latest" or (which == "" and step is None):
            step, problems = self.newest_good()

            def warn() -> None:
                for problem in problems:
                    logger.warning("skipped a broken checkpoint: %s", problem)

            from_rank0(warn)
        elif step in steps:
            self.verify(step)
        if step not in steps:
            raise ConfigError(
                f"checkpoint={which or 'latest'}: {self.directory} has "
                + (f"steps {', '.join(map(str, steps))}" if steps else "none")
                + ". Name one of them, or latest; best needs checkpoint.best=METRIC in the run's config."
            )
        return int(step)

    def steps(self) -> list[int]:
        """Steps of the existing checkpoints, oldest first; not verified."""
        if not self.directory.is_dir():
            return []
        matches = (_NAME.match(entry.name) for entry in self.directory.iterdir())
        return sorted({int(match[1] or match[2]) for match in matches if match})

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        folder = self.directory / f"step-{step:09d}"
        replaced = folder.with_name(f".{folder.name}.replaced")
        return replaced if replaced.exists() and not folder.exists() else folder

    def save(self, step: int, checkpoint: Checkpoint) -> Path:
        """Writes a checkpoint, then deletes those that retention does not keep.

        A checkpoint of a later step is deleted: it was broken, and the run resumed from an earlier one. A checkpoint of the
        same step is replaced: it was saved on a stop request, before the evaluation of that step.

        Args:
            step: Attempted step after which it was taken.
            checkpoint: Tensors on the CPU; ``state["metrics"]`` has the ``best`` metric, if it was evaluated.

        Returns:
            The folder.

        Raises:
            OSError: If it cannot be written; earlier checkpoints are untouched.
        """
        self._tidy()
        _write_folder(self.path(step), checkpoint)
        return self._saved(step)

    # -- sharded: rank 0 calls ``stage``, each rank ``write_rank``, and rank 0 ``complete`` when all have written

    def stage(self, step: int) -> Path:
        """On rank 0: makes the folder in which the ranks write their files of a sharded checkpoint.

        Raises:
            OSError: If it cannot be made.
        """
        self._tidy()
        # A new name for each save: a process of an earlier start may still be writing, on a machine that was lost.
        staged = self.directory / f".step-{step:09d}.{uuid.uuid4().hex}.staged"
        staged.mkdir()
        return staged

    def write_rank(self, staged: Path, checkpoint: Checkpoint, world: World) -> dict[str, Any]:
        """Writes and syncs this rank's file of a sharded checkpoint.

        Args:
            staged: The folder.
            checkpoint: Its tensors are the parts that this rank writes.
            world: The ranks.

        Returns:
            The entry of the manifest.

        Raises:
            OSError: If it cannot be written.
        """
        if not staged.is_dir():
            raise OSError(
                f"{staged} is not on {socket.gethostname()}. All machines must share the file system of run.dir"
            )
        path = staged / rank_file(world.rank, world.size)
        write_parts(path, checkpoint.tensors)  # type: ignore[arg-type]
        fsync_path(path)  # on the machine that wrote it: rank 0 cannot sync another machine's cached writes
        return size_and_hash(path)

    def complete(self, step: int, staged: Path, checkpoint: Checkpoint, entries: Sequence[dict[str, Any]]) -> Path:
        """On rank 0: makes a checkpoint of the files of all ranks; otherwise as ``save``.

        Args:
            step: Attempted step after which it was taken.
            staged: The folder. It is deleted on a failure.
            checkpoint: Rank 0's.
            entries: What ``write_rank`` returned on each rank.

        Raises:
            OSError: If it cannot be written, or the files do not have every value of every tensor.
        """
        ranks = len(entries)
        files = {rank_file(rank, ranks): entry for rank, entry in enumerate(entries)}
        with replace_folder(self.path(step), staged):
            try:
                read_parts([staged / name for name in files])
            except (SafetensorError, ValueError) as error:
                raise OSError(f"{staged}: {error}") from error
            _write_state(staged, step, _SHARDED_FORMAT, checkpoint, ranks, files)
        return self._saved(step)

    def require_visible(self) -> None:
        """On any rank of a sharded run: refuses a directory that rank 0 has made and this machine does not see.

        Raises:
            ConfigError: On such a machine; names it.
        """
        parent = self.directory.parent
        # Listing asks the server; a network file system may answer for a single name from its cache.
        if not parent.is_dir() or self.directory.name not in os.listdir(parent):
            raise ConfigError(
                f"run.dir: {parent} on {socket.gethostname()} is not the one of rank 0. Every rank of a sharded run writes its "
                "part of a checkpoint, so set run.dir to a folder that all machines share."
            )

    def record(self, step: int) -> None:
        """Writes ``saved.json``.

        Args:
            step: Of the last checkpoint that was saved; 0 for a run that has none yet.

        Raises:
            OSError: On a write failure.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with replace_file(self.directory / _SAVED) as file:
            file.write(json.dumps({"step": step}).encode() + b"\n")

    def recorded(self) -> int | None:
        """The step in ``saved.json``; None if the file is missing or damaged."""
        try:
            step = _read_json(self.directory / _SAVED)["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return step if isinstance(step, int) else None

    def verify(self, step: int) -> None:
        """Collective. Compares a checkpoint's files with its manifest, and its step with its name.

        Raises:
            BadCheckpoint: On every rank, if one is missing or differs; names it.
        """

        def folder() -> str:
            with as_config_error("run.dir"):
                return str(self.path(step))

        verify_folder(Path(from_rank0(folder)))

    def newest_good(self) -> tuple[int | None, list[str]]:
        """Collective. Finds the newest whole checkpoint.

        Returns:
            Its step, or None if there is none, and a line for each newer one that is broken.

        Raises:
            ConfigError: On every rank, if the directory cannot be read.
        """

        def existing() -> list[int]:
            with as_config_error("run.dir"):
                return self.steps()

        problems = []
        for step in reversed(from_rank0(existing)):
            try:
                self.verify(step)
            except BadCheckpoint as error:
                problems.append(str(error))
            else:
                return step, problems
        return None, problems

    def load(self, step: int) -> Checkpoint:
        """Reads a checkpoint without verifying checksums; call ``verify`` before.

        Raises:
            BadCheckpoint: If it cannot be read or has an unknown format.
        """
        return read_folder(self.path(step))

    def best_step(self) -> int | None:
        """The step with the best value of the ``best`` metric; None without one. The latest one of equal values."""
        ranked = self._ranked()
        return max(ranked)[1] if ranked else None

    def improved_by(self, metrics: Mapping[str, float]) -> bool:
        """Whether a checkpoint with these metrics would be the best of all existing ones."""
        value = self._value(metrics)
        return value is not None and all(value >= other for other, _ in self._ranked())

    def _ranked(self) -> list[tuple[float, int]]:
        """(value, step) of the checkpoints that have the ``best`` metric; a higher value is better."""
        return [
            (value, step)
            for step in self.steps()
            if (value := self._value(_saved_metrics(self.path(step)))) is not None
        ]

    def _value(self, metrics: Mapping[str, float]) -> float | None:
        """The ``best`` metric, higher is better; None if it is missing or not finite."""
        value = metrics.get(self._best or "")
        return self._sign * value if value is not None and math.isfinite(value) else None

    def _tidy(self) -> None:
        """Before a save: makes the directory, and deletes what a save that was killed has left."""
        self.directory.mkdir(parents=True, exist_ok=True)
        restore_replaced(self.directory)
        for leftover in self.directory.glob(".step-*"):
            remove(leftover)

    def _saved(self, step: int) -> Path:
        """After a save: records it and deletes old checkpoints; returns its folder."""
        self.record(step)
        # Not before: until the new folder is synced and renamed, an old checkpoint may be the only intact one.
        self._delete_old(step)
        return self.path(step)

    def _delete_old(self, saved: int) -> None:
        steps = self.steps()
        keep = retained_steps(steps, saved, self._keep_last, self._keep_every, self.best_step())
        for step in steps:
            if step not in keep:
                # A folder that cannot be deleted costs disk space; it is no reason to end the run.
                remove(self.path(step))


def verify_folder(folder: Path) -> None:
    """Collective. Compares the size and SHA-256 of each file of a checkpoint with its manifest, and its content with its name.

    Rank 0 reads the manifest and ``state.json``. The ranks divide the other files of a sharded checkpoint among them.

    Raises:
        BadCheckpoint: On every rank, if a file is missing or differs, names it; or if the folder was saved as a different step.
        ConfigError: On every rank, if the checkpoint is sharded and a machine does not see it.
    """
    listed = from_rank0(lambda: _listed(folder))
    problem = listed["problem"]
    if problem is None:
        damaged = first_damaged(folder, listed["files"], divided=listed["sharded"])
        problem = f"{folder}: {damaged}" if damaged is not None else None
    if problem is not None:
        raise BadCheckpoint(problem)


def read_folder(folder: Path) -> Checkpoint:
    """Reads the checkpoint in a folder of any name, without verifying checksums.

    Raises:
        BadCheckpoint: If it cannot be read, has an unknown format, or lacks a part of a tensor; names these tensors.
    """
    state = _state(folder)
    version = state.get("format")
    if version not in (_FORMAT, _SHARDED_FORMAT):
        raise BadCheckpoint(
            f"{folder} has format {version!r}, this version of dtrain reads {_FORMAT} and {_SHARDED_FORMAT}."
        )
    try:
        if version == _SHARDED_FORMAT:
            parts = read_parts([folder / name for name in _tensor_files(folder, state)])
            # A group without tensors, such as the state of SGD without momentum, has no part in any file.
            empty: dict[str, dict[str, StoredTensor]] = {str(name): {} for name in state["tensors"]}
            return Checkpoint(empty | parts, state)
        paths = [folder / name for name in _manifest(folder) if name.endswith(".safetensors")]
        return Checkpoint({path.stem: read_whole(path) for path in paths}, state)
    except (OSError, SafetensorError, ValueError) as error:
        raise BadCheckpoint(f"{folder} cannot be read: {error}") from error


def _write_folder(folder: Path, checkpoint: Checkpoint) -> None:
    with replace_folder(folder) as staged:
        for name, tensors in checkpoint.tensors.items():
            write_whole(staged / f"{name}.safetensors", tensors)  # type: ignore[arg-type]
        _write_state(staged, _step_of(folder), _FORMAT, checkpoint)


def _write_state(
    staged: Path,
    step: int | None,
    version: int,
    checkpoint: Checkpoint,
    ranks: int = 0,
    files: Mapping[str, Any] | None = None,
) -> None:
    """Writes state.json and then the manifest; ``files`` has the entries of files whose hashes are known."""
    content = {"step": step, "tensors": sorted(checkpoint.tensors)} | ({"ranks": ranks} if ranks else {})
    (staged / "state.json").write_text(json.dumps({"format": version, **checkpoint.state, **content}, indent=1))
    known = files or {}
    others = sorted(path for path in staged.iterdir() if path.name not in known)
    manifest = {**known, **{path.name: size_and_hash(path) for path in others}}
    (staged / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _listed(folder: Path) -> dict[str, Any]:
    """Verifies the manifest, the state and the name of a checkpoint: the problem with them, else the files that are left."""
    try:
        files = _manifest(folder)
        try:
            compare(folder / "state.json", files.pop("state.json"))
        except (OSError, ValueError) as error:
            raise BadCheckpoint(f"{folder}: state.json {error}") from error
        state = _state(folder)
        for name in _tensor_files(folder, state):
            if name not in files:
                raise BadCheckpoint(f"{folder}: {MANIFEST} lacks {name}, which was saved with this checkpoint")
        step, saved = _step_of(folder), state.get("step")
        if None not in (step, saved) and step != saved:
            raise BadCheckpoint(
                f"{folder} has the checkpoint of step {saved}. Delete it, or rename it to step-{saved:09d}"
            )
    except BadCheckpoint as error:
        return {"problem": str(error)}
    return {"problem": None, "files": files, "sharded": state.get("format") == _SHARDED_FORMAT}


def _tensor_files(folder: Path, state: Mapping[str, Any]) -> list[str]:
    """Names of the files with tensors that a checkpoint was saved with."""
    ranks, groups = state.get("ranks", 0), state.get("tensors")
    if not isinstance(ranks, int) or not isinstance(groups, list):
        raise BadCheckpoint(f"{folder}: state.json does not list the files of the checkpoint")
    if state.get("format") == _SHARDED_FORMAT:
        return [rank_file(rank, ranks) for rank in range(ranks)]
    return [f"{name}.safetensors" for name in groups]


def _saved_metrics(folder: Path) -> Mapping[str, float]:
    """The metrics that a checkpoint was saved with; empty if its state.json is damaged."""
    path = folder / "state.json"
    try:
        # Verified, since one flipped digit could make a "best" checkpoint that no later one ever surpasses.
        compare(path, _manifest(folder)[path.name])
        metrics: Mapping[str, float] = _state(folder)["metrics"]
    except (OSError, ValueError, KeyError):
        return {}
    return metrics


def _manifest(folder: Path) -> Manifest:
    try:
        return read_manifest(folder)
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{folder}: {MANIFEST} cannot be read ({error})") from error


def _state(folder: Path) -> dict[str, Any]:
    try:
        state = _read_json(folder / "state.json")
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{folder}: state.json cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise BadCheckpoint(f"{folder}: state.json does not hold a state")
    return state


def _read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        OSError, ValueError: If it cannot be read or is not JSON.
    """
    with open_regular(path) as file:
        try:
            return json.loads(file.read())
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


def _step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None if it is not such a name."""
    match = _NAME.match(folder.name)
    return int(match[1] or match[2]) if match else None
