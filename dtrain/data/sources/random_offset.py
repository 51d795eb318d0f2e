"""Rows of tokens that begin anywhere in a shard's text (``data.random_offset``), instead of where they were cut.

* The *stream* of a shard is its rows, joined: as ``dtrain pack text --fit cut`` writes them, the first token of a row is the
  last token of the row before, so R rows of N + 1 tokens are a stream of R * N + 1 tokens.
* Sample *n* of an epoch is N + 1 tokens of the stream of its shard. Where they begin is drawn uniformly for (seed, epoch, *n*),
  so it depends neither on ranks nor on workers. Numbers, order and epochs of samples are the same as for the stored rows.

This is how nanoGPT draws its batches, but an epoch has as many samples as there are rows, and each shard provides its share.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.data.fields.field import SampleError
from dtrain.data.order.randomness import hash64
from dtrain.data.sources.shard_source import MAX_MEMBER_BYTES, ShardSampleReader, ShardSource
from dtrain.files import read_json

# Other uses of (seed, epoch, sample) have 4 to 6.
_OFFSET = 7
_DATASET = "dataset.json"  # written by dtrain pack text
_CHECKED_SHARDS = 8
_CHECKED_ROWS = 16
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class RandomOffsetSource(ShardSource):
    """Shards of rows that were cut from a stream of tokens; made by ``from_shards``."""

    @classmethod
    def from_shards(cls, source: ShardSource) -> RandomOffsetSource:
        """The same shards, with rows that begin anywhere.

        Raises:
            ValueError: If the samples are not rows of tokens, or the rows of a shard are not consecutive.
        """
        fields = ", ".join(f"{field.name} ({field.dtype or field.kind})" for field in source.fields)
        tokens = source.fields[0]
        if len(source.fields) != 1 or tokens.role != "id" or tokens.dtype is None or (tokens.length or 0) < 2:
            raise ValueError(
                f"data.random_offset=true: the samples have the fields {fields}, want only rows of tokens, such as {{tok: "
                "{name: tokens, dtype: uint16, length: 1025}}. Remove the other fields, or set data.random_offset=false."
            )
        result = cls(source.index, source.fields, source.waiting)
        result._check_consecutive(source)
        return result

    def open(self, seed: int) -> RandomOffsetReader:
        """A reader; ``seed`` determines where rows begin."""
        return RandomOffsetReader(self, seed)

    def _check_consecutive(self, source: ShardSource) -> None:
        description = Path(self.index.shards[0]).parent / _DATASET
        stored: object = None
        with suppress(ValueError, OSError):  # written by a different tool, or at a URL
            stored = read_json(description)
        if isinstance(stored, dict) and stored.get("fit") == "best":
            raise ValueError(
                f"data.random_offset=true: {description} says that the rows hold whole documents (--fit best), so a row does "
                "not continue the one before. Pack the text with --fit cut, or set data.random_offset=false."
            )
        long_enough = np.flatnonzero(self.index.counts >= 2)
        if not len(long_enough):
            raise ValueError(
                f"data.random_offset=true: none of {len(self.index.counts)} shards has two rows, so there is nothing to draw. "
                "Pack the text into fewer shards, or set data.random_offset=false."
            )
        spread = np.linspace(0, len(long_enough) - 1, min(len(long_enough), _CHECKED_SHARDS)).astype(np.int64)
        reader = source.open(0)
        for shard in long_enough[spread].tolist():
            first = int(self.index.starts[shard])
            rows = range(first, first + min(int(self.index.counts[shard]), _CHECKED_ROWS))
            last: int | None = None
            for row in rows:
                try:
                    tokens = reader.decode(self.fields[0], reader.fetch(0, row)[0]).tolist()
                except SampleError:  # counted as a bad sample when it is drawn
                    last = None
                    continue
                if last not in (None, tokens[0]):
                    raise ValueError(
                        f"data.random_offset=true: row {self.index.keys([row])[0]} does not begin with the last token of the "
                        "row before, so the rows are not consecutive pieces of a text. Pack it with `dtrain pack "
                        "text --fit cut`, or set data.random_offset=false."
                    )
                last = tokens[-1]
        reader.close()


class RandomOffsetReader(ShardSampleReader):
    """The reader of a ``RandomOffsetSource``."""

    def __init__(self, source: RandomOffsetSource, seed: int) -> None:
        super().__init__(source)
        tokens = source.fields[0]
        assert tokens.length is not None
        self._seed = seed
        self._targets = tokens.length - 1
        self._itemsize = np.dtype(tokens.dtype).itemsize
        self._row_bytes = tokens.length * self._itemsize

    def fetch(self, epoch: int, sample: int) -> list[memoryview]:
        """The bytes of the row, from one or two stored rows."""
        (row,), (skip,) = (values.tolist() for values in self._draw(epoch, np.array([sample])))
        parts = []
        for number in (row, row + 1) if skip else (row,):
            try:
                (part,) = super().fetch(epoch, number)
                if len(part) != self._row_bytes:
                    raise SampleError(f"has {len(part)} bytes, want {self._row_bytes}")
            except SampleError as error:
                raise SampleError(
                    f"its tokens are drawn from {self._index.keys([number])[0]}, which {error}"
                ) from error
            parts.append(part)
        if not skip:
            return parts
        size, begin = self._itemsize, skip * self._itemsize
        return [memoryview(b"".join((parts[0][begin:], parts[1][size : begin + size])))]

    def fetch_all(self, epoch: int, samples: np.ndarray) -> Iterator[tuple[Sequence[int], list[list[Any]]]]:
        """The same for many samples; what cannot be read at once is left to ``fetch``."""
        rows, skips = self._draw(epoch, samples)
        following = rows + (skips > 0)
        offsets, sizes = self._index.offsets[:, 0], self._index.sizes[:, 0]
        # From the first token in the row to the last one in the row that follows it, with the headers between the two.
        starts = offsets[rows] + skips * self._itemsize
        ends = offsets[following] + np.where(skips > 0, (skips + 1) * self._itemsize, self._row_bytes)
        usable = (sizes[rows] == self._row_bytes) & (sizes[following] == self._row_bytes)
        usable &= (
            (offsets[rows] >= 0)
            & (ends > starts)
            & (ends - starts <= min(4 * self._row_bytes + 8192, MAX_MEMBER_BYTES))
        )
        order = np.flatnonzero(usable)
        order = order[np.argsort(rows[order], kind="stable")]
        shards = self._index.shards_of(samples)
        for first in range(0, len(order), _ROWS_AT_ONCE):
            block = order[first : first + _ROWS_AT_ONCE]
            spans = shards[block].tolist(), starts[block].tolist(), (ends - starts)[block].tolist()
            begins = (offsets[following] - starts)[block].tolist()
            positions, raws = [], []
            for position, data, begin, skip in zip(
                block.tolist(), self._reader.read_all(*spans), begins, skips[block].tolist(), strict=True
            ):
                if not data:
                    continue
                positions.append(position)
                head = data[: self._row_bytes - skip * self._itemsize]
                raws.append(b"".join((head, data[begin + self._itemsize :])) if skip else data)
            yield positions, [raws]

    def _draw(self, epoch: int, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The stored row in which each sample begins, and how many of its tokens are skipped; int64, ``[n]`` each."""
        index = self._index
        shards = index.shards_of(samples)
        places = (index.counts[shards] - 1) * self._targets + 1
        drawn = (hash64(self._seed, epoch, _OFFSET, samples) % places.astype(np.uint64)).astype(np.int64)
        return index.starts[shards] + drawn // self._targets, drawn % self._targets
