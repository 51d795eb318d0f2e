"""Rows of tokens for ``pack text``, cut from a stream.

* The *stream* of a split is the tokens of its documents, one after the other, each followed by the end-of-text token. It is
  stored in several *parts*, files that different processes wrote.
* A *row* is ``length + 1`` tokens: ``length`` inputs ``row[:-1]`` and ``length`` targets ``row[1:]``.
* *Cut* rows are consecutive: the first token of a row is the last token of the row before, and every token of the stream but
  the first is a target once. The tokens after the last complete row are dropped.
* Parts and rows are raw little-endian numbers, which a field with a ``dtype`` reads (``dtrain.data.fields.Field``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class TokenStream:
    """The tokens of a split.

    Attributes:
        parts: The files.
        sizes: Tokens in each part.
        dtype: Of the tokens in the parts and in rows.
    """

    parts: Sequence[Path]
    sizes: Sequence[int]
    dtype: str

    @staticmethod
    def of(parts: Sequence[Path], dtype: str) -> TokenStream:
        """The stream in these files."""
        itemsize = np.dtype(dtype).itemsize
        return TokenStream(parts, [path.stat().st_size // itemsize for path in parts], dtype)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return sum(self.sizes)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop``, shape ``[stop - start]``, little-endian."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        arrays, begin = [], 0
        for path, size in zip(self.parts, self.sizes, strict=True):
            first, last = max(start - begin, 0), min(stop - begin, size)
            if first < last:
                arrays.append(np.fromfile(path, dtype, last - first, offset=first * dtype.itemsize))
            begin += size
        return np.concatenate(arrays)


@dataclass(frozen=True)
class CutRows:
    """The complete rows of a stream.

    Attributes:
        stream: The stream.
        length: Targets of a row.
    """

    stream: TokenStream
    length: int

    @property
    def count(self) -> int:
        """Number of complete rows."""
        return max(self.stream.tokens - 1, 0) // self.length

    def read(self, start: int, stop: int) -> np.ndarray:
        """Rows ``start`` to ``stop``, shape ``[stop - start, length + 1]``, little-endian; a view, read only."""
        tokens = self.stream.read(start * self.length, stop * self.length + 1)
        return np.lib.stride_tricks.sliding_window_view(tokens, self.length + 1)[:: self.length]
