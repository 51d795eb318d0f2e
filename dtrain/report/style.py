"""Text formats of numbers and times in a report, and the colours of its charts and page.

Charts name the colours of ``THEME``; the page has each as a CSS variable, so that it follows the light or dark theme of the
browser. The colours of the runs suit colour-blind readers (Okabe and Ito 2008), without yellow, which is invisible on white.
The parts of the time have different colours, so that no part looks like a run.

The formatting functions accept any number: a damaged file must not make a report fail.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timedelta

RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#000000")
_DARK_RUN_COLOURS = ("#3f9fe0", "#f4813a", "#2cc295", "#e39ac3", "#a8dcff", "#f2b632", "#f2f2f2")
_DASHES = ((), (6, 3), (2, 2), (6, 2, 2, 2))

#: Name to the colour in the light and in the dark theme.
THEME = {
    "ink": ("#1b1b1c", "#e4e4e2"),
    "paper": ("#ffffff", "#16181b"),
    "soft": ("#606063", "#a3a3a5"),
    "line": ("#dcdcde", "#35383d"),
    "panel": ("#f5f5f6", "#1e2125"),
    "bad": ("#b00020", "#ff7a85"),
    "good": ("#1a7f37", "#4fc36f"),
    "warn": ("#8a5a00", "#e0a63a"),
    **{f"run-{n}": pair for n, pair in enumerate(zip(RUN_COLOURS, _DARK_RUN_COLOURS, strict=True))},
    # Waiting for data, rest of the step, evaluating and saving, interrupted.
    **{"time-0": ("#7b4fb5", "#a884dc"), "time-1": ("#b9bdc4", "#5d636c")},
    **{"time-2": ("#6f7f2a", "#a5b553"), "time-3": ("#7a3b2e", "#b9705f")},
}
_MAX_DECIMALS = 6
_MOST_JOINED = 8  # items of a list in a sentence


def run_dashes(number: int) -> tuple[int, ...]:
    """Dash pattern of a run by its index on the page, in pixels; it differs where colours repeat."""
    return _DASHES[number // len(RUN_COLOURS) % len(_DASHES)]


def format_number(value: float) -> str:
    """A number with four significant digits: ``1,797``, ``0.9694``, ``1.2e-05``."""
    if not math.isfinite(value):
        return "not finite"
    return (
        f"{value:,.0f}" if (float(value).is_integer() or abs(value) >= 1000) and abs(value) < 1e15 else f"{value:.4g}"
    )


def format_column(values: Sequence[float]) -> list[str]:
    """Numbers of a table column, with equally many decimals unless their sizes differ too much; ``""`` for NaN."""
    sizes = [abs(value) for value in values if math.isfinite(value) and value]
    decimals = 0
    if not all(value.is_integer() for value in sizes):
        # Four digits of the largest number, and at least two of the smallest.
        decimals = max(0, 3 - math.floor(math.log10(max(sizes))), 1 - math.floor(math.log10(min(sizes))))
    alike = decimals <= _MAX_DECIMALS and max(sizes, default=0.0) < 1e15
    return [
        ""
        if math.isnan(value)
        else f"{value:,.{decimals}f}"
        if alike and math.isfinite(value)
        else format_number(value)
        for value in values
    ]


def format_percent(share: float) -> str:
    """A share in percent, ``41 %``; with two digits if it is small, so that it is not rounded to zero: ``0.023 %``."""
    if 0 < share < 1e-5:
        return "< 0.001 %"
    return f"{100 * share:.2g} %" if 0 < share < 0.095 else f"{100 * share:.0f} %"


def format_duration(seconds: float) -> str:
    """Seconds as ``40 ms``, ``3.2 s`` or ``1:02:03``."""
    if not math.isfinite(seconds) or abs(seconds) > 1e12:
        return "an unknown time"
    if abs(seconds) < 1:
        return f"{1000 * seconds:.3g} ms"
    if abs(seconds) < 60:
        return f"{seconds:.3g} s"
    return str(timedelta(seconds=round(seconds)))


def format_date(seconds: float) -> str:
    """Unix seconds as local date and time."""
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M %Z")
    except (ValueError, OverflowError, OSError):
        return "an unknown time"


def count_of(count: int, noun: str) -> str:
    """``1 restart``, ``2 restarts``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def join_some(items: Sequence[str]) -> str:
    """``a, b and 3 more``."""
    more = len(items) - _MOST_JOINED
    return ", ".join(items[:_MOST_JOINED]) + (f" and {more} more" if more > 0 else "")


def shorten(text: str, most: int = 400) -> str:
    """The first ``most`` characters of a text, with an ellipsis if it is longer."""
    return text if len(text) <= most else text[:most] + "\N{HORIZONTAL ELLIPSIS}"
