"""The index of a data set: where the fields of every sample lie.

* A sample's *number* is its place when the shards lie end to end in the order in which they were named.
* A *column* is one requested field: an extension, or alternatives of which the first that a sample has is taken.
* The *fingerprint* stands for everything that decides which sample a number means.

What grows with the number of samples is kept in arrays. Small ones travel to the workers; large ones lie in a file of the
cache, which all processes of a host map, however they were started.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dtrain.data import mapped_arrays
from dtrain.data.cache_policy import CachePolicy
from dtrain.data.shard_file import Stamp
from dtrain.data.shards import names
from dtrain.data.source import difference
from dtrain.data.survey import Survey
from dtrain.data.tar_index import decode_name

# Threads wait for a slow disk at the same time. The walk itself holds Python's lock, so on a fast one they do not help.
_THREADS = 16


class DatasetIndex:
    """Where the fields of every sample lie; made by ``build``.

    Attributes:
        shards: Paths.
        names: Names of the shards, the first part of a sample's key.
        counts: Samples of each shard, int64, shape ``[shards]``.
        starts: First sample of each shard, and the end, int64, shape ``[shards + 1]``.
        num_samples: Samples of all shards.
        offsets: First byte of each field in its shard, int64, shape ``[samples, columns]``; -1 where a sample lacks it.
        sizes: Bytes of each field, int64, shape ``[samples, columns]``; -1 where a sample lacks it.
        policy: Which shards are read through the cache of the node.
        far: Whether there are any such shards.
        fingerprint: Hash of the shards' names, sizes and sample counts, in their order; 16 hexadecimal digits.
    """

    def __init__(
        self,
        shards: Sequence[str],
        arrays: Mapping[str, np.ndarray],
        folder: Path | None = None,
        policy: CachePolicy | None = None,
    ) -> None:
        """Takes the arrays; ``folder`` is where they are mapped from, if they are."""
        self.shards = list(shards)
        self.names = names(self.shards)
        self.counts = arrays["counts"]
        self.starts = np.concatenate(([0], np.cumsum(self.counts)))
        self.num_samples = int(self.starts[-1])
        self.offsets = arrays["offsets"]
        self.sizes = arrays["sizes"]
        self.policy = policy or CachePolicy()
        # One of each folder will do: which it is depends on that alone.
        self.far = any(map(self.policy.applies_to, {os.path.dirname(path): path for path in self.shards}.values()))
        self._arrays = arrays
        self._folder = folder
        self._keys = arrays["key_bytes"].data
        digest = hashlib.sha256()
        for name, size, count in zip(self.names, arrays["shard_sizes"].tolist(), self.counts.tolist(), strict=True):
            digest.update(json.dumps([name, size, count]).encode())
        self.fingerprint = digest.hexdigest()[:16]

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.shards, None if self._folder else dict(self._arrays), self._folder, self.policy)

    @classmethod
    def build(
        cls,
        paths: Sequence[str],
        extensions: Sequence[str],
        *,
        workers: int | None = None,
        progress: Callable[[int, int], None] | None = None,
        rank: int = 0,
        world_size: int = 1,
        policy: CachePolicy | None = None,
    ) -> DatasetIndex:
        """Indexes shards, or reads the indexes that were kept from another time.

        Args:
            paths: The shards, each once.
            extensions: A column each: ``jpg`` is the member of exactly that extension, ``jpg;jpeg;png`` the first of
                these that a sample has.
            workers: Threads, which read several shards of a slow disk at once. None: 16, or 1 for a few shards.
            progress: Called with the number of shards done and of all shards.
            rank: Where to begin: ranks begin at different shards, and find what another one has already kept. Every rank
                has the whole index in the end.
            world_size: Number of ranks.
            policy: Which shards are read through the cache of the node. None: what ``CachePolicy`` does by itself.

        Raises:
            ShardError: If shards are damaged; tells of all of them at once.
            ValueError: If there is no sample, or no sample that has a requested field.
            OSError: If a shard cannot be read.
        """
        paths = list(paths)
        if workers is None:
            workers = _THREADS if len(paths) >= _THREADS else 1
        policy = policy or CachePolicy()
        survey = Survey(paths, extensions, workers, policy)
        columns = survey.known()
        if columns is None:
            survey.run(rank * len(paths) // world_size, progress)
            columns = survey.columns()
        arrays, folder = columns
        doubts = json.loads(arrays["doubts"].tobytes())
        if doubts:
            more = f" ({len(doubts) - 1} more shards have such names)" if doubts[1:] else ""
            warnings.warn(f"{doubts[0]}{more}", stacklevel=2)
        return cls(paths, arrays, folder, policy)

    def stamp(self, shard: int) -> Stamp:
        """What a shard was when it was indexed."""
        return Stamp(int(self._arrays["shard_sizes"][shard]), int(self._arrays["shard_versions"][shard]))

    def shards_of(self, samples: np.ndarray | int) -> np.ndarray:
        """The shard that each of these samples lies in, as a place in ``shards``: int64, shape ``[n]``."""
        return np.searchsorted(self.starts, samples, side="right") - 1

    def key(self, sample: int) -> str:
        """``<shard>/<key>`` of one sample.

        Args:
            sample: Its number, in ``[0, num_samples)``.
        """
        return self.keys([sample])[0]

    def keys(self, samples: Iterable[int] | np.ndarray) -> list[str]:
        """``key`` of each of these samples."""
        numbers = np.asarray(samples, dtype=np.int64)
        shards = self.shards_of(numbers)
        starts = self._arrays["key_starts"]
        spans = zip(shards.tolist(), starts[numbers].tolist(), starts[numbers + 1].tolist(), strict=True)
        names, raw = self.names, self._keys
        return [f"{names[shard]}/{decode_name(raw[start:end])}" for shard, start, end in spans]

    def describe(self) -> dict[str, Any]:
        """What identifies the data set, for a checkpoint: a few numbers and the fingerprint."""
        return {
            "num_shards": len(self.shards),
            "num_samples": self.num_samples,
            "bytes": int(self._arrays["shard_sizes"].sum()),
            "fingerprint": self.fingerprint,
        }

    def difference(self, other: Mapping[str, Any]) -> str:
        """How the data set that another index described differs from this one, as a sentence; empty if it does not."""
        return difference(
            self.describe(),
            other,
            {"num_shards": "shards", "num_samples": "samples", "bytes": "bytes"},
            "as many shards, samples and bytes, but other shard names, another order, or samples in other shards.",
        )


def _restore(
    shards: Sequence[str], arrays: Mapping[str, np.ndarray] | None, folder: Path | None, policy: CachePolicy
) -> DatasetIndex:
    if folder is not None:
        arrays = mapped_arrays.load(folder)
    if arrays is None:
        raise FileNotFoundError(
            f"the index of the data set was removed from {folder} while the run needs it. Start again."
        )
    return DatasetIndex(shards, arrays, folder, policy)
