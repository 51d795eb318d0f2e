"""The verdict names what is wrong and what limits a run, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dtrain.tracking.report.health import Health, health
from dtrain.tracking.report.times import Times
from dtrain.tracking.report.trouble import Hang
from tests.tracking.report.runs_for_tests import run_of, steady

NOW = 1e9 + 10


def judged(
    folder: Path, records: list[dict[str, Any]], hangs: tuple[Hang, ...] = (), now: float = NOW, **status: Any
) -> Health:
    run = run_of(folder, records, **status)
    return health(run, Times.of(run), hangs, now)


def test_a_run_without_trouble_is_healthy_and_its_limit_is_named(tmp_path: Path) -> None:
    found = judged(tmp_path, steady())
    assert found.word == "healthy"
    assert found.line == (
        "model and device limit its speed (95 % step, 5 % waiting for data, 0 % evaluating and saving; 125 ms a step)"
    )


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"time/data_wait_fraction": 0.41}, "waits for data 41 % of the time"),
        ({"time/data_wait_fraction": 0.8}, "the data limit its speed"),
        ({"precision/skipped_steps": 6}, "12 % of steps skipped (6 of 50)"),
        ({"time/slowest_rank": 3, "time/straggler_seconds": 0.04}, "rank 3 is slower than the others by 40 ms a step"),
        ({"data/bad_samples": 32}, "32 bad samples left out (1 %)"),
        ({"train/loss": None}, "50 of 50 logged losses were not finite"),
        ({"time/step_seconds_p50": 0.1, "time/step_seconds_p95": 0.5}, "5 % of them take more than 500 ms"),
    ],
)
def test_what_is_wrong_is_said_in_the_line(tmp_path: Path, more: dict[str, Any], told: str) -> None:
    found = judged(tmp_path, steady(**more))
    assert found.word == "needs a look"
    assert told in found.line


@pytest.mark.parametrize(
    "more",
    [
        {"precision/skipped_steps": 5},
        {"data/bad_samples": 1},
        {"time/slowest_rank": 3, "time/straggler_seconds": 0.001},
        {"time/step_seconds_p50": 0.1, "time/step_seconds_p95": 0.15},
    ],
)
def test_what_happens_in_healthy_runs_is_said_but_raises_no_alarm(tmp_path: Path, more: dict[str, Any]) -> None:
    found = judged(tmp_path, steady(**more))
    assert found.word == "healthy"
    assert len(found.findings) >= len(judged(tmp_path / "plain", steady()).findings)


def test_a_rank_that_is_slowest_by_turns_is_no_straggler(tmp_path: Path) -> None:
    records = [
        record | {"time/slowest_rank": record["step"] % 4} for record in steady(**{"time/straggler_seconds": 0.04})
    ]
    assert judged(tmp_path, records).word == "healthy"


def test_a_loss_that_rose_is_said(tmp_path: Path) -> None:
    records = [record | {"train/loss": 0.1 * record["step"]} for record in steady(100)]
    assert "training loss rose from 0.55 to 9.55" in judged(tmp_path, records).line


def test_a_failed_run_is_not_healthy_and_says_why(tmp_path: Path) -> None:
    found = judged(tmp_path, steady(), state="failed", reason="rank 1 failed: ValueError: no")
    assert found.word == "not healthy"
    assert found.findings[0].text == "failed: rank 1 failed: ValueError: no"


@pytest.mark.parametrize(("ago", "word"), [(60.0, "healthy"), (3600.0, "needs a look")])
def test_a_run_that_says_it_runs_needs_a_sign_of_life(tmp_path: Path, ago: float, word: str) -> None:
    assert judged(tmp_path, steady(), now=NOW + ago, state="running", time=NOW).word == word


def test_a_run_that_says_it_runs_but_let_go_of_its_lock_does_not(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    assert "says it runs, but nothing trains it here" in judged(tmp_path, steady(), state="running", time=NOW).line


def test_a_hang_is_said_with_who_declared_it(tmp_path: Path) -> None:
    hang = Hang("2026-11-21 06:35:50", "rank 1: nothing has moved for 4 s", "rank 1, step 110: in _strike", "[]")
    assert "hung at 2026-11-21 06:35:50 (rank 1: nothing has moved for 4 s)" in judged(tmp_path, steady(), (hang,)).line


def test_restarts_that_cost_much_are_said(tmp_path: Path) -> None:
    records = steady()
    for record in records[25:]:
        record |= {"time/restarts": 1, "time": record["time"] + 6.25}
    found = judged(tmp_path, records, restarts=1, lost_seconds=2.0, down_seconds=3.0)
    assert "1 restart took 50 % of the time: 2 s of training done again, 3 s between the starts" in found.line


def test_restarts_of_a_run_that_recorded_no_times_are_said_without_a_share(tmp_path: Path) -> None:
    found = judged(tmp_path, [{"step": 1, "train/loss": 1.0}], restarts=2, lost_seconds=2.0, down_seconds=90.0)
    assert found.findings[-1].text == "2 restarts: 2 s of training done again, 0:01:30 between the starts"


def test_a_status_of_nonsense_is_no_error(tmp_path: Path) -> None:
    found = judged(tmp_path, [{"step": 1, "time": "x"}], state="running", time="x", restarts=float("inf"), reason=[1])
    assert found.word == "needs a look"
    assert "no sign of life for an unknown time" in found.line
