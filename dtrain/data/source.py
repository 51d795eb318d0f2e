"""The interfaces of a sample source.

* A *source* is a sequence of samples, numbered from 0, with the fields to read from each of them.
* Its *index* divides the samples into shards, the units that the order shuffles, and identifies the dataset: equal on
  all ranks.
* A *reader* belongs to one worker. It finds samples by number and fetches their fields *raw*, as the source stores
  them. Decoding is a separate call, so that the caller can pass the memory that a value should be written to.

Order, ranks, masks, augmentation, transfer and state belong to the loader and are the same for every source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from dtrain.data.crop import Crop
from dtrain.data.fields import Field


class Index(ABC):
    """The size and identity of a source, equal on all ranks.

    Attributes:
        counts: Samples of each shard, int64, shape ``[shards]``.
        num_samples: Samples of all shards.
        fingerprint: Hash of everything that the meaning of a sample number depends on.
        labels: Entries of ``describe`` that ``difference`` compares, and their names in its sentence.
        other_difference: The sentence of ``difference`` if only the fingerprints differ.
    """

    counts: np.ndarray
    num_samples: int
    fingerprint: str
    labels: ClassVar[Mapping[str, str]]
    other_difference: ClassVar[str]

    @abstractmethod
    def keys(self, samples: np.ndarray) -> list[str]:
        """``<shard>/<key>`` of each of these samples."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The identity of the source for a checkpoint: a few numbers and the fingerprint."""

    def difference(self, other: Mapping[str, Any]) -> str:
        """How another index's description differs from this one's, as a sentence; empty if they are equal."""
        mine = self.describe()
        if other.get("fingerprint") == mine["fingerprint"]:
            return ""
        changes = [
            f"{label} {other.get(name, 'unknown')} -> {mine[name]}"
            for name, label in self.labels.items()
            if other.get(name) != mine[name]
        ]
        return f"{', '.join(changes)}." if changes else self.other_difference


class Reader(ABC):
    """Reads samples in one worker."""

    @abstractmethod
    def find(self, epoch: int, samples: np.ndarray) -> Iterable[Any]:
        """Looks up samples, all at once; a record has at least the attribute ``key``, ``<shard>/<key>``.

        Args:
            epoch: Number of the epoch.
            samples: Sample numbers, int64, shape ``[n]``.
        """

    @abstractmethod
    def fetch(self, record: Any) -> Sequence[Any]:
        """The raw fields of a sample, in the order of the source's fields.

        Raises:
            SampleError: If a field is missing or the sample is bad.
        """

    @abstractmethod
    def decode(
        self,
        field: Field,
        raw: Any,
        /,
        out: np.ndarray | None = None,
        crop: Callable[[int, int], Crop] | None = None,
        at: float = 0.5,
    ) -> Any:
        """The value of a raw field.

        Args:
            field: The field.
            raw: The result of ``fetch`` for it.
            out: uint8, ``[height, width, 3]``: where an image may be written if it has that shape.
            crop: ``crop(height, width)`` of an image, in place of the field's own.
            at: Which part of a recording is taken, from 0 to 1; 0.5: the middle.

        Raises:
            SampleError: If the bytes do not fit the field.
        """

    @abstractmethod
    def place(self, record: Any) -> dict[str, Any]:
        """Where a sample is stored, for the log of bad samples: ``shard`` and ``offset``."""

    def check(self, record: Any) -> None:
        """Checks that the sample's file is still the indexed one; called before a sample counts as bad.

        Raises:
            ShardChanged: If the file changed.
        """
        return

    def expect(self, ahead: Callable[[int], np.ndarray], at_once: int | None = None) -> None:
        """Called from time to time, so that the reader can prefetch.

        Args:
            ahead: ``ahead(n)`` returns up to ``n`` shards that are read now and next, roughly in that order, int64,
                shape ``[n]``; a shard may occur twice.
            at_once: From how many shards samples are read in turn; None if that is unknown.
        """
        return

    def close(self) -> None:
        """Closes files."""
        return


class Source(ABC):
    """A sequence of samples; pickled and sent to the workers, each of which opens a reader.

    Attributes:
        fields: The fields to read from each sample.
        index: How many samples there are, and the identity of the dataset.
    """

    fields: tuple[Field, ...]
    index: Index

    @abstractmethod
    def open(self, seed: int) -> Reader:
        """A reader; ``seed`` is for random numbers that the source itself draws."""

    @abstractmethod
    def summary(self) -> str:
        """How much data there is, for the banner."""
