"""The loader's rate when every open and every read takes 5 ms longer, as on a network file system.

    python -m benchmarks.slow_storage [--latency 5] [--workers 2] [--rounds 3] [--json FILE]

Generated photographs of 500x375, cropped at random to 224x224: in shards, and as a file for each image, the way that image
folders are read. A wrapper around ``os.open`` and ``os.pread`` adds the latency in all processes, and counts. Shards are
copied through the node's cache (``data.storage=slow``), which is empty at the start of each measurement, or read in place
(``fast``). The first epoch is measured with its start, or its first ``--seconds``.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import harness
from dtrain.data import ShardLoader
from dtrain.data.augment import RandomResizedCrop
from dtrain.data.fields.decode import decode_image
from dtrain.data.shards.dataset_index import DatasetIndex
from dtrain.data.shards.node_cache import CachePolicy
from dtrain.data.sources.shard_reader import ShardReader

BATCH = 64
CROP = RandomResizedCrop(224)
#: By row: kind of storage, whether it is slow, and the row to compare with.
ROWS = {
    "shards, local": ("fast", False, "shards, local"),
    "shards, slow, through the cache": ("slow", True, "shards, local"),
    "shards, slow, in place": ("fast", True, "shards, local"),
    "files, local": ("files", False, "files, local"),
    "files, slow": ("files", True, "files, local"),
}


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=3)
    parser.add_argument("--latency", type=float, default=5, help="milliseconds added to each open and read")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15, help="longest measurement")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="where to keep the generated data")
    arguments = harness.parse(parser, rounds=1, seconds=0.5)
    with harness.scratch(arguments.data) as folder:
        number, shards = (256, 4) if arguments.quick else (6_000, 24)
        paths = harness.jpeg_shards(folder / "shards", number=number, width=500, height=375, shards=shards)
        write_files(paths, folder / "files")

        def measure_row(row: str) -> dict[str, float]:
            options = str(folder), arguments.latency, arguments.workers, arguments.seconds
            with tempfile.TemporaryDirectory() as cache:
                return harness.in_new_process(measure, row, *options, DTRAIN_CACHE=cache)

        results = harness.interleaved(arguments.rounds, ROWS, measure_row)
    rates = harness.column(results, "samples/s")
    title = f"500x375 JPEG -> 224x224, {arguments.workers} workers, batch {BATCH}, slow: {arguments.latency:g} ms more"
    table = harness.Table(title, ROWS)
    table.medians("samples/s", rates)
    table.ratios("of local", rates, {row: rates[base] for row, (_, _, base) in ROWS.items()})
    for heading, name, scale, decimals in (
        ("opens and reads a sample", "reads", 1, 3),
        ("KB a sample", "bytes", 1e-3, 0),
    ):
        each = {row: [one[name] / one["samples"] * scale for one in found] for row, found in results.items()}
        table.medians(heading, each, decimals)
    table.show(harness.rounds_note(arguments.rounds))
    harness.finish(arguments, {"measured": results})


def measure(row: str, data: str, latency: float, workers: int, seconds: float) -> dict[str, float]:
    """Samples a second, and the reads in the folder; in a process of its own."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork")  # workers inherit the wrapper and share its counters
    folder, (kind, slow, _) = Path(data), ROWS[row]
    shards = sorted(map(str, (folder / "shards").glob("*.tar")))
    DatasetIndex.build(shards, list(harness.IMAGE_FIELDS))  # stored, as after the first start
    batches = read_files(folder / "files", workers) if kind == "files" else read_shards(shards, kind, workers)
    counted = Latency(folder, latency / 1e3 if slow else 0)
    samples, started = 0, time.perf_counter()
    for valid in batches:
        samples += valid
        ended = time.perf_counter()
        if ended - started > seconds:
            break
    if not counted.bytes.value:
        raise RuntimeError(f"{row}: nothing of {folder} was read through os.pread, so no latency was added")
    counts = {"samples": samples, "reads": counted.reads.value, "bytes": counted.bytes.value}
    return {"samples/s": samples / (ended - started), **counts}


class Latency:
    """Makes ``os.open`` and ``os.pread`` of files in a folder slower and counts them, in forked processes too.

    Args:
        folder: The slow folder.
        seconds: Added to each call.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.reads = multiprocessing.Value(ctypes.c_longlong)
        self.bytes = multiprocessing.Value(ctypes.c_longlong)
        self._prefix = f"{folder}{os.sep}"
        self._seconds = seconds
        self._slow: set[int] = set()  # descriptors
        self._open, self._pread, self._close = os.open, os.pread, os.close
        os.open, os.pread, os.close = self.open, self.pread, self.close  # type: ignore[assignment]

    def open(self, path: Any, *arguments: Any, **options: Any) -> int:
        """``os.open``."""
        descriptor = self._open(path, *arguments, **options)
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self._prefix):
            self._slow.add(descriptor)
            self._count(0)
        return descriptor

    def pread(self, descriptor: int, size: int, offset: int) -> bytes:
        """``os.pread``."""
        data = self._pread(descriptor, size, offset)
        if descriptor in self._slow:
            self._count(len(data))
        return data

    def close(self, descriptor: int) -> None:
        """``os.close``."""
        self._slow.discard(descriptor)
        self._close(descriptor)

    def _count(self, nbytes: int) -> None:
        with self.reads.get_lock(), self.bytes.get_lock():
            self.reads.value += 1
            self.bytes.value += nbytes
        time.sleep(self._seconds)


def read_shards(shards: list[str], storage: str, workers: int) -> Iterator[int]:
    """Valid samples of each batch of an epoch of ShardLoader."""
    options: dict[str, Any] = {"num_workers": workers, "augment": CROP, "policy": CachePolicy(storage)}
    loader = ShardLoader(shards, harness.IMAGE_FIELDS, global_batch_size=BATCH, **options)
    for batch in loader.epoch(0):
        yield int(batch.valid.sum())
        loader.commit()


def read_files(folder: Path, workers: int) -> Iterator[int]:
    """Samples of each batch of the same images as files, in random order, with the same decoder and crop."""
    for images in torch.utils.data.DataLoader(Files(folder), BATCH, shuffle=True, num_workers=workers):
        yield len(images)


class Files(torch.utils.data.Dataset[torch.Tensor]):
    """A file for each image: opened, read, closed."""

    def __init__(self, folder: Path) -> None:
        self._paths = sorted(map(str, folder.glob("*.jpg")))
        self._rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, number: int) -> torch.Tensor:
        descriptor = os.open(self._paths[number], os.O_RDONLY)
        payload = os.pread(descriptor, os.fstat(descriptor).st_size, 0)
        os.close(descriptor)
        return torch.from_numpy(decode_image(payload, lambda height, width: CROP.crop(height, width, self._rng)))


def write_files(shards: list[str], folder: Path) -> None:
    """Writes the images of shards as files, unless they are there."""
    if folder.exists():
        return
    folder.mkdir()
    index, reader = DatasetIndex.build(shards, ["jpg"]), ShardReader(shards)
    for sample in range(index.num_samples):
        offset, size = int(index.offsets[sample, 0]), int(index.sizes[sample, 0])
        (folder / f"{sample:06d}.jpg").write_bytes(reader.read(int(index.shards_of(sample)), offset, size))


if __name__ == "__main__":
    main()
