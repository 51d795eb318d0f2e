"""One micro-batch from the numbers of its samples: read, decode, augment, stack, mix.

* A row is *masked* if it has no sample or a bad one. A masked row repeats a valid row, so that BatchNorm gets the
  statistics of real samples.
* The values of a sample depend on (seed, epoch, sample) only, not on the worker that reads it or on its neighbours.
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
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from dtrain.data.augment import Augment, begins_with
from dtrain.data.batch import Batch, Transfer
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
        buffers = [FieldBuffer(field, len(samples), self._transfer) for field in self._fields]
        keys, bad = self._fill_all(buffers, epoch, samples, rows)
        if "" in keys:
            sources = [row for row, key in enumerate(keys[:rows]) if key] or self._borrow(buffers, epoch, spare)
            masked = [row for row, key in enumerate(keys) if not key]
            repeated = [sources[turn % len(sources)] for turn in range(len(masked))]
            for buffer in buffers:
                buffer.repeat(repeated, masked)
            if mixtures is not None:
                mixtures.repeat(repeated, masked)
        data = {buffer.field.name: buffer.data() for buffer in buffers}
        if mixtures is not None:
            data = mixtures.mixed(data, keys)
        for field in self._fields:
            if field.columns[1:]:
                data[field.name], data[field.columns[1]] = values_and_mask(field, data[field.name])
        return Batch(data, keys[:rows], torch.tensor([key != "" for key in keys[:rows]]), bad)

    def expect(self, ahead: Callable[[int], np.ndarray], at_once: int | None = None) -> None:
        """See ``Reader.expect``."""
        self._reader.expect(ahead, at_once)

    def close(self) -> None:
        """Closes the reader."""
        self._reader.close()

    def _fill_all(
        self, buffers: Sequence[FieldBuffer], epoch: int, samples: np.ndarray, rows: int
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """Reads all samples; returns their keys, empty for bad ones, and records of bad samples among the first ``rows``."""
        keys: list[str] = [""] * len(samples)
        bad = []
        # In stored order: each shard is looked up once, and a disk reads forwards.
        order = np.argsort(samples)[np.count_nonzero(samples < 0) :]
        for row, (record, random) in zip(order.tolist(), self._find(epoch, samples[order]), strict=True):
            try:
                self._fill(buffers, row, record, random)
                keys[row] = record.key
            except SampleError as error:
                self._reader.check(record)
                if row < rows:  # a partner is counted in the micro-batch in which it has a row
                    place = self._reader.place(record)
                    bad.append({"key": record.key, "epoch": epoch, **place, "reason": str(error)})
            except SharedMemoryFull:  # which is not the sample's fault
                raise
            except Exception as error:
                # An augmentation, a decoder or a dataset may raise any error, without naming the sample.
                if sys.version_info >= (3, 11):
                    place = self._reader.place(record)
                    error.add_note(f"Sample {record.key!r}, in {place['shard']} at byte {place['offset']}.")
                raise
        return keys, bad

    def _find(self, epoch: int, samples: np.ndarray) -> Iterable[tuple[Any, int]]:
        """Each sample, and the key of its random numbers."""
        randoms = hash64(self._seed, epoch, AUGMENTATION, samples) if self._draws else samples
        return zip(self._reader.find(epoch, samples), randoms.tolist(), strict=True)

    def _fill(self, buffers: Sequence[FieldBuffer], row: int, record: Any, random: int) -> None:
        raw, decode = self._reader.fetch(record), self._reader.decode
        if self._draws:
            values = self._augmented(buffers, row, raw, record.key, self._randomness.of(random))
        else:
            values = [decode(buffer.field, one, buffer.target(row)) for buffer, one in zip(buffers, raw, strict=True)]
        for buffer, value in zip(buffers, values, strict=True):
            buffer.put(row, value, record.key)

    def _augmented(
        self, buffers: Sequence[FieldBuffer], row: int, raw: Sequence[Any], key: str, rng: np.random.Generator
    ) -> list[Any]:
        decoded = {}
        for buffer, one in zip(buffers, raw, strict=True):
            field, cropper = buffer.field, self._cropper
            crop = functools.partial(cropper.crop, rng=rng) if cropper and cropper.field == field.name else None
            # Further augmentations change the value, so it is not written into the batch yet.
            out = buffer.target(row) if self._augment is None else None
            at = rng.random() if field.clip == "random" else 0.5
            decoded[field.name] = self._reader.decode(field, one, out, crop, at)
        if self._augment is None:
            return list(decoded.values())
        values = self._augment(decoded, rng)
        for field in self._fields:
            if field.name not in values:
                raise DataError(
                    f"the augmentation of sample {key!r} returned {', '.join(map(repr, values)) or 'nothing'}, which "
                    f"lacks {field.name!r}. It has to return all fields of the sample."
                )
        return [values[field.name] for field in self._fields]

    def _borrow(self, buffers: Sequence[FieldBuffer], epoch: int, spare: Callable[[], Iterable[int]]) -> list[int]:
        """Writes a spare sample to row 0, for its shapes; the row stays masked."""
        first = ""
        for number in spare():
            ((record, random),) = self._find(epoch, np.array([number]))
            try:
                self._fill(buffers, 0, record, random)
                return [0]
            except SampleError as error:
                place = self._reader.place(record)
                first = first or f"{record.key}, in {place['shard']} at byte {place['offset']}: {error}"
        raise DataError(
            f"epoch {epoch}: no sample can be read, neither of one global batch nor among the first of the dataset. The "
            f"first error: {first}. Check that the shards are complete and that data.fields matches them."
        )


class FieldBuffer:
    """One field of all rows of a micro-batch."""

    def __init__(self, field: Field, rows: int, transfer: Transfer) -> None:
        self.field = field
        self._rows = rows
        self._transfer = transfer
        self._tensor: Tensor | None = None
        self._slots: Sequence[Tensor] = ()  # views of the tensor's rows
        self._array: np.ndarray | None = None  # the same memory, if numpy has the tensor's dtype
        self._target: np.ndarray | None = None
        self._objects: list[Any] | None = None
        self._first = ("", "")  # key of the first row that was set, and its shape or type

    def target(self, row: int) -> np.ndarray | None:
        """Where an image decoder may write this row: uint8, ``[height, width, 3]``; None while the size is unknown."""
        if self._array is not None and self.field.role == "image":
            self._target = self._array[row]
        return self._target

    def put(self, row: int, value: Any, key: str) -> None:
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
                self._put_tensor(row, self._as_tensor(value, key), key)
        elif isinstance(value, Tensor):
            self._put_tensor(row, value, key)
        elif self.field.role == "feature" and isinstance(value, _NUMBERS):
            self._put_tensor(row, torch.tensor(float(value)), key)
        else:
            # Numbers too: one tensor from all rows at the end is cheaper.
            self._put_object(row, value, key)

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
        if objects and all(isinstance(value, _NUMBERS) for value in objects):
            if all(isinstance(value, _INTEGERS) for value in objects):
                return torch.from_numpy(np.array(objects, np.int64))  # torch.tensor does not take np.bool_
            return torch.tensor(objects, dtype=torch.float32)
        return objects

    def _put_tensor(self, row: int, value: Tensor, key: str) -> None:
        dtype = self._transfer.dtype(self.field.name, value.dtype)
        tensor = self._allocate(value, dtype, key) if self._tensor is None else self._tensor
        slot = self._slots[row] if self._slots else tensor[row]
        if slot.shape != value.shape or slot.dtype != dtype:
            raise self._mismatch(key, _describe(dtype, value.shape))
        self._transfer.cast(self.field.name, key, value, slot)

    def _put_object(self, row: int, value: Any, key: str) -> None:
        if self._tensor is not None:
            raise self._mismatch(key, type(value).__name__)
        if isinstance(value, (int, np.integer)) and int(value) not in INT64:
            raise DataError(
                f"field {self.field.name!r}: sample {key!r} holds {value}, which does not fit into 64 bits. Store it as text."
            )
        if self._objects is None:
            self._objects, self._first = [None] * self._rows, (key, type(value).__name__)
        self._objects[row] = value

    def _allocate(self, value: Tensor, dtype: torch.dtype, key: str) -> Tensor:
        if self._objects is not None:
            raise self._mismatch(key, _describe(dtype, value.shape))
        is_image = self.field.role == "image"
        if is_image and (value.dtype != torch.uint8 or value.dim() != 3 or value.shape[2] != 3):
            raise DataError(
                f"field {self.field.name!r}: sample {key!r} is {_describe(value.dtype, value.shape)}, but an image has to be "
                "uint8 [height, width, 3]; it is normalised on the device. Return that from the augmentation."
            )
        self._tensor = tensor = _empty((self._rows, *value.shape), dtype, _MISALIGNMENT if is_image else 0)
        # Views of the rows, used for casting. Images are never cast, and creating the views takes a tenth of decoding a
        # small one.
        self._slots = () if is_image else tensor.unbind()
        with suppress(TypeError):  # numpy does not have every dtype: no bf16, for example
            self._array = tensor.numpy()
        self._first = (key, _describe(dtype, value.shape))
        return tensor

    def _as_tensor(self, array: np.ndarray, key: str) -> Tensor:
        flags = array.flags
        try:
            return torch.from_numpy(array if flags.c_contiguous and flags.writeable else array.copy())
        except TypeError:
            raise DataError(
                f"field {self.field.name!r}: sample {key!r} is an array of {array.dtype}, which no tensor can hold. Return "
                "numbers or a list from the decoder or the augmentation."
            ) from None

    def _mismatch(self, key: str, description: str) -> DataError:
        first_key, first = self._first
        remedy = (
            "Set a size in data.fields (`size: 224`; with data=shards data.image_size=224), use an augmentation that crops, "
            "or a decoder that returns equal shapes."
            if self.field.role in ("image", "video")
            else "Set length in data.fields, in audio samples: longer recordings are cut, shorter ones padded."
            if self.field.role == "audio"
            else "Pad or cut the values: use a decoder or an augmentation that returns equal shapes, or store them so."
        )
        return DataError(
            f"field {self.field.name!r}: sample {key!r} is {description}, {first_key!r} is {first}, and both are in one "
            f"batch. {remedy}"
        )


def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _empty(shape: tuple[int, ...], dtype: torch.dtype, begin: int = 0) -> Tensor:
    """A tensor whose data starts ``begin`` bytes after an aligned address; a large one is in shared memory in a worker."""
    nbytes = math.prod(shape) * dtype.itemsize + begin
    if get_worker_info() is None:
        storage = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
    else:
        storage = worker_storage(nbytes)
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(storage, begin // dtype.itemsize, shape, strides)
