"""Real shards that come and go between the starts of a loader, for the tests of growth."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from dtrain.data import ShardLoader
from tests.data.order.growing import Sample
from tests.shards import valid_keys, write_tar


def write(folder: Path, name: str, size: int) -> None:
    """A shard of so many samples."""
    write_tar(folder / name, [(f"{number:02}", {"cls": b"%d" % (number % 10)}) for number in range(size)])


def files_in(folder: Path) -> dict[str, int]:
    """The shards of ``add`` in a folder: name to number of samples."""
    return {path.name: int(path.with_suffix(".size").read_text()) for path in sorted(folder.glob("*.tar"))}


def add(rng: random.Random, folder: Path, ever: set[str], number: int) -> None:
    """Writes up to ``number`` new shards, whose names sort before and between those that there are."""
    for _ in range(number):
        name, size = f"{rng.choice('abc')}-{rng.randrange(100):02}.tar", rng.randint(1, 9)
        if name not in ever:
            ever.add(name)
            write(folder, name, size)
            (folder / name).with_suffix(".size").write_text(str(size))


def keys_of_step(ranks: list[ShardLoader], streams: list[Any]) -> list[str]:
    """The keys of the next global batch, which is then committed."""
    each = zip(ranks, streams, strict=True)
    batches = [next(stream) for loader, stream in each for _ in range(loader.micro_batches_per_step)]
    for loader in ranks:
        loader.commit()
    return valid_keys(batches)


def sample_of(key: str) -> Sample:
    """The shard of a key, and the number in it."""
    shard, _, number = key.rpartition("/")
    return shard, int(number)
