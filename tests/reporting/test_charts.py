"""Charts show all extreme values, and accept any number."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtrain.reporting.charts import Envelope, setting_charts
from dtrain.reporting.sweep import Sweep
from dtrain.reporting.tables import run_columns, text_table
from dtrain.tracking.history import History
from tests.reporting.runs_for_tests import best_of, point_of

NUMBERS = st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=0, max_size=200)


@given(values=NUMBERS, most=st.integers(1, 20))
def test_every_value_lies_in_the_band_of_its_piece_and_the_extremes_are_kept(values: list[float], most: int) -> None:
    steps, array = np.arange(len(values), dtype=np.float64), np.array(values, np.float64)
    line = Envelope.of(steps, array, most)
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
    line = Envelope.of(np.arange(100_000.0), values, 300)
    assert len(line.steps) <= 300
    assert line.high.max() == 1e3


def test_each_number_that_was_varied_and_is_no_seed_has_a_chart_over_its_decades(runs: list[History]) -> None:
    (chart,) = setting_charts(Sweep.of(runs))
    assert chart.title == "Best eval/accuracy over optimizer.lr"
    assert [label for label, _ in chart.keys] == ["finished", "not finished"]
    assert chart.draw is not None
    axes = chart.draw().axes[0]
    assert axes.get_xscale() == "log"
    points = sorted(float(y) for line in axes.lines[1:] for y in line.get_ydata())
    assert points == pytest.approx(sorted(best_of(run) for run in runs if best_of(run) >= 0))
    assert setting_charts(Sweep.of(runs[:8])) == []  # two values are no curve


def test_a_setting_that_may_be_zero_is_drawn_with_its_zero(tmp_path: Path) -> None:
    decays = (0.0, 1e-4, 1e-2)
    runs = [point_of(tmp_path / str(n), {"optimizer.weight_decay": n}, [0.5 + n]) for n in decays]
    (chart,) = setting_charts(Sweep.of(runs))
    assert chart.draw is not None
    assert chart.draw().axes[0].get_xscale() == "symlog"


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "values", [[-1e99, 0.0, 1e99], [0.0, 1e-99, 1e99], [1e-300, 1.0, 1e99], [-1e-300, 0.0, 1e-300]]
)
def test_extreme_values_are_drawn_and_written(tmp_path: Path, values: list[float]) -> None:
    runs = [point_of(tmp_path / str(n), {"optimizer.lr": n}, [n, -n]) for n in values]
    sweep = Sweep.of(runs)
    (chart,) = setting_charts(sweep)
    assert chart.svg()
    assert len(text_table(run_columns(sweep)).splitlines()) == 4


def test_a_key_with_a_slash_is_no_folder(tmp_path: Path) -> None:
    runs = [point_of(tmp_path / str(n), {"a/<b>.C": n}, [0.5]) for n in (1, 2, 3)]
    (chart,) = setting_charts(Sweep.of(runs))
    assert chart.name == "setting-a-b-c"
