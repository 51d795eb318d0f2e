"""Numbers below one another."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.report.style import format_column, format_number


@given(st.lists(st.floats(-1e5, 1e5).filter(lambda value: not 0 < abs(value) < 1e-4), max_size=8))
def test_numbers_of_a_column_have_as_many_decimals_each_and_enough_of_them(values: list[float]) -> None:
    texts = format_column(values)
    assert len({len(text.partition(".")[2]) for text in texts}) <= 1
    largest = max(map(abs, values), default=0.0)
    for value, text in zip(values, texts, strict=True):
        assert float(text.replace(",", "")) == pytest.approx(value, rel=0.051, abs=5.1e-4 * largest)


def test_sizes_that_differ_too_much_are_written_one_by_one_and_what_is_missing_is_empty() -> None:
    assert format_column([1e-12, 2.5, math.nan, math.inf]) == ["1e-12", "2.5", "", "not finite"]
    assert format_column([0.0, 3.0, 12_000.0]) == ["0", "3", "12,000"]
    assert format_column([]) == []


def test_a_large_number_is_written_out() -> None:
    assert [format_number(value) for value in (10_304.2, 1797, 0.96944, 1.2e-5)] == [
        "10,304",
        "1,797",
        "0.9694",
        "1.2e-05",
    ]
