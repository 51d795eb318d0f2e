"""How a part of an epoch is cut into lanes, and how it continues when something changes in the middle.

A *cut* is a line of places with its lanes. At the beginning of an epoch its line is the line of all shards. After a change it
is the *rest* of the cut before, that is the uncommitted ends of all its lanes, merged with the line of the shards that join.
Between a lane of the merged line and its two parts there is simple arithmetic in both directions: of its first *p* places,
``(p * joined + phase) // num_samples`` are of joined shards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

_END_OF_INT64 = 2**62


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
    turns: np.ndarray | None = (
        None  # when each lane's turn comes, int64, [lanes], if a step takes samples of some lanes only
    )

    @classmethod
    def whole(cls, batch: int, lanes: int, steps: int, num_samples: int) -> Cut:
        """The cut at the beginning of an epoch."""
        return cls(batch, lanes, steps, np.zeros(1, np.int64), np.zeros(2, np.int64), 0, num_samples)

    def rest(
        self,
        batch: int,
        lanes: int,
        steps: int,
        first: int,
        joined: int,
        taken: np.ndarray | None = None,
        turns: np.ndarray | None = None,
    ) -> Cut:
        """The cut after this one: of what its committed steps leave, the ends of all lanes, and of the joined shards.

        Args:
            batch: See the class.
            lanes: See the class.
            steps: See the class.
            first: See the class.
            joined: See the class.
            taken: Committed samples of each lane of this cut, int64, shape ``[lanes]``; None: those of its committed steps.
            turns: See the class.
        """
        bounds = self._bounds(np.arange(self.lanes + 1))
        taken = np.full(self.lanes, self.steps * self._per_lane) if taken is None else taken
        starts = np.minimum(bounds[:-1] + taken, bounds[1:])
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(bounds[1:] - starts)])
        return Cut(batch, lanes, steps, starts, offsets, first, joined, turns)

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

    def has_left(self, place: np.ndarray, before: Cut) -> np.ndarray:
        """Whether places on the line of the cut before this one were not committed there, bool."""
        lane = np.searchsorted(before._ends, place, side="right") - 1
        has_left: np.ndarray = place >= self.starts[lane]
        return has_left

    def split(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Places of the rest, or of the first lines where a joined shard has the place; and where that is, bool."""
        lane, in_lane = self._in_lanes(place, self._ends)
        before = self._joined_before(lane, in_lane)
        of_joined: np.ndarray = self._joined_before(lane, in_lane + 1) > before
        rest = self._rest_ends[lane] + in_lane - before
        return np.where(of_joined, self.first + self._joined_ends[lane] + before, rest), of_joined

    def joins(self, first_place: np.ndarray) -> np.ndarray:
        """Whether these places on the first lines are of shards that join here, bool."""
        joins: np.ndarray = (first_place >= self.first) & (first_place < self.first + self.joined)
        return joins

    def inner_of_joined(self, first_place: np.ndarray) -> np.ndarray:
        """Places on this line of places on the first lines."""
        if self.joined == self.num_samples:
            return first_place - self.first
        lane, index = self._in_lanes(first_place - self.first, self._joined_ends)
        in_lane = -((self._phases[lane] - self._wide(index + 1) * self.num_samples) // self.joined) - 1
        place: np.ndarray = self._ends[lane] + in_lane.astype(np.int64)
        return place

    def inner(self, place: np.ndarray) -> np.ndarray:
        """The inverse of ``outer``, and of ``split``: places on this line of places on the previous one that are left."""
        piece = np.searchsorted(self.starts, place, side="right") - 1
        rest: np.ndarray = self.offsets[piece] + place - self.starts[piece]
        if not self.joined or not rest.size:
            return rest
        lane, index = self._in_lanes(rest, self._rest_ends)
        in_lane = (self._wide(index) * self.num_samples + self._phases[lane]) // (self.num_samples - self.joined)
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
        """The same on the line of the joined shards."""
        lanes = np.arange(self.lanes)
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(self._joined_before(lanes, np.diff(self._ends)))])

    @cached_property
    def _rest_ends(self) -> np.ndarray:
        """The same on the rest."""
        ends: np.ndarray = self._ends - self._joined_ends
        return ends

    def _in_lanes(self, place: np.ndarray, ends: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The lane of each place, and the place in it; the last of several lanes that start at one place has it."""
        lane = np.searchsorted(ends, place, side="right") - 1
        return lane, place - ends[lane]

    def _joined_before(self, lane: np.ndarray, in_lane: np.ndarray) -> np.ndarray:
        """Samples of joined shards before places of lanes."""
        before = (self._wide(in_lane) * self.joined + self._phases[lane]) // self.num_samples
        whole: np.ndarray = before.astype(np.int64)
        return whole

    @cached_property
    def _phases(self) -> np.ndarray:
        """For each lane, by how much its turns are ahead, in ``[0, num_samples)``.

        The phases are the multiples of ``num_samples / lanes``, each once. So all lanes together have
        ``floor(steps * per_step * joined / num_samples)`` samples of joined shards before a step (Hermite's identity), if they
        are equally long. The order of the phases, by multiples of the golden ratio, spreads them over the lanes of each rank,
        or over the turns.
        """
        total = self.num_samples
        turns = np.arange(self.lanes) if self.turns is None else self.turns
        order = np.argsort(np.argsort(turns * 0x9E3779B1 % 2**32))
        phases = [rank * total // self.lanes for rank in order.tolist()]
        # Lanes may differ by one place. Those nearest to one more joined sample get one, until there are as many as join.
        parts = [divmod(length * self.joined, total) for length in np.diff(self._ends).tolist()]
        more = self.joined - sum(whole for whole, _ in parts)
        nearest = sorted(range(self.lanes), key=lambda lane: -(phases[lane] + parts[lane][1]) if parts[lane][1] else 1)
        for number, lane in enumerate(nearest):
            threshold = total - parts[lane][1]
            phases[lane] = max(phases[lane], threshold) if number < more else min(phases[lane], threshold - 1)
        return self._wide(np.array(phases, np.int64))

    def _wide(self, values: np.ndarray) -> np.ndarray:
        """Values that can be multiplied with a number of samples: of very long lanes as Python's integers."""
        is_long = (self.num_samples // self.lanes + 2) * self.num_samples >= _END_OF_INT64
        return values.astype(object) if is_long else values

    def _bounds(self, lane: np.ndarray) -> np.ndarray:
        return lane * self.num_samples // self.lanes
