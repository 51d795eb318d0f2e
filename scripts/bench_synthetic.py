"""Data of noise, in memory: for measuring steps, where neither a disk nor a decoder shall count. The same on every start.

``split`` is ``train`` or ``test``, as in ``data=memory``: other noise.
"""

from __future__ import annotations

import numpy as np


def images(number: int, size: int, classes: int, split: str = "train") -> dict[str, np.ndarray]:
    """``image``, uint8 ``[number, size, size, 3]``, and ``label``, int64 ``[number]``, below ``classes``."""
    rng = _generator(split)
    pixels = np.frombuffer(rng.bytes(number * size * size * 3), np.uint8).reshape(number, size, size, 3)
    return {"image": pixels, "label": rng.integers(classes, size=number)}


def tokens(number: int, length: int, vocabulary: int, split: str = "train") -> dict[str, np.ndarray]:
    """``tok``, uint16 ``[number, length]``, below ``vocabulary``: a field as ``python -m dtrain.pack text`` names it."""
    return {"tok": _generator(split).integers(vocabulary, size=(number, length), dtype=np.uint16)}


def _generator(split: str) -> np.random.Generator:
    return np.random.default_rng(["train", "test"].index(split))
