"""Samples of ``.tar`` shards: found through the index, read by position, decoded by the kind of each field."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dtrain.data.cache_policy import CachePolicy
from dtrain.data.dataset_index import DatasetIndex
from dtrain.data.decode import SampleError, decode
from dtrain.data.fields import Field
from dtrain.data.shards import expand
from dtrain.data.source import Source
from dtrain.data.storage import ShardReader, joint_reads
from dtrain.data.urls import shown

#: Larger members are not read: a worker and the batch each hold a copy.
MAX_MEMBER_BYTES = 2**30


@dataclass(frozen=True)
class ShardSource(Source):
    """Shards and the members to read from each sample.

    Args:
        index: Where these members lie.
        fields: The fields, a column of the index each.
    """

    index: DatasetIndex
    fields: tuple[Field, ...]

    @classmethod
    def build(
        cls,
        shards: str | Sequence[str],
        fields: Sequence[Field],
        *,
        rank: int = 0,
        world_size: int = 1,
        policy: CachePolicy | None = None,
    ) -> ShardSource:
        """Finds and indexes shards.

        Args:
            shards: Paths or URLs; each may be a brace pattern (``train-{00000..00009}.tar``) or a glob.
            fields: What to read from each sample.
            rank: This process; ranks begin to index at different shards.
            world_size: Number of processes.
            policy: Which shards are read through the cache of the node; None for URLs and network file systems.

        Raises:
            ValueError: If a pattern matches nothing or a shard is damaged.
            FileNotFoundError: If a named shard does not exist.
        """
        extensions = [field.ext for field in fields]
        index = DatasetIndex.build(expand(shards), extensions, rank=rank, world_size=world_size, policy=policy)
        return cls(index, tuple(fields))

    def open(self, seed: int) -> ShardSamples:
        """A reader; nothing in shards is drawn at random."""
        return ShardSamples(self)

    def summary(self) -> str:
        """``1,000 samples in 10 shards``."""
        return f"{self.index.num_samples:,} samples in {len(self.index.shards):,} shards"


class ShardSamples:
    """The reader of a ``ShardSource``."""

    decode = staticmethod(decode)

    def __init__(self, source: ShardSource) -> None:
        self._index = source.index
        self._fields = source.fields
        index = source.index
        policy = index.policy if index.far else None
        self._reader = ShardReader(index.shards, stamp=index.stamp, policy=policy)

    def find(self, epoch: int, samples: np.ndarray) -> Iterable[_Members]:
        """Where the members of these samples lie."""
        index = self._index
        # All at once: looking up a number in an array costs more by itself than within many.
        shards = index.shards_of(samples)
        offsets, sizes = index.offsets[samples], index.sizes[samples]
        complete = (offsets >= 0).all(axis=1) & (sizes <= MAX_MEMBER_BYTES).all(axis=1)
        columns = (complete, shards, offsets, sizes, *joint_reads(offsets, sizes))
        return map(_Members, index.keys(samples), *(column.tolist() for column in columns))

    def fetch(self, record: _Members) -> list[memoryview]:
        """The bytes of each member.

        Raises:
            SampleError: If the sample lacks a member, or one is too large.
            ShardChanged: If the shard is not what was indexed.
        """
        if record.complete:
            return self._reader.members(record.shard, record.offsets, record.sizes, record.start, record.length)
        if -1 in record.offsets:
            missing = self._fields[record.offsets.index(-1)]
            raise SampleError(f"has no .{missing.ext} member")
        raise SampleError(f"has a member of {max(record.sizes)} bytes, more than the limit of {MAX_MEMBER_BYTES}")

    def check(self, record: _Members) -> None:
        """Compares the shard of a sample with what was indexed."""
        self._reader.check(record.shard)

    def place(self, record: _Members) -> dict[str, Any]:
        """The shard's path, and the first byte of the sample's members; -1 if it has none."""
        offset = min((offset for offset in record.offsets if offset >= 0), default=-1)
        return {"shard": shown(self._index.shards[record.shard]), "offset": offset}

    def expect(self, ahead: Callable[[int], np.ndarray]) -> None:
        """Has copies made of shards that lie far away."""
        self._reader.expect(ahead)

    def close(self) -> None:
        """Closes the shards."""
        self._reader.close()


class _Members(NamedTuple):
    """A sample: its shard, first byte and length of each member, and of the one read that brings them all."""

    key: str
    complete: bool
    shard: int
    offsets: list[int]
    sizes: list[int]
    start: int
    length: int
