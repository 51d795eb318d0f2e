"""Data sets that are no files: arrays in memory, samples that a function makes, and whatever else has a length and items.

The loader takes any *map-style* data set, ``len(dataset)`` and ``dataset[n]``. Two come with it: ``Arrays``, whose sample is
a row of each, and ``Generated``, whose sample is drawn from a generator that is keyed by (seed, epoch, sample), so that no
rank and no worker draws what another one does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

# Rows that stand for an array in its fingerprint: enough to tell data sets apart, at no cost for large ones.
_LOOKED_AT = 64


class Arrays:
    """Arrays of equal length, side by side.

    Args:
        arrays: Arrays or tensors ``[samples, ...]``, or lists of other values: by name, or in the order of the fields.

    Attributes:
        fingerprint: Hash of shapes, types and some rows.

    Raises:
        ValueError: If there are none, or their lengths differ.
    """

    def __init__(self, arrays: Mapping[str, Any] | Sequence[Any]) -> None:
        named = isinstance(arrays, Mapping)
        self._names = list(arrays) if named else None
        self._arrays = list(arrays.values() if isinstance(arrays, Mapping) else arrays)
        lengths = [len(array) for array in self._arrays]
        if len(set(lengths)) != 1:
            raise ValueError(
                f"arrays of lengths {lengths}: want at least one, and all of the same length, a row of each for a sample."
            )
        digest = hashlib.sha256()
        for name, array in zip(self._names or range(len(lengths)), self._arrays, strict=True):
            digest.update(f"{name} {getattr(array, 'dtype', '')} {list(getattr(array, 'shape', lengths))}".encode())
            for row in np.unique(np.linspace(0, lengths[0] - 1, _LOOKED_AT).astype(np.int64)) if lengths[0] else ():
                digest.update(_content(array[int(row)]))
        self.fingerprint = digest.hexdigest()[:16]

    def __len__(self) -> int:
        return len(self._arrays[0])

    def __getitem__(self, sample: int) -> Any:
        """A dict or a tuple, as the arrays were given."""
        values = tuple(array[sample] for array in self._arrays)
        return values if self._names is None else dict(zip(self._names, values, strict=True))


class Generated:
    """Samples that a function makes.

    Args:
        function: ``function(sample, rng)`` returns the fields of sample number ``sample``: a dict by name, or a tuple in
            the order of the fields. ``rng`` is a ``numpy.random.Generator`` keyed by (seed, epoch, sample).
        length: Samples of an epoch.
        fresh: False draws the same numbers in every epoch, as evaluation wants them.

    Attributes:
        fingerprint: The function's name and ``fresh``: what it computes is its author's to keep.

    Raises:
        ValueError: If ``length`` is none.
    """

    def __init__(self, function: Callable[[int, np.random.Generator], Any], length: int, fresh: bool = True) -> None:
        if length < 1 or not callable(function):
            raise ValueError(f"generated samples: got length {length} and function {function!r}, want one of each.")
        self._length = length
        self.function = function
        self.fresh = fresh
        called = getattr(function, "func", function)  # of a functools.partial
        self.fingerprint = f"{getattr(called, '__qualname__', type(called).__qualname__)}, fresh={fresh}"

    def __len__(self) -> int:
        return self._length


def as_dataset(value: Any) -> Any:
    """A map-style data set, or ``Generated``.

    Args:
        value: One of these; or a dict or tuple of arrays, which becomes ``Arrays``.

    Raises:
        ValueError: If it is none of them.
    """
    if isinstance(value, (Mapping, tuple)):
        return Arrays(value)
    if isinstance(value, Generated) or (hasattr(value, "__len__") and hasattr(value, "__getitem__")):
        return value
    stream = " In a stream no sample can be reached directly: write it to shards." if hasattr(value, "__iter__") else ""
    raise ValueError(
        f"got a {type(value).__name__}, want a data set with __len__ and __getitem__, a dict or tuple of arrays, or a "
        f"dtrain.data.Generated.{stream}"
    )


def _content(value: Any) -> bytes:
    if isinstance(value, Tensor):  # as bytes, for numpy does not know every dtype
        return value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tobytes()
    return repr(value).encode() if isinstance(value, (str, bytes, int, float)) else b""
