"""The largest batch that keeps its limits."""

from __future__ import annotations

from collections.abc import Callable

#: Rows at which the search ends: beyond, a row more is no gain.
MOST = 65_536
# Times are noisy, so the last few percent would be chance.
_CLOSE = 32


def largest_batch(broken_by: Callable[[int], str | None]) -> tuple[int, str]:
    """Doubles until a limit is broken, then halves what is left between the last two, to within 1/32.

    Args:
        broken_by: Which limit a batch of so many rows breaks; None if it keeps them all. Must not keep what a smaller
            batch has broken.

    Returns:
        Rows of the largest batch seen to keep the limits, 0 if not even one row does, and what broke the smallest seen
        not to.
    """
    kept, broken, reason = 0, MOST + 1, f"the search, which ends at {MOST:,} rows"
    while broken - kept > max(1, kept // _CLOSE):
        batch = min(max(2 * kept, 1), (kept + broken) // 2)
        limit = broken_by(batch)
        if limit is None:
            kept = batch
        else:
            broken, reason = batch, limit
    return kept, reason
