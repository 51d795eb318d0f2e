from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from dtrain.distributed import lock
from dtrain.distributed.lock import RunLock, run_lock
from dtrain.distributed.process_group import process_group
from dtrain.errors import ConfigError
from dtrain.runs.run_dir import is_trained
from tests.refusals import refused
from tests.whole_runs import tree

HOLDER = """
import os, sys, time
from pathlib import Path
from dtrain.distributed.lock import RunLock
lock = RunLock(Path(sys.argv[1]), print)
lock.acquire()
lock.claim()
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(600)  # like a loader worker that outlives its parent for a while
    os._exit(0)
print("held", flush=True)
time.sleep(600)
"""


def holder(run_dir: Path, child: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir), child], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def claimed(run_dir: Path) -> RunLock:
    one = RunLock(run_dir, print)
    one.acquire()
    one.claim()
    return one


@pytest.mark.parametrize("started", [True, False])
def test_an_error_after_the_start_leaves_the_lock_to_the_end_of_the_process(tmp_path: Path, started: bool) -> None:
    (tmp_path / ".lock").touch()
    with process_group(timeout=5), suppress(ZeroDivisionError), run_lock(RunLock(tmp_path, print)) as claim:
        if started:
            claim()
        raise ZeroDivisionError
    # A thread may still be writing a checkpoint, so no other job may start. A job that has not started has none.
    assert is_trained(tmp_path) is started


@pytest.mark.slow
def test_a_second_job_is_refused_with_the_process_that_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_WAIT_HERE", 0.1)
    process = holder(tmp_path)
    notes: list[str] = []
    before = tree(tmp_path)
    try:
        with refused(ConfigError, "run.dir", f"process {process.pid}", "use a different run.dir"):
            RunLock(tmp_path, notes.append).acquire()
        assert len(notes) == 1
        assert tree(tmp_path) == before
    finally:
        process.kill()
        process.wait()


class Clock:
    """Seconds that pass in a sleep only."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    strftime = staticmethod(time.strftime)


@pytest.mark.parametrize(("host", "waits"), [(socket.gethostname(), lock._WAIT_HERE), ("other", lock._WAIT_ELSEWHERE)])
def test_a_start_waits_longer_for_another_host_and_says_once_what_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str, waits: float
) -> None:
    clock = Clock()
    monkeypatch.setattr(lock, "time", clock)
    monkeypatch.setattr(lock.socket, "gethostname", lambda: host)
    claimed(tmp_path).release()
    holder = claimed(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(lock, "time", clock)
    notes: list[str] = []
    with refused(ConfigError, "run.dir", f"process {os.getpid()} on {host}", "use a different run.dir"):
        RunLock(tmp_path, notes.append).acquire()
    holder.release()
    assert waits <= clock.now <= waits + 1
    assert len(notes) == 1


@pytest.mark.slow
@pytest.mark.parametrize("child", ["", "fork"])
def test_the_lock_of_a_killed_job_can_be_taken(tmp_path: Path, child: str) -> None:
    process = holder(tmp_path, child)
    process.kill()
    process.wait()
    try:
        claimed(tmp_path).release()  # while the child lives on
    finally:
        os.killpg(process.pid, signal.SIGKILL) if child else None


def test_a_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    claimed(tmp_path).release()
    claimed(tmp_path).release()


def test_nothing_is_written_before_the_claim(tmp_path: Path) -> None:
    one = RunLock(tmp_path / "runs" / "new", print)
    one.acquire()
    one.release()
    assert tree(tmp_path) == {}
    claimed(tmp_path).release()
    before = tree(tmp_path)
    one = RunLock(tmp_path, print)
    one.acquire()
    assert tree(tmp_path) == before
    assert is_trained(tmp_path)
    one.release()


def test_of_two_jobs_that_start_the_same_new_run_the_second_is_refused(tmp_path: Path) -> None:
    first, second = (RunLock(tmp_path, print) for _ in range(2))
    first.acquire()
    second.acquire()
    first.claim()
    (tmp_path / "config.yaml").touch()
    first.release()
    with refused(ConfigError, "run.dir", str(tmp_path), "a different run.dir"):
        second.claim()


def test_a_directory_that_cannot_be_written_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    with refused(ConfigError, "run.dir", "file", "choose a different one"):
        RunLock(tmp_path / "file" / "run", print).acquire()
    claimed(tmp_path).release()
    before = tree(tmp_path)
    with monkeypatch.context() as patch, refused(ConfigError, "run.dir", tmp_path, "choose a different one"):
        patch.setattr(os, "access", lambda path, mode: False)  # a read-only file system
        RunLock(tmp_path, print).acquire()
    assert tree(tmp_path) == before
    if os.getuid():  # root may write everywhere
        (tmp_path / "locked").mkdir(mode=0o555)
        with refused(ConfigError, "run.dir", "locked", "choose a different one"):
            RunLock(tmp_path / "locked" / "run", print).acquire()


def test_a_lock_file_that_is_a_link_is_refused_and_what_it_leads_to_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("untouched")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(tmp_path / "other")
    with refused(ConfigError, "run.dir", ".lock", "Delete or replace it"):
        RunLock(tmp_path / "run", print).acquire()
    assert (tmp_path / "other").read_text() == "untouched"


def test_two_runs_in_one_process_take_the_lock_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(lock, "_WAIT_HERE", 0.0)
    with process_group(timeout=20):
        for _ in range(2):
            with run_lock(RunLock(tmp_path, print)) as claim:
                claim()
                assert is_trained(tmp_path)
            assert not is_trained(tmp_path)
        with pytest.raises(ZeroDivisionError), run_lock(RunLock(tmp_path, print)):  # refused before it has started
            raise ZeroDivisionError
        assert not is_trained(tmp_path)


def test_a_file_system_without_locks_is_used_with_a_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(error: int) -> None:
        def flock(file: object, operation: int) -> None:
            raise OSError(error, os.strerror(error))

        monkeypatch.setattr(lock.fcntl, "flock", flock)

    notes: list[str] = []
    refuse(errno.ENOLCK)
    one = RunLock(tmp_path, notes.append)
    one.acquire()
    one.claim()
    one.release()
    assert str(os.getpid()) in (tmp_path / ".lock").read_text()
    assert len(notes) == 1
    refuse(errno.EIO)
    with refused(ConfigError, "run.dir", os.strerror(errno.EIO), "choose a different one"):
        RunLock(tmp_path, notes.append).acquire()
