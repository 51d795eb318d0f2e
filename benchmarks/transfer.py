"""Size and cost of a batch on its way from a loader worker to the model, by transfer dtype and by means of transport.

    python -m benchmarks.transfer [--rounds 7] [--json FILE]
    python -m benchmarks.transfer --megabytes 0.1 1 4 16 64 --workers 1 2 4 8
    python -m benchmarks.transfer --threads 1 2 4

With ``--megabytes``: what each means of transport costs a batch of one tensor of that size, for each number of workers. A
worker writes the batch by one copy in memory, and the trainer reads it by another; ``copies`` is both of them in one
process, which is the least possible. ``pipe`` sends the bytes through torch's queue; ``file`` creates shared memory for
each batch, as torch's DataLoader does; ``slots`` uses shared memory again, as ``ShardLoader`` does for large tensors.

With ``--threads``: what it costs to decode photographs of 500x375 and to cut random crops of 224x224 out of them into one
batch, in so many threads of a process, and in as many processes, without any transport.

Without these options, by transfer dtype:

Batches of 64: images of 224x224x3 and features of 4,096 floats. Each row sends the same values through the loader with one
worker: pixels as uint8, or values normalised beforehand and cast in the worker to fp32, bf16 or fp16. Nothing is decoded.

``ms in the loop`` is the time a batch costs the training loop, ``CPU ms`` the CPU time in both processes. ``ms to floats``
is the time of ``batch.to("cpu")``: nothing for floats, for uint8 the normalisation, which a GPU would do instead.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from benchmarks import harness
from dtrain.data import Batch, ShardLoader
from dtrain.data.augment import RandomResizedCrop
from dtrain.data.fields.decode import decode_image
from dtrain.data.loading import ipc
from dtrain.data.loading.workers import WorkerStream

BATCH = 64
SHAPES = {"image": (224, 224, 3), "feature": (4096,)}
DTYPES = {"image": ("fp32", "bf16", "fp16", "uint8"), "feature": ("fp32", "bf16", "fp16")}
#: Means of transport: the values of ``ipc.MIN_FILE_BYTES`` and ``ipc.MAX_SLOTS``.
TRANSPORTS = {"pipe": (1 << 62, 0), "file": (1 << 10, 0), "slots": (ipc.MIN_FILE_BYTES, ipc.MAX_SLOTS)}
PHOTOS, CROP = 48, 224
PIPE_MB = 4  # larger batches take seconds
WARM_UP_BATCHES = 10
COPIES = 9


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=7)
    parser.add_argument("--batches", type=int, default=300, help="measured in each process (default %(default)s)")
    parser.add_argument("--megabytes", type=float, nargs="+", metavar="MB", help="compare means of transport")
    parser.add_argument("--workers", type=int, nargs="+", default=[1], help="with --megabytes (default: 1)")
    parser.add_argument("--threads", type=int, nargs="+", metavar="N", help="compare threads with processes")
    arguments = harness.parse(parser, rounds=1, batches=10)
    if arguments.megabytes:
        harness.finish(arguments, {"measured": compare_transports(arguments)})
        return
    if arguments.threads:
        harness.finish(arguments, {"measured": compare_threads(arguments)}, ("torch", "simplejpeg"))
        return
    rows = [(kind, dtype) for kind, dtypes in DTYPES.items() for dtype in dtypes]
    results = harness.interleaved(
        arguments.rounds, rows, lambda row: harness.in_new_process(measure, *row, arguments.batches)
    )
    for kind, dtypes in DTYPES.items():
        values = {
            name: harness.column({dtype: results[kind, dtype] for dtype in dtypes}, name)
            for name in ("MB", "ms in the loop", "CPU ms", "ms to floats")
        }
        loop = values["ms in the loop"]
        shape = "x".join(map(str, SHAPES[kind]))
        table = harness.Table(f"transfer, {kind} {shape}, batch {BATCH}, 1 worker", dtypes)
        table.text("MB a batch", {dtype: f"{megabytes[0]:.2f}" for dtype, megabytes in values["MB"].items()})
        table.medians("ms in the loop", loop, 2)
        table.ratios("times faster", dict.fromkeys(dtypes, loop["fp32"]), loop)
        table.medians("CPU ms", values["CPU ms"], 2)
        table.medians("ms to floats", values["ms to floats"], 2)
        table.show(harness.rounds_note(arguments.rounds))
    measured = [{"kind": kind, "dtype": dtype, "rounds": found} for (kind, dtype), found in results.items()]
    harness.finish(arguments, {"measured": measured})


def measure(kind: str, dtype: str, batches: int) -> dict[str, float]:
    """One row; in a process of its own."""
    torch.set_num_threads(1)
    precision = "fp32" if dtype == "uint8" else dtype
    fields = {"value": {"name": "value", "role": "image" if dtype == "uint8" else "feature"}}
    options: dict[str, Any] = {"global_batch_size": BATCH, "num_workers": 1, "precision": precision}
    loader = ShardLoader.over(Prepared(kind, dtype), fields, **options)
    stream = itertools.chain.from_iterable(loader.epoch(epoch) for epoch in itertools.count())
    for number in range(WARM_UP_BATCHES + batches):
        if number == WARM_UP_BATCHES:
            cpu, started = harness.cpu_seconds(), time.perf_counter()
        batch = next(stream)
        loader.commit()
    seconds, cpu = time.perf_counter() - started, harness.cpu_seconds_since(cpu)
    loader.close()
    copies = []
    for _ in range(COPIES):
        started = time.perf_counter()
        floats = batch.to("cpu")["value"]
        copies.append(time.perf_counter() - started)
    if not floats.is_floating_point():
        raise TypeError(f"{kind} arrived as {floats.dtype}, want floats")
    return {
        "MB": batch.transfer_bytes / 1e6,
        "ms in the loop": seconds / batches * 1e3,
        "CPU ms": cpu / batches * 1e3,
        "ms to floats": statistics.median(copies) * 1e3,
    }


def compare_transports(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints a table for each number of workers; returns all measurements."""
    ways = ("copies", *TRANSPORTS)
    rows = [(size, way) for size in arguments.megabytes for way in ways if way != "pipe" or size <= PIPE_MB]
    cases = [(workers, *row) for workers in arguments.workers for row in rows]
    results = harness.interleaved(
        arguments.rounds, cases, lambda case: transport(*case, max(8, min(arguments.batches, int(400 / case[1]))))
    )
    for workers in arguments.workers:
        table = harness.Table(
            f"transport, {workers} workers", rows, {(size, way): f"{size:g} MB, {way}" for size, way in rows}
        )
        found = {row: results[(workers, *row)] for row in rows}
        for name in ("worker CPU ms", "trainer CPU ms", "ms a batch"):
            table.medians(name, harness.column(found, name), 2)
        both = harness.column(found, "CPU ms")
        table.ratios("CPU, of file", both, {row: both[row[0], "file"] for row in rows})
        table.show(harness.rounds_note(arguments.rounds))
    return [
        {"workers": workers, "MB": size, "way": way, "rounds": found} for (workers, size, way), found in results.items()
    ]


