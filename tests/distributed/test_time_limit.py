from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from dtrain.config.errors import ConfigError
from dtrain.distributed.stop import StopRequests
from dtrain.distributed.time_limit import Limit, TimeLimit, slurm_seconds_left


def test_a_limit_is_noticed_as_early_as_the_longest_look_and_the_save_need() -> None:
    limit = TimeLimit(Limit("far", 1000.0), Limit("near", 100.0))
    seconds = [0.0]
    limit.save_seconds = lambda: seconds[0]
    assert [limit.reached(now) for now in (0.0, 10.0, 40.0, 45.0)] == [None] * 4  # the longest gap is 30
    assert limit.reached(69.0) is None
    assert limit.reached(70.0) == "near"
    seconds[0] = 10.0
    assert limit.reached(61.0) == "near"
    assert limit.reached(59.0) is None


def test_max_hours_is_a_reason_to_stop_on_rank_zero_alone() -> None:
    environment: dict[str, str] = {}
    first, other = (TimeLimit.of(1e-9, rank, environment) for rank in (0, 1))
    assert StopRequests(None, time_limit=first).reason == "run.max_hours=1e-09"
    assert StopRequests(None, time_limit=other).reason is None
    assert StopRequests(None, time_limit=TimeLimit.of(1.0, 0, environment)).reason is None


def test_a_time_limit_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.max_hours: got 0, want"):
        TimeLimit.of(0, 1, {})


@pytest.mark.parametrize(
    ("answer", "seconds"),
    [
        ("7:05", 425),
        ("1:00:00", 3600),
        ("2-03:04:05", 2 * 86400 + 3 * 3600 + 245),
        ("0:09", 9),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("", None),
    ],
)
def test_slurm_is_asked_for_the_time_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, seconds: float | None
) -> None:
    a_squeue(tmp_path, f"echo '{answer}'")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert slurm_seconds_left({"SLURM_JOB_ID": "17"}) == seconds
    assert (tmp_path / "asked").read_text().split() == ["--noheader", "--jobs", "17", "--format=%L"]


def test_an_array_element_asks_for_itself_and_not_for_the_whole_array(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_squeue(tmp_path, "echo 1:00")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    job = {"SLURM_JOB_ID": "17", "SLURM_ARRAY_JOB_ID": "17", "SLURM_ARRAY_TASK_ID": "3"}
    assert slurm_seconds_left(job) == 60
    assert "17_3" in (tmp_path / "asked").read_text()


def test_a_slurm_that_does_not_answer_sets_no_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a_squeue(tmp_path, "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert slurm_seconds_left({"SLURM_JOB_ID": "17"}) is None
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert slurm_seconds_left({"SLURM_JOB_ID": "17"}) is None


def test_newer_versions_of_slurm_say_the_end_themselves_and_outside_of_a_job_nobody_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def nobody(*args: object, **kwargs: object) -> None:
        raise AssertionError("squeue was asked")

    monkeypatch.setattr(subprocess, "run", nobody)
    left = slurm_seconds_left({"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": str(int(time.time()) + 3600)})
    assert left == pytest.approx(3600, abs=60)
    assert slurm_seconds_left({}) is None


def a_squeue(folder: Path, answers: str) -> None:
    """An executable in the place of SLURM's, which notes how it was called."""
    script = folder / "squeue"
    script.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\n{answers}\n')
    script.chmod(0o755)
