"""A dataset while it is packed: interrupted commands resume, and shards appear only when all of them are written.

* The *plan* is everything that determines the bytes of the shards: sources, seed, shard sizes. It is stored before the
  first shard is written.
* The *staging folder* is the hidden folder ``.packing`` in the destination. Each shard is written there together with its
  index. A command with the same plan resumes there; a command with a different plan is refused with the differences.
* *Publishing* moves the shards and indexes from the staging folder to the destination. A marker file is written before
  the first move, so that an interrupted move is completed by the next command.
* The *record* ``.packed.json`` in the destination holds, for the plan of each finished command, the sizes of its shards. It
  is written last. The same command, given again, thereby finds its shards finished.
"""

from __future__ import annotations

import errno
import hashlib
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

from dtrain.console import OnProgress
from dtrain.data.shards.shard_index import load_or_build
from dtrain.data.writer import RowBlock, Sample, check_prefix, refuse_mixing, shard_name, write_shard
from dtrain.files import fsync_path, replace_file, try_lock
from dtrain.pack.pool import run_jobs

_FOLDER, _PLAN, _LOCK, _PUBLISHING = ".packing", "plan.json", "lock", "publishing"
_OWN_FILES = (_PLAN, _LOCK, _PUBLISHING)
_RECORD = ".packed.json"
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_FORMAT = 1

#: Called with a file that cannot be packed and the reason; raises, or returns if the file is to be skipped.
OnBadFile = Callable[[Path, str], None]
#: Reads the samples of one shard: ``reader(on_bad_file)``. Picklable.
SampleProducer = Callable[[OnBadFile], Iterable[Sample | RowBlock]]


