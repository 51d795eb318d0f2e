"""Samples of ``.tar`` shards: found through the index, read by position, prefetched into the node cache.

* A shard is read in place, or from its copy in the node cache where the policy says so. Until a large shard has its
  copy, ranges are read in place, so that reading one sample does not wait for a whole shard.
* All members of a sample are read at once if they are close together (``joint_reads``).
* Shards in place are read with positioned reads, not memory-mapped: truncating a mapped file kills the process with a
  bus error, while a short read is an exception that names the shard. Copies are mapped, because they never change.
* The size and time of open files are compared with the index every two seconds and at each epoch: a file that is overwritten
  stays open, and its new bytes may be readable samples.
* The ``Prefetcher`` of each worker copies the shards that its rank needs next. Its errors are ignored: reading the
  shard raises the same error with the name of a sample, and a shard that is never read need not end the run.
"""

from __future__ import annotations

import itertools
import os
import resource
import threading
import time
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import getitem
from typing import Any

import numpy as np

from dtrain.data.fields.decode import decode
from dtrain.data.fields.field import DataError, Field, SampleError
from dtrain.data.order.growth import Growth, ShardList
from dtrain.data.shards.bad_shards import SKIP, BadShards
from dtrain.data.shards.dataset_index import DatasetIndex
from dtrain.data.shards.http_ranges import NoRanges
from dtrain.data.shards.node_cache import CachedShard, CacheFull, CacheInUse, CachePolicy
from dtrain.data.shards.patterns import expand
from dtrain.data.shards.shard_file import (
    LocalFile,
    RemoteFile,
    ShardChanged,
    ShardFile,
    Stamp,
    check_unchanged,
    open_shard,
)
from dtrain.data.shards.tar import has_end_mark
from dtrain.data.sources.source import OpenReaders, Reader, Source
from dtrain.urls import redacted

#: Larger members are not read: a worker and the batch would each hold a copy.
MAX_MEMBER_BYTES = 2**30
# Bytes that are read before they are decoded: a part of a CPU core's own cache.
_BLOCK_BYTES = 1 << 17
_COPIED = 1 << 14
# Reading the headers between adjacent members is cheaper than another read.
_MAX_GAP = 8192
# One process reads at most 64 lanes x 8 shards in a shuffle window with the default settings, in a run that began on at most 64
# ranks.
_MAX_OPEN = 512
# Twice that: the current shards, and those after them.
_PREFETCH_SHARDS = 2 * _MAX_OPEN
# Copying a shard of this size takes less time than reading some dozens of its samples one by one.
_SMALL_SHARD = 32 << 20
# Shards of which the first sample is read when the source is built.
_CHECKED_SHARDS = 8
# Often everything in the cache is in use only until another worker closes what it has finished.
_WARN_AFTER = 100
_SECONDS_BETWEEN_CHECKS = 2.0
_DURATIONS_BETWEEN_CHECKS = 200  # so that over a network they take at most 0.5 % of the time
_MOST_NAMED = 3  # damaged shards in a summary
_THREADS = 2  # of each worker; all workers of all ranks together use the whole network

Wanted = tuple[str, Stamp]


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


