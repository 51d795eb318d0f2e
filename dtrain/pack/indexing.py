"""``dtrain pack index``: indexes shards before training does."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from rich.console import Console

from dtrain.console import OnProgress, progress
from dtrain.data.shards import shard_index
from dtrain.data.shards.patterns import expand
from dtrain.data.shards.tar import ShardError
from dtrain.errors import printable
from dtrain.pack.pool import run_jobs
from dtrain.urls import redacted

# Starting another process takes about as long as indexing this many shards.
_SHARDS_PER_PROCESS = 64
_SHARDS_PER_JOB = 8


def index_shards(patterns: Sequence[str], processes: int | None, console: Console) -> None:
    """Runs ``pack index PATTERN...``: indexes shards and prints a summary of their contents.

    Args:
        patterns: Paths, globs and brace patterns, as ``dtrain.data.shards.patterns.expand`` takes them.
        processes: Number of processes; None chooses it by the number of shards.
        console: Where progress, warnings and errors are shown.

    Raises:
        ValueError: If a pattern matches nothing, or shards are damaged; raised after all shards were read.
        OSError: If a shard cannot be read.
    """
    paths = expand(patterns)
    if processes is None:
        processes = min(os.cpu_count() or 1, -(-len(paths) // _SHARDS_PER_PROCESS))
    if processes < 1:
        raise ValueError(f"--processes {processes}: want at least 1.")
    start = time.perf_counter()
    samples, payload, damaged, members = 0, 0, 0, Counter[str]()
    jobs = (partial(_index, paths[first : first + _SHARDS_PER_JOB]) for first in range(0, len(paths), _SHARDS_PER_JOB))
    with progress(console, "shards", len(paths)) as on_progress:
        contents = (content for results in run_jobs(jobs, processes, on_progress) for content in results)
        for path, content in zip(paths, contents, strict=True):
            samples += content.samples
            payload += content.payload
            members.update(content.members)
            for warning in content.warnings:
                console.print(printable(f"shard {redacted(path)!r}: {warning}"), markup=False)
            if content.error:
                damaged += 1
                console.print(printable(f"pack: error: {content.error}", keep="\n"), markup=False)
    seconds = time.perf_counter() - start
    print(f"shards: {len(paths):,}, samples: {samples:,}, {payload / 1e9:,.3f} GB")
    print(printable(", ".join(f"{extension} {count:,}" for extension, count in members.most_common())))
    print(f"{seconds:.1f} s, {members.total() / seconds:,.0f} members/s")
    if damaged:
        raise ValueError(
            f"{damaged} of {len(paths)} shards are damaged; they are listed above. `dtrain pack repair` "
            "copies the whole samples of those that are cut."
        )


@dataclass(frozen=True)
class _ShardContent:
    """Summary of one shard; small, because it is sent between processes."""

    samples: int = 0
    payload: int = 0  # bytes
    members: Mapping[str, int] = field(default_factory=dict)  # extension to number of members
    warnings: tuple[str, ...] = ()
    error: str = ""


def _index(paths: Sequence[str], on_progress: OnProgress) -> list[_ShardContent]:
    contents = []
    for path in paths:
        contents.append(_index_one(path))
        on_progress(1)
    return contents


def _index_one(path: str) -> _ShardContent:
    try:
        index = shard_index.load_or_build(path)
    except ShardError as error:
        return _ShardContent(error=str(error))
    counts = np.bincount(index.member_extension, minlength=len(index.extensions)).tolist()
    members = dict(zip(index.extensions, counts, strict=True))
    return _ShardContent(index.num_samples, int(index.member_size.sum()), members, tuple(index.doubts))
