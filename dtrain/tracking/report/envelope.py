"""Long lines made short without hiding anything: the mean of each piece, between its least and its largest value."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Envelope:
    """A line of pieces.

    Attributes:
        steps: First step of each piece, float64, shape ``[k]``.
        low: Its least value, shape ``[k]``.
        mean: The mean of its values, shape ``[k]``.
        high: Its largest value, shape ``[k]``.
        records: Values in a piece; 1 if every value is a piece of its own.
    """

    steps: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray
    records: int


def envelope(steps: np.ndarray, values: np.ndarray, most: int) -> Envelope:
    """Cuts a line into at most ``most`` pieces of as many values each.

    Args:
        steps: float64, shape ``[n]``.
        values: float64, shape ``[n]``; those that are not finite are left out.
        most: Pieces, at least 1.
    """
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if len(values) <= 2 * most:
        return Envelope(steps, values, values, values, 1)
    records = -(-len(values) // most)
    starts = np.arange(0, len(values), records)
    counts = np.diff(starts, append=len(values))
    with np.errstate(over="ignore", invalid="ignore"):  # the sum of a hundred 1e308
        mean = np.add.reduceat(values, starts) / counts
    return Envelope(
        steps[starts], np.minimum.reduceat(values, starts), mean, np.maximum.reduceat(values, starts), records
    )
