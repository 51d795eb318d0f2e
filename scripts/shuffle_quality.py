"""How well an order mixes classes, and how many shards it keeps busy, for several (lanes, window); nothing is read.

    python scripts/shuffle_quality.py [--shards 1280] [--per-shard 1000] [--classes 1000] [--batch 1024] [--json FILE]

The worst case: shards sorted by class, so that a shard holds one class or two. For each order, over one epoch:

* ``class mix`` is the chi-square statistic of the classes of a global batch against equal shares, over its degrees of
  freedom, averaged over the steps: 1 for a random draw, more where classes clump, less where they are spread more evenly
  than by chance. ``classes`` is how many different ones a global batch holds, ``repeats`` the share of its samples whose
  class the batch before held too, as a multiple of the random draw's.
* ``shards, all`` and ``shards, a rank`` are distinct shards touched in any 100 steps (the most of them), by all ranks and
  by one of 8.
* ``opened`` is the share of all shards that a rank opens over the epoch (median and most of the 8 ranks; 1/8 is 0.125),
  ``bytes`` the share of the data that it reads.

The last row is a true random draw without replacement, computed by numpy.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from bench_common import command_line, finish, table

from dtrain.data.order import EpochOrder, Layout, Recipe, choose_lanes

RANKS = 8
NEIGHBOURS = 100  # steps


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--shards", type=int, default=1280)
    parser.add_argument("--per-shard", type=int, default=1000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=1024)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.shards, arguments.per_shard, arguments.classes, arguments.batch = 64, 100, 10, 64
    data = Sorted(arguments.shards, arguments.per_shard, arguments.classes, arguments.batch)
    by_chance = data.judge(data.random_draw())
    results, lines = [], []
    for name, order in data.orders():
        found = data.judge(order)
        results.append({"order": name} | found)
        lines.append([name, *_cells(found, by_chance)])
    lines.append(["a random draw", *_cells(by_chance, by_chance)])
    results.append({"order": "random"} | by_chance)
    title = (
        f"shuffle, {arguments.shards:,} shards of {arguments.per_shard:,}, {data.classes:,} classes, batch {data.batch}"
    )
    columns = ["class mix", "classes", "repeats", "shards, all", "shards, a rank", "opened", "bytes"]
    print(f"{table(title, columns, lines)}\n{data.steps:,} steps, {RANKS} ranks\n")
    finish(arguments, {"measured": results}, ("dtrain", "numpy"))


def _cells(found: dict[str, Any], by_chance: dict[str, Any]) -> list[str]:
    opened = f"{found['opened_median']:.3f} ({found['opened_most']:.3f})"
    return [
        f"{found['class_mix']:.2f}",
        f"{found['classes']:.0f}",
        f"{found['repeats'] / by_chance['repeats']:.2f}",
        f"{found['shards_all']:,}",
        f"{found['shards_rank']:,}",
        opened,
        f"{found['bytes_most']:.3f}",
    ]


class Sorted:
    """Shards of equal size that are sorted by class.

    Args:
        shards: How many.
        per_shard: Samples of each.
        classes: How many, of equal size.
        batch: Global batch size.
    """

    def __init__(self, shards: int, per_shard: int, classes: int, batch: int) -> None:
        self.counts = np.full(shards, per_shard, np.int64)
        self.per_shard, self.classes, self.batch = per_shard, classes, batch
        self.samples = shards * per_shard
        self.steps = self.samples // batch

    def orders(self) -> Iterator[tuple[str, np.ndarray]]:
        """Each order's name and its sample numbers, int64, shape ``[steps, batch]``."""
        default = choose_lanes(self.batch, None, "window")
        cases = [("none", 1, 1), ("full", 1, 1)]
        lanes = sorted({k for k in (1, RANKS, 32, default, 256, self.batch) if self.batch % k == 0})
        cases += [("window", k, window) for k in lanes for window in (1, 8, 32)]
        for shuffle, k, window in cases:
            recipe = Recipe(0, shuffle, window, tail="drop")
            order = EpochOrder(self.counts, recipe, 0, [Layout(self.batch, k)])
            name = f"window, {k} lanes, windows of {window}" if shuffle == "window" else shuffle
            star = " (default)" if (shuffle, k, window) == ("window", default, Recipe(0).window) else ""
            yield name + star, order.locate(np.arange(self.steps)[:, np.newaxis], np.arange(self.batch))

    def random_draw(self) -> np.ndarray:
        """What no loader can beat: all samples in random order."""
        order = np.random.default_rng(0).permutation(self.samples)
        return order[: self.steps * self.batch].reshape(self.steps, self.batch)

    def judge(self, samples: np.ndarray) -> dict[str, Any]:
        """The statistics of an order, of sample numbers ``[steps, batch]``."""
        labels = samples * self.classes // self.samples
        # Of each step: how many samples of each class.
        codes = labels + np.arange(self.steps)[:, np.newaxis] * self.classes
        held = np.bincount(codes.ravel(), minlength=self.steps * self.classes).reshape(self.steps, self.classes)
        expected = self.batch / self.classes
        chi_square = ((held - expected) ** 2 / expected).sum(1) / (self.classes - 1)
        again = (held[1:] * (held[:-1] > 0)).sum(1) / self.batch
        shards = samples // self.per_shard
        # As the loader shares out a global batch: each rank has a block of slots.
        blocks = np.array_split(np.arange(self.batch), RANKS)
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
        """The most distinct shards in any 100 neighbouring steps."""
        starts = range(0, max(self.steps - NEIGHBOURS, 0) + 1, NEIGHBOURS // 4)
        return max(len(np.unique(shards[start : start + NEIGHBOURS])) for start in starts)


if __name__ == "__main__":
    main()
