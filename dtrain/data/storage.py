"""Bytes of samples: ranges of shards, through a few open ones.

A shard is read where it lies, or from its copy in the cache of the node where the policy says so. Until there is a copy,
ranges are read where it lies all the same, so that nobody waits for the whole of a large shard to read one sample.

Positioned reads rather than a memory map: a shard that is cut short while it is mapped kills the process with a bus error,
a short read is an exception that names the shard. Copies are mapped, because nobody changes them.
"""

from __future__ import annotations

import resource
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from dtrain.data.cache_policy import CachePolicy
from dtrain.data.node_cache import CacheFull, Copy
from dtrain.data.prefetch import Prefetcher
from dtrain.data.remote import NoRanges
from dtrain.data.shard_file import ShardChanged, ShardFile, Stamp, check_unchanged, open_shard
from dtrain.data.urls import shown

__all__ = ["ShardChanged", "ShardReader"]

# Members of one sample lie side by side: reading the headers between them costs less than another read.
_READ_THROUGH = 8192
# 64 lanes of windows of 8 shards: what one process reads by turns where nothing else was asked for.
_MOST_OPEN = 512
# Twice that: what is read now, and after it.
_AHEAD = 2 * _MOST_OPEN
# A shard of this size is copied in less time than some dozens of its samples take one by one.
_COPIED_AT_ONCE = 32 << 20


def joint_reads(offsets: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The one read for each sample that brings all its members.

    Args:
        offsets: First byte of each member, int64, shape ``[samples, members]``.
        sizes: Bytes of each member, the same.

    Returns:
        First byte and length, int64, shape ``[samples]`` each; length -1 where members are too far from each other.
    """
    starts = offsets.min(axis=1)
    lengths = (offsets + sizes).max(axis=1) - starts
    return starts, np.where(lengths > sizes.sum(axis=1) + _READ_THROUGH, -1, lengths)


class ShardReader:
    """Reads ranges of shards, keeping at most ``max_open`` of them open.

    Args:
        paths: The shards, paths or URLs.
        max_open: Shards kept open; the one used longest ago is closed first. None: what the default lanes and window
            need, but no more than half of what the process may open.
        stamp: Of each shard, what it was when it was indexed. None: shards are read where they lie, and not compared.
        policy: Which shards are read through the cache.
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
        self._max_open = _room_for_files() if max_open is None else max_open
        self._stamp = stamp
        self._policy = policy
        self._open: OrderedDict[int, ShardFile] = OrderedDict()
        # Those that have no copy yet, and are to be read from it as soon as they have.
        self._waiting: set[int] = set()
        self._prefetcher: Prefetcher | None = None
        self._told = False

    def members(
        self, shard: int, offsets: Sequence[int], sizes: Sequence[int], start: int, length: int
    ) -> list[memoryview]:
        """The payloads of one sample's members, in one read if they lie close together.

        Args:
            shard: Place of the shard in ``paths``.
            offsets: First byte of each member.
            sizes: Bytes of each member.
            start: First byte of the one read, from ``joint_reads``.
            length: Its length; -1 reads each member by itself.

        Raises:
            ShardChanged: If the shard cannot be read, or is not what was indexed.
        """
        spans = zip(offsets, sizes, strict=True)
        if length < 0:
            return [memoryview(self.read(shard, offset, size)) for offset, size in spans]
        data = memoryview(self.read(shard, start, length))
        return [data[offset - start : offset - start + size] for offset, size in spans]

    def read(self, shard: int, offset: int, size: int) -> bytes | memoryview:
        """``size`` bytes of a shard from ``offset`` on.

        Raises:
            ShardChanged: If the shard cannot be read, or is not what was indexed.
            CacheFull: If it can only be read from a copy, and there is no room for that.
        """
        try:
            file = self._file(shard)
            try:
                data = file.read(offset, size)
            except NoRanges:
                file = self._enter(shard, self._copied(shard))
                data = file.read(offset, size)
        except OSError as error:
            raise ShardChanged(
                f"shard {shown(self._paths[shard])!r} cannot be read at offset {offset}: {error}. It could be when the run "
                "started. Put that right and start the run again; it continues where it was."
            ) from error
        if len(data) < size:
            raise ShardChanged(
                f"shard {shown(self._paths[shard])!r} has {file.stamp().size} bytes, its index says at least "
                f"{offset + size}. It changed after it was indexed. Put the old file back, or start a new run on the new data."
            )
        return data

    def check(self, shard: int) -> None:
        """Looks again at a shard that was open for a while: other bytes may have been written into the same file.

        Raises:
            ShardChanged: If it is not what was indexed any more.
        """
        file = self._open.get(shard)
        if file is not None and self._stamp is not None:
            check_unchanged(self._paths[shard], self._stamp(shard), file)

    def expect(self, ahead: Callable[[int], np.ndarray]) -> None:
        """Has copies made of shards that will be read soon, while others are read.

        Args:
            ahead: Gives as many shards as it is asked for, of those that are read now and from now on, in about that
                order, int64, shape ``[n]``; one may come twice.

        Raises:
            ShardChanged: If one that is open is not what was indexed any more.
            CacheFull: If the cache cannot be used.
        """
        for shard in self._open:
            self.check(shard)
        if self._policy is None or self._stamp is None:
            return
        nearest_first = dict.fromkeys(ahead(_AHEAD).tolist())
        shards = [shard for shard in nearest_first if self._policy.applies_to(self._paths[shard])]
        if shards and self._prefetcher is None:
            self._prefetcher = Prefetcher(self._policy)
        if self._prefetcher is not None:
            self._prefetcher.want([(self._paths[shard], self._stamp(shard)) for shard in shards])

    def close(self) -> None:
        """Closes all shards."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None
        while self._open:
            self._open.popitem()[1].close()
        self._waiting.clear()

    def _file(self, shard: int) -> ShardFile:
        file = self._open.get(shard)
        if file is None:
            return self._enter(shard, self._first(shard))
        self._open.move_to_end(shard)
        if shard in self._waiting:
            copy = self._copy(shard)
            if copy is not None:
                return self._enter(shard, copy)
        return file

    def _enter(self, shard: int, file: ShardFile) -> ShardFile:
        before = self._open.pop(shard, None)
        if before is not None:
            before.close()
        elif len(self._open) >= self._max_open:
            closed, oldest = self._open.popitem(last=False)
            self._waiting.discard(closed)
            oldest.close()
        self._open[shard] = file
        if isinstance(file, Copy):
            self._waiting.discard(shard)
        return file

    def _first(self, shard: int) -> ShardFile:
        path = self._paths[shard]
        if self._policy is not None and self._stamp is not None and self._policy.applies_to(path):
            copy = self._copy(shard)
            if copy is None and self._stamp(shard).size <= _COPIED_AT_ONCE:
                try:
                    copy = self._copied(shard)
                except CacheFull as error:
                    if not self._told:
                        self._told = True
                        warnings.warn(f"{error} Until then, samples are read one by one.", stacklevel=2)
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

    def _copy(self, shard: int) -> Copy | None:
        assert self._policy is not None
        assert self._stamp is not None
        return self._policy.cache.use(self._paths[shard], self._stamp(shard))

    def _copied(self, shard: int) -> Copy:
        assert self._policy is not None
        assert self._stamp is not None
        while True:  # a process that makes room may remove it before it is opened
            copy = self._copy(shard)
            if copy is not None:
                return copy
            self._policy.cache.fetch(self._paths[shard], self._stamp(shard))


def _room_for_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN if soft == resource.RLIM_INFINITY else max(1, min(_MOST_OPEN, soft // 2))
