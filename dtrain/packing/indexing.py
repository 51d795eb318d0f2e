"""``python -m dtrain.pack index``: where every sample of many shards lies, found ahead of training."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from rich.console import Console

from dtrain.data import index_store, shards
from dtrain.data.shard_error import ShardError
from dtrain.data.urls import shown
from dtrain.packing.progress import progress
from dtrain.packing.workers import Tick, run

# Starting another process takes as long as indexing some dozens of shards.
_SHARDS_PER_PROCESS = 64
_SHARDS_PER_JOB = 8


@dataclass(frozen=True)
class _Looked:
    """What is told of a shard: little enough to come from another process."""

    samples: int = 0
    payload: int = 0
    members: Mapping[str, int] = field(default_factory=dict)
    doubts: tuple[str, ...] = ()
    error: str = ""


def index(patterns: Sequence[str], processes: int | None, console: Console) -> None:
    """Indexes shards and prints what they hold.

    Args:
        patterns: As ``dtrain.data.shards.expand`` takes them.
        processes: How many look at shards; None chooses by their number.
        console: For progress and what is damaged.

    Raises:
        ValueError: If a pattern matches nothing, or shards are damaged, once all were looked at.
        OSError: If a shard cannot be read.
    """
    paths = shards.expand(patterns)
    if processes is None:
        processes = min(os.cpu_count() or 1, -(-len(paths) // _SHARDS_PER_PROCESS))
    if processes < 1:
        raise ValueError(f"--processes {processes}: want at least 1.")
    start = time.perf_counter()
    samples, payload, damaged, members = 0, 0, 0, Counter[str]()
    jobs = (partial(_look, paths[first : first + _SHARDS_PER_JOB]) for first in range(0, len(paths), _SHARDS_PER_JOB))
    with progress(console, "shards", len(paths)) as tick:
        looks = (looked for some in run(jobs, processes, tick) for looked in some)
        for path, looked in zip(paths, looks, strict=True):
            samples += looked.samples
            payload += looked.payload
            members.update(looked.members)
            for doubt in looked.doubts:
                console.print(f"shard {shown(path)!r}: {doubt}", markup=False)
            if looked.error:
                damaged += 1
                console.print(f"pack: error: {looked.error}", markup=False)
    seconds = time.perf_counter() - start
    print(f"shards: {len(paths):,}, samples: {samples:,}, {payload / 1e9:,.3f} GB")
    print(", ".join(f"{extension} {count:,}" for extension, count in members.most_common()))
    print(f"{seconds:.1f} s, {members.total() / seconds:,.0f} members/s")
    if damaged:
        raise ValueError(f"{damaged} of {len(paths)} shards are damaged; they were named above.")


def _look(paths: Sequence[str], tick: Tick) -> list[_Looked]:
    looked = []
    for path in paths:
        looked.append(_look_at(path))
        tick(1)
    return looked


def _look_at(path: str) -> _Looked:
    try:
        index = index_store.load_or_build(path)
    except ShardError as error:
        return _Looked(error=str(error))
    counts = np.bincount(index.member_extension, minlength=len(index.extensions)).tolist()
    members = dict(zip(index.extensions, counts, strict=True))
    return _Looked(index.num_samples, int(index.member_size.sum()), members, tuple(index.doubts))
