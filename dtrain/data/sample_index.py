"""The numbers of a data set that is in no shards.

The row of samples is cut into shards of equal size, though there are no files, so that lanes and windows mean what they
mean elsewhere. By default these are so small that a window shuffle is as good as a full one; where neighbours are cheaper
to read together than apart, larger ones keep them together.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from dtrain.data.source import difference

# An order holds some numbers for each shard; so many cost milliseconds an epoch.
_MOST_SHARDS = 2**16


class SampleIndex:
    """A row of numbered samples.

    Args:
        name: Of the data set; the first part of a sample's key.
        num_samples: How many there are.
        shard_size: Samples of a shard; None: as few as keep the number of shards in bounds.
        content: Stands for what is in them.

    Raises:
        ValueError: If there are no samples, or ``shard_size`` is none.
    """

    def __init__(self, name: str, num_samples: int, shard_size: int | None = None, content: str = "") -> None:
        if num_samples < 1:
            raise ValueError(f"the data set {name} has {num_samples} samples, want at least one.")
        size = -(-num_samples // _MOST_SHARDS) if shard_size is None else shard_size
        if size < 1:
            raise ValueError(f"data.shard_size: got {size}, want at least one sample, or null for the default.")
        self.name = name
        self.num_samples = num_samples
        self.shard_size = size
        self.counts = np.full(-(-num_samples // size), size, np.int64)
        self.counts[-1] -= len(self.counts) * size - num_samples
        identity = json.dumps([name, num_samples, size, content])
        self.fingerprint = hashlib.sha256(identity.encode()).hexdigest()[:16]

    def keys(self, samples: np.ndarray) -> list[str]:
        """``<name>/<number>`` of each of these samples."""
        return [f"{self.name}/{sample}" for sample in samples.tolist()]

    def describe(self) -> dict[str, Any]:
        """What identifies the data set, for a checkpoint."""
        return {
            "name": self.name,
            "num_samples": self.num_samples,
            "shard_size": self.shard_size,
            "fingerprint": self.fingerprint,
        }

    def difference(self, other: Mapping[str, Any]) -> str:
        """How the data set that another index described differs from this one, as a sentence; empty if it does not."""
        labels = {"name": "name", "num_samples": "samples", "shard_size": "samples in a shard"}
        return difference(self.describe(), other, labels, "as many samples of the same name, but other ones.")
