"""How a split's samples are cut into shards: by number of shards, samples in each, or megabytes.

A *cut* is the places where shards begin, int64 ``[shards + 1]``: shard ``n`` has the samples ``cut[n]`` to ``cut[n + 1]``.
Bytes are counted as they lie in a tar, headers and padding included.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dtrain.data.writer import balanced_sizes

_BLOCK = 512


def tar_bytes(payload: np.ndarray | int) -> np.ndarray | int:
    """What a member of so many bytes takes in a tar, a header included."""
    return _BLOCK + -(-payload // _BLOCK) * _BLOCK


@dataclass(frozen=True)
class ShardSize:
    """What the user asked for; one of the three.

    Args:
        shards: Shards of each split.
        samples: Samples in a shard at most.
        megabytes: Million bytes in a shard, about: its samples are not cut.
    """

    shards: int | None = None
    samples: int | None = None
    megabytes: float | None = None

    def cut(self, count: int, sample_bytes: np.ndarray | int) -> np.ndarray:
        """Where shards begin. Their sizes differ by one sample at most; by ``megabytes``, they differ by one sample's
        bytes or so.

        Args:
            count: Samples of the split.
            sample_bytes: Bytes of each in a tar, int64 ``[count]``, or of any.

        Raises:
            ValueError: If the size is impossible, or there are too few samples for so many shards.
        """
        if self.megabytes is None:
            return _bounds(balanced_sizes(count, shards=self.shards, per_shard=self.samples))
        if not self.megabytes > 0:
            raise ValueError(f"--shard-mb {self.megabytes}: want more than 0.")
        if isinstance(sample_bytes, int):
            shards = -(-count * sample_bytes // round(self.megabytes * 1e6))
            return _bounds(balanced_sizes(count, shards=min(max(shards, 1), max(count, 1))))
        ends = np.cumsum(sample_bytes)
        total = int(ends[-1]) if count else 0
        shards = max(-(-total // round(self.megabytes * 1e6)), 1)
        inner = np.searchsorted(ends, np.arange(1, shards) * (total / shards))
        # A sample larger than a shard would leave empty ones behind it.
        return np.unique(np.concatenate([[0], inner, [count]])).astype(np.int64)


def _bounds(sizes: list[int]) -> np.ndarray:
    return np.cumsum([0, *sizes], dtype=np.int64)
