from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtrain.config.errors import ConfigError
from dtrain.distributed import lock
from dtrain.distributed.lock import RunLock
from tests.refusals import refused

HOLDER = """
import os, sys, time
from pathlib import Path
from dtrain.distributed.lock import RunLock
lock = RunLock(Path(sys.argv[1]), print)
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(30)  # like a loader worker that outlives its parent for a while
    os._exit(0)
print("held", flush=True)
time.sleep(30)
"""


def holder(run_dir: Path, child: str = "") -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(run_dir), child], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_job_is_refused_with_the_process_that_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_WAIT_HERE", 0.1)
    process = holder(tmp_path)
    notes: list[str] = []
    try:
        with refused(ConfigError, "in use", f"process {process.pid}"):
            RunLock(tmp_path, notes.append)
        assert len(notes) == 1
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("child", ["", "fork"])
def test_the_lock_of_a_killed_job_can_be_taken(tmp_path: Path, child: str) -> None:
    process = holder(tmp_path, child)
    process.kill()
    process.wait()
    started = time.monotonic()
    RunLock(tmp_path, print).release()
    assert time.monotonic() - started < 5
    os.killpg(process.pid, signal.SIGKILL) if child else None


def test_a_released_lock_can_be_taken_again(tmp_path: Path) -> None:
    RunLock(tmp_path, print).release()
    RunLock(tmp_path, print).release()
