"""How a part of an epoch is cut into lanes, and how it continues when something changes in the middle.

A *cut* is a line of places with its lanes. At the beginning of an epoch its line is the line of all shards. After a change it
is the *rest* of the cut before, that is the uncommitted ends of all its lanes, merged with the line of the shards that join.
Between the merged line and its two parts there is simple arithmetic in both directions: of the first *p* places,
``p * joined // num_samples`` are of joined shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

# Products of two numbers of samples above this one may not fit into 64 bits.
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
        before = self._joined_before(place)
        of_joined: np.ndarray = self._joined_before(place + 1) > before
        return np.where(of_joined, self.first + before, place - before), of_joined

    def joins(self, first_place: np.ndarray) -> np.ndarray:
        """Whether these places on the first lines are of shards that join here, bool."""
        joins: np.ndarray = (first_place >= self.first) & (first_place < self.first + self.joined)
        return joins

    def inner_of_joined(self, first_place: np.ndarray) -> np.ndarray:
        """Places on this line of places on the first lines."""
        if self.joined == self.num_samples:
            return first_place - self.first
        index = self._wide(first_place - self.first + 1)
        place: np.ndarray = (-(-index * self.num_samples // self.joined) - 1).astype(np.int64)
        return place

    def inner(self, place: np.ndarray) -> np.ndarray:
        """The inverse of ``outer``, and of ``split``: places on this line of places on the previous one that are left."""
        piece = np.searchsorted(self.starts, place, side="right") - 1
        rest: np.ndarray = self.offsets[piece] + place - self.starts[piece]
        if not self.joined or not rest.size:
            return rest
        inner: np.ndarray = (self._wide(rest) * self.num_samples // int(self.offsets[-1])).astype(np.int64)
        return inner

    def outer(self, place: np.ndarray) -> np.ndarray:
        """The places on the previous line of places of the rest."""
        piece = np.searchsorted(self.offsets, place, side="right") - 1
        outer: np.ndarray = self.starts[piece] + place - self.offsets[piece]
        return outer

    def _joined_before(self, place: np.ndarray) -> np.ndarray:
        """Samples of joined shards before each place of the merged line: as many as keep the proportion, rounded down."""
        if self.joined == self.num_samples:
            return place
        joined: np.ndarray = (self._wide(place) * self.joined // self.num_samples).astype(np.int64)
        return joined

    def _wide(self, values: np.ndarray) -> np.ndarray:
        """Values that can be multiplied with a number of samples: of a very long line as Python's integers."""
        return values.astype(object) if self.num_samples > _MOST_IN_INT64 else values

    def _bounds(self, lane: np.ndarray) -> np.ndarray:
        return lane * self.num_samples // self.lanes
