"""How well an order mixes classes, and how many shards it keeps busy, by lanes and shuffle window; nothing is read.

    python -m benchmarks.shuffle_quality [--shards 1280] [--per-shard 1000] [--classes 1000] [--batch 1024] [--json FILE]

The worst case: shards sorted by class, so that a shard holds one class or two. Over one epoch of each order:

* ``class mix``: chi-square statistic of the classes of a global batch against equal shares, over its degrees of freedom,
  mean over the steps. A random draw has 1, clumped classes more, classes spread more evenly than by chance less.
* ``classes``: number of different classes in a global batch. ``repeats``: share of its samples whose class was in the
  batch before, as a multiple of the random draw's.
* ``shards, all`` and ``shards, a rank``: the largest number of different shards in any 100 steps, over all ranks and for
  one of 8 ranks.
* ``opened``: share of all shards that a rank opens in the epoch, median and maximum over the 8 ranks (1/8 is 0.125).
  ``bytes``: share of the data that a rank reads.

The last row is a true random draw without replacement, computed by numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import harness
from dtrain.data.order.epoch_order import EpochOrder, Layout, choose_lanes
from dtrain.data.order.lines import Recipe

RANKS = 8
NEIGHBOURS = 100  # steps
RANDOM = "a random draw"


def main() -> None:
    """Command line."""
    parser = harness.command_line(__doc__)
    parser.add_argument("--shards", type=int, default=1280)
    parser.add_argument("--per-shard", type=int, default=1000, help="samples of a shard")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=1024, help="global batch size")
    arguments = harness.parse(parser, shards=64, per_shard=100, classes=10, batch=64)
    data = SortedShards(arguments.shards, arguments.per_shard, arguments.classes, arguments.batch)
    rows = {name: data.judge(order) for name, order in data.orders()} | {RANDOM: data.judge(data.random_draw())}
    shards = f"{arguments.shards:,} shards of {arguments.per_shard:,}"
    table = harness.Table(f"shuffle, {shards}, {data.classes:,} classes, batch {data.batch}", rows)
    by_chance = rows[RANDOM]["repeats"]
    for heading, cell in {
        "class mix": lambda row: f"{row['class_mix']:.2f}",
        "classes": lambda row: f"{row['classes']:.0f}",
        "repeats": lambda row: f"{row['repeats'] / by_chance:.2f}",
        "shards, all": lambda row: f"{row['shards_all']:,}",
        "shards, a rank": lambda row: f"{row['shards_rank']:,}",
        "opened": lambda row: f"{row['opened_median']:.3f} ({row['opened_most']:.3f})",
        "bytes": lambda row: f"{row['bytes_most']:.3f}",
    }.items():
        table.text(heading, {name: cell(row) for name, row in rows.items()})
    table.show(f"{data.steps:,} steps, {RANKS} ranks")
    harness.finish(arguments, {"measured": [{"order": name} | row for name, row in rows.items()]}, [])


class SortedShards:
    """Shards of equal size whose samples are sorted by class.

    Args:
        shards: Number of shards.
        per_shard: Samples of each.
        classes: Number of classes, of equal size.
        batch: Global batch size.
    """

    def __init__(self, shards: int, per_shard: int, classes: int, batch: int) -> None:
        self.counts = np.full(shards, per_shard, np.int64)
        self.per_shard, self.classes, self.batch = per_shard, classes, batch
        self.samples = shards * per_shard
        self.steps = self.samples // batch

    def orders(self) -> Iterator[tuple[str, np.ndarray]]:
        """Name and sample numbers of each order, int64, shape ``[steps, batch]``."""
        default = choose_lanes(self.batch, None, "window")
        lanes = sorted({k for k in (1, RANKS, 32, default, 256, self.batch) if self.batch % k == 0})
        cases = [("none", 1, 1), ("full", 1, 1)]
        cases += [("window", k, window) for k in lanes for window in (1, 8, 32)]
        for shuffle, k, window in cases:
            order = EpochOrder(self.counts, Recipe(0, shuffle, window, tail="drop"), 0, [Layout(self.batch, k)])
            name = f"window, {k} lanes, windows of {window}" if shuffle == "window" else shuffle
            star = " (default)" if (shuffle, k, window) == ("window", default, Recipe(0).window) else ""
            yield name + star, order.locate(np.arange(self.steps)[:, np.newaxis], np.arange(self.batch))

    def random_draw(self) -> np.ndarray:
        """All samples in random order, shaped like an order."""
        order = np.random.default_rng(0).permutation(self.samples)
        return order[: self.steps * self.batch].reshape(self.steps, self.batch)

    def judge(self, samples: np.ndarray) -> dict[str, Any]:
        """Statistics of an order, given as sample numbers ``[steps, batch]``."""
        labels = samples * self.classes // self.samples
        # Number of samples by step and class.
        codes = labels + np.arange(self.steps)[:, np.newaxis] * self.classes
        held = np.bincount(codes.ravel(), minlength=self.steps * self.classes).reshape(self.steps, self.classes)
        expected = self.batch / self.classes
        chi_square = ((held - expected) ** 2 / expected).sum(1) / (self.classes - 1)
        again = (held[1:] * (held[:-1] > 0)).sum(1) / self.batch
        shards = samples // self.per_shard
        blocks = np.array_split(np.arange(self.batch), RANKS)  # the loader gives each rank a block of slots
        opened = [len(np.unique(shards[:, block])) / len(self.counts) for block in blocks]
        return {
            "class_mix": float(chi_square.mean()),
            "classes": float((held > 0).sum(1).mean()),
            "repeats": float(again.mean()),
            "shards_all": self._busy(shards),
            "shards_rank": max(self._busy(shards[:, block]) for block in blocks),
            "opened_median": float(np.median(opened)),
            "opened_most": max(opened),
            "bytes_most": max(len(block) for block in blocks) * self.steps / self.samples,
        }

    def _busy(self, shards: np.ndarray) -> int:
        starts = range(0, max(self.steps - NEIGHBOURS, 0) + 1, NEIGHBOURS // 4)
        return max(len(np.unique(shards[start : start + NEIGHBOURS])) for start in starts)


if __name__ == "__main__":
    main()
