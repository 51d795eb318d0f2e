"""How numbers, times and names are written in a report; nothing here fails on what a damaged file holds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta

_MOST_DECIMALS = 6


def figure(value: float) -> str:
    """A number as people write it: ``1,797``, ``0.9694``, ``1.2e-05``."""
    if not math.isfinite(value):
        return "not finite"
    return f"{value:,.0f}" if float(value).is_integer() and abs(value) < 1e15 else f"{value:.4g}"


def in_column(values: Sequence[float]) -> list[str]:
    """Numbers below one another, with as many decimals each unless their sizes differ too much; ``""`` for NaN."""
    sizes = [abs(value) for value in values if math.isfinite(value) and value]
    decimals = 0
    if not all(value.is_integer() for value in sizes):
        # Four digits of the largest, and at least two of the smallest.
        decimals = max(0, 3 - math.floor(math.log10(max(sizes))), 1 - math.floor(math.log10(min(sizes))))
    alike = decimals <= _MOST_DECIMALS and max(sizes, default=0.0) < 1e15
    return [
        "" if math.isnan(value) else f"{value:,.{decimals}f}" if alike and math.isfinite(value) else figure(value)
        for value in values
    ]


def percent(share: float) -> str:
    """``41 %``; small ones keep two digits, so that they are not called nothing: ``6.5 %``, ``0.023 %``."""
    if 0 < share < 1e-5:
        return "< 0.001 %"
    return f"{100 * share:.2g} %" if 0 < share < 0.095 else f"{100 * share:.0f} %"


def span(seconds: float) -> str:
    """``40 ms``, ``3.2 s``, ``1:02:03``."""
    if not math.isfinite(seconds) or abs(seconds) > 1e12:
        return "an unknown time"
    if abs(seconds) < 1:
        return f"{1000 * seconds:.3g} ms"
    if abs(seconds) < 60:
        return f"{seconds:.3g} s"
    return str(timedelta(seconds=round(seconds)))


def date(seconds: float) -> str:
    """Unix seconds as local date and time."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M %Z")
    except (ValueError, OverflowError, OSError):
        return "an unknown time"


def counted(count: int, noun: str) -> str:
    """``1 restart``, ``2 restarts``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def listed(items: Sequence[str], most: int = 8) -> str:
    """``a, b and 3 more``."""
    return ", ".join(items[:most]) + (f" and {len(items) - most} more" if len(items) > most else "")


def shortened(text: str, most: int = 400) -> str:
    """The beginning of a text that may be long."""
    return text if len(text) <= most else text[:most] + "\N{HORIZONTAL ELLIPSIS}"
