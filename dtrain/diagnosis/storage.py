"""The disks of a run's shards, as all its machines see them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist

from dtrain.config.errors import users_to_fix
from dtrain.data.shard_source import ShardSource
from dtrain.data.source import Source
from dtrain.data.urls import is_url
from dtrain.diagnosis.file_system import ReadSpeed, read_speed
from dtrain.diagnosis.finding import Finding, size_text
from dtrain.distributed.collectives import together
from dtrain.distributed.world import World

_LOOKED_AT = 10_000


@dataclass(frozen=True)
class Reading:
    """Shards as files.

    Attributes:
        speed: Of the slowest machine.
        host: Its name.
        hosts: Number of machines; each reads its share.
        sample_bytes: Of the members of a sample, on average.
        total_bytes: Of all samples.
    """

    speed: ReadSpeed
    host: str
    hosts: int
    sample_bytes: float
    total_bytes: float

    @classmethod
    def measure(cls, source: Source, world: World, seconds: float) -> Reading | None:
        """Collective. One rank of each machine reads; None if the samples are in no files.

        Raises:
            ConfigError: On every rank, if a shard cannot be read.
        """
        if not isinstance(source, ShardSource):
            return None
        index = source.index
        files = [path for path in index.shards if not is_url(path)]
        if not files:
            return None
        sizes = index.sizes[:: max(1, index.num_samples // _LOOKED_AT)]
        sample_bytes = float(np.maximum(sizes, 0).sum(axis=1).mean())

        def read() -> ReadSpeed | None:
            with users_to_fix("data.train"):
                return read_speed(files, max(1, int(sample_bytes)), seconds) if world.local_rank == 0 else None

        speeds: list[tuple[str, ReadSpeed | None]] = [("", None)] * world.size
        dist.all_gather_object(speeds, (socket.gethostname(), together(read)))
        slowest = min(
            ((speed.nbytes / speed.cold, host, speed) for host, speed in speeds if speed is not None),
            key=lambda found: found[0],
        )
        hosts = sum(speed is not None for _, speed in speeds)
        return cls(slowest[2], slowest[1], hosts, sample_bytes, sample_bytes * index.num_samples)

    @property
    def samples_per_second(self) -> float | None:
        """That all machines together can read; None if there was too little to tell."""
        rate = self.speed.rate
        return None if rate is None else rate * self.hosts / self.sample_bytes

    def findings(self, needed: float) -> Iterator[Finding]:
        """What was measured.

        Args:
            needed: Samples a second that the step could use.
        """
        speed = self.speed
        where = f" on {self.host}" if self.hosts > 1 else ""
        small = f"open {_us(speed.open)}, {_kb(speed.seek_bytes)} at a random place {_us(speed.seek)}"
        told = self.samples_per_second
        if told is None:
            little = f"only {speed.nbytes / 1e6:.1f} MB of shards, too little to tell a rate"
            yield Finding("shards", f"{little}; {small}{where}")
            return
        text = (
            f"cold {_mb(speed.nbytes / speed.cold)}, warm {_mb(speed.nbytes / speed.warm)} "
            f"({speed.nbytes / 1e6:,.0f} MB one after the other); {small}{where}: {told:,.0f} samples/s"
        )
        if not speed.forgets:
            text += " (cold may be warm: this system cannot be asked to forget)"
        memory = self.hosts * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if told < needed and self.total_bytes > memory / 2:
            yield Finding(
                "shards",
                f"{text}; {size_text(self.total_bytes)} do not stay in memory, and the step could use {needed:,.0f}",
                "warning",
                "A faster disk; data.storage=slow, which copies shards to the disk of data.cache.dir; smaller samples",
            )
        else:
            yield Finding("shards", text)


def _us(seconds: float) -> str:
    return f"{1e6 * seconds:,.0f} microseconds"


def _kb(nbytes: int) -> str:
    return f"{nbytes / 1e3:,.1f} kB"


def _mb(rate: float) -> str:
    return f"{rate / 1e6:,.0f} MB/s"
