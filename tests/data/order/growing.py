"""What a run on data that change owes, in plain sets: the oracle of the tests of growth."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np

from dtrain.data.order.growth import Growth, ShardList
from dtrain.data.order.index import Index

#: Name of the shard, and number in it.
Sample = tuple[str, int]


class Promise:
    """The samples that the current epoch still owes.

    Args:
        tail: With ``"drop"`` an epoch may end with samples that do not fill a step.
    """

    def __init__(self, tail: str = "pad") -> None:
        self._tail = tail
        self._files: set[Sample] = set()
        self._owed: set[Sample] | None = None  # None: nothing of the epoch was used
        self._joined: set[Sample] = set()
        self.epoch = 0

    def start(self, files: Mapping[str, int], *, now: bool) -> None:
        """A start on these shards, name to number of samples."""
        self._files = {(name, number) for name, size in files.items() for number in range(size)}
        if self._owed is not None:
            self._owed &= self._files  # what was removed
            if now:
                self._owed |= self._files - self._joined
                self._joined |= self._files

    def take(self, epoch: int, samples: list[Sample], is_last: bool) -> None:
        """A step of an epoch used these samples; it may be the last one."""
        if epoch != self.epoch:  # the rest of an epoch may have been dropped at a start, as too small for a step
            assert self._tail == "drop" or not self._owed
            assert epoch == self.epoch + 1
            self.epoch, self._owed = epoch, None
        if self._owed is None:
            self._owed, self._joined = set(self._files), set(self._files)
        assert len(set(samples)) == len(samples)
        assert set(samples) <= self._owed, sorted(set(samples) - self._owed)
        self._owed -= set(samples)
        if is_last:
            assert self._tail == "drop" or not self._owed, sorted(self._owed)
            self.epoch, self._owed = epoch + 1, None


class SourcePromise:
    """The samples that the current epoch of one source of a mixture still owes.

    It counts places too: those of samples that were removed are taken, without a sample, before the epoch ends.
    """

    def __init__(self) -> None:
        self._files: set[Sample] = set()
        self._owed: set[Sample] | None = None  # None: nothing of the epoch was taken
        self._joined: set[Sample] = set()
        self._left = self._removed = 0
        self.epoch = 0

    def start(self, files: Mapping[str, int], *, now: bool) -> None:
        """A start on these shards, name to number of samples."""
        self._files = {(name, number) for name, size in files.items() for number in range(size)}
        if self._owed is not None:
            self._removed += len(self._owed - self._files)
            self._owed &= self._files
            if now:
                new = self._files - self._joined
                self._owed |= new
                self._joined |= new
                self._left += len(new)

    def take(self, places: int, samples: list[tuple[int, Sample]]) -> None:
        """A step took so many places of the source, which have these samples, each with its epoch."""
        left = list(samples)
        for epoch, number in self._places(places):
            of_epoch = [sample for its_epoch, sample in left if its_epoch == epoch]
            left = [each for each in left if each[0] != epoch]
            self._take(number, of_epoch)
        assert not left

    def take_in_any_epoch(self, places: int, samples: list[Sample]) -> None:
        """The same for samples of which the epoch is not known: those that an epoch owes are the first ones of each."""
        left = list(samples)
        for _, number in self._places(places):
            assert self._owed is not None
            of_epoch = [sample for sample in dict.fromkeys(left) if sample in self._owed][:number]
            # Ends of epochs in one step: what this epoch owes and does not get now, it never gets.
            for sample in of_epoch:
                left.remove(sample)
            self._take(number, of_epoch)
        assert not left

    def _places(self, places: int) -> Iterator[tuple[int, int]]:
        """The epochs that a step takes places of, and how many of each."""
        while places:
            if self._owed is None:
                self._owed, self._joined = set(self._files), set(self._files)
                self._left, self._removed = len(self._owed), 0
            number = min(places, self._left)
            places -= number
            yield self.epoch, number

    def _take(self, places: int, samples: list[Sample]) -> None:
        assert self._owed is not None
        assert len(set(samples)) == len(samples)
        assert set(samples) <= self._owed, sorted(set(samples) - self._owed)
        assert 0 <= places - len(samples) <= self._removed
        self._owed -= set(samples)
        self._removed -= places - len(samples)
        self._left -= places
        if not self._left:
            assert not self._owed, sorted(self._owed)
            self.epoch, self._owed = self.epoch + 1, None


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
    def of(cls, files: Mapping[str, int], state: Mapping[str, Any] | None, growth: Growth) -> Shards:
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


def more_files(rng: random.Random, files: dict[str, int], most: int) -> dict[str, int]:
    """New files, of which some sort before and between those that there are."""
    names = [f"{rng.choice('abc')}-{rng.randrange(40):03}.tar" for _ in range(rng.randint(0, most))]
    return {name: rng.randint(0, 9) for name in names if name not in files}
