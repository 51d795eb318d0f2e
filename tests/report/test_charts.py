"""Charts show all extreme values, and accept any number."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dtrain.report.charts import Chart, Envelope, line_chart, run_charts, setting_charts
from dtrain.report.health import RunData
from dtrain.report.pictures import picture
from dtrain.report.sweep import Sweep
from dtrain.report.tables import run_columns, text_table
from dtrain.runs.history import History
from tests.report.runs_for_tests import best_of, point_of, run_of, steady

NUMBERS = st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), min_size=0, max_size=200)


@given(values=NUMBERS, most=st.integers(1, 20))
def test_every_value_lies_in_the_band_of_its_piece_and_the_extremes_are_kept(values: list[float], most: int) -> None:
    steps, array = np.arange(len(values), dtype=np.float64), np.array(values, np.float64)
    line = Envelope.from_points(steps, array, most)
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
    line = Envelope.from_points(np.arange(100_000.0), values, 300)
    assert len(line.steps) <= 300
    assert line.high.max() == 1e3


def test_each_number_that_was_varied_and_is_no_seed_has_a_chart_over_its_decades(runs: list[History]) -> None:
    sweep = Sweep.from_runs(runs)
    (chart,) = setting_charts(sweep)
    assert chart.title == "Best eval/accuracy over optimizer.lr"
    assert chart.x_scale == "log"
    points = chart.lines[1:]
    assert sorted(float(line.y[0]) for line in points) == sorted(best_of(run) for run in runs if best_of(run) >= 0)
    # Each run has the colour that it has in all charts; those without curves are grey.
    assert {line.label: line.colour for line in points if line.label} == {
        run.label: f"run-{place}" for place, run in enumerate(sweep.shown)
    }
    assert {line.colour for line in points if not line.label} == {"soft"}
    assert setting_charts(Sweep.from_runs(runs[:8])) == []  # two values are no curve


def test_a_setting_that_may_be_zero_is_drawn_with_its_zero(tmp_path: Path) -> None:
    decays = (0.0, 1e-4, 1e-2)
    runs = [point_of(tmp_path / str(n), {"optimizer.weight_decay": n}, [0.5 + n]) for n in decays]
    (chart,) = setting_charts(Sweep.from_runs(runs))
    assert (chart.x_scale, chart.x_threshold) == ("symlog", 1e-4)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "values", [[-1e99, 0.0, 1e99], [0.0, 1e-99, 1e99], [1e-300, 1.0, 1e99], [-1e-300, 0.0, 1e-300]]
)
def test_extreme_values_are_drawn_and_written(tmp_path: Path, values: list[float]) -> None:
    runs = [point_of(tmp_path / str(n), {"optimizer.lr": n}, [n, -n]) for n in values]
    sweep = Sweep.from_runs(runs)
    (chart,) = setting_charts(sweep)
    json.dumps(chart.as_json(), allow_nan=False)
    assert picture(chart).startswith(b"\x89PNG")
    assert len(text_table(run_columns(sweep)).splitlines()) == 4


def test_a_key_with_a_slash_is_no_folder(tmp_path: Path) -> None:
    runs = [point_of(tmp_path / str(n), {"a/<b>.C": n}, [0.5]) for n in (1, 2, 3)]
    (chart,) = setting_charts(Sweep.from_runs(runs))
    assert chart.name == "setting-a-b-c"


def test_a_slow_first_step_does_not_squash_the_others(tmp_path: Path) -> None:
    times = [9.0, *[0.1] * 20, 7.0, *[0.12] * 20]
    records = [{"step": step, "time/step_seconds": seconds} for step, seconds in enumerate(times, 1)]
    records[21] |= {"time/restarts": 1}
    (chart,) = (line_chart([run_of(tmp_path, records)], "time/step_seconds", "", floor=0.0),)
    assert chart.top == 0.12
    assert "Above the axis: 2 values, up to 9" in chart.note
    assert max(chart.lines[0].y) == 9.0  # still there when the axis is logarithmic
    alone = line_chart([run_of(tmp_path / "one", records[:1])], "time/step_seconds", "", floor=0.0)
    assert (alone.top, alone.note) == (None, "")


def test_metrics_are_grouped_by_their_prefix_and_families_of_one_run_share_a_chart(tmp_path: Path) -> None:
    names = ("train/loss", "train/loss/web", "train/loss/books", "my/score", "eval/f1", "data/samples/web")
    runs = [run_of(tmp_path / name, [{"step": 1} | dict.fromkeys(names, 1.0)]) for name in "ab"]
    data = [RunData.read(run, 0.0) for run in runs]
    one, both = ({key: _titles(charts) for key, charts in run_charts(which).items()} for which in (data[:1], data))
    assert one["Training"] == ["Training loss", "train/loss/*"]
    assert (one["Evaluation"], one["my"], one["Memory and data"]) == (["eval/f1"], ["my/score"], ["data/samples/web"])
    assert both["Training"] == ["Training loss", "train/loss/web", "train/loss/books"]
    family = next(chart for chart in run_charts(data[:1])["Training"] if chart.title == "train/loss/*")
    assert [line.label for line in family.lines if line.label] == ["web", "books"]


def _titles(charts: list[Chart]) -> list[str]:
    return [chart.title for chart in charts if chart.is_drawn]


def test_long_names_are_whole_in_a_picture(tmp_path: Path) -> None:
    names = [f"{'a-long-name-of-a-run-' * 4}"[:79] + end for end in "12"]
    runs = [run_of(tmp_path / name, steady(20)) for name in names]
    groups = run_charts([RunData.read(run, 1e9) for run in runs])
    charts = [chart for group in groups.values() for chart in group if chart.name in ("train-loss", "time")]
    assert len(charts) == 2
    for chart in charts:
        pixels = np.asarray(Image.open(io.BytesIO(picture(chart))).convert("L"))
        edges = (pixels[:, :4], pixels[:, -4:], pixels[:4], pixels[-4:])
        assert all((edge == 255).all() for edge in edges), f"{chart.name}: something is cut off"
