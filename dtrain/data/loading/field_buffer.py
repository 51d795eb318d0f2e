"""One field of all rows of a micro-batch: decoded, cast to its transfer dtype, and stacked.

Numbers are written directly into the tensor that is sent to the trainer, cast on the way. In a worker that tensor is in shared
memory, so sending it copies nothing. Values of any other type are collected in a list.

``put`` sets one row and raises errors that name its sample. ``write`` sets many rows and ``take`` all of them, without messages
for single samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import simplejpeg
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from dtrain.data.fields.crop import Crop
from dtrain.data.fields.decode import decode as decode_member
from dtrain.data.fields.field import INT64, MEDIA, DataError, Field
from dtrain.data.loading.batch import Transfer, rows_of
from dtrain.data.loading.ipc import worker_storage

_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
_INTEGERS = (bool, int, np.bool_, np.integer)
_CUT = ("image", *MEDIA)  # roles whose values are a part of what is stored
# libjpeg-turbo writes rows aligned to 32 bytes past the CPU caches (movntdq), which makes a small image a fifth slower.
_MISALIGNMENT = 16


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
        """As ``decode``, but in new memory."""
        # A JPEG of the size of earlier rows is decoded without reading its header first.
        out = np.empty(self._shape, np.uint8) if self._shape and self.field.role == "image" else None
        return self._decode(self.field, raw, out, crop, at)

    def write(self, rows: Iterable[int], raws: Sequence[Any]) -> list[int]:
        """Decodes and puts many rows; returns those that raised an exception, which ``decode`` and ``put`` raise again."""
        field = self.field
        if self._decode is decode_member:
            if field.kind == "image" and field.crop is None and not field.exif:
                return self._write_jpegs(rows, raws)
            if field.kind == "integer" and field.role != "feature":  # features are fp32: see ``put``
                return self._write_integers(rows, raws)
            if field.kind == "raw" and field.role not in _CUT:
                return self._write_numbers(rows, raws)
        return self._write_each(rows, raws)

    def _write_each(self, rows: Iterable[int], raws: Sequence[Any]) -> list[int]:
        return [row for row, raw in zip(rows, raws, strict=True) if not self._write(row, raw)]

    def _write(self, row: int, raw: Any) -> bool:
        try:
            self.put(row, self.decode(row, raw))
        except Exception:  # noqa: BLE001 - the careful path raises it again
            return False
        return True

    def _write_jpegs(self, rows: Iterable[int], payloads: Sequence[bytes | memoryview]) -> list[int]:
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

    def _write_integers(self, rows: Iterable[int], payloads: Sequence[bytes | memoryview]) -> list[int]:
        rows = list(rows)  # notes all of them as read at once: parsing numbers cannot crash a worker
        try:
            values = list(map(int, payloads))
        except ValueError:
            values = []
        if not values or min(values) not in INT64 or max(values) not in INT64:
            return self._write_each(rows, payloads)
        self._put_object(rows[0], values[0])
        assert self._objects is not None
        for row, value in zip(rows, values, strict=True):
            self._objects[row] = value
        return []

    def _write_numbers(self, rows: Iterable[int], payloads: Sequence[bytes | memoryview]) -> list[int]:
        rows = list(rows)  # notes all of them as read at once: parsing numbers cannot crash a worker
        failed, first = [], 0
        while self._tensor is None and first < len(rows):  # the first good row decides the shape
            if not self._write(rows[first], payloads[first]):
                failed.append(rows[first])
            first += 1
        rows, payloads, array = rows[first:], payloads[first:], self._array
        stored = np.dtype(self.field.dtype)
        if array is None or array.dtype != stored or set(map(len, payloads)) != {array[0].nbytes}:
            return failed + self._write_each(rows, payloads)
        # Row by row takes three times as long (3.2 against 1.0 us a row of 1,025 uint16).
        numbers = np.frombuffer(b"".join(payloads), stored.newbyteorder("<"))
        array[rows] = numbers.reshape(len(rows), -1)
        return failed

    def take(self, column: np.ndarray | Tensor, samples: np.ndarray) -> None:
        """Sets all rows at once: row *n* to ``column[samples[n]]``, or to anything where ``samples[n]`` is negative.

        Raises:
            DataError: If a value does not fit the transfer dtype.
        """
        numbers = np.maximum(samples, 0)
        if isinstance(column, Tensor):
            values = rows_of(column.detach(), torch.from_numpy(numbers))
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
