"""One field of a micro-batch while a worker builds it, row by row.

Numbers go straight into the tensor that travels: in a worker it lies in shared memory, so that handing it over copies
nothing, and a cast happens on the way in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from dtrain.data.fields import DataError, Field
from dtrain.data.parcel import WORTH_A_FILE
from dtrain.data.wire import Wire

_NUMBERS = (bool, int, float, np.bool_, np.integer, np.floating)
_WHOLE_NUMBERS = (bool, int, np.bool_, np.integer)
# Rows that are aligned to 32 bytes libjpeg-turbo writes past the caches (movntdq), which costs a small image a fifth.
_PAST_ALIGNMENT = 16
_INT64 = range(-(2**63), 2**63)


class Column:
    """``rows`` values of one field.

    Args:
        field: The field.
        rows: Rows of the micro-batch.
        wire: Decides the dtype of numbers.
    """

    def __init__(self, field: Field, rows: int, wire: Wire) -> None:
        self.field = field
        self._rows = rows
        self._wire = wire
        self._tensor: Tensor | None = None
        self._slots: Sequence[Tensor] = ()  # the rows of the tensor
        self._array: np.ndarray | None = None  # the tensor again, if numpy knows its dtype
        self._target: np.ndarray | None = None
        self._objects: list[Any] | None = None
        self._first = ("", "")  # key of the first row that was set, and what it was

    def target(self, row: int) -> np.ndarray | None:
        """Where an image decoder may write this row: uint8, ``[height, width, 3]``; None while the size is unknown."""
        if self._array is not None and self.field.role == "image":
            self._target = self._array[row]
        return self._target

    def put(self, row: int, value: Any, key: str) -> None:
        """Sets a row; a value that a decoder already wrote to ``target(row)`` is not copied again.

        Args:
            row: Which one.
            value: An array or a tensor, a number, or any other object.
            key: The sample, for messages.

        Raises:
            DataError: If its shape or type differs from that of the rows before (names both samples), if it is no image
                where the field's role says so, or does not fit the wire.
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
            # Numbers too: one tensor of all rows at the end costs less.
            self._put_object(row, value, key)

    def repeat(self, sources: Sequence[int], rows: Sequence[int]) -> None:
        """Makes each of ``rows`` a copy of the row at its place in ``sources``."""
        if self._array is not None:  # torch cannot do this to unsigned integers
            self._array[rows] = self._array[sources]
        elif self._tensor is not None:
            self._tensor[rows] = self._tensor[sources]
        if self._objects is not None:
            for source, row in zip(sources, rows, strict=True):
                self._objects[row] = self._objects[source]

    def data(self) -> Tensor | list[Any]:
        """The finished column: a tensor ``[rows, ...]`` (of numbers: int64 or fp32), or a list of any other objects."""
        if self._tensor is not None:
            return self._tensor
        objects = self._objects or []
        if objects and all(isinstance(value, _NUMBERS) for value in objects):
            if all(isinstance(value, _WHOLE_NUMBERS) for value in objects):
                return torch.from_numpy(np.array(objects, np.int64))  # torch cannot read numpy's truth values
            return torch.tensor(objects, dtype=torch.float32)
        return objects

    def _put_tensor(self, row: int, value: Tensor, key: str) -> None:
        dtype = self._wire.dtype(self.field.name, value.dtype)
        tensor = self._begin(value, dtype, key) if self._tensor is None else self._tensor
        slot = self._slots[row] if self._slots else tensor[row]
        if slot.shape != value.shape or slot.dtype != dtype:
            raise self._unlike(key, _describe(dtype, value.shape))
        self._wire.cast(self.field.name, key, value, slot)

    def _put_object(self, row: int, value: Any, key: str) -> None:
        if self._tensor is not None:
            raise self._unlike(key, type(value).__name__)
        if isinstance(value, (int, np.integer)) and int(value) not in _INT64:
            raise DataError(
                f"field {self.field.name!r}: sample {key!r} holds {value}, which does not fit into 64 bits. Store it as text."
            )
        if self._objects is None:
            self._objects, self._first = [None] * self._rows, (key, type(value).__name__)
        self._objects[row] = value

    def _begin(self, value: Tensor, dtype: torch.dtype, key: str) -> Tensor:
        if self._objects is not None:
            raise self._unlike(key, _describe(dtype, value.shape))
        is_image = self.field.role == "image"
        if is_image and (value.dtype != torch.uint8 or value.dim() != 3 or value.shape[2] != 3):
            raise DataError(
                f"field {self.field.name!r}: sample {key!r} is {_describe(value.dtype, value.shape)}, but images travel as "
                "uint8 [height, width, 3] and are normalised on the device. Let the augmentation return that."
            )
        self._tensor = tensor = _empty((self._rows, *value.shape), dtype, _PAST_ALIGNMENT if is_image else 0)
        # Where rows are cast; those of images are never, and making them costs as much as a tenth of decoding a small one.
        self._slots = () if is_image else tensor.unbind()
        with suppress(TypeError):  # of bf16, for example, which numpy does not know
            self._array = tensor.numpy()
        self._first = (key, _describe(dtype, value.shape))
        return tensor

    def _as_tensor(self, array: np.ndarray, key: str) -> Tensor:
        flags = array.flags
        try:
            return torch.from_numpy(array if flags.c_contiguous and flags.writeable else array.copy())
        except TypeError:
            raise DataError(
                f"field {self.field.name!r}: sample {key!r} is an array of {array.dtype}, which no tensor can hold. Let "
                "the decoder or the augmentation return numbers, or a list."
            ) from None

    def _unlike(self, key: str, what: str) -> DataError:
        first_key, first = self._first
        return DataError(
            f"field {self.field.name!r}: sample {key!r} is {what}, {first_key!r} is {first}, and one batch holds both. Give "
            "the field a size in data.fields (`size: 224`; with data=shards data.image_size=224), an augmentation that crops, "
            "or a decoder that makes all alike."
        )


def _describe(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def _empty(shape: tuple[int, ...], dtype: torch.dtype, begin: int = 0) -> Tensor:
    """A tensor whose first byte is ``begin`` bytes past an aligned address, in shared memory if it is worth that."""
    nbytes = math.prod(shape) * dtype.itemsize + begin
    if get_worker_info() is None or nbytes < WORTH_A_FILE:
        storage = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
    else:
        # What torch's default_collate does in a worker: the storage is born shared.
        storage = torch.empty(0, dtype=dtype).untyped_storage()._new_shared(nbytes)
    strides = torch.empty(shape, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(storage, begin // dtype.itemsize, shape, strides)
