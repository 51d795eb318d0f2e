"""Time to the first batch at the start of an epoch and after a resume at 1 %, 50 % and 99 % of it, and the bytes read.

    python -m benchmarks.resume [--shards 'GLOB'] [--workers 0 2] [--rounds 11] [--json FILE]

A loader is made, its state is loaded, and one batch is taken; the index of the shards is stored, as after any restart.
Shards are those of ``$DTRAIN_TEST_CIFAR10``, else generated 32x32 JPEGs. ``first batch`` counts from loading the state,
``with the loader`` from making the loader.

``bytes read`` are what the kernel counts for this process (``rchar`` in /proc/self/io) over the next 20 batches, without
workers. A ratio of 1 to the bytes of the samples (members and the tar headers between them) means that nothing else is
read.
"""

from __future__ import annotations

import functools
import glob
import os
import time
from pathlib import Path

import numpy as np

from benchmarks import harness
from dtrain.data import ShardLoader
from dtrain.data.shards.dataset_index import DatasetIndex

BATCH = 256
FRESH = "start of the epoch"
#: By row: how much of the epoch is done.
ROWS = {FRESH: 0.0, "at 1 %": 0.01, "at 50 %": 0.5, "at 99 %": 0.99}
COUNTED_BATCHES = 20


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=11)
    parser.add_argument("--shards", help="other shards, with jpg and cls")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    arguments = harness.parse(parser, rounds=2)
    report = {}
    with harness.scratch() as folder:
        shards = find_shards(arguments.shards, folder, arguments.quick)
        bytes_read = {row: count_bytes(shards, share) for row, share in ROWS.items()}
        for workers in arguments.workers:
            results = harness.interleaved(arguments.rounds, ROWS, functools.partial(first_batch, shards, workers))
            first = harness.column(results, "first")
            table = harness.Table(f"resume, {len(shards)} shards, batch {BATCH}, {workers} workers", ROWS)
            table.medians("first batch, ms", first, 1)
            table.ratios("ratio", first, first[FRESH])
            table.medians("with the loader, ms", harness.column(results, "with the loader"), 1)
            table.text("bytes read", {row: f"{read:,}" for row, (read, _) in bytes_read.items()})
            table.text("of the samples'", {row: f"{read / own:.3f}" for row, (read, own) in bytes_read.items()})
            table.show(harness.rounds_note(arguments.rounds))
            report[f"{workers} workers"] = results
    harness.finish(arguments, {"milliseconds": report, "bytes_read_and_own": bytes_read})


def find_shards(pattern: str | None, folder: Path, quick: bool) -> list[str]:
    """The shards to read, generated if there are none."""
    cifar10 = os.environ.get("DTRAIN_TEST_CIFAR10")
    if pattern is None and cifar10 is None:
        return harness.jpeg_shards(folder, number=3_000 if quick else 30_000, width=32, height=32, shards=10)
    pattern = pattern or f"{cifar10}/train-*.tar"
    shards = sorted(glob.glob(pattern))
    if not shards:
        raise SystemExit(f"--shards: {pattern!r} matches no file.")
    return shards


def first_batch(shards: list[str], workers: int, row: str) -> dict[str, float]:
    """Milliseconds to the first batch, without and with those to make the loader."""
    started = time.perf_counter()
    loader = make_loader(shards, workers)
    made = time.perf_counter()
    resume_at(loader, ROWS[row])
    next(iter(loader))
    ended = time.perf_counter()
    loader.close()
    return {"first": (ended - made) * 1e3, "with the loader": (ended - started) * 1e3}


def make_loader(shards: list[str], workers: int) -> ShardLoader:
    """A loader at the start of its first epoch."""
    return ShardLoader(shards, harness.IMAGE_FIELDS, global_batch_size=BATCH, num_workers=workers)


def resume_at(loader: ShardLoader, share: float) -> None:
    """Loads the state that a checkpoint would hold after this share of the epoch."""
    state = loader.state_dict()
    state["layouts"][-1][-1] = int(share * loader.steps_per_epoch)
    loader.load_state_dict(state)


def count_bytes(shards: list[str], share: float) -> tuple[int, int]:
    """Bytes that this process reads for the next batches, and the bytes of their samples."""
    loader = make_loader(shards, workers=0)
    index = DatasetIndex.build(shards, list(harness.IMAGE_FIELDS))
    resume_at(loader, share)
    next(iter(loader))  # a first batch may import modules, which are read too
    batches = iter(loader)
    numbers = {key: sample for sample, key in enumerate(index.keys(np.arange(index.num_samples)))}
    keys: list[str] = []
    asking = characters_read()
    asking = characters_read() - asking  # the bytes of reading the counter itself
    before = characters_read()
    for _ in range(COUNTED_BATCHES):
        keys += [key for key in next(batches).sample_keys if key]
        loader.commit()
        if loader.position[1] == 0:  # the epoch ended
            break
    read = characters_read() - before - asking
    samples = np.array([numbers[key] for key in keys])
    first, last = index.offsets[samples], index.offsets[samples] + index.sizes[samples]
    loader.close()
    return read, int((last.max(1) - first.min(1)).sum())


def characters_read() -> int:
    """Bytes that this process has read so far, from files in the page cache too."""
    return int(Path("/proc/self/io").read_text().split()[1])


if __name__ == "__main__":
    main()
