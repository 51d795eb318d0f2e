"""Where the time went adds up to what the clock saw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dtrain.tracking.report.times import INTERRUPTED, PAUSING, STEPPING, WAITING, Times
from tests.tracking.report.runs_for_tests import run_of, steady


def made(folder: Path) -> Times:
    """0.1 s a step, a record every 10 steps; 3 s of evaluation after step 30, started again after step 60 for 20 s."""
    records, clock = [], 1e9
    for step in range(10, 101, 10):
        clock += 1.0 + (3.0 if step == 40 else 0.0) + (20.0 if step == 70 else 0.0)
        record = {"step": step, "time": clock, "time/step_seconds": 0.1, "time/data_wait_fraction": 0.2}
        records.append(record | ({"time/restarts": 1} if step >= 70 else {}))
        if step == 30:
            records.append({"step": step, "time": clock + 2.9, "eval/loss": 1.0})
    times = Times.of(run_of(folder, records))
    assert times is not None
    return times


def test_waiting_steps_evaluations_and_interruptions_are_told_apart(tmp_path: Path) -> None:
    seconds = made(tmp_path).seconds.sum(axis=1)
    assert seconds[WAITING] == pytest.approx(2.0, abs=1e-5)
    assert seconds[STEPPING] == pytest.approx(8.0, abs=1e-5)
    assert seconds[PAUSING] == pytest.approx(3.0, abs=1e-5)
    assert seconds[INTERRUPTED] == pytest.approx(20.0, abs=1e-5)


@pytest.mark.parametrize("bins", [1, 3, 10, 100])
def test_bins_lose_no_second(tmp_path: Path, bins: int) -> None:
    times = made(tmp_path)
    edges, seconds = times.binned(bins)
    assert seconds.shape == (4, min(bins, 10))
    assert (edges[0], edges[-1]) == (0.0, 100.0)
    assert (np.diff(edges) > 0).all()
    np.testing.assert_allclose(seconds.sum(axis=1), times.seconds.sum(axis=1))


def test_a_run_of_another_version_without_waits_has_its_steps(tmp_path: Path) -> None:
    records = [{k: v for k, v in record.items() if k != "time/data_wait_fraction"} for record in steady()]
    times = Times.of(run_of(tmp_path, records))
    assert times is not None
    assert times.shares() == pytest.approx([0, 1, 0, 0], abs=1e-6)


def test_a_run_without_step_times_has_none(tmp_path: Path) -> None:
    assert Times.of(run_of(tmp_path, [{"step": 1, "time": 1.0}, {"step": 2, "time": 2.0}])) is None
