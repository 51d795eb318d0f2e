"""A data set while it is packed: all of it appears, or none; what a killed process had finished is not done again.

* The *plan* is what decides the shards' bytes: sources, seed, sizes. It is written down before the first shard.
* Shards are finished one by one in a hidden folder of the destination, each with its index. The same plan continues
  there; another one is refused with the difference.
* When all are finished they are *published*: moved out, indexes with them. The folder says so from before the first move,
  so that a killed move is continued too.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dtrain.data.index_store import load_or_build
from dtrain.data.writer import Sample, check_prefix, refuse_mixing, shard_name, sync_folder, write_shard
from dtrain.packing.workers import Tick, run
from dtrain.tracking.atomic import replacing

_FOLDER, _PLAN, _LOCK, _PUBLISHING = ".packing", "plan.json", "lock", "publishing"
_OWN = (_PLAN, _LOCK, _PUBLISHING)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORMAT = 1

#: Makes the samples of a shard: ``make(leave_out)``. It can be pickled; a file that is bad goes to ``leave_out(file,
#: reason)``, which raises or returns.
Make = Callable[[Callable[[Path, str], None]], Iterable[Sample]]


class BadFile(ValueError):
    """A file cannot be packed, and is not to be left out."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)  # so that it can come from another process

    def __str__(self) -> str:
        path, reason = self.args
        return f"{path}: {reason}. Remove it, or list such files and leave them out with --bad skip."


@dataclass
class Written:
    """What became of a split.

    Attributes:
        shards: How many there are.
        samples: In all of them.
        left_out: Files that were bad, over all attempts.
    """

    shards: int = 0
    samples: int = 0
    left_out: int = 0


@dataclass(frozen=True)
class Unfinished:
    """The hidden folder; made by ``unfinished``."""

    folder: Path
    destination: Path
    _shards: list[str] = field(default_factory=list)

    def write(
        self,
        prefix: str,
        cut: np.ndarray,
        make: Callable[[int, int], Make],
        processes: int,
        tick: Tick,
        tell: Callable[[str], None],
        skip_bad: bool = False,
    ) -> Written:
        """Writes the shards of a split that are not finished.

        Args:
            prefix: Name of the split.
            cut: Where its shards begin, int64 ``[shards + 1]``.
            make: ``make(start, stop)``: the samples of one of them.
            processes: How many write at a time.
            tick: Told how many samples were done.
            tell: Told of each file that is left out.
            skip_bad: Leave out files that are bad.

        Raises:
            BadFile: If a file is bad, and they are not left out.
            ValueError: If a sample cannot be stored; names its key.
            OSError: If a file cannot be read, or the disk is full.
        """
        names = [shard_name(prefix, number) for number in range(len(cut) - 1)]
        spans = dict(zip(names, zip(cut[:-1].tolist(), cut[1:].tolist(), strict=True), strict=True))
        missing = [name for name in names if self._finished(name) is None]
        tick(sum(spans[name][1] - spans[name][0] for name in set(names) - set(missing)))
        jobs = (partial(_write, self.folder / name, make(*spans[name]), skip_bad) for name in missing)
        with _space(self.destination):
            for left_out in run(jobs, min(processes, max(len(missing), 1)), tick):
                for line in left_out:
                    tell(line)
        self._shards.extend(names)
        samples = sum(load_or_build(str(self._finished(name))).num_samples for name in names)
        return Written(len(names), samples, int(cut[-1]) - samples)

    def compute(self, jobs: Mapping[str, Callable[[Path, Tick], None]], processes: int, tick: Tick) -> list[Path]:
        """Files that are needed on the way, made once.

        Args:
            jobs: Name of each file, and what writes it; can be pickled.
            processes: How many work at a time.
            tick: Told what the jobs tell.

        Returns:
            The files, in the order of ``jobs``.
        """
        paths = [self.folder / name for name in jobs]
        missing = [
            partial(_compute, path, job) for path, job in zip(paths, jobs.values(), strict=True) if not path.exists()
        ]
        with _space(self.destination):
            for _ in run(missing, min(processes, max(len(missing), 1)), tick):
                pass
        return paths

    def publish(self, beside: Mapping[str, bytes]) -> None:
        """Moves the shards out, and writes what belongs beside them.

        Args:
            beside: Name to content.

        Raises:
            FileExistsError: If shards of these names have appeared there meanwhile.
        """
        publishing = self.folder / _PUBLISHING
        if not publishing.exists():
            for prefix in sorted({name.rpartition("-")[0] for name in self._shards}):
                refuse_mixing(self.destination, prefix)
        for name, content in beside.items():
            with replacing(self.destination / name) as file:
                file.write(content)
        with replacing(publishing):
            pass
        for name in self._shards:
            staged, place = self.folder / name, self.destination / name
            if staged.exists():
                # The index first: one alone disturbs nobody, a shard without would be walked by whoever finds it.
                if os.path.exists(f"{staged}.idx"):
                    os.replace(f"{staged}.idx", f"{place}.idx")
                os.replace(staged, place)
        sync_folder(self.destination)

    def _finished(self, name: str) -> Path | None:
        """Where a shard is; None if it is not finished."""
        staged, moved = self.folder / name, self.destination / name
        if staged.exists():
            return staged
        return moved if (self.folder / _PUBLISHING).exists() and moved.exists() else None


