"""Valid samples a second of dtrain, webdataset, litdata and mosaicml-streaming, side by side in one run.

    python scripts/bench_loader.py [--works 32x32 500x375 1600x1200] [--workers 0 1 2] [--rounds 5] [--json FILE]

Three sets of images: 32x32 (CIFAR-10 shards where ``--cifar10`` or ``$DTRAIN_TEST_CIFAR10`` names a folder of them, else
generated ones) in batches of 256; generated photographs of 500x375 and of 1600x1200, of which each sample is a random
resized crop of 224x224, in batches of 64 and 16. Every row names its decoder and what its workers hand over (see
``bench_contenders.py``): the peers as their documentation has it (Pillow, normalised fp32), then with uint8, then with
dtrain's decoder too. Under the photographs stands how much pixels differ that were decoded at reduced size. The ceiling:
one process that decodes files in memory.

Each figure comes from a process of its own, with one thread a process and files in the page cache; the first batches are
not counted; rounds are interleaved. CPU time a sample, over the loader and its workers, hardly depends on what else the
machine does; samples a second do.

litdata and mosaicml-streaming ask for older versions of numpy than dtrain is tested with, so they want an environment of
their own, without constraints.txt: ``pip install -e '.[bench]'``. What is not installed is a row that says so.
"""

from __future__ import annotations

import argparse
import glob
import importlib.util
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from bench_common import command_line, cpu_seconds, finish, ratio, spread, table
from bench_contenders import CONTENDERS, DECODERS, Recipe, Work, stored_samples
from bench_images import jpeg_shards

from dtrain.data.augment import RandomResizedCrop
from dtrain.data.image import decode_image

CEILING = "decoding alone"
MODULES = {"mosaicml-streaming": "streaming"}
PEERS = ("litdata", "mosaicml-streaming")
DOCUMENTED, SAME_WIRE, SAME_DECODER = Recipe("Pillow", "fp32"), Recipe("Pillow", "uint8"), Recipe("simplejpeg", "uint8")
CROP = 224

Row = tuple[str, Recipe]  # a contender and its recipe
DTRAIN = ("dtrain", SAME_DECODER)
BASE = ("webdataset", SAME_WIRE)


def rows(work: Work, workers: int) -> list[Row]:
    """Who is measured with that many workers."""
    found = [DTRAIN, ("dtrain", Recipe("simplejpeg", "fp32"))]
    if work.crop is not None:
        found.append(("dtrain", Recipe("simplejpeg, reduced", "uint8")))
    found += [(name, recipe) for recipe in (DOCUMENTED, SAME_WIRE, SAME_DECODER) for name in ("webdataset", *PEERS)]
    return found if workers else [*found, *((CEILING, Recipe(decoder, "")) for decoder in DECODERS)]


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--works", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--cifar10", type=Path, default=os.environ.get("DTRAIN_TEST_CIFAR10"), metavar="FOLDER")
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.5, help="measured in each process")
    parser.add_argument("--data", type=Path, metavar="FOLDER", help="where generated data is kept for the next time")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        name, decoder, hands_over, workers = arguments.one
        note = json.loads(sys.stdin.read())
        work = Work(**note | {"copies": Path(note["copies"])})
        print(json.dumps(measure(work, name, Recipe(decoder, hands_over), int(workers), arguments.seconds)))
        return
    if arguments.quick:
        arguments.rounds, arguments.seconds = 1, 0.2
    report = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.data or Path(temporary)).resolve()
        # Nothing of a benchmark stays in the user's cache.
        os.environ |= {"OMP_NUM_THREADS": "1", "DTRAIN_CACHE": str(folder / "cache")}
        for size in arguments.works:
            work = make_work(size, folder, arguments.cifar10, arguments.quick)
            measured = measure_all(work, arguments)
            for workers in arguments.workers:
                print(show(work, workers, measured, arguments.rounds), end="\n\n")
            if work.crop is not None:
                print(pixel_difference(work, 20 if arguments.quick else 200), end="\n\n", flush=True)
            report[work.name] = [
                {"loader": name, **recipe._asdict(), "workers": workers, "rounds": rounds}
                for (name, recipe, workers), rounds in measured.items()
            ]
    finish(arguments, {"measured": report}, ("dtrain", "webdataset", *PEERS, "torch", "numpy", "Pillow", "simplejpeg"))


#: Images of a set (many, and with --quick), batch size.
SIZES = {"32x32": (20_000, 800, 256), "500x375": (4_000, 200, 64), "1600x1200": (600, 200, 16)}


def make_work(size: str, folder: Path, cifar10: Path | None, quick: bool) -> Work:
    """A set of images, generated if need be."""
    (number, few, batch), (width, height) = SIZES[size], map(int, size.split("x"))
    small = size == "32x32"
    if small and cifar10 is not None:
        shards, name = sorted(glob.glob(f"{cifar10}/train-*.tar")), "32x32 JPEG (CIFAR-10)"
    else:
        images = {"number": few if quick else number, "width": width, "height": height}
        shards, name = jpeg_shards(folder / size, shards=8, **images), f"{size} JPEG"
    crop = None if small else CROP
    name += f" -> {crop}x{crop}" if crop else ""
    return Work(name, shards, folder / f"of-{size}", 8 if quick else batch, crop)