def transport(workers: int, megabytes: float, way: str, batches: int) -> dict[str, float]:
    """Milliseconds a batch, and of CPU time on both sides."""
    torch.set_num_threads(1)
    nbytes = int(megabytes * 1e6)
    source, sink = torch.ones(nbytes, dtype=torch.uint8), torch.ones(nbytes, dtype=torch.uint8)
    if way == "copies":
        cpu, started = time.process_time(), time.perf_counter()
        for _ in range(batches):
            source.copy_(sink)
            sink.copy_(source)
        cpu, seconds, of_workers = time.process_time() - cpu, time.perf_counter() - started, 0.0
    else:
        before = ipc.MIN_FILE_BYTES, ipc.MAX_SLOTS
        # The workers are forked, so this changes them, too.
        ipc.MIN_FILE_BYTES, ipc.MAX_SLOTS = TRANSPORTS[way]
        loading = {"num_workers": workers, "prefetch_factor": 2, "multiprocessing_context": "fork"}
        stream = WorkerStream(Written(source), loading, (0, 0), lambda epoch: 10**9, 1)  # type: ignore[arg-type]
        spent: dict[int, float] = {}
        warm_up = 6 * workers + min(40, int(200 / megabytes))  # batches built ahead, and the first use of each slot
        for number in range(warm_up + batches):
            if number == warm_up:
                before_them, cpu, started = sum(spent.values()), time.process_time(), time.perf_counter()
            batch = stream.take()
            sink.copy_(batch["x"])
            ((worker, seconds),) = batch.bad[0].items()
            spent[int(worker)] = seconds
            del batch
        cpu, seconds = time.process_time() - cpu, time.perf_counter() - started
        of_workers = sum(spent.values()) - before_them
        stream.close()
        ipc.MIN_FILE_BYTES, ipc.MAX_SLOTS = before
    values = {"worker CPU ms": of_workers, "trainer CPU ms": cpu, "CPU ms": cpu + of_workers, "ms a batch": seconds}
    return {name: 1e3 * value / batches for name, value in values.items()}


