"""Valid samples a second of dtrain and seven other loaders on the CPU, in one run.

    python -m benchmarks.loader [--work 32x32 500x375 1600x1200 tokens npy] [--workers 0 1 2] [--rounds 5] [--json FILE]
    python -m benchmarks.loader --stages [--work 32x32 500x375]

* Images: 32x32 (CIFAR-10 shards where ``--cifar10`` or ``$DTRAIN_TEST_CIFAR10`` names their folder, else generated) in
  batches of 256; photographs of 500x375 and 1600x1200, cropped at random to 224x224, in batches of 64 and 16.
* ``tokens`` are rows of 1,025 uint16, as ``dtrain pack text`` writes them; ``npy`` are fp32 arrays of 3x64x64 with a label.
  Both are random, in batches of 64.
* A row names the loader, its decoder and the dtype of its batches: ``uint8`` pixels ``[batch, height, width, 3]``, or
  ``fp32``, normalised, ``[batch, 3, height, width]``, which is torchvision's ToTensor and Normalize. The other loaders are
  measured as their documentation uses them (fp32, with Pillow or their own decoder), then with uint8, then with dtrain's
  decoder too. Every batch is checked for its dtype and shape.
* Every loader reads the format of its documentation: dtrain, webdataset, SPDL and DALI the same tar shards, litdata and
  mosaicml-streaming their own, Grain ArrayRecord files, tf.data TFRecord files.
* Workers are processes, but threads of SPDL, tf.data and DALI. SPDL and DALI have at least one.
* SPDL decodes images with FFmpeg's shared libraries (version 4 to 9), which are not a Python package; without them, with
  Pillow. FFmpeg and TensorFlow interpolate colours differently from the others, by up to 5 grey levels of a 32x32 image on
  average; DALI, tf.data and FFmpeg draw or resize crops with their own code.
* ``decoding alone`` is the ceiling of images: one process that decodes files in memory; simplejpeg writes into the rows of a
  batch.
* Under each table dtrain is compared with the fastest and the cheapest peer of each dtype, whichever wins; then dtrain with
  uint8 with each peer as documented.
* ``--stages`` shows in which stage of dtrain's loader, without workers, the CPU time of an image is spent.

Each measurement is a process of its own with files in the page cache and one thread a process; the first batches are not
counted. CPU time covers loader and workers; other load of the machine changes it little, and samples a second a lot.

mosaicml-streaming needs an older numpy than dtrain is tested with, so install the peers without constraints.txt in an
environment of their own: ``pip install -e . --group bench tensorflow-cpu nvidia-dali-cuda120``. Rows of missing packages say
so.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import itertools
import multiprocessing
import os
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.loader_contenders import CEILING, LOADERS, MODULES, PACKAGES, THREADS, decoding, dtrain, rows
from benchmarks.loader_work import MEMBERS, SIZES, Row, Work, check, make_work
from dtrain.data import ShardLoader
from dtrain.data.loading.collate import Collator
from dtrain.data.loading.field_buffer import FieldBuffer
from dtrain.data.order.epoch_order import EpochOrder
from dtrain.data.sources.shard_reader import ShardReader


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=5)
    # --images: its name when there were only images, in published commands
    parser.add_argument("--work", "--images", nargs="+", choices=SIZES, default=list(SIZES), help="default: all")
    parser.add_argument("--cifar10", type=Path, default=os.environ.get("DTRAIN_TEST_CIFAR10"), metavar="FOLDER")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=2.5, help="measured in each process (default %(default)s)")
    parser.add_argument(
        "--stages", action="store_true", help="where dtrain's own CPU time is spent, instead of the tables"
    )
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="where to keep the generated data")
    arguments = harness.parse(parser, rounds=1, seconds=0.2)
    report: dict[str, Any] = {}
    with harness.scratch(arguments.data) as folder:
        for size in [size for size in arguments.work if not arguments.stages or size not in MEMBERS]:
            work = make_work(size, folder, arguments.cifar10, arguments.quick)
            if arguments.stages:
                report[work.name] = costs = harness.in_new_process(stages, vars(work), arguments.rounds)
                table = harness.Table(f"{work.name}, stage", costs)
                table.text("CPU us a sample", {stage: f"{cost:.2f}" for stage, cost in costs.items()})
                table.text(
                    "of decoding alone", {stage: f"{cost / costs[CEILING]:.2f}" for stage, cost in costs.items()}
                )
                table.show(f"least of {arguments.rounds} rounds each")
                continue
            results = measure_all(work, arguments)
            for workers in arguments.workers:
                show(
                    work, workers, {row: found for (n, row), found in results.items() if n == workers}, arguments.rounds
                )
            report[work.name] = [
                {**row._asdict(), "workers": workers, "rounds": found} for (workers, row), found in results.items()
            ]
    harness.finish(arguments, {"measured": report}, PACKAGES)


def measure_all(work: Work, arguments: argparse.Namespace) -> dict[tuple[int, Row], list[dict[str, float]]]:
    """Measurements by number of workers and row; an empty list where a package is missing."""
    for path in work.shards:
        Path(path).read_bytes()  # into the page cache
    cases = [(workers, row) for workers in arguments.workers for row in rows(work, workers)]
    there = [case for case in cases if is_installed(MODULES.get(case[1].loader, case[1].loader))]

    def measure_case(case: tuple[int, Row]) -> dict[str, float]:
        return harness.in_new_process(measure, vars(work), case[1], case[0], arguments.seconds)

    results = harness.interleaved(arguments.rounds, there, measure_case)
    return {case: results.get(case, []) for case in cases}


def is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package that the module is in
        return False


def measure(work_fields: dict[str, Any], row_fields: list[str], workers: int, seconds: float) -> dict[str, float]:
    """Samples a second and microseconds of CPU time a sample of one row; in a process of its own."""
    multiprocessing.set_start_method("fork")  # the datasets of other loaders cannot all be pickled
    work, row = Work(**work_fields), Row(*row_fields)
    batches = LOADERS[row.loader](work, workers, row)
    # Not measured: the start, and the batches that workers prefetched during it, two each, and as many again.
    for _ in range(2 + 4 * workers):
        next(batches)
    samples, cpu, started = 0, harness.cpu_seconds(), time.perf_counter()
    for data, labels, valid in batches:
        if row.loader != CEILING:
            check(work, row, data, labels)
        samples += valid
        ended = time.perf_counter()
        if ended - started >= seconds:
            break
    cpu = harness.cpu_seconds_since(cpu)
    return {"samples/s": samples / (ended - started), "us/sample": cpu / samples * 1e6}


def show(work: Work, workers: int, results: dict[Row, list[dict[str, float]]], rounds: int) -> None:
    """Prints the table of one set of samples and one number of workers."""
    rates, costs = harness.column(results, "samples/s"), harness.column(results, "us/sample")
    labels = {row: row.loader for row in results}
    labels |= {row: f"{row.loader}, 1 thread" for row in results if row.loader in THREADS and not workers}
    table = harness.Table(f"{work.name}, {workers} workers, batch {work.batch}", results, labels)
    table.text("decoder", {row: row.decoder for row in results})
    table.text("dtype", {row: row.dtype for row in results})
    table.medians("valid samples/s", rates)
    table.ratios("ratio", rates, rates[work.base])
    table.medians("CPU us a sample", costs, 1)
    table.ratios("ratio", {row: costs[work.base] for row in results if costs[row]}, costs)
    base = f"; ratios to {work.base}, {work.base.dtype}, are medians over the rounds"
    notes = [harness.rounds_note(rounds, base), *compare(work, rates, costs)]
    alone = costs.get(Row(CEILING, "simplejpeg", ""))
    if alone:
        notes.append(
            f"dtrain needs {min(costs[work.dtrain]) / min(alone):.2f} times the CPU time of simplejpeg alone, by minima"
        )
    table.show(*notes)


def compare(work: Work, rates: dict[Row, list[float]], costs: dict[Row, list[float]]) -> list[str]:
    """Compares dtrain with the best peer of each dtype, and with the peers as documented: the first row of each."""
    peers = [row for row in rates if row.loader not in ("dtrain", CEILING) and rates[row]]
    lines = []
    for dtype in dict.fromkeys(row.dtype for row in peers):
        ours = work.dtrain._replace(dtype=dtype)
        fastest = max((row for row in peers if row.dtype == dtype), key=lambda row: statistics.median(rates[row]))
        cheapest = min((row for row in peers if row.dtype == dtype), key=lambda row: statistics.median(costs[row]))
        faster, cheaper = harness.ratio(rates[ours], rates[fastest]), harness.ratio(costs[cheapest], costs[ours])
        speed = f"dtrain is {faster:.2f} times as fast as the fastest peer, {fastest}"
        if faster < 1:
            speed = f"dtrain is slower than {fastest}: {faster:.2f} times as fast"
        cost = f"it needs 1/{cheaper:.2f} of the CPU time of the cheapest, {cheapest}"
        if cheaper < 1:
            cost = f"it needs more CPU time than {cheapest}: {1 / cheaper:.2f} times as much"
        lines.append(f"{dtype}: {speed}; {cost}")
    documented = {row.loader: row for row in reversed(peers)}
    for row in reversed(documented.values()) if work.kind == "images" else ():
        faster, cheaper = harness.ratio(rates[work.dtrain], rates[row]), harness.ratio(costs[row], costs[work.dtrain])
        lines.append(
            f"dtrain with {work.dtrain.dtype} is {faster:.2f} times as fast as {row} with {row.dtype}, as documented"
            f" ({cheaper:.2f} by CPU time)"
        )
    return lines


def stages(work_fields: dict[str, Any], rounds: int) -> dict[str, float]:
    """Least CPU time over the rounds of the stages of dtrain's loader, without workers, in microseconds a sample.

    A stage is timed around its function, so the rest includes what timing costs: a microsecond for each call.
    """
    work = Work(**work_fields)
    spent: dict[str, float] = {}
    depth: list[float] = []

    def timed(owner: Any, name: str, stage: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            depth.append(0.0)
            started = time.process_time()
            try:
                return function(*arguments, **options)
            finally:
                took = time.process_time() - started
                spent[stage] = spent.get(stage, 0.0) + took - depth.pop()
                if depth:
                    depth[-1] += took

        setattr(owner, name, call)

    for owner, name, stage in (
        (ShardLoader, "_take", "take, and the iterators"),
        (EpochOrder, "locate", "order"),
        (Collator, "build", "micro-batch: the rest"),
        (ShardReader, "read_all", "read"),
        (FieldBuffer, "write", "decode and write"),
        (FieldBuffer, "data", "finish the fields"),
    ):
        timed(owner, name, stage)
    batches, limit = dtrain(work, 0, work.dtrain), decoding(work, 0, Row(CEILING, "simplejpeg", ""))
    many = max(2, 4096 // work.batch)
    results: list[dict[str, float]] = []
    for _ in range(rounds + 1):
        spent.clear()
        started = time.process_time()
        samples = sum(valid for *_, valid in itertools.islice(batches, many))
        whole = (time.process_time() - started) / samples * 1e6
        started = time.process_time()
        decoded = sum(valid for *_, valid in itertools.islice(limit, many))
        alone = (time.process_time() - started) / decoded * 1e6
        of_stage = {stage: seconds / samples * 1e6 for stage, seconds in spent.items()}
        results.append(of_stage | {"whole loader": whole, CEILING: alone})
    return {stage: min(result.get(stage, 0.0) for result in results[1:]) for stage in results[-1]}


if __name__ == "__main__":
    main()
