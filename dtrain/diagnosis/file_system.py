"""How fast the disks are where a run reads its shards and writes its checkpoints.

* *Cold* reads are asked for after the system was told to forget what it holds of the file (``posix_fadvise``); *warm* ones
  come again at once. Where nothing is forgotten, as in a file system in memory, both are alike.
* A write counts as done when ``fsync`` returns. Its file has no name, so nothing is left behind however this ends.

Every measure ends after some bytes or some seconds, whichever comes first.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_BLOCK = 2**20
_READ_AT_MOST, _WRITE_AT_MOST = 256 * 2**20, 256 * 2**20
_SHARDS, _SEEKS = 16, 128
#: Less says how long a call takes, not how fast the disk is.
ENOUGH_TO_TELL = 4 * 2**20


@dataclass(frozen=True)
class ReadSpeed:
    """Of some shards.

    Attributes:
        nbytes: Read one after the other.
        cold: Seconds that took, from the disk if the system forgets when asked to.
        warm: Seconds that took again.
        open: Median seconds to open a shard.
        seek: Median seconds of one small cold read at a random place.
        seek_bytes: Bytes of such a read.
        forgets: Whether the system could be asked to forget.
    """

    nbytes: int
    cold: float
    warm: float
    open: float
    seek: float
    seek_bytes: int
    forgets: bool

    @property
    def rate(self) -> float | None:
        """Bytes a second, cold; None if there was too little to tell."""
        return self.nbytes / self.cold if self.nbytes >= ENOUGH_TO_TELL else None


@dataclass(frozen=True)
class WriteSpeed:
    """Of one file.

    Attributes:
        nbytes: Written.
        seconds: Until they were safe.
    """

    nbytes: int
    seconds: float

    @property
    def rate(self) -> float:
        """Bytes a second."""
        return self.nbytes / self.seconds


def read_speed(shards: Sequence[str], sample_bytes: int, seconds: float) -> ReadSpeed:
    """Reads some of the shards, from one end of the list to the other.

    Args:
        shards: Paths of files.
        sample_bytes: Of one small read.
        seconds: That each of the three measures may take.

    Raises:
        OSError: If one cannot be read.
    """
    chosen = [shards[number * len(shards) // min(_SHARDS, len(shards))] for number in range(min(_SHARDS, len(shards)))]
    opening: list[float] = []
    files: list[int] = []
    try:
        for path in chosen:
            started = time.perf_counter()
            files.append(os.open(path, os.O_RDONLY))
            opening.append(time.perf_counter() - started)
        forgets = _forget(files)
        nbytes, cold = _read_through(files, _READ_AT_MOST, seconds)
        _, warm = _read_through(files, nbytes, float("inf"))
        _forget(files)
        seek = _seek(files, sample_bytes, seconds)
    finally:
        for file in files:
            os.close(file)
    return ReadSpeed(nbytes, cold, warm, statistics.median(opening), seek, sample_bytes, forgets)


def write_speed(folder: Path, nbytes: int, seconds: float) -> WriteSpeed:
    """Writes a file without a name.

    Args:
        folder: Where; it must exist.
        nbytes: How much; no more than 256 MiB of it are written.
        seconds: After which no more is written.

    Raises:
        OSError: If it cannot be written.
    """
    block = random.Random(0).randbytes(_BLOCK)  # zeros may be compressed, or not written at all
    wanted, written = max(1, min(nbytes, _WRITE_AT_MOST)), 0
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        started = time.perf_counter()
        while written < wanted and time.perf_counter() - started < seconds:
            written += file.write(block[: wanted - written])
        os.fsync(file.fileno())
        return WriteSpeed(written, time.perf_counter() - started)


def _read_through(files: Sequence[int], at_most: int, seconds: float) -> tuple[int, float]:
    """Bytes and seconds of reading the files from their beginnings, one after the other."""
    done = 0
    started = time.perf_counter()
    for file in files:
        offset = 0
        while done < at_most and time.perf_counter() - started < seconds:
            got = len(os.pread(file, min(_BLOCK, at_most - done), offset))
            if not got:
                break
            offset += got
            done += got
    return done, time.perf_counter() - started


def _seek(files: Sequence[int], size: int, seconds: float) -> float:
    """Median seconds of a read at a random place."""
    taken: list[float] = []
    places = random.Random(0)
    lengths = [os.fstat(file).st_size for file in files]
    ending = time.perf_counter() + seconds
    while not taken or (len(taken) < _SEEKS and time.perf_counter() < ending):
        number = places.randrange(len(files))
        offset = places.randrange(max(1, lengths[number] - size))
        started = time.perf_counter()
        os.pread(files[number], size, offset)
        taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def _forget(files: Sequence[int]) -> bool:
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return True
