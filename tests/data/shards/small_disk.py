"""A program: processes share a cache on a disk of its own, read copies, hold some open, and are killed meanwhile.

    unshare --map-root-user --mount python -m tests.data.shards.small_disk FOLDER SECONDS

Prints as JSON the most bytes that were in use on the disk, the limit, and how many shards were fetched and read.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from dtrain.data.shards.node_cache import CachedShard, CacheInUse, NodeCache
from dtrain.data.shards.shard_file import stamp_of
from tests.shards import write_patterns

SHARDS, SIZE = 24, 64 * 4096
LIMIT = 4 * SIZE


def main(folder: Path, seconds: float) -> None:
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={2 * LIMIT}", "none", str(disk)], check=True)
    paths = write_patterns(folder / "data", SHARDS, SIZE)
    context = multiprocessing.get_context("fork")
    counts = context.RawArray("q", 3)  # without a lock, which a killed process would keep
    numbers = iter(range(1_000_000))

    def start() -> Any:
        process = context.Process(target=work, args=(disk, paths, counts, next(numbers)), daemon=True)
        process.start()
        return process

    processes = [start() for _ in range(4)]
    most, kills, end = 0, 0, time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(20):
            usage = os.statvfs(disk)
            most = max(most, (usage.f_blocks - usage.f_bfree) * usage.f_frsize)
            time.sleep(0.001)
        assert not any(process.exitcode for process in processes), [process.exitcode for process in processes]
        victim = processes.pop(random.randrange(len(processes)))
        victim.kill()
        victim.join()
        kills += 1
        processes.append(start())
    for process in processes:
        process.kill()
        process.join()
    # What the killed ones left is no obstacle.
    cache = NodeCache(disk, LIMIT)
    for path in paths:
        cache.fetch(path, stamp_of(path))
    print(
        json.dumps(
            {"most": most, "limit": LIMIT, "kills": kills, "fetched": counts[0], "read": counts[1], "in_use": counts[2]}
        )
    )


def work(disk: Path, paths: list[str], counts: Any, seed: int) -> None:
    """Fetches and reads shards in random order, and keeps the last two copies open."""
    cache, choose = NodeCache(disk, LIMIT), random.Random(seed)
    copies: deque[CachedShard] = deque()
    while True:
        path = choose.choice(paths)
        stamp = stamp_of(path)
        result = 1
        copy = cache.use(path, stamp)
        if copy is None:
            try:
                with cache.fetch_open(path, stamp) as file:
                    copy = CachedShard(file.fileno(), stamp)
                result = 0
            except CacheInUse:
                result = 2
        counts[result] += 1
        if copy is not None:
            assert bytes(copy.read(0, SIZE)) == Path(path).read_bytes()
            copies.append(copy)
        if len(copies) > choose.randrange(3):
            copies.popleft().close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