class BadFile(ValueError):
    """A file cannot be packed, and ``--bad skip`` was not given."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(path, reason)  # all arguments, so that the exception can be pickled

    def __str__(self) -> str:
        path, reason = self.args
        return f"{path}: {reason}. Remove the file, or skip and list such files with --bad skip."


@dataclass
class Written:
    """Result of writing one split.

    Attributes:
        shards: Number of shards.
        samples: Number of samples in all shards.
        skipped: Number of bad files that were skipped, also by interrupted commands.
    """

    shards: int = 0
    samples: int = 0
    skipped: int = 0


@dataclass
class StagedDataset:
    """The dataset in the staging folder; ``staged`` makes it.

    Attributes:
        folder: The staging folder.
        destination: Folder of the finished dataset.
        skipped: Number of bad files that were skipped, in all splits written.
    """

    folder: Path
    destination: Path
    skipped: int = 0
    _shards: list[str] = field(default_factory=list)

    def write(
        self,
        prefix: str,
        bounds: np.ndarray,
        make_producer: Callable[[int, int], SampleProducer],
        processes: int,
        on_progress: OnProgress,
        on_skip: Callable[[str], None],
        skip_bad: bool = False,
    ) -> Written:
        """Writes the shards of one split that are not written yet.

        Args:
            prefix: Name of the split.
            bounds: First sample of each shard and the number of samples, int64, shape ``[shards + 1]``.
            make_producer: ``make_producer(start, stop)`` returns the reader of the samples ``start`` to ``stop`` of the split.
            processes: Number of processes that write.
            on_progress: Called with the number of samples done since the last call.
            on_skip: Called with a line of text for each file that is skipped.
            skip_bad: Skip bad files instead of raising ``BadFile``.

        Raises:
            BadFile: If a file is bad and ``skip_bad`` is False.
            ValueError: If a sample cannot be stored; names its key.
            OSError: If a file cannot be read, or the disk is full.
        """
        names = [shard_name(prefix, number) for number in range(len(bounds) - 1)]
        ranges = dict(zip(names, zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True), strict=True))
        missing = [name for name in names if self._find_shard(name) is None]
        on_progress(sum(ranges[name][1] - ranges[name][0] for name in set(names) - set(missing)))
        jobs = (partial(_write, self.folder / name, make_producer(*ranges[name]), skip_bad) for name in missing)
        with _disk_full_explained(self.destination):
            for skipped in run_jobs(jobs, min(processes, max(len(missing), 1)), on_progress):
                for line in skipped:
                    on_skip(line)
        self._shards.extend(names)
        samples = sum(load_or_build(str(self._find_shard(name))).num_samples for name in names)
        written = Written(len(names), samples, int(bounds[-1]) - samples)
        self.skipped += written.skipped
        return written

    def compute(
        self, jobs: Mapping[str, Callable[[BinaryIO, OnProgress], None]], processes: int, on_progress: OnProgress
    ) -> list[Path]:
        """Writes intermediate files that do not exist yet.

        Args:
            jobs: File name to the job that writes its content: ``job(file, on_progress)``. Picklable.
            processes: Number of processes.
            on_progress: Called with the amounts that the jobs report.

        Returns:
            The paths of the files, in the order of ``jobs``.
        """
        paths = [self.folder / name for name in jobs]
        missing = [
            partial(_compute, path, job) for path, job in zip(paths, jobs.values(), strict=True) if not path.exists()
        ]
        with _disk_full_explained(self.destination):
            for _ in run_jobs(missing, min(processes, max(len(missing), 1)), on_progress):
                pass
        return paths

    def publish(self, extra_files: Mapping[str, bytes]) -> None:
        """Moves the shards to the destination and writes further files next to them.

        Args:
            extra_files: File name to content.

        Raises:
            FileExistsError: If shards of the same names have appeared in the destination since the command started.
        """
        publishing = self.folder / _PUBLISHING
        if not publishing.exists():
            for prefix in sorted({name.rpartition("-")[0] for name in self._shards}):
                refuse_mixing(self.destination, prefix)
        with replace_file(publishing):
            pass
        for name, content in extra_files.items():
            with replace_file(self.destination / name) as file:
                file.write(content)
        for name in self._shards:
            staged_path, final_path = self.folder / name, self.destination / name
            if staged_path.exists():
                # The index first: an index without its shard is ignored; a shard without its index would be indexed again.
                if os.path.exists(f"{staged_path}.idx"):
                    os.replace(f"{staged_path}.idx", f"{final_path}.idx")
                os.replace(staged_path, final_path)
        fsync_path(self.destination)

    def record(self, plan: Mapping[str, Any]) -> None:
        """Stores in the destination that a command with this plan has published the shards."""
        sizes = {name: (self.destination / name).stat().st_size for name in self._shards}
        # Without records of other shards that had these names.
        records = {
            it: record for it, record in _records(self.destination).items() if not sizes.keys() & record["shards"]
        }
        records[_digest(plan)] = {"shards": sizes, "skipped": self.skipped}
        with replace_file(self.destination / _RECORD) as file:
            file.write(json.dumps(records).encode() + b"\n")

    def _find_shard(self, name: str) -> Path | None:
        """Path of a finished shard; None if it is not written yet."""
        staged_path, final_path = self.folder / name, self.destination / name
        if staged_path.exists():
            return staged_path
        return final_path if (self.folder / _PUBLISHING).exists() and final_path.exists() else None


@contextmanager
def staged(destination: Path, prefixes: Iterable[str], plan: Mapping[str, Any]) -> Iterator[StagedDataset]:
    """Opens the staging folder of a plan, new, or left by an interrupted command.

    The folder is removed when the block ends without an error, when the error is a mistake in the command, and when it
    holds no finished file.

    Args:
        destination: Folder of the dataset; created if missing.
        prefixes: Names of the splits.
        plan: Everything that determines the bytes of the shards; values that JSON can store.

    Raises:
        FileExistsError: If the destination has shards of these names, the staging folder belongs to a different plan, or
            another process packs into the same destination.
    """
    for prefix in prefixes:
        check_prefix(prefix)
    folder = destination / _FOLDER
    if not (folder / _PUBLISHING).exists():
        for prefix in prefixes:
            refuse_mixing(destination, prefix)
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _LOCK, "ab") as lock:
        _acquire(lock, destination)
        _store_or_compare_plan(folder, plan)
        dataset = StagedDataset(folder, destination)
        try:
            yield dataset
        except BaseException as error:
            # After a mistake in the command the user changes the command, so its plan is of no use. A bad file is removed by
            # the user, and the same plan continues.
            wrong_plan = isinstance(error, ValueError) and not isinstance(error, BadFile)
            if wrong_plan or all(path.name.startswith(".") or path.name in _OWN_FILES for path in folder.iterdir()):
                _remove(folder)
            raise
        if (folder / _PUBLISHING).exists():
            dataset.record(plan)
        _remove(folder)


def is_finished(destination: Path, plan: Mapping[str, Any], skip_bad: bool) -> bool:
    """Whether a command with this plan has finished, and all of its shards still have their sizes.

    Removes the staging folder if that command was killed while it removed it.

    Args:
        destination: Folder of the dataset.
        plan: As for ``staged``.
        skip_bad: Whether a command that skipped bad files counts.

    Raises:
        FileExistsError: If the staging folder belongs to a different plan, or another process packs into the same destination.
    """
    record = _records(destination).get(_digest(plan))
    if record is None or (record["skipped"] and not skip_bad):
        return False
    paths = {destination / name: size for name, size in record["shards"].items()}
    if not all(path.is_file() and path.stat().st_size == size for path, size in paths.items()):
        return False
    folder = destination / _FOLDER
    if folder.exists():
        with open(folder / _LOCK, "ab") as lock:
            _acquire(lock, destination)
            _store_or_compare_plan(folder, plan)
            _remove(folder)
    return True


def _records(destination: Path) -> dict[str, Any]:
    path = destination / _RECORD
    return dict(json.loads(path.read_bytes())) if path.exists() else {}


def _digest(plan: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps({"format": _FORMAT, **plan}, sort_keys=True).encode()).hexdigest()


def is_published(destination: Path, file: str) -> bool:
    """Whether a command has finished that writes this file next to its shards."""
    return (destination / file).exists() and not (destination / _FOLDER / _PUBLISHING).exists()


def _acquire(lock: BinaryIO, destination: Path) -> None:
    if not try_lock(lock):
        raise FileExistsError(f"{destination}: another process packs into this folder. Wait until it ends, or stop it.")


def _store_or_compare_plan(folder: Path, plan: Mapping[str, Any]) -> None:
    path = folder / _PLAN
    new = json.loads(json.dumps({"format": _FORMAT, **plan}))
    if not path.exists():
        with replace_file(path) as file:
            file.write(json.dumps(new, indent=1).encode() + b"\n")
        return
    stored = json.loads(path.read_bytes())
    keys = [key for key in {**stored, **new} if stored.get(key) != new.get(key)]
    if keys:
        differences = ", ".join(f"{key} was {stored.get(key)!r} and is {new.get(key)!r}" for key in keys)
        raise FileExistsError(
            f"{folder} belongs to an interrupted command with other sources or options: {differences}. Repeat that "
            "command, or delete this folder."
        )


def _remove(folder: Path) -> None:
    # The plan is removed last: if the removal is interrupted, it still identifies the command of the other files.
    for path in folder.iterdir():
        if path.name not in _OWN_FILES:
            path.unlink()
    shutil.rmtree(folder)


@contextmanager
def _disk_full_explained(destination: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise OSError(
            f"{destination}: the disk is full ({error.strerror}). Free some space and repeat the command: finished shards "
            "are kept."
        ) from error


def _write(path: Path, reader: SampleProducer, skip_bad: bool, on_progress: OnProgress) -> list[str]:
    """Writes and indexes one shard; returns a line of text for each skipped file."""
    skipped: list[str] = []

    def on_bad_file(file: Path, reason: str) -> None:
        if not skip_bad:
            raise BadFile(file, reason)
        skipped.append(f"skipped {file}: {reason}")
        on_progress(1)

    write_shard(path, _counted(reader(on_bad_file), on_progress))
    load_or_build(str(path))
    return skipped


def _counted(samples: Iterable[Sample | RowBlock], on_progress: OnProgress) -> Iterator[Sample | RowBlock]:
    for sample in samples:
        yield sample
        on_progress(len(sample.values) if isinstance(sample, RowBlock) else 1)


def _compute(path: Path, job: Callable[[BinaryIO, OnProgress], None], on_progress: OnProgress) -> None:
    with replace_file(path) as file:
        job(file, on_progress)
