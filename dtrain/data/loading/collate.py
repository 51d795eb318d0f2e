"""One micro-batch from the numbers of its samples: read, decode, augment, stack, mix.

* A row is *masked* if it has no sample or a bad one. A masked row repeats a valid row, so that a model only
  gets real samples.
* The values of a sample depend on (seed, epoch, sample) only, not on the worker that reads it or on its neighbours.
* There are two ways to fill a micro-batch, with equal results. The *fast path* (``_fill_fast``) reads and decodes many
  samples at once, without keys and messages. What it cannot do is left to the *careful path*
  (``_fill``), one sample at a time, which decides whether a sample is bad and says why.
* A ``FieldBuffer`` (``field_buffer``) holds one field of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.data.augment import Augment
from dtrain.data.fields.decode import values_and_mask
from dtrain.data.fields.field import DataError, SampleError
from dtrain.data.loading.batch import Batch, Rows, Transfer
from dtrain.data.loading.field_buffer import FieldBuffer
from dtrain.data.loading.ipc import SharedMemoryFull, own_reads
from dtrain.data.loading.sample import CropOf, SampleBuilder
from dtrain.data.mixing import Mix, Mixer
from dtrain.data.order.randomness import Randomness, hash64
from dtrain.data.sources.source import OpenReaders, Source
from dtrain.errors import add_note

# Uses of (seed, epoch) need different keys: the order has 1 to 3, generated samples 5, mixing 6.
AUGMENTATION = 4
#: Samples of a source that are tried, to find the shapes of a micro-batch without any good sample.
SPARE = 100


class Collator:
    """Builds micro-batches in one worker; a crop at the start of the augmentation is done while the image is decoded.

    Args:
        source: Where samples come from.
        transfer: The transfer dtypes.
        augment: The augmentation.
        seed: Seed of the augmentation and of mixing.
        mix: Mixup and cutmix.
        first: Number of the source's first sample in the whole dataset, for the note of which sample a worker reads.

    Raises:
        ValueError: If the augmentation starts with a crop of a field that is not an image.
    """

    def __init__(
        self,
        source: Source,
        transfer: Transfer,
        augment: Augment | None,
        seed: int,
        mix: Mix | None = None,
        first: int = 0,
    ) -> None:
        self._fields = source.fields
        self._transfer = transfer
        self._builder = SampleBuilder(source.fields, augment)
        self._whole = self._builder.is_needed
        self._seed = seed
        self._mixer = None if mix is None else Mixer(mix, seed)
        self._index = source.index
        self._reader = source.open(seed)
        # With an augmentation, samples differ from the rows of the columns.
        self._columns = None if self._whole else self._reader.columns()
        self._randomness = Randomness()
        self._first = first
        self._reads = own_reads()
        if self._reads is not None:
            self._reader.tell(self._note)

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
            samples: Sample number of each row, int64, shape ``[rows]``; -1 where the row is masked.
            spare: Returns samples to try if all samples of the micro-batch are bad; the first good one provides the shapes.
            partners: For each row, the number of the sample it may be mixed with, int64, shape ``[rows]``; None: no mixing.

        Raises:
            ShardChanged: If a shard changed after it was indexed.
            DataError: If the values of samples do not fit each other or the transfer dtype, or all spare samples are bad.
        """
        if self._reads is not None:
            self._reads[0] = epoch
        rows = len(samples)
        mixtures = None if self._mixer is None or partners is None else self._mixer.plan(epoch, samples, partners)
        if mixtures is not None:
            samples = mixtures.samples
        buffers, read, bad = self._read(epoch, samples, rows)
        masked = np.flatnonzero(read < 0).tolist()
        if masked:
            sources = np.flatnonzero(read[:rows] >= 0).tolist()
            if not sources:
                buffers, sources = self._borrow(buffers, epoch, read, spare), [0]
            repeated = [sources[turn % len(sources)] for turn in range(len(masked))]
            for buffer in buffers:
                buffer.repeat(repeated, masked)
            if mixtures is not None:
                mixtures.repeat(repeated, masked)
        self._note_none()
        data = {buffer.field.name: buffer.data() for buffer in buffers}
        if mixtures is not None:
            data = mixtures.mixed(data, Rows(read, self._index).keys)
        for field in self._fields:
            if field.columns[1:]:
                data[field.name], data[field.columns[1]] = values_and_mask(field, data[field.name])
        read = read[:rows]
        return Batch(data, Rows(read, self._index), torch.from_numpy(read >= 0), bad)

    def expect(self, ahead: Callable[[int], np.ndarray], at_once: int | None = None) -> None:
        """See ``Reader.expect``."""
        self._reader.expect(ahead, at_once)

    def share(self, readers: OpenReaders) -> None:
        """See ``Reader.share``."""
        self._reader.share(readers)

    def close(self) -> None:
        """Closes the reader."""
        self._reader.close()

    def _read(
        self, epoch: int, samples: np.ndarray, rows: int
    ) -> tuple[list[FieldBuffer], np.ndarray, list[dict[str, Any]]]:
        """Reads all samples.

        Returns:
            The fields; the sample of each row, -1 for a bad one; the records of bad samples among the first ``rows``.
        """
        # In stored order: each shard is looked up once, and a disk reads forwards.
        order = np.argsort(samples)[np.count_nonzero(samples < 0) :]
        draws = hash64(self._seed, epoch, AUGMENTATION, samples) if self._whole else samples
        buffers = self._buffers(samples)
        left = self._fill_fast(buffers, epoch, samples, order, draws)
        try:
            return buffers, *self._fill(buffers, epoch, samples, left, draws, rows)
        except DataError:
            # Values do not fit each other, perhaps because the fast path took the shapes from a bad sample. If good ones are
            # the cause, this raises the error again.
            buffers = self._buffers(samples)
            return buffers, *self._fill(buffers, epoch, samples, order.tolist(), draws, rows)

    def _fill_fast(
        self, buffers: Sequence[FieldBuffer], epoch: int, samples: np.ndarray, order: np.ndarray, draws: np.ndarray
    ) -> list[int]:
        """The fast path: many samples at once, no messages. Returns the rows that it left, for any reason, in order."""
        if self._columns is not None and _take_all(buffers, self._columns, samples):
            return []
        rows = order.tolist()
        left = set(rows)
        for positions, raws in self._reader.fetch_all(epoch, samples[order]):
            block = [rows[position] for position in positions]
            left.difference_update(block)
            if self._whole:
                left.update(self._augment_all(buffers, self._noted(block, samples), draws[block].tolist(), raws))
            else:
                for buffer, raw in zip(buffers, raws, strict=True):
                    left.update(buffer.write(self._noted(block, samples), raw))
            self._note_none()  # the next block may be of any samples
        return [row for row in rows if row in left] if left else []

    def _note(self, sample: int) -> None:
        """Notes which sample is read now, for the case that this ends the worker."""
        if self._reads is not None:
            self._reads[1] = self._first + sample

    def _note_none(self) -> None:
        if self._reads is not None:
            self._reads[1] = -1

    def _noted(self, rows: Sequence[int], samples: np.ndarray) -> Iterable[int]:
        """The rows; in a worker, the sample of each is noted before it is used."""
        return rows if self._reads is None else _noting(self._reads, rows, self._first + samples[rows])

    def _fill(
        self,
        buffers: Sequence[FieldBuffer],
        epoch: int,
        samples: np.ndarray,
        chosen: Sequence[int],
        draws: np.ndarray,
        rows: int,
    ) -> tuple[np.ndarray, list[dict[str, Any]]]:
        """The careful path: fills the chosen rows one by one. Returns as ``_read``."""
        read, bad = samples.copy(), []
        for row in chosen:
            sample = int(samples[row])
            problem = self._fill_row(buffers, row, epoch, sample, int(draws[row]))
            if problem:
                read[row] = -1
                if row < rows:  # a partner is counted in the micro-batch in which it has a row
                    place = self._reader.place(sample)
                    bad.append({"key": self._key(sample), "epoch": epoch, **place, "reason": problem})
        return read, bad

    def _augment_all(
        self, buffers: Sequence[FieldBuffer], rows: Iterable[int], draws: Sequence[int], raws: Sequence[Sequence[Any]]
    ) -> list[int]:
        """The fast path with an augmentation; returns the rows that raised an exception."""
        failed = []
        for row, draw, *raw in zip(rows, draws, *raws, strict=True):
            try:
                for buffer, value in zip(buffers, self._augmented(buffers, row, raw, draw), strict=True):
                    buffer.put(row, value)
            except Exception:  # noqa: BLE001 - the careful path raises it again
                failed.append(row)
        return failed

    def _fill_row(self, buffers: Sequence[FieldBuffer], row: int, epoch: int, sample: int, draw: int) -> str:
        """Writes one sample to a row; returns the reason if the sample is bad, else nothing.

        Raises:
            Exception: Any error of an augmentation, a decoder or a dataset. These errors do not know the sample, so a note
                names it.
        """
        self._note(sample)
        try:
            raw = self._reader.fetch(epoch, sample)
            if self._whole:
                values = self._augmented(buffers, row, raw, draw)
            else:
                values = [buffer.decode(row, one) for buffer, one in zip(buffers, raw, strict=True)]
            for buffer, value in zip(buffers, values, strict=True):
                buffer.put(row, value)
        except SampleError as error:
            self._reader.check(sample)
            return str(error)
        except SharedMemoryFull:  # which is not the sample's fault
            raise
        except Exception as error:
            place = self._reader.place(sample)
            add_note(error, f"Sample {self._key(sample)!r}, in {place['shard']} at byte {place['offset']}.")
            raise
        return ""

    def _augmented(self, buffers: Sequence[FieldBuffer], row: int, raw: Sequence[Any], draw: int) -> list[Any]:
        changes = self._builder.augment is not None

        def decode(number: int, crop: CropOf | None, at: float) -> Any:
            if changes:  # the value is not written into the batch yet
                return buffers[number].decode_apart(raw[number], crop, at)
            return buffers[number].decode(row, raw[number], crop, at)

        values = self._builder.values(decode, self._randomness.generator(draw))
        for buffer in buffers:
            if buffer.field.name not in values:
                raise DataError(
                    f"the augmentation of sample {buffer.key(row)!r} returned {', '.join(map(repr, values)) or 'nothing'}, "
                    f"which lacks {buffer.field.name!r}. It has to return all fields of the sample."
                )
        return [values[buffer.field.name] for buffer in buffers]

    def _borrow(
        self, buffers: list[FieldBuffer], epoch: int, read: np.ndarray, spare: Callable[[], Iterable[int]]
    ) -> list[FieldBuffer]:
        """Fields with a spare sample in row 0, for its shapes; the row stays masked."""
        first = ""
        for sample in spare():
            if (read < 0).all():  # no partner has been read: only a bad sample can have left a shape
                buffers = self._buffers(np.full(len(read), sample))
            problem = self._fill_row(buffers, 0, epoch, sample, int(hash64(self._seed, epoch, AUGMENTATION, sample)))
            if not problem:
                return buffers
            place = self._reader.place(sample)
            first = first or f"{self._key(sample)}, in {place['shard']} at byte {place['offset']}: {problem}"
        raise DataError(
            f"epoch {epoch}: no sample of a global batch can be read, and none of the first samples of the dataset. The first "
            f"error: {first}. Check that the shards are complete and that data.fields matches them."
        )

    def _buffers(self, samples: np.ndarray) -> list[FieldBuffer]:
        decode = self._reader.decode
        return [
            FieldBuffer(field, len(samples), self._transfer, decode, lambda row: self._key(int(samples[row])))
            for field in self._fields
        ]

    def _key(self, sample: int) -> str:
        return self._index.keys(np.array([sample]))[0]


def _noting(reads: memoryview, rows: Sequence[int], samples: np.ndarray) -> Iterator[int]:
    for row, sample in zip(rows, samples.tolist(), strict=True):
        reads[1] = sample
        yield row


def _take_all(buffers: Sequence[FieldBuffer], columns: Sequence[np.ndarray | Tensor], samples: np.ndarray) -> bool:
    """Takes all rows of all fields at once; false if a value does not fit, which the careful path will name."""
    try:
        for buffer, column in zip(buffers, columns, strict=True):
            buffer.take(column, samples)
    except DataError:
        return False
    return True
