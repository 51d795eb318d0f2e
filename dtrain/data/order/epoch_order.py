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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from dtrain.data.order.cut import Cut
from dtrain.data.order.lines import CutLines, Lines, Recipe

#: Default number of lanes, unless the global batch size or the number of ranks needs a different one.
DEFAULT_LANES = 64


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


def default_lanes(ranks: int) -> int:
    """The most lanes of a run that does not set them: 64, or the number of ranks if that is larger.

    A rank opens the shards of its lanes. If several ranks have the same lane, each opens all shards of that lane but reads only
    some of their samples. With as many lanes as ranks, each rank opens only its share. Even more lanes would only make runs
    on few ranks use more shards at a time. The order depends on the number of lanes, so a run keeps the number it began
    with, on any number of ranks.
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
        ends = [len(counts) if layout.shards is None else layout.shards for layout in self.layouts]
        # Lanes of the first layout, even after a change of the batch size: if samples changed their places, a committed one
        # could be drawn a second time.
        lines = Lines(counts, recipe, epoch, self.layouts[0].lanes, ends, removed)
        self.num_samples = lines.num_samples
        first, *later = [(it.global_batch_size, it.lanes, it.steps) for it in self.layouts]
        self._cuts = [Cut.whole(*first, lines.begun_with)]
        # Each later layout cuts the rest of the layout before it, with the shards that join.
        for layout, joining in zip(later, lines.joining(), strict=True):
            self._cuts.append(self._cuts[-1].rest(*layout, *joining))
        self._lines = CutLines(lines, self._cuts)
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
        return self._lines.samples(self._places(steps, slots))

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
        first = 0
        for number, (rows, place) in enumerate(self._lines.find(samples)):
            cut = self._cuts[number]
            step, slot = cut.find(place)
            used = step < (cut.num_steps(self.recipe.tail) if number == len(self._cuts) - 1 else cut.steps)
            steps[rows[used]], slots[rows[used]] = first + step[used], slot[used]
            first += cut.steps
        return steps, slots

    def partners(self, steps: np.ndarray | int, slots: np.ndarray) -> np.ndarray:
        """The partner of each sample of ``locate`` for mixup and cutmix; arguments, result and errors as in ``locate``.

        The samples of a lane form pairs of neighbours. Samples are permuted within a shuffle window, so the neighbour is a
        random sample of that window; it is usually in the same micro-batch, so that mixing rarely reads an additional
        sample. Partners do not change with the global batch size in the middle of an epoch. The last sample of a lane of
        odd length has the sample before it; the only sample of a lane has itself, and so has one whose partner was removed.
        """
        return self._lines.partners(self._places(steps, slots))

    def shards_ahead(self, step: int, slots: np.ndarray, most: int) -> np.ndarray:
        """Up to ``most`` shards that these slots read from ``step`` on, up to the end of their lanes.

        Returns:
            Indices into ``counts``, without duplicates, int64, shape ``[n]``: first the shards of all shuffle windows in use
            at ``step``, then the others roughly in the order in which they are read.
        """
        place = self._cuts[-1].place(np.asarray(step - self.first_step), np.asarray(slots, np.int64))
        return self._lines.shards_ahead(place[place >= 0], most)

    def _places(self, steps: np.ndarray | int, slots: np.ndarray) -> np.ndarray:
        """Places on the line of the current layout; -1 where there is none."""
        steps, slots = np.asarray(steps, np.int64), np.asarray(slots, np.int64)
        check_bounds("step", steps, self.first_step, self.num_steps)
        check_bounds("slot", slots, -1, self.layouts[-1].global_batch_size)
        return self._cuts[-1].place(steps - self.first_step, slots)


def check_bounds(name: str, values: np.ndarray, low: int, end: int) -> None:
    """Raises an ``IndexError`` that names the first of ``values`` outside ``[low, end)``."""
    outside = values[(values < low) | (values >= end)]
    if outside.size:
        raise IndexError(f"{name} {outside[0]} is outside [{low}, {end}) of this layout")
