"""Speed of the disks where a run reads its shards and writes its checkpoints.

* A *cold* read follows a request to the system to drop its cached pages of the file (``posix_fadvise``); a *warm* read
  repeats it. On a file system in memory both are equally fast.
* A write is complete when ``fsync`` returns. It goes to a file without a name, which disappears even if the process is killed.

Every measurement ends after a number of bytes or seconds, whichever comes first.
"""

from __future__ import annotations

import math
import os
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch.distributed as dist

from dtrain.config.schema import CheckpointConfig
from dtrain.console import Finding, size_text
from dtrain.data.sources.mixture import MixtureSource
from dtrain.data.sources.shard_source import ShardSource
from dtrain.data.sources.source import Source
from dtrain.distributed.collectives import from_rank0, on_all_ranks
from dtrain.distributed.world import World
from dtrain.errors import as_config_error
from dtrain.urls import is_url

#: Smaller transfers show the duration of a call, not the speed of the disk.
MIN_BYTES_FOR_RATE = 4 * 2**20
_BLOCK = 2**20
_MAX_READ, _MAX_WRITE = 256 * 2**20, 256 * 2**20
_MAX_SHARDS, _MAX_RANDOM_READS = 16, 128
_MAX_SAMPLES_FOR_SIZE = 10_000


