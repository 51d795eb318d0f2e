"""A source of which some samples are bad for a reason other than their bytes: ``masked``.

* A sample may have been unreadable for a moment in a run, such as during a failure of a network disk, and a masked row changes
  the step. To recompute the step, the sample has to be masked again, although it can be read now (``as_recorded``).
* A sample that killed two loader workers must not be read again (``worker_deaths``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np
from torch import Tensor

from dtrain.data.fields.field import SampleError
from dtrain.data.sources.mixture import MixtureSource
from dtrain.data.sources.source import OpenReaders, Reader, Source

#: Epoch (of the source), or None for every epoch, to the numbers of the samples to mask and the reason for each.
Bad = Mapping[int | None, Mapping[int, str]]


def masked(source: Source, bad: Bad) -> Source:
    """The source with these samples bad; the source itself without any. In a mixture, samples are counted over all sources."""
    if not any(bad.values()):
        return source
    if not isinstance(source, MixtureSource):
        return _MaskedSource(source, bad)
    firsts = source.index.first_samples.tolist()
    parts = []
    for one, first, end in zip(source.sources, firsts, firsts[1:], strict=False):
        own = {
            epoch: {sample - first: reason for sample, reason in reasons.items() if first <= sample < end}
            for epoch, reasons in bad.items()
        }
        parts.append(masked(one, own))
    mixture = copy(source)
    mixture.sources = tuple(parts)
    return mixture


def as_recorded(source: Source, bad: Collection[tuple[int, str]]) -> Source:
    """The source with the bad samples of an earlier run.

    Args:
        source: The source.
        bad: Epoch (of the source) and key of each sample to mask.
    """
    found: dict[int | None, dict[int, str]] = {}
    for epoch, key in bad:
        for sample in source.index.find(key).tolist():
            found.setdefault(epoch, {})[sample] = "could not be read in the run"
    return masked(source, found)


class _MaskedSource(Source):
    """A source with the same samples, of which some are bad."""

    def __init__(self, source: Source, bad: Bad) -> None:
        self.fields, self.index = source.fields, source.index
        self._source, self._bad = source, bad

    def open(self, seed: int) -> Reader:
        return _Reader(self._source.open(seed), self._bad)

    def summary(self) -> str:
        return self._source.summary()


class _Reader(Reader):
    """A reader that raises ``SampleError`` for these samples."""

    def __init__(self, reader: Reader, bad: Bad) -> None:
        self._reader, self._bad = reader, bad

    def fetch(self, epoch: int, sample: int) -> Sequence[Any]:
        if sample in (reasons := self._reasons(epoch)):
            raise SampleError(reasons[sample])
        return self._reader.fetch(epoch, sample)

    def fetch_all(self, epoch: int, samples: np.ndarray) -> Iterator[tuple[Sequence[int], Sequence[Sequence[Any]]]]:
        good = np.flatnonzero(~np.isin(samples, [*self._reasons(epoch)]))
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

    def tell(self, reads: Any) -> None:
        self._reader.tell(reads)

    def close(self) -> None:
        self._reader.close()

    def _reasons(self, epoch: int) -> dict[int, str]:
        return {**self._bad.get(None, {}), **self._bad.get(epoch, {})}
