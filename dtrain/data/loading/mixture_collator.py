"""Micro-batches of several sources: the rows of each are built by its own ``Collator``, and put together.

* Decoding, augmentation and mixup are therefore the same as in a loader over that source alone.
* A field that some sources lack is *masked* (``data.missing=mask``): its rows are zeros (or empty), and the batch has a mask,
  bool, shape ``[rows]``, under the name ``has_<field>``.
* A batch has the field ``source``, the number of the source of each row, int64, shape ``[rows]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtrain.data.augment import Augment
from dtrain.data.fields.field import DataError
from dtrain.data.loading.batch import Batch, Transfer
from dtrain.data.loading.collate import SPARE, Collator
from dtrain.data.loading.field_buffer import empty_column
from dtrain.data.mixing import Mix
from dtrain.data.sources.mixture import SOURCE, MixtureSource
from dtrain.data.sources.source import OpenReaders, Source


def collator_of(
    source: Source, transfer: Transfer, augment: Augment | None, seed: int, mix: Mix | None
) -> Collator | MixtureCollator:
    """What builds the micro-batches of a source in one worker; the arguments are the same as for ``Collator``."""
    if not isinstance(source, MixtureSource):
        return Collator(source, transfer, augment, seed, mix)
    of_each = zip(source.names, source.sources, source.seeds(seed), source.index.first_samples.tolist(), strict=False)
    collators = [
        Collator(one, transfer, source.augment.get(name, augment), own, mix, first) for name, one, own, first in of_each
    ]
    return MixtureCollator(source, collators)


class MixtureCollator:
    """Builds micro-batches of several sources in one worker, with the methods of ``Collator``.

    Args:
        source: The sources.
        collators: The collator of each.
    """

    def __init__(self, source: MixtureSource, collators: Sequence[Collator]) -> None:
        self._source = source
        self._index = source.index
        self._collators = collators
        self._examples: dict[str, Tensor | list[Any]] = {}
        self._first_shards = np.cumsum([0, *(len(index.counts) for index in self._index.indexes)])
        readers = OpenReaders(len(collators))
        for collator in collators:
            collator.share(readers)

    def build(
        self,
        epoch: int,
        samples: np.ndarray,
        spare: Callable[[], Iterable[int]],
        partners: np.ndarray | None = None,
    ) -> Batch:
        """One micro-batch; as ``Collator.build``, but samples and partners come from ``MixtureOrder.locate``.

        Args:
            epoch: Not used: each sample has the epoch of its source.
            samples: ``epoch * total + sample`` of each row, int64, shape ``[rows]``; -1 where the row is masked.
            spare: Returns samples, of which the first gives the shapes if all rows are masked.
            partners: The same for the sample that each row may be mixed with; None: no mixing.
        """
        filled = np.flatnonzero(samples >= 0)
        if not filled.size:
            one = np.array([next(iter(spare()))])
            parts = list(self._parts(np.zeros(1, np.int64), one, None if partners is None else one))
        else:
            parts = list(self._parts(filled, samples[filled], None if partners is None else partners[filled]))
        return self._joined(parts, len(samples), masked=not filled.size)

    def expect(self, ahead: Callable[[int], np.ndarray], at_once: int | None = None) -> None:
        """See ``Reader.expect``; ``ahead`` counts shards over all sources."""
        ahead = functools.cache(ahead)  # all sources ask for the same
        for number, collator in enumerate(self._collators):
            first, end = self._first_shards[number : number + 2].tolist()

            def of_source(most: int, first: int = first, end: int = end) -> np.ndarray:
                shards = ahead(most * len(self._collators))
                return shards[(shards >= first) & (shards < end)][:most] - first

            collator.expect(of_source, at_once)

    def close(self) -> None:
        """Closes all sources."""
        for collator in self._collators:
            collator.close()

    def _parts(
        self, rows: np.ndarray, samples: np.ndarray, partners: np.ndarray | None
    ) -> Iterator[tuple[int, np.ndarray, Batch]]:
        """For each epoch of each source: the number of the source, its rows, and a batch of them."""
        epochs, sample = np.divmod(samples, self._index.num_samples)
        sources, own = self._index.split(sample)
        if partners is not None:  # of the same source and epoch
            partners = self._index.split(partners % self._index.num_samples)[1]
        for number in np.unique(sources).tolist():
            of_source = sources == number
            for epoch in np.unique(epochs[of_source]).tolist():
                here = np.flatnonzero(of_source & (epochs == epoch))
                of_rows = None if partners is None else partners[here]
                yield number, rows[here], self._collators[number].build(epoch, own[here], self._spare(number), of_rows)

    def _spare(self, number: int) -> Callable[[], Iterable[int]]:
        return lambda: self._index.indexes[number].first_present(SPARE).tolist()

    def _joined(self, parts: list[tuple[int, np.ndarray, Batch]], rows: int, *, masked: bool) -> Batch:
        """The rows of all parts in one batch; a row without a sample repeats a valid one."""
        keys = [""] * rows
        bad: list[dict[str, Any]] = []
        origin = np.full(rows, -1, np.int64)  # which part a row is from
        for number, (source, at, batch) in enumerate(parts):
            origin[at] = number
            name = self._source.names[source]
            if not masked:  # the sample that gives the shapes is counted in the micro-batch in which it has a row
                bad += [record | {"key": f"{name}/{record['key']}", "source": name} for record in batch.bad]
            for row, key in zip(at.tolist(), batch.sample_keys, strict=True):
                keys[row] = f"{name}/{key}" if key and not masked else ""
        empty = np.flatnonzero(origin < 0)
        donors = [row for row, key in enumerate(keys) if key] or np.flatnonzero(origin >= 0).tolist()
        donor = np.array([donors[turn % len(donors)] for turn in range(len(empty))], np.int64)
        data: dict[str, Any] = {}
        for name in dict.fromkeys(name for _, _, batch in parts for name in batch) | dict.fromkeys(
            name for field in self._source.fields for name in field.columns
        ):
            data[name] = self._column(name, parts, rows)
            if len(empty):
                _repeat(data[name], donor, empty)
        for name in self._source.optional:
            given = np.array([name in batch for _, _, batch in parts])[origin]
            given[empty] = given[donor]
            data[f"has_{name}"] = torch.from_numpy(given)
        sources = np.array([source for source, _, _ in parts], np.int64)[origin]
        sources[empty] = sources[donor]
        data[SOURCE] = torch.from_numpy(sources)
        return Batch(data, keys, torch.tensor([key != "" for key in keys]), bad)

    def _column(self, name: str, parts: list[tuple[int, np.ndarray, Batch]], rows: int) -> Tensor | list[Any]:
        having = [(source, at, batch[name]) for source, at, batch in parts if name in batch]
        first = having[0][2] if having else self._example(name)
        if not isinstance(first, Tensor):
            values: list[Any] = [first[0]] * rows
            if sum(len(at) for _, at, _ in having) < rows:
                with suppress(TypeError):  # a type that needs arguments
                    values = [type(first[0])()] * rows
            for source, at, column in having:
                if isinstance(column, Tensor):
                    raise self._clash(name, having[0], (source, at, column))
                for row, value in zip(at.tolist(), column, strict=True):
                    values[row] = value
            return values
        column = empty_column((rows, *first.shape[1:]), first.dtype)
        if sum(len(at) for _, at, _ in having) < rows:
            column.zero_()
        array = None
        with suppress(TypeError):  # numpy does not have every dtype, but its copies start no threads
            array = column.numpy()
        for source, at, part in having:
            if not isinstance(part, Tensor) or part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
                raise self._clash(name, having[0], (source, at, part))
            if array is None:
                column[torch.from_numpy(at)] = part
            else:
                array[at] = part.numpy()
        return column

    def _example(self, name: str) -> Tensor | list[Any]:
        """A column of a field that no sample of the micro-batch has, for its shape."""
        if name not in self._examples:
            field = next(field for field in self._source.fields if name in field.columns)
            has = [any(one.name == field.name for one in source.fields) for source in self._source.sources]
            number = has.index(True)
            first = self._index.indexes[number].first_present(1)
            self._examples[name] = self._collators[number].build(0, first, self._spare(number))[name]
        return self._examples[name]

    def _clash(self, name: str, one: tuple[int, Any, Any], other: tuple[int, Any, Any]) -> DataError:
        found = [
            f"{f'{column.dtype} {list(column.shape[1:])}' if isinstance(column, Tensor) else type(column[0]).__name__} in "
            f"{self._source.names[source]}"
            for source, _, column in (one, other)
        ]
        return DataError(
            f"field {name!r} is {found[0]} and {found[1]}, and both are in one batch. Use a size, a crop or a decoder that "
            "returns the same for both sources."
        )


def _repeat(column: Tensor | list[Any], donors: np.ndarray, rows: np.ndarray) -> None:
    """Copies row ``donors[i]`` to row ``rows[i]``."""
    if isinstance(column, Tensor):
        try:  # torch cannot index some unsigned integers
            array = column.numpy()
        except TypeError:  # numpy does not have every dtype: no bf16, for example
            column[torch.from_numpy(rows)] = column[torch.from_numpy(donors)]
        else:
            array[rows] = array[donors]
    else:
        for donor, row in zip(donors.tolist(), rows.tolist(), strict=True):
            column[row] = column[donor]
