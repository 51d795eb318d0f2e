"""Bytes of a shard: positioned reads through a few open files.

Positioned reads rather than a memory map: a shard that is cut short while it is mapped kills the process with a bus error,
a short read is an exception that names the shard.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Sequence


class ShardChanged(RuntimeError):
    """A shard is not what was indexed; the run cannot go on with it."""


class ShardReader:
    """Reads ranges of local shards, keeping at most ``max_open`` of them open.

    Args:
        paths: The shards.
        max_open: Files kept open; the one used longest ago is closed first.
    """

    def __init__(self, paths: Sequence[str], max_open: int = 128) -> None:
        self._paths = paths
        self._max_open = max_open
        self._open: OrderedDict[int, int] = OrderedDict()

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """``size`` bytes of a shard from ``offset`` on.

        Raises:
            ShardChanged: If the shard cannot be opened or is shorter than its index says.
        """
        try:
            data = os.pread(self._descriptor(shard), size, offset)
        except OSError as error:
            raise ShardChanged(
                f"shard {self._paths[shard]!r} cannot be read at offset {offset}: {error}. It was there when the run "
                "started. Put it back and start the run again; it continues where it was."
            ) from error
        if len(data) != size:
            raise ShardChanged(
                f"shard {self._paths[shard]!r} ends at {offset + len(data)}, its index says at least {offset + size}. "
                "It changed after it was indexed. Put the old file back, or start a new run on the new data."
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
