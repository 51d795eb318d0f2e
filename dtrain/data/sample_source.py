"""Samples of a map-style data set: number *n* is ``dataset[n]``.

Random numbers that a data set draws from the generators of Python, numpy and torch are keyed by (seed, epoch, sample): an
augmentation in ``__getitem__``, such as torchvision's, is the same for any number of ranks and workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from dtrain.data.field_options import parse_fields
from dtrain.data.fields import DataError, Field, SampleError
from dtrain.data.permutation import hash64
from dtrain.data.randomness import Randomness
from dtrain.data.sample_index import SampleIndex
from dtrain.data.samples import Arrays, Generated, as_dataset
from dtrain.data.shared_generators import generators_at
from dtrain.data.source import Source
from dtrain.data.values import as_it_is, value_of

# Beside the uses of (seed, epoch) in the order and the augmentation, with which this one must not share a key.
_GENERATION = 5


@dataclass(frozen=True)
class SampleSource(Source):
    """A map-style data set and what to take from its samples.

    Args:
        dataset: ``len(dataset)`` and ``dataset[n]``, or ``Generated``.
        index: Its numbers.
        fields: What to take from each sample.
        places: Where each field is: a key of a sample that is a dict; its place in a tuple is that in ``fields``.
    """

    dataset: Any
    index: SampleIndex
    fields: tuple[Field, ...]
    places: tuple[Any, ...]

    @classmethod
    def build(
        cls,
        dataset: Any,
        fields: Mapping[Any, Mapping[str, Any]],
        *,
        name: str | None = None,
        shard_size: int | None = None,
    ) -> SampleSource:
        """A data set as a source.

        Args:
            dataset: A map-style data set, a dict or tuple of arrays, or ``Generated``. If it has a ``fingerprint``, that
                stands for its content; else only name and length do.
            fields: Key of a sample that is a dict to ``{"name": ..., "role": ..., **options}``; a sample that is a tuple
                has its values in this order. An option ``decoder`` is called with the value.
            name: First part of the samples' keys; None is the name of the data set's class.
            shard_size: See ``SampleIndex``.

        Raises:
            ValueError: If it is no such data set, it is empty, or a field is impossible.
        """
        kept = as_dataset(dataset)
        called = type(kept).__name__ if name is None else name
        content = getattr(kept, "fingerprint", "")
        index = SampleIndex(called, len(kept), shard_size, content if isinstance(content, str) else "")
        return cls(kept, index, value_fields(fields), tuple(fields))

    def open(self, seed: int) -> Samples:
        """A reader."""
        return Samples(self, seed)

    def summary(self) -> str:
        """``1,000 samples of MyDataset``."""
        return f"{self.index.num_samples:,} samples of {self.index.name}"


def value_fields(mapping: Mapping[Any, Mapping[str, Any]]) -> tuple[Field, ...]:
    """The fields of a ``fields`` mapping whose keys are not extensions of files, so that nothing is implied by them.

    Raises:
        ValueError: As ``parse_fields``.
    """
    given = {
        str(key).lower(): {**options, "decoder": options.get("decoder") or as_it_is}
        if isinstance(options, Mapping)
        else options
        for key, options in mapping.items()
    }
    fields = parse_fields(given)
    if len(fields) != len(mapping):
        raise ValueError(
            f"data.fields: of {', '.join(map(repr, mapping))} some differ in upper and lower case only. Rename one of them "
            "in the data set."
        )
    return fields


class Samples:
    """The reader of a ``SampleSource``."""

    decode = staticmethod(value_of)

    def __init__(self, source: SampleSource, seed: int) -> None:
        self._dataset = source.dataset
        self._index = source.index
        self._places = source.places
        self._seed = seed
        self._randomness = Randomness()

    def find(self, epoch: int, samples: np.ndarray) -> Iterable[_Numbered]:
        """The samples' numbers, and the keys of what they draw at random."""
        drawn_in = 0 if isinstance(self._dataset, Generated) and not self._dataset.fresh else epoch
        keys = hash64(self._seed, drawn_in, _GENERATION, samples)
        return map(_Numbered, self._index.keys(samples), samples.tolist(), keys.tolist())

    def fetch(self, record: _Numbered) -> list[Any]:
        """What the data set returns for each field.

        Raises:
            SampleError: If a field is missing, or the data set raises ``ValueError``, ``OSError`` or ``EOFError``.
            DataError: If a sample has another number of values than there are fields.
        """
        try:
            sample = self._sample(record)
        except SampleError:
            raise
        except (ValueError, OSError, EOFError) as error:
            raise SampleError(f"{type(error).__name__}: {error}") from error
        if isinstance(sample, Mapping):
            for place in self._places:
                if place not in sample:
                    raise SampleError(f"has no {place!r}, but {', '.join(map(repr, sample))}")
            return [sample[place] for place in self._places]
        values: Sequence[Any] = sample if isinstance(sample, (tuple, list)) else (sample,)
        if len(values) != len(self._places):
            raise DataError(
                f"sample {record.key!r} has {len(values)} values, data.fields names {len(self._places)}: "
                f"{', '.join(map(str, self._places))}. Name all of them, in their order."
            )
        return list(values)

    def check(self, record: _Numbered) -> None:
        """Nothing to compare a sample with."""

    def place(self, record: _Numbered) -> dict[str, Any]:
        """The data set's name, and the sample's number."""
        return {"shard": self._index.name, "offset": record.number}

    def expect(self, ahead: Callable[[int], np.ndarray]) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Nothing to let go of."""

    def _sample(self, record: _Numbered) -> Any:
        if isinstance(self._dataset, Generated):
            return self._dataset.function(record.number, self._randomness.of(record.random))
        if isinstance(self._dataset, Arrays):
            return self._dataset[record.number]
        with generators_at(record.random):
            return self._dataset[record.number]


class _Numbered(NamedTuple):
    """A sample: its number, and the key of what is drawn for it."""

    key: str
    number: int
    random: int
