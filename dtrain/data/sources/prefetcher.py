"""Copies the shards that a worker needs next into the node cache, in threads.

Its errors are ignored: reading the shard raises the same error with the name of a sample, and a shard that is never read need
not end the run.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Sequence

from dtrain.data.shards.node_cache import CacheFull, CacheInUse, CachePolicy
from dtrain.data.shards.shard_file import ShardChanged, Stamp

_THREADS = 2  # of each worker; all workers of all ranks together use the whole network

Wanted = tuple[str, Stamp]


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
