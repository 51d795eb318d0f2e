"""Which shards are read through the cache of the node, and how much room they have there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from dtrain.config.cache_dir import cache_dir
from dtrain.data.mounts import is_network
from dtrain.data.node_cache import NodeCache
from dtrain.data.urls import is_url

STORAGE = ("auto", "fast", "slow")


@dataclass(frozen=True)
class CachePolicy:
    """What goes through the cache: every URL, and files on slow storage.

    Args:
        storage: What paths stand for: ``"fast"`` is read where it lies, ``"slow"`` goes through the cache, ``"auto"`` is
            slow on network file systems if the cache does not lie on one too.
        folder: Of the cache. None: ``shards`` in dtrain's cache directory.
        max_gb: Room for it, 1e9 bytes each. None: half of what is free on that disk.
        sharers: Processes of this node that share it, each with as much to fetch ahead.

    Raises:
        ValueError: If ``storage`` or ``max_gb`` is none of these.
    """

    storage: str = "auto"
    folder: str | None = None
    max_gb: float | None = None
    sharers: int = 1

    def __post_init__(self) -> None:
        if self.storage not in STORAGE:
            raise ValueError(f"data.storage: got {self.storage!r}, want one of {', '.join(STORAGE)}.")
        if self.max_gb is not None and not self.max_gb > 0:
            raise ValueError(
                f"data.cache.max_gb: got {self.max_gb}, want a number above 0, or null for half of the disk."
            )

    @classmethod
    def of(cls, storage: str, folder: str | None, max_gb: float | None) -> CachePolicy:
        """The policy of a process that ``torchrun`` may have started beside others."""
        return cls(storage, folder, max_gb, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    @cached_property
    def cache(self) -> NodeCache:
        """The cache itself; nothing is made before something is fetched."""
        folder = Path(self.folder).expanduser() if self.folder else cache_dir() / "shards"
        return NodeCache(folder, None if self.max_gb is None else int(self.max_gb * 1e9))

    def applies_to(self, path: str) -> bool:
        """True if a shard is read through the cache; the same for all shards of a folder."""
        if is_url(path):
            return True
        if self.storage != "auto":
            return self.storage == "slow"
        return is_network(os.path.dirname(os.path.abspath(path))) and not is_network(_there_is(self.cache.folder))


def _there_is(folder: Path) -> Path:
    """A folder, or the nearest one above it that exists already."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())
