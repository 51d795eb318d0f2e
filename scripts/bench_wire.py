"""What a batch weighs and costs on its way from a worker to the model, by the dtype that travels.

    python scripts/bench_wire.py [--rounds 7] [--json FILE]

Images of 224x224x3 and features of 4,096 floats, 64 in a batch. Each row sends the same values through the loader with one
worker: ready pixels as uint8, or normalised before and cast to fp32, bf16 or fp16 in the worker. Decoding is not in it.

``ms handed over`` is how long the trainer's loop takes for a batch, ``CPU ms`` what it costs in both processes; ``ms to
arrive`` is what ``batch.to("cpu")`` adds: nothing for floats, for uint8 the normalisation, which a GPU would do instead.
"""

from __future__ import annotations

import itertools
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np
import torch
from bench_common import command_line, cpu_seconds, finish, ratio, spread, table

from dtrain.data import ShardLoader

BATCH = 64
SHAPES = {"image": (224, 224, 3), "feature": (4096,)}
WIRES = {"image": ("fp32", "bf16", "fp16", "uint8"), "feature": ("fp32", "bf16", "fp16")}
UNCOUNTED_BATCHES = 10
ARRIVALS = 9


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batches", type=int, default=300, help="measured in each process")
    parser.add_argument("--one", nargs=2, metavar=("WHAT", "WIRE"), help="measure this row alone, as JSON")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.batches = 1, 10
    if arguments.one is not None:
        print(json.dumps(measure(arguments.one[0], arguments.one[1], arguments.batches)))
        return
    cases = [(what, wire) for what, wires in WIRES.items() for wire in wires]
    measured: dict[tuple[str, str], list[dict[str, float]]] = {case: [] for case in cases}
    for turn in range(arguments.rounds):
        first = turn % len(cases)
        for what, wire in cases[first:] + cases[:first]:
            one = [sys.executable, __file__, "--one", what, wire, "--batches", str(arguments.batches)]
            done = subprocess.run(one, check=True, stdout=subprocess.PIPE, text=True)
            measured[what, wire].append(json.loads(done.stdout))
    for what in WIRES:
        print(show(what, measured, arguments.rounds), end="\n\n")
    results = {"measured": [{"what": what, "wire": wire, "rounds": found} for (what, wire), found in measured.items()]}
    finish(arguments, results)


def show(what: str, measured: dict[tuple[str, str], list[dict[str, float]]], rounds: int) -> str:
    """The table of images or of features."""
    lines = []
    base = [one["ms handed over"] for one in measured[what, "fp32"]]
    for wire in WIRES[what]:
        found = {name: [one[name] for one in measured[what, wire]] for name in measured[what, wire][0]}
        times = [spread(found[name], 2) for name in ("ms handed over", "CPU ms", "ms to arrive")]
        faster = ratio(base, found["ms handed over"])
        lines.append([wire, f"{found['MB'][0]:.2f}", times[0], f"{faster:.2f}", *times[1:]])
    shape = "x".join(map(str, SHAPES[what]))
    title = f"wire, {what} {shape}, batch {BATCH}, 1 worker"
    columns = ["MB a batch", "ms handed over", "times faster", "CPU ms", "ms to arrive"]
    return f"{table(title, columns, lines)}\n{rounds} interleaved rounds, median (min-max)"


def measure(what: str, wire: str, batches: int) -> dict[str, float]:
    """One row; in a process of its own."""
    torch.set_num_threads(1)
    precision = "fp32" if wire == "uint8" else wire
    fields = {"value": {"name": "value", "role": "image" if wire == "uint8" else "feature"}}
    options: dict[str, Any] = {"global_batch_size": BATCH, "num_workers": 1, "precision": precision}
    loader = ShardLoader.over(Prepared(what, wire), fields, **options)
    stream = itertools.chain.from_iterable(loader.epoch(epoch) for epoch in itertools.count())
    for number in range(UNCOUNTED_BATCHES + batches):
        if number == UNCOUNTED_BATCHES:
            busy, started = cpu_seconds(), time.perf_counter()
        batch = next(stream)
        loader.commit()
    handed, busy = time.perf_counter() - started, cpu_seconds() - busy
    loader.close()
    arriving = []
    for _ in range(ARRIVALS):
        started = time.perf_counter()
        moved = batch.to("cpu")
        arriving.append(time.perf_counter() - started)
    if not moved["value"].is_floating_point():
        raise TypeError(f"{what} arrived as {moved['value'].dtype}, want floats")
    return {
        "MB": batch.wire_bytes / 1e6,
        "ms handed over": handed / batches * 1e3,
        "CPU ms": busy / batches * 1e3,
        "ms to arrive": statistics.median(arriving) * 1e3,
    }


class Prepared:
    """A data set whose samples are ready: all have the same values, pixels or normalised floats."""

    def __init__(self, what: str, wire: str) -> None:
        pixels = np.random.default_rng(0).integers(0, 256, SHAPES[what], np.uint8)
        self._value = pixels if wire == "uint8" else (pixels.astype(np.float32) / 255 - 0.5) / 0.5

    def __len__(self) -> int:
        return 64 * BATCH

    def __getitem__(self, sample: int) -> dict[str, np.ndarray]:
        return {"value": self._value}


if __name__ == "__main__":
    main()