@contextmanager
def unfinished(destination: Path, prefixes: Iterable[str], plan: Mapping[str, Any]) -> Iterator[Unfinished]:
    """The place where a plan is carried out, new or continued. Removed when the block ends well, or has finished nothing.

    Args:
        destination: Folder of the data set; made if missing.
        prefixes: Names of its splits.
        plan: What decides the shards' bytes, as JSON knows it.

    Raises:
        FileExistsError: If the folder has shards of these names, another plan is unfinished there, or another process is
            at it.
    """
    for prefix in prefixes:
        check_prefix(prefix)
    folder = destination / _FOLDER
    if not (folder / _PUBLISHING).exists():
        for prefix in prefixes:
            refuse_mixing(destination, prefix)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK, "ab") as lock:
        _take(lock, destination)
        _agree(folder, {"format": _FORMAT, **plan})
        try:
            yield Unfinished(folder, destination)
        except BaseException as error:
            # A mistake in the command, unlike a bad file, takes another plan to mend.
            wrong = isinstance(error, ValueError) and not isinstance(error, BadFile)
            if wrong or all(path.name.startswith(".") or path.name in _OWN for path in folder.iterdir()):
                _remove(folder)
            raise
        _remove(folder)


def _take(lock: BinaryIO, destination: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise FileExistsError(f"{destination}: another process is packing there. Wait for it, or stop it.") from None


def _agree(folder: Path, plan: Mapping[str, Any]) -> None:
    """Writes the plan down, or compares it with the one that is there."""
    path = folder / _PLAN
    mine = json.loads(json.dumps(plan))
    if not path.exists():
        with replacing(path) as file:
            file.write(json.dumps(mine, indent=1).encode() + b"\n")
        return
    begun = json.loads(path.read_bytes())
    keys = [key for key in {**begun, **mine} if begun.get(key) != mine.get(key)]
    if keys:
        differences = ", ".join(f"{key} was {begun.get(key)!r} and is {mine.get(key)!r}" for key in keys)
        raise FileExistsError(
            f"{folder} has what was packed of another plan: {differences}. Repeat the command that began it, or delete that "
            "folder."
        )


def _remove(folder: Path) -> None:
    # The plan last: what a killed removal leaves must be known for what it is.
    for path in folder.iterdir():
        if path.name not in _OWN:
            path.unlink()
    shutil.rmtree(folder)


@contextmanager
def _space(destination: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise OSError(
            f"{destination}: the disk is full ({error.strerror}). Make room and repeat the command: the shards that are "
            "finished are kept."
        ) from error


def _write(path: Path, make: Make, skip_bad: bool, tick: Tick) -> list[str]:
    left_out: list[str] = []

    def leave_out(file: Path, reason: str) -> None:
        if not skip_bad:
            raise BadFile(file, reason)
        left_out.append(f"left out {file}: {reason}")
        tick(1)

    write_shard(path, _ticking(make(leave_out), tick))
    load_or_build(str(path))
    return left_out


def _ticking(samples: Iterable[Sample], tick: Tick) -> Iterator[Sample]:
    for sample in samples:
        yield sample
        tick(1)


def _compute(path: Path, job: Callable[[Path, Tick], None], tick: Tick) -> None:
    aside = path.with_name(f".{path.name}.aside")
    try:
        job(aside, tick)
        with open(aside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)
