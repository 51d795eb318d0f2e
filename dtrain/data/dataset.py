"""A rank's stream of micro-batches, shared out among stateless workers.

Worker *w* of *n* builds micro-batches *w*, *w* + *n*, ... of the rank, each as a whole; torch's DataLoader hands them over
in turn, which restores the sequence. Everything a worker needs is fixed in the parent before it starts: nothing is read
from the environment, so the start method does not matter. The stream goes on from epoch to epoch, so that workers are
started once and prefetch across the border.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from dtrain.data.batch import Batch
from dtrain.data.column import Column
from dtrain.data.dataset_index import DatasetIndex
from dtrain.data.decode import SampleError, decode
from dtrain.data.fields import Field
from dtrain.data.order import EpochOrder, Layout, Recipe
from dtrain.data.permutation import hash64
from dtrain.data.storage import ShardReader
from dtrain.data.wire import Wire

Augment = Callable[[dict[str, Any], np.random.Generator], dict[str, Any]]
# Fields of one sample lie side by side in the tar: reading the headers between them costs less than another read.
_READ_THROUGH = 8192


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
        if global_batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"global_batch_size {global_batch_size}, rank {rank}, world_size {world_size}: want a batch of at least "
                "one sample and a rank in [0, world_size)."
            )
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

    def slots(self, micro_batch: int) -> np.ndarray:
        """The slots of one micro-batch, int64, shape ``[micro_batch_size]``; -1 past the end of the share."""
        start = self.rank * self.global_batch_size // self.world_size
        end = (self.rank + 1) * self.global_batch_size // self.world_size
        slots = start + micro_batch * self.micro_batch_size + np.arange(self.micro_batch_size)
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
        index: Where the fields of every sample lie.
        fields: The fields to hand over, in the order of the index.
        recipe: Order of every epoch; ``first_recipe`` that of the first one, which a resumed run may have begun with
            another window or lane count.
        start: Where to begin.
        layout: How epochs after the first are cut.
        share: The rank's part of each global batch.
        wire: Wire dtypes.
        augment: Applied to each sample before it is collated.
    """

    def __init__(
        self,
        index: DatasetIndex,
        fields: Sequence[Field],
        *,
        recipe: Recipe,
        first_recipe: Recipe,
        start: Start,
        layout: Layout,
        share: Share,
        wire: Wire,
        augment: Augment | None = None,
    ) -> None:
        super().__init__()
        self._index = index
        self._fields = tuple(fields)
        self._recipe = recipe
        self._first_recipe = first_recipe
        self._start = start
        self._layout = layout
        self._share = share
        self._wire = wire
        self._augment = augment

    def __iter__(self) -> Iterator[Batch]:
        worker = get_worker_info()
        turn, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        reader = ShardReader(self._index.shards)
        try:
            mine = itertools.islice(self._schedule(), turn, None, workers)
            for epoch, order, step, micro_batch in mine:
                yield self._build(reader, epoch, order, step, self._share.slots(micro_batch))
        finally:
            reader.close()

    def _schedule(self) -> Iterator[tuple[int, EpochOrder, int, int]]:
        start = self._start
        order = EpochOrder(self._index.counts, self._first_recipe, start.epoch, start.layouts)
        first = start.step
        for epoch in itertools.count(start.epoch):
            for step in range(first, order.num_steps):
                for micro_batch in range(self._share.micro_batches_per_step):
                    yield epoch, order, step, micro_batch
            order = EpochOrder(self._index.counts, self._recipe, epoch + 1, [self._layout])
            first = 0

    def _build(self, reader: ShardReader, epoch: int, order: EpochOrder, step: int, slots: np.ndarray) -> Batch:
        samples = np.full(slots.shape, -1, np.int64)
        samples[slots >= 0] = order.locate(step, slots[slots >= 0])
        rows = len(samples)
        columns = [Column(field, rows, self._wire) for field in self._fields]
        keys, bad = [""] * rows, []
        valid = torch.zeros(rows, dtype=torch.bool)
        for row in np.flatnonzero(samples >= 0).tolist():
            sample = int(samples[row])
            try:
                keys[row] = self._fill(columns, row, reader, epoch, sample)
                valid[row] = True
            except SampleError as error:
                bad.append({"key": self._index.key(sample), "epoch": epoch, "reason": str(error)})
        if not valid.all():
            self._fill_masked(columns, valid, reader, epoch, order, step)
        return Batch({column.field.name: column.data() for column in columns}, keys, valid, bad)

    def _fill(self, columns: list[Column], row: int, reader: ShardReader, epoch: int, sample: int) -> str:
        key = self._index.key(sample)
        payloads = self._payloads(reader, sample)
        values = {}
        for column, payload in zip(columns, payloads, strict=True):
            field = column.field
            target = column.target(row) if self._augment is None else None
            values[field.name] = decode(field, payload, target)
        if self._augment is not None:
            key64 = int(hash64(self._recipe.seed, epoch, sample))
            values = self._augment(values, np.random.Generator(np.random.Philox(key=key64)))
        for column in columns:
            column.put(row, values[column.field.name], key)
        return key

    def _payloads(self, reader: ShardReader, sample: int) -> list[memoryview]:
        offsets, sizes = self._index.offsets[sample].tolist(), self._index.sizes[sample].tolist()
        if -1 in offsets:
            missing = self._fields[offsets.index(-1)]
            raise SampleError(f"has no .{missing.ext} member")
        shard = self._index.shard_of(sample)
        start = min(offsets)
        end = max(offset + size for offset, size in zip(offsets, sizes, strict=True))
        if end - start <= sum(sizes) + _READ_THROUGH:
            data = memoryview(reader.read(shard, start, end - start))
            return [data[o - start : o - start + size] for o, size in zip(offsets, sizes, strict=True)]
        return [memoryview(reader.read(shard, o, size)) for o, size in zip(offsets, sizes, strict=True)]

    def _fill_masked(
        self, columns: list[Column], valid: torch.Tensor, reader: ShardReader, epoch: int, order: EpochOrder, step: int
    ) -> None:
        """Masked rows repeat valid ones, so that they disturb no statistic of the batch."""
        sources = valid.nonzero().flatten().tolist()
        masked = (~valid).nonzero().flatten().tolist()
        if not sources:
            # Nothing of this micro-batch is real: borrow a sample of the same global batch, so that shapes are right.
            borrowed = order.locate(step, np.arange(self._share.global_batch_size))
            for sample in borrowed[borrowed >= 0]:
                try:
                    self._fill(columns, 0, reader, epoch, int(sample))
                except SampleError:
                    continue
                sources, masked = [0], masked[1:]
                break
            else:
                raise SampleError(
                    f"epoch {epoch}, step {step}: not one sample of the global batch can be decoded. Are data.fields "
                    "right for these shards?"
                )
        for turn, row in enumerate(masked):
            for column in columns:
                column.repeat(sources[turn % len(sources)], row)
