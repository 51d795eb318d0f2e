"""Cost of the computed order: 2,000,000,000 samples in 1,000,000 shards, and 10,000 ranks.

    python -m benchmarks.order [--rounds 11] [--json FILE]

The shards are simulated by an index with their numbers of samples; nothing is stored on a disk. Times are CPU times of looking
up 1,024 positions at once, as a loader worker does, at random steps of an epoch. A rank of 10,000 looks up its 1,024 slots
of a global batch of 10,240,000. Memory is the growth of the process by the order; the state is that of a checkpoint, as JSON.

The second table compares the window shuffle of one source with mixtures of 8 sources that together have the same shards, with
constant weights and with weights that change linearly. The last two columns are for a global batch of 256 on 8 ranks, in which
a rank would open one eighth of the shards if none were shared.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import harness
from dtrain.data import ShardLoader
from dtrain.data.fields.parse import parse_fields
from dtrain.data.loading.workers import RankShare
from dtrain.data.order.epoch_order import EpochOrder, Layout, choose_lanes
from dtrain.data.order.lines import SHUFFLES, Recipe
from dtrain.data.order.mixed_sources import MixedSources
from dtrain.data.order.mixture_order import Deal, MixtureOrder, Schedule
from dtrain.data.shards.dataset_index import DatasetIndex
from dtrain.data.sources.shard_source import ShardSource

POSITIONS = 1024
SOURCES = 8
RANKS = 10_000
MIB = 1 << 20


def main() -> None:
    """Command line."""
    arguments = harness.parse(harness.command_line(__doc__, rounds=11), rounds=3)
    shards, per_shard = (10_000, 2_000) if arguments.quick else (1_000_000, 2_000)
    counts = per_shard + np.arange(shards, dtype=np.int64) % 21 - 10  # uneven, like real shards

    before = resident_bytes()
    orders = {shuffle: epoch_order(counts, shuffle, POSITIONS) for shuffle in SHUFFLES}
    order_mib = (resident_bytes() - before) / len(SHUFFLES) / MIB
    many = {shuffle: epoch_order(counts, shuffle, POSITIONS * RANKS) for shuffle in SHUFFLES}
    shares = [RankShare.from_sizes(POSITIONS * RANKS, None, rank, RANKS) for rank in (0, RANKS // 2 + 1, RANKS - 1)]

    def look_up(shuffle: str) -> float:
        order, slots = orders[shuffle], np.arange(POSITIONS)
        steps = np.random.default_rng().integers(order.num_steps, size=50)
        return milliseconds(lambda: [order.locate(int(step), slots) for step in steps]) / len(steps)

    def look_up_of_many(shuffle: str) -> float:
        order, first = many[shuffle], np.zeros(1, np.int64)
        return milliseconds(lambda: [order.locate(0, share.slots(first)) for share in shares]) / len(shares)

    measures: dict[str, Callable[[str], float]] = {
        "ms to start an epoch": lambda shuffle: milliseconds(lambda: epoch_order(counts, shuffle, POSITIONS, epoch=1)),
        "ms for 1,024 positions": look_up,
        f"ms for a rank of {RANKS:,}": look_up_of_many,
    }
    times = {heading: harness.interleaved(arguments.rounds, SHUFFLES, measure) for heading, measure in measures.items()}
    table = harness.Table(f"order, {int(counts.sum()):,} samples in {shards:,} shards", SHUFFLES)
    for heading, values in times.items():
        table.medians(heading, values, 2)
    table.show(harness.rounds_note(arguments.rounds))

    mixtures = mixed_orders(counts, POSITIONS)
    compared: dict[str, Order] = {"one source": orders["window"], **mixtures}

    def look_up_mixed(name: str) -> float:
        order, slots = compared[name], np.arange(POSITIONS)
        steps = np.random.default_rng().integers(orders["window"].num_steps // 4, size=20)
        return milliseconds(lambda: [order.locate(int(step), slots) for step in steps]) / len(steps)

    mixed = harness.interleaved(arguments.rounds, compared, look_up_mixed)
    table = harness.Table(f"mixtures of {SOURCES} sources with the shares 1/2, 1/4, ...", compared)
    table.medians("ms for 1,024 positions", mixed, 2)
    table.text("shards a rank opens, of its eighth", {name: f"{opened(name == 'one source'):.2f}" for name in compared})
    table.show(harness.rounds_note(arguments.rounds))

    state, index_mib = loader_state(counts)
    sizes = {
        "order, MiB in RAM": f"{order_mib:,.1f}",
        "order, bytes for each shard": f"{order_mib * MIB / shards:,.1f}",
        "index of the shards' names and counts, MiB in RAM": f"{index_mib:,.1f}",
        "state in a checkpoint, bytes": f"{len(state):,}",
    }
    table = harness.Table("size", sizes)
    table.text("", sizes)
    table.show(state)
    results = {
        "ms": times,
        "mixture_ms": mixed,
        "order_mib": order_mib,
        "index_mib": index_mib,
        "state": json.loads(state),
    }
    harness.finish(arguments, results)


def epoch_order(counts: np.ndarray, shuffle: str, batch: int, epoch: int = 0) -> EpochOrder:
    """The order of an epoch with the default lanes."""
    return EpochOrder(counts, Recipe(0, shuffle), epoch, [Layout(batch, choose_lanes(batch, None, shuffle))])


Order = EpochOrder | MixtureOrder


def mixed_orders(counts: np.ndarray, batch: int) -> dict[str, MixtureOrder]:
    """Orders of the shards, divided among the sources, for many steps."""
    constant: tuple[Schedule, ...] = tuple(((0, 0.5**n),) for n in range(SOURCES))
    changing: tuple[Schedule, ...] = tuple(((0, 1.0), (10**6, 0.5**n)) for n in range(SOURCES))
    sources = MixedSources(np.array_split(counts, SOURCES), [Recipe(n) for n in range(SOURCES)], 64)
    return {
        name: MixtureOrder(sources, Deal(weights, batch), batch, 0, 10**9, 0)
        for name, weights in (("constant weights", constant), ("changing weights", changing))
    }


def opened(single: bool, batch: int = 256, ranks: int = 8, shards: int = 1024, per_shard: int = 100) -> float:
    """Shards that a rank opens in an epoch, relative to an equal division of all shards."""
    order: Order
    if single:
        order = epoch_order(np.full(shards, per_shard), "window", batch)
    else:
        parts = [np.full(max(shards >> n + 1, 8), per_shard) for n in range(SOURCES)]
        sources = MixedSources(parts, [Recipe(n) for n in range(SOURCES)], 64)
        weights: tuple[Schedule, ...] = tuple(((0, 0.5**n),) for n in range(SOURCES))
        order = MixtureOrder(sources, Deal(weights, batch), batch, 0, 10**9, 0)
    steps = np.arange(shards * per_shard // batch)[:, np.newaxis]
    read = order.locate(steps, np.arange(batch)) // per_shard
    of_ranks = [np.unique(read[:, rank * batch // ranks : (rank + 1) * batch // ranks]).size for rank in range(ranks)]
    return sum(of_ranks) / np.unique(read).size


def milliseconds(function: Callable[[], object]) -> float:
    """CPU time of a call."""
    started = time.process_time()
    function()
    return (time.process_time() - started) * 1e3


def resident_bytes() -> int:
    """Memory of this process in RAM (Linux: from /proc)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def loader_state(counts: np.ndarray) -> tuple[str, float]:
    """A loader's state in the middle of an epoch over shards with so many samples, as JSON; MiB of the index in RAM."""
    before = resident_bytes()
    paths = [f"/data/train-{number:07d}.tar" for number in range(len(counts))]
    # Offsets and sizes lie in memory-mapped files, of which only the pages in use are in RAM.
    unmapped = np.broadcast_to(np.int64(0), (int(counts.sum()), 2))
    arrays = {"counts": counts, "shard_sizes": counts * 100_000, "offsets": unmapped, "sizes": unmapped}
    arrays |= {"key_bytes": np.zeros(0, np.uint8), "key_starts": np.zeros(1, np.int64)}
    arrays |= {"shard_digests": np.zeros(len(counts), np.uint64)}
    index = DatasetIndex(paths, arrays)
    mib = (resident_bytes() - before) / MIB
    source = ShardSource(index, parse_fields({"jpg": {"name": "image", "size": 224}, "cls": {"name": "label"}}))
    loader = ShardLoader(source, global_batch_size=POSITIONS, num_workers=0)
    state = loader.state_dict()
    state["layouts"][-1][-1] = loader.steps_per_epoch // 2
    loader.load_state_dict(state)
    return json.dumps(loader.state_dict()), mib


if __name__ == "__main__":
    main()
