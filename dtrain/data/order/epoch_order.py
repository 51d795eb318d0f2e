"""Which sample is at which position of an epoch: a pure function without state.

* The *line* is the epoch's shards, permuted and concatenated: ``num_samples`` places.
* A *lane* is one of K contiguous pieces of the line, equal to within one sample. A step takes ``G / K`` samples from
  each lane, where G is the global batch size. So *slot* (row) *s* of the global batch belongs to lane ``s // (G / K)``.
* A *shuffle window* is a few neighbouring shards inside a lane. Samples are permuted only within their window, so that a
  rank needs no more than (its lanes x the window) shards open at a time.
* A *layout* is (G, K, committed steps): how a part of the epoch was cut into lanes. If G changes in the middle of an epoch,
  the uncommitted ends of all lanes are concatenated to a shorter line, and the next layout cuts this line into lanes. A
  checkpoint stores the list of layouts.

A position goes through three maps: (step, slot) -> place on the current line -> place on the first line -> sample::

    _Cut.place        which place of the current line a slot draws at a step
    _Cut.outer        the same place on the line before the last change of G, back to the first line
    _shuffled         the permutation within the shuffle window

Nothing here reads the environment, a clock or a global generator. Therefore parent and workers compute the same order, and
the content of a global batch depends neither on ranks nor on workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dtrain.data.order.randomness import hash64, permute, unpermute

SHUFFLES = ("window", "full", "none")
TAILS = ("pad", "drop")
DEFAULT_WINDOW = 8
_MOST_DEFAULT_LANES = 64
# Each permutation needs its own key; two that share (seed, epoch) differ in this number.
_SHARDS, _WINDOW, _FULL = 1, 2, 3


@dataclass(frozen=True)
class Layout:
    """How a stretch of an epoch is cut: global batch size, number of lanes, and how many of its steps were committed."""

    global_batch_size: int
    lanes: int
    steps: int = 0


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


def choose_lanes(global_batch_size: int, lanes: int | None, shuffle: str) -> int:
    """The number of lanes: ``lanes``, or by default the largest divisor of the global batch size up to 64.

    With ``"none"`` the default is one lane: the stored order. A full shuffle always has one.

    Raises:
        ValueError: If ``lanes`` does not divide ``global_batch_size``; names a number that does.
    """
    if shuffle == "full" or (shuffle == "none" and lanes is None):
        return 1
    if lanes is None:
        return max(k for k in range(1, _MOST_DEFAULT_LANES + 1) if global_batch_size % k == 0)
    if lanes < 1 or global_batch_size % lanes:
        raise ValueError(
            f"data.lanes: got {lanes}, which does not divide the global batch size {global_batch_size}; every lane provides an "
            f"equal share of each step. Set data.lanes=null to get {choose_lanes(global_batch_size, None, shuffle)}."
        )
    return lanes


class EpochOrder:
    """The order of one epoch.

    Args:
        counts: Samples of each shard, int64, shape ``[num_shards]``.
        recipe: Seed, shuffle, shuffle window and tail.
        epoch: Number of the epoch, from 0.
        layouts: How the epoch was cut so far, oldest first; the last layout is the current one.

    Attributes:
        first_step: First step of the current layout: how many steps earlier layouts used.
        num_steps: Steps of the whole epoch, including those of earlier layouts.
    """

    def __init__(self, counts: np.ndarray, recipe: Recipe, epoch: int, layouts: Sequence[Layout]) -> None:
        self.recipe = recipe
        self.layouts = tuple(layouts)
        # Lanes of the first layout, even after a change of the batch size: if samples changed their places, a committed one
        # could be drawn a second time.
        self._line = EpochLine(counts, recipe, epoch, self.layouts[0].lanes)
        self.num_samples = self._line.num_samples
        self._cuts = [_Cut.whole(self.num_samples, self.layouts[0])]
        # Each later layout cuts the rest of the layout before it.
        for layout in self.layouts[1:]:
            self._cuts.append(self._cuts[-1].rest(layout))
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
            shape; -1 where the slot is masked or past the end of the epoch.

        Raises:
            IndexError: If a step does not belong to the current layout, or a slot is out of range; names the first one.
        """
        return self._samples(self._places(steps, slots))

    def find(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The inverse of ``locate``, for the steps of all layouts.

        Args:
            samples: Sample numbers, int64, shape ``[n]``, each in ``[0, num_samples)``.

        Returns:
            Step of the epoch and slot, int64, shape ``[n]`` each; -1 for a sample that the epoch leaves out (``tail="drop"``).
        """
        place = self._line.find(np.asarray(samples, np.int64))
        steps, slots = np.full(place.shape, -1, np.int64), np.full(place.shape, -1, np.int64)
        left, first = np.arange(len(place)), 0
        for cut, rest in zip(self._cuts, (*self._cuts[1:], None), strict=True):
            step, slot = cut.find(place)
            used = step < (cut.layout.steps if rest is not None else cut.num_steps(self.recipe.tail))
            steps[left[used]], slots[left[used]] = first + step[used], slot[used]
            first += cut.layout.steps
            if rest is not None:
                left, place = left[~used], rest.inner(place[~used])
        return steps, slots

    def partners(self, steps: np.ndarray | int, slots: np.ndarray) -> np.ndarray:
        """The partner of each sample of ``locate`` for mixup and cutmix; arguments, result and errors as in ``locate``.

        The samples of a lane form pairs of neighbours. Samples are permuted within a shuffle window, so the neighbour is a
        random sample of that window; it is usually in the same micro-batch, so that mixing rarely reads an additional
        sample. Partners do not change with the global batch size in the middle of an epoch. The last sample of a lane of
        odd length has the sample before it; the only sample of a lane has itself.
        """
        place = self._places(steps, slots)
        filled = place >= 0
        at = place[filled]
        place[filled] = self._line.beside(at, self._line.lane_of(at))
        return self._samples(place)

    def shards_ahead(self, step: int, slots: np.ndarray, most: int) -> np.ndarray:
        """Up to ``most`` shards that these slots read from ``step`` on, up to the end of their lanes.

        Returns:
            Indices into ``counts``, without duplicates, int64, shape ``[n]``: first the shards of all shuffle windows in use
            at ``step``, then the others roughly in the order in which they are read.
        """
        place = self._cuts[-1].place(np.asarray(step - self.first_step), np.asarray(slots, np.int64))
        place = place[place >= 0]
        for cut in reversed(self._cuts):
            place = cut.outer(place)
        return self._line.shards_ahead(place, most)

    def _places(self, steps: np.ndarray | int, slots: np.ndarray) -> np.ndarray:
        """Places on the first line, before shuffling; -1 where there is none."""
        steps, slots = np.asarray(steps, np.int64), np.asarray(slots, np.int64)
        check_bounds("step", steps, self.first_step, self.num_steps)
        check_bounds("slot", slots, -1, self.layouts[-1].global_batch_size)
        place = self._cuts[-1].place(steps - self.first_step, slots)
        filled = place >= 0
        on_line = place[filled]
        for cut in reversed(self._cuts):
            on_line = cut.outer(on_line)
        place[filled] = on_line
        return place

    def _samples(self, place: np.ndarray) -> np.ndarray:
        """The samples that the shuffle puts at these places; -1 where there is none."""
        samples = np.full(place.shape, -1, np.int64)
        filled = place >= 0
        at = place[filled]
        if self.recipe.shuffle != "none":
            start, size = self._line.permutations(at, self._line.lane_of(at))
            at = start + permute(at - start, size, permutation_key(self.recipe, self._line.key, start))
        samples[filled] = self._line.samples(at)
        return samples


class EpochLine:
    """The permuted shards of an epoch, concatenated, in lanes that are equal to within one sample.

    Args:
        counts: Samples of each shard, int64, shape ``[num_shards]``.
        recipe: Seed, shuffle and shuffle window.
        epoch: Number of the epoch, from 0.
        lanes: Number of lanes.

    Attributes:
        num_samples: Places of the line.
        bounds: First place of each lane, and the end, int64, shape ``[lanes + 1]``.
        key: Key of the permutations, uint64, shape ``[]``.
    """

    def __init__(self, counts: np.ndarray, recipe: Recipe, epoch: int, lanes: int) -> None:
        self.num_samples = int(counts.sum())
        self.bounds = lane_bounds(self.num_samples, lanes)
        self._shuffle, self._window = recipe.shuffle, recipe.window
        shards = np.arange(len(counts), dtype=np.int64)
        if recipe.shuffle == "window":
            shards = permute(shards, max(len(counts), 1), hash64(recipe.seed, epoch, _SHARDS))
        self.key = hash64(recipe.seed, epoch, _WINDOW if recipe.shuffle == "window" else _FULL)
        self._shards = shards
        self._starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[shards])])  # first place of each shard
        self._first_sample = (np.cumsum(counts) - counts)[shards]  # number of that shard's first sample
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


@dataclass(frozen=True)
class _Cut:
    """A line of ``num_samples`` places, cut into lanes."""

    layout: Layout
    starts: np.ndarray  # where each piece of this line starts on the previous line, int64, [pieces]
    offsets: np.ndarray  # where each piece starts on this line, and the end, int64, [pieces + 1]

    @classmethod
    def whole(cls, num_samples: int, layout: Layout) -> _Cut:
        return cls(layout, np.zeros(1, np.int64), np.array([0, num_samples], np.int64))

    def rest(self, layout: Layout) -> _Cut:
        """The line of the samples that this layout's committed steps leave: the ends of all lanes, concatenated."""
        bounds = self._bounds(np.arange(self.layout.lanes + 1))
        starts = np.minimum(bounds[:-1] + self.layout.steps * self._per_lane, bounds[1:])
        return _Cut(layout, starts, np.concatenate([np.zeros(1, np.int64), np.cumsum(bounds[1:] - starts)]))

    @cached_property
    def num_samples(self) -> int:
        return int(self.offsets[-1])

    @cached_property
    def _per_lane(self) -> int:
        return self.layout.global_batch_size // self.layout.lanes

    def num_steps(self, tail: str) -> int:
        batch = self.layout.global_batch_size
        return self.num_samples // batch if tail == "drop" else -(-self.num_samples // batch)

    def used(self, steps: int) -> int:
        each = steps * self._per_lane
        if each <= self.num_samples // self.layout.lanes:  # fast path for the usual case: no lane has ended
            return each * self.layout.lanes
        bounds = self._bounds(np.arange(self.layout.lanes + 1))
        return int(np.minimum(np.diff(bounds), each).sum())

    def place(self, steps: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Places on this line that slots draw at steps; -1 where the slot is masked or its lane has ended."""
        lane = slots // self._per_lane
        place = self._bounds(lane) + steps * self._per_lane + slots % self._per_lane
        return np.where((slots >= 0) & (place < self._bounds(lane + 1)), place, -1)

    def find(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The step, if there are enough of them, and the slot that draw places on this line."""
        lane = np.searchsorted(self._bounds(np.arange(self.layout.lanes + 1)), place, side="right") - 1
        step, in_lane = np.divmod(place - self._bounds(lane), self._per_lane)
        return step, lane * self._per_lane + in_lane

    def inner(self, place: np.ndarray) -> np.ndarray:
        """The inverse of ``outer``: places on this line of places on the previous one that are left."""
        piece = np.searchsorted(self.starts, place, side="right") - 1
        inner: np.ndarray = self.offsets[piece] + place - self.starts[piece]
        return inner

    def outer(self, place: np.ndarray) -> np.ndarray:
        """The same places on the previous line."""
        piece = np.searchsorted(self.offsets, place, side="right") - 1
        outer: np.ndarray = self.starts[piece] + place - self.offsets[piece]
        return outer

    def _bounds(self, lane: np.ndarray) -> np.ndarray:
        return lane * self.num_samples // self.layout.lanes


def check_bounds(name: str, values: np.ndarray, low: int, end: int) -> None:
    """Raises an ``IndexError`` that names the first of ``values`` outside ``[low, end)``."""
    outside = values[(values < low) | (values >= end)]
    if outside.size:
        raise IndexError(f"{name} {outside[0]} is outside [{low}, {end}) of this layout")
