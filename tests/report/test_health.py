"""State, time breakdown and health of a run."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from dtrain.report.health import (
    INTERRUPTED,
    PAUSING,
    STEPPING,
    WAITING,
    Health,
    TimeBreakdown,
    check_health,
    run_state,
    run_state_with_reason,
)
from dtrain.report.run_logs import Hang
from dtrain.runs.history import History
from tests.report.runs_for_tests import point_of, run_of, steady


@pytest.mark.parametrize(
    ("results", "status", "words"),
    [
        ([0.5], {}, "finished"),
        ([0.5], {"state": "failed", "reason": "rank 1:\nno"}, "failed: rank 1:?no"),
        ([], {"state": "stopped", "reason": "SIGTERM"}, "stopped: SIGTERM"),
        ([0.5], {"state": "running"}, "running"),
    ],
)
def test_state_and_reason_are_on_one_line(
    tmp_path: Path, results: list[float], status: dict[str, Any], words: str
) -> None:
    assert run_state_with_reason(point_of(tmp_path, {}, results, **status)) == words


def test_a_run_whose_status_says_running_but_whose_lock_is_free_was_killed(tmp_path: Path) -> None:
    run = point_of(tmp_path, {}, [0.5], state="running")
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert run_state(run) == "running"
    assert run_state(run) == "killed"


@pytest.mark.parametrize(
    ("traces", "words"),
    [
        ([".job"], "queued"),
        ([".job", "logs/torchrun/x"], "starting, or failed before its first step"),
        ([".lock", "logs/torchrun/x"], "failed before its first step"),
        (["config.yaml"], "not started"),
    ],
)
def test_without_a_status_the_other_files_of_the_run_decide(tmp_path: Path, traces: list[str], words: str) -> None:
    for trace in traces:
        (tmp_path / trace).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / trace).touch()
    assert run_state_with_reason(History.read(tmp_path, "run")) == words


def test_a_run_with_metrics_but_without_a_status_is_unknown(tmp_path: Path) -> None:
    point_of(tmp_path, {}, [0.5])
    (tmp_path / "status.json").write_text("[]")
    assert run_state_with_reason(History.read(tmp_path, "run")) == "state unknown"


def made(folder: Path) -> TimeBreakdown:
    """0.1 s a step, a record every 10 steps; 3 s of evaluation after step 30, started again after step 60 for 20 s."""
    records, clock = [], 1e9
    for step in range(10, 101, 10):
        clock += 1.0 + (3.0 if step == 40 else 0.0) + (20.0 if step == 70 else 0.0)
        record = {"step": step, "time": clock, "time/step_seconds": 0.1, "time/data_wait_fraction": 0.2}
        records.append(record | ({"time/restarts": 1} if step >= 70 else {}))
        if step == 30:
            records.append({"step": step, "time": clock + 2.9, "eval/loss": 1.0})
    times = TimeBreakdown.from_run(run_of(folder, records))
    assert times is not None
    return times


def test_waiting_steps_evaluations_and_interruptions_are_separated(tmp_path: Path) -> None:
    seconds = made(tmp_path).seconds.sum(axis=1)
    assert seconds[WAITING] == pytest.approx(2.0, abs=1e-5)
    assert seconds[STEPPING] == pytest.approx(8.0, abs=1e-5)
    assert seconds[PAUSING] == pytest.approx(3.0, abs=1e-5)
    assert seconds[INTERRUPTED] == pytest.approx(20.0, abs=1e-5)


def test_a_run_of_another_version_without_waits_has_its_steps(tmp_path: Path) -> None:
    records = [{k: v for k, v in record.items() if k != "time/data_wait_fraction"} for record in steady()]
    times = TimeBreakdown.from_run(run_of(tmp_path, records))
    assert times is not None
    assert times.shares() == pytest.approx([0, 1, 0, 0], abs=1e-6)


def test_a_run_without_step_times_has_none(tmp_path: Path) -> None:
    assert TimeBreakdown.from_run(run_of(tmp_path, [{"step": 1, "time": 1.0}, {"step": 2, "time": 2.0}])) is None


NOW = 1e9 + 70


def judged(
    folder: Path, records: list[dict[str, Any]], hangs: tuple[Hang, ...] = (), now: float = NOW, **status: Any
) -> Health:
    run = run_of(folder, records, **status)
    return check_health(run, TimeBreakdown.from_run(run), hangs, now)


def test_a_run_without_trouble_is_healthy_and_its_limit_is_named(tmp_path: Path) -> None:
    found = judged(tmp_path, steady())
    assert found.word == "healthy"
    assert found.line == (
        "speed limited by model and device (95 % step, 5 % waiting for data, 0 % evaluating and saving; 1.25 s per step)"
    )


@pytest.mark.parametrize(
    ("more", "part"),
    [
        ({"time/data_wait_fraction": 0.41}, "waits for data 41 % of the time"),
        ({"time/data_wait_fraction": 0.8}, "speed limited by data loading"),
        ({"precision/skipped_steps": 6}, "12 % of steps skipped (6 of 50)"),
        (
            {"time/slowest_rank": 3, "time/straggler_seconds": 0.4},
            "rank 3 is slower than the others by 400 ms per step",
        ),
        ({"data/bad_samples": 32}, "32 bad samples left out (1 %)"),
        ({"train/loss": None}, "50 of 50 logged losses were not finite"),
        ({"time/step_seconds_p50": 0.1, "time/step_seconds_p95": 0.5}, "5 % of the steps take more than 500 ms"),
    ],
)
def test_problems_are_in_the_line(tmp_path: Path, more: dict[str, Any], part: str) -> None:
    found = judged(tmp_path, steady(**more))
    assert found.word == "needs attention"
    assert part in found.line


def test_the_speed_of_a_run_of_seconds_is_not_judged(tmp_path: Path) -> None:
    slow = {"time/data_wait_fraction": 0.9, "time/step_seconds_p50": 0.1, "time/step_seconds_p95": 0.5}
    found = judged(tmp_path / "short", steady(20, **slow), restarts=1)
    assert found.word == "healthy"
    assert "too short to judge the speed: 25 s of training" in found.line
    assert judged(tmp_path / "long", steady(50, **slow)).word == "needs attention"


@pytest.mark.parametrize(
    "more",
    [
        {"precision/skipped_steps": 5},
        {"data/bad_samples": 1},
        {"time/slowest_rank": 3, "time/straggler_seconds": 0.001},
        {"time/step_seconds_p50": 0.1, "time/step_seconds_p95": 0.15},
    ],
)
def test_what_happens_in_healthy_runs_is_a_finding_but_no_warning(tmp_path: Path, more: dict[str, Any]) -> None:
    found = judged(tmp_path, steady(**more))
    assert found.word == "healthy"
    assert len(found.findings) >= len(judged(tmp_path / "plain", steady()).findings)


def test_ranks_that_are_slowest_by_turns_are_no_stragglers(tmp_path: Path) -> None:
    records = [
        record | {"time/slowest_rank": record["step"] % 4} for record in steady(**{"time/straggler_seconds": 0.4})
    ]
    assert judged(tmp_path, records).word == "healthy"


def test_a_loss_that_rose_is_named(tmp_path: Path) -> None:
    records = [record | {"train/loss": 0.1 * record["step"]} for record in steady(100)]
    assert "training loss rose from 0.55 to 9.55" in judged(tmp_path, records).line


def test_a_failed_run_is_not_healthy_and_says_why(tmp_path: Path) -> None:
    found = judged(tmp_path, steady(), state="failed", reason="rank 1 failed: ValueError: no")
    assert found.word == "not healthy"
    assert found.findings[0].text == "failed: rank 1 failed: ValueError: no"


@pytest.mark.parametrize(("ago", "word"), [(60.0, "healthy"), (3600.0, "needs attention")])
def test_a_running_run_that_writes_nothing_needs_a_look(tmp_path: Path, ago: float, word: str) -> None:
    assert judged(tmp_path, steady(), now=NOW + ago, state="running", time=NOW).word == word


def test_a_killed_run_needs_a_look(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    assert "status.json says running, but no process" in judged(tmp_path, steady(), state="running", time=NOW).line


def test_the_newest_hang_is_named_with_its_reason(tmp_path: Path) -> None:
    hang = Hang("2026-11-21 06:35:50", "rank 1: nothing has moved for 4 s", ("rank 1, step 110: in _strike",))
    assert "hung at 2026-11-21 06:35:50 (rank 1: nothing has moved for 4 s)" in judged(tmp_path, steady(), (hang,)).line


def test_restarts_that_cost_much_are_named(tmp_path: Path) -> None:
    records = steady()
    for record in records[25:]:
        record |= {"time/restarts": 1, "time": record["time"] + 62.5}
    found = judged(tmp_path, records, restarts=1, lost_seconds=2.0, down_seconds=3.0)
    assert "1 restart took 50 % of the time: 2 s of training repeated, 3 s not running" in found.line


def test_restarts_of_a_run_without_step_times_have_no_share(tmp_path: Path) -> None:
    found = judged(tmp_path, [{"step": 1, "train/loss": 1.0}], restarts=2, lost_seconds=2.0, down_seconds=90.0)
    assert found.findings[-1].text == "2 restarts: 2 s of training repeated, 0:01:30 not running"


def test_a_status_of_nonsense_is_no_error(tmp_path: Path) -> None:
    found = judged(tmp_path, [{"step": 1, "time": "x"}], state="running", time="x", restarts=float("inf"), reason=[1])
    assert found.word == "needs attention"
    assert "nothing was written for an unknown time" in found.line
