"""A source in which the same samples are bad as in an earlier run: ``mask_as_recorded``.

A sample may be unreadable for a moment, such as during a failure of a network disk, and a masked row changes the step. To
recompute the step, the sample has to be masked again, although it can be read now.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from dtrain.data.fields.field import SampleError
from dtrain.data.loading.loader import ShardLoader
from dtrain.data.sources.mixture import MixtureSource
from dtrain.data.sources.source import OpenReaders, Reader, Source


def mask_as_recorded(loader: ShardLoader, bad: Collection[tuple[int, str]]) -> None:
    """Makes a loader mask samples; call it before the first batch.

    Args:
        loader: The loader.
        bad: Epoch (of the source) and key of each sample to mask.
    """
    if not bad:
        return
    source = loader.source
    if not isinstance(source, MixtureSource):
        loader.source = _AsRecorded(source, _numbers(source, bad))
        return
    parts = []
    for name, one in zip(source.names, source.sources, strict=True):
        own = [(epoch, key.removeprefix(f"{name}/")) for epoch, key in bad if key.startswith(f"{name}/")]
        parts.append(_AsRecorded(one, _numbers(one, own)))
    source.sources = tuple(parts)


def _numbers(source: Source, bad: Collection[tuple[int, str]]) -> dict[int, np.ndarray]:
    """Epoch to the numbers of its bad samples."""
    found: dict[int, list[int]] = {}
    for epoch, key in bad:
        found.setdefault(epoch, []).extend(source.index.find(key).tolist())
    return {epoch: np.unique(numbers) for epoch, numbers in found.items()}


class _AsRecorded(Source):
    """A source with the same samples, of which some are bad in some epochs."""

    def __init__(self, source: Source, bad: dict[int, np.ndarray]) -> None:
        self.fields, self.index = source.fields, source.index
        self._source, self._bad = source, bad

    def open(self, seed: int) -> Reader:
        return _Reader(self._source.open(seed), self._bad)

    def summary(self) -> str:
        return self._source.summary()


class _Reader(Reader):
    """A reader that raises ``SampleError`` for these samples."""

    def __init__(self, reader: Reader, bad: dict[int, np.ndarray]) -> None:
        self._reader, self._bad = reader, bad

    def fetch(self, epoch: int, sample: int) -> Sequence[Any]:
        if self._is_bad(epoch, np.array([sample]))[0]:
            raise SampleError("could not be read in the run")
        return self._reader.fetch(epoch, sample)

    def fetch_all(self, epoch: int, samples: np.ndarray) -> Iterator[tuple[Sequence[int], Sequence[Sequence[Any]]]]:
        good = np.flatnonzero(~self._is_bad(epoch, samples))
        for positions, raws in self._reader.fetch_all(epoch, samples[good]):
            yield good[list(positions)].tolist(), raws

    def columns(self) -> Sequence[np.ndarray | Tensor] | None:
        return None  # whole columns have the bad samples too

    def decode(self, *arguments: Any, **options: Any) -> Any:
        return self._reader.decode(*arguments, **options)

    def place(self, sample: int) -> dict[str, Any]:
        return self._reader.place(sample)

    def check(self, sample: int) -> None:
        self._reader.check(sample)

    def expect(self, *arguments: Any) -> None:
        self._reader.expect(*arguments)

    def share(self, readers: OpenReaders) -> None:
        self._reader.share(readers)

    def close(self) -> None:
        self._reader.close()

    def _is_bad(self, epoch: int, samples: np.ndarray) -> np.ndarray:
        return np.isin(samples, self._bad.get(epoch, ()))
