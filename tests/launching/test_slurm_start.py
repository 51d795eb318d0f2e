"""Runs as jobs in a pool, with commands of SLURM that are small scripts: the queue is the folder ``queue``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dtrain.launching import slurm
from dtrain.launching.job import FAILED, FINISHED, STOPPED, Job
from dtrain.launching.slurm import SlurmStart
from dtrain.tracking.run_dir import write_status
from tests.launching.compose import single
from tests.refusals import refused

_COMMANDS = {
    "sbatch": 'n=$(ls "$QUEUE" | wc -l); echo RUNNING n1 >"$QUEUE/$((n + 7))"; echo "$((n + 7))"',
    "squeue": 'if [ -e "$QUEUE.down" ]; then echo "Unable to contact slurm controller" >&2; exit 1; fi; '
    'cat "$QUEUE/${3#--jobs=}" 2>/dev/null || { echo "Invalid job id specified" >&2; exit 1; }',
    "scancel": 'rm "$QUEUE/$1"',
}


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a file for each job that waits or runs, named by its id."""
    (tmp_path / "bin").mkdir()
    for name, body in _COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "queue").mkdir()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("QUEUE", str(tmp_path / "queue"))
    monkeypatch.setattr(slurm, "SECONDS_BETWEEN_SQUEUE", 0.0)
    return tmp_path / "queue"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return single("launch=slurm", "experiment=digits", f"run.dir={tmp_path / 'r'}")


def test_a_job_runs_until_the_queue_does_not_have_it_twice(queue: Path, job: Job) -> None:
    start = SlurmStart(job)
    assert [path.name for path in queue.iterdir()] == ["7"]
    assert start.result() is None
    (queue / "7").unlink()
    assert start.result() is None  # a requeued job may be absent for a moment
    write_status(job.run.dir, "finished", 3)
    result = start.result()
    assert result is not None
    assert result.code == FINISHED


def test_a_job_without_a_status_has_failed(queue: Path, job: Job) -> None:
    start = SlurmStart(job)
    (queue / "7").unlink()
    start.result()
    result = start.result()
    assert result is not None
    assert result.code == FAILED


def test_a_job_of_an_earlier_command_is_taken_over(queue: Path, job: Job) -> None:
    SlurmStart(job)
    SlurmStart(job)
    assert [path.name for path in queue.iterdir()] == ["7"]


def test_a_queue_that_does_not_answer_neither_ends_a_job_nor_allows_a_second_one(queue: Path, job: Job) -> None:
    start = SlurmStart(job)
    down = queue.with_name("queue.down")
    down.touch()
    assert [start.result() for _ in range(3)] == [None] * 3
    for ask in (slurm.refuse_second_job, slurm.queued_job):
        with refused(slurm.NoAnswer, "run.dir", "job 7", "Run the command again"):
            ask(job.run.dir)
    with refused(slurm.NoAnswer, "run.dir", "job 7", "Run the command again"):
        SlurmStart(job)
    assert slurm.active_job(job.run.dir) is None
    down.unlink()
    assert start.result() is None
    assert [path.name for path in queue.iterdir()] == ["7"]


def test_a_job_that_hands_over_while_it_is_killed_is_followed(queue: Path, job: Job, tmp_path: Path) -> None:
    start = SlurmStart(job)
    (queue / "8").write_text("PENDING (Dependency)")
    scancel = tmp_path / "bin" / "scancel"
    scancel.write_text(f'#!/bin/sh\nrm "$QUEUE/$1"; echo 8 >"{job.run.dir}/.job"\n')
    start.kill()
    assert list(queue.iterdir()) == []


def test_stop_cancels_a_waiting_job_and_asks_a_running_one(queue: Path, job: Job) -> None:
    start = SlurmStart(job)
    start.stop()
    assert (job.run.dir / "STOP").exists()
    assert (queue / "7").exists()

    (job.run.dir / "STOP").unlink()
    (queue / "7").write_text("PENDING (Priority)")
    start = SlurmStart(job)
    start.stop()
    assert not (job.run.dir / "STOP").exists()
    assert list(queue.iterdir()) == []
    start.result()
    result = start.result()
    assert result is not None
    assert result.code == STOPPED
