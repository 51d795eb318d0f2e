"""Reads ranges of shards: in place, or from their copies in the node cache.

* A shard is read in place, or from its copy in the node cache where the policy says so. Until a large shard has its
  copy, ranges are read in place, so that reading one sample does not wait for a whole shard.
* Shards in place are read with positioned reads, not memory-mapped: truncating a mapped file kills the process with a
  bus error, while a short read is an exception that names the shard. Copies are mapped, because they never change.
* The size and time of open files are compared with the index every two seconds and at each epoch: a file that is overwritten
  stays open, and its new bytes may be readable samples.
"""

from __future__ import annotations

import os
import resource
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Container, Sequence

import numpy as np

from dtrain.data.shards.http_ranges import NoRanges
from dtrain.data.shards.node_cache import CachedShard, CacheFull, CacheInUse, CachePolicy
from dtrain.data.shards.shard_file import (
    LocalFile,
    RemoteFile,
    ShardChanged,
    ShardFile,
    Stamp,
    check_unchanged,
    open_shard,
)
from dtrain.data.sources.prefetcher import Prefetcher
from dtrain.data.sources.source import OpenReaders
from dtrain.urls import redacted

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
# Often everything in the cache is in use only until another worker closes what it has finished.
_WARN_AFTER = 100
_SECONDS_BETWEEN_CHECKS = 2.0
_DURATIONS_BETWEEN_CHECKS = 200  # so that over a network they take at most 0.5 % of the time


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
    # numpy takes several times as long along the last axis, if that is short.
    offsets, sizes = np.ascontiguousarray(offsets.T), np.ascontiguousarray(sizes.T)
    starts = offsets.min(axis=0)
    lengths = (offsets + sizes).max(axis=0) - starts
    return starts, np.where(lengths > sizes.sum(axis=0) + _MAX_GAP, -1, lengths)


def _default_max_open() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MAX_OPEN if soft == resource.RLIM_INFINITY else max(1, min(_MAX_OPEN, soft // 2))
