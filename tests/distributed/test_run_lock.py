from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dtrain.config.errors import ConfigError
from dtrain.distributed import run_lock
from dtrain.distributed.run_lock import RunLock

HOLDER = """
import os, sys, time
from pathlib import Path
from dtrain.distributed.run_lock import RunLock
lock = RunLock(Path(sys.argv[1]), print)
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(30)  # as a loader worker that outlives its parent for a while
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


def test_a_second_job_is_refused_and_told_who_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "_WAIT_HERE", 0.1)
    process = holder(tmp_path)
    told: list[str] = []
    try:
        with pytest.raises(ConfigError, match=f"in use by process {process.pid}"):
            RunLock(tmp_path, told.append)
        assert len(told) == 1
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("child", ["", "fork"])
def test_the_lock_of_a_killed_job_is_no_trap(tmp_path: Path, child: str) -> None:
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
