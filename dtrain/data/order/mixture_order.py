"""The order of a mixture of sources: a pure function from the step of a run to samples of its sources.

* The *deal* decides how many samples each source gives to the first *n* steps. It rounds the exact shares by fixed rules, so
  that the numbers of a step add up to the global batch size and never differ from the shares by more than a few samples,
  however long the run is. Weights may follow a schedule over the steps.
* Each source goes through its own *epochs*, which are cut into as many *lanes* as those of the other sources. The samples that
  a source has given so far are one number, which says how far each lane is, in which epoch (``mixed_sources``). It depends
  neither on the global batch size nor on the weights.
* The *slots* of a global batch are ordered by lane, then by source. So a rank reads about the same lanes of each source in
  every step.
* An *epoch of the mixture* ends with the step in which one chosen source ends its epoch. The other sources continue in
  theirs. Every global batch is full.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Sequence

import numpy as np

from dtrain.data.order.epoch_order import Layout, check_bounds
from dtrain.data.order.mixed_sources import MixedSources

#: Weight of a source at steps of the run: linear between the points, constant before the first and after the last.
Schedule = tuple[tuple[int, float], ...]
#: The deal differs from the exact shares by less than this many samples; see _Apportionment.
MOST_OFF = 4
_LOCATED_TOGETHER = 2**20  # positions, of which each takes about 100 bytes meanwhile


class Deal:
    """How many samples each source gives.

    Args:
        weights: Weight of each source over the steps of the run.
        batch: Global batch size.
        step: Step of the run at which this deal begins.
        drawn: Samples that each source gave before; None: none.

    Attributes:
        step: The argument.
        drawn: The argument, int64, shape ``[sources]``.
        most_share: The highest share that each source ever gets, float64, shape ``[sources]``.
    """

    def __init__(
        self, weights: Sequence[Schedule], batch: int, step: int = 0, drawn: Sequence[int] | None = None
    ) -> None:
        self.step = step
        self.drawn = np.array([0] * len(weights) if drawn is None else drawn, np.int64)
        self._batch = batch
        changes = sorted({at for points in weights for at, _ in points if at > step})
        begins, ends = [step, *changes], [*changes, None]
        self._begins = np.array(begins, np.int64)
        self._segments: list[_Segment] = []
        drawn_before = self.drawn
        for begin, end in zip(begins, ends, strict=True):
            first = _shares(weights_at(weights, begin, before=False))
            last = first if end is None else _shares(weights_at(weights, end, before=True))
            segment = _Segment(batch, drawn_before, first, last, None if end is None else end - begin)
            self._segments.append(segment)
            if end is not None:
                drawn_before = segment.drawn(np.array([end - begin]))[0]
        self.most_share = np.max([share for segment in self._segments for share in segment.shares], axis=0)

    def at(self, steps: np.ndarray) -> np.ndarray:
        """Samples that each source has given before these steps of the run, int64, shape ``[n, sources]``.

        Args:
            steps: int64, shape ``[n]``, each at least ``step``.
        """
        if len(self._segments) == 1:
            return self._segments[0].drawn(steps - self.step)
        which = np.searchsorted(self._begins, steps, side="right") - 1
        drawn = np.empty((len(steps), len(self.drawn)), np.int64)
        for number in np.unique(which).tolist():
            here = which == number
            drawn[here] = self._segments[number].drawn(steps[here] - self._begins[number])
        return drawn

    def step_of(self, source: int, samples: int) -> int:
        """The first step before which ``source`` has given this many samples; its weight must not end at 0."""
        low = high = self.step
        while self.at(np.array([high]))[0, source] < samples:
            low, high = high + 1, self.step + 2 * (high - self.step) + 1
        while low < high:
            middle = (low + high) // 2
            if self.at(np.array([middle]))[0, source] < samples:
                low = middle + 1
            else:
                high = middle
        return low

    def steps_of(self, source: int, draws: np.ndarray, end: int) -> np.ndarray:
        """The step in which ``source`` gives each sample, by how many it gave before; all before step ``end``."""
        low, high = np.full(draws.shape, self.step), np.full(draws.shape, end - 1)
        while (low < high).any():
            middle = (low + high) // 2
            later = self.at(middle + 1)[:, source] <= draws
            low, high = np.where(later, middle + 1, low), np.where(later, high, middle)
        return low


class _Segment:
    """The deal between two changes of the weights: shares are constant, or change linearly from the first to the last.

    While they change, a growing part of the samples is dealt by the last shares and the rest by the first ones. Each part is
    dealt by its own count, so the numbers of all sources never decrease and add up exactly.
    """

    def __init__(
        self, batch: int, drawn: np.ndarray, first: list[float], last: list[float], length: int | None
    ) -> None:
        self.shares = (first, last)
        self._batch, self._drawn, self._length = batch, drawn, length
        self._first = _Apportionment(first)
        self._last = _Apportionment(last) if last != first else None

    def drawn(self, steps: np.ndarray) -> np.ndarray:
        """Samples that each source has given after so many steps of the segment, int64, shape ``[n, sources]``."""
        samples = steps * self._batch
        if self._last is None or self._length is None:
            drawn: np.ndarray = self._drawn + self._first.of(samples)
            return drawn
        # Integers of Python, because the square of a step may exceed 64 bits.
        parts = [self._batch * step * step // (2 * self._length) for step in steps.tolist()]
        by_last = np.array(parts, np.int64)
        drawn = self._drawn + self._first.of(samples - by_last) + self._last.of(by_last)
        return drawn


class _Apportionment:
    """Divides a number of samples by constant shares.

    A Huffman tree has the sources as leaves. Each node divides its samples between two parts in the ratio of their shares,
    rounded. With one sample more, one of the two parts gets one sample more; so the numbers of all sources never decrease
    and add up exactly. Light sources are divided first, so the rounding of a node hardly reaches heavy ones: no source
    differs from its exact share by two samples or more.
    """

    _BITS = 31  # of a ratio: products then fit into 64 bits

    def __init__(self, shares: Sequence[float]) -> None:
        self._sources = len(shares)
        heap = [(share, number) for number, share in enumerate(shares)]
        heapq.heapify(heap)
        self._nodes: list[tuple[int, int, int, int]] = []  # node, its parts, and the ratio of the first one
        node = len(shares)
        while len(heap) > 1:
            (one, first), (other, second) = heapq.heappop(heap), heapq.heappop(heap)
            # At least 1: the lightest source comes some day, or an epoch of the mixture might never end.
            ratio = max(round(one / (one + other) * 2**self._BITS), 1) if one else 0
            self._nodes.append((node, first, second, ratio))
            heapq.heappush(heap, (one + other, node))
            node += 1
        self._nodes.reverse()

    def of(self, samples: np.ndarray) -> np.ndarray:
        """int64, shape ``[n, sources]``, for a number of samples, int64, shape ``[n]``."""
        counts = np.empty((2 * self._sources - 1, len(samples)), np.int64)
        counts[-1] = samples
        bits, mask, half = self._BITS, 2**self._BITS - 1, 2 ** (self._BITS - 1)
        for node, first, second, ratio in self._nodes:
            whole = counts[node]
            counts[first] = (whole >> bits) * ratio + ((whole & mask) * ratio + half >> bits)
            counts[second] = whole - counts[first]
        return counts[: self._sources].T


def _shares(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]


def weights_at(weights: Sequence[Schedule], step: int, *, before: bool) -> list[float]:
    """The weights just before a step, or from it on: they differ where a weight jumps."""
    bisect = bisect_left if before else bisect_right
    return [_between(points, bisect([at for at, _ in points], step), step) for points in weights]


def _between(points: Schedule, number: int, step: int) -> float:
    """The weight at ``step``, which lies between the points ``number - 1`` and ``number``."""
    if number in (0, len(points)):
        return points[max(number - 1, 0)][1]
    (begin, first), (end, last) = points[number - 1], points[number]
    return first + (last - first) * ((step - begin) / (end - begin))


class MixtureOrder:
    """The order of one epoch of a mixture; steps are those of the epoch.

    Args:
        sources: The sources.
        deal: The deal.
        batch: Global batch size.
        start: Step of the run at which the epoch begins.
        num_steps: Steps of the epoch.
        samples_before: Samples of the epoch before the deal began, if it began in this epoch.

    Attributes:
        start: The argument.
        recipe: Shuffle and window of all sources.
        layouts: Global batch size and lanes.
        first_step: First step of the deal in this epoch.
        num_steps: The argument.
    """

    def __init__(
        self, sources: MixedSources, deal: Deal, batch: int, start: int, num_steps: int, samples_before: int
    ) -> None:
        self._sources, self._deal, self._batch = sources, deal, batch
        self._samples_before = samples_before
        self.recipe, self.layouts = sources.recipe, (Layout(batch, sources.lanes),)
        self.start = start
        self.first_step = max(deal.step - start, 0)
        self.num_steps = num_steps

    def position(self, step: int) -> int:
        """Samples of the epoch in the steps before ``step``."""
        return self._samples_before + (step - self.first_step) * self._batch

    def locate(self, steps: np.ndarray | int, slots: np.ndarray) -> np.ndarray:
        """Maps positions to samples.

        Args:
            steps: Step of the epoch, int64, each in ``[first_step, num_steps)``; broadcast against ``slots``.
            slots: Slot of the global batch, int64, each in ``[0, global_batch_size)``, or -1 for a masked one.

        Returns:
            ``epoch * total + sample``, int64, of the broadcast shape, where ``epoch`` is that of the sample's source and
            samples are counted over all sources, which have ``total`` of them; -1 where the slot is masked, or the sample is
            of a shard that was removed.

        Raises:
            IndexError: If a step does not belong to the deal, or a slot is out of range; names the first one.
        """
        return self._located(steps, slots, beside=False)

    def partners(self, steps: np.ndarray | int, slots: np.ndarray) -> np.ndarray:
        """The partner of each sample of ``locate``, of the same epoch of the same source; see ``EpochOrder.partners``."""
        return self._located(steps, slots, beside=True)

    def slots(self, steps: np.ndarray, source: int, epoch: int, samples: np.ndarray) -> np.ndarray:
        """The slot of each sample in the step that uses it.

        Args:
            steps: int64, shape ``[n]``.
            source: Number of the source.
            epoch: Epoch of the source.
            samples: Numbers of its samples, int64, shape ``[n]``.
        """
        wanted = epoch * self._sources.first_samples[-1] + self._sources.first_samples[source] + samples
        slots, together = np.arange(self._batch), max(1, _LOCATED_TOGETHER // self._batch)
        found = np.empty(len(steps), np.int64)
        for first in range(0, len(steps), together):
            part = slice(first, first + together)
            located = self.locate(steps[part, np.newaxis], slots)
            found[part] = (located == wanted[part, np.newaxis]).argmax(axis=1)
        return found

    def shards_ahead(self, step: int, slots: np.ndarray, most: int) -> np.ndarray:
        """Up to ``most`` shards that these slots read from ``step`` on; shards are counted over all sources."""
        drawn = self._deal.at(np.array([self.start + step]))[0]
        return self._sources.shards_ahead(drawn, self._lanes_of(slots), most)

    def shards_at_once(self, slots: np.ndarray) -> int:
        """The shards of one source that these slots read at a time: those of one shuffle window of each of their lanes."""
        window = self.recipe.window if self.recipe.shuffle == "window" else 1
        return (len(self._lanes_of(slots)) + 2) * window  # a few samples come from the neighbouring lanes

    def _lanes_of(self, slots: np.ndarray) -> np.ndarray:
        if not slots.size:  # with more ranks than slots
            return slots
        lanes, batch = self._sources.lanes, self._batch
        return np.arange(int(slots.min()) * lanes // batch, -(-(int(slots.max()) + 1) * lanes // batch))

    def _located(self, steps: np.ndarray | int, slots: np.ndarray, *, beside: bool) -> np.ndarray:
        steps, slots = np.asarray(steps, np.int64), np.asarray(slots, np.int64)
        check_bounds("step", steps, self.first_step, self.num_steps)
        check_bounds("slot", slots, -1, self._batch)
        each, row = np.unique(steps, return_inverse=True)
        together = max(1, _LOCATED_TOGETHER // (self._sources.lanes * len(self._sources.sizes)))
        if len(each) > together:  # a step has as many cells as there are lanes of all sources
            steps, slots, part = np.broadcast_arrays(steps, slots, row.reshape(steps.shape) // together)
            parts = np.empty(slots.shape, np.int64)
            for number in range(-(-len(each) // together)):
                here = part == number
                parts[here] = self._located(steps[here], slots[here], beside=beside)
            return parts
        run_steps = self.start + np.concatenate([each, each + 1])
        before, after = np.split(self._sources.lane_positions(self._deal.at(run_steps)), 2)
        # A cell is what one source gives from one lane in one step. The cells of a step are ordered by lane, then by source.
        begins = before.transpose(0, 2, 1).reshape(-1)
        ends = np.cumsum((after - before).transpose(0, 2, 1).reshape(-1))  # each step has `batch` samples
        row, slots = np.broadcast_arrays(row.reshape(steps.shape), slots)
        located = np.full(slots.shape, -1, np.int64)
        filled = slots >= 0
        number = row[filled] * self._batch + slots[filled]  # of the sample among those of all these steps
        cell = np.searchsorted(ends, number, side="right")
        in_cell = number - np.where(cell, ends[cell - 1], 0)
        lane, source = np.divmod(cell % (len(begins) // len(each)), len(self._sources.sizes))
        located[filled] = self._sources.samples(source, lane, begins[cell] + in_cell, beside=beside)
        return located
