"""One micro-batch from the numbers of its samples: read, decode, augment, stack, mix.

* A row is *masked* if it has no sample or a bad one. A masked row repeats a valid row, so that BatchNorm gets the
  statistics of real samples.
* The values of a sample depend on (seed, epoch, sample) only, not on the worker that reads it or on its neighbours.
* There are two ways to fill a micro-batch, with equal results. The *fast path* (``_fill_fast``) reads and decodes many
  samples at once, without keys and messages. Whatever it cannot do, for any reason, it leaves to the *careful path*
  (``_fill``), one sample at a time, which decides whether a sample is bad and says why.
* A ``FieldBuffer`` holds one field of all rows. Numbers are written directly into the tensor that is sent to the
  trainer, cast on the way: in a worker that tensor is in shared memory, so sending it copies nothing.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import simplejpeg
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from dtrain.data.augment import Augment, begins_with
from dtrain.data.batch import Batch, Rows, Transfer
from dtrain.data.crop import Crop
from dtrain.data.decode import decode as decode_member
from dtrain.data.decode import values_and_mask
from dtrain.data.fields import INT64, DataError, Field, SampleError
from dtrain.data.ipc import SharedMemoryFull, worker_storage
from dtrain.data.mixing import Mix, Mixer
from dtrain.data.randomness import Randomness, hash64
from dtrain.data.source import Source

# Uses of (seed, epoch) need different keys: the order has 1 to 3, generated samples 5, mixing 6.
AUGMENTATION = 4
_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
_INTEGERS = (bool, int, np.bool_, np.integer)
# libjpeg-turbo writes rows aligned to 32 bytes past the CPU caches (movntdq), which makes a small image a fifth slower.
_MISALIGNMENT = 16


class Collator:
    """Builds micro-batches in one worker; a crop at the start of the augmentation is done while the image is decoded.

    Raises:
        ValueError: If the augmentation starts with a crop of a field that is not an image.
    """

    def __init__(
        self, source: Source, transfer: Transfer, augment: Augment | None, seed: int, mix: Mix | None = None
    ) -> None:
        self._fields = source.fields
        self._transfer = transfer
        self._draws = augment is not None or any(field.clip == "random" for field in source.fields)
        self._cropper, self._augment = begins_with(augment)
        images = [field.name for field in source.fields if field.role in ("image", "video")]
        if self._cropper is not None and self._cropper.field not in images:
            raise ValueError(
                f"data.augment crops {self._cropper.field!r}, which is not an image. Images: {', '.join(images) or 'none'}."
            )
        self._seed = seed
        self._mixer = None if mix is None else Mixer(mix, seed)
        self._index = source.index
        self._reader = source.open(seed)
        # With an augmentation, samples differ from the rows of the columns.
        self._columns = None if self._draws else self._reader.columns()
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
            samples: Sample number of each row, int64, shape ``[rows]``; -1 where the row is masked.
            spare: Returns samples to try if all samples of the micro-batch are bad; the first good one provides the shapes.
            partners: For each row, the number of the sample it may be mixed with, int64, shape ``[rows]``; None: no mixing.

        Raises:
            ShardChanged: If a shard changed after it was indexed.
            DataError: If the values of samples do not fit each other or the transfer dtype, or all spare samples are bad.
        """
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

    def share_files(self, readers: int) -> None:
        """See ``Reader.share_files``."""
        self._reader.share_files(readers)

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
        draws = hash64(self._seed, epoch, AUGMENTATION, samples) if self._draws else samples
        buffers = self._buffers(samples)
        left = self._fill_fast(buffers, epoch, samples, order, draws)
        try:
            return buffers, *self._fill(buffers, epoch, samples, left, draws, rows)
        except DataError:
            # Values do not fit each other, perhaps because the fast path took the shapes from a bad sample. If it is
            # the fault of good ones, this raises the error again.
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
            if self._draws:
                left.update(self._augment_all(buffers, block, draws[block].tolist(), raws))
            else:
                for buffer, raw in zip(buffers, raws, strict=True):
                    left.update(buffer.write(block, raw))
        return [row for row in rows if row in left] if left else []

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
        self, buffers: Sequence[FieldBuffer], rows: Sequence[int], draws: Sequence[int], raws: Sequence[Sequence[Any]]
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
            Exception: Any error of an augmentation, a decoder or a dataset. These do not know the sample, so a note names it.
        """
        try:
            raw = self._reader.fetch(epoch, sample)
            if self._draws:
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
            if sys.version_info >= (3, 11):
                place = self._reader.place(sample)
                error.add_note(f"Sample {self._key(sample)!r}, in {place['shard']} at byte {place['offset']}.")
            raise
        return ""

    def _augmented(self, buffers: Sequence[FieldBuffer], row: int, raw: Sequence[Any], draw: int) -> list[Any]:
        rng, cropper, decoded = self._randomness.of(draw), self._cropper, {}
        for buffer, one in zip(buffers, raw, strict=True):
            name = buffer.field.name
            crop = functools.partial(cropper.crop, rng=rng) if cropper and cropper.field == name else None
            # Further augmentations change the value, so it is not written into the batch yet.
            at = rng.random() if buffer.field.clip == "random" else 0.5
            if self._augment is None:
                decoded[name] = buffer.decode(row, one, crop, at)
            else:
                decoded[name] = buffer.decode_apart(one, crop, at)
        if self._augment is None:
            return list(decoded.values())
        values = self._augment(decoded, rng)
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
            f"epoch {epoch}: no sample can be read, neither of one global batch nor among the first of the dataset. The "
            f"first error: {first}. Check that the shards are complete and that data.fields matches them."
        )

    def _buffers(self, samples: np.ndarray) -> list[FieldBuffer]:
        decode = self._reader.decode
        return [
            FieldBuffer(field, len(samples), self._transfer, decode, lambda row: self._key(int(samples[row])))
            for field in self._fields
        ]

    def _key(self, sample: int) -> str:
        return self._index.keys(np.array([sample]))[0]


def _take_all(buffers: Sequence[FieldBuffer], columns: Sequence[np.ndarray | Tensor], samples: np.ndarray) -> bool:
    """Takes all rows of all fields at once; false if a value does not fit, which the careful path will name."""
    try:
        for buffer, column in zip(buffers, columns, strict=True):
            buffer.take(column, samples)
    except DataError:
        return False
    return True


class FieldBuffer:
    """One field of all rows of a micro-batch.

    Args:
        field: The field.
        rows: Number of rows.
        transfer: The transfer dtypes.
        decode: ``Reader.decode``.
        key: ``key(row)`` is the key of a row's sample, for messages.
    """

    def __init__(
        self, field: Field, rows: int, transfer: Transfer, decode: Callable[..., Any], key: Callable[[int], str]
    ) -> None:
        self.field = field
        self.key = key
        self._rows = rows
        self._transfer = transfer
        self._decode = decode
        self._tensor: Tensor | None = None
        self._slots: Sequence[Tensor] = ()  # views of the tensor's rows
        self._array: np.ndarray | None = None  # the same memory, if numpy has the tensor's dtype
        self._shape: tuple[int, ...] = ()  # of its rows
        self._target: np.ndarray | None = None
        self._objects: list[Any] | None = None
        self._first = (0, "")  # the first row that was set, and its shape or type

    def target(self, row: int) -> np.ndarray | None:
        """Where an image decoder may write this row: uint8, ``[height, width, 3]``; None while the size is unknown."""
        if self._array is not None and self.field.role == "image":
            self._target = self._array[row]
        return self._target

    def decode(self, row: int, raw: Any, crop: Callable[[int, int], Crop] | None = None, at: float = 0.5) -> Any:
        """The value of a raw field, in ``target(row)`` if it fits there."""
        return self._decode(self.field, raw, self.target(row), crop, at)

    def decode_apart(self, raw: Any, crop: Callable[[int, int], Crop] | None, at: float) -> Any:
        """The same in memory of its own."""
        # A JPEG of the size of earlier rows is decoded without reading its header first.
        out = np.empty(self._shape, np.uint8) if self._shape and self.field.role == "image" else None
        return self._decode(self.field, raw, out, crop, at)

    def write(self, rows: Sequence[int], raws: Sequence[Any]) -> list[int]:
        """Decodes and puts many rows; returns those that raised an exception, which ``decode`` and ``put`` raise again."""
        field = self.field
        if self._decode is decode_member and field.kind == "image" and field.crop is None and not field.exif:
            return self._write_jpegs(rows, raws)
        if self._decode is decode_member and field.kind == "integer":
            return self._write_integers(rows, raws)
        return self._write_each(rows, raws)

    def _write_each(self, rows: Sequence[int], raws: Sequence[Any]) -> list[int]:
        return [row for row, raw in zip(rows, raws, strict=True) if not self._write(row, raw)]

    def _write(self, row: int, raw: Any) -> bool:
        try:
            self.put(row, self.decode(row, raw))
        except Exception:  # noqa: BLE001 - the careful path raises it again
            return False
        return True

    def _write_jpegs(self, rows: Sequence[int], payloads: Sequence[bytes | memoryview]) -> list[int]:
        failed, decode_jpeg, array, shape = [], simplejpeg.decode_jpeg, self._array, self._shape
        for row, payload in zip(rows, payloads, strict=True):
            if array is not None:
                try:
                    # It fills the row, or less if the image is smaller.
                    if decode_jpeg(payload, "RGB", buffer=array[row]).shape == shape:
                        continue
                except ValueError:
                    pass
            if not self._write(row, payload):  # the first image, or no JPEG
                failed.append(row)
            array, shape = self._array, self._shape
        return failed

    def _write_integers(self, rows: Sequence[int], payloads: Sequence[bytes | memoryview]) -> list[int]:
        failed, objects = [], self._objects
        for row, payload in zip(rows, payloads, strict=True):
            if objects is not None:
                try:
                    objects[row] = value = int(bytes(payload))
                    if value in INT64:
                        continue
                except ValueError:
                    pass
            if not self._write(row, payload):
                failed.append(row)
            objects = self._objects
        return failed

    def take(self, column: np.ndarray | Tensor, samples: np.ndarray) -> None:
        """Sets all rows at once: row *n* to ``column[samples[n]]``, or to anything where ``samples[n]`` is negative.

        Raises:
            DataError: If a value does not fit the transfer dtype.
        """
        numbers = np.maximum(samples, 0)
        if isinstance(column, Tensor):
            values = column.detach()[torch.from_numpy(numbers)]
        else:
            values = torch.from_numpy(column[numbers])
            if column.ndim == 1:  # as ``put`` and ``data`` convert numbers
                is_float = values.is_floating_point() or self.field.role == "feature"
                values = values.to(torch.float32 if is_float else torch.int64)
        dtype = self._transfer.dtype(self.field.name, values.dtype)
        self._tensor = tensor = values if dtype == values.dtype else empty_column(tuple(values.shape), dtype)
        if tensor is not values:
            self._transfer.cast(self.field.name, str, values, tensor)
        with suppress(TypeError):
            self._array = tensor.numpy()

    def put(self, row: int, value: Any) -> None:
        """Sets a row; a value that a decoder has already written to ``target(row)`` is not copied again.

        Raises:
            DataError: If its shape or type differs from earlier rows (names both samples), if it is not an image although
                the field's role is image, or if it does not fit the transfer dtype.
        """
        if isinstance(value, np.ndarray):
            if value is self._target:
                return
            array = self._array
            if array is not None and value.dtype == array.dtype and value.shape == array.shape[1:]:
                array[row] = value
            else:
                self._put_tensor(row, self._as_tensor(row, value))
        elif isinstance(value, Tensor):
            self._put_tensor(row, value)
        elif self.field.role == "feature" and isinstance(value, _NUMBERS):
            self._put_tensor(row, torch.tensor(float(value)))
        else:
            # Numbers too: one tensor from all rows at the end is cheaper.
            self._put_object(row, value)

    def repeat(self, sources: Sequence[int], rows: Sequence[int]) -> None:
        """Copies row ``sources[i]`` to row ``rows[i]``."""
        if self._array is not None:  # torch cannot index some unsigned integers
            self._array[rows] = self._array[sources]
        elif self._tensor is not None:
            self._tensor[rows] = self._tensor[sources]
        if self._objects is not None:
            for source, row in zip(sources, rows, strict=True):
                self._objects[row] = self._objects[source]

    def data(self) -> Tensor | list[Any]:
        """The finished field: a tensor ``[rows, ...]`` (of numbers: int64 or fp32), or a list of any other objects."""
        if self._tensor is not None:
            return self._tensor
        objects = self._objects or []
        types = set(map(type, objects))
        if types and all(issubclass(kind, _NUMBERS) for kind in types):
            if all(issubclass(kind, _INTEGERS) for kind in types):
                return torch.from_numpy(np.array(objects, np.int64))  # torch.tensor does not take np.bool_
            return torch.tensor(objects, dtype=torch.float32)
        return objects

    def _put_tensor(self, row: int, value: Tensor) -> None:
        dtype = self._transfer.dtype(self.field.name, value.dtype)
        tensor = self._allocate(row, value, dtype) if self._tensor is None else self._tensor
        slot = self._slots[row] if self._slots else tensor[row]
        if slot.shape != value.shape or slot.dtype != dtype:
            raise self._mismatch(row, _describe(dtype, value.shape))
        self._transfer.cast(self.field.name, lambda: self.key(row), value, slot)

    def _put_object(self, row: int, value: Any) -> None:
        if self._tensor is not None:
            raise self._mismatch(row, type(value).__name__)
        if isinstance(value, (int, np.integer)) and int(value) not in INT64:
            raise DataError(f"{self._place(row)} holds {value}, which does not fit into 64 bits. Store it as text.")
        if self._objects is None:
            self._objects, self._first = [None] * self._rows, (row, type(value).__name__)
        self._objects[row] = value

    def _allocate(self, row: int, value: Tensor, dtype: torch.dtype) -> Tensor:
        if self._objects is not None:
            raise self._mismatch(row, _describe(dtype, value.shape))
        is_image = self.field.role == "image"
        if is_image and (value.dtype != torch.uint8 or value.dim() != 3 or value.shape[2] != 3):
            raise DataError(
                f"{self._place(row)} is {_describe(value.dtype, value.shape)}, but an image has to be "
                "uint8 [height, width, 3]; it is normalised on the device. Return that from the augmentation."
            )
        self._tensor = tensor = empty_column((self._rows, *value.shape), dtype, _MISALIGNMENT if is_image else 0)
        # Views of the rows, used for casting. Images are never cast, and creating the views takes a tenth of decoding a
        # small one.
        self._slots = () if is_image else tensor.unbind()
        with suppress(TypeError):  # numpy does not have every dtype: no bf16, for example
            self._array, self._shape = tensor.numpy(), tuple(value.shape)
        self._first = (row, _describe(dtype, value.shape))
        return tensor

    def _as_tensor(self, row: int, array: np.ndarray) -> Tensor:
        flags = array.flags
        try:
            return torch.from_numpy(array if flags.c_contiguous and flags.writeable else array.copy())
        except TypeError:
            raise DataError(
                f"{self._place(row)} is an array of {array.dtype}, which no tensor can hold. Return "
                "numbers or a list from the decoder or the augmentation."
            ) from None

    def _place(self, row: int) -> str:
        return f"field {self.field.name!r}: sample {self.key(row)!r}"

    def _mismatch(self, row: int, description: str) -> DataError:
        first_row, first = self._first
        remedy = (
            "Set a size in data.fields (`size: 224`; with data=shards data.image_size=224), use an augmentation that crops, "
            "or a decoder that returns equal shapes."
            if self.field.role in ("image", "video")
            else "Set length in data.fields, in audio samples: longer recordings are cut, shorter ones padded."
            if self.field.role == "audio"
            else "Pad or cut the values: use a decoder or an augmentation that returns equal shapes, or store them so."
        )
        return DataError(
            f"{self._place(row)} is {description}, {self.key(first_row)!r} is {first}, and both are in one "
            f"batch. {remedy}"
        )


def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def empty_column(shape: tuple[int, ...], dtype: torch.dtype, begin: int = 0) -> Tensor:
    """A tensor whose data starts ``begin`` bytes after an aligned address; a large one is in shared memory in a worker."""
    nbytes = math.prod(shape) * dtype.itemsize + begin
    if get_worker_info() is None:
        storage = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
    else:
        storage = worker_storage(nbytes)
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(storage, begin // dtype.itemsize, shape, strides)