@dataclass(frozen=True)
class ShardReads:
    """Speed of reading the shards of a run.

    Attributes:
        speed: Of the slowest machine.
        host: Name of that machine.
        hosts: Number of machines; each reads its share of the samples.
        sample_bytes: Mean size of the used members of a sample.
        total_bytes: Size of the used members of all samples.
    """

    speed: ReadSpeed
    host: str
    hosts: int
    sample_bytes: float
    total_bytes: float

    @classmethod
    def measure(cls, source: Source, world: World, seconds: float) -> ShardReads | None:
        """Collective. One rank of each machine reads; returns None if the samples are not in local shards.

        Raises:
            ConfigError: On every rank, if a shard cannot be read.
        """
        if isinstance(source, MixtureSource):  # the source with the most samples stands for all
            source = max(source.sources, key=lambda one: one.index.num_samples)
        if not isinstance(source, ShardSource):
            return None
        index = source.index
        files = [path for path in index.shards if not is_url(path)]
        if not files:
            return None
        sizes = index.sizes[:: max(1, index.num_samples // _MAX_SAMPLES_FOR_SIZE)]
        sample_bytes = float(np.maximum(sizes, 0).sum(axis=1).mean())

        def read() -> ReadSpeed | None:
            with as_config_error("data.train"):
                return read_speed(files, max(1, int(sample_bytes)), seconds) if world.local_rank == 0 else None

        speeds: list[tuple[str, ReadSpeed | None]] = [("", None)] * world.size
        dist.all_gather_object(speeds, (socket.gethostname(), on_all_ranks(read)))
        _, host, speed = min(
            ((speed.nbytes / speed.cold, host, speed) for host, speed in speeds if speed is not None),
            key=lambda found: found[0],
        )
        hosts = sum(speed is not None for _, speed in speeds)
        return cls(speed, host, hosts, sample_bytes, sample_bytes * index.num_samples)

    @property
    def samples_per_second(self) -> float | None:
        """Samples per second that all machines together can read; None if too little was read for a rate."""
        rate = self.speed.rate
        return None if rate is None else rate * self.hosts / self.sample_bytes

    def findings(self, needed: float) -> Iterator[Finding]:
        """The finding about the shards; ``needed`` is the samples per second that the step could use."""
        speed = self.speed
        where = f" on {self.host}" if self.hosts > 1 else ""
        small = (
            f"open {1e6 * speed.open:,.0f} microseconds, read of {speed.random_read_bytes / 1e3:,.1f} kB at a random "
            f"position {1e6 * speed.random_read:,.0f} microseconds{where}"
        )
        rate = self.samples_per_second
        if rate is None:
            yield Finding("shards", f"{speed.nbytes / 1e6:.1f} MB of shards are too little to measure a rate; {small}")
            return
        text = (
            f"cold {speed.nbytes / speed.cold / 1e6:,.0f} MB/s, warm {speed.nbytes / speed.warm / 1e6:,.0f} MB/s "
            f"({speed.nbytes / 1e6:,.0f} MB, sequential); {small}: {rate:,.0f} samples/s"
        )
        if not speed.cache_dropped:
            text += " (cold reads may be warm: this system cannot drop its cache)"
        memory = self.hosts * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if rate < needed and self.total_bytes > memory / 2:
            yield Finding(
                "shards",
                f"{text}; {size_text(self.total_bytes)} do not fit into memory, and the step could use {needed:,.0f} samples/s",
                "warning",
                "Use a faster disk; set data.storage=slow, which copies shards to data.cache.dir; or pack smaller samples",
            )
        else:
            yield Finding("shards", text)


@dataclass(frozen=True)
class CheckpointWrites:
    """Cost of a checkpoint.

    Attributes:
        nbytes: Size of a checkpoint.
        copy: Seconds to copy it to host memory; the training loop waits for them.
        rate: Bytes per second that rank 0 writes into ``folder``, with fsync.
        folder: The run directory, or its nearest existing parent.
    """

    nbytes: int
    copy: float
    rate: float
    folder: Path

    @classmethod
    def measure(cls, run_dir: Path, nbytes: int, copy: float, seconds: float) -> CheckpointWrites:
        """Collective. Rank 0 writes.

        Args:
            run_dir: The run directory; need not exist.
            nbytes: Size of a checkpoint.
            copy: Seconds of the copy to host memory, measured before.
            seconds: Maximum duration of the measurement.

        Raises:
            ConfigError: On every rank, if the folder cannot be written.
        """

        def write() -> tuple[str, float]:
            folder = writable_folder(run_dir)
            with as_config_error("run.dir"):
                return str(folder), write_rate(folder, max(nbytes, MIN_BYTES_FOR_RATE), seconds)

        folder, rate = from_rank0(write)
        return cls(nbytes, copy, rate, Path(folder))

    @property
    def write(self) -> float:
        """Seconds until a checkpoint is on the disk."""
        return self.nbytes / self.rate

    def finding(self, interval: float) -> Finding:
        """The finding about checkpoints; ``interval`` is the seconds of training between two of them."""
        every = f"one every {interval:,.1f} s" if math.isfinite(interval) else "only at the end"
        return Finding(
            "checkpoints",
            f"{size_text(self.nbytes)}, {every}: {1e3 * self.copy:,.1f} ms to copy, {self.write:,.2f} s to write "
            f"({self.rate / 1e6:,.0f} MB/s with fsync in {self.folder})",
        )


def writable_folder(run_dir: Path) -> Path:
    """The run directory, or its nearest existing parent.

    Raises:
        ConfigError: If it cannot be written.
    """
    with as_config_error(f"run.dir: {run_dir} cannot be written, choose a different one"):
        folder = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
        with tempfile.TemporaryFile(dir=folder):
            return folder


def save_interval(cfg: CheckpointConfig, step: float) -> float:
    """Seconds of training between two checkpoints, with steps of ``step`` seconds; infinite if only the last step saves."""
    by_steps = cfg.every_steps * step if cfg.every_steps else math.inf
    by_clock = 60 * cfg.every_minutes if cfg.every_minutes is not None else math.inf
    return max(min(by_steps, by_clock), step)


@dataclass(frozen=True)
class ReadSpeed:
    """Speed of reading some shards.

    Attributes:
        nbytes: Bytes read sequentially.
        cold: Seconds of reading them cold.
        warm: Seconds of reading them warm.
        open: Median seconds to open a shard.
        random_read: Median seconds of one small cold read at a random position.
        random_read_bytes: Bytes of such a read.
        cache_dropped: Whether the system can drop its cached pages.
    """

    nbytes: int
    cold: float
    warm: float
    open: float
    random_read: float
    random_read_bytes: int
    cache_dropped: bool

    @property
    def rate(self) -> float | None:
        """Bytes per second, cold; None if too little was read for a rate."""
        return self.nbytes / self.cold if self.nbytes >= MIN_BYTES_FOR_RATE else None


def read_speed(shards: Sequence[str], sample_bytes: int, seconds: float) -> ReadSpeed:
    """Reads up to 16 shards, spread evenly over the list.

    Args:
        shards: Paths of files.
        sample_bytes: Bytes of one small read.
        seconds: Maximum duration of each of the three measurements.

    Raises:
        OSError: If a shard cannot be read.
    """
    count = min(_MAX_SHARDS, len(shards))
    opening: list[float] = []
    files: list[int] = []
    try:
        for path in (shards[number * len(shards) // count] for number in range(count)):
            started = time.perf_counter()
            files.append(os.open(path, os.O_RDONLY))
            opening.append(time.perf_counter() - started)
        cache_dropped = _drop_cache(files)
        nbytes, cold = _read_sequentially(files, _MAX_READ, seconds)
        _, warm = _read_sequentially(files, nbytes, float("inf"))
        _drop_cache(files)
        random_read = _read_randomly(files, sample_bytes, seconds)
    finally:
        for file in files:
            os.close(file)
    return ReadSpeed(nbytes, cold, warm, statistics.median(opening), random_read, sample_bytes, cache_dropped)


def _read_sequentially(files: Sequence[int], max_bytes: int, seconds: float) -> tuple[int, float]:
    """Reads the files one after the other; returns bytes and seconds."""
    done = 0
    started = time.perf_counter()
    for file in files:
        offset = 0
        while done < max_bytes and time.perf_counter() - started < seconds:
            count = len(os.pread(file, min(_BLOCK, max_bytes - done), offset))
            if not count:
                break
            offset += count
            done += count
    return done, time.perf_counter() - started


def _read_randomly(files: Sequence[int], size: int, seconds: float) -> float:
    """Median seconds of a read at a random position."""
    durations: list[float] = []
    rng = random.Random(0)
    lengths = [os.fstat(file).st_size for file in files]
    deadline = time.perf_counter() + seconds
    while not durations or (len(durations) < _MAX_RANDOM_READS and time.perf_counter() < deadline):
        number = rng.randrange(len(files))
        offset = rng.randrange(max(1, lengths[number] - size))
        started = time.perf_counter()
        os.pread(files[number], size, offset)
        durations.append(time.perf_counter() - started)
    return statistics.median(durations)


def _drop_cache(files: Sequence[int]) -> bool:
    if not hasattr(os, "posix_fadvise"):
        return False
    for file in files:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def write_rate(folder: Path, nbytes: int, seconds: float) -> float:
    """Bytes per second of writing a file without a name, including fsync.

    Args:
        folder: An existing folder.
        nbytes: Bytes to write; at most 256 MiB are written.
        seconds: Duration after which no further block is written.

    Raises:
        OSError: On a write failure.
    """
    block = random.Random(0).randbytes(_BLOCK)  # not zeros, which a file system may compress or not write at all
    total, written = max(1, min(nbytes, _MAX_WRITE)), 0
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        started = time.perf_counter()
        while written < total and time.perf_counter() - started < seconds:
            written += file.write(block[: total - written])
        os.fsync(file.fileno())
        return written / (time.perf_counter() - started)
