"""Size and cost of a batch on its way from a loader worker to the model, by transfer dtype.

    python -m benchmarks.transfer [--rounds 7] [--json FILE]

Batches of 64: images of 224x224x3 and features of 4,096 floats. Each row sends the same values through the loader with one
worker: pixels as uint8, or values normalised beforehand and cast in the worker to fp32, bf16 or fp16. Nothing is decoded.

``ms in the loop`` is the time a batch costs the training loop, ``CPU ms`` the CPU time in both processes. ``ms to floats``
is the time of ``batch.to("cpu")``: nothing for floats, for uint8 the normalisation, which a GPU would do instead.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks import harness
from dtrain.data import ShardLoader

BATCH = 64
SHAPES = {"image": (224, 224, 3), "feature": (4096,)}
DTYPES = {"image": ("fp32", "bf16", "fp16", "uint8"), "feature": ("fp32", "bf16", "fp16")}
WARM_UP_BATCHES = 10
COPIES = 9


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__, rounds=7)
    parser.add_argument("--batches", type=int, default=300, help="measured in each process (default %(default)s)")
    arguments = harness.parse(parser, rounds=1, batches=10)
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
    seconds, cpu = time.perf_counter() - started, harness.cpu_seconds() - cpu
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
