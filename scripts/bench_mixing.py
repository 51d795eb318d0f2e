"""What mixup and cutmix cost the loader: CPU time a sample with and without, in one process.

    python scripts/bench_mixing.py [--rounds 5] [--seconds 2] [--json FILE]

Generated JPEGs of 32x32, shifted by up to four pixels, and photographs of 500x375, of which a random 224x224 crop is taken.
By default partners are neighbours in the same micro-batch; ``a partner elsewhere`` has a lane for each sample of a step, so
that each partner is one of another step, and is decoded twice. ``decoded`` counts samples read for each one handed over.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench_common import command_line, finish, ratio, spread, table
from bench_images import CLASSES, jpeg_shards

from dtrain.data import ShardLoader
from dtrain.data.augment import Augment, RandomCropFlip, RandomResizedCrop
from dtrain.data.mixing import Mix
from dtrain.data.shard_source import ShardSamples

FIELDS = {"jpg": {"name": "image", "role": "image"}, "cls": {"name": "label", "role": "label"}}
BOTH = Mix(CLASSES, mixup_alpha=0.2, cutmix_alpha=1.0)
BASE = "nothing mixed"
CASES: dict[str, tuple[Mix | None, bool]] = {  # and whether each sample of a step is from another lane
    BASE: (None, False),
    "mixup 0.2": (Mix(CLASSES, mixup_alpha=0.2), False),
    "cutmix 1.0": (Mix(CLASSES, cutmix_alpha=1.0), False),
    "mixup 0.2 or cutmix 1.0": (BOTH, False),
    "the same, a partner elsewhere": (BOTH, True),
}


class Work(NamedTuple):
    """Images, and what is done with them."""

    width: int
    height: int
    number: int
    batch: int
    augment: Augment


WORKS = {
    "32x32 JPEG, shifted": Work(32, 32, 20_000, 256, RandomCropFlip()),
    "500x375 JPEG -> 224x224": Work(500, 375, 1_500, 128, RandomResizedCrop(224)),
}


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of CPU time, measured for each figure")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.05
    report = []
    with tempfile.TemporaryDirectory() as temporary:
        os.environ["DTRAIN_CACHE"] = str(Path(temporary) / "cache")
        for name, work in WORKS.items():
            number = 512 if arguments.quick else work.number
            folder = Path(temporary) / str(work.width)
            shards = jpeg_shards(folder, number=number, width=work.width, height=work.height, shards=8)
            found: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
            for _, case in itertools.product(range(arguments.rounds), CASES):
                found[case].append(measure(work, shards, *CASES[case], arguments.seconds))
            print(show(f"{name}, batch {work.batch}", found, arguments.rounds), end="\n\n", flush=True)
            report += [{"images": name, "case": case, "rounds": rounds} for case, rounds in found.items()]
    finish(arguments, {"measured": report}, ("dtrain", "torch", "numpy"))


def measure(work: Work, shards: list[str], mix: Mix | None, apart: bool, seconds: float) -> dict[str, float]:
    """Microseconds of CPU time for a sample, and how many were decoded for each."""
    loader = ShardLoader(
        shards,
        FIELDS,
        global_batch_size=work.batch,
        lanes=work.batch if apart else None,
        num_workers=0,
        augment=work.augment,
        mix=mix,
    )
    batches = itertools.chain.from_iterable(loader.epoch(epoch) for epoch in itertools.count())
    fetch, fetched = ShardSamples.fetch, 0

    def counted(self: ShardSamples, record: Any) -> Any:
        nonlocal fetched
        fetched += 1
        return fetch(self, record)

    next(batches)
    ShardSamples.fetch = counted  # type: ignore[method-assign]
    try:
        samples, began, spent = 0, time.process_time(), 0.0
        while spent < seconds:
            samples += int(next(batches).valid.sum())
            spent = time.process_time() - began
    finally:
        ShardSamples.fetch = fetch  # type: ignore[method-assign]
    return {"us/sample": spent / samples * 1e6, "decoded": fetched / samples}


def show(title: str, found: dict[str, list[dict[str, float]]], rounds: int) -> str:
    """The table of one set of images."""
    costs = {case: [one["us/sample"] for one in of_case] for case, of_case in found.items()}
    lines = [
        [case, spread(cost, 1), f"{ratio(cost, costs[BASE]):.2f}", f"{found[case][-1]['decoded']:.2f}"]
        for case, cost in costs.items()
    ]
    text = table(title, ["CPU us a sample", "ratio", "decoded"], lines)
    return f"{text}\n{rounds} interleaved rounds, median (min-max)"


if __name__ == "__main__":
    main()
