"""Checkpoint folders: their format, their verification, the choice of one to resume from, and retention.

* A *checkpoint* is a folder ``step-000000050`` with safetensors files, ``state.json`` and ``manifest.json``. The manifest has
  the size and SHA-256 of each of the other files. Nothing is pickled.
* A checkpoint is *whole or absent*: its folder is staged, synced and renamed. A disk may still lose data in a power cut, so
  reading verifies the manifest and falls back to the previous checkpoint.
* *Retention* deletes an old checkpoint only after the new one is safe on disk.
* ``saved.json`` has the step of the last save, 0 before the first one. Without any checkpoint it tells a run that was killed
  before its first save from one whose checkpoints were lost.
* Only regular files (and links to them) are read, and only if they have the size that the manifest says: a checkpoint may
  come from somebody else.

Rank 0 writes, and chooses the checkpoint to read. Every rank reads it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor

from dtrain.config.errors import ConfigError
from dtrain.config.schema import CheckpointConfig
from dtrain.distributed.atomic import open_regular, remove, replace_file, replace_folder, restore_replaced

_FORMAT = 1
_SAVED = "saved.json"
_MOST_MANIFEST = 2**20  # bytes; a manifest has a few hundred
# The second after a kill between the two renames of a save.
_NAME = re.compile(r"(?:step-(\d{9})|\.step-(\d{9})\.replaced)$")
logger = logging.getLogger("dtrain")


@dataclass(frozen=True)
class Checkpoint:
    """The content of a checkpoint.

    Attributes:
        tensors: File stem to named tensors, such as ``{"model": {...}, "optimizer": {...}, "ema": {...}}``.
        state: Everything else, as JSON values.
    """

    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


class BadCheckpoint(ConfigError):
    """A checkpoint that is incomplete or altered."""


class Checkpoints:
    """The checkpoints of one run.

    Args:
        directory: ``<run.dir>/checkpoints``. It need not exist yet.
        keep_last: Number of newest checkpoints to keep.
        best: Metric whose best checkpoint is kept as well; None: no such checkpoint.
        best_mode: ``"max"`` or ``"min"``.
        keep_every: Checkpoints whose step is divisible by it are never deleted; None: no such checkpoints.

    Raises:
        ConfigError: If ``keep_last``, ``keep_every`` or ``best_mode`` is impossible.
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
            raise ConfigError(f"checkpoint.keep_last: got {keep_last}, want at least 1.")
        if keep_every is not None and keep_every < 1:
            raise ConfigError(f"checkpoint.keep_every: got {keep_every}, want at least 1, or null.")
        if best_mode not in ("max", "min"):
            raise ConfigError(f"checkpoint.best_mode: got {best_mode!r}, want max or min.")
        self.directory = directory
        self._keep_last = keep_last
        self._keep_every = keep_every
        self._best = best
        self._sign = 1 if best_mode == "max" else -1

    @classmethod
    def of(cls, run_dir: Path, cfg: CheckpointConfig) -> Checkpoints:
        """The checkpoints in ``run_dir``, with the retention of ``cfg``."""
        return cls(run_dir / "checkpoints", cfg.keep_last, cfg.best, cfg.best_mode, cfg.keep_every)

    @staticmethod
    def check_resume(mode: str) -> None:
        """Refuses an unknown ``run.resume`` with a ``ConfigError``."""
        if mode not in ("auto", "must", "never"):
            raise ConfigError(f"run.resume: got {mode!r}, want auto, must or never.")

    def choose(self, which: str) -> int:
        """The step of a checkpoint, chosen by name and verified.

        Args:
            which: ``best``, ``latest``, a step; or ``""``: the best if the run keeps one, else the latest.

        Raises:
            ConfigError: If there is no such checkpoint, or it is broken; names the existing ones.
        """
        steps = self.steps()
        step = int(which) if which.isdecimal() else self.best_step() if which in ("", "best") else None
        if which == "latest" or (which == "" and step is None):
            step, problems = self.newest_good()
            for problem in problems:
                logger.warning("skipped a broken checkpoint: %s", problem)
        if step not in steps:
            raise ConfigError(
                f"checkpoint={which or 'latest'}: {self.directory} has "
                + (f"steps {', '.join(map(str, steps))}" if steps else "none")
                + ". Name one of them, or latest; best needs checkpoint.best=METRIC in the run's config."
            )
        self.verify(step)
        return step

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
        self.directory.mkdir(parents=True, exist_ok=True)
        restore_replaced(self.directory)
        # Unfinished folders of a save that was killed.
        for leftover in self.directory.glob(".step-*"):
            remove(leftover)
        target = self.path(step)
        _write_folder(target, checkpoint)
        self.record(step)
        # Not before: until the new folder is synced and renamed, an old checkpoint may be the only intact one.
        self._delete_old(step)
        return target

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
        """The step in ``saved.json``; None if the file is missing or damaged, as in a run of an earlier version."""
        try:
            step = _read_json(self.directory / _SAVED)["step"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return step if isinstance(step, int) else None

    def verify(self, step: int) -> None:
        """Compares a checkpoint's files with its manifest, and its step with its name.

        Raises:
            BadCheckpoint: If one is missing or differs; names it.
        """
        verify_folder(self.path(step))

    def newest_good(self) -> tuple[int | None, list[str]]:
        """Finds the newest whole checkpoint.

        Returns:
            Its step, or None if there is none, and a line for each newer one that is broken.
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
        """Reads a checkpoint without verifying checksums; call ``verify`` on one rank before.

        Raises:
            BadCheckpoint: If it cannot be read or is of another format.
        """
        return _read_folder(self.path(step))

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

    def _delete_old(self, saved: int) -> None:
        steps = self.steps()
        keep = {self.best_step(), *[step for step in steps if step <= saved][-self._keep_last :]}
        if self._keep_every is not None:
            keep.update(step for step in steps if step % self._keep_every == 0)
        for step in steps:
            if step > saved or step not in keep:
                # A folder that cannot be deleted costs disk space; it is no reason to end the run.
                remove(self.path(step))


def verify_folder(folder: Path) -> None:
    """Compares the size and SHA-256 of each file of a checkpoint with its manifest, and its content with its name.

    Raises:
        BadCheckpoint: If a file is missing or differs, names it; or if the folder was saved as another step.
    """
    manifest = _manifest(folder)
    for name, expected in manifest.items():
        try:
            _compare(folder / name, expected)
        except (OSError, ValueError) as error:
            raise BadCheckpoint(f"{folder}: {name} {error}") from error
    state = _state(folder)
    # Checkpoints of earlier versions have neither entry.
    for name in state.get("tensors", ("model", "optimizer")):
        if f"{name}.safetensors" not in manifest:
            raise BadCheckpoint(
                f"{folder}: manifest.json lacks {name}.safetensors, which was saved with this checkpoint"
            )
    step, counters = _step_of(folder), state.get("counters", {})
    saved = state.get("step", counters.get("step") if isinstance(counters, Mapping) else None)
    if None not in (step, saved) and step != saved:
        raise BadCheckpoint(f"{folder} has the checkpoint of step {saved}. Delete it, or rename it to step-{saved:09d}")


def contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors in the layout that safetensors requires.

    Call it where nothing waits, such as in the thread that writes: for weights in channels_last it takes as long as the copy to
    the host.
    """
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _write_folder(folder: Path, checkpoint: Checkpoint) -> None:
    with replace_folder(folder) as staged:
        for name, tensors in checkpoint.tensors.items():
            _write_tensors(staged / f"{name}.safetensors", tensors)
        content = {"step": _step_of(folder), "tensors": sorted(checkpoint.tensors)}
        (staged / "state.json").write_text(json.dumps({"format": _FORMAT, **checkpoint.state, **content}, indent=1))
        manifest = {path.name: _size_and_hash(path) for path in sorted(staged.iterdir())}
        (staged / "manifest.json").write_text(json.dumps(manifest, indent=1))


def _read_folder(folder: Path) -> Checkpoint:
    state = _state(folder)
    try:
        files = [folder / name for name in _manifest(folder) if name.endswith(".safetensors")]
        tensors = {file.stem: safetensors.torch.load_file(file) for file in files}
    except (OSError, SafetensorError) as error:
        raise BadCheckpoint(f"{folder} cannot be read: {error}") from error
    if state.get("format") != _FORMAT:
        raise BadCheckpoint(f"{folder} has format {state.get('format')!r}, this version of dtrain reads {_FORMAT}.")
    return Checkpoint(tensors, state)


def _saved_metrics(folder: Path) -> Mapping[str, float]:
    """The metrics that a checkpoint was saved with; empty if its state.json is damaged."""
    path = folder / "state.json"
    try:
        # Verified, since one flipped digit could make a "best" checkpoint that no later one ever surpasses.
        _compare(path, _manifest(folder)[path.name])
        metrics: Mapping[str, float] = _state(folder)["metrics"]
    except (OSError, ValueError, KeyError):
        return {}
    return metrics


def _manifest(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        manifest = _read_json(folder / "manifest.json", _MOST_MANIFEST)
        if not isinstance(manifest, dict) or "state.json" not in manifest:
            raise ValueError("it lists no state.json")
        for name, expected in manifest.items():
            if Path(name).name != name or not isinstance(expected, dict) or set(expected) != {"size", "sha256"}:
                raise ValueError(f"it lists {name!r} as {expected!r}, want the name, size and sha256 of a file")
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{folder}: manifest.json cannot be read ({error})") from error
    return manifest


def _state(folder: Path) -> dict[str, Any]:
    try:
        state = _read_json(folder / "state.json")
    except (OSError, ValueError) as error:
        raise BadCheckpoint(f"{folder}: state.json cannot be read ({error})") from error
    if not isinstance(state, dict):
        raise BadCheckpoint(f"{folder}: state.json does not hold a state")
    return state


def _read_json(path: Path, most: int | None = None) -> Any:
    """The content of a JSON file of at most ``most`` bytes.

    Raises:
        OSError, ValueError: If it cannot be read, is larger, or is not JSON.
    """
    with open_regular(path) as file:
        if most is not None and os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"it has more than {most:,} bytes")
        try:
            return json.loads(file.read())
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error


def _step_of(folder: Path) -> int | None:
    """The step in the name of a checkpoint's folder; None if it has another name."""
    match = _NAME.match(folder.name)
    return int(match[1] or match[2]) if match else None


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        safetensors.torch.save_file(contiguous(tensors), path)
    except SafetensorError as error:  # raised instead of OSError, also for a full disk
        raise OSError(f"{path}: {error}") from error


def _compare(path: Path, expected: Mapping[str, Any]) -> None:
    """Raises a ``ValueError`` if a file has another size or content than the manifest says."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    if size != expected["size"]:  # before reading it, which would take long for a file of any size
        raise ValueError(f"has {size} bytes, the manifest says {expected['size']}")
    if (found := _size_and_hash(path)) != expected:
        short = [str(entry["sha256"])[:12] for entry in (found, expected)]
        raise ValueError(f"has changed since it was saved: SHA-256 {short[0]}..., the manifest says {short[1]}...")


def _size_and_hash(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(1 << 20):
            digest.update(block)
        return {"size": file.tell(), "sha256": digest.hexdigest()}
