from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

WORKER = """
import time
from dtrain.distributed import orphan
if {polling}:
    orphan.sys.platform, orphan._LOOK_EVERY = "another", 0.05
orphan.end_with_torchrun({environment})
print("ready", flush=True)
time.sleep(60)
"""
AGENT = """
import subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
worker.stdout.readline()
print(worker.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("polling", [False, True], ids=["by the kernel", "by a thread"])
def test_a_worker_ends_with_a_killed_torchrun(polling: bool) -> None:
    assert ends_with_its_parent({"TORCHELASTIC_RUN_ID": "one"}, polling, patience=30)


def test_a_process_that_torchrun_did_not_start_outlives_its_parent() -> None:
    assert not ends_with_its_parent({}, False, patience=0.3)


@pytest.mark.parametrize(("first", "code"), [("an init", 1), ("python torchrun", 0)])
def test_a_worker_whose_torchrun_died_before_it_could_look_ends_at_once(first: str, code: int) -> None:
    worker = (
        "import os; from dtrain.distributed import orphan; os.getppid = lambda: 1; "
        f"orphan._first_process_is_python = lambda: 'python' in {first!r}; "
        "orphan.end_with_torchrun({'TORCHELASTIC_RUN_ID': 'one'})"
    )
    assert subprocess.run([sys.executable, "-c", worker], timeout=50, check=False).returncode == code


def test_a_process_ends_though_the_one_that_it_follows_was_gone_before_it_looked() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    follower = f"import time; from dtrain.distributed.orphan import end_with; end_with({gone.pid}); time.sleep(60)"
    assert subprocess.run([sys.executable, "-c", follower], timeout=50, check=False).returncode == 1


def test_a_process_ends_with_the_one_that_it_follows_though_nobody_asks_how_that_ended() -> None:
    zombie = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    zombie.kill()
    follower = f"import time; from dtrain.distributed.orphan import end_with; end_with({zombie.pid}); time.sleep(60)"
    assert subprocess.run([sys.executable, "-c", follower], timeout=50, check=False).returncode == 1
    zombie.wait()


def ends_with_its_parent(environment: dict[str, str], polling: bool, patience: float) -> bool:
    worker = WORKER.format(environment=environment, polling=polling)
    agent = subprocess.Popen([sys.executable, "-c", AGENT, worker], stdout=subprocess.PIPE)
    assert agent.stdout is not None
    pid = int(agent.stdout.readline())
    agent.kill()
    agent.wait()
    agent.stdout.close()
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        if not alive(pid):
            return True
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return False


def alive(pid: int) -> bool:
    """Whether it runs; an orphan that has ended may stay a zombie for as long as its new parent likes."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.strip().startswith("Z")
