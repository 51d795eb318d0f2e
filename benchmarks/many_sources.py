"""Mixtures of many sources, and long lists of shards: threads, open files, memory, and the time to the first batch.

    python -m benchmarks.many_sources [--sources 40] [--workers 8] [--entries 100000] [--rounds 3] [--json FILE]

Each source has four shards of 250 samples. ``in place`` reads files, ``cache`` reads them through the node cache, as shards
behind URLs are read. After 20 batches of 256, /proc says how many threads and open files each worker has, and its private
memory and share of common memory (PSS). Threads and files are those of the worker that has most; memory is the sum of all.

The list names shards of one sample. ``first start`` builds their indexes, ``later start`` loads what it has stored.
"""

from __future__ import annotations

import functools
import os
import shutil
import time
import warnings
from pathlib import Path

from benchmarks import harness
from dtrain.data import Mixture, ShardLoader, WorkerOptions, write_shards
from dtrain.data.shards.dataset_index import DatasetIndex
from dtrain.data.shards.node_cache import CachePolicy
from dtrain.data.shards.patterns import expand

FIELDS = {"cls": {"name": "label", "role": "label"}}
BATCH, BATCHES, SHARDS, SAMPLES = 256, 20, 4, 1000


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=3)
    parser.add_argument("--sources", type=int, default=40)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--entries", type=int, default=100_000, help="shards of the list")
    arguments = harness.parse(parser, rounds=1)
    if arguments.quick:
        arguments.sources, arguments.workers, arguments.entries = 3, 2, 200
    with harness.scratch() as folder:
        sources = {f"s{number}": _source(folder / f"s{number}") for number in range(arguments.sources)}
        rows = {"1 source, in place": (1, "fast"), "all sources, in place": (None, "fast")}
        rows |= {"1 source, cache": (1, "slow"), "all sources, cache": (None, "slow")}
        call = functools.partial(_measure, sources, arguments.workers, folder / "copies")
        results = harness.interleaved(arguments.rounds, rows, lambda row: call(*rows[row]))
        table = harness.Table(f"{arguments.sources} sources, {arguments.workers} workers, batch {BATCH}", rows)
        for name, digits in (("threads", 0), ("files", 0), ("MB", 0), ("first batch, s", 2), ("index, s", 2)):
            table.medians(name, harness.column(results, name), digits)
        table.show(harness.rounds_note(arguments.rounds))
        listed = _list(folder / "list", arguments.entries)
        table = harness.Table(f"list of {arguments.entries:,} shards", ["first start", "later start"])
        times = {"first start": _start(listed), "later start": _start(listed)}
        for name in ("read and expand, s", "index, s"):
            table.medians(name, {row: [found[name]] for row, found in times.items()}, 1)
        table.show("")
    harness.finish(arguments, {"sources": results, "list": times})


def _source(folder: Path) -> str:
    write_shards(({"__key__": f"{n:06d}", "cls": n % 10} for n in range(SAMPLES)), folder, shards=SHARDS, total=SAMPLES)
    return str(folder / "*.tar")


def _measure(sources: dict[str, str], workers: int, copies: Path, number: int | None, storage: str) -> dict[str, float]:
    shutil.rmtree(copies, ignore_errors=True)
    began = time.perf_counter()
    mixture = Mixture(dict(list(sources.items())[:number]))
    policy = CachePolicy(storage, str(copies), max_gb=1)
    options = WorkerOptions(start_method="fork")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # more workers than cores
        loader = ShardLoader(
            mixture, FIELDS, global_batch_size=BATCH, num_workers=workers, policy=policy, workers=options
        )
        indexed = time.perf_counter()
        batches = loader.epoch(0)
        next(batches)
        first = time.perf_counter()
        for _ in range(BATCHES):
            loader.commit()
            if next(batches, None) is None:
                batches = loader.epoch(loader.position[0])
                next(batches)
    pids = harness.children(os.getpid())
    found = {
        "threads": float(max(len(os.listdir(f"/proc/{pid}/task")) for pid in pids)),
        "files": float(max(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)),
        "MB": sum(map(_pss, pids)) / 1e6,
        "first batch, s": first - indexed,
        "index, s": indexed - began,
    }
    loader.close()
    return found


def _pss(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(float(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def _list(folder: Path, entries: int) -> str:
    (shard,) = write_shards([{"__key__": "0", "cls": 1}], folder, shards=1)
    content = Path(shard).read_bytes()
    names = [f"{number:06d}.tar" for number in range(entries)]
    for name in names:
        (folder / name).write_bytes(content)
    (folder / "shards.txt").write_text("\n".join(names))
    return f"@{folder / 'shards.txt'}"


def _start(listed: str) -> dict[str, float]:
    began = time.perf_counter()
    paths = expand(listed)
    expanded = time.perf_counter()
    DatasetIndex.build(paths, ["cls"])
    return {"read and expand, s": expanded - began, "index, s": time.perf_counter() - expanded}


if __name__ == "__main__":
    main()
