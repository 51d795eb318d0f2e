"""Which sample is at which position of an epoch: a pure function without state.

* The *line* is the epoch's shards, permuted and concatenated: ``num_samples`` places.
* A *lane* is one of K contiguous pieces of the line, equal to within one sample. A step takes ``G / K`` samples from
  each lane, where G is the global batch size. So *slot* (row) *s* of the global batch belongs to lane ``s // (G / K)``.
* A *shuffle window* is a few neighbouring shards inside a lane. Samples are permuted only within their window, so that a
  rank needs no more than (its lanes x the window) shards open at a time.
* A *layout* is (G, K, committed steps): how a part of the epoch was cut into lanes. If G changes in the middle of an epoch,
  the uncommitted ends of all lanes are concatenated to a shorter line, and the next layout cuts this line into lanes. A
  checkpoint stores the list of layouts.
* *Shards that join* in the middle of an epoch form a line of their own. It is merged evenly with the rest of the line before
  (``cut``), so that every step has samples of both in proportion to their lengths.

A position goes through three maps: (step, slot) -> place on the current line -> place on the first lines -> sample::

    Cut.place        which place of the current line a slot draws at a step
    Cut.outer        the same place on the line before the last change, back to the line of its shards
    permute           the permutation within the shuffle window

Nothing here reads the environment, a clock or a global generator. Therefore parent and workers compute the same order, and
the content of a global batch depends neither on ranks nor on workers.
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
#: Default number of lanes, unless the global batch size or the number of ranks needs a different one.
DEFAULT_LANES = 64
# Each permutation needs its own key; two that share (seed, epoch) differ in this number.
_SHARDS, _WINDOW, _FULL = 1, 2, 3


@dataclass(frozen=True)
class Layout:
    """How a stretch of an epoch is cut.

    Attributes:
        global_batch_size: Samples of a step.
        lanes: Number of lanes.
        steps: How many of its steps were committed.
        shards: How many shards it draws from: the first ones, in the order of their numbers; None: all.
    """

    global_batch_size: int
    lanes: int
    steps: int = 0
    shards: int | None = None


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


def default_lanes(ranks: int) -> int:
    """The most lanes of a run that does not set them: 64, or the number of ranks if that is larger.

    A rank opens the shards of its lanes. Several ranks of one lane each open all of its shards, of which each reads only a
    part of the samples. With as many lanes as ranks, each opens its share. More lanes would only let few ranks have more
    shards in use. The order depends on it, so a run keeps the number with which it began, on any ranks.
    """
    return max(DEFAULT_LANES, ranks)


def choose_lanes(global_batch_size: int, lanes: int | None, shuffle: str, ranks: int = 1) -> int:
    """The number of lanes: ``lanes``, or by default the largest divisor of the global batch size up to 64, or up to ``ranks``.

    With ``"none"`` the default is one lane: the stored order. A full shuffle always has one.

    Raises:
        ValueError: If ``lanes`` does not divide ``global_batch_size``; names a number that does.
    """
    if shuffle == "full" or (shuffle == "none" and lanes is None):
        return 1
    if lanes is None:
        return max(k for k in range(1, default_lanes(ranks) + 1) if global_batch_size % k == 0)
    if lanes < 1 or global_batch_size % lanes:
        raise ValueError(
            f"data.lanes: got {lanes}, which does not divide the global batch size {global_batch_size}; every lane provides an "
            f"equal share of each step. Set data.lanes={choose_lanes(global_batch_size, None, shuffle)}, or null."
        )
    return lanes


class EpochOrder:
    """The order of one epoch.

    Args:
        counts: Samples of each shard, int64, shape ``[num_shards]``.
        recipe: Seed, shuffle, shuffle window and tail.
        epoch: Number of the epoch, from 0.
        layouts: How the epoch was cut so far, oldest first; the last layout is the current one.
        removed: Number of each shard that was removed to the epoch in which that happened. Its samples are masked there, from
            the current step on, and are no part of later epochs.

    Attributes:
        first_step: First step of the current layout: how many steps earlier layouts used.
        num_steps: Steps of the whole epoch, including those of earlier layouts.
    """

    def __init__(
        self,
        counts: np.ndarray,
        recipe: Recipe,
        epoch: int,
        layouts: Sequence[Layout],
        removed: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        self.recipe = recipe
        self.layouts = tuple(layouts)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
        left_out = [shard for shard, since in removed.items() if since < epoch]
        self._masked = _Ranges(starts, sorted(removed))
        if left_out:
            counts = counts.copy()
            counts[left_out] = 0
        ends = [len(counts) if layout.shards is None else layout.shards for layout in self.layouts]
        # Lanes of the first layout, even after a change of the batch size: if samples changed their places, a committed one
        # could be drawn a second time.
        self._lines = _Lines(counts, starts, recipe, epoch, self.layouts[0].lanes, ends)
        self.num_samples = self._lines.num_samples
        first, *later = [(it.global_batch_size, it.lanes, it.steps) for it in self.layouts]
        self._cuts = [Cut.whole(*first, self._lines.samples_until(ends[0]))]
        # Each later layout cuts the rest of the layout before it, with the shards that join.
        for cut, begin, end in zip(later, ends, ends[1:], strict=False):
            place = self._lines.samples_until(begin)
            self._cuts.append(self._cuts[-1].rest(*cut, place, self._lines.samples_until(end) - place))
        self.first_step = sum(layout.steps for layout in self.layouts[:-1])
        self.num_steps = self.first_step + self._cuts[-1].num_steps(recipe.tail)

    def position(self, step: int) -> int:
        """Samples of the epoch in the steps before ``step``."""
        cut = self._cuts[-1]
        return self.num_samples - cut.num_samples + cut.used(step - self.first_step)

    def locate(self, steps: np.ndarray | int, slots: np.ndarray) -> np.ndarray:
        """Maps positions to samples.

        Args:
            steps: Step of the epoch, int64, each in ``[first_step, num_steps)``; broadcast against ``slots``.
            slots: Slot of the global batch, int64, each in ``[0, global_batch_size)``, or -1 for a masked one.

        Returns:
            Sample number (samples are counted over all shards, in the order of ``counts``), int64, of the broadcast
            shape; -1 where the slot is masked, past the end of the epoch, or of a shard that was removed.

        Raises:
            IndexError: If a step does not belong to the current layout, or a slot is out of range; names the first one.
        """
        samples = self._samples(self._places(steps, slots))
        samples[self._masked.have(samples)] = -1
        return samples

    def find(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The inverse of ``locate``, for the steps of all layouts.

        Args:
            samples: Sample numbers, int64, shape ``[n]``.

        Returns:
            Step of the epoch and slot, int64, shape ``[n]`` each; -1 for a sample that the epoch leaves out (``tail="drop"``),
            or of a shard that it does not draw from or that was removed.
        """
        samples = np.asarray(samples, np.int64)
        steps, slots = np.full(samples.shape, -1, np.int64), np.full(samples.shape, -1, np.int64)
        known = np.flatnonzero(self._lines.have(samples) & ~self._masked.have(samples))
        first_place = np.full(samples.shape, -1, np.int64)
        first_place[known] = self._lines.find(samples[known])
        left, place, first = known[:0], samples[:0], 0  # what is left on the line of a cut, and the cut's first step
        for number, cut in enumerate(self._cuts):
            joined = known[cut.joins(first_place[known])]
            left = np.concatenate([left, joined])
            place = np.concatenate([cut.inner(place), cut.inner_of_joined(first_place[joined])])
            step, slot = cut.find(place)
            used = step < (cut.num_steps(self.recipe.tail) if number == len(self._cuts) - 1 else cut.steps)
            steps[left[used]], slots[left[used]] = first + step[used], slot[used]
            left, place = left[~used], place[~used]
            first += cut.steps
        return steps, slots

    def partners(self, steps: np.ndarray | int, slots: np.ndarray) -> np.ndarray:
        """The partner of each sample of ``locate`` for mixup and cutmix; arguments, result and errors as in ``locate``.

        The samples of a lane form pairs of neighbours. Samples are permuted within a shuffle window, so the neighbour is a
        random sample of that window; it is usually in the same micro-batch, so that mixing rarely reads an additional
        sample. Partners do not change with the global batch size in the middle of an epoch. The last sample of a lane of
        odd length has the sample before it; the only sample of a lane has itself, and so has one whose partner was removed.
        """
        place = self._places(steps, slots)
        filled = place >= 0
        beside = place.copy()
        beside[filled] = self._lines.beside(place[filled])
        partners = self._samples(beside)
        if self._masked.shards.size:
            partners = np.where(self._masked.have(partners), self._samples(place), partners)
        return partners

    def shards_ahead(self, step: int, slots: np.ndarray, most: int) -> np.ndarray:
        """Up to ``most`` shards that these slots read from ``step`` on, up to the end of their lanes.

        Returns:
            Indices into ``counts``, without duplicates, int64, shape ``[n]``: first the shards of all shuffle windows in use
            at ``step``, then the others roughly in the order in which they are read.
        """
        place = self._cuts[-1].place(np.asarray(step - self.first_step), np.asarray(slots, np.int64))
        shards = self._lines.shards_ahead(self._first_places(place[place >= 0]), most)
        return shards[~np.isin(shards, self._masked.shards)]

    def _places(self, steps: np.ndarray | int, slots: np.ndarray) -> np.ndarray:
        """Places on the first lines, before shuffling; -1 where there is none."""
        steps, slots = np.asarray(steps, np.int64), np.asarray(slots, np.int64)
        check_bounds("step", steps, self.first_step, self.num_steps)
        check_bounds("slot", slots, -1, self.layouts[-1].global_batch_size)
        place = self._cuts[-1].place(steps - self.first_step, slots)
        filled = place >= 0
        place[filled] = self._first_places(place[filled])
        return place

    def _first_places(self, place: np.ndarray) -> np.ndarray:
        """The places on the first lines of places on the last one."""
        found, rows = np.empty_like(place), np.arange(len(place))
        for cut in self._cuts[:0:-1]:  # the line of the first cut is the first line
            if cut.joined:
                place, of_joined = cut.split(place)
                found[rows[of_joined]] = place[of_joined]
                rows, place = rows[~of_joined], place[~of_joined]
            place = cut.outer(place)
        found[rows] = place
        return found

    def _samples(self, place: np.ndarray) -> np.ndarray:
        """The samples that the shuffle puts at these places; -1 where there is none."""
        samples = np.full(place.shape, -1, np.int64)
        filled = place >= 0
        samples[filled] = self._lines.samples(place[filled])
        return samples


