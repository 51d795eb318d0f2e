"""Runs as jobs in a pool, with commands of SLURM that are small scripts: the queue is the folder ``queue``."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from dtrain.errors import ConfigError
from dtrain.launch import commands, slurm
from dtrain.launch.job import FAILED, FINISHED, STOPPED, Job
from dtrain.launch.slurm import SlurmStart
from dtrain.runs.run_dir import write_status
from tests.launch.compose import single, sweep
from tests.refusals import refused

_COMMANDS = {
    "sbatch": 'n=$(ls "$QUEUE" | wc -l); echo RUNNING n1 >"$QUEUE/$((n + 7))"; echo "$((n + 7)) $2" >>"$QUEUE.scripts"; '
    'echo "$((n + 7))"',
    "squeue": 'if [ -e "$QUEUE.down" ]; then echo "Unable to contact slurm controller" >&2; exit 1; fi; '
    'if [ "$3" = --me ]; then cat "$QUEUE.scripts" 2>/dev/null; exit 0; fi; '
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
    write_status(job.spec.dir, "finished", 3)
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
            ask(job.spec.dir)
    with refused(slurm.NoAnswer, "run.dir", "job 7", "Run the command again"):
        SlurmStart(job)
    assert slurm.active_job(job.spec.dir) is None
    down.unlink()
    assert start.result() is None
    assert [path.name for path in queue.iterdir()] == ["7"]


def test_a_job_that_hands_over_while_it_is_killed_is_followed(queue: Path, job: Job, tmp_path: Path) -> None:
    start = SlurmStart(job)
    (queue / "8").write_text("PENDING (Dependency)")
    scancel = tmp_path / "bin" / "scancel"
    scancel.write_text(f'#!/bin/sh\nrm "$QUEUE/$1"; echo 8 >"{job.spec.dir}/.job"\n')
    start.kill()
    assert list(queue.iterdir()) == []


def test_misses_of_a_job_in_the_queue_do_not_add_up(queue: Path, job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    start = SlurmStart(job)
    known = slurm.queued_job(job.spec.dir)
    answers = iter([None, known] * 3)
    monkeypatch.setattr(slurm, "queued_job", lambda run_dir: next(answers))
    assert [start.result() for _ in range(6)] == [None] * 6


@pytest.mark.slow
def test_if_sbatch_refuses_a_run_of_a_sweep_the_jobs_before_it_are_cancelled(queue: Path, tmp_path: Path) -> None:
    jobs = sweep("launch=slurm", "experiment=digits", f"run.dir={tmp_path / 'r'}", "run.seed=1,2,3")
    sbatch = tmp_path / "bin" / "sbatch"
    sbatch.write_text(sbatch.read_text().replace("n=$(", '[ -e "$QUEUE/8" ] && { echo no >&2; exit 1; }; n=$(', 1))
    (tmp_path / "bin" / "scancel").write_text('#!/bin/sh\necho "$@" >"$QUEUE.cancelled"\n')
    with refused(ConfigError, "sbatch refused", "no"):
        slurm.launch(jobs)
    assert queue.with_name("queue.cancelled").read_text().split() == ["7", "8"]


# -- two submissions of one run


def test_of_two_submissions_at_once_one_is_refused_and_changes_nothing(queue: Path, job: Job, tmp_path: Path) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    slow = 'touch "$QUEUE.begun"; while [ ! -e "$QUEUE.go" ]; do sleep 0.01; done; n=$('
    sbatch.write_text(sbatch.read_text().replace("n=$(", slow, 1))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(slurm.launch, [job])
        while not queue.with_name("queue.begun").exists():
            time.sleep(0.01)
        before = files(job.spec.dir)
        for submit in (lambda: slurm.launch([job]), lambda: SlurmStart(job), lambda: run_command("resume", job)):
            with refused(ConfigError, "run.dir", job.spec.dir, "launch status"):
                submit()
        assert files(job.spec.dir) == before
        queue.with_name("queue.go").touch()
        assert first.result()[0].state == "job 7"
    before = files(job.spec.dir)
    with refused(slurm.HasJob, "run.dir", "job 7", "scancel 7"):
        slurm.launch([job])
    assert files(job.spec.dir) == before
    assert [path.name for path in queue.iterdir()] == ["7"]


def run_command(name: str, job: Job) -> int:
    return commands.run_command([name, str(job.spec.dir)], lambda arguments: FAILED)


def files(folder: Path) -> dict[Path, tuple[int, int]]:
    """Each file with its inode and the time of its last change."""
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in folder.rglob("*") if path.is_file()}


def test_the_lock_of_a_submission_outlives_a_launcher_that_is_killed(queue: Path, job: Job, tmp_path: Path) -> None:
    sbatch = tmp_path / "bin" / "sbatch"
    slow = 'touch "$QUEUE.begun"; while [ ! -e "$QUEUE.go" ]; do sleep 0.01; done; n=$('
    sbatch.write_text(sbatch.read_text().replace("n=$(", slow, 1))
    if (launcher := os.fork()) == 0:
        try:
            slurm.launch([job])
        finally:
            os._exit(1)
    while not queue.with_name("queue.begun").exists():
        time.sleep(0.01)
    os.kill(launcher, signal.SIGKILL)
    os.waitpid(launcher, 0)
    with refused(ConfigError, "run.dir", job.spec.dir, "launch status"):
        slurm.launch([job])
    queue.with_name("queue.go").touch()
    lock = job.spec.dir / ".submit.lock"
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_SH)  # until sbatch has exited
    with refused(slurm.HasJob, "run.dir", "job 7", "scancel 7"):
        slurm.launch([job])
    assert [path.name for path in queue.iterdir()] == ["7"]


def test_a_job_whose_launcher_was_killed_before_it_recorded_it_is_found(queue: Path, job: Job) -> None:
    SlurmStart(job)
    (job.spec.dir / ".job").unlink()
    with refused(slurm.HasJob, "run.dir", "job 7", "scancel 7"):
        slurm.launch([job])
    assert slurm.read_job_id(job.spec.dir) == "7"
    (job.spec.dir / ".job").unlink()
    assert SlurmStart(job).result() is None
    assert [path.name for path in queue.iterdir()] == ["7"]


def test_an_array_whose_launcher_was_killed_before_it_recorded_it_is_found(queue: Path, tmp_path: Path) -> None:
    command = ("launch=slurm", "experiment=digits", "launch.max_running=2", f"run.dir={tmp_path / 'r'}", "run.seed=1,2")
    jobs = sweep(*command)
    slurm.launch(jobs)
    for job in jobs:
        (job.spec.dir / ".job").unlink()
    with refused(slurm.HasJob, "run.dir", "job 7", "scancel 7"):
        slurm.launch(jobs)
    assert [path.name for path in queue.iterdir()] == ["7"]


# -- copies


def test_a_copy_of_a_run_does_not_have_the_job_of_the_original(queue: Path, job: Job, tmp_path: Path) -> None:
    SlurmStart(job)
    (queue / "7").write_text("PENDING (JobHeldUser)")
    copy = replace(job, spec=replace(job.spec, dir=tmp_path / "copy"))
    shutil.copytree(job.spec.dir, copy.spec.dir)
    with refused(ConfigError, copy.spec.dir, "nothing to stop"):
        run_command("stop", copy)
    with refused(ConfigError, copy.spec.dir / "job.sbatch", "copy", "run.dir"):
        run_command("resume", copy)
    assert [path.name for path in queue.iterdir()] == ["7"]
    slurm.launch([copy])
    assert [slurm.read_job_id(each.spec.dir) for each in (job, copy)] == ["7", "8"]
    (tmp_path / "link").symlink_to(job.spec.dir)
    assert slurm.read_job_id(tmp_path / "link") == "7"


@pytest.mark.parametrize("content", [b"\xff\xfe", b"--all\n", b"folder", b"pipe", b"loop"])
def test_a_damaged_job_file_is_named(queue: Path, job: Job, content: bytes) -> None:
    job.spec.dir.mkdir()
    path = job.spec.dir / ".job"
    if content == b"folder":
        path.mkdir()
    elif content == b"pipe":
        os.mkfifo(path)
    elif content == b"loop":
        path.symlink_to(path)
    else:
        path.write_bytes(content)
    with refused(ConfigError, path, "", "delete the file"):
        slurm.launch([job])
    assert slurm.active_job(job.spec.dir) is None


def test_stop_cancels_a_waiting_job_and_asks_a_running_one(queue: Path, job: Job) -> None:
    start = SlurmStart(job)
    start.stop()
    assert (job.spec.dir / "STOP").exists()
    assert (queue / "7").exists()

    (job.spec.dir / "STOP").unlink()
    start.stop()
    assert not (job.spec.dir / "STOP").exists()  # it is saving
    (job.spec.dir / ".lock").write_text('{"pid": 3}')  # another process had the run, and has read the file
    start.stop()
    assert (job.spec.dir / "STOP").exists()

    (job.spec.dir / "STOP").unlink()
    (queue / "7").write_text("PENDING (Priority)")
    start = SlurmStart(job)
    start.stop()
    assert not (job.spec.dir / "STOP").exists()
    assert list(queue.iterdir()) == []
    start.result()
    result = start.result()
    assert result is not None
    assert result.code == STOPPED
