"""Progress: lines in a log, a bar in a terminal."""

import io

import pytest
from rich.console import Console

from dtrain.packing import progress as module
from dtrain.packing.progress import progress


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test sets."""
    seconds = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: seconds[0])
    return seconds


def test_a_log_gets_a_line_now_and_then_with_rate_and_time_left(clock):
    text = io.StringIO()
    with progress(Console(file=text), "samples", 4000) as tick:
        for second in range(1, 31):
            clock[0] = float(second)
            tick(100)
    assert text.getvalue().splitlines() == [
        "samples: 1,000 of 4,000, 100/s, 30 s left",
        "samples: 2,000 of 4,000, 100/s, 20 s left",
        "samples: 3,000 of 4,000, 100/s, 10 s left",
    ]


def test_what_is_done_in_no_time_is_not_worth_a_line(clock):
    text = io.StringIO()
    with progress(Console(file=text), "samples", 10) as tick:
        tick(10)
    assert text.getvalue() == ""


def test_a_terminal_gets_a_bar_that_goes_away():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    with progress(console, "train samples", 10) as tick:
        tick(4)
        tick(6)
    assert "train samples" in text.getvalue()
    assert "10/10" in text.getvalue()