def compare_threads(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Prints the table of threads and processes; returns all measurements."""
    torch.set_num_threads(1)
    batch = _PhotoBatch([sample["jpg"] for sample in harness.jpegs(PHOTOS, (500, 375))])
    cases = [(number, kind) for number in arguments.threads for kind in ("threads", "processes")]
    pools: dict[tuple[int, str], Executor] = {}
    for number, kind in cases:
        context = multiprocessing.get_context("fork")
        pools[number, kind] = (
            ThreadPoolExecutor(number)
            if kind == "threads"
            else ProcessPoolExecutor(number, context, _keep_photos, (batch,))
        )

    def measure_case(case: tuple[int, str]) -> dict[str, float]:
        number, kind = case
        decode = batch.decode if kind == "threads" else _decode_kept
        cpu, started = time.process_time(), time.perf_counter()
        of_parts = list(pools[case].map(decode, [range(part, PHOTOS, number) for part in range(number)]))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        cpu = cpu if kind == "threads" else sum(of_parts)
        return {"CPU us a photo": 1e6 * cpu / PHOTOS, "us a photo": 1e6 * seconds / PHOTOS}

    for case in cases:  # starts the processes
        measure_case(case)
    results = harness.interleaved(arguments.rounds, cases, measure_case)
    labels = {(number, kind): f"{number} {kind}" for number, kind in cases}
    table = harness.Table(f"500x375 JPEG -> {CROP}x{CROP}, batch {PHOTOS}", cases, labels)
    cpu, wall = (harness.column(results, name) for name in ("CPU us a photo", "us a photo"))
    table.medians("CPU us a photo", cpu)
    table.text("least", {case: f"{min(values):,.0f}" for case, values in cpu.items()})
    table.medians("us a photo", wall)
    table.text("least ", {case: f"{min(values):,.0f}" for case, values in wall.items()})
    table.show(harness.rounds_note(arguments.rounds))
    for pool in pools.values():
        pool.shutdown()
    return [{"row": labels[case], "rounds": found} for case, found in results.items()]


class _PhotoBatch:
    """Photographs, and the batch that they are decoded into."""

    def __init__(self, photos: list[bytes]) -> None:
        self._photos = photos
        self._crop = RandomResizedCrop(CROP)
        self._pixels = np.ones((len(photos), CROP, CROP, 3), np.uint8)

    def decode(self, rows: range) -> float:
        """Decodes these rows; returns the CPU time of the process meanwhile."""
        cpu = time.process_time()
        for row in rows:
            crop = functools.partial(self._crop.crop, rng=np.random.default_rng(row))
            decode_image(self._photos[row], crop, self._pixels[row])
        return time.process_time() - cpu


_kept: _PhotoBatch


def _keep_photos(batch: _PhotoBatch) -> None:
    global _kept
    _kept = batch


def _decode_kept(rows: range) -> float:
    return _kept.decode(rows)


class Written(IterableDataset[Batch]):
    """Batches of one tensor, which is copied from memory; each has the worker's CPU time so far."""

    def __init__(self, source: torch.Tensor) -> None:
        self._source = source

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        assert info is not None
        nbytes, valid = self._source.nbytes, torch.ones(1, dtype=torch.bool)
        while True:
            written = torch.empty(0, dtype=torch.uint8).set_(ipc.worker_storage(nbytes), 0, (nbytes,), (1,))
            written.copy_(self._source)
            yield Batch({"x": written}, ["key"], valid, [{str(info.id): time.process_time()}])


class Prepared:
    """A dataset of equal, ready samples: pixels, or normalised floats."""

    def __init__(self, kind: str, dtype: str) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, SHAPES[kind], np.uint8)
        self._value = pixels if dtype == "uint8" else (pixels.astype(np.float32) / 255 - 0.5) / 0.5

    def __len__(self) -> int:
        return 64 * BATCH

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        return {"value": self._value}


if __name__ == "__main__":
    main()
