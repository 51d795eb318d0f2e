"""One micro-batch from the numbers of its samples: read, decoded, augmented, laid side by side and mixed.

* A row whose sample is bad, or that has none, is *masked*. It repeats a valid row, so that it disturbs no statistic of the
  batch.
* What happens to a sample depends on (seed, epoch, sample) only, never on who builds it or what lies beside it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from dtrain.data.augment import Augment, begins_with
from dtrain.data.batch import Batch
from dtrain.data.column import Column
from dtrain.data.fields import DataError, SampleError
from dtrain.data.mixing import Mix, Mixer
from dtrain.data.permutation import hash64
from dtrain.data.randomness import Randomness
from dtrain.data.source import Record, Source
from dtrain.data.wire import Wire

# Beside the uses of (seed, epoch) in the order and in generated samples, with which this one must not share a key.
_AUGMENTATION = 4


class Builder:
    """Builds micro-batches; used in one worker.

    Args:
        source: Where samples come from.
        wire: Wire dtypes.
        augment: Applied to each sample before it is laid beside the others; a crop that it begins with is done while
            the image is decoded.
        seed: Key of every augmentation and mixture.
        mix: Mixes the samples.

    Raises:
        ValueError: If the augmentation begins with a crop of something else than an image.
    """

    def __init__(self, source: Source, wire: Wire, augment: Augment | None, seed: int, mix: Mix | None = None) -> None:
        self._fields = source.fields
        self._wire = wire
        self._draws = augment is not None
        self._cropper, self._augment = begins_with(augment)
        images = [field.name for field in source.fields if field.role == "image"]
        if self._cropper is not None and self._cropper.field not in images:
            raise ValueError(
                f"data.augment crops {self._cropper.field!r}, which is none of the images: {', '.join(images) or 'none'}."
            )
        self._seed = seed
        self._mixer = None if mix is None else Mixer(mix, seed)
        self._reader = source.open(seed)
        self._randomness = Randomness()

    def build(
        self,
        epoch: int,
        samples: np.ndarray,
        spare: Callable[[], Iterable[int]],
        partners: np.ndarray | None = None,
    ) -> Batch:
        """One micro-batch.

        Args:
            epoch: Number of the epoch.
            samples: Number of each row's sample, int64, shape ``[rows]``; -1 where the row is masked.
            spare: Samples of which the first good one lends its shapes to a micro-batch that has none.
            partners: Number of the sample that each one may be mixed with, int64, shape ``[rows]``; None mixes nothing.

        Raises:
            ShardChanged: If a shard is not what was indexed.
            DataError: If samples do not fit each other or the wire, or not even a spare one is good.
        """
        rows = len(samples)
        mixtures = None if self._mixer is None or partners is None else self._mixer.plan(epoch, samples, partners)
        if mixtures is not None:
            samples = mixtures.samples
        columns = [Column(field, len(samples), self._wire) for field in self._fields]
        keys, bad = self._fill_all(columns, epoch, samples, rows)
        if "" in keys:
            sources = [row for row, key in enumerate(keys[:rows]) if key] or self._borrow(columns, epoch, spare)
            masked = [row for row, key in enumerate(keys) if not key]
            repeated = [sources[turn % len(sources)] for turn in range(len(masked))]
            for column in columns:
                column.repeat(repeated, masked)
            if mixtures is not None:
                mixtures.repeat(repeated, masked)
        data = {column.field.name: column.data() for column in columns}
        if mixtures is not None:
            data = mixtures.mixed(data, keys)
        return Batch(data, keys[:rows], torch.tensor([key != "" for key in keys[:rows]]), bad)

    def expect(self, ahead: Callable[[int], np.ndarray]) -> None:
        """Lets the source prepare for what is built next; see ``Reader.expect``."""
        self._reader.expect(ahead)

    def close(self) -> None:
        """Closes what was opened to read."""
        self._reader.close()

    def _fill_all(
        self, columns: Sequence[Column], epoch: int, samples: np.ndarray, rows: int
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Each sample's key, empty where it could not be read, and the ledger lines of those among the first ``rows``."""
        keys: list[str] = [""] * len(samples)
        bad = []
        # In stored order: each shard is looked for once, and a disk reads forwards.
        order = np.argsort(samples)[np.count_nonzero(samples < 0) :]
        for row, (record, random) in zip(order.tolist(), self._find(epoch, samples[order]), strict=True):
            try:
                self._fill(columns, row, record, random)
                keys[row] = record.key
            except SampleError as error:
                self._reader.check(record)
                if row < rows:  # others are counted where they have a row
                    place = self._reader.place(record)
                    bad.append({"key": record.key, "epoch": epoch, **place, "reason": str(error)})
            except Exception as error:
                # Of an augmentation, a decoder or a data set: anything, and none of it says whose fault it is.
                if sys.version_info >= (3, 11):
                    place = self._reader.place(record)
                    error.add_note(f"Sample {record.key!r}, in {place['shard']} from {place['offset']} on.")
                raise
        return keys, bad

    def _find(self, epoch: int, samples: np.ndarray) -> Iterable[tuple[Record, int]]:
        """Each sample, and the key of its randomness."""
        randoms = hash64(self._seed, epoch, _AUGMENTATION, samples) if self._draws else samples
        return zip(self._reader.find(epoch, samples), randoms.tolist(), strict=True)

    def _fill(self, columns: Sequence[Column], row: int, record: Record, random: int) -> None:
        raw, decode = self._reader.fetch(record), self._reader.decode
        if self._draws:
            values = self._augmented(columns, row, raw, record.key, self._randomness.of(random))
        else:
            values = [decode(column.field, one, column.target(row)) for column, one in zip(columns, raw, strict=True)]
        for column, value in zip(columns, values, strict=True):
            column.put(row, value, record.key)

    def _augmented(
        self, columns: Sequence[Column], row: int, raw: Sequence[Any], key: str, rng: np.random.Generator
    ) -> list[Any]:
        decoded = {}
        for column, one in zip(columns, raw, strict=True):
            field, cropper = column.field, self._cropper
            crop = functools.partial(cropper.crop, rng=rng) if cropper and cropper.field == field.name else None
            # What an augmentation goes on with is not yet what the batch is to hold.
            out = column.target(row) if self._augment is None else None
            decoded[field.name] = self._reader.decode(field, one, out, crop)
        if self._augment is None:
            return list(decoded.values())
        values = self._augment(decoded, rng)
        for field in self._fields:
            if field.name not in values:
                raise DataError(
                    f"the augmentation of sample {key!r} returned {', '.join(map(repr, values)) or 'nothing'}, which "
                    f"lacks {field.name!r}. Let it return all the fields that it was given."
                )
        return [values[field.name] for field in self._fields]

    def _borrow(self, columns: Sequence[Column], epoch: int, spare: Callable[[], Iterable[int]]) -> list[int]:
        """Fills row 0, for the shapes; it stays masked."""
        first = ""
        for number in spare():
            ((record, random),) = self._find(epoch, np.array([number]))
            try:
                self._fill(columns, 0, record, random)
                return [0]
            except SampleError as error:
                place = self._reader.place(record)
                first = first or f"{record.key}, in {place['shard']} from {place['offset']} on: {error}"
        raise DataError(
            f"epoch {epoch}: no sample can be read, neither of one global batch nor among the first of the data set. The "
            f"first of them: {first}. Are the files whole, and data.fields right for them?"
        )
