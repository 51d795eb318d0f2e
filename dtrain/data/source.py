"""Where samples come from.

* A *source* is a row of samples, numbered from 0, with the fields to read from each of them.
* Its *index* cuts the row into shards, the pieces that the order shuffles, and says what identifies it: equal on all ranks.
* A *reader* belongs to one worker. It finds samples by their numbers and fetches their fields *raw*: as the source holds
  them. Making values of them is a step of its own, so that whoever builds a batch can say where a value is to go.

Order, ranks, masks, augmentation, wire and state are the loader's, and the same for every source.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from dtrain.data.crop import Crop
from dtrain.data.fields import Field


class Index(Protocol):
    """What all ranks know about a source.

    Attributes:
        counts: Samples of each shard, int64, shape ``[shards]``.
        num_samples: Samples of all shards.
        fingerprint: Stands for everything that decides which sample a number means.
    """

    counts: np.ndarray
    num_samples: int
    fingerprint: str

    def keys(self, samples: np.ndarray) -> list[str]:
        """``<shard>/<key>`` of each of these samples."""
        ...

    def describe(self) -> dict[str, Any]:
        """What identifies the source, for a checkpoint: a few numbers and the fingerprint."""
        ...

    def difference(self, other: Mapping[str, Any]) -> str:
        """How what another index described differs from this one, as a sentence; empty if it does not."""
        ...


def difference(mine: Mapping[str, Any], other: Mapping[str, Any], labels: Mapping[str, str], otherwise: str) -> str:
    """How one description of an index differs from another, as a sentence; empty if their fingerprints are equal.

    Args:
        mine: What ``describe`` gives now.
        other: What it gave before.
        labels: The entries to compare, and what they are called.
        otherwise: The sentence where only the fingerprints differ.
    """
    if other.get("fingerprint") == mine["fingerprint"]:
        return ""
    told = [
        f"{label} {other.get(name, 'unknown')} -> {mine[name]}"
        for name, label in labels.items()
        if other.get(name) != mine[name]
    ]
    return f"{', '.join(told)}." if told else otherwise


class Record(Protocol):
    """A sample that was found."""

    @property
    def key(self) -> str:
        """``<shard>/<key>``."""
        ...


class Reader(Protocol):
    """Fetches samples; used in one worker."""

    def find(self, epoch: int, samples: np.ndarray) -> Iterable[Any]:
        """The records of these samples, all looked up at once.

        Args:
            epoch: Number of the epoch that they are wanted for.
            samples: Their numbers, int64, shape ``[n]``.
        """
        ...

    def fetch(self, record: Any) -> Sequence[Any]:
        """The raw fields of a sample, in the order of the source's fields.

        Raises:
            SampleError: If it lacks one, or is bad.
        """
        ...

    def decode(
        self,
        field: Field,
        raw: Any,
        out: np.ndarray | None = None,
        crop: Callable[[int, int], Crop] | None = None,
    ) -> Any:
        """The value of a raw field.

        Args:
            field: Which one.
            raw: What ``fetch`` gave.
            out: uint8, ``[height, width, 3]``: where an image may be written if it has that shape.
            crop: ``crop(height, width)`` of an image, in place of the field's own.

        Raises:
            SampleError: If it is not what the field says.
        """
        ...

    def check(self, record: Any) -> None:
        """Asked before a sample is called bad: is what it came from still the same?

        Raises:
            ShardChanged: If not.
        """
        ...

    def place(self, record: Any) -> dict[str, Any]:
        """Where a sample lies, for the ledger of bad ones: ``shard`` and ``offset``."""
        ...

    def expect(self, ahead: Callable[[int], np.ndarray]) -> None:
        """Told from time to time what is read next, for sources that can prepare for it.

        Args:
            ahead: Gives as many shards as it is asked for, of those that are read now and from now on, in about that
                order, int64, shape ``[n]``; one may come twice.
        """
        ...

    def close(self) -> None:
        """Lets go of files."""
        ...


class Source(ABC):
    """A row of samples. It travels to the workers, which open readers of their own.

    Attributes:
        fields: The fields to read from each sample.
        index: What all ranks know about it.
    """

    fields: tuple[Field, ...]
    index: Index

    @abstractmethod
    def open(self, seed: int) -> Reader:
        """A reader.

        Args:
            seed: Key of whatever the source draws at random.
        """

    @abstractmethod
    def summary(self) -> str:
        """How much there is, for the banner."""
