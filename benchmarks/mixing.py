"""Cost of mixup and cutmix in the loader: CPU time a sample with and without them, in one process.

    python -m benchmarks.mixing [--rounds 5] [--seconds 2] [--json FILE]

The data are generated JPEGs of 32x32, shifted by up to four pixels, and photographs of 500x375, cropped at random to
224x224. By default a sample is mixed with a neighbour in its micro-batch. The row ``partner in another step`` has one lane
for each sample of a step: every partner belongs to another step and is decoded a second time. ``decoded`` is the number of
samples read for each sample returned.
"""

from __future__ import annotations

import functools
import itertools
import time
from typing import Any, NamedTuple

import numpy as np

from benchmarks import harness
from dtrain.data import ShardLoader
from dtrain.data.augment import Augment, RandomCropFlip, RandomResizedCrop
from dtrain.data.mixing import Mix
from dtrain.data.sources.shard_source import ShardSampleReader

BASE = "nothing mixed"
BOTH = Mix(harness.CLASSES, mixup_alpha=0.2, cutmix_alpha=1.0)
#: By row: the mixing, and whether each sample of a step comes from another lane.
ROWS: dict[str, tuple[Mix | None, bool]] = {
    BASE: (None, False),
    "mixup 0.2": (Mix(harness.CLASSES, mixup_alpha=0.2), False),
    "cutmix 1.0": (Mix(harness.CLASSES, cutmix_alpha=1.0), False),
    "mixup 0.2 or cutmix 1.0": (BOTH, False),
    "partner in another step": (BOTH, True),
}


class Images(NamedTuple):
    """A set of images and how the loader augments them."""

    width: int
    height: int
    number: int
    batch: int
    augment: Augment


IMAGES = {
    "32x32 JPEG, shifted": Images(32, 32, 20_000, 256, RandomCropFlip()),
    "500x375 JPEG -> 224x224": Images(500, 375, 1_500, 128, RandomResizedCrop(224)),
}


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of CPU time, for each measurement")
    arguments = harness.parse(parser, rounds=1, seconds=0.05)
    report = []
    with harness.scratch() as folder:
        for name, images in IMAGES.items():
            shards = harness.jpeg_shards(
                folder / str(images.width),
                number=512 if arguments.quick else images.number,
                width=images.width,
                height=images.height,
                shards=8,
            )
            measure_row = functools.partial(measure, images, shards, arguments.seconds)
            results = harness.interleaved(arguments.rounds, ROWS, measure_row)
            costs = harness.column(results, "us/sample")
            table = harness.Table(f"{name}, batch {images.batch}", ROWS)
            table.medians("CPU us a sample", costs, 1)
            table.ratios("ratio", costs, costs[BASE])
            table.text(
                "decoded", {row: f"{values[-1]:.2f}" for row, values in harness.column(results, "decoded").items()}
            )
            table.show(harness.rounds_note(arguments.rounds))
            report += [{"images": name, "case": row, "rounds": measured} for row, measured in results.items()]
    harness.finish(arguments, {"measured": report})


def measure(images: Images, shards: list[str], seconds: float, row: str) -> dict[str, float]:
    """Microseconds of CPU time for a sample, and the number of samples decoded for it."""
    mix, apart = ROWS[row]
    loader = ShardLoader(
        shards,
        harness.IMAGE_FIELDS,
        global_batch_size=images.batch,
        lanes=images.batch if apart else None,
        num_workers=0,
        augment=images.augment,
        mix=mix,
    )
    batches = itertools.chain.from_iterable(loader.epoch(epoch) for epoch in itertools.count())
    fetch_all, fetched = ShardSampleReader.fetch_all, 0

    def counting_fetch(self: ShardSampleReader, epoch: int, samples: np.ndarray) -> Any:
        nonlocal fetched
        fetched += len(samples)
        return fetch_all(self, epoch, samples)

    next(batches)
    ShardSampleReader.fetch_all = counting_fetch  # type: ignore[method-assign]
    try:
        samples, started, spent = 0, time.process_time(), 0.0
        while spent < seconds:
            samples += int(next(batches).valid.sum())
            spent = time.process_time() - started
    finally:
        ShardSampleReader.fetch_all = fetch_all  # type: ignore[method-assign]
    return {"us/sample": spent / samples * 1e6, "decoded": fetched / samples}


if __name__ == "__main__":
    main()
