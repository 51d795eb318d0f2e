"""Data that change during a run: 10 shards, then 15, then 12 because three were removed, and what each epoch uses.

    python examples/growing.py

Each start is a new loader with the state of the previous one, on a different number of ranks and with a different batch size,
as when a run was killed and is started again. The same for a training run:
``dtrain train run.dir=DIR data.grow=now data.grow_allow_removed=true``.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from dtrain.data import Growth, ShardLoader, write_shards

FIELDS = {"cls": {"name": "label"}}


def write(folder: Path, name: str, shards: int) -> None:
    """Shards of 20 samples each."""
    samples = [{"__key__": f"{number:04}", "cls": number % 10} for number in range(20 * shards)]
    for path in write_shards(samples, folder / name, shards=shards):
        path.rename(folder / f"{name}-{path.name}")


def start(folder: Path, state: Any, steps: int | None, *, ranks: int, batch: int, growth: Growth) -> tuple[Any, Any]:
    """Takes steps on all ranks (None: to the end of the epoch); returns the state and the number of samples of each shard."""
    loaders = [
        ShardLoader(
            str(folder / "*.tar"),
            FIELDS,
            global_batch_size=batch,
            rank=rank,
            world_size=ranks,
            num_workers=0,
            growth=growth,
        )
        for rank in range(ranks)
    ]
    for loader in loaders:
        if state is not None:
            loader.load_state_dict(state)
    epoch, used = loaders[0].position[0], Counter[str]()
    taken = min(loaders[0].steps_left, steps or loaders[0].steps_left)
    for loader in loaders:
        batches = loader.epoch(epoch)
        for _ in range(taken):
            for _ in range(loader.micro_batches_per_step):
                used.update(key.partition("/")[0] for key in next(batches).sample_keys if key)  # "": a masked row
            loader.commit()
    for sentence in loaders[0].data_changes:
        print(f"    {sentence}")
    groups = Counter(
        {name: sum(used[shard] for shard in used if shard.startswith(name)) for name in ("first", "second")}
    )
    print(f"    epoch {epoch}: {taken} steps of {batch} on {ranks} ranks, {dict(groups)}")
    return loaders[0].state_dict(), used


def main() -> None:
    """The three starts, and the epoch after them."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        growth = Growth("now", allow_removed=True)
        print("10 shards, 200 samples; stopped in the middle of epoch 0")
        write(folder, "first", 10)
        state, used = start(folder, None, 5, ranks=2, batch=16, growth=growth)
        print("15 shards; stopped again")
        write(folder, "second", 5)
        state, more = start(folder, state, 4, ranks=3, batch=12, growth=growth)
        used += more
        print("12 shards, three of the first ones are removed; to the end of epoch 0")
        for path in sorted(folder.glob("first-*.tar"))[:3]:
            path.unlink()
        state, more = start(folder, state, None, ranks=1, batch=20, growth=growth)
        used += more
        here = {path.name for path in folder.glob("*.tar")}
        assert all(used[shard] == 20 for shard in here), "each sample of a shard that is still there exactly once"
        print(
            f"    of {len(here)} shards all 20 samples, of the removed ones {[used[it] for it in sorted({*used} - here)]}"
        )
        print("epoch 1")
        _, used = start(folder, state, None, ranks=2, batch=16, growth=growth)
        assert used == Counter(dict.fromkeys(here, 20))


if __name__ == "__main__":
    main()
