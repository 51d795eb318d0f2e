"""Samples of ``.tar`` shards: found through the index, and read by position.

All members of a sample are read at once if they are close together. ``shard_reader`` reads ranges of shards, and
``prefetcher`` copies those that are needed next into the node cache.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import numpy as np

from dtrain.data.fields.decode import decode
from dtrain.data.fields.field import DataError, Field, SampleError
from dtrain.data.order.growth import Growth, ShardList
from dtrain.data.shards.bad_shards import SKIP, BadShards
from dtrain.data.shards.dataset_index import DatasetIndex
from dtrain.data.shards.node_cache import CachePolicy
from dtrain.data.shards.patterns import expand
from dtrain.data.shards.tar import has_end_mark
from dtrain.data.sources.shard_reader import ShardReader, joint_reads
from dtrain.data.sources.source import OpenReaders, Reader, Source
from dtrain.urls import redacted

#: Larger members are not read: a worker and the batch would each hold a copy.
MAX_MEMBER_BYTES = 2**30
# Bytes that are read before they are decoded: a part of a CPU core's own cache.
_BLOCK_BYTES = 1 << 17
# Shards of which the first sample is read when the source is built.
_CHECKED_SHARDS = 8
_MOST_NAMED = 3  # damaged shards in a summary


@dataclass(frozen=True)
class ShardSource(Source):
    """Shards, and the members to read from each sample: one column of the index for each field.

    Attributes:
        index: The index of the shards.
        fields: The fields.
        waiting: Paths of shards without their end mark, which are not read.
    """

    index: DatasetIndex
    fields: tuple[Field, ...]
    waiting: tuple[str, ...] = ()

    @classmethod
    def build(
        cls,
        shards: str | Sequence[str],
        fields: Sequence[Field],
        *,
        rank: int = 0,
        world_size: int = 1,
        policy: CachePolicy | None = None,
        bad_shards: BadShards | None = None,
        growth: Growth = Growth(),  # noqa: B008 - frozen
    ) -> ShardSource:
        """Finds and indexes shards.

        Args:
            shards: Paths or URLs; each may be a brace pattern (``train-{00000..00009}.tar``), a glob, or a list of them in a
                file (``@shards.txt``).
            fields: What to read from each sample.
            rank: This process, in ``[0, world_size)``; ranks start indexing at different shards.
            world_size: Number of processes.
            policy: Which shards are read through the node cache; None: URLs and network file systems.
            bad_shards: What happens to damaged shards; None: they are refused.
            growth: Whether shards may join later; local ones without their end mark then wait, with a warning. They do not
                count as damaged.

        Raises:
            ValueError: If a pattern matches nothing, a shard is damaged, or no sample read has the value of a json field.
            FileNotFoundError: If a named shard does not exist.
        """
        extensions = [field.ext for field in fields]
        bad_shards = replace(bad_shards or BadShards(), grows=growth != Growth())
        paths, waiting = expand(shards, keep_missing=bad_shards.action == SKIP), []
        if growth.when is not None:
            left_out = bad_shards.named_in(paths)  # these were damaged at an earlier start: they do not join
            waiting = [
                path for path in paths if path not in left_out and os.path.isfile(path) and not has_end_mark(path)
            ]
            unfinished = set(waiting)
            paths = [path for path in paths if path not in unfinished]
            if waiting:
                text = (
                    f"{len(waiting)} of {len(paths) + len(waiting)} shards, such as {waiting[0]}, end without the end mark of "
                    "a tar: they are still being written, or damaged."
                )
                if not paths:
                    raise ValueError(f"{text} At least one complete shard is needed.")
                warnings.warn(f"{text} They wait for the next start.", stacklevel=2)
        ranks = {"rank": rank, "world_size": world_size}
        index = DatasetIndex.build(paths, extensions, **ranks, policy=policy, bad_shards=bad_shards)
        source = cls(index, tuple(fields), tuple(waiting))
        source._check_json()
        return source

    def numbered(self, numbers: np.ndarray, known: ShardList) -> ShardSource:
        """This source with its shards in a different order; see ``Growth.numbering``.

        Args:
            numbers: The shard of each new number, -1 for one that was removed; int64, shape ``[shards]``.
            known: The shards that a state knows: the first ones of the new order.
        """
        index, here = self.index, numbers[numbers >= 0]
        paths = [index.shards[number] for number in here.tolist()]
        built = DatasetIndex.build(paths, [field.ext for field in self.fields], policy=index.policy)
        if len(here) < len(numbers):
            every = known.followed_by(index.shard_list.take(numbers[len(known.names) :]))
            built = built.with_removed(every, np.where(numbers < 0, -1, np.cumsum(numbers >= 0) - 1))
        built.left_out = index.left_out
        return replace(self, index=built)

    def _check_json(self) -> None:
        """Refuses json fields that none of some samples has: a wrong key would make all samples bad."""
        columns = [n for n, field in enumerate(self.fields) if field.kind == "json" and field.role is not None]
        if not columns:
            return
        firsts = self.index.starts[:-1][self.index.counts > 0]
        spread = np.linspace(0, len(firsts) - 1, min(len(firsts), _CHECKED_SHARDS)).astype(np.int64)
        reader = self.open(0)
        problems: dict[int, str] = {}
        for sample in firsts[spread].tolist():
            for column in columns.copy():
                field = self.fields[column]
                try:
                    decode(field, reader.fetch(0, sample)[column])
                    columns.remove(column)
                except SampleError as error:
                    problems.setdefault(column, f"{self.index.keys([sample])[0]}: {error}")
        reader.close()
        if columns:
            field = self.fields[columns[0]]
            raise DataError(
                f"data.fields.{field.ext}: none of the first samples of {len(spread)} shards has the value of field "
                f"{field.name!r}. {problems[columns[0]]}. Set data.fields.{field.ext}.key to the path of the value, such as "
                "meta.label, and role to what it is."
            )

    def open(self, seed: int) -> ShardSampleReader:
        """A reader. Shards draw no random numbers, so ``seed`` is not used."""
        return ShardSampleReader(self)

    def summary(self) -> str:
        """``1,000 samples in 10 shards``, and the damaged shards that are left out."""
        index, left_out = self.index, list(self.index.left_out)
        shards = len(index.shards) - len(index.removed)
        text = f"{index.num_present:,} samples in {shards:,} {'shard' if shards == 1 else 'shards'}"
        if left_out:
            more = ", ..." if len(left_out) > _MOST_NAMED else ""
            text += f", without {len(left_out)} damaged: {', '.join(left_out[:_MOST_NAMED])}{more}"
        return text


class ShardSampleReader(Reader):
    """The reader of a ``ShardSource``."""

    decode = staticmethod(decode)

    def __init__(self, source: ShardSource) -> None:
        self._index = source.index
        self._fields = source.fields
        index = source.index
        policy = index.policy if index.far else None
        self._reader = ShardReader(index.shards, stamp=index.stamp, policy=policy)

    def fetch(self, epoch: int, sample: int) -> list[memoryview]:
        """The bytes of each member."""
        offsets, sizes = self._index.offsets[[sample]], self._index.sizes[[sample]]
        for field, offset, size in zip(self._fields, offsets[0].tolist(), sizes[0].tolist(), strict=True):
            if offset < 0:
                raise SampleError(f"has no .{field.ext} member")
            if size > MAX_MEMBER_BYTES:
                raise SampleError(f"has a member of {size} bytes, more than the limit of {MAX_MEMBER_BYTES}")
        (start,), (length,) = joint_reads(offsets, sizes)
        shard = int(self._index.shards_of(sample))
        return self._reader.members(shard, offsets[0].tolist(), sizes[0].tolist(), int(start), int(length))

    def fetch_all(self, epoch: int, samples: np.ndarray) -> Iterator[tuple[Sequence[int], list[list[Any]]]]:
        """The bytes of each member; shards that are read in place over the network are left to ``fetch``."""
        index = self._index
        # One look-up for all: in numpy a single number costs as much as many.
        shards, offsets, sizes = index.shards_of(samples), index.offsets[samples], index.sizes[samples]
        starts, lengths = joint_reads(offsets, sizes)
        positions = np.flatnonzero((starts >= 0) & (lengths > 0) & (lengths <= MAX_MEMBER_BYTES))
        if len(positions) < len(samples):
            shards, offsets, sizes, starts, lengths = (
                column[positions] for column in (shards, offsets, sizes, starts, lengths)
            )
        begins = offsets.T - starts
        members = [*zip(begins.tolist(), (begins + sizes.T).tolist(), strict=True)]
        columns = [column.tolist() for column in (positions, shards, starts, lengths)]
        # Of small samples many are read before they are decoded, of large ones one: they stay in the CPU's cache.
        together = max(1, _BLOCK_BYTES * len(positions) // max(1, int(lengths.sum())))
        for first in range(0, len(positions), together):
            block = slice(first, first + together)
            numbers, *spans = (column[block] for column in columns)
            data = self._reader.read_all(*spans)
            raws = [list(map(getitem, data, map(slice, begins[block], ends[block]))) for begins, ends in members]
            if not all(data):
                numbers, *raws = (list(itertools.compress(column, data)) for column in (numbers, *raws))
            yield numbers, raws

    def check(self, sample: int) -> None:
        """Compares the sample's shard with its index."""
        self._reader.check(int(self._index.shards_of(sample)))

    def place(self, sample: int) -> dict[str, Any]:
        """The shard's path, and the first byte of the sample's members; -1 if it has none."""
        shard = self._index.shards[int(self._index.shards_of(sample))]
        offset = min((offset for offset in self._index.offsets[sample].tolist() if offset >= 0), default=-1)
        return {"shard": redacted(shard), "offset": offset}

    def expect(self, ahead: Callable[[int], np.ndarray], at_once: int | None = None) -> None:
        """Prefetches shards into the node cache."""
        self._reader.expect(ahead, at_once)

    def share(self, readers: OpenReaders) -> None:
        """Keeps fewer shards open, and shares the prefetcher."""
        self._reader.share(readers)

    def close(self) -> None:
        """Closes the shards."""
        self._reader.close()
