"""Text as rows of tokens for a language model.

* A *stream* is the tokens of a split, document after document, each followed by the tokenizer's end-of-text token.
* A *part* is a file with a piece of a stream; parts are written by several processes, and follow each other.
* A stream is cut into *rows* of ``length + 1`` tokens, of which each begins with the last token of the one before: a row
  gives ``length`` inputs, ``row[:-1]``, and as many targets, ``row[1:]``, and over all rows every token but the first is
  predicted once. What is left over at the end is too short for a row.
* Parts and rows are raw numbers, little-endian, as a field with a ``dtype`` reads them (``dtrain.data.fields.Field``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dtrain.data.writer import Sample
from dtrain.packing.documents import Piece, read
from dtrain.packing.tokenizers import Tokenizer
from dtrain.packing.workers import Tick

#: The extension of a row in a shard.
EXTENSION = "tok"
_PART = 8 << 20


@dataclass(frozen=True)
class Encode:
    """Writes one part of a stream.

    Args:
        tokenizer: The vocabulary.
        pieces: What to encode, in order.
    """

    tokenizer: Tokenizer
    pieces: Sequence[Piece]

    def __call__(self, path: Path, tick: Tick) -> None:
        """Writes it, little-endian; ``tick`` is told the bytes that were read.

        Raises:
            OSError: If a file cannot be read, or the disk is full.
        """
        end = np.array([self.tokenizer.end_of_text], self.tokenizer.dtype)
        with open(path, "wb") as out:
            for piece in self.pieces:
                tokens = self.tokenizer.encode(read(piece))
                for array in (tokens, end) if piece.ends else (tokens,):
                    out.write(array.astype(array.dtype.newbyteorder("<")).tobytes())
                tick(piece.stop - piece.start)


def parts(split: str, pieces: Sequence[Piece], tokenizer: Tokenizer) -> dict[str, Callable[[Path, Tick], None]]:
    """The parts of a stream: file name to the job that writes it."""
    jobs: dict[str, Callable[[Path, Tick], None]] = {}
    part: list[Piece] = []
    size = 0
    for piece in pieces:
        part.append(piece)
        size += piece.stop - piece.start
        if size >= _PART:
            jobs[f"tokens-{split}-{len(jobs):06d}"] = Encode(tokenizer, part)
            part, size = [], 0
    if part:
        jobs[f"tokens-{split}-{len(jobs):06d}"] = Encode(tokenizer, part)
    return jobs


@dataclass(frozen=True)
class Stream:
    """The tokens of a split.

    Args:
        parts: Their files, in order.
        sizes: Tokens in each.
        dtype: Of a token.
        length: Tokens that a row predicts.
    """

    parts: Sequence[Path]
    sizes: Sequence[int]
    dtype: str
    length: int

    @staticmethod
    def of(parts: Sequence[Path], dtype: str, length: int) -> Stream:
        """The stream of these files."""
        itemsize = np.dtype(dtype).itemsize
        return Stream(parts, [path.stat().st_size // itemsize for path in parts], dtype, length)

    @property
    def tokens(self) -> int:
        """How many there are."""
        return sum(self.sizes)

    @property
    def rows(self) -> int:
        """How many rows they make."""
        return max(self.tokens - 1, 0) // self.length

    def read(self, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop``, ``[stop - start]``, little-endian."""
        dtype = np.dtype(self.dtype).newbyteorder("<")
        pieces, begin = [], 0
        for path, size in zip(self.parts, self.sizes, strict=True):
            first, last = max(start - begin, 0), min(stop - begin, size)
            if first < last:
                pieces.append(np.fromfile(path, dtype, last - first, offset=first * dtype.itemsize))
            begin += size
        return np.concatenate(pieces)


@dataclass(frozen=True)
class TokenRows:
    """The samples of one shard: rows ``start`` to ``stop`` of a stream."""

    stream: Stream
    start: int
    stop: int

    def __call__(self, on_bad: Callable[[Path, str], None]) -> Iterator[Sample]:
        """The samples; their keys are the numbers of the rows."""
        length = self.stream.length
        tokens = self.stream.read(self.start * length, self.stop * length + 1)
        for number in range(self.start, self.stop):
            first = (number - self.start) * length
            yield {"__key__": f"{number:09d}", EXTENSION: tokens[first : first + length + 1].tobytes()}