def measure_all(work: Work, arguments: argparse.Namespace) -> dict[tuple[str, Recipe, int], list[Any]]:
    """What each row measured in each round; an empty list where a package is missing."""
    for path in work.shards:
        Path(path).read_bytes()  # into the page cache
    work.copies.mkdir(exist_ok=True)
    note = json.dumps(asdict(work), default=str)
    cases = [(name, recipe, workers) for workers in arguments.workers for name, recipe in rows(work, workers)]
    measured: dict[tuple[str, Recipe, int], list[Any]] = {case: [] for case in cases}
    for turn in range(arguments.rounds):
        first = turn * len(cases) // arguments.rounds
        for name, recipe, workers in cases[first:] + cases[:first]:
            if name != CEILING and importlib.util.find_spec(MODULES.get(name, name)) is None:
                continue
            one = ["--one", name, *recipe, str(workers), "--seconds", str(arguments.seconds)]
            done = subprocess.run([sys.executable, __file__, *one], input=note, capture_output=True, text=True)
            if done.returncode:
                raise SystemExit(f"{name} with {' '.join(recipe)} and {workers} workers failed:\n{done.stderr}")
            measured[name, recipe, workers].append(json.loads(done.stdout.splitlines()[-1]))
    return measured


def measure(work: Work, name: str, recipe: Recipe, workers: int, seconds: float) -> dict[str, float]:
    """Samples a second and microseconds of CPU time a sample of one contender."""
    multiprocessing.set_start_method(
        "fork"
    )  # what all of them used to have, and what needs no pickling of their datasets
    batches = CONTENDERS[name](work, workers, recipe)
    # Start-up, and what workers had prefetched by then: two batches each, and as many again.
    for _ in range(2 + 4 * workers):
        next(batches)
    samples, busy, started = 0, cpu_seconds(), time.perf_counter()
    for valid in batches:
        samples += valid
        ended = time.perf_counter()
        if ended - started >= seconds:
            break
    # The kernel counts in hundredths of a second.
    spent = max(cpu_seconds() - busy, 0.01)
    return {"samples/s": samples / (ended - started), "us/sample": spent / samples * 1e6}


def show(work: Work, workers: int, measured: dict[tuple[str, Recipe, int], list[Any]], rounds: int) -> str:
    """The table of one set of images and one number of workers."""
    rates = {key[:2]: [one["samples/s"] for one in found] for key, found in measured.items() if key[2] == workers}
    costs = {key[:2]: [one["us/sample"] for one in found] for key, found in measured.items() if key[2] == workers}
    lines = []
    for (name, recipe), rate in rates.items():
        if not rate:
            lines.append([name, *recipe, "not installed", "", "", ""])
            continue
        cost = costs[name, recipe]
        times = [f"{ratio(rate, rates[BASE]):.2f}", f"{ratio(costs[BASE], cost):.2f}"]
        lines.append([name, *recipe, spread(rate), times[0], spread(cost, 1), times[1]])
    columns = ["decoder", "hands over", "valid samples/s", "ratio", "CPU us a sample", "ratio"]
    text = [table(f"{work.name}, {workers} workers, batch {work.batch}", columns, lines)]
    base = f"{BASE[0]} with {BASE[1].decoder} and {BASE[1].hands_over}"
    text.append(f"{rounds} interleaved rounds, median (min-max); ratios to {base} are medians over the rounds")
    text += [
        _over(rivals, recipe, rates, costs) for recipe in (DOCUMENTED, SAME_WIRE, SAME_DECODER) for rivals in RIVALS
    ]
    return "\n".join(line for line in text if line)


RIVALS = (("webdataset",), PEERS)


def _over(rivals: tuple[str, ...], recipe: Recipe, rates: dict[Row, list[float]], costs: dict[Row, list[float]]) -> str:
    """How dtrain compares with the best of some peers; empty if none of them is there."""
    there = [(name, recipe) for name in rivals if rates[name, recipe]]
    if not there:
        return ""
    best = max(there, key=lambda row: statistics.median(rates[row]))
    faster, cheaper = ratio(rates[DTRAIN], rates[best]), ratio(costs[best], costs[DTRAIN])
    what = " and ".join(rivals) if len(rivals) == 1 else f"the best of {' and '.join(rivals)}"
    return f"dtrain is {faster:.2f} times as fast as {what} with {' and '.join(recipe)} ({cheaper:.2f} by CPU time)"


def pixel_difference(work: Work, number: int) -> str:
    """Grey levels between the same crops decoded in full and at reduced size."""
    differences, reduced_ones = [], 0
    choose = RandomResizedCrop(CROP)
    for place, (jpg, _) in enumerate(itertools.islice(stored_samples(work), number)):
        height, width, _, _ = simplejpeg.decode_jpeg_header(jpg)
        crop = choose.crop(int(height), int(width), np.random.default_rng(place))
        if crop.reduction == 1:
            continue
        reduced_ones += 1
        full, reduced = (decode_image(jpg, lambda *_, crop=crop: crop, reduced=how) for how in (False, True))
        differences.append(np.abs(full.astype(np.int16) - reduced).mean())
    text = f"reduced-size decoding, {work.name}: {reduced_ones} of {number} crops allow it"
    if not differences:
        return text
    return f"{text}; mean difference of a pixel {spread(differences, 2)} grey levels of 255, over the crops"


if __name__ == "__main__":
    main()