class _Ranges:
    """The samples of some shards."""

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


class _Lines:
    """The line of an epoch, followed by one for the shards of each growth; places and samples are counted over all of them.

    Args:
        counts: Samples of each shard on these lines, int64, shape ``[num_shards]``; 0 for one that is left out.
        starts: First sample of each shard, and the end, int64, shape ``[num_shards + 1]``.
        recipe: Seed, shuffle and shuffle window.
        epoch: Number of the epoch, from 0.
        lanes: Number of lanes of each line.
        ends: For each layout, the number of shards that it draws from, ascending.
    """

    def __init__(
        self, counts: np.ndarray, starts: np.ndarray, recipe: Recipe, epoch: int, lanes: int, ends: Sequence[int]
    ) -> None:
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
        self.num_samples = self.samples_until(ends[-1])

    def samples_until(self, shards: int) -> int:
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


def permutation_key(recipe: Recipe, key: np.ndarray, start: np.ndarray) -> np.ndarray:
    """The key, for ``permute``, of the permutation that begins at place ``start`` of the line with this key."""
    return hash64(key.astype(np.int64), start) if recipe.shuffle == "window" else key


def lane_bounds(num_samples: int, lanes: int) -> np.ndarray:
    """First place of each of ``lanes`` equal pieces of a line, and the end, int64, shape ``[lanes + 1]``."""
    return np.arange(lanes + 1) * num_samples // lanes


def check_bounds(name: str, values: np.ndarray, low: int, end: int) -> None:
    """Raises an ``IndexError`` that names the first of ``values`` outside ``[low, end)``."""
    outside = values[(values < low) | (values >= end)]
    if outside.size:
        raise IndexError(f"{name} {outside[0]} is outside [{low}, {end}) of this layout")
