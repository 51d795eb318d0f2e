"""The sources of a mixture: which sample a source gives next, computed from the number of samples it has given so far.

* Each source goes through its own *epochs*. The line of each epoch, of every source, is cut into the same number of *lanes*,
  which take *turns* (``Turns``). So one number, the samples that a source has given so far, determines the position of each
  lane.
* After shards have joined or left in the middle of an epoch, a source has two kinds of epochs: the *cut epoch* (``CutEpoch``),
  which continues with the shards it began with, or with the rest of them and the new ones; and the epochs after it, which have
  all present shards. ``Epochs`` determines where they begin.

Places on the line of a cut epoch refer to its last cut (``lines.CutLines``); its samples before that cut are not needed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from dtrain.data.order.cut import Cut
from dtrain.data.order.lines import CutLines, EpochLine, Lines, Ranges, Recipe, lane_bounds, permutation_key, without
from dtrain.data.order.randomness import permute

# Epochs of a source whose lines are kept; the shards of an epoch are permuted once for all its positions.
_KEPT_LINES = 4
# Places of a lane, from the next one on, whose shards are read soon: lanes of a cut epoch go through two lines at once.
_PLACES_AHEAD = 8


@dataclass(frozen=True)
class Epochs:
    """From where on a source has its present shards.

    Attributes:
        epoch: The first epoch that is known; earlier ones may have had fewer shards.
        start: Samples that the source gave before it.
        cuts: The cuts of this epoch if it began with other shards than later epochs have. Of each cut how many samples were
            taken of it before the next one, 0 of the last cut; and how many shards it draws from, the first ones.
    """

    epoch: int = 0
    start: int = 0
    cuts: tuple[tuple[int, int], ...] = ()

    @property
    def cut_at(self) -> int:
        """Samples that the source gave before the last cut."""
        return self.start + sum(taken for taken, _ in self.cuts)


class EpochSpan(NamedTuple):
    """An epoch of a source: its number, and how many samples the source has given when it begins and when it ends."""

    epoch: int
    start: int
    end: int


class Turns:
    """The lanes of several lines, which take turns.

    Args:
        sizes: Samples of each line, int64, shape ``[lines]``.
        lanes: Number of lanes of each.

    Attributes:
        bounds: First place of each lane, and the end, int64, shape ``[lines, lanes + 1]``.
        lengths: Samples of each lane, int64, shape ``[lines, lanes]``.
        order: When each lane's turn comes, int64, shape ``[lanes]``.
    """

    def __init__(self, sizes: np.ndarray, lanes: int) -> None:
        self._lanes = lanes
        self.bounds = np.stack([lane_bounds(int(size), lanes) for size in sizes])
        self.lengths = np.diff(self.bounds)
        # Lanes take turns in bit-reversed order, so that any few samples in a row come from all over the line.
        self.order = np.argsort(_bit_reversed(lanes))
        # After as many whole turns as the shortest lane has samples, only the longer lanes have one sample left.
        self._whole_turns = sizes // lanes
        longer = self.lengths > self._whole_turns[:, np.newaxis]
        in_turn = np.cumsum(longer[:, np.argsort(self.order)], axis=1)[:, self.order] - 1
        self._last_turns = np.where(longer, in_turn, lanes)

    def given(self, drawn: np.ndarray) -> np.ndarray:
        """Samples that each lane has given once its line has given ``drawn`` samples.

        Args:
            drawn: int64, shape ``[n, lines]``, below the sizes.

        Returns:
            int64, shape ``[n, lines, lanes]``.
        """
        turns, rest = np.divmod(drawn, self._lanes)
        last = drawn - self._whole_turns * self._lanes
        in_whole_turn = turns[..., np.newaxis] + (self.order < rest[..., np.newaxis])
        in_last_turn = self._whole_turns[:, np.newaxis] + (self._last_turns < last[..., np.newaxis])
        given: np.ndarray = np.where((last < 0)[..., np.newaxis], in_whole_turn, in_last_turn)
        return given

    def before(self, line: int, place: np.ndarray) -> np.ndarray:
        """How many samples a line gives before it gives those at these places."""
        lane = np.searchsorted(self.bounds[line], place, side="right") - 1
        turns, whole = place - self.bounds[line, lane], int(self._whole_turns[line])
        in_whole_turn = turns * self._lanes + self.order[lane]
        in_last_turn = whole * self._lanes + self._last_turns[line, lane]
        before: np.ndarray = np.where(turns < whole, in_whole_turn, in_last_turn)
        return before


class CutEpoch:
    """An epoch of a source that began with other shards than later ones have, from its last cut on.

    Args:
        counts: Samples of each shard, int64, shape ``[shards]``.
        recipe: Seed, shuffle and window.
        lanes: Number of lanes.
        epochs: Its number, and how it is cut.
        removed: Number of each shard that was removed to the epoch in which that happened.

    Attributes:
        number: Its number.
        cut_at: Samples that the source gave before the last cut.
        size: Samples of the last cut.
        turns: Its lanes.
        lines: The lines of its shards.
    """

    def __init__(
        self, counts: np.ndarray, recipe: Recipe, lanes: int, epochs: Epochs, removed: Mapping[int, int]
    ) -> None:
        self.number, self.cut_at = epochs.epoch, epochs.cut_at
        lines = Lines(counts, recipe, epochs.epoch, lanes, [shards for _, shards in epochs.cuts], removed)
        # A lane gives one sample in each turn: a cut of as many samples a step.
        cuts = [Cut.whole(lanes, lanes, 0, lines.begun_with)]
        for (taken, _), joining in zip(epochs.cuts, lines.joining(), strict=False):
            before = Turns(np.array([cuts[-1].num_samples]), lanes)
            of_lanes = before.given(np.array([[taken]]))[0, 0]
            cuts.append(cuts[-1].rest(lanes, lanes, 0, *joining, of_lanes, before.order))
        self.lines = CutLines(lines, cuts)
        self.size = cuts[-1].num_samples
        self.turns = Turns(np.array([self.size]), lanes)

    def draws(self, samples: np.ndarray) -> np.ndarray:
        """As ``MixedSources.draws``."""
        draws = np.full(samples.shape, -1, np.int64)
        *_, (rows, place) = self.lines.find(samples)
        draws[rows] = self.cut_at + self.turns.before(0, place)
        return draws

    def shards_ahead(self, lanes: np.ndarray, given: np.ndarray, most: int) -> np.ndarray:
        """Up to ``most`` shards that lanes read next, once they have given so many samples of the last cut."""
        bounds = self.turns.bounds[0]
        last = bounds[lanes + 1] - 1
        place = np.minimum((bounds[lanes] + given)[:, np.newaxis] + np.arange(_PLACES_AHEAD), last[:, np.newaxis])
        return self.lines.shards_ahead(place[last >= bounds[lanes]].ravel(), most)


class MixedSources:
    """The sources of a mixture, with the lines of their epochs.

    Args:
        counts: Samples of each shard, for each source, int64, shape ``[shards]``.
        recipes: Seed, shuffle and window of each source; shuffle and window are equal.
        lanes: Number of lanes of each source.
        epochs: For each source, from where on it has these shards; None: from the beginning.
        removed: For each source, number of each shard that was removed to the epoch in which that happened: its samples are
            masked there, and no part of later epochs. None: none.

    Attributes:
        sizes: Samples of an epoch of each source after the cut one, int64, shape ``[sources]``.
        first_samples: Number of the first sample of each source, and the end: samples are counted over all sources.
        first_shards: The same for shards.
        lanes: The argument.
        recipe: That of the first source.
    """

    def __init__(
        self,
        counts: Sequence[np.ndarray],
        recipes: Sequence[Recipe],
        lanes: int,
        epochs: Sequence[Epochs] | None = None,
        removed: Sequence[Mapping[int, int]] | None = None,
    ) -> None:
        epochs, removed = epochs or [Epochs()] * len(counts), removed or [{}] * len(counts)
        starts = [np.concatenate([np.zeros(1, np.int64), np.cumsum(each)]) for each in counts]
        self.first_samples = np.cumsum([0, *(int(each[-1]) for each in starts)])
        self.first_shards = np.cumsum([0, *map(len, counts)])
        self.lanes, self.recipe = lanes, recipes[0]
        self._recipes = recipes
        self._counts = [without(each, list(gone)) for each, gone in zip(counts, removed, strict=True)]
        self._gone = [Ranges(each, sorted(gone)) for each, gone in zip(starts, removed, strict=True)]
        self._firsts = [each[:-1] if gone else None for each, gone in zip(starts, removed, strict=True)]
        self.sizes = np.array([each.sum() for each in self._counts], np.int64)
        self._turns = Turns(self.sizes, lanes)
        self._lines: dict[tuple[int, int], EpochLine] = {}
        self._cut = {
            number: CutEpoch(counts[number], recipes[number], lanes, each, removed[number])
            for number, each in enumerate(epochs)
            if each.cuts
        }
        # The first epoch of each source after the cut one, and how many samples its source has given when it begins.
        self._later_epoch = np.array([each.epoch + bool(each.cuts) for each in epochs], np.int64)
        self._from = np.array([each.cut_at for each in epochs], np.int64)
        self._later_start = self._from.copy()
        for number, cut in self._cut.items():
            self._later_start[number] += cut.size

    def span(self, source: int, drawn: int) -> EpochSpan:
        """The epoch of a source that has given so many samples, which are at least those before its last cut.

        The start of a cut epoch is its last cut.
        """
        since, size = drawn - int(self._later_start[source]), int(self.sizes[source])
        if since < 0:
            cut = self._cut[source]
            return EpochSpan(cut.number, cut.cut_at, cut.cut_at + cut.size)
        start = drawn - since % size
        return EpochSpan(int(self._later_epoch[source]) + since // size, start, start + size)

    def have_given(self, drawn: np.ndarray) -> bool:
        """Whether the sources have had their present shards since they had given so many samples, int64, ``[sources]``."""
        return bool((drawn >= self._from).all())

    def lane_positions(self, drawn: np.ndarray) -> np.ndarray:
        """Samples that each lane has given since the last cut, over all epochs, once its source has given ``drawn`` samples.

        Args:
            drawn: int64, shape ``[n, sources]``.

        Returns:
            int64, shape ``[n, sources, lanes]``.

        Raises:
            IndexError: If a source had other shards when it had given so many samples.
        """
        if not self.have_given(drawn):
            raise IndexError(
                f"samples given {drawn.min(axis=0)} are before the last change of the shards, {self._from}"
            )
        epoch, inside = np.divmod(drawn - self._later_start, self.sizes)
        positions: np.ndarray = epoch[..., np.newaxis] * self._turns.lengths + self._turns.given(inside)
        for source, cut in self._cut.items():
            positions[:, source] += cut.turns.lengths[0]
            rows = np.flatnonzero(drawn[:, source] < self._later_start[source])
            positions[rows, source] = cut.turns.given(drawn[rows, source, np.newaxis] - cut.cut_at)[:, 0]
        return positions

    def samples(self, source: np.ndarray, lane: np.ndarray, position: np.ndarray, *, beside: bool) -> np.ndarray:
        """The samples at positions of lanes, with their epochs; see ``MixtureOrder.locate``.

        Args:
            source: Number of the source, int64, shape ``[n]``.
            lane: Number of the lane, int64, shape ``[n]``.
            position: How many samples the lane gave before, as ``lane_positions`` counts, int64, shape ``[n]``.
            beside: Return the partners of the samples instead.
        """
        if not self._cut:
            return self._later_samples(source, lane, position, beside=beside)
        numbers, later, since = np.empty_like(position), np.ones(len(source), bool), position.copy()
        for number, cut in self._cut.items():
            rows = np.flatnonzero(source == number)
            lengths = cut.turns.lengths[0, lane[rows]]
            since[rows] -= lengths
            is_cut = since[rows] < 0
            rows, place = rows[is_cut], (cut.turns.bounds[0, lane[rows]] + position[rows])[is_cut]
            own = cut.lines.partners(place) if beside else cut.lines.samples(place)
            in_epoch = cut.number * self.first_samples[-1] + self.first_samples[number] + own
            numbers[rows], later[rows] = np.where(own < 0, -1, in_epoch), False
        numbers[later] = self._later_samples(source[later], lane[later], since[later], beside=beside)
        return numbers

    def _later_samples(self, source: np.ndarray, lane: np.ndarray, position: np.ndarray, *, beside: bool) -> np.ndarray:
        """The same for positions in the epochs after the cut one."""
        epoch, inside = np.divmod(position, self._turns.lengths[source, lane])
        epoch += self._later_epoch[source]
        place = self._turns.bounds[source, lane] + inside
        groups, is_shuffled = list(self._groups(source, epoch)), self.recipe.shuffle != "none"
        start, size, key = np.empty_like(place), np.empty_like(place), np.empty(place.shape, np.uint64)
        for rows, line, _ in groups:
            if beside:
                place[rows] = line.beside(place[rows], lane[rows])
            if is_shuffled:
                start[rows], size[rows] = line.permutations(place[rows], lane[rows])
                key[rows] = line.key
        if is_shuffled:  # all sources at once: the time of a call hardly depends on its size
            place = start + permute(place - start, size, permutation_key(self.recipe, key, start))
        samples = np.empty_like(place)
        for rows, line, number in groups:
            samples[rows] = line.samples(place[rows]) + self.first_samples[number]
        numbers: np.ndarray = epoch * self.first_samples[-1] + samples
        return numbers

    def draws(self, source: int, epoch: int, samples: np.ndarray) -> np.ndarray:
        """How many samples a source gives, over all its epochs, before it gives each of these.

        Args:
            source: Number of the source.
            epoch: Epoch of the source, not before the cut one.
            samples: Numbers of its samples, int64, shape ``[n]``.

        Returns:
            int64, shape ``[n]``; -1 for a sample that this epoch does not have, or gave before the last cut.
        """
        if source in self._cut and epoch == self._cut[source].number:
            return self._cut[source].draws(samples)
        draws = np.full(samples.shape, -1, np.int64)
        known = np.flatnonzero(~self._gone[source].have(samples))
        before = int(self._later_start[source]) + (epoch - int(self._later_epoch[source])) * int(self.sizes[source])
        draws[known] = before + self._turns.before(source, self._line(source, epoch).find(samples[known]))
        return draws

    def shards_ahead(self, drawn: np.ndarray, lanes: np.ndarray, most: int) -> np.ndarray:
        """Up to ``most`` shards that these lanes read next, those of all sources in turn; see ``EpochOrder.shards_ahead``.

        Args:
            drawn: Samples that each source has given, int64, shape ``[sources]``.
            lanes: Numbers of lanes, int64, shape ``[n]``.
            most: Number of shards.
        """
        position = self.lane_positions(drawn[np.newaxis])[0]
        of_sources, turns = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for source, given in enumerate(drawn.tolist()):
            used = lanes[self._turns.lengths[source, lanes] > 0]  # an empty lane reads nothing
            cut, epoch = self._cut.get(source), self.span(source, given).epoch
            bounds, lengths = self._turns.bounds[source, used], self._turns.lengths[source, used]
            if cut is not None and epoch == cut.number:
                shards = cut.shards_ahead(lanes, position[source, lanes], most)
            elif not used.size:
                continue
            else:
                before = 0 if cut is None else cut.turns.lengths[0, used]
                before = before + (epoch - self._later_epoch[source]) * lengths
                # A lane that ended before the others is at the start of its next epoch.
                inside = np.minimum(position[source, used] - before, lengths - 1)
                shards = self._line(source, epoch).shards_ahead(bounds + inside, most)
            if len(shards) < most and used.size:
                shards = np.concatenate([shards, self._line(source, epoch + 1).shards_ahead(bounds, most)])
            shards = shards[:most]
            of_sources.append(shards + self.first_shards[source])
            turns.append(np.arange(len(shards)))
        return np.concatenate(of_sources)[np.argsort(np.concatenate(turns), kind="stable")][:most]

    def _groups(self, source: np.ndarray, epoch: np.ndarray) -> Iterator[tuple[np.ndarray, EpochLine, int]]:
        """The rows of each epoch of each source, with its line and the number of the source."""
        for number in range(len(self.sizes)):
            rows = np.flatnonzero(source == number)
            if not rows.size:
                continue
            of_rows = epoch[rows]
            low, high = int(of_rows.min()), int(of_rows.max())
            for one in [low] if low == high else np.unique(of_rows).tolist():
                yield rows if low == high else rows[of_rows == one], self._line(number, one), number

    def _line(self, source: int, epoch: int) -> EpochLine:
        line = self._lines.get((source, epoch))
        if line is None:
            if len(self._lines) >= _KEPT_LINES * len(self.sizes):
                self._lines.pop(next(iter(self._lines)))
            line = EpochLine(self._counts[source], self._recipes[source], epoch, self.lanes, self._firsts[source])
            self._lines[source, epoch] = line
        return line


def _bit_reversed(count: int) -> np.ndarray:
    """The numbers below ``count``, ordered by their reversed bits: 0, 4, 2, 6, 1, 5, 3, 7."""
    bits = max(1, (count - 1).bit_length())
    return np.array(sorted(range(count), key=lambda number: int(f"{number:0{bits}b}"[::-1], 2)), np.int64)
