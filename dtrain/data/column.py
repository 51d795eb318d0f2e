"""One field of a micro-batch while a worker builds it, row by row.

Numbers go straight into the tensor that travels: in a worker it lies in shared memory, so that handing it over copies
nothing, and a cast happens on the way in.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

from dtrain.data.fields import Field
from dtrain.data.wire import Wire

_SCALARS = (bool, int, float, np.integer, np.floating)


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
        self._objects: list[Any] | None = None
        self._first_key = ""

    def target(self, row: int) -> np.ndarray | None:
        """Where an image decoder may write this row: uint8, ``[height, width, 3]``; None while the size is unknown."""
        if self._tensor is None or self._tensor.dtype != torch.uint8:
            return None
        return self._tensor[row].numpy()

    def put(self, row: int, value: Any, key: str) -> None:
        """Sets a row; a value that a decoder already wrote to ``target(row)`` is not copied again.

        Raises:
            ValueError: If its shape differs from that of the rows before; names both samples.
        """
        if not isinstance(value, np.ndarray):  # scalars too: one tensor of all rows at the end costs less
            self._objects = self._objects if self._objects is not None else [None] * self._rows
            self._objects[row] = value
            return
        if self._tensor is None:
            self._tensor = _empty((self._rows, *value.shape), self._wire.dtype(self.field.name, value))
            self._first_key = key
        slot = self._tensor[row]
        if slot.shape != value.shape:
            raise ValueError(
                f"field {self.field.name!r}: sample {key!r} has shape {list(value.shape)}, {self._first_key!r} has "
                f"{list(slot.shape)}, and one batch holds both. Give the field a size, for example "
                f"data.fields.{self.field.ext}.size=224, or an augmentation that crops."
            )
        if slot.data_ptr() != value.ctypes.data:
            self._wire.cast(self.field.name, key, value if value.flags.c_contiguous else value.copy(), slot)

    def repeat(self, source: int, row: int) -> None:
        """Makes ``row`` a copy of ``source``."""
        if self._tensor is not None:
            self._tensor[row] = self._tensor[source]
        if self._objects is not None:
            self._objects[row] = self._objects[source]

    def data(self) -> Tensor | list[Any]:
        """The finished column: a tensor ``[rows, ...]`` (scalars: int64 or fp32), or a list for text and bytes."""
        if self._tensor is not None:
            return self._tensor
        objects = self._objects or []
        if objects and all(isinstance(value, _SCALARS) for value in objects):
            exact = all(isinstance(value, (bool, int, np.integer)) for value in objects)
            return torch.tensor(objects, dtype=torch.int64 if exact else torch.float32)
        return objects


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if get_worker_info() is None:
        return torch.empty(shape, dtype=dtype)
    # What torch's default_collate does in a worker: the storage is born shared.
    storage = torch.empty(0, dtype=dtype).untyped_storage()._new_shared(math.prod(shape) * dtype.itemsize)
    return torch.empty(0, dtype=dtype).set_(storage).view(shape)
