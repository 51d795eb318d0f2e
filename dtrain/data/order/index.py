"""The index of a sample source: its size and identity, which is all that the order of an epoch depends on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from dtrain.data.order.growth import ShardList


class Index(ABC):
    """The size and identity of a source, equal on all ranks.

    Attributes:
        counts: Samples of each shard, int64, shape ``[shards]``.
        num_samples: Samples of all shards.
        fingerprint: Hash of everything that the meaning of a sample number depends on.
        left_out: Name to reason, for damaged shards that are not part of the index.
        shard_list: The shards with what identifies each; None for a source whose shards cannot change.
        removed: Numbers of shards that are known only by name: they were removed, and their samples cannot be read.
        labels: Entries of ``describe`` that ``difference`` compares, and their names in its sentence.
        other_difference: The sentence of ``difference`` if only the fingerprints differ.
    """

    counts: np.ndarray
    num_samples: int
    fingerprint: str
    left_out: Mapping[str, str] = MappingProxyType({})
    shard_list: ShardList | None = None
    removed: Sequence[int] = ()
    labels: ClassVar[Mapping[str, str]]
    other_difference: ClassVar[str]

    @property
    def num_present(self) -> int:
        """Samples of the shards that were not removed."""
        return self.num_samples - int(self.counts[list(self.removed)].sum())

    def first_present(self, most: int) -> np.ndarray:
        """The first samples of shards that were not removed, up to ``most``; int64, shape ``[n]``."""
        counts, firsts = self.counts.copy(), np.cumsum(self.counts) - self.counts
        counts[list(self.removed)] = 0
        shards = np.flatnonzero(counts)[:most]
        spans = zip(firsts[shards].tolist(), counts[shards].tolist(), strict=True)
        parts = [np.arange(first, first + min(count, most)) for first, count in spans]
        return np.concatenate([np.zeros(0, np.int64), *parts])[:most]

    @abstractmethod
    def keys(self, samples: np.ndarray) -> list[str]:
        """``<shard>/<key>`` of each of these samples."""

    @abstractmethod
    def find(self, key: str) -> np.ndarray:
        """The samples with a key, with or without the names before it; int64, shape ``[n]``, empty if there is none."""

    def find_all(self, keys: Sequence[str]) -> np.ndarray:
        """The samples with any of these keys, each once, ascending.

        Raises:
            KeyError: With the first key that no sample has.
        """
        found = [np.zeros(0, np.int64)]
        for key in keys:
            found.append(self.find(key))
            if not found[-1].size:
                raise KeyError(key)
        return np.unique(np.concatenate(found))

    @abstractmethod
    def find_shard(self, name: str) -> np.ndarray:
        """The samples of a shard; int64, shape ``[n]``, empty if there is no such shard."""

    def names_of_removed(self) -> list[str]:
        """Names of the shards that were removed."""
        return [] if self.shard_list is None else [self.shard_list.names[shard] for shard in self.removed]

    def head(self, shards: int) -> Index:
        """The index of the first shards alone, for a source that has a ``shard_list``."""
        raise NotImplementedError

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
