"""Time to the first batch at the start of an epoch and after a resume at 1 %, 50 % and 99 % of it, and the bytes that are read.

    python scripts/bench_resume.py [--shards 'GLOB'] [--workers 0 2] [--rounds 11] [--json FILE]

A loader is made, the state is loaded, and one batch is taken; the index of the shards is kept from an earlier time, as
after any restart. Shards are those of ``$DTRAIN_TEST_CIFAR10``, else generated 32x32 JPEGs. ``first batch`` begins where
the state is loaded, ``with the loader`` where the loader is made.

Bytes read are what the kernel counted for this process (``rchar`` in /proc/self/io) over the next 20 batches without
workers; the samples' own are those of their members and of the tar headers between them. Equal means that nothing is read
but the samples returned.
"""

from __future__ import annotations

import functools
import glob
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_common import command_line, finish, interleaved, ratio, spread, table
from bench_images import jpeg_shards

from dtrain.data import ShardLoader
from dtrain.data.dataset_index import DatasetIndex

FIELDS = {"jpg": {"name": "image", "role": "image"}, "cls": {"name": "label", "role": "label"}}
BATCH = 256
PLACES = {"start of the epoch": 0.0, "at 1 %": 0.01, "at 50 %": 0.5, "at 99 %": 0.99}
COUNTED_BATCHES = 20


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--shards", help="other shards, with jpg and cls")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    rounds = 2 if arguments.quick else arguments.rounds
    report: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DTRAIN_CACHE"] = f"{folder}/cache"
        shards = _shards(arguments.shards, Path(folder), arguments.quick)
        bytes_read = {place: _bytes_read(shards, share) for place, share in PLACES.items()}
        for workers in arguments.workers:
            first = interleaved(rounds, PLACES, functools.partial(_first_batch, shards, workers, False))
            whole = interleaved(rounds, PLACES, functools.partial(_first_batch, shards, workers, True))
            fresh = first["start of the epoch"]
            lines = []
            for place in PLACES:
                got, own = bytes_read[place]
                times = [spread(first[place], 1), f"{ratio(first[place], fresh):.2f}", spread(whole[place], 1)]
                lines.append([place, *times, f"{got:,}", f"{got / own:.3f}"])
            columns = ["first batch, ms", "ratio", "with the loader, ms", "bytes read", "of the samples'"]
            print(table(f"resume, {len(shards)} shards, batch {BATCH}, {workers} workers", columns, lines))
            print(f"{rounds} interleaved rounds, median (min-max)\n")
            report[f"{workers} workers"] = {"first_batch_ms": first, "with_loader_ms": whole}
    finish(arguments, {"measured": report, "bytes_read_and_own": bytes_read}, ("dtrain", "torch", "numpy"))


def _shards(pattern: str | None, folder: Path, quick: bool) -> list[str]:
    cifar10 = os.environ.get("DTRAIN_TEST_CIFAR10")
    if pattern is None and cifar10 is not None:
        pattern = f"{cifar10}/train-*.tar"
    if pattern is None:
        return jpeg_shards(folder, number=3_000 if quick else 30_000, width=32, height=32, shards=10)
    shards = sorted(glob.glob(pattern))
    if not shards:
        raise SystemExit(f"--shards: {pattern!r} matches nothing.")
    return shards


def _loader(shards: list[str], workers: int) -> ShardLoader:
    return ShardLoader(shards, FIELDS, global_batch_size=BATCH, num_workers=workers)


def _go_to(loader: ShardLoader, share: float) -> None:
    # What a checkpoint would hold there: the state of a fresh loader with that many steps committed.
    state = loader.state_dict()
    state["layouts"][-1][-1] = int(share * loader.steps_per_epoch)
    loader.load_state_dict(state)


def _first_batch(shards: list[str], workers: int, with_loader: bool, place: str) -> float:
    """Milliseconds to the first batch, with or without those to make the loader."""
    started = time.perf_counter()
    loader = _loader(shards, workers)
    if not with_loader:
        started = time.perf_counter()
    _go_to(loader, PLACES[place])
    next(iter(loader))
    ended = time.perf_counter()
    loader.close()
    return (ended - started) * 1e3


def _bytes_read(shards: list[str], share: float) -> tuple[int, int]:
    """Bytes that batches from there on made this process read, and those of their samples."""
    loader = _loader(shards, 0)
    index = DatasetIndex.build(shards, list(FIELDS))
    _go_to(loader, share)
    # Imports and the like, which a first batch may bring with it, are no part of it.
    next(iter(loader))
    stream = iter(loader)
    numbers = {key: sample for sample, key in enumerate(index.keys(np.arange(index.num_samples)))}
    keys: list[str] = []
    asking = _characters_read()
    asking = _characters_read() - asking
    before = _characters_read()
    for _ in range(COUNTED_BATCHES):
        keys += [key for key in next(stream).sample_keys if key]
        loader.commit()
        if loader.position[1] == 0:  # the epoch ended
            break
    got = _characters_read() - before - asking
    samples = np.array([numbers[key] for key in keys])
    first, last = index.offsets[samples], index.offsets[samples] + index.sizes[samples]
    loader.close()
    return got, int((last.max(1) - first.min(1)).sum())


def _characters_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


if __name__ == "__main__":
    main()