class ShardReader:
    """Reads ranges of shards; at most ``max_open`` of them stay open, and the least recently used is closed first.

    Args:
        paths: The shards, paths or URLs.
        max_open: None: enough for the default lanes and shuffle window, at most half of the process's limit on open files.
        stamp: ``stamp(shard)`` when it was indexed. None: shards are read in place and not compared.
        policy: Which shards are read through the node cache.
    """

    def __init__(
        self,
        paths: Sequence[str],
        max_open: int | None = None,
        *,
        stamp: Callable[[int], Stamp] | None = None,
        policy: CachePolicy | None = None,
    ) -> None:
        self._paths = paths
        self._max_open = self._most_open = _default_max_open() if max_open is None else max_open
        self._stamp = stamp
        self._policy = policy
        self._open: OrderedDict[int, ShardFile] = OrderedDict()
        self._waiting: set[int] = set()  # open in place until their copies exist
        self._readers = OpenReaders()
        self._prefetcher: Prefetcher | None = None
        self._next_check = 0.0
        self._in_place = 0  # reads in place of shards that were opened before
        self._no_room: CacheInUse | None = None
        self._warned = False

    def members(
        self, shard: int, offsets: Sequence[int], sizes: Sequence[int], start: int, length: int
    ) -> list[memoryview]:
        """The payloads of one sample's members, in one read if they are close together.

        Args:
            shard: Index of the shard in ``paths``.
            offsets: First byte of each member.
            sizes: Bytes of each member.
            start: First byte of the joint read, from ``joint_reads``.
            length: Its length; -1 reads each member on its own.
        """
        spans = zip(offsets, sizes, strict=True)
        if length < 0:
            return [memoryview(self.read(shard, offset, size)) for offset, size in spans]
        data = memoryview(self.read(shard, start, length))
        return [data[offset - start : offset - start + size] for offset, size in spans]

    def read(self, shard: int, offset: int, size: int) -> bytes | memoryview:
        """``size`` bytes of a shard at ``offset``.

        Raises:
            ShardChanged: If the shard cannot be read, or changed after it was indexed.
            CacheFull: If it can only be read from a copy, and there is no room for one.
        """
        try:
            self._check_open()
            file = self._file(shard)
            try:
                data = file.read(offset, size)
            except NoRanges:
                self._close_copies()  # this shard can only be read from a copy, so make room for it
                file = self._keep_open(shard, self._fetch_copy(shard))
                data = file.read(offset, size)
        except OSError as error:
            raise ShardChanged(
                f"shard {redacted(self._paths[shard])!r} cannot be read at offset {offset}: {error}. It was readable when the "
                "run started. Make it readable and start the run again; it resumes from its last checkpoint."
            ) from error
        if len(data) < size:
            raise ShardChanged(
                f"shard {redacted(self._paths[shard])!r} has {file.stamp().size} bytes, its index says at least "
                f"{offset + size}. It changed after it was indexed. Restore the old file, or start a new run on the new data."
            )
        return data

    def read_all(
        self, shards: Sequence[int], starts: Sequence[int], lengths: Sequence[int]
    ) -> Sequence[bytes | memoryview]:
        """Ranges of files; empty where ``read`` has to be called, which may fail or take long."""
        data: Sequence[bytes | memoryview]
        distinct = dict.fromkeys(shards)
        if len(distinct) > self._max_open:
            half = len(shards) // 2
            return [
                *self.read_all(shards[:half], starts[:half], lengths[:half]),
                *self.read_all(shards[half:], starts[half:], lengths[half:]),
            ]
        try:
            self._check_open()
            opened = {shard: self._file(shard) for shard in distinct}
            files = [opened[shard] for shard in shards]
            if all(isinstance(file, LocalFile) for file in opened.values()):
                # No Python code for each range.
                data = list(map(os.pread, [file.descriptor for file in files], lengths, starts))  # type: ignore[attr-defined]
            else:
                spans = zip(files, starts, lengths, strict=True)
                data = [b"" if isinstance(file, RemoteFile) else file.read(*span) for file, *span in spans]
        except Exception:  # noqa: BLE001 - ``read`` raises it again
            return [b""] * len(shards)
        if list(map(len, data)) != lengths:
            data = [one if len(one) == length else b"" for one, length in zip(data, lengths, strict=True)]
        # Copying a small piece is cheaper than a view of it.
        return data if max(lengths) < _COPIED else [memoryview(one) for one in data]

    def check(self, shard: int) -> None:
        """Compares an open shard with its index again: other bytes may have been written into the same file."""
        file = self._open.get(shard)
        if file is not None and self._stamp is not None:
            check_unchanged(self._paths[shard], self._stamp(shard), file)

    def share(self, readers: OpenReaders) -> None:
        """See ``Reader.share``."""
        self._max_open = self._most_open = max(1, self._most_open // readers.number)
        self._readers = readers

    def expect(self, ahead: Callable[[int], np.ndarray], at_once: int | None = None) -> None:
        """Compares the open shards with their indexes, and prefetches those that are read next; see ``Reader.expect``.

        From then on at most ``at_once`` shards stay open, because the cache cannot remove a copy that is open.

        Raises:
            ShardChanged: If an open shard differs from its index.
            CacheFull: If the cache cannot be used.
        """
        self._next_check = 0.0
        self._check_open()
        if self._policy is None or self._stamp is None or not self._policy.fills:
            return
        if at_once is not None:
            self._max_open = max(1, min(self._most_open, at_once))
            self._limit_open()
        nearest_first = dict.fromkeys(ahead(_PREFETCH_SHARDS).tolist())
        shards = [shard for shard in nearest_first if self._policy.applies_to(self._paths[shard])]
        if shards and self._prefetcher is None:
            if self._readers.prefetcher is None or self._readers.prefetcher.is_closed:
                self._readers.prefetcher = Prefetcher(self._policy, self._readers.number)
            self._prefetcher = self._readers.prefetcher
        if self._prefetcher is not None:
            within = self._prefetcher.want([(self._paths[shard], self._stamp(shard)) for shard in shards], id(self))
            self._close_copies(keep=frozenset(shards[:within]))

    def close(self) -> None:
        """Closes all shards."""
        if self._prefetcher is not None:
            self._prefetcher.close(id(self))
            self._prefetcher = None
        while self._open:
            self._open.popitem()[1].close()
        self._waiting.clear()

    def _close_copies(self, keep: Container[int] = ()) -> None:
        """Closes copies, except of the shards to keep: while they are open, the cache cannot remove them."""
        for shard, file in list(self._open.items()):
            if isinstance(file, CachedShard) and shard not in keep:
                self._open.pop(shard).close()

    def _check_open(self) -> None:
        """Checks the open shards, from time to time."""
        if (begin := time.monotonic()) < self._next_check:
            return
        for shard in self._open:
            self.check(shard)
        # Only now: a changed shard is an error in every call.
        now = time.monotonic()
        self._next_check = now + max(_SECONDS_BETWEEN_CHECKS, _DURATIONS_BETWEEN_CHECKS * (now - begin))

    def _file(self, shard: int) -> ShardFile:
        file = self._open.get(shard)
        if file is None:
            return self._keep_open(shard, self._open_shard(shard))
        self._open.move_to_end(shard)
        if shard in self._waiting:
            if (copy := self._copy(shard)) is not None:
                return self._keep_open(shard, copy)
            self._in_place += 1
            if self._in_place == _WARN_AFTER and self._no_room is not None:
                self._warn(self._no_room)
        return file

    def _warn(self, error: CacheFull) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(f"{error} Until then, samples are read one by one.", stacklevel=2)

    def _keep_open(self, shard: int, file: ShardFile) -> ShardFile:
        before = self._open.pop(shard, None)
        if before is not None:
            before.close()
        self._open[shard] = file
        if isinstance(file, CachedShard):
            self._waiting.discard(shard)
        self._limit_open()
        return file

    def _limit_open(self) -> None:
        """Closes the least recently used shards. In a shuffle window, these are the finished ones."""
        while len(self._open) > self._max_open:
            shard, oldest = self._open.popitem(last=False)
            self._waiting.discard(shard)
            oldest.close()
            if self._prefetcher is not None:
                self._prefetcher.resume()

    def _open_shard(self, shard: int) -> ShardFile:
        path = self._paths[shard]
        if self._policy is not None and self._stamp is not None and self._policy.applies_to(path):
            copy = self._copy(shard)
            if copy is None and self._policy.fills and self._stamp(shard).size <= _SMALL_SHARD:
                try:
                    copy = self._fetch_copy(shard)
                except CacheInUse as error:
                    self._no_room = error
                except CacheFull as error:
                    self._warn(error)
            if copy is not None:
                return copy
            self._waiting.add(shard)
        file = open_shard(path)
        if self._stamp is not None:
            try:
                check_unchanged(path, self._stamp(shard), file)
            except ShardChanged:
                file.close()
                raise
        return file

    def _copy(self, shard: int) -> CachedShard | None:
        assert self._policy is not None
        assert self._stamp is not None
        try:
            return self._policy.cache.use(self._paths[shard], self._stamp(shard))
        except CacheFull as error:
            self._warn(error)
            return None

    def _fetch_copy(self, shard: int) -> CachedShard:
        assert self._policy is not None
        assert self._stamp is not None
        with self._policy.cache.fetch_open(self._paths[shard], self._stamp(shard)) as file:
            return CachedShard(file.fileno(), self._stamp(shard))


def joint_reads(offsets: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First byte and length of the read that covers all members of each sample; length -1 where they are too far apart.

    Args:
        offsets: First byte of each member, int64, shape ``[samples, members]``.
        sizes: Bytes of each member, of the same shape.
    """
    starts = offsets.min(axis=1)
    lengths = (offsets + sizes).max(axis=1) - starts
    return starts, np.where(lengths > sizes.sum(axis=1) + _MAX_GAP, -1, lengths)


class Prefetcher:
    """Copies shards into the node cache, in its own threads, until all its readers are closed.

    It fetches no more ahead than this process's part of the cache, so that processes do not remove copies that others
    are about to read. Each reader has an equal share of this part, and the readers are served in turn.

    Args:
        policy: Its cache receives the copies.
        readers: Number of readers in this process.
    """

    def __init__(self, policy: CachePolicy, readers: int = 1) -> None:
        self._cache = policy.cache
        self._room = self._cache.max_bytes // (policy.sharers * readers)
        self._wanted: dict[int, deque[Wanted]] = {}  # by reader; the next one to be served is the first
        self._paused = False  # until readers have closed copies that were in use
        self._changed = threading.Condition()
        self.is_closed = False
        self._warned = False
        # Daemon threads: an ending process does not wait for a download.
        threads = [threading.Thread(target=self._work, name="prefetch", daemon=True) for _ in range(_THREADS)]
        for thread in threads:
            thread.start()

    def want(self, shards: Sequence[Wanted], reader: int = 0) -> int:
        """Replaces the list of shards to fetch for a reader, in the order in which they are read.

        Returns:
            How many of them there is room for.
        """
        wanted: deque[Wanted] = deque()
        room = self._room
        for path, stamp in shards:
            room -= stamp.size
            if room < 0:
                break
            wanted.append((path, stamp))
        with self._changed:
            self._wanted[reader] = wanted
            self._paused = False
            self._changed.notify_all()
        return len(wanted)

    def resume(self) -> None:
        """Continues after everything in the cache was in use."""
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def close(self, reader: int = 0) -> None:
        """Starts no more downloads for a reader. A running one ends with the process; another process continues it."""
        with self._changed:
            self._wanted.pop(reader, None)
            self.is_closed = not self._wanted
            self._changed.notify_all()

    def _work(self) -> None:
        while (found := self._next()) is not None:
            reader, (path, stamp) = found
            try:
                if not self._cache.touch(path, stamp):
                    self._cache.fetch(path, stamp, wait=False)
            except CacheInUse:
                with self._changed:
                    if reader in self._wanted:
                        self._wanted[reader].appendleft((path, stamp))
                    self._paused = True
            except CacheFull as error:
                with self._changed:
                    self._wanted = {one: deque() for one in self._wanted}
                if not self._warned:
                    self._warned = True
                    warnings.warn(f"{error} Until then, samples are read one by one.", stacklevel=2)
            except (OSError, ShardChanged):
                continue

    def _next(self) -> tuple[int, Wanted] | None:
        with self._changed:
            while not self.is_closed:
                reader = next((reader for reader, shards in self._wanted.items() if shards), None)
                if reader is not None and not self._paused:
                    wanted = self._wanted[reader] = self._wanted.pop(reader)  # the others come next
                    return reader, wanted.popleft()
                self._changed.wait()
            return None


def _default_max_open() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN if soft == resource.RLIM_INFINITY else max(1, min(_MAX_OPEN, soft // 2))
