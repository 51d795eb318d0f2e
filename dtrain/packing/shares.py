"""Splits that are taken from what is packed: a name, and a share of the samples."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def check_shares(prefix: str, shares: Mapping[str, float]) -> None:
    """Refuses shares that leave nothing for the split ``prefix``, which gets what they do not take.

    Raises:
        ValueError: If they are impossible.
    """
    if not 0 <= sum(shares.values()) < 1 or not all(share > 0 for share in shares.values()) or prefix in shares:
        raise ValueError(
            f"splits {dict(shares)} beside {prefix!r}: want other names, and shares above 0 that sum to less than 1."
        )


def deal(shuffled: np.ndarray, prefix: str, shares: Mapping[str, float]) -> dict[str, np.ndarray]:
    """Deals samples to splits.

    Args:
        shuffled: Numbers of the samples, int64 ``[samples]``; the first ones go to the shares.
        prefix: Name of the split that gets the rest.
        shares: Name to share of each other one.

    Returns:
        The numbers of each split, int64, sorted.
    """
    dealt, taken = {}, 0
    for name, share in shares.items():
        wanted = round(share * len(shuffled))
        dealt[name] = np.sort(shuffled[taken : taken + wanted])
        taken += wanted
    return {prefix: np.sort(shuffled[taken:]), **dealt}
