"""Data that grow and shrink between starts. The oracle keeps, as a plain list, what each epoch still owes."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pytest

from dtrain.data.order.epoch_order import Layout, Recipe, choose_lanes
from dtrain.data.order.growth import Growth, ShardList
from dtrain.data.order.index import Index
from dtrain.data.order.position import Position
from tests.data.order.growing import Promise, Sample


class Shards(Index):
    """An index of named shards without files; removed ones are known by name only."""

    labels: ClassVar = {"num_shards": "shards", "num_samples": "samples"}
    other_difference = "other shards."

    def __init__(self, known: ShardList, removed: list[int]) -> None:
        self.shard_list, self.removed = known, removed
        self.counts, self.num_samples = known.counts, int(known.counts.sum())
        content = json.dumps([known.names, known.counts.tolist(), known.checks.tolist()])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()

    @classmethod
    def of(cls, files: Mapping[str, int], state: dict[str, Any] | None, growth: Growth) -> Shards:
        """The files, numbered as a loader does."""
        names = sorted(files)
        present = ShardList(tuple(names), np.array([files[it] for it in names]), _checks(names, files))
        if state is None:
            return cls(present, [])
        known = ShardList.from_state(state["shards"])
        numbers = growth.numbering(known, present, [shard for shard, _ in state.get("removed", [])])
        if numbers is None:
            return cls(present, [])
        every = known.followed_by(present.take(numbers[len(known.names) :]))
        return cls(every, np.flatnonzero(numbers < 0).tolist())

    def head(self, shards: int) -> Shards:
        return Shards(self.shard_list.take(np.arange(shards)), [it for it in self.removed if it < shards])

    def describe(self) -> dict[str, Any]:
        return {"num_shards": len(self.counts), "num_samples": self.num_samples, "fingerprint": self.fingerprint}

    def sample(self, number: int) -> Sample:
        ends = np.cumsum(self.counts)
        shard = int(np.searchsorted(ends, number, side="right"))
        return self.shard_list.names[shard], number - int(ends[shard] - self.counts[shard])

    def keys(self, samples: np.ndarray) -> list[str]:
        raise NotImplementedError

    def find(self, key: str) -> np.ndarray:
        raise NotImplementedError

    def find_shard(self, name: str) -> np.ndarray:
        raise NotImplementedError


def _checks(names: list[str], files: Mapping[str, int]) -> np.ndarray:
    return np.array([hash((name, files[name])) % 2**32 for name in names], np.uint32)


def through_a_file(value: dict[str, Any]) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(value))
    return content


def start(
    files: Mapping[str, int], state: dict[str, Any] | None, growth: Growth, batch: int = 6, **options: Any
) -> tuple[Position, Shards]:
    """A position on these files, restored."""
    recipe = Recipe(0, **options)
    index = Shards.of(files, state, growth)
    layout = Layout(batch, choose_lanes(batch, None, recipe.shuffle))
    position = Position(index, recipe, layout, default_lanes=True, growth=growth)
    if state is not None:
        position.load_state_dict(state)
    return position, index


def next_step(position: Position, index: Shards) -> list[Sample]:
    numbers = position.order.locate(position.step, np.arange(position.order.layouts[-1].global_batch_size))
    position.advance()
    return [index.sample(number) for number in numbers.tolist() if number >= 0]


def more_files(rng: random.Random, files: dict[str, int], most: int) -> dict[str, int]:
    """New files, of which some sort before and between those that there are."""
    names = [f"{rng.choice('abc')}-{rng.randrange(40):03}.tar" for _ in range(rng.randint(0, most))]
    return {name: rng.randint(0, 9) for name in names if name not in files}


@pytest.mark.parametrize("cases", [60, pytest.param(3000, marks=pytest.mark.slow)])
def test_every_sample_comes_as_often_as_promised_however_data_change(cases: int) -> None:
    for case in range(cases):
        rng = random.Random(case)
        shuffle, tail = rng.choice(["window", "window", "full", "none"]), rng.choice(["pad", "pad", "drop"])
        files = {"b-010.tar": rng.randint(12, 20), "b-011.tar": rng.randint(0, 9)} | more_files(rng, {}, 4)
        ever, state, promise = set(files), None, Promise(tail)
        segments = []
        for _ in range(rng.randint(2, 6)):
            when = rng.choice(["next_epoch", "now"])
            growth, batch = Growth(when, allow_removed=True), rng.randint(1, 12)
            if state is not None:
                for name in rng.sample(sorted(files), rng.randint(0, len(files) // 2)) * rng.choice([0, 0, 1]):
                    del files[name]
                new = {name: size for name, size in more_files(rng, files, 4).items() if name not in ever}
                files |= new if sum(files.values()) >= 12 else {**new, f"z-{len(ever)}.tar": 12}
                ever |= set(files)
            position, index = start(files, state, growth, batch, shuffle=shuffle, tail=tail, window=rng.randint(1, 3))
            promise.start(files, now=when == "now")
            segment = through_a_file({"settings": position.settings(), "state": position.state_dict()})
            walked = []
            for step in range(rng.choice([0, 1, rng.randint(0, 12), rng.randint(0, 60)])):
                epoch = position.epoch
                promise.take(epoch, taken := next_step(position, index), position.epoch > epoch)
                walked += [(epoch, step, sample) for sample in taken]
            segments.append((segment, step + 1 if walked else 0, walked))
            state = through_a_file(position.state_dict())
        # The last position finds the uses of all segments.
        position, index = start(files, state, Growth("next_epoch", allow_removed=True))
        asked = np.arange(index.num_samples)
        for segment, steps, walked in segments:
            there = position.at_segment(segment)
            known = int(there._index.num_samples)
            found = there.find(asked, steps)
            uses = zip(found.epoch.tolist(), found.step.tolist(), asked[found.sample].tolist(), strict=True)
            assert sorted((epoch, step, index.sample(number)) for epoch, step, number in uses) == sorted(walked)
            for step in range(0, steps, 5):
                epochs, numbers = there.samples_of(step)
                assert numbers.max() < known
                drawn = [
                    (e, step, index.sample(n)) for e, n in zip(epochs.tolist(), numbers.tolist(), strict=True) if n >= 0
                ]
                assert sorted(drawn) == sorted(use for use in walked if use[1] == step), (case, step)
