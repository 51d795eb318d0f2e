"""Bytes of a shard: positioned reads through a few open files.

Positioned reads rather than a memory map: a shard that is cut short while it is mapped kills the process with a bus error,
a short read is an exception that names the shard.
"""

from __future__ import annotations

import os
import resource
from collections import OrderedDict
from collections.abc import Sequence

# Members of one sample lie side by side: reading the headers between them costs less than another read.
_READ_THROUGH = 8192
# 64 lanes of windows of 8 shards: what one process reads by turns where nothing else was asked for.
_MOST_OPEN = 512


class ShardChanged(RuntimeError):
    """A shard is not what was indexed; the run cannot go on with it."""


class ShardReader:
    """Reads ranges of local shards, keeping at most ``max_open`` of them open.

    Args:
        paths: The shards.
        max_open: Files kept open; the one used longest ago is closed first. None: what the default lanes and window need,
            but no more than half of what the process may open.
    """

    def __init__(self, paths: Sequence[str], max_open: int | None = None) -> None:
        self._paths = paths
        self._max_open = _room_for_files() if max_open is None else max_open
        self._open: OrderedDict[int, int] = OrderedDict()

    def members(self, shard: int, offsets: Sequence[int], sizes: Sequence[int]) -> list[memoryview]:
        """The payloads of one sample's members, in one read if they lie close together.

        Args:
            shard: Place of the shard in ``paths``.
            offsets: First byte of each member.
            sizes: Bytes of each member.

        Raises:
            ShardChanged: If the shard cannot be opened or is shorter than its index says.
        """
        start = min(offsets)
        end = max(map(int.__add__, offsets, sizes))
        if end - start > sum(sizes) + _READ_THROUGH:
            return [memoryview(self.read(shard, offset, size)) for offset, size in zip(offsets, sizes, strict=True)]
        data = memoryview(self.read(shard, start, end - start))
        return [data[offset - start : offset - start + size] for offset, size in zip(offsets, sizes, strict=True)]

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """``size`` bytes of a shard from ``offset`` on.

        Raises:
            ShardChanged: If the shard cannot be opened or is shorter than its index says.
        """
        try:
            descriptor = self._descriptor(shard)
            data = os.pread(descriptor, size, offset)
            while len(data) < size:  # one call gives 2 GiB at most, and some file systems give less than was asked
                more = os.pread(descriptor, size - len(data), offset + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise ShardChanged(
                f"shard {self._paths[shard]!r} cannot be read at offset {offset}: {error}. It could be when the run "
                "started. Put that right and start the run again; it continues where it was."
            ) from error
        if len(data) < size:
            raise ShardChanged(
                f"shard {self._paths[shard]!r} has {os.fstat(descriptor).st_size} bytes, its index says at least "
                f"{offset + size}. It changed after it was indexed. Put the old file back, or start a new run on the new data."
            )
        return data

    def close(self) -> None:
        """Closes all files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _descriptor(self, shard: int) -> int:
        descriptor = self._open.get(shard)
        if descriptor is None:
            if len(self._open) >= self._max_open:
                os.close(self._open.popitem(last=False)[1])
            descriptor = os.open(self._paths[shard], os.O_RDONLY | os.O_CLOEXEC)
            self._open[shard] = descriptor
        else:
            self._open.move_to_end(shard)
        return descriptor


def _room_for_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN if soft == resource.RLIM_INFINITY else max(1, min(_MOST_OPEN, soft // 2))
