"""How a part of an epoch is cut into lanes, and how it continues when something changes in the middle.

A *cut* is a line of places with its lanes. At the beginning of an epoch its line is the line of all shards. After a change it
is the *rest* of the cut before, that is the uncommitted ends of all its lanes, merged with the line of the shards that join.
Between a lane of the merged line and its two parts there is simple arithmetic in both directions: of its first *p* places,
``(p * joined + phase) // length`` are of joined shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

# Products of two numbers of samples of a lane from this one on may not fit into 64 bits.
_MOST_IN_INT64 = 3_000_000_000


@dataclass(frozen=True)
class Cut:
    """A line, cut into lanes: the rest of the line before it, merged with the line of the shards that join, if any do.

    At the beginning of an epoch nothing is before it, and all shards join.
    """

    batch: int  # samples of a step
    lanes: int
    steps: int  # committed steps
    starts: np.ndarray  # where each piece of the rest starts on the previous line, int64, [pieces]
    offsets: np.ndarray  # where each piece starts in the rest, and the end, int64, [pieces + 1]
    first: int  # place on the first lines at which the line of the joined shards starts
    joined: int  # samples of the shards that join

    @classmethod
    def whole(cls, batch: int, lanes: int, steps: int, num_samples: int) -> Cut:
        """The cut at the beginning of an epoch."""
        return cls(batch, lanes, steps, np.zeros(1, np.int64), np.zeros(2, np.int64), 0, num_samples)

    def rest(self, batch: int, lanes: int, steps: int, first: int, joined: int) -> Cut:
        """The cut after this one: of what its committed steps leave, the ends of all lanes, and of the joined shards."""
        bounds = self._bounds(np.arange(self.lanes + 1))
        starts = np.minimum(bounds[:-1] + self.steps * self._per_lane, bounds[1:])
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(bounds[1:] - starts)])
        return Cut(batch, lanes, steps, starts, offsets, first, joined)

    @cached_property
    def num_samples(self) -> int:
        """Places of the line."""
        return int(self.offsets[-1]) + self.joined

    @cached_property
    def _per_lane(self) -> int:
        return self.batch // self.lanes

    def num_steps(self, tail: str) -> int:
        """Steps on this line, also those that are not committed."""
        return self.num_samples // self.batch if tail == "drop" else -(-self.num_samples // self.batch)

    def used(self, steps: int) -> int:
        """Samples of the first ``steps`` steps."""
        each = steps * self._per_lane
        if each <= self.num_samples // self.lanes:  # fast path for the usual case: no lane has ended
            return each * self.lanes
        bounds = self._bounds(np.arange(self.lanes + 1))
        return int(np.minimum(np.diff(bounds), each).sum())

    def place(self, steps: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Places on this line that slots draw at steps; -1 where the slot is masked or its lane has ended."""
        lane = slots // self._per_lane
        place = self._bounds(lane) + steps * self._per_lane + slots % self._per_lane
        return np.where((slots >= 0) & (place < self._bounds(lane + 1)), place, -1)

    def find(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The step, if there are enough of them, and the slot that draw places on this line."""
        lane = np.searchsorted(self._bounds(np.arange(self.lanes + 1)), place, side="right") - 1
        step, in_lane = np.divmod(place - self._bounds(lane), self._per_lane)
        return step, lane * self._per_lane + in_lane

    def split(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places of the rest, or of the first lines where a joined shard has the place; and where that is, bool."""
        if self.joined == self.num_samples:
            return self.first + place, np.ones(place.shape, bool)
        lane, in_lane = self._in_lanes(place, self._ends)
        length, joined, phase = self._turns(lane)
        before = (self._wide(in_lane) * joined + phase) // length
        of_joined: np.ndarray = (self._wide(in_lane + 1) * joined + phase) // length > before
        before = before.astype(np.int64)
        rest = self._rest_ends[lane] + in_lane - before
        return np.where(of_joined, self.first + self._joined_ends[lane] + before, rest), of_joined.astype(bool)

    def joins(self, first_place: np.ndarray) -> np.ndarray:
        """Whether these places on the first lines are of shards that join here, bool."""
        joins: np.ndarray = (first_place >= self.first) & (first_place < self.first + self.joined)
        return joins

    def inner_of_joined(self, first_place: np.ndarray) -> np.ndarray:
        """Places on this line of places on the first lines."""
        if self.joined == self.num_samples:
            return first_place - self.first
        lane, index = self._in_lanes(first_place - self.first, self._joined_ends)
        length, joined, phase = self._turns(lane)
        in_lane = -((phase - self._wide(index + 1) * length) // joined) - 1
        place: np.ndarray = self._ends[lane] + in_lane.astype(np.int64)
        return place

    def inner(self, place: np.ndarray) -> np.ndarray:
        """The inverse of ``outer``, and of ``split``: places on this line of places on the previous one that are left."""
        piece = np.searchsorted(self.starts, place, side="right") - 1
        rest: np.ndarray = self.offsets[piece] + place - self.starts[piece]
        if not self.joined or not rest.size:
            return rest
        lane, index = self._in_lanes(rest, self._rest_ends)
        length, joined, phase = self._turns(lane)
        in_lane = (self._wide(index) * length + phase) // (length - joined)
        inner: np.ndarray = self._ends[lane] + in_lane.astype(np.int64)
        return inner

    def outer(self, place: np.ndarray) -> np.ndarray:
        """The places on the previous line of places of the rest."""
        piece = np.searchsorted(self.offsets, place, side="right") - 1
        outer: np.ndarray = self.starts[piece] + place - self.offsets[piece]
        return outer

    @cached_property
    def _ends(self) -> np.ndarray:
        """Where each lane starts on this line, and the end, int64, shape ``[lanes + 1]``."""
        return self._bounds(np.arange(self.lanes + 1))

    @cached_property
    def _joined_ends(self) -> np.ndarray:
        """The same on the line of the joined shards: in proportion."""
        ends: np.ndarray = (self._ends.astype(object) * self.joined // self.num_samples).astype(np.int64)
        return ends

    @cached_property
    def _rest_ends(self) -> np.ndarray:
        """The same on the rest."""
        ends: np.ndarray = self._ends - self._joined_ends
        return ends

    def _in_lanes(self, place: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The lane of each place, and the place in it; the last of several lanes that start at one place has it."""
        lane = np.searchsorted(ends, place, side="right") - 1
        return lane, place - ends[lane]

    def _turns(self, lane: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Places of lanes, how many of them are of joined shards, and the phase in which these take turns with the rest.

        The phases of neighbouring lanes are far from each other (multiples of the golden ratio), so that a step, and the part
        of a rank in it, has samples of both in proportion.
        """
        length, joined = np.diff(self._ends), np.diff(self._joined_ends)
        golden = np.arange(self.lanes) * 0x9E3779B1 % 2**32
        phase = (length.astype(object) * golden // 2**32).astype(np.int64)
        return self._wide(length[lane]), self._wide(joined[lane]), self._wide(phase[lane])

    def _wide(self, values: np.ndarray) -> np.ndarray:
        """Values whose products fit: of very long lanes Python's integers."""
        return values.astype(object) if self.num_samples // self.lanes >= _MOST_IN_INT64 else values

    def _bounds(self, lane: np.ndarray) -> np.ndarray:
        return lane * self.num_samples // self.lanes
