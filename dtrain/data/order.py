"""Where every sample of an epoch lies: a pure function, no state.

* The *line* is the epoch's shards, permuted, laid end to end: ``num_samples`` places.
* A *lane* is one of K contiguous pieces of the line, equal to within one sample. A step draws ``G / K`` samples from
  each, so slot *s* of the global batch belongs to lane ``s // (G / K)``.
* A *window* is a few neighbouring shards inside a lane; samples are permuted within it, so that a rank keeps only
  (its lanes x the window) shards open.
* A *layout* is (G, K, committed steps). When G changes in mid-epoch, what remains is the tail of each lane; laid end to
  end, these form a new, shorter line that the next layout cuts into lanes again. The list of layouts is all that a
  checkpoint needs.

Nothing here reads the environment, a clock or a global generator, so parent and workers agree by construction, and the
content of a global batch depends neither on ranks nor on workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dtrain.data.permutation import hash64, permute

SHUFFLES = ("window", "full", "none")
TAILS = ("pad", "drop")
DEFAULT_WINDOW = 8
_MOST_DEFAULT_LANES = 64
# Two uses of one (seed, epoch) must not share a key.
_SHARDS, _WINDOW, _FULL = 1, 2, 3


@dataclass(frozen=True)
class Layout:
    """How a stretch of an epoch was cut: batch size, lanes, and how many steps of it were committed."""

    global_batch_size: int
    lanes: int
    steps: int = 0


@dataclass(frozen=True)
class Recipe:
    """What decides an epoch's order besides the shards and the layouts."""

    seed: int
    shuffle: str = "window"
    window: int = DEFAULT_WINDOW
    tail: str = "pad"

    def __post_init__(self) -> None:
        if not -(2**63) <= self.seed < 2**64:
            raise ValueError(f"seed: got {self.seed}, want an integer of 64 bits.")
        if self.shuffle not in SHUFFLES:
            raise ValueError(f"shuffle: got {self.shuffle!r}, want one of {', '.join(SHUFFLES)}.")
        if self.tail not in TAILS:
            raise ValueError(f"tail: got {self.tail!r}, want one of {', '.join(TAILS)}.")
        if self.window < 1:
            raise ValueError(f"window: got {self.window}, want a number of shards of at least 1.")


def choose_lanes(global_batch_size: int, lanes: int | None, shuffle: str) -> int:
    """The lanes of a layout: as asked, else the largest divisor of the global batch size up to 64.

    Only a window shuffle has lanes; the other orders are one line.

    Raises:
        ValueError: If ``lanes`` does not divide ``global_batch_size``.
    """
    if shuffle != "window":
        return 1
    if lanes is None:
        return max(k for k in range(1, _MOST_DEFAULT_LANES + 1) if global_batch_size % k == 0)
    if lanes < 1 or global_batch_size % lanes:
        raise ValueError(
            f"lanes: {lanes} does not divide the global batch size {global_batch_size}, but every lane gives an equal "
            f"part of each step. Leave data.lanes unset for {choose_lanes(global_batch_size, None, shuffle)}."
        )
    return lanes


