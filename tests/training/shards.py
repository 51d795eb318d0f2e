"""Shards of numbered samples: sample n holds three numbers drawn from n, and n itself."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from tests.data.tars import tar_bytes

FIELDS = {"npy": {"name": "x", "role": "feature"}, "cls": {"name": "number", "role": "label"}}


def numbers_of(sample: int) -> np.ndarray:
    """What a sample holds: float32, shape ``[3]``."""
    return np.random.default_rng(sample).standard_normal(3).astype(np.float32)


def numbered_shards(folder: Path, count: int, shards: int = 3) -> str:
    """Writes ``count`` samples to a few shards in ``folder``; returns their pattern."""
    for shard, samples in enumerate(np.array_split(np.arange(count), shards)):
        files = []
        for sample in samples.tolist():
            array = io.BytesIO()
            np.save(array, numbers_of(sample))
            files += [(f"{sample:06d}.npy", array.getvalue()), (f"{sample:06d}.cls", str(sample).encode())]
        (folder / f"part-{shard}.tar").write_bytes(tar_bytes(files))
    return str(folder / "part-*.tar")
