"""What an order costs that is computed, not stored: 2,000,000,000 samples in 1,000,000 shards, and 10,000 ranks.

    python scripts/bench_order.py [--rounds 11] [--json FILE]

The shards are simulated: an index that says how many samples each has, nothing on a disk. Times are CPU times of 1,024
positions looked up at once, as a worker does, at random steps of random epochs' orders; memory is what this process has in
RAM beyond what it had before; the state is the one that a checkpoint keeps, as JSON. A rank of 10,000 looks up its 1,024
slots of a global batch of 10,240,000.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import numpy as np
from bench_common import command_line, finish, interleaved, resident_bytes, spread, table

from dtrain.data import ShardLoader
from dtrain.data.dataset import Share
from dtrain.data.dataset_index import DatasetIndex
from dtrain.data.field_options import parse_fields
from dtrain.data.order import SHUFFLES, EpochOrder, Layout, Recipe, choose_lanes
from dtrain.data.shard_source import ShardSource

TOGETHER = 1024
RANKS = 10_000
MIB = 1 << 20


def main() -> None:
    """Command line."""
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    shards, per_shard = (10_000, 2_000) if arguments.quick else (1_000_000, 2_000)
    rounds = 3 if arguments.quick else arguments.rounds
    # Of uneven sizes, as shards are in life.
    counts = per_shard + np.arange(shards, dtype=np.int64) % 21 - 10

    before = resident_bytes()
    orders = {shuffle: _order(counts, shuffle, TOGETHER, epoch=0) for shuffle in SHUFFLES}
    memory = (resident_bytes() - before) / len(SHUFFLES) / MIB
    times = {
        "build": interleaved(rounds, SHUFFLES, lambda shuffle: _timed(lambda: _order(counts, shuffle, TOGETHER, 1))),
        "look up": interleaved(rounds, SHUFFLES, lambda shuffle: _look_up(orders[shuffle])),
        "of 10,000": interleaved(rounds, SHUFFLES, _rank_of_many(counts)),
    }
    lines = [[shuffle, *(spread(times[what][shuffle], 2) for what in times)] for shuffle in SHUFFLES]
    title = f"order, {int(counts.sum()):,} samples in {shards:,} shards"
    print(table(title, ["ms to begin an epoch", "ms for 1,024 positions", f"ms for a rank of {RANKS:,}"], lines))
    print(f"{rounds} interleaved rounds, median (min-max)\n")

    state, index_memory = _state(counts)
    for what, value in (
        ("order, MiB in RAM", f"{memory:,.1f}"),
        ("bytes for each shard", f"{memory * MIB / shards:,.1f}"),
        ("index of the shards' names and counts, MiB in RAM", f"{index_memory:,.1f}"),
        ("state in a checkpoint, bytes", f"{len(state):,}"),
    ):
        print(f"{what:<50}  {value:>8}")
    print(f"{state}\n")
    results = {"ms": times, "order_mib": memory, "index_mib": index_memory, "state": json.loads(state)}
    finish(arguments, results)


def _order(counts: np.ndarray, shuffle: str, batch: int, epoch: int) -> EpochOrder:
    return EpochOrder(counts, Recipe(0, shuffle), epoch, [Layout(batch, choose_lanes(batch, None, shuffle))])


def _look_up(order: EpochOrder) -> float:
    steps = np.random.default_rng().integers(order.num_steps, size=50)
    slots = np.arange(TOGETHER)
    return _timed(lambda: [order.locate(int(step), slots) for step in steps]) / len(steps)


def _rank_of_many(counts: np.ndarray) -> Callable[[str], float]:
    batch = TOGETHER * RANKS
    orders = {shuffle: _order(counts, shuffle, batch, 0) for shuffle in SHUFFLES}
    shares = [Share.of(batch, None, rank, RANKS) for rank in (0, RANKS // 2 + 1, RANKS - 1)]
    one = np.zeros(1, np.int64)

    def measure(shuffle: str) -> float:
        order = orders[shuffle]
        return _timed(lambda: [order.locate(0, share.slots(one)) for share in shares]) / len(shares)

    return measure


def _timed(work: Callable[[], object]) -> float:
    """Milliseconds of CPU time."""
    started = time.process_time()
    work()
    return (time.process_time() - started) * 1e3


def _state(counts: np.ndarray) -> tuple[str, float]:
    """What a checkpoint keeps of a loader over so many shards, in the middle of an epoch; MiB in RAM of its index."""
    before = resident_bytes()
    paths = [f"/data/train-{number:07d}.tar" for number in range(len(counts))]
    # Offsets, sizes and keys lie in mapped files, of which only the pages that are looked at come into RAM.
    unmapped = np.broadcast_to(np.int64(0), (int(counts.sum()), 2))
    arrays = {"counts": counts, "shard_sizes": counts * 100_000, "offsets": unmapped, "sizes": unmapped}
    arrays |= {"key_bytes": np.zeros(0, np.uint8), "key_starts": np.zeros(1, np.int64)}
    index = DatasetIndex(paths, arrays)
    memory = (resident_bytes() - before) / MIB
    source = ShardSource(index, parse_fields({"jpg": {"name": "image", "size": 224}, "cls": {"name": "label"}}))
    loader = ShardLoader(source, global_batch_size=TOGETHER, num_workers=0)
    state = loader.state_dict()
    state["layouts"][-1][-1] = loader.steps_per_epoch // 2
    loader.load_state_dict(state)
    return json.dumps(loader.state_dict()), memory


if __name__ == "__main__":
    main()
