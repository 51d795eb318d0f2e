"""A rank's stream of micro-batches, shared out among stateless workers.

Worker *w* of *n* builds micro-batches *w*, *w* + *n*, ... of the rank, each as a whole; torch's DataLoader hands them over
in turn, which restores the sequence. Everything a worker needs is fixed in the parent before it starts: nothing is read
from the environment, so the start method does not matter. The stream goes on from epoch to epoch, so that workers are
started once and prefetch across the border.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch.utils.data import IterableDataset, get_worker_info

from dtrain.data.batch import Batch
from dtrain.data.builder import Augment, Builder
from dtrain.data.mixing import Mix
from dtrain.data.order import EpochOrder, Layout, Recipe
from dtrain.data.source import Source
from dtrain.data.wire import Wire

# Positions that are looked up at once: one costs as much by itself as a thousand together.
_LOCATED_TOGETHER = 4096
# How many samples are tried, beside those of the global batch, to learn the shapes of a micro-batch without a good one.
_SPARE = 100


@dataclass(frozen=True)
class Share:
    """The part of every global batch that one rank builds.

    Args:
        global_batch_size: Samples of a step over all ranks.
        micro_batch_size: Rows of one micro-batch.
        rank: This process.
        world_size: Number of processes.
    """

    global_batch_size: int
    micro_batch_size: int
    rank: int
    world_size: int

    @classmethod
    def of(cls, global_batch_size: int, micro_batch_size: int | None, rank: int, world_size: int) -> Share:
        """The share of ``rank``; without a micro-batch size, all of it at once.

        Raises:
            ValueError: If the sizes do not fit each other.
        """
        if global_batch_size < 1:
            raise ValueError(f"train.global_batch_size: got {global_batch_size}, want at least one sample.")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank {rank}, world_size {world_size}: want a rank in [0, world_size).")
        rows = -(-global_batch_size // world_size)
        micro = rows if micro_batch_size is None else micro_batch_size
        # Ranks that cannot have equal parts need masked rows anyway; only then may the last micro-batch be short too.
        if not 1 <= micro <= rows or (rows % micro and global_batch_size % world_size == 0):
            fitting = [size for size in range(1, rows + 1) if rows % size == 0]
            raise ValueError(
                f"train.micro_batch_size: {micro} does not fit: each of {world_size} ranks has {rows} of the "
                f"{global_batch_size} samples of a step. Sizes that fit: {', '.join(map(str, fitting))}. Or leave it "
                "unset for the whole share at once."
            )
        return cls(global_batch_size, micro, rank, world_size)

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches of one step, equal on all ranks."""
        rows = -(-self.global_batch_size // self.world_size)
        return -(-rows // self.micro_batch_size)

    def slots(self, micro_batches: np.ndarray) -> np.ndarray:
        """The slots of some micro-batches of a step.

        Args:
            micro_batches: Which ones, int64, shape ``[n]``, each in ``[0, micro_batches_per_step)``.

        Returns:
            int64, shape ``[n, micro_batch_size]``; -1 past the end of the share.
        """
        start = self.rank * self.global_batch_size // self.world_size
        end = (self.rank + 1) * self.global_batch_size // self.world_size
        slots = start + micro_batches[:, np.newaxis] * self.micro_batch_size + np.arange(self.micro_batch_size)
        return np.where(slots < end, slots, -1)


@dataclass(frozen=True)
class Start:
    """Where a stream begins: an epoch, how it was cut so far, and the first step of it that is still to do."""

    epoch: int
    layouts: tuple[Layout, ...]
    step: int


class MicroBatches(IterableDataset[Batch]):
    """The stream of one rank.

    Args:
        source: Where samples come from.
        recipe: Order of every epoch; ``first_recipe`` that of the first one, which a resumed run may have begun with
            another window or lane count.
        start: Where to begin.
        layout: How epochs after the first are cut.
        share: The rank's part of each global batch.
        wire: Wire dtypes.
        augment: Applied to each sample before it is collated.
        mix: Mixes samples.
    """

    def __init__(
        self,
        source: Source,
        *,
        recipe: Recipe,
        first_recipe: Recipe,
        start: Start,
        layout: Layout,
        share: Share,
        wire: Wire,
        augment: Augment | None = None,
        mix: Mix | None = None,
    ) -> None:
        super().__init__()
        self._source = source
        self._counts = source.index.counts
        self._recipe = recipe
        self._first_recipe = first_recipe
        self._start = start
        self._layout = layout
        self._share = share
        self._wire = wire
        self._augment = augment
        self._mix = mix

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        builder = Builder(self._source, self._wire, self._augment, self._recipe.seed, self._mix)
        try:
            passed = 0  # micro-batches of the epochs before
            for epoch, order, first_step in self._epochs():
                per_step = self._share.micro_batches_per_step
                numbers = range(first_step * per_step, order.num_steps * per_step)
                mine = numbers[(turn - passed) % workers :: workers]
                passed += len(numbers)
                for step, samples, partners in self._located(epoch, order, mine, builder):
                    yield builder.build(epoch, samples, functools.partial(self._spare, order, step), partners)
        finally:
            builder.close()

    def _epochs(self) -> Iterator[tuple[int, EpochOrder, int]]:
        """Each epoch, its order, and the first step of it that is to do."""
        start = self._start
        yield start.epoch, EpochOrder(self._counts, self._first_recipe, start.epoch, start.layouts), start.step
        for epoch in itertools.count(start.epoch + 1):
            yield epoch, EpochOrder(self._counts, self._recipe, epoch, [self._layout]), 0

    def _located(
        self, epoch: int, order: EpochOrder, micro_batches: range, builder: Builder
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray | None]]:
        """Step, samples and their partners of some of an epoch's micro-batches; the builder is told what comes next."""
        together = max(1, _LOCATED_TOGETHER // self._share.micro_batch_size)
        for first in range(0, len(micro_batches), together):
            numbers = np.array(micro_batches[first : first + together])
            steps, in_step = np.divmod(numbers, self._share.micro_batches_per_step)
            slots = self._share.slots(in_step)
            builder.expect(functools.partial(self._shards_ahead, epoch, order, int(steps[0])))
            samples = order.locate(steps[:, np.newaxis], slots)
            partners = [None] * len(numbers) if self._mix is None else order.partners(steps[:, np.newaxis], slots)
            yield from zip(steps.tolist(), samples, partners, strict=True)

    def _shards_ahead(self, epoch: int, order: EpochOrder, step: int, most: int) -> np.ndarray:
        """What this rank reads of an epoch from a step on, and in the first windows of the next epoch."""
        slots = self._share.slots(np.arange(self._share.micro_batches_per_step))
        slots = slots[slots >= 0]
        shards = order.shards_ahead(step, slots, most)
        lanes = np.unique(slots * self._layout.lanes // self._share.global_batch_size)
        following = min(most - len(shards), len(lanes) * self._recipe.window)
        if not following:
            return shards
        next_order = EpochOrder(self._counts, self._recipe, epoch + 1, [self._layout])
        return np.concatenate([shards, next_order.shards_ahead(0, slots, following)])

    def _spare(self, order: EpochOrder, step: int) -> list[int]:
        """Samples of the same global batch, then the first of the data set."""
        samples = order.locate(step, np.arange(self._share.global_batch_size))
        return [*samples[samples >= 0].tolist(), *range(min(_SPARE, self._source.index.num_samples))]
