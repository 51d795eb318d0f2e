"""A micro-batch on its way from a worker to the trainer.

A tensor goes to another process as an open file: for each side a message, a map and a fault at every page, and files that
it has only so many of. That takes longer than copying half a megabyte through the pipe, so small tensors travel as bytes
beside the keys.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.data.batch import Batch

#: Bytes from which on a tensor goes as a file. Measured: at 100 kB the pipe costs both sides two thirds, at 800 kB as much.
WORTH_A_FILE = 1 << 19


class Parcel:
    """Pickles as a ``Batch`` that has not been on a device yet; where it is unpickled, it is one."""

    def __init__(self, batch: Batch) -> None:
        self._batch = batch

    def __reduce__(self) -> tuple[Any, ...]:
        batch = self._batch
        columns = {name: _pack(column) if isinstance(column, Tensor) else column for name, column in batch.items()}
        return Batch, (columns, batch.sample_keys, _pack(batch.valid), batch.bad)


class _Inline:
    """A small tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        # As bytes, for numpy does not know every dtype.
        return _unpack, (self._tensor.flatten().view(torch.uint8).numpy(), self._tensor.dtype, self._tensor.shape)


def _unpack(data: np.ndarray, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)


def _pack(tensor: Tensor) -> Tensor | _Inline:
    return _Inline(tensor) if tensor.nbytes < WORTH_A_FILE else tensor
