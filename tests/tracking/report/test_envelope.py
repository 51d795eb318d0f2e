"""A line made short hides nothing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.tracking.report.envelope import envelope

NUMBERS = st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=0, max_size=200)


@given(values=NUMBERS, most=st.integers(1, 20))
def test_every_value_lies_in_the_band_of_its_piece_and_the_extremes_are_kept(values: list[float], most: int) -> None:
    steps, array = np.arange(len(values), dtype=np.float64), np.array(values, np.float64)
    line = envelope(steps, array, most)
    finite = [(step, value) for step, value in zip(steps, values, strict=True) if value == value]
    assert len(line.steps) <= 2 * most
    for number, start in enumerate(line.steps):
        end = line.steps[number + 1] if number + 1 < len(line.steps) else np.inf
        piece = [value for step, value in finite if start <= step < end]
        assert 1 <= len(piece) <= line.records
        assert line.low[number] == min(piece)
        assert line.high[number] == max(piece)
        assert line.mean[number] == pytest.approx(sum(piece) / len(piece), abs=1e-6)
    assert sum(1 for _ in finite) == 0 or (line.low.min(), line.high.max()) == (
        min(value for _, value in finite),
        max(value for _, value in finite),
    )


def test_one_spike_among_a_hundred_thousand_records_is_seen() -> None:
    values = np.zeros(100_000)
    values[54_321] = 1e3
    line = envelope(np.arange(100_000.0), values, 300)
    assert len(line.steps) <= 300
    assert line.high.max() == 1e3
