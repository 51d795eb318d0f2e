"""The lines of an epoch: its shards, permuted and concatenated, and the shuffle on them.

* A *line* (``EpochLine``) is some shards, permuted and concatenated. It is cut into *lanes*, and samples are permuted within
  *shuffle windows* of neighbouring shards of a lane.
* ``Lines`` are the line with which an epoch begins, followed by one for the shards of each growth in the epoch.
* ``CutLines`` are these with the *cuts* of the epoch (``cut``): they map places on the last cut to samples, and back.

Nothing here knows steps or batch sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from dtrain.data.order.cut import Cut
from dtrain.data.order.randomness import hash64, permute, unpermute

SHUFFLES = ("window", "full", "none")
TAILS = ("pad", "drop")
DEFAULT_WINDOW = 8
# Each permutation needs its own key; two that share (seed, epoch) differ in this number.
_SHARDS, _WINDOW, _FULL = 1, 2, 3


@dataclass(frozen=True)
class Recipe:
    """The settings that determine an epoch's order, together with the shards and the layouts.

    Args:
        seed: Seed of all permutations, an integer of 64 bits.
        shuffle: ``"window"``, ``"full"`` (one permutation of all samples) or ``"none"`` (each lane in stored order).
        window: Shards in a shuffle window; read for ``"window"`` only.
        tail: ``"pad"`` fills the last global batch with masked slots, ``"drop"`` leaves its samples out.

    Raises:
        ValueError: If a value is impossible; names key and value.
    """

    seed: int
    shuffle: str = "window"
    window: int = DEFAULT_WINDOW
    tail: str = "pad"

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"run.seed: got {self.seed}, want an integer of 64 bits.")
        if self.shuffle not in SHUFFLES:
            raise ValueError(f"data.shuffle: got {self.shuffle!r}, want one of {', '.join(SHUFFLES)}.")
        if self.tail not in TAILS:
            raise ValueError(f"data.tail: got {self.tail!r}, want one of {', '.join(TAILS)}.")
        if self.window < 1:
            raise ValueError(f"data.window: got {self.window}, want a number of shards of at least 1.")


class Ranges:
    """The samples of some shards.

    Args:
        starts: First sample of each shard, and the end, int64, shape ``[num_shards + 1]``.
        shards: Their numbers, ascending.
    """

    def __init__(self, starts: np.ndarray, shards: Sequence[int]) -> None:
        self.shards = np.array(shards, np.int64)
        self._begins, self._ends = starts[self.shards], starts[self.shards + 1]

    def have(self, samples: np.ndarray) -> np.ndarray:
        """Whether each sample is one of them, bool; false for -1."""
        if not self.shards.size:
            return np.zeros(samples.shape, bool)
        # A shard without samples begins where it ends, so ends are compared: the first end above a sample is that of its range.
        number = np.searchsorted(self._ends, samples, side="right")
        have: np.ndarray = self._begins[np.minimum(number, len(self.shards) - 1)] <= samples
        return have & (number < len(self.shards))


class CutLines:
    """The lines of an epoch, cut one or several times: places are those of the last cut.

    Args:
        lines: The lines.
        cuts: The cuts, oldest first. Each later one is the rest of the cut before it, with the shards that join.
    """

    def __init__(self, lines: Lines, cuts: Sequence[Cut]) -> None:
        self._lines, self._cuts = lines, cuts

    def samples(self, place: np.ndarray) -> np.ndarray:
        """The sample at each place; -1 where there is no place, or the sample's shard was removed."""
        samples = self._samples(self.first_places(place))
        samples[self._lines.masked.have(samples)] = -1
        return samples

    def partners(self, place: np.ndarray) -> np.ndarray:
        """The partner of the sample at each place; see ``EpochOrder.partners``."""
        first_place = self.first_places(place)
        filled = first_place >= 0
        beside = first_place.copy()
        beside[filled] = self._lines.beside(first_place[filled])
        partners = self._samples(beside)
        if self._lines.masked.shards.size:
            partners = np.where(self._lines.masked.have(partners), self._samples(first_place), partners)
        return partners

    def find(self, samples: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """For each cut, which samples are on it and were not committed before it, and their places on it.

        Args:
            samples: int64, shape ``[n]``. Those that the epoch does not draw from, or that were removed, are left out.
        """
        known = np.flatnonzero(self._lines.have(samples) & ~self._lines.masked.have(samples))
        first_place = np.full(samples.shape, -1, np.int64)
        first_place[known] = self._lines.find(samples[known])
        left, place = known[:0], samples[:0]
        for number, cut in enumerate(self._cuts):
            if number:
                is_left = cut.has_left(place, self._cuts[number - 1])
                left, place = left[is_left], cut.inner(place[is_left])
            joined = known[cut.joins(first_place[known])]
            left = np.concatenate([left, joined])
            place = np.concatenate([place, cut.inner_of_joined(first_place[joined])])
            yield left, place

    def shards_ahead(self, place: np.ndarray, most: int) -> np.ndarray:
        """Up to ``most`` shards from these places on; see ``EpochOrder.shards_ahead``."""
        shards = self._lines.shards_ahead(self.first_places(place), most)
        return shards[~np.isin(shards, self._lines.masked.shards)]

    def first_places(self, place: np.ndarray) -> np.ndarray:
        """The places on the first lines, before the shuffle; -1 where there is no place."""
        first_place = np.full(place.shape, -1, np.int64)
        filled = place >= 0
        first_place[filled] = self._to_first(place[filled])
        return first_place

    def _to_first(self, place: np.ndarray) -> np.ndarray:
        found, rows = np.empty_like(place), np.arange(len(place))
        for cut in self._cuts[:0:-1]:  # the line of the first cut is the first line
            if cut.joined:
                place, of_joined = cut.split(place)
                found[rows[of_joined]] = place[of_joined]
                rows, place = rows[~of_joined], place[~of_joined]
            place = cut.outer(place)
        found[rows] = place
        return found

    def _samples(self, first_place: np.ndarray) -> np.ndarray:
        """The samples that the shuffle puts at these places; -1 where there is none."""
        samples = np.full(first_place.shape, -1, np.int64)
        filled = first_place >= 0
        samples[filled] = self._lines.samples(first_place[filled])
        return samples


class Lines:
    """The line of an epoch, followed by one for the shards of each growth; places and samples are counted over all of them.

    Args:
        counts: Samples of each shard, int64, shape ``[num_shards]``.
        recipe: Seed, shuffle and shuffle window.
        epoch: Number of the epoch, from 0.
        lanes: Number of lanes of each line.
        ends: For each cut, the number of shards that it draws from, ascending.
        removed: Number of each shard that was removed to the epoch in which that happened. Its samples are on the line of that
            epoch, and not on those of later ones.

    Attributes:
        num_samples: Places.
        masked: The samples of all shards that were removed.
    """

    def __init__(
        self,
        counts: np.ndarray,
        recipe: Recipe,
        epoch: int,
        lanes: int,
        ends: Sequence[int],
        removed: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self.masked = Ranges(starts, sorted(removed))
        counts = without(counts, [shard for shard, since in removed.items() if since < epoch])
        self._recipe = recipe
        self._before = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        self._first_shards = [0, *(begin for begin, end in itertools.pairwise(ends) if end > begin)]
        self._lines = []
        for begin, end in zip(self._first_shards, [*self._first_shards[1:], ends[-1]], strict=True):
            # Lines of equal length have different permutations.
            own = replace(recipe, seed=int(hash64(recipe.seed, begin))) if begin else recipe
            self._lines.append(EpochLine(counts[begin:end], own, epoch, lanes, starts[begin:end] - starts[begin]))
        self._first_places, self._first_samples = self._before[self._first_shards], starts[self._first_shards]
        self._end = int(starts[ends[-1]])
        self._ends = ends
        self.num_samples = self._samples_until(ends[-1])

    def joining(self) -> list[tuple[int, int]]:
        """For each cut after the first one, the place at which the line of its joining shards starts, and its length."""
        places = [self._samples_until(end) for end in self._ends]
        return [(begin, end - begin) for begin, end in itertools.pairwise(places)]

    @property
    def begun_with(self) -> int:
        """Samples of the first cut."""
        return self._samples_until(self._ends[0])

    def _samples_until(self, shards: int) -> int:
        """Samples of the first ``shards`` shards, without those that are left out."""
        return int(self._before[shards])

    def have(self, samples: np.ndarray) -> np.ndarray:
        """Whether each sample is of one of these shards, bool."""
        return samples < self._end

    def samples(self, place: np.ndarray) -> np.ndarray:
        """The sample that the shuffle puts at each place."""
        samples = np.empty_like(place)
        for number, rows, line in self._each(place, self._first_places):
            at = place[rows] - self._first_places[number]
            if self._recipe.shuffle != "none":
                start, size = line.permutations(at, line.lane_of(at))
                at = start + permute(at - start, size, permutation_key(self._recipe, line.key, start))
            samples[rows] = line.samples(at) + self._first_samples[number]
        return samples

    def find(self, samples: np.ndarray) -> np.ndarray:
        """The place, before the shuffle, of each sample."""
        place = np.empty_like(samples)
        for number, rows, line in self._each(samples, self._first_samples):
            place[rows] = line.find(samples[rows] - self._first_samples[number]) + self._first_places[number]
        return place

    def beside(self, place: np.ndarray) -> np.ndarray:
        """The other place of each place's pair: see ``EpochOrder.partners``."""
        other = np.empty_like(place)
        for number, rows, line in self._each(place, self._first_places):
            at = place[rows] - self._first_places[number]
            other[rows] = line.beside(at, line.lane_of(at)) + self._first_places[number]
        return other

    def shards_ahead(self, place: np.ndarray, most: int) -> np.ndarray:
        """Up to ``most`` shards from these places on, those of all lines in turn; see ``EpochOrder.shards_ahead``."""
        found, turns = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for number, rows, line in self._each(place, self._first_places):
            ahead = line.shards_ahead(place[rows] - self._first_places[number], most)
            found.append(ahead + self._first_shards[number])
            turns.append(np.arange(len(found[-1])))
        return np.concatenate(found)[np.argsort(np.concatenate(turns), kind="stable")][:most]

    def _each(self, numbers: np.ndarray, firsts: np.ndarray) -> Iterator[tuple[int, Any, EpochLine]]:
        """Number and rows of each line that has some of these places or samples, by the first one of each line."""
        if len(self._lines) == 1:
            yield 0, slice(None), self._lines[0]
            return
        which = np.searchsorted(firsts, numbers, side="right") - 1
        for number in np.unique(which).tolist():
            yield number, np.flatnonzero(which == number), self._lines[number]


class EpochLine:
    """The permuted shards of an epoch, concatenated, in lanes that are equal to within one sample.

    Args:
        counts: Samples of each shard, int64, shape ``[num_shards]``.
        recipe: Seed, shuffle and shuffle window.
        epoch: Number of the epoch, from 0.
        lanes: Number of lanes.
        first_samples: Number of each shard's first sample, int64, shape ``[num_shards]``; None: samples are counted over
            ``counts``.

    Attributes:
        num_samples: Places of the line.
        bounds: First place of each lane, and the end, int64, shape ``[lanes + 1]``.
        key: Key of the permutations, uint64, shape ``[]``.
    """

    def __init__(
        self, counts: np.ndarray, recipe: Recipe, epoch: int, lanes: int, first_samples: np.ndarray | None = None
    ) -> None:
        self.num_samples = int(counts.sum())
        self.bounds = lane_bounds(self.num_samples, lanes)
        self._shuffle, self._window = recipe.shuffle, recipe.window
        shards = np.arange(len(counts), dtype=np.int64)
        if recipe.shuffle == "window":
            shards = permute(shards, max(len(counts), 1), hash64(recipe.seed, epoch, _SHARDS))
        self.key = hash64(recipe.seed, epoch, _WINDOW if recipe.shuffle == "window" else _FULL)
        self._shards = shards
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[shards])])  # first place of each shard
        # number of that shard's first sample
        self._first_sample = (np.cumsum(counts) - counts if first_samples is None else first_samples)[shards]
        self._lane_shards = self._shard_at(self.bounds[:-1])

    def permutations(self, place: np.ndarray, lane: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """First place and size of the permutation that each place of a lane belongs to, int64, of the shape of ``place``.

        There is none with ``shuffle="none"``.
        """
        if self._shuffle == "full":
            return np.zeros_like(place), np.full_like(place, self.num_samples)
        start, end = self._window_of(place, lane)
        return start, end - start

    def samples(self, place: np.ndarray) -> np.ndarray:
        """The number of the sample at each place of the line, after the shuffle."""
        shard = self._shard_at(place)
        samples: np.ndarray = self._first_sample[shard] + place - self._starts[shard]
        return samples

    def find(self, samples: np.ndarray) -> np.ndarray:
        """The place of the line, before the shuffle, of each sample."""
        line = np.argsort(self._shards)  # the permuted shards in stored order
        # A shard without samples begins where the next one does: the last of equal ones has the sample.
        number = np.searchsorted(self._first_sample[line], samples, side="right") - 1
        shard = line[number]
        place: np.ndarray = self._starts[shard] + samples - self._first_sample[shard]
        if self._shuffle == "none":
            return place
        start, size = self.permutations(place, self.lane_of(place))
        key = hash64(self.key.astype(np.int64), start) if self._shuffle == "window" else self.key
        unshuffled: np.ndarray = start + unpermute(place - start, size, key)
        return unshuffled

    def lane_of(self, place: np.ndarray) -> np.ndarray:
        """The lane that contains each place."""
        return np.searchsorted(self.bounds, place, side="right") - 1

    def beside(self, place: np.ndarray, lane: np.ndarray) -> np.ndarray:
        """The other place of each place's pair in its lane: see ``EpochOrder.partners``."""
        start, end = self.bounds[lane], self.bounds[lane + 1]
        other = start + ((place - start) ^ 1)
        partner: np.ndarray = np.where(other < end, other, np.maximum(other - 2, start))
        return partner

    def shards_ahead(self, place: np.ndarray, most: int) -> np.ndarray:
        """Up to ``most`` shards from these places on, up to the ends of their lanes; see ``EpochOrder.shards_ahead``."""
        if self._shuffle == "full":  # any shard may be needed next
            return self._shards[:most]
        lane = self.lane_of(place)
        begin = self._window_of(place, lane)[0] if self._shuffle == "window" else place
        last = self.bounds[lane + 1] - 1
        lanes = np.unique(np.stack([self._shard_at(begin), self._shard_at(last)], axis=1), axis=0)
        ahead = lanes[:, :1] + np.arange(min(most, len(self._shards)))
        # Transposed: the first shard of every lane, then the second of every lane, and so on.
        nearest_first = ahead.T[(ahead <= lanes[:, 1:]).T]
        _, once = np.unique(nearest_first, return_index=True)
        return self._shards[nearest_first[np.sort(once)]][:most]

    def _window_of(self, place: np.ndarray, lane: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lane_shard = self._lane_shards[lane]
        number = (self._shard_at(place) - lane_shard) // self._window
        first = lane_shard + number * self._window
        last = np.minimum(first + self._window, len(self._starts) - 1)
        start = np.maximum(self._starts[first], self.bounds[lane])
        return start, np.minimum(self._starts[last], self.bounds[lane + 1])

    def _shard_at(self, place: np.ndarray) -> np.ndarray:
        """Index into the permuted shards of the shard at each place."""
        return np.searchsorted(self._starts, place, side="right") - 1


def without(counts: np.ndarray, shards: Sequence[int]) -> np.ndarray:
    """The samples of each shard if these shards have none, int64, shape ``[num_shards]``."""
    if not shards:
        return counts
    counts = counts.copy()
    counts[list(shards)] = 0
    return counts


def permutation_key(recipe: Recipe, key: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The key, for ``permute``, of the permutation that begins at place ``start`` of the line with this key."""
    return hash64(key.astype(np.int64), start) if recipe.shuffle == "window" else key


def lane_bounds(num_samples: int, lanes: int) -> np.ndarray:
    """First place of each of ``lanes`` equal pieces of a line, and the end, int64, shape ``[lanes + 1]``."""
    return np.arange(lanes + 1) * num_samples // lanes
