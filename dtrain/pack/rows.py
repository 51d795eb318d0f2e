"""Rows of tokens for ``pack text``: a stream cut at equal distances, or whole documents fitted into rows.

* The *stream* of a split is the tokens of its documents, one after the other, each followed by the end-of-text token. It is
  stored in several *parts*, files that different processes wrote.
* A *row* is ``length + 1`` tokens: ``length`` inputs ``row[:-1]`` and ``length`` targets ``row[1:]``.
* *Cut* rows are consecutive: the first token of a row is the last token of the row before, and every token of the stream but
  the first is a target once. The tokens after the last complete row are dropped.
* *Best-fit* rows hold whole documents and, at their end, padding. Every token of the stream is a target once: a row begins with
  the token before its first document, which is the end of text. A document longer than a row is cut; its pieces of ``length``
  tokens fill separate rows, which begin with the token before the piece, and the last piece is fitted like a document.
* Best-fit rows are laid out one *window* after the other, a few parts each: so memory does not grow with the size of the
  stream, and several processes work at once. The *layout* of a window says which pieces of the stream are in which row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from dtrain.console import OnProgress
from dtrain.pack.command import permutation

# A window holds enough documents to fill nearly every row, and its tokens fit into the memory of every process.
_WINDOW_TOKENS = 1 << 25
_READ_TOKENS = 1 << 23
_BLOCK_ROWS = 256


class SplitRows(Protocol):
    """The rows of a split."""

    @property
    def count(self) -> int:
        """Number of rows."""

    def read(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """Rows ``start`` to ``stop`` in blocks, little-endian, shape ``[rows, length + 1]`` each."""

    def waste(self, end_of_text: int | None) -> str:
        """What the rows lose, for the user."""


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
    def from_parts(parts: Sequence[Path], dtype: str) -> TokenStream:
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
        arrays, begin = [np.empty(0, dtype)], 0
        for path, size in zip(self.parts, self.sizes, strict=True):
            first, last = max(start - begin, 0), min(stop - begin, size)
            if first < last:
                arrays.append(np.fromfile(path, dtype, last - first, offset=first * dtype.itemsize))
            begin += size
        return np.concatenate(arrays)

    def bounds(self) -> np.ndarray:
        """First token of each part, and the end, int64, shape ``[parts + 1]``."""
        return np.cumsum([0, *self.sizes], dtype=np.int64)


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

    def read(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """See ``SplitRows.read``."""
        if start == stop:
            return
        tokens = self.stream.read(start * self.length, stop * self.length + 1)
        rows = np.lib.stride_tricks.sliding_window_view(tokens, self.length + 1)[:: self.length]
        for first in range(0, len(rows), _BLOCK_ROWS):
            yield rows[first : first + _BLOCK_ROWS]

    def waste(self, end_of_text: int | None) -> str:
        """See ``SplitRows.waste``."""
        unused = f"unused tokens: {self.stream.tokens - 1 - self.count * self.length:,}"
        if end_of_text is None:
            return unused
        documents = cut = begin = 0
        for first, last in pairwise(self.stream.bounds().tolist()):
            ends = first + 1 + np.flatnonzero(self.stream.read(first, last) == end_of_text)
            if not len(ends):
                continue
            begins = np.concatenate([[begin], ends[:-1]])
            # Row r has the targets r * length + 1 to (r + 1) * length.
            rows = (np.maximum(begins, 1) - 1) // self.length, (np.maximum(ends, 2) - 2) // self.length
            documents, cut, begin = documents + len(ends), cut + int((rows[0] != rows[1]).sum()), int(ends[-1])
        return f"{unused}, documents cut: {_share(cut, documents)}"


@dataclass(frozen=True)
class BestFitRows:
    """Rows of whole documents; made by ``from_stream`` from layouts that ``layout_jobs`` wrote.

    Attributes:
        stream: The stream; documents do not continue from one part into the next.
        length: Targets of a row.
        padding: The token after the last document of a row.
        end_of_text: The token before the first document of the stream.
        layouts: The file of each window.
        begins: First row of each window, and the number of rows, int64, shape ``[windows + 1]``.
        documents: Number of documents.
        cut: Number of documents that are longer than a row.
    """

    stream: TokenStream
    length: int
    padding: int
    end_of_text: int
    layouts: Sequence[Path]
    begins: np.ndarray
    documents: int
    cut: int

    @staticmethod
    def from_stream(
        stream: TokenStream, length: int, padding: int, end_of_text: int, layouts: Sequence[Path]
    ) -> BestFitRows:
        """The rows that these layouts describe."""
        rows, documents, cut = [0], 0, 0
        for path in layouts:
            with np.load(path) as layout:
                rows.append(len(layout["first"]) - 1)
                documents, cut = documents + int(layout["documents"]), cut + int(layout["cut"])
        return BestFitRows(
            stream, length, padding, end_of_text, layouts, np.cumsum(rows, dtype=np.int64), documents, cut
        )

    @property
    def count(self) -> int:
        """Number of rows."""
        return int(self.begins[-1])

    def read(self, start: int, stop: int) -> Iterator[np.ndarray]:
        """See ``SplitRows.read``."""
        itemsize = np.dtype(self.stream.dtype).itemsize
        padding = np.full(self.length, self.padding, np.dtype(self.stream.dtype).newbyteorder("<")).tobytes()
        for path, (begin, end) in zip(self.layouts, pairwise(self.begins.tolist()), strict=True):
            if begin == end or begin >= stop or end <= start:
                continue
            with np.load(path) as layout:
                first, starts, sizes = layout["first"], layout["starts"], layout["sizes"]
            base = int(starts.min())
            tokens = self.stream.read(base - 1 if base else 0, int((starts + sizes).max()))
            if not base:
                tokens = np.concatenate([np.array([self.end_of_text], tokens.dtype), tokens])
            content = tokens.view(np.uint8).data
            spans = [*zip(((starts - base + 1) * itemsize).tolist(), (sizes * itemsize).tolist(), strict=True)]
            rows = range(max(start - begin, 0), min(stop, end) - begin)
            for number in range(0, len(rows), _BLOCK_ROWS):
                content_of_block: list[bytes | memoryview] = []
                for row in rows[number : number + _BLOCK_ROWS]:
                    pieces = spans[first[row] : first[row + 1]]
                    at = pieces[0][0]
                    content_of_block.append(content[at - itemsize : at])
                    content_of_block += [content[at : at + size] for at, size in pieces]
                    content_of_block.append(padding[sum(size for _, size in pieces) :])
                yield np.frombuffer(b"".join(content_of_block), tokens.dtype).reshape(-1, self.length + 1)

    def waste(self, end_of_text: int | None) -> str:
        """See ``SplitRows.waste``."""
        targets = self.count * self.length
        padding = f"padding: {(targets - self.stream.tokens) / targets:.2%} of the targets"
        return f"{padding}, documents cut: {_share(self.cut, self.documents)}"


def layout_jobs(
    stream: TokenStream, name: str, length: int, end_of_text: int, seed: int
) -> dict[str, Callable[[BinaryIO, OnProgress], None]]:
    """Name of the layout file of each window of a stream, and the job that writes it.

    Args:
        stream: The stream; no document continues from one part into the next.
        name: First part of the names.
        length: Targets of a row.
        end_of_text: The last token of every document.
        seed: Determines the order of the rows in a window.
    """
    bounds = stream.bounds()
    windows, first = [], 0
    for part in range(1, len(bounds)):
        if part == len(bounds) - 1 or bounds[part + 1] - bounds[first] > _WINDOW_TOKENS:
            windows.append(bounds[first : part + 1])
            first = part
    return {
        f"{name}-{number:06d}": partial(_write_layout, stream, window, length, end_of_text, [seed, number])
        for number, window in enumerate(windows)
    }


def _write_layout(
    stream: TokenStream,
    bounds: np.ndarray,
    length: int,
    end_of_text: int,
    seed: list[int],
    file: BinaryIO,
    on_progress: OnProgress,
) -> None:
    """Lays out the documents of the parts within ``bounds``.

    Writes ``first``, the first piece of each row and the number of pieces; ``starts`` and ``sizes`` of the pieces in the
    stream; and the numbers of documents and of documents longer than a row.
    """
    all_ends = [bounds[:1]]
    stop = int(bounds[-1])
    for begin in range(int(bounds[0]), stop, _READ_TOKENS):
        end = min(begin + _READ_TOKENS, stop)
        all_ends.append(begin + 1 + np.flatnonzero(stream.read(begin, end) == end_of_text))
        on_progress(end - begin)
    ends = np.concatenate(all_ends)
    starts, sizes = ends[:-1], np.diff(ends)
    documents, cut = len(sizes), int((sizes > length).sum())
    # Of a long document, all pieces but the last have `length` tokens.
    pieces = np.maximum(-(-sizes // length), 1)
    number = np.arange(pieces.sum()) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts, ends = np.repeat(starts, pieces) + number * length, np.repeat(starts + sizes, pieces)
    sizes = np.minimum(ends - starts, length)
    rows, count = best_fit(sizes, length)
    # In random order: best fit puts long documents first, and a batch should have documents of all sizes.
    rows = permutation(count, seed)[rows]
    order = np.argsort(rows, kind="stable")
    first = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=count))])
    np.savez(file, first=first, starts=starts[order], sizes=sizes[order], documents=documents, cut=cut)


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, int]:
    """Best-fit decreasing: the largest piece first, each into the fullest row that has room for it.

    Of many pieces it needs at most 11/9 of the rows of the best solution (Johnson, "Near-optimal bin packing algorithms",
    1973), and of documents usually hardly more. As Ding et al., "Fewer Truncations Improve Language Modeling", 2024.

    Args:
        sizes: Tokens of each piece, int64, shape ``[pieces]``, each in ``[1, capacity]``.
        capacity: Tokens of a row.

    Returns:
        The row of each piece, int64, shape ``[pieces]``, and the number of rows.
    """
    row_of = np.empty(len(sizes), np.int64)
    order = np.argsort(-sizes, kind="stable")
    with_room: list[list[int]] = [[] for _ in range(capacity + 1)]  # rows, by the room that is left in them
    rooms = 0  # bit n is set if a row with room n exists
    rows, chosen = 0, []
    for size in sizes[order].tolist():
        fitting = rooms >> size
        if fitting:
            room = size + (fitting & -fitting).bit_length() - 1
            row = with_room[room].pop()
            if not with_room[room]:
                rooms ^= 1 << room
        else:
            room, row = capacity, rows
            rows += 1
        chosen.append(row)
        left = room - size
        if left:
            with_room[left].append(row)
            rooms |= 1 << left
    row_of[order] = chosen
    return row_of, rows


def _share(part: int, whole: int) -> str:
    return f"{part:,} of {whole:,} ({part / max(whole, 1):.1%})"
