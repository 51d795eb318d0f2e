"""Size and loading time of photographs that were made smaller when they were packed.

    python -m benchmarks.max_side [--images 500x375 1600x1200] [--max-side 512 384 256] [--workers 0 2] [--rounds 5]

Every row packs the same folder of JPEG files with ``dtrain pack imagefolder``: unchanged, or with
``--max-side``. Then its shards are loaded in batches of 64 with a random resized crop of 224x224.

``MB`` is the size of the shards, ``pack, ms a photo`` the CPU time of packing. A measurement of the loader is a process of
its own with files in the page cache and one thread a process; the first batches are not counted. CPU time covers loader and
workers.
"""

from __future__ import annotations

import itertools
import time
from pathlib import Path

from benchmarks import harness
from dtrain.data import ShardLoader, WorkerOptions
from dtrain.data.augment import RandomResizedCrop

CROP, BATCH = 224, 64
#: Number of images, and with --quick.
NUMBER = {"500x375": (2_000, 16), "1600x1200": (120, 8)}
UNCHANGED = "unchanged"


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=5)
    parser.add_argument("--images", nargs="+", choices=NUMBER, default=list(NUMBER))
    parser.add_argument("--max-side", type=int, nargs="+", default=[512, 384, 256])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 2])
    parser.add_argument("--seconds", type=float, default=2.5, help="measured in each process (default %(default)s)")
    arguments = harness.parse(parser, rounds=1, seconds=0.1)
    report = {}
    with harness.scratch() as folder:
        for size in arguments.images:
            width, height = map(int, size.split("x"))
            source = write_photos(folder / size, NUMBER[size][arguments.quick], width, height)
            smaller = [side for side in arguments.max_side if side < max(width, height)]
            rows = {UNCHANGED: [], **{f"--max-side {side}": ["--max-side", str(side)] for side in smaller}}
            packed = {row: pack(source, folder / f"{size}-{'-'.join(rows[row])}", rows[row]) for row in rows}
            cases = list(itertools.product(arguments.workers, rows))
            results = harness.interleaved(
                arguments.rounds,
                cases,
                lambda case: harness.in_new_process(measure, packed[case[1]]["shards"], case[0], arguments.seconds),  # noqa: B023
            )
            for workers in arguments.workers:
                found = {row: results[workers, row] for row in rows}
                cost, rate = harness.column(found, "us/sample"), harness.column(found, "samples/s")
                table = harness.Table(f"{size} JPEG -> {CROP}x{CROP}, {workers} workers, batch {BATCH}", rows)
                table.text("MB", {row: f"{packed[row]['MB']:,.1f}" for row in rows})
                table.text("pack, ms a photo", {row: f"{packed[row]['ms']:.1f}" for row in rows})
                table.medians("CPU us a sample", cost)
                table.ratios("times less", dict.fromkeys(rows, cost[UNCHANGED]), cost)
                table.medians("samples/s", rate)
                table.ratios("times faster", rate, rate[UNCHANGED])
                table.show(harness.rounds_note(arguments.rounds))
            report[size] = {
                row: {**packed[row], **{f"{workers} workers": results[workers, row] for workers in arguments.workers}}
                for row in rows
            }
    harness.finish(arguments, {"measured": report}, ("torch", "Pillow", "simplejpeg"))


def write_photos(folder: Path, number: int, width: int, height: int) -> Path:
    """A folder of one class with JPEG files."""
    photos = folder / "photographs"
    photos.mkdir(parents=True)
    for sample in harness.jpegs(number, (width, height)):
        (photos / f"{sample['__key__']}.jpg").write_bytes(sample["jpg"])
    return folder


def pack(source: Path, destination: Path, options: list[str]) -> dict[str, float | str]:
    """The pattern of the shards of one row, their size, and the CPU time of packing, in milliseconds an image."""
    cpu = harness.cpu_seconds()
    harness.run(harness.python("-m", "dtrain.pack", "imagefolder", source, destination, "--shards", "4", *options))
    cpu = harness.cpu_seconds_since(cpu)
    size = sum(path.stat().st_size for path in destination.glob("train-*.tar"))
    images = len(list(source.rglob("*.jpg")))
    return {"shards": f"{destination}/train-*.tar", "MB": size / 1e6, "ms": 1e3 * cpu / images}


def measure(shards: str, workers: int, seconds: float) -> dict[str, float]:
    """Samples a second and microseconds of CPU time a sample; in a process of its own."""
    loader = ShardLoader(
        shards,
        harness.IMAGE_FIELDS,
        global_batch_size=BATCH,
        num_workers=workers,
        augment=RandomResizedCrop(CROP),
        workers=WorkerOptions(start_method="fork"),
    )
    batches = itertools.chain.from_iterable(loader.epoch(epoch) for epoch in itertools.count())
    for _ in range(2 + 4 * workers):
        next(batches)
        loader.commit()
    samples, cpu, started = 0, harness.cpu_seconds(), time.perf_counter()
    while (elapsed := time.perf_counter() - started) < seconds or not samples:
        samples += int(next(batches).valid.sum())
        loader.commit()
    cpu = harness.cpu_seconds_since(cpu)
    loader.close()
    return {"samples/s": samples / elapsed, "us/sample": 1e6 * cpu / samples}


if __name__ == "__main__":
    main()
