"""What is left of the loader's rate when every open and every read takes 5 ms longer, as on a network file system.

    python scripts/bench_slow_storage.py [--latency 5] [--workers 2] [--rounds 3] [--json FILE]

Generated 500x375 photographs in shards, a random resized crop of 224x224 of each, and the same images as files of their
own, the way that image folders are read. Latency is added by a wrapper round ``os.open`` and ``os.pread`` of everything in
their folder, in all processes; it also counts. Shards come through the node's cache (``data.storage=slow``), which is empty
at the start of each measurement, or are read where they lie (``fast``). Measured is the first epoch, its beginning
included, or as much of it as ``--seconds`` allow.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_common import command_line, finish, ratio, spread, table
from bench_images import jpeg_shards

from dtrain.data import ShardLoader
from dtrain.data.augment import RandomResizedCrop
from dtrain.data.cache_policy import CachePolicy
from dtrain.data.dataset_index import DatasetIndex
from dtrain.data.image import decode_image
from dtrain.data.storage import ShardReader

BATCH = 64
CROP = RandomResizedCrop(224)
FIELDS = {"jpg": {"name": "image", "role": "image"}, "cls": {"name": "label", "role": "label"}}
#: What is read, and whether it takes longer. The first is what the others are compared with.
CASES = {
    "shards, local": ("fast", False),
    "shards, slow, through the cache": ("slow", True),
    "shards, slow, where they lie": ("fast", True),
    "files, local": ("files", False),
    "files, slow": ("files", True),
}


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--latency", type=float, default=5, help="milliseconds")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=15, help="at most for each measurement")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="where generated data is kept for the next time")
    parser.add_argument("--one", choices=CASES, help="measure this alone, as JSON")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.5
    if arguments.one is not None:
        print(
            json.dumps(measure(arguments.one, arguments.data, arguments.latency, arguments.workers, arguments.seconds))
        )
        return
    measured: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.data or Path(temporary)).resolve()
        number, shards = (256, 4) if arguments.quick else (6_000, 24)
        _write_files(
            jpeg_shards(folder / "shards", number=number, width=500, height=375, shards=shards), folder / "files"
        )
        options = ["--data", str(folder), "--latency", str(arguments.latency)]
        options += ["--workers", str(arguments.workers), "--seconds", str(arguments.seconds)]
        for turn in range(arguments.rounds):
            cases = list(CASES)
            for case in cases[turn % len(cases) :] + cases[: turn % len(cases)]:
                with tempfile.TemporaryDirectory() as cache:
                    one = [sys.executable, __file__, "--one", case, *options]
                    environ = os.environ | {"DTRAIN_CACHE": cache, "OMP_NUM_THREADS": "1"}
                    done = subprocess.run(one, env=environ, check=True, stdout=subprocess.PIPE, text=True)
                    measured[case].append(json.loads(done.stdout))
    print(show(measured, arguments.latency, arguments.workers, arguments.rounds), end="\n\n")
    finish(arguments, {"measured": measured}, ("dtrain", "torch", "numpy"))


def show(measured: dict[str, list[dict[str, float]]], latency: float, workers: int, rounds: int) -> str:
    """The table."""
    rates = {case: [one["samples/s"] for one in found] for case, found in measured.items()}
    lines = []
    for case, found in measured.items():
        base = rates["files, local" if case.startswith("files") else "shards, local"]
        reads = [one["reads"] / one["samples"] for one in found]
        read = [one["bytes"] / one["samples"] / 1e3 for one in found]
        lines.append([case, spread(rates[case]), f"{ratio(rates[case], base):.2f}", spread(reads, 3), spread(read)])
    title = f"500x375 JPEG -> 224x224, {workers} workers, batch {BATCH}, slow: {latency:g} ms more"
    columns = ["samples/s", "of local", "opens and reads a sample", "KB a sample"]
    return f"{table(title, columns, lines)}\n{rounds} interleaved rounds, median (min-max)"


def measure(case: str, folder: Path, latency: float, workers: int, seconds: float) -> dict[str, float]:
    """Samples a second, and what was asked of the slow folder."""
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork")  # workers inherit the wrapper, and count together
    kind, slow = CASES[case]
    shards = sorted(map(str, (folder / "shards").glob("*.tar")))
    DatasetIndex.build(shards, list(FIELDS))  # as at the second start
    batches = _of_files(folder / "files", workers) if kind == "files" else _of_shards(shards, kind, workers)
    counted = Latency(folder, latency / 1e3 if slow else 0)
    samples, started = 0, time.perf_counter()
    for valid in batches:
        samples += valid
        ended = time.perf_counter()
        if ended - started > seconds:
            break
    if not counted.bytes.value:
        raise RuntimeError(f"{case}: nothing of {folder} was read through os.pread; the wrapper misses it")
    found = {"reads": counted.reads.value, "bytes": counted.bytes.value}
    return {"samples/s": samples / (ended - started), "samples": samples, **found}


class Latency:
    """From now on ``os.open`` and ``os.pread`` of files in a folder take longer and are counted, in forks too.

    Args:
        folder: The slow one.
        seconds: Added to each call.
    """

    def __init__(self, folder: Path, seconds: float) -> None:
        self.reads = multiprocessing.Value(ctypes.c_longlong)
        self.bytes = multiprocessing.Value(ctypes.c_longlong)
        self._inside = f"{folder}{os.sep}"
        self._seconds = seconds
        self._slow: set[int] = set()
        self._open, self._pread, self._close = os.open, os.pread, os.close
        os.open, os.pread, os.close = self.open, self.pread, self.close  # type: ignore[assignment]

    def open(self, path: Any, *arguments: Any, **options: Any) -> int:
        """``os.open``."""
        descriptor = self._open(path, *arguments, **options)
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(self._inside):
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

    def _count(self, got: int) -> None:
        with self.reads.get_lock(), self.bytes.get_lock():
            self.reads.value += 1
            self.bytes.value += got
        time.sleep(self._seconds)


# -- what is read


def _of_shards(shards: list[str], storage: str, workers: int) -> Iterator[int]:
    """Valid samples of each batch of an epoch of ShardLoader."""
    policy = CachePolicy(storage)
    loader = ShardLoader(shards, FIELDS, global_batch_size=BATCH, num_workers=workers, augment=CROP, policy=policy)
    for batch in loader.epoch(0):
        yield int(batch.valid.sum())
        loader.commit()


def _of_files(folder: Path, workers: int) -> Iterator[int]:
    """The same of a file for each image, in random order, with the same decoder and crop."""
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


def _write_files(shards: list[str], folder: Path) -> None:
    if folder.exists():
        return
    folder.mkdir()
    index = DatasetIndex.build(shards, ["jpg"])
    reader = ShardReader(shards)
    for sample in range(index.num_samples):
        span = int(index.offsets[sample, 0]), int(index.sizes[sample, 0])
        (folder / f"{sample:06d}.jpg").write_bytes(reader.read(int(index.shards_of(sample)), *span))


if __name__ == "__main__":
    main()
