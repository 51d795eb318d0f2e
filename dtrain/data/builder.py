"""One micro-batch from the numbers of its samples: read, decoded, augmented and laid side by side.

* A row whose sample is bad, or that has none, is *masked*. It repeats a valid row, so that it disturbs no statistic of the
  batch.
* What happens to a sample depends on (seed, epoch, sample) only, never on who builds it or what lies beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from dtrain.data.batch import Batch
from dtrain.data.column import Column
from dtrain.data.dataset_index import DatasetIndex
from dtrain.data.decode import SampleError, decode
from dtrain.data.fields import Field
from dtrain.data.permutation import hash64
from dtrain.data.randomness import Randomness
from dtrain.data.storage import ShardReader
from dtrain.data.wire import Wire

Augment = Callable[[dict[str, Any], np.random.Generator], dict[str, Any]]
# Beside the uses of (seed, epoch) in the order, with which this one must not share a key.
_AUGMENTATION = 4


class Builder:
    """Builds micro-batches; used in one worker.

    Args:
        index: Where the fields of every sample lie.
        fields: The fields to hand over, in the order of the index.
        wire: Wire dtypes.
        augment: Applied to each sample before it is laid beside the others.
        seed: Key of every augmentation.
    """

    def __init__(
        self, index: DatasetIndex, fields: Sequence[Field], wire: Wire, augment: Augment | None, seed: int
    ) -> None:
        self._index = index
        self._fields = fields
        self._wire = wire
        self._augment = augment
        self._seed = seed
        self._reader = ShardReader(index.shards)
        self._randomness = Randomness()

    def build(self, epoch: int, samples: np.ndarray, spare: Callable[[], Iterable[int]]) -> Batch:
        """One micro-batch.

        Args:
            epoch: Number of the epoch.
            samples: Number of each row's sample, int64, shape ``[rows]``; -1 where the row is masked.
            spare: Samples of which the first good one lends its shapes to a micro-batch that has none.

        Raises:
            ShardChanged: If a shard is not what was indexed.
            ValueError: If samples do not fit each other or the wire, or not even a spare one is good.
        """
        columns = [Column(field, len(samples), self._wire) for field in self._fields]
        keys, bad = [""] * len(samples), []
        # In stored order: each shard is looked for once, and a disk reads forwards.
        rows = np.argsort(samples)[np.count_nonzero(samples < 0) :]
        for row, sample in zip(rows.tolist(), self._look_up(epoch, samples[rows]), strict=True):
            try:
                self._fill(columns, row, sample)
                keys[row] = sample.key
            except SampleError as error:
                bad.append(self._bad_line(epoch, sample, error))
        if "" in keys:
            sources = [row for row, key in enumerate(keys) if key] or self._borrow(columns, epoch, spare)
            masked = [row for row, key in enumerate(keys) if not key]
            repeated = [sources[turn % len(sources)] for turn in range(len(masked))]
            for column in columns:
                column.repeat(repeated, masked)
        valid = torch.tensor([key != "" for key in keys])
        return Batch({column.field.name: column.data() for column in columns}, keys, valid, bad)

    def close(self) -> None:
        """Closes the shards."""
        self._reader.close()

    def _look_up(self, epoch: int, samples: np.ndarray) -> Iterable[_Sample]:
        # All at once: looking up a number in an array costs more by itself than within many.
        index = self._index
        shards = np.searchsorted(index.starts, samples, side="right") - 1
        randoms = hash64(self._seed, epoch, _AUGMENTATION, samples) if self._augment is not None else samples
        columns = (shards, index.offsets[samples], index.sizes[samples], randoms)
        return map(_Sample, index.keys(samples), *(column.tolist() for column in columns))

    def _fill(self, columns: Sequence[Column], row: int, sample: _Sample) -> None:
        if -1 in sample.offsets:
            missing = self._fields[sample.offsets.index(-1)]
            raise SampleError(f"has no .{missing.ext} member")
        payloads = self._reader.members(sample.shard, sample.offsets, sample.sizes)
        if self._augment is None:
            values = [
                decode(column.field, payload, column.target(row))
                for column, payload in zip(columns, payloads, strict=True)
            ]
        else:
            values = self._augmented(self._augment, payloads, sample)
        for column, value in zip(columns, values, strict=True):
            column.put(row, value, sample.key)

    def _augmented(self, augment: Augment, payloads: Sequence[memoryview], sample: _Sample) -> list[Any]:
        decoded = {field.name: decode(field, payload) for field, payload in zip(self._fields, payloads, strict=True)}
        values = augment(decoded, self._randomness.of(sample.random))
        for field in self._fields:
            if field.name not in values:
                raise ValueError(
                    f"the augmentation of sample {sample.key!r} returned {', '.join(map(repr, values)) or 'nothing'}, which "
                    f"lacks {field.name!r}. Let it return all the fields that it was given."
                )
        return [values[field.name] for field in self._fields]

    def _borrow(self, columns: Sequence[Column], epoch: int, spare: Callable[[], Iterable[int]]) -> list[int]:
        """Fills row 0, for the shapes; it stays masked."""
        last = ""
        for number in spare():
            (sample,) = self._look_up(epoch, np.array([number]))
            try:
                self._fill(columns, 0, sample)
                return [0]
            except SampleError as error:
                last = f"{sample.key}: {error}"
        raise ValueError(
            f"epoch {epoch}: no sample can be read, neither of one global batch nor among the first of the data set. The "
            f"last one: {last}. Are data.fields right for these shards?"
        )

    def _bad_line(self, epoch: int, sample: _Sample, error: SampleError) -> dict[str, Any]:
        offset = min((offset for offset in sample.offsets if offset >= 0), default=-1)
        shard = self._index.shards[sample.shard]
        return {"key": sample.key, "epoch": epoch, "shard": shard, "offset": offset, "reason": str(error)}


class _Sample(NamedTuple):
    """Where a sample lies: its shard, first byte and length of each member; ``random`` is the key of its randomness."""

    key: str
    shard: int
    offsets: list[int]
    sizes: list[int]
    random: int