class EpochOrder:
    """The order of one epoch.

    Args:
        counts: Samples of each shard, int64, shape ``[num_shards]``.
        recipe: Seed, shuffle, window and tail.
        epoch: Number of the epoch, from 0.
        layouts: How it was cut so far, oldest first; the last one is in force.

    Attributes:
        first_step: Steps of the epoch that earlier layouts used up.
        num_steps: Steps of the whole epoch, those included.
    """

    def __init__(self, counts: np.ndarray, recipe: Recipe, epoch: int, layouts: Sequence[Layout]) -> None:
        self.recipe = recipe
        self.layouts = tuple(layouts)
        self.num_samples = int(counts.sum())
        shards = np.arange(len(counts), dtype=np.int64)
        if recipe.shuffle == "window":
            shards = permute(shards, max(len(counts), 1), hash64(recipe.seed, epoch, _SHARDS))
        self._key = hash64(recipe.seed, epoch, _WINDOW if recipe.shuffle == "window" else _FULL)
        self._shards = shards
        self._line = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts[shards])])  # first place of each shard
        self._first_sample = (np.cumsum(counts) - counts)[shards]  # number of that shard's first sample
        self._cuts = [_Cut.whole(self.num_samples, self.layouts[0])]
        for layout in self.layouts[1:]:
            self._cuts.append(self._cuts[-1].rest(layout))
        self.first_step = sum(layout.steps for layout in self.layouts[:-1])
        self.num_steps = self.first_step + self._cuts[-1].num_steps(recipe.tail)

    def position(self, step: int) -> int:
        """How many samples of the epoch the steps before ``step`` use."""
        cut = self._cuts[-1]
        return self.num_samples - cut.num_samples + cut.used(step - self.first_step)

    def locate(self, steps: np.ndarray | int, slots: np.ndarray) -> np.ndarray:
        """Maps places in global batches to samples.

        Args:
            steps: Step of the epoch, int64, each in ``[first_step, num_steps)``; broadcast against ``slots``.
            slots: Slot of the global batch, int64, each in ``[0, global_batch_size)``, or -1 for a masked one.

        Returns:
            Sample number over the shards as they were given, int64, of the broadcast shape; -1 where there is none: the slot
            is masked, or past the end of the epoch.

        Raises:
            IndexError: If a step is not one of the layout in force, or a slot is none of its global batch.
        """
        return self._samples(self._places(steps, slots))

    def partners(self, steps: np.ndarray | int, slots: np.ndarray) -> np.ndarray:
        """The samples that those of ``locate`` are mixed with: places of the line pair up, two and two in each lane.

        A window is permuted, so any other sample of it is as likely; but the two come one after the other, most often in
        the same micro-batch. A sample keeps its partner when what remains of an epoch is cut anew.

        Args:
            steps: As in ``locate``.
            slots: As in ``locate``.

        Returns:
            Sample numbers, int64, of the broadcast shape; -1 where ``locate`` finds none. The last sample of an odd lane has
            the one before it; the only one of a lane has itself.

        Raises:
            IndexError: As ``locate``.
        """
        place = self._places(steps, slots)
        filled = place >= 0
        place[filled] = self._beside(place[filled])
        return self._samples(place)

    def shards_ahead(self, step: int, slots: np.ndarray, most: int) -> np.ndarray:
        """The shards that some slots read at ``step`` and from then on, up to the end of their lanes.

        Args:
            step: Step of the epoch, in ``[first_step, num_steps)``.
            slots: Slots of the global batch, int64, each in ``[0, global_batch_size)``.
            most: How many shards at most.

        Returns:
            The shards as places in ``counts``, each once, those of all windows at ``step`` first, then about in the order
            in which they are read, int64, shape ``[n]``.
        """
        if self.recipe.shuffle == "full":  # each is as near as any other
            return self._shards[:most]
        place = self._cuts[-1].place(np.asarray(step - self.first_step), np.asarray(slots, np.int64))
        place = place[place >= 0]
        for cut in reversed(self._cuts):
            place = cut.outer(place)
        begin = self._window_of(place)[0] if self.recipe.shuffle == "window" else place
        _, lane_end = self._cuts[0].lane_of(place)
        lanes = np.unique(np.stack([self._shard_at(begin), self._shard_at(lane_end - 1)], axis=1), axis=0)
        ahead = lanes[:, :1] + np.arange(min(most, len(self._shards)))
        nearest_first = ahead.T[(ahead <= lanes[:, 1:]).T]
        _, once = np.unique(nearest_first, return_index=True)
        return self._shards[nearest_first[np.sort(once)]][:most]

    def _places(self, steps: np.ndarray | int, slots: np.ndarray) -> np.ndarray:
        """Places on the line, before they are shuffled; -1 where there is none."""
        steps, slots = np.asarray(steps, np.int64), np.asarray(slots, np.int64)
        _check_range("step", steps, self.first_step, self.num_steps)
        _check_range("slot", slots, -1, self.layouts[-1].global_batch_size)
        place = self._cuts[-1].place(steps - self.first_step, slots)
        filled = place >= 0
        on_line = place[filled]
        for cut in reversed(self._cuts):
            on_line = cut.outer(on_line)
        place[filled] = on_line
        return place

    def _samples(self, place: np.ndarray) -> np.ndarray:
        """The samples that the shuffle puts at some places; -1 where there is none."""
        samples = np.full(place.shape, -1, np.int64)
        filled = place >= 0
        at = self._shuffled(place[filled])
        shard = self._shard_at(at)
        samples[filled] = self._first_sample[shard] + at - self._line[shard]
        return samples

    def _beside(self, place: np.ndarray) -> np.ndarray:
        # Lanes of the first layout, as windows are: a sample must keep its partner.
        start, end = self._cuts[0].lane_of(place)
        other = start + ((place - start) ^ 1)
        return np.where(other < end, other, np.maximum(other - 2, start))

    def _shuffled(self, place: np.ndarray) -> np.ndarray:
        if self.recipe.shuffle == "none":
            return place
        if self.recipe.shuffle == "full":
            return permute(place, self.num_samples, self._key)
        start, end = self._window_of(place)
        return start + permute(place - start, end - start, hash64(self._key.astype(np.int64), start))

    def _window_of(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        # Windows belong to the first layout's lanes, also after a later cut: a sample must keep its place.
        lane_start, lane_end = self._cuts[0].lane_of(place)
        lane_shard = self._shard_at(lane_start)
        number = (self._shard_at(place) - lane_shard) // self.recipe.window
        first = lane_shard + number * self.recipe.window
        last = np.minimum(first + self.recipe.window, len(self._line) - 1)
        return np.maximum(self._line[first], lane_start), np.minimum(self._line[last], lane_end)

    def _shard_at(self, place: np.ndarray) -> np.ndarray:
        """Which shard of the line a place lies in."""
        return np.searchsorted(self._line, place, side="right") - 1


@dataclass(frozen=True)
class _Cut:
    """A line of ``num_samples`` places, cut into lanes.

    Attributes:
        starts: First place of each piece of this line on the line that it is a rest of, int64, shape ``[pieces]``.
        offsets: First place of each piece on this line, and its end, int64, shape ``[pieces + 1]``.
    """

    layout: Layout
    starts: np.ndarray
    offsets: np.ndarray

    @classmethod
    def whole(cls, num_samples: int, layout: Layout) -> _Cut:
        return cls(layout, np.zeros(1, np.int64), np.array([0, num_samples], np.int64))

    def rest(self, layout: Layout) -> _Cut:
        """What this cut's committed steps leave: the tail of each lane, end to end."""
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
        if each <= self.num_samples // self.layout.lanes:  # no lane has ended: what a training asks in every step
            return each * self.layout.lanes
        bounds = self._bounds(np.arange(self.layout.lanes + 1))
        return int(np.minimum(np.diff(bounds), each).sum())

    def place(self, steps: np.ndarray, slots: np.ndarray) -> np.ndarray:
        lane = slots // self._per_lane
        place = self._bounds(lane) + steps * self._per_lane + slots % self._per_lane
        return np.where((slots >= 0) & (place < self._bounds(lane + 1)), place, -1)

    def lane_of(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lane = ((place + 1) * self.layout.lanes - 1) // self.num_samples
        return self._bounds(lane), self._bounds(lane + 1)

    def outer(self, place: np.ndarray) -> np.ndarray:
        piece = np.searchsorted(self.offsets, place, side="right") - 1
        return self.starts[piece] + place - self.offsets[piece]

    def _bounds(self, lane: np.ndarray) -> np.ndarray:
        return lane * self.num_samples // self.layout.lanes


def _check_range(what: str, values: np.ndarray, low: int, end: int) -> None:
    outside = values[(values < low) | (values >= end)]
    if outside.size:
        raise IndexError(f"{what} {outside[0]} is outside [{low}, {end}) of this layout")
