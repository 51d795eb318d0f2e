"""How a run stands is told from what it left, also if it could leave next to nothing."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import Any

import pytest

from dtrain.tracking.history import History
from dtrain.tracking.report.standing import state, told
from tests.tracking.report.runs_for_tests import point_of


@pytest.mark.parametrize(
    ("results", "status", "words"),
    [
        ([0.5], {}, "finished"),
        ([], {}, "finished, nothing logged"),
        ([0.5], {"state": "failed", "reason": "rank 1:\nno"}, "failed: rank 1:?no"),
        ([], {"state": "stopped", "reason": "SIGTERM"}, "stopped: SIGTERM, nothing logged"),
        ([0.5], {"state": "running"}, "running"),
    ],
)
def test_state_reason_and_what_is_missing_are_in_one_line(
    tmp_path: Path, results: list[float], status: dict[str, Any], words: str
) -> None:
    assert told(point_of(tmp_path, {}, results, **status)) == words


def test_a_run_that_let_go_of_its_lock_without_a_last_word_was_killed(tmp_path: Path) -> None:
    run = point_of(tmp_path, {}, [0.5], state="running")
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert state(run) == "running"
    assert state(run) == "killed"


@pytest.mark.parametrize(
    ("traces", "words"),
    [
        ([".job"], "queued"),
        ([".job", "logs/torchrun/x"], "starting, or failed before its first step"),
        ([".lock", "logs/torchrun/x"], "failed before its first step"),
        (["config.yaml"], "not begun"),
    ],
)
def test_before_the_first_status_the_traces_of_a_start_tell(tmp_path: Path, traces: list[str], words: str) -> None:
    for trace in traces:
        (tmp_path / trace).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / trace).touch()
    assert told(History.read(tmp_path, "run")) == f"{words}, nothing logged"


def test_a_run_that_lost_its_status_has_begun(tmp_path: Path) -> None:
    point_of(tmp_path, {}, [0.5])
    (tmp_path / "status.json").write_text("[]")
    assert told(History.read(tmp_path, "run")) == "state unknown"
