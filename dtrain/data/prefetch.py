"""Copies shards into the cache of the node before they are read, while others are read.

Every worker of a node knows the shards that its rank needs next and fetches what nobody fetches yet, nearest first. What
goes wrong here is left to whoever reads the shard: there it is an error that names a sample, here it may never matter.
"""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Sequence

from dtrain.data.cache_policy import CachePolicy
from dtrain.data.node_cache import CacheFull
from dtrain.data.shard_file import ShardChanged, Stamp

# Of each worker. Workers and ranks add up to what a network gives.
_THREADS = 2

Wanted = tuple[str, Stamp]


class Prefetcher:
    """Fetches in threads of its own until it is closed.

    Args:
        policy: Has the cache. No more is fetched ahead than this process's part of its room, so that nobody removes what
            others are about to read.
    """

    def __init__(self, policy: CachePolicy) -> None:
        self._cache = policy.cache
        self._room = self._cache.max_bytes // policy.sharers
        self._wanted: deque[Wanted] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._told = False
        # Daemons: a process that ends does not wait for a download.
        threads = [threading.Thread(target=self._work, name="prefetch", daemon=True) for _ in range(_THREADS)]
        for thread in threads:
            thread.start()

    def want(self, shards: Sequence[Wanted]) -> None:
        """Replaces what is to be fetched.

        Args:
            shards: Path and stamp of those that are read now and from now on, nearest first.
        """
        wanted: deque[Wanted] = deque()
        room = self._room
        for path, stamp in shards:
            room -= stamp.size
            if room < 0:
                break
            wanted.append((path, stamp))
        with self._changed:
            self._wanted = wanted
            self._changed.notify_all()

    def close(self) -> None:
        """Fetches nothing more; what is under way is given up when the process ends, and continued by others."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _work(self) -> None:
        while (wanted := self._next()) is not None:
            path, stamp = wanted
            try:
                if not self._cache.keep(path, stamp):
                    self._cache.fetch(path, stamp, wait=False)
            except CacheFull as error:
                self.want([])
                if not self._told:
                    self._told = True
                    warnings.warn(f"{error} Until then, samples are read one by one.", stacklevel=2)
            except (OSError, ShardChanged):
                continue

    def _next(self) -> Wanted | None:
        with self._changed:
            while not self._wanted and not self._closed:
                self._changed.wait()
            return None if self._closed else self._wanted.popleft()
